"""The output of every benchmark: one row per case and metric, with median and range."""

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
"""Fields of a record that describe the origin of its rows. A row from another origin carries them itself."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One metric of one case over `runs` repetitions."""

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
    """A parser with the flags of every benchmark: --quick and --json FILE.

    Also makes SIGTERM raise SystemExit, so that the processes that the benchmark has started are ended.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--quick", action="store_true", help="end in under a minute")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return flags


def say(text: str) -> None:
    """Print a line on stderr: the progress of a long benchmark."""
    print(text, file=sys.stderr, flush=True)


def report(
    benchmark: str,
    results: Sequence[Result],
    json_path: Path | None,
    *,
    extra: Mapping[str, Any] | None = None,
    keeps: bool = False,
) -> None:
    """Print the results as a table, and write them to `json_path` together with `extra`.

    With `keeps`, rows of other cases that are already in the file are kept, with their own origin.
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


def check_kept(flags: argparse.ArgumentParser, benchmark: str, json_path: Path | None) -> None:
    """Exit with an error, before hours of measuring, if `report` could not add to the file."""
    if json_path is not None and json_path.exists():
        try:
            merged(json.loads(json_path.read_text(encoding="utf-8")), record(benchmark, []))
        except (ValueError, KeyError) as error:
            flags.error(f"cannot add to {json_path}: {error}")


def merged(earlier: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """The newer record, preceded by the earlier record's rows of cases that the newer one has not measured.

    Kept rows get the ORIGIN fields if their commit, machine or pace differs. Notes and summary are kept if the newer
    record has none. Raises ValueError if the records are of different benchmarks.
    """
    if earlier["benchmark"] != newer["benchmark"]:
        raise ValueError(f"the file is of the benchmark {earlier['benchmark']}, not {newer['benchmark']}")
    measured = {row["case"] for row in newer["results"]}
    kept = []
    for row in earlier["results"]:
        if row["case"] in measured:
            continue
        # A row with an origin of its own must not inherit the record's pace, even if the row has none.
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
