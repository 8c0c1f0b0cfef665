"""What every benchmark prints and writes: one row a case, medians with their spread."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import hardware, pace

_ROOT = Path(__file__).parent.parent
ORIGIN = ("commit", "hardware", "pace", "date")
"""What a record says of where all its rows come from, and a row where it comes from somewhere else."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure of one case over `runs` repetitions."""

    case: str
    metric: str
    unit: str
    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, case: str, metric: str, unit: str, values: Sequence[float]) -> Result:
        return cls(
            case=case,
            metric=metric,
            unit=unit,
            median=statistics.median(values),
            min=min(values),
            max=max(values),
            runs=len(values),
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags every benchmark has: --quick and --json FILE.

    From here on SIGTERM ends the program as an error would: with what it has started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--quick", action="store_true", help="end in under a minute")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return flags


def report(
    benchmark: str,
    results: Sequence[Result],
    json_path: Path | None,
    *,
    extra: Mapping[str, Any] | None = None,
    keeps: bool = False,
) -> None:
    """Print the results as a table, and write them where asked, with what else the benchmark has to tell.

    `keeps`: rows of other cases that are in the file already stay there, with the origin of their own.
    """
    print(f"{benchmark} on {hardware()}")
    for row in results:
        spread = f"{row.min:.4g} to {row.max:.4g}, {row.runs} runs"
        print(f"  {row.case:<28} {row.metric:<24} {row.median:>10.4g} {row.unit:<10} ({spread})")
    if json_path is not None:
        whole = {**record(benchmark, results), **(extra or {})}
        if keeps and json_path.exists():
            whole = merged(json.loads(json_path.read_text(encoding="utf-8")), whole)
        json_path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def merged(earlier: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """The newer record and, before it, the earlier one's rows of cases that it has not measured.

    Such a row says where it comes from, by the fields of a record, where that is another commit, machine or pace. Notes
    and summary stay where the newer has none. Raises ValueError for records of two benchmarks.
    """
    if earlier["benchmark"] != newer["benchmark"]:
        raise ValueError(f"the file is of the benchmark {earlier['benchmark']}, not {newer['benchmark']}")
    measured = {row["case"] for row in newer["results"]}
    kept = []
    for row in earlier["results"]:
        if row["case"] in measured:
            continue
        # A row with an origin has all of it: the record's own pace is not its.
        source = row if "commit" in row else earlier
        origin = {name: source[name] for name in ORIGIN if name in source}
        values = {name: value for name, value in row.items() if name not in ORIGIN}
        is_elsewhere = any(origin.get(name) != newer.get(name) for name in ("commit", "hardware", "pace"))
        kept.append({**values, **origin} if is_elsewhere else values)
    told = {name: earlier[name] for name in ("notes", "summary") if name in earlier}
    return {**told, **newer, "results": [*kept, *newer["results"]]}


def record(benchmark: str, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "hardware": hardware(),
        "pace": pace(),
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "results": [asdict(row) for row in results],
    }


def commit() -> str:
    """The checkout's commit, with `+` where files differ from it; empty outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()
