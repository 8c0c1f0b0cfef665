"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import benchmarks.wan
from benchmarks import plot
from benchmarks.lab import unavailable
from benchmarks.progress import Progress
from benchmarks.record import Result, merged, parser, record, report
from benchmarks.wan import join, memory, nat, rounds
from benchmarks.wan.cases import Case, cases

_CODECS = ("fp32", "int8", "int4", "topk")
_CASES = ("gigabit", "broadband", "uneven", "nat", "memory", "join")
_QUICK = ("gigabit",)


def main() -> None:
    chosen = _arguments()
    num_rounds = chosen.rounds or (2 if chosen.quick else 5)
    selected = chosen.cases or (_QUICK if chosen.quick else _CASES)
    codecs = tuple(chosen.codecs or (_CODECS[:1] if chosen.quick else _CODECS))
    if (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.wan: {reason}")
    networks = cases(codecs, quick=chosen.quick)
    plan: dict[str, float] = {}
    for name in selected:
        if name == "nat":
            plan |= nat.steps(num_rounds, quick=chosen.quick)
        elif name == "join":
            plan |= join.steps(quick=chosen.quick)
        elif name == "memory":
            plan |= memory.steps(codecs, num_rounds, quick=chosen.quick)
        else:
            plan |= rounds.steps(networks[name], num_rounds, rivals=chosen.rivals)
    progress, shown = Progress(plan), dict[str, tuple[float, float, float]]()
    for name in selected:
        if name == "nat":
            rows = nat.results(num_rounds, progress, quick=chosen.quick)
        elif name == "join":
            rows = join.results(progress, quick=chosen.quick)
        elif name == "memory":
            rows = memory.results(codecs, num_rounds, progress, quick=chosen.quick)
        else:
            rows = _on_network(networks[name], num_rounds, progress, rivals=chosen.rivals)
        report("wan", rows, chosen.json, keeps=True)
        shown |= bars(rows)
    if chosen.plot:
        plot.bars(chosen.plot, shown, title="One round, four peers", x_label="seconds")


def _on_network(case: Case, num_rounds: int, progress: Progress, *, rivals: bool) -> list[Result]:
    rows = rounds.results(case, rounds.measured(case, num_rounds, progress, rivals=rivals))
    if rivals:
        seconds = rounds.gloo_s(case, num_rounds, progress)
        rows.append(Result.of(f"{case.name} gloo fp32", "round", "s", seconds))
    return rows


def bars(rows: list[Result]) -> Mapping[str, tuple[float, float, float]]:
    """Median, minimum and maximum of every round time."""
    return {row.case: (row.median, row.min, row.max) for row in rows if row.metric == "round"}


def _arguments() -> argparse.Namespace:
    flags = parser(benchmarks.wan.__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--plot", type=Path, metavar="FILE", help="draw the round times there (svg, png, pdf)")
    flags.add_argument("--cases", nargs="+", choices=_CASES, metavar="NAME", help=f"of {', '.join(_CASES)}")
    flags.add_argument("--codecs", nargs="+", metavar="NAME", help="default: fp32 int8 int4 topk")
    flags.add_argument("--rounds", type=int, help="of each codec, after two that are not counted")
    flags.add_argument("--rivals", action="store_true", help="gloo too, and raw TCP on uneven links")
    chosen = flags.parse_args()
    if chosen.json is not None and chosen.json.exists():
        try:
            merged(json.loads(chosen.json.read_text(encoding="utf-8")), record("wan", []))
        except (ValueError, KeyError) as error:
            flags.error(f"cannot add to {chosen.json}: {error}")
    return chosen


if __name__ == "__main__":
    main()
