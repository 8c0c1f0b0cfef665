"""Goodput of light peers under faults, and the time in which the others recover from a death.

    python -m benchmarks.chaos [--minutes 20] [--peers 6] [--mean-seconds-between-faults 10] [--seed 0]
        [--quick]

Real daemons on loopback, each with a worker that sleeps instead of computing, behind proxies that cut, delay and
corrupt connections (benchmarks/chaos/links.py). A run without faults is followed by one with faults. Both are checked
(benchmarks/chaos/history.py); if a guarantee is violated, the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.history import quantile
from benchmarks.chaos.plan import draw
from benchmarks.chaos.run import Outcome, run
from benchmarks.record import Result, parser, report

STEP_S = 0.1
NUMEL = 20_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    seconds: float
    baseline_s: float
    num_peers: int
    mean_s: float
    seed: int
    local_steps: int


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("--minutes", type=float, default=20.0)
    flags.add_argument("--peers", type=int, default=6)
    flags.add_argument("--mean-seconds-between-faults", type=float, default=10.0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--directory", type=Path, help="where what happens is written; default: a temporary one"
    )
    given = flags.parse_args(arguments)
    settings = _settings(given)
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as temporary:
        directory = given.directory or Path(temporary)
        calm, struck = _measured(settings, directory)
    report("chaos", _results(settings, calm, struck), given.json, extra={"notes": _notes(settings, struck)})
    wrong = [*calm.history.faults_found(), *struck.history.faults_found()]
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _settings(given: argparse.Namespace) -> Settings:
    if given.quick:
        return Settings(
            seconds=15.0,
            baseline_s=5.0,
            num_peers=3,
            mean_s=4.0,
            seed=given.seed,
            local_steps=15,
        )
    seconds = 60.0 * given.minutes
    return Settings(
        seconds=seconds,
        baseline_s=min(120.0, seconds / 2),
        num_peers=given.peers,
        mean_s=given.mean_seconds_between_faults,
        seed=given.seed,
        local_steps=50,
    )


def _measured(settings: Settings, directory: Path) -> tuple[Outcome, Outcome]:
    trains = {"numel": NUMEL, "local_steps": settings.local_steps, "step_s": STEP_S}
    faults = draw(
        settings.seed, seconds=settings.seconds, num_peers=settings.num_peers, mean_s=settings.mean_s
    )
    common = {"num_peers": settings.num_peers, **trains}
    calm = run(directory / "calm", seconds=settings.baseline_s, faults=(), **common)
    return calm, run(directory / "struck", seconds=settings.seconds, faults=faults, **common)


def _results(settings: Settings, calm: Outcome, struck: Outcome) -> list[Result]:
    before, history = calm.history, struck.history
    case = f"{settings.num_peers} peers, seed {settings.seed}"
    epoch_s = before.epoch_s()
    goodput = history.tokens_per_live_second() / before.tokens_per_live_second()
    with_starts = history.tokens_per_live_second(from_training=False) / before.tokens_per_live_second()
    recoveries, alone = history.recoveries_s(epoch_s), history.recoveries_s(epoch_s, alone=True)
    rejoins = history.rejoins_s()[settings.num_peers :]
    rows: list[tuple[str, str, list[float]]] = [
        ("goodput", "of no faults", [goodput]),
        ("goodput, starts included", "of no faults", [with_starts]),
        ("epoch without faults", "s", [epoch_s]),
        ("faults", "", [len(history.faults)]),
        ("epochs committed", "", [len(history.chain)]),
        ("forks", "", [history.num_forks]),
        ("tokens lost to forks", "of all", [history.lost_tokens / history.chain[-1]["committed_tokens"]]),
        ("ends unexplained", "", [len(struck.unplanned)]),
        ("checkpoints refused", "", [struck.failed_checkpoints]),
        ("guarantees broken", "", [len(history.faults_found())]),
    ]
    if recoveries:
        rows += [
            ("death to next commit", "s", history.waits_after_deaths_s()),
            ("recovery beyond an epoch", "s", recoveries),
            ("recovery, 95th percentile", "s", [quantile(recoveries, 0.95)]),
        ]
    if alone:
        rows += [
            ("recovery, no other fault", "s", alone),
            ("recovery, no other fault, 95th percentile", "s", [quantile(alone, 0.95)]),
        ]
    if rejoins:
        rows.append(("start to first step", "s", rejoins))
    return [Result.of(case, metric, unit, values) for metric, unit, values in rows]


def _notes(settings: Settings, struck: Outcome) -> list[str]:
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(struck.by_kind.items()))
    return [
        f"{settings.seconds / 60:g} minutes, a fault every {settings.mean_s:g} s on average: {kinds}.",
        "Goodput is committed tokens by the seconds that peers train and are not frozen, against the same without "
        "faults. Recovery is the time between the others' commits around a peer's death, less an epoch's length; other "
        "faults may add to it: a death beside a partition can leave no majority until the partition is over.",
        *struck.unplanned[:5],
    ]


if __name__ == "__main__":
    sys.exit(main())
