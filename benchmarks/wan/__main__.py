"""The command; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import benchmarks.wan
from benchmarks import plot
from benchmarks.lab import unavailable
from benchmarks.record import Result, parser, report
from benchmarks.wan import memory, nat, rounds
from benchmarks.wan.cases import cases

_CODECS = ("fp32", "int8", "int4", "topk")
_CASES = ("gigabit", "broadband", "uneven", "nat", "memory")
_QUICK = ("gigabit",)


def main() -> None:
    chosen = _arguments()
    num_rounds = chosen.rounds or (2 if chosen.quick else 5)
    selected = chosen.cases or (_QUICK if chosen.quick else _CASES)
    codecs = tuple(chosen.codecs or (_CODECS[:1] if chosen.quick else _CODECS))
    if (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.wan: {reason}")
    networks = cases(codecs, quick=chosen.quick)
    rows: list[Result] = []
    for name in selected:
        if name == "nat":
            rows += nat.results(num_rounds, quick=chosen.quick)
        elif name == "memory":
            rows += memory.results(codecs, num_rounds, quick=chosen.quick)
        else:
            rows += rounds.results(networks[name], rounds.measured(networks[name], num_rounds))
            if not chosen.quick:
                seconds = rounds.gloo_s(networks[name], num_rounds)
                rows.append(Result.of(f"{name} gloo fp32", "round", "s", seconds))
    report("wan", rows, chosen.json)
    if chosen.plot:
        plot.bars(chosen.plot, bars(rows), title="One round, four peers", x_label="seconds")


def bars(rows: list[Result]) -> Mapping[str, tuple[float, float, float]]:
    """Median, least and greatest of every round time."""
    return {row.case: (row.median, row.min, row.max) for row in rows if row.metric == "round"}


def _arguments() -> argparse.Namespace:
    flags = parser(benchmarks.wan.__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--plot", type=Path, metavar="FILE", help="draw the round times there (svg, png, pdf)")
    flags.add_argument("--cases", nargs="+", choices=_CASES, metavar="NAME", help=f"of {', '.join(_CASES)}")
    flags.add_argument("--codecs", nargs="+", metavar="NAME", help="default: fp32 int8 int4 topk")
    flags.add_argument("--rounds", type=int, help="of each codec, after a first that is not counted")
    return flags.parse_args()


if __name__ == "__main__":
    main()
