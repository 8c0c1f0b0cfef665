"""Reinforcement by rollout peers against lock-step, and what is learned from old policies.

*Comparison*: four `diloco peer`, each with the same share of this machine's CPUs and one thread, in lock-step (all
generate and train, and average every five steps) and as one learner with three rollout peers, on the tiny model of
benchmarks/format_model.py. Everything is bound by the CPU, and generation costs about as much as training here. Time
counts from the end of the first step, in which peers wait for each other to start; that step is reported separately.
Rewards are those of all completions that were judged, those that the learner left out included, averaged over the
same number of completions in both arms.

*Staleness* (`--staleness`): see staleness.py. *Push* (`--push`): see push.py.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.format_model import train_format_model
from benchmarks.record import Result, parser, report
from benchmarks.rollouts import comparison, push, shares, staleness
from benchmarks.rollouts.comparison import Setting

TARGET = 0.6


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--path-model", help="a model of benchmarks.format_model; default: train one first")
    flags.add_argument("--target", type=float, default=TARGET, help=f"mean reward; default {TARGET}")
    flags.add_argument("--runs", type=int, default=1, help="repetitions of the comparison")
    flags.add_argument("--staleness", action="store_true", help="measure old policies instead")
    flags.add_argument(
        "--push", action="store_true", help="measure the way of policies to a rollout peer instead"
    )
    chosen = flags.parse_args()
    if chosen.push:
        small = {"num_layers": 2, "num_patches": 1} if chosen.quick else {}
        report("rollouts", push.measured(**small), chosen.json, keeps=True)
        return
    with tempfile.TemporaryDirectory() as name:
        path_model = chosen.path_model or str(
            train_format_model(Path(name) / "model", steps=20 if chosen.quick else 250)
        )
        if chosen.staleness:
            results = staleness.measured(path_model, is_quick=chosen.quick)
        else:
            if (reason := shares.unavailable()) is not None:
                sys.exit(f"benchmarks.rollouts: {reason}")
            setting = Setting(path_model=path_model, target=chosen.target)
            if chosen.quick:
                setting = replace(setting, num_peers=2, num_cores=0.9, target=0.0, window=64)
            results = compared(setting, runs=chosen.runs)
    report("rollouts", results, chosen.json, keeps=True)


def compared(setting: Setting, *, runs: int) -> list[Result]:
    """Run both arms in turn, and compute their ratio; then run one with rollout peers that come and go."""
    found = [(comparison.lock_step(setting), comparison.rollout_peers(setting)) for _ in range(runs)]
    results = [*merged([first for first, _ in found]), *merged([second for _, second in found])]
    ratios = [
        second[0].median / first[0].median
        for first, second in found
        if first[0].unit == second[0].unit == "s"
    ]
    if ratios:
        results.append(Result.of("rollout peers / lock-step", "time to equal reward", "ratio", ratios))
    return [*results, *comparison.rollout_peers(setting, is_disturbed=True)]


def merged(runs: list[list[Result]]) -> list[Result]:
    """One row per metric that all runs have."""
    rows = [{row.metric: row for row in run} for run in runs]
    return [
        Result.of(row.case, row.metric, row.unit, [other[row.metric].median for other in rows])
        for row in runs[0]
        if all(row.metric in other for other in rows)
    ]


if __name__ == "__main__":
    main()
