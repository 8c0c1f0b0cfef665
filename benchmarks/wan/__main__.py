"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys

import benchmarks.wan
from benchmarks.lab import unavailable
from benchmarks.record import check_kept, parser, report
from benchmarks.wan import join, many, memory, nat, rounds
from benchmarks.wan.cases import cases

_CODECS = ("fp32", "int8", "int4", "topk")
_CASES = ("gigabit", "broadband", "uneven", "many", "nat", "memory", "join")
_QUICK = ("gigabit",)


def main() -> None:
    chosen = _arguments()
    num_rounds = chosen.rounds or (2 if chosen.quick else 5)
    selected = chosen.cases or (_QUICK if chosen.quick else _CASES)
    codecs = tuple(chosen.codecs or (_CODECS[:1] if chosen.quick else _CODECS))
    if (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.wan: {reason}")
    networks = cases(codecs, quick=chosen.quick)
    for name in selected:
        if name == "nat":
            rows = nat.results(num_rounds, quick=chosen.quick)
        elif name == "many":
            rows = many.results(codecs, num_rounds, quick=chosen.quick)
        elif name == "join":
            rows = join.results(quick=chosen.quick)
        elif name == "memory":
            rows = memory.results(codecs, num_rounds, quick=chosen.quick)
        else:
            rows = rounds.results(networks[name], rounds.measured(networks[name], num_rounds))
        report("wan", rows, chosen.json, keeps=True)


def _arguments() -> argparse.Namespace:
    flags = parser(benchmarks.wan.__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--cases", nargs="+", choices=_CASES, metavar="NAME", help=f"of {', '.join(_CASES)}")
    flags.add_argument("--codecs", nargs="+", metavar="NAME", help="default: fp32 int8 int4 topk")
    flags.add_argument("--rounds", type=int, help="of each codec, after two that are not counted")
    chosen = flags.parse_args()
    check_kept(flags, "wan", chosen.json)
    return chosen


if __name__ == "__main__":
    main()
