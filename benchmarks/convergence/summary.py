"""The results of a study: losses, paired differences between arms, and their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.convergence.settings import DATA_PARALLEL, DATA_PARALLEL_MUON, FP32, MUON, Arm, Scale
from benchmarks.convergence.store import Outcome
from benchmarks.convergence.study import RatesOf
from benchmarks.plot import Band
from benchmarks.record import Result


def results(chosen: Sequence[Arm], outcomes: Sequence[Outcome]) -> list[Result]:
    """Rows for the record: losses, then differences in per cent, with standard errors if there are several seeds."""
    rows = []
    for arm in chosen:
        losses = [o.loss for o in outcomes if o.arm == arm.name]
        if losses:
            rows.append(Result.of(arm.name, "held-out loss", "nats/byte", losses))
        if arm.averages and losses:
            sent = [o.sent_bytes / 1e6 for o in outcomes if o.arm == arm.name]
            rows.append(Result.of(arm.name, "sent by each peer", "MB", sent))
            shares = [100 * o.visible_share for o in outcomes if o.arm == arm.name]
            rows.append(Result.of(arm.name, "weights changed in bf16 by an epoch", "%", shares))
    for arm in chosen:
        for reference in dict.fromkeys((DATA_PARALLEL, arm.reference)):
            values = differences(arm.name, reference, outcomes)
            if arm.averages and values:
                rows += _difference_rows(arm, reference, values)
    return rows


def differences(arm: str, reference: str, outcomes: Sequence[Outcome]) -> list[float]:
    """Differences in per cent of the reference's loss, one for each seed that both arms have run."""
    losses = {(o.arm, o.seed): o.loss for o in outcomes}
    seeds = sorted({seed for name, seed in losses if name == arm and (reference, seed) in losses})
    if arm == reference:
        return []
    return [100 * (losses[arm, seed] / losses[reference, seed] - 1) for seed in seeds]


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def study_record(
    scale: Scale,
    rates: RatesOf,
    chosen: Sequence[Arm],
    outcomes: Sequence[Outcome],
    tuning: Sequence[Outcome],
) -> dict[str, Any]:
    """The record's fields besides the rows: settings, targets, every run (tuning too), and whether runs are missing."""
    return {
        "partial": len(outcomes) < len(chosen) * len(scale.seeds),
        "scale": asdict(scale),
        "tokens": scale.tokens,
        "rates": {optimizer: asdict(tuned) for optimizer, tuned in rates.items()},
        "arms": [asdict(arm) for arm in chosen],
        "summary": [line for arm in chosen if (line := _line(arm, outcomes))],
        "runs": [asdict(outcome) for outcome in outcomes],
        "tuning": [{name: value for name, value in asdict(o).items() if name != "curve"} for o in tuning],
    }


def curves(chosen: Sequence[Arm], outcomes: Sequence[Outcome]) -> dict[str, list[tuple[float, Band]]]:
    """Each arm's curve over its seeds: (million tokens, loss)."""
    found = {}
    for arm in chosen:
        runs = [o.curve for o in outcomes if o.arm == arm.name]
        if runs:
            found[arm.name] = [
                (at_once[0][0] / 1e6, _band([loss for _, loss in at_once]))
                for at_once in zip(*runs, strict=False)
            ]
    return found


def losses_by_bytes(chosen: Sequence[Arm], outcomes: Sequence[Outcome]) -> dict[str, tuple[float, Band]]:
    """One point for each arm with averaging: (MB sent by a peer, loss over its seeds)."""
    found = {}
    for arm in chosen:
        runs = [o for o in outcomes if o.arm == arm.name]
        if runs and arm.averages:
            sent = statistics.mean(o.sent_bytes for o in runs) / 1e6
            found[arm.name] = sent, _band([o.loss for o in runs])
    return found


def _band(losses: Sequence[float]) -> Band:
    return statistics.mean(losses), min(losses), max(losses)


def _difference_rows(arm: Arm, reference: str, values: Sequence[float]) -> list[Result]:
    rows = [Result.of(arm.name, f"loss against {reference}", "%", values)]
    if len(values) > 1:
        error = standard_error(values)
        rows.append(Result.of(arm.name, f"its standard error ({reference})", "%", [error]))
    return rows


def _line(arm: Arm, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """An arm's row in the summary table. Differences are means over seeds with their standard error."""
    losses = [o.loss for o in outcomes if o.arm == arm.name]
    if not losses:
        return None
    judged = differences(arm.name, arm.reference, outcomes)
    with_muon = arm.averages and arm.optimizer == "muon"
    same_optimizer = differences(arm.name, DATA_PARALLEL_MUON, outcomes) if with_muon else []
    return {
        "arm": arm.name,
        "seeds": len(losses),
        "mean loss, nats/byte": statistics.mean(losses),
        f"% against {DATA_PARALLEL}": _with_error(differences(arm.name, DATA_PARALLEL, outcomes)),
        f"% against {DATA_PARALLEL_MUON}": _with_error(same_optimizer),
        f"% against {FP32}": _with_error(differences(arm.name, FP32, outcomes)) if arm.averages else None,
        f"% against {MUON}": _with_error(judged) if arm.reference == MUON else None,
        "target": f"{arm.target:+g} % against {arm.reference}" if arm.target is not None else None,
        "met": statistics.mean(judged) <= arm.target if judged and arm.target is not None else None,
    }


def _with_error(values: Sequence[float]) -> str | None:
    if not values:
        return None
    error = standard_error(values)
    return f"{statistics.mean(values):+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")
