"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time

import benchmarks.simulation
from benchmarks.lab import unavailable
from benchmarks.record import Result, check_kept, parser, report, say
from benchmarks.simulation import lab, published, thousand
from diloco.sim.cost.swarm import simulate

_PARTS = ("published", "scale", "lab", "thousand")


def main() -> None:
    chosen = _arguments()
    parts = tuple(chosen.parts or (("published", "scale") if chosen.quick else ("published", "scale", "lab")))
    if "lab" in parts and (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.simulation: {reason}; --parts published scale does without")
    if "published" in parts:
        rows, table = published.streaming_diloco(("10B",) if chosen.quick else tuple(published.MODELS))
        rows += published.intellect_1()
        report("simulation", rows, chosen.json, extra={"summary": table}, keeps=True)
    if "scale" in parts:
        report("simulation", _scale(), chosen.json, keeps=True)
    if "thousand" in parts:
        started_s = time.process_time()
        figures = simulate(thousand.scenario(), lambda epoch, at_s: say(f"epoch {epoch} at {at_s:.0f} s"))
        rows = thousand.results(figures, time.process_time() - started_s)
        report("simulation", rows, chosen.json, keeps=True)
    if "lab" in parts:
        setting = lab.QUICK if chosen.quick else lab.Setting()
        report("simulation", lab.results(setting), chosen.json, keeps=True)


def _scale() -> list[Result]:
    started_s = time.process_time()
    figures = simulate(published.many_peers())
    case = f"{published.NUM_MANY} peers"
    return [
        Result.of(case, "processor time", "s", [time.process_time() - started_s]),
        Result.of(case, "epochs", "", [float(figures.num_epochs)]),
        Result.of(case, "peers lost", "", [float(figures.losses.peers_lost)]),
        Result.of(case, "utilisation", "", [figures.utilisation]),
    ]


def _arguments() -> argparse.Namespace:
    flags = parser(benchmarks.simulation.__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--parts", nargs="+", choices=_PARTS, metavar="NAME", help=f"of {', '.join(_PARTS)}")
    chosen = flags.parse_args()
    check_kept(flags, "simulation", chosen.json)
    return chosen


if __name__ == "__main__":
    main()
