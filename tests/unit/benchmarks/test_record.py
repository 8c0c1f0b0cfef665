"""What a benchmark writes into its file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.record import Result, merged, report


def a_record(commit: str, *cases: str) -> dict[str, object]:
    rows = [{"case": case, "metric": "round", "median": 1.0, "measured at": commit} for case in cases]
    return {
        "benchmark": "wan",
        "commit": commit,
        "hardware": "2 cores",
        "date": "2026-11-21",
        "results": rows,
    }


def test_a_case_that_is_measured_alone_leaves_the_others_in_the_file_with_their_origin() -> None:
    first, second, third = a_record("a", "x", "y"), a_record("b", "y", "z"), a_record("c", "z")
    whole = merged(merged(first, second), third)
    assert [(row["case"], row["measured at"], row.get("commit")) for row in whole["results"]] == [
        ("x", "a", "a"),
        ("y", "b", "b"),
        ("z", "c", None),
    ]
    assert whole["commit"] == "c"


def test_the_file_of_another_benchmark_is_left_alone(tmp_path: Path) -> None:
    path, rows = tmp_path / "results.json", [Result.of("x", "round", "s", [1.0])]
    report("reduce", rows, path)
    before = path.read_text()
    with pytest.raises(ValueError, match="of the benchmark reduce"):
        report("wan", rows, path, keeps=True)
    assert path.read_text() == before
    found = json.loads(before)
    assert found["results"][0]["case"] == "x"
    assert re.fullmatch(r"a torch call [\d.]+ us, memory copied at [\d.]+ GB/s", found["pace"])
