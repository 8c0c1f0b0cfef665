"""Renders benchmarks/README.md from benchmarks/results/*.json: `python -m benchmarks.table`.

A result file is what `--json` writes. Besides the rows it may have `partial` (true for an unfinished study), `notes` (a
list of sentences), and `summary` (a list of flat dicts, shown as a table before the rows). Its plot, if any, is
results/<the same stem>.svg or .png.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"
RESULTS = HERE / "results"
_HEAD = """\
# Benchmarks

Generated from `results/*.json` by `python -m benchmarks.table`; change nothing here by hand.

Each benchmark is one command, `python -m benchmarks.NAME [--quick] [--json FILE]`; `--quick` ends in
under a minute. A figure is the median (least–greatest, × repetitions). A `+` after a commit means that files differed
from it.
"""


def main() -> None:
    README.write_text(rendered(RESULTS), encoding="utf-8")
    print(f"wrote {README}")


def rendered(results: Path) -> str:
    """The whole page. Raises KeyError or ValueError if a file is not a benchmark's record."""
    records = [
        (path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob("*.json"))
    ]
    records.sort(key=lambda found: (found[1]["benchmark"], found[0].name))
    parts = [_HEAD]
    for name, group in groupby(records, key=lambda found: found[1]["benchmark"]):
        parts.append(f"## {name}\n")
        for path, record in group:
            parts += _section(path, record)
    return "\n".join(parts)


def _section(path: Path, record: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{path.name}](results/{path.name}): {_origin(record)}.\n"
    others = [(_origin(row if "commit" in row else record), row["case"]) for row in record["results"]]
    for origin in dict.fromkeys(origin for origin, _ in others if origin != _origin(record)):
        cases = ", ".join(dict.fromkeys(case for other, case in others if other == origin))
        known = _origin(record).split("; ")
        yield f"But {cases}: {'; '.join(part for part in origin.split('; ') if part not in known)}.\n"
    if record.get("partial"):
        yield "**Partial**: not all of this benchmark's runs have been made.\n"
    for note in record.get("notes", ()):
        yield f"{note}\n"
    for plot in (path.with_suffix(suffix) for suffix in (".svg", ".png")):
        if plot.exists():
            yield f"![{path.stem}](results/{plot.name})\n"
    if summary := record.get("summary"):
        yield _summary_table(summary)
    for cases in _alike(record["results"]):
        yield from _cases_table(cases)


Rows = Mapping[str, Mapping[str, Any]]
"""The rows of one case, by metric."""


def _alike(results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Rows]]:
    """Groups the cases that have the same metrics, for one table each."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in results:
        what = f"{row['metric']}, {row['unit']}" if row["unit"] not in ("", "ratio") else row["metric"]
        cases.setdefault(row["case"], {})[what] = row
    for measured in dict.fromkeys(tuple(rows) for rows in cases.values()):
        yield {case: rows for case, rows in cases.items() if tuple(rows) == measured}


def _cases_table(cases: Mapping[str, Rows]) -> Iterator[str]:
    """A table of cases and metrics, with the longer of the two as rows. A common number of runs is stated only once."""
    measured = list(next(iter(cases.values())))
    runs = {row["runs"] for rows in cases.values() for row in rows.values()} - {0, 1}
    if told := len(runs) == 1:
        yield f"Figures with a range are of {runs.pop()} runs.\n"
    if len(cases) >= len(measured):
        lines = [[case, *(_figure(rows[what], told) for what in measured)] for case, rows in cases.items()]
        yield _table(["case", *measured], lines)
    else:
        lines = [[what, *(_figure(rows[what], told) for rows in cases.values())] for what in measured]
        yield _table(["", *cases], lines)


def _figure(row: Mapping[str, Any], runs_are_told: bool) -> str:
    """The median; for several runs with minimum and maximum, and with their number unless that is stated already."""
    if row["runs"] < 2:
        return _text(row["median"])
    same = row["min"] == row["max"]
    parts = [] if same else [f"{row['min']:.3g}–{row['max']:.3g}"]
    parts += [] if runs_are_told else [f"×{row['runs']}"]
    return f"{_text(row['median'])} ({', '.join(parts)})" if parts else _text(row["median"])


def _origin(record: Mapping[str, Any]) -> str:
    machine = "; ".join(record[name] for name in ("hardware", "pace") if name in record)
    return f"{machine}; commit {record['commit'] or 'unknown'}; {record['date'][:10]}"


def _summary_table(summary: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for line in summary for name in line))
    return _table(columns, [[line.get(name) for name in columns] for line in summary])


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    numeric = [all(row[i] is None or _is_number(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        _line(columns),
        _line(["---:" if is_numeric else "---" for is_numeric in numeric]),
        *(_line([_text(value) for value in row]) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


if __name__ == "__main__":
    main()
