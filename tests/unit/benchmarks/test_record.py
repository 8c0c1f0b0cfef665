"""What a benchmark leaves in its file, and how long it says that the rest will take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.progress import Progress
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


def test_rows_of_the_same_commit_and_machine_need_no_origin_of_their_own() -> None:
    whole = merged(a_record("a", "x"), {**a_record("a", "y"), "date": "2026-11-22"})
    assert ["commit" in row for row in whole["results"]] == [False, False]


def test_a_row_keeps_the_pace_of_the_machine_that_it_comes_from_and_is_given_none_of_anothers() -> None:
    unpaced, slow, fast = (
        a_record("a", "x"),
        {**a_record("a", "y"), "pace": "slow"},
        {**a_record("a", "z"), "pace": "fast"},
    )
    whole = merged(merged(unpaced, slow), fast)
    assert [(row["case"], row.get("commit"), row.get("pace")) for row in whole["results"]] == [
        ("x", "a", None),
        ("y", "a", "slow"),
        ("z", None, None),
    ]
    assert whole["pace"] == "fast"


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


def test_the_time_left_follows_how_well_the_plan_has_held(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = Progress({"first": 10.0, "second": 20.0, "third": 100.0}, now=lambda: now)
    assert progress.left_s() == 130
    now = 20.0
    progress.done("first", "1.5 s")
    assert progress.left_s() == 240
    now = 45.0
    progress.done("second")
    progress.done("third")
    assert capsys.readouterr().err.splitlines() == [
        "first: 1.5 s (4 min left)",
        "second (2 min left)",
        "third",
    ]
