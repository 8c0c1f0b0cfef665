"""The cost of averaging in a training loop: blocking rounds, and fragments whose rounds overlap with training.

Three arms with the same steps: no averaging, one fragment with blocking rounds, and several fragments with rounds that
overlap with training. Two peers behind links on which blocking rounds take at least a quarter of the time. The loops
use the product with the steps of benchmarks/light_loop.py: part of a step is real matrix products, which compete with
the daemons for the CPU, the rest is a sleep, as if for a device. The cost of an arm is the increase of its step time
over the arm without averaging; each value is over `local_steps` steps of the slower peer. Other load on the machine
adds noise to it. The time for which loops were blocked by rounds, recorded with each commit, has no such noise, but
does not include the daemons' CPU time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, Link, unavailable
from benchmarks.light_loop import Loop, products_per_second
from benchmarks.record import Result, parser, report
from benchmarks.swarm_harness import Job, Swarm
from benchmarks.wan.rounds import COORDINATOR, seat

_NUM_PEERS = 2
_TIMEOUT_S = 1200.0
_ROOT = Path(__file__).parent.parent
_LINK = Link(up_mbps=100, down_mbps=100, delay_ms=10)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Parameters of the training and the network."""

    link: Link = _LINK
    megabytes: int = 40
    """2**20 bytes of fp32 weights."""
    local_steps: int = 100
    step_s: float = 0.08
    compute_share: float = 0.3
    """Fraction of a step that uses the CPU."""
    num_fragments: int = 4
    overlap_steps: int = 20
    num_windows: int = 5
    """Windows of `local_steps` steps that are measured, after one for warm-up."""


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--windows", type=int, help="measured stretches of an arm; default 5")
    flags.add_argument("--fragments", type=int, help="default 4")
    flags.add_argument("--overlap-steps", type=int, help="default 20")
    chosen = flags.parse_args()
    if (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.overlap: {reason}")
    setting = Setting()
    if chosen.quick:
        setting = Setting(megabytes=8, local_steps=20, num_fragments=2, overlap_steps=8, num_windows=1)
    setting = replace(
        setting,
        num_windows=chosen.windows or setting.num_windows,
        num_fragments=chosen.fragments or setting.num_fragments,
        overlap_steps=setting.overlap_steps if chosen.overlap_steps is None else chosen.overlap_steps,
    )
    report("overlap", measured(setting), chosen.json)


def measured(setting: Setting) -> list[Result]:
    """Measure all arms, the one without averaging before and after the others."""
    compute_s = setting.compute_share * setting.step_s
    loop = Loop(
        numel=(setting.megabytes << 20) // 4,
        num_layers=4 * setting.num_fragments,
        num_products=round(products_per_second() * compute_s),
        wait_s=setting.step_s - compute_s,
        move_parts=setting.local_steps // setting.num_fragments,
    )
    streaming = (
        "--hv.num-fragments",
        str(setting.num_fragments),
        "--hv.overlap-steps",
        str(setting.overlap_steps),
    )
    with Lab([*[setting.link] * _NUM_PEERS, COORDINATOR]) as lab:
        alone = windows_alone(lab, loop, setting)
        blocking, blocked = windows_in_swarm(lab, loop, setting, 1, ())
        overlapped, hidden = windows_in_swarm(lab, loop, setting, setting.num_fragments, streaming)
        alone += windows_alone(lab, loop, setting)
    streamed = f"{setting.num_fragments} fragments, tau {setting.overlap_steps}"
    return [
        *rows("no averaging", alone, alone, setting),
        *rows("blocking", blocking, alone, setting),
        Result.of("blocking", "stood still", "% of time", blocked),
        *rows(streamed, overlapped, alone, setting),
        Result.of(streamed, "stood still", "% of time", hidden),
    ]


def rows(case: str, windows: Sequence[float], alone: Sequence[float], setting: Setting) -> list[Result]:
    least = statistics.median(alone)
    return [
        Result.of(case, "step", "ms", [1e3 * seconds / setting.local_steps for seconds in windows]),
        Result.of(case, "averaging's part of the time", "%", [100 * (1 - least / s) for s in windows]),
        Result.of(case, "longer than without", "%", [100 * (s / least - 1) for s in windows]),
    ]


def windows_alone(lab: Lab, loop: Loop, setting: Setting) -> list[float]:
    """Seconds of each window of `local_steps` steps without a swarm: the slower of two loops that run concurrently."""
    steps = setting.local_steps
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{peer}.jsonl" for peer in range(_NUM_PEERS)]
        loops = [
            replace(
                loop,
                num_steps=(setting.num_windows + 1) * steps,
                record_steps=steps,
                history=str(path),
            )
            for path in paths
        ]
        processes = [
            lab.popen(
                peer,
                [sys.executable, "-m", "benchmarks.light_loop", json.dumps(asdict(loops[peer]))],
                cwd=_ROOT,
                stdout=subprocess.DEVNULL,
            )
            for peer in range(_NUM_PEERS)
        ]
        for process in processes:
            if process.wait(_TIMEOUT_S) != 0:
                raise SystemExit("a loop without averaging ended with an error")
        return slowest([_times(path, "steps", steps, steps) for path in paths])


def windows_in_swarm(
    lab: Lab, loop: Loop, setting: Setting, num_fragments: int, flags: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """The same in a swarm, and for each window of each peer the percentage of time blocked by rounds."""
    steps_per_epoch = setting.local_steps // num_fragments
    job = Job(
        loop=replace(loop, max_epochs=(setting.num_windows + 1) * num_fragments),
        local_steps=setting.local_steps,
        is_gated=False,
        flags=flags,
    )
    seats = [seat(lab, peer) for peer in range(_NUM_PEERS)]
    with (
        tempfile.TemporaryDirectory() as directory,
        Swarm(job, Path(directory), seats, coordinator=seat(lab, _NUM_PEERS)) as swarm,
    ):
        swarm.wait_for_end()
        paths = [peer.directory / "history.jsonl" for peer in swarm.peers]
        times = [_times(path, "epoch", steps_per_epoch, setting.local_steps) for path in paths]
        blocked = [[record["blocked_s"] for record in peer.epochs.values()] for peer in swarm.peers]
    still = []
    for ends, values in zip(times, blocked, strict=True):
        for number, (earlier, later) in enumerate(itertools.pairwise(ends), start=1):
            rounds = values[number * num_fragments : (number + 1) * num_fragments]
            still.append(100 * sum(rounds) / (later - earlier))
    return slowest(times), still


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between successive times, the maximum over peers."""
    spans = [[later - earlier for earlier, later in itertools.pairwise(peer)] for peer in times]
    return [max(values) for values in zip(*spans, strict=True)]


def _times(path: Path, kind: str, steps_per_record: int, window: int) -> list[float]:
    """The end time of each window of `window` steps."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    found = [record["time"] for record in records if record["kind"] == kind]
    every = window // steps_per_record
    return found[every - 1 :: every]


if __name__ == "__main__":
    main()
