"""The command line: tune, run every arm with every seed, report. See the package's docstring."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import benchmarks.convergence
from benchmarks.convergence.settings import SCALES, Optimizer, Scale, arms
from benchmarks.convergence.study import RatesOf, Study
from benchmarks.convergence.summary import curves, losses_by_bytes, results, study_record
from benchmarks.convergence.tuning import Rates
from benchmarks.plot import lines, points
from benchmarks.record import parser, report


def main() -> None:
    chosen = _arguments()
    scale = _scale(chosen)
    selected = [arm for name, arm in arms(scale).items() if name in (chosen.arms or arms(scale))]
    processes = chosen.processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) if chosen.quick else chosen.dir or Path("runs/convergence") / scale.name
        study = Study(scale=scale, directory=directory, processes=processes)
        rates = _rates(chosen, scale)
        rates = (study.tuned if chosen.only_report else study.complete)(selected, rates)
        outcomes = study.outcomes(selected, rates)
    extra = study_record(scale, rates, selected, outcomes, study.tuning(selected))
    report("convergence", results(selected, outcomes), chosen.json, extra=extra)
    if chosen.plot:
        lines(
            chosen.plot,
            curves(selected, outcomes),
            title=_title(scale),
            x_label="million tokens",
            y_label="held-out loss, nats a byte",
        )
    if chosen.plot_bytes:
        points(
            chosen.plot_bytes,
            losses_by_bytes(selected, outcomes),
            title=_title(scale),
            x_label="MB sent by each peer",
            y_label="held-out loss, nats a byte",
        )


def _title(scale: Scale) -> str:
    return f"{scale.preset}, {scale.num_peers} peers, H = {scale.local_steps}"


def _rates(chosen: argparse.Namespace, scale: Scale) -> RatesOf:
    """The rates given by flags; the quick study uses the start values of tuning instead of tuning."""
    starts: dict[Optimizer, float] = {"adamw": scale.inner_lr, "muon": scale.muon_lr}
    given: dict[Optimizer, list[float] | None] = {"adamw": chosen.rates, "muon": chosen.muon_rates}
    rates: RatesOf = {}
    for optimizer, start in starts.items():
        if values := given[optimizer]:
            rates[optimizer] = Rates(*values)
        elif chosen.quick:
            rates[optimizer] = Rates(start, start, scale.outer_lr, scale.outer_momentum)
    return rates


def _arguments() -> argparse.Namespace:
    flags = parser(benchmarks.convergence.__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    names = tuple(arms(SCALES["1m"]))
    flags.add_argument("--arms", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    flags.add_argument("--seeds", nargs="+", type=int, metavar="N")
    flags.add_argument("--preset", choices=("1m", "80k", "150m"), default="1m", help="150m: for a GPU")
    flags.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda for 150m, else cpu")
    flags.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there (svg, png, pdf)")
    flags.add_argument("--plot-bytes", type=Path, metavar="FILE", help="draw losses by bytes there")
    flags.add_argument("--dir", type=Path, help="where runs are kept; default: runs/convergence/<preset>")
    flags.add_argument("--processes", type=int, help="runs at a time; default: one for each core")
    metavar = ("DP", "INNER", "OUTER", "MOMENTUM")
    flags.add_argument("--rates", nargs=4, type=float, metavar=metavar, help="AdamW's: do not tune it")
    flags.add_argument("--muon-rates", nargs=4, type=float, metavar=metavar, help="Muon's: do not tune it")
    flags.add_argument("--only-report", action="store_true", help="run nothing, report what there is")
    return flags.parse_args()


def _scale(chosen: argparse.Namespace) -> Scale:
    scale = SCALES["quick" if chosen.quick else chosen.preset]
    if chosen.device:
        scale = replace(scale, device=chosen.device)
    return replace(scale, seeds=tuple(chosen.seeds)) if chosen.seeds else scale


if __name__ == "__main__":
    main()
