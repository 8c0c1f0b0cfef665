from __future__ import annotations

import pytest

from peers.monitor.figures import short_figure


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (950, "950"), (999, "999"), (1000, "1k"), (84_992, "85k"), (12_345, "12.3k")),
        *((999_499, "999k"), (999_999, "1M"), (1_570_000, "1.57M"), (-999_999, "-1M")),
    ],
)
def test_a_count_has_three_digits_and_no_exponent(value, shown):
    assert short_figure(value) == shown
