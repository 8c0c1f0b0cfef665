"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import benchmarks.simulation
from benchmarks.lab import unavailable
from benchmarks.progress import Progress
from benchmarks.record import Result, merged, parser, record, report
from benchmarks.simulation import lab, published, thousand
from diloco.sim.cost.swarm import simulate

_PARTS = ("published", "scale", "lab", "thousand")
_MANY = f"{published.NUM_MANY} peers"


def main() -> None:
    chosen = _arguments()
    setting = lab.QUICK if chosen.quick else lab.Setting()
    parts = tuple(chosen.parts or (("published", "scale") if chosen.quick else ("published", "scale", "lab")))
    if "lab" in parts and (reason := unavailable()) is not None:
        sys.exit(f"benchmarks.simulation: {reason}; --parts published scale does without")
    sizes = ("10B",) if chosen.quick else tuple(published.MODELS)
    plan = {f"Streaming DiLoCo {size}": 2.0 for size in sizes} | {"INTELLECT-1": 1.0}
    plan = plan if "published" in parts else {}
    plan |= {_MANY: 30.0} if "scale" in parts else {}
    plan |= {"1000 peers": 3600.0} if "thousand" in parts else {}
    plan |= lab.steps(setting) if "lab" in parts else {}
    progress = Progress(plan)
    if "published" in parts:
        _published(sizes, progress, chosen.json)
    if "scale" in parts:
        report("simulation", _scale(progress), chosen.json, keeps=True)
    if "thousand" in parts:
        started_s = time.process_time()
        figures = simulate(thousand.scenario(), _epoch_done)
        progress.done("1000 peers", f"utilisation {figures.utilisation:.3f}")
        rows = thousand.results(figures, time.process_time() - started_s)
        report("simulation", rows, chosen.json, keeps=True)
    if "lab" in parts:
        report("simulation", lab.results(setting, progress), chosen.json, keeps=True)


def _published(sizes: tuple[str, ...], progress: Progress, json_path: Path | None) -> None:
    rows: list[Result] = []
    table: list[dict[str, str]] = []
    for size in sizes:
        of_size, lines = published.streaming_diloco([size])
        rows, table = rows + of_size, table + lines
        progress.done(f"Streaming DiLoCo {size}")
    rows += published.intellect_1()
    progress.done("INTELLECT-1")
    extra = {"notes": published.notes(rows), "summary": table}
    report("simulation", rows, json_path, extra=extra, keeps=True)


def _epoch_done(epoch: int, at_s: float) -> None:
    print(f"simulated epoch {epoch} at {at_s:.0f} s", file=sys.stderr, flush=True)


def _scale(progress: Progress) -> list[Result]:
    started_s = time.process_time()
    figures = simulate(published.many_peers())
    cpu_s = time.process_time() - started_s
    progress.done(_MANY, f"{cpu_s:.1f} s of processor time")
    case = _MANY
    return [
        Result.of(case, "processor time", "s", [cpu_s]),
        Result.of(case, "epochs", "", [float(figures.num_epochs)]),
        Result.of(case, "peers lost", "", [float(figures.losses.peers_lost)]),
        Result.of(case, "utilisation", "", [figures.utilisation]),
    ]


def _arguments() -> argparse.Namespace:
    flags = parser(benchmarks.simulation.__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--parts", nargs="+", choices=_PARTS, metavar="NAME", help=f"of {', '.join(_PARTS)}")
    chosen = flags.parse_args()
    if chosen.json is not None and chosen.json.exists():
        try:
            merged(json.loads(chosen.json.read_text(encoding="utf-8")), record("simulation", []))
        except (ValueError, KeyError) as error:
            flags.error(f"cannot add to {chosen.json}: {error}")
    return chosen


if __name__ == "__main__":
    main()
