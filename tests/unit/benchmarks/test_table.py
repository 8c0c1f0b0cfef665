"""The results page equals what the generator makes of the committed files."""

from benchmarks.table import README, RESULTS, rendered


def test_the_committed_page_is_up_to_date():
    assert README.read_text(encoding="utf-8") == rendered(RESULTS), "run python -m benchmarks.table"
