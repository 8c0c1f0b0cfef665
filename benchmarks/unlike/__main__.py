"""Peers of different speed in one swarm: how busy the fast ones are, and what all of them train together.

    python -m benchmarks.unlike [--seconds 90] [--quick]
    python -m benchmarks.unlike --losses [--seconds 200]

Six peers: five behind links of 50 Mbit/s, one behind a tenth of that. One of the five is four times slower than the
rest. The loops use the product with the steps of benchmarks/light_loop.py, which sleep as if for a device. A peer is
busy while it trains its steps. The steps per second are those of all peers together; all of these steps are averaged.
--losses trains the convergence study's model instead, and compares losses after equal time (losses.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.lab import Lab, unavailable
from benchmarks.light_loop import Loop
from benchmarks.record import Result, parser, report
from benchmarks.swarm_harness import Job
from benchmarks.unlike import losses, peers

_STEP_S = 0.2
_UP_MBPS = 50.0
_WARM_UP_EPOCHS = 4
"""In the first one the peers' speeds are unknown, and all of these are needed to learn waiting times."""
_ARMS = {
    "blocking": (),
    "--hv.local-time auto": ("--hv.local-time", "auto"),
    "and 2 fragments, tau 10": (
        *("--hv.local-time", "auto", "--hv.num-fragments", "2"),
        *("--hv.overlap-steps", "10"),
    ),
    "and --hv.overlap-steps auto": ("--hv.local-time", "auto", "--hv.overlap-steps", "auto"),
}
_WITH_LOSSES = ("blocking", "--hv.local-time auto", "and --hv.overlap-steps auto")


@dataclass(frozen=True, kw_only=True)
class Setting:
    num_peers: int = 6
    megabytes: int = 2
    """2**20 bytes of fp32 weights."""
    local_steps: int = 40
    window_s: float = 90.0


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--seconds", type=float, help="length of each measurement; default 90, with --losses 200"
    )
    flags.add_argument("--losses", action="store_true", help="compare losses after equal time")
    chosen = flags.parse_args()
    if (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.unlike: {reason}")
    if chosen.losses:
        compared = losses.Setting(seconds=chosen.seconds or (12.0 if chosen.quick else 200.0))
        if chosen.quick:
            compared = replace(compared, num_peers=3, seeds=(1,), local_steps=10, eval_tokens=8192)
        rows = losses.measured(compared, {case: _ARMS[case] for case in _WITH_LOSSES})
        report("unlike", rows, chosen.json, keeps=True)
        return
    setting = Setting()
    if chosen.quick:
        setting = Setting(num_peers=3, megabytes=1, local_steps=8, window_s=8.0)
    if chosen.seconds:
        setting = replace(setting, window_s=chosen.seconds)
    report("unlike", measured(setting, quick=chosen.quick), chosen.json, keeps=True)


def measured(setting: Setting, *, quick: bool = False) -> list[Result]:
    rows: list[Result] = []
    with Lab(peers.links(setting.num_peers, _UP_MBPS)) as lab:
        for case, flags in list(_ARMS.items())[: 2 if quick else None]:
            rows += rows_of(case, rates_in_swarm(lab, setting, flags), setting)
    return rows


def rates_in_swarm(lab: Lab, setting: Setting, flags: tuple[str, ...]) -> list[float]:
    """Steps per second of each peer, without the first epochs."""
    loop = Loop(numel=(setting.megabytes << 20) // 4, num_layers=4, wait_s=_STEP_S, max_epochs=1 << 30)
    job = Job(loop=loop, local_steps=setting.local_steps, flags=flags)
    with peers.started(lab, job, setting.num_peers) as swarm:
        swarm.wait_for_epoch(_WARM_UP_EPOCHS)
        time.sleep(setting.window_s)
        # Rates are measured from commit to commit, so wait for the end of the current epoch.
        swarm.wait_for_epoch(1 + max(max(peer.epochs) for peer in swarm.peers))
        return [_steps_per_s(peer.epochs) for peer in swarm.peers]


def _steps_per_s(epochs: dict[int, dict[str, Any]]) -> float:
    known = [record for number, record in sorted(epochs.items()) if number >= _WARM_UP_EPOCHS]
    return float((known[-1]["step"] - known[0]["step"]) / (known[-1]["time"] - known[0]["time"]))


def rows_of(case: str, rates: Sequence[float], setting: Setting) -> list[Result]:
    fast, thin, slow = rates[: setting.num_peers - 2], rates[-2], rates[-1]
    return [
        Result.of(case, "busy, fast peers", "% of time", [100 * rate * _STEP_S for rate in fast]),
        Result.of(case, "busy, behind the thin link", "% of time", [100 * thin * _STEP_S]),
        Result.of(case, "busy, slow peer", "% of time", [100 * slow * peers.SLOWER * _STEP_S]),
        Result.of(case, "all peers", "steps/s", [sum(rates)]),
    ]


if __name__ == "__main__":
    main()
