"""The page of results is what the generator makes of the committed files."""

import json

from benchmarks.table import README, RESULTS, rendered


def test_the_committed_page_is_up_to_date():
    assert README.read_text(encoding="utf-8") == rendered(RESULTS), "run python -m benchmarks.table"


def test_a_record_is_shown_with_its_origin_its_plot_and_what_it_lacks(tmp_path):
    row = {
        "case": "a|b",
        "metric": "speed",
        "unit": "GB/s",
        "median": 1.23456,
        "min": 1,
        "max": 2.0,
        "runs": 5,
    }
    record = {
        "benchmark": "wire",
        "commit": "abc",
        "hardware": "2 cores",
        "date": "2026-11-21T12:09:33Z",
        "pace": "fast",
        "results": [
            row,
            {**row, "case": "c", "commit": "old", "hardware": "1 core", "date": "2026-11-20T00:00:00Z"},
            {
                **row,
                "case": "d",
                "commit": "abc",
                "hardware": "2 cores; slow",
                "date": "2026-11-21T00:00:00Z",
            },
        ],
        "partial": True,
        "notes": ["Beside it: 9."],
        "summary": [{"arm": "x", "met": True}, {"arm": "y", "met": None}],
    }
    (tmp_path / "wire-2.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "wire-2.svg").touch()
    lines = rendered(tmp_path).splitlines()
    assert "[wire-2.json](results/wire-2.json): 2 cores; fast; commit abc; 2026-11-21." in lines
    assert "But c: 1 core; commit old; 2026-11-20." in lines
    assert "But d: slow." in lines
    assert "![wire-2](results/wire-2.svg)" in lines
    assert any(line.startswith("**Partial**") for line in lines) and "Beside it: 9." in lines
    assert "| x | yes |" in lines and "| y |  |" in lines
    assert "| case | speed, GB/s |" in lines and "| a/b | 1.235 (1–2) |" in lines
    assert "Figures with a range are of 5 runs." in lines


def test_cases_are_rows_or_columns_whichever_are_more_and_unlike_ones_have_a_table_each(tmp_path):
    row = {"unit": "s", "median": 1.5, "min": 1.5, "max": 1.5, "runs": 1}
    results = [{"case": case, "metric": metric, **row} for case in ("a", "b") for metric in ("x", "y", "z")]
    results += [{"case": "c", "metric": "x", **row, "runs": 4}]
    results += [{"case": "d", "metric": "x", **row, "max": 2.0, "runs": 5}]
    record = {"benchmark": "wire", "commit": "", "hardware": "h", "date": "2026-11-21", "results": results}
    (tmp_path / "wire.json").write_text(json.dumps(record), encoding="utf-8")
    tables = [line for line in rendered(tmp_path).splitlines() if line.startswith("|")]
    assert tables[:3] == ["|  | a | b |", "| --- | --- | --- |", "| x, s | 1.5 | 1.5 |"]
    assert tables[5:] == ["| case | x, s |", "| --- | --- |", "| c | 1.5 (×4) |", "| d | 1.5 (1.5–2, ×5) |"]
