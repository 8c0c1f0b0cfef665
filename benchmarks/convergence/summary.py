"""What a study has found: losses, differences between arms of one seed, and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.convergence.settings import DATA_PARALLEL, Arm, Scale
from benchmarks.convergence.store import Outcome
from benchmarks.convergence.study import Rates
from benchmarks.record import Result


def results(chosen: Sequence[Arm], outcomes: Sequence[Outcome]) -> list[Result]:
    """Rows for the record: losses, then differences in per cent with their standard error where seeds allow one."""
    rows = []
    for arm in chosen:
        losses = [o.loss for o in outcomes if o.arm == arm.name]
        if losses:
            rows.append(Result.of(arm.name, "held-out loss", "nats/byte", losses))
    for arm in chosen:
        for reference in dict.fromkeys((DATA_PARALLEL, arm.reference)):
            values = differences(arm.name, reference, outcomes)
            if arm.averages and values:
                rows += _difference_rows(arm, reference, values)
    return rows


def differences(arm: str, reference: str, outcomes: Sequence[Outcome]) -> list[float]:
    """In per cent of the reference's loss, one for each seed that both have run."""
    losses = {(o.arm, o.seed): o.loss for o in outcomes}
    seeds = sorted({seed for name, seed in losses if name == arm and (reference, seed) in losses})
    if arm == reference:
        return []
    return [100 * (losses[arm, seed] / losses[reference, seed] - 1) for seed in seeds]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; not a number for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def study_record(
    scale: Scale, rates: Rates, chosen: Sequence[Arm], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What the record says beside the rows: settings, targets, every run, and whether all are there."""
    return {
        "partial": len(outcomes) < len(chosen) * len(scale.seeds),
        "scale": asdict(scale),
        "tokens": scale.tokens,
        "rates": asdict(rates),
        "arms": [asdict(arm) for arm in chosen],
        "summary": [line for arm in chosen if (line := _line(arm, outcomes))],
        "runs": [asdict(outcome) for outcome in outcomes],
    }


def curves(chosen: Sequence[Arm], outcomes: Sequence[Outcome]) -> dict[str, list[tuple[float, float]]]:
    """Each arm's mean over its seeds: (million tokens, loss)."""
    found = {}
    for arm in chosen:
        runs = [o.curve for o in outcomes if o.arm == arm.name]
        if runs:
            found[arm.name] = [
                (points[0][0] / 1e6, statistics.mean(loss for _, loss in points))
                for points in zip(*runs, strict=False)
            ]
    return found


def _difference_rows(arm: Arm, reference: str, values: Sequence[float]) -> list[Result]:
    rows = [Result.of(arm.name, f"loss against {reference}", "%", values)]
    if len(values) > 1:
        error = standard_error(values)
        rows.append(Result.of(arm.name, f"its standard error ({reference})", "%", [error]))
    return rows


def _line(arm: Arm, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    losses = [o.loss for o in outcomes if o.arm == arm.name]
    if not losses:
        return None
    line: dict[str, Any] = {"arm": arm.name, "seeds": len(losses), "loss": statistics.mean(losses)}
    for name, reference in (("against_data_parallel", DATA_PARALLEL), ("against_reference", arm.reference)):
        values = differences(arm.name, reference, outcomes)
        if values:
            error = standard_error(values)
            line[name] = {
                "reference": reference,
                "mean": statistics.mean(values),
                "standard_error": None if math.isnan(error) else error,
            }
    if arm.target is not None and "against_reference" in line:
        line["target"] = arm.target
        line["met"] = line["against_reference"]["mean"] <= arm.target
    return line
