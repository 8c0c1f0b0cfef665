from __future__ import annotations

import math

import pytest

from diloco.options.checks import at_least, finite, up_to


@pytest.mark.parametrize("check", [at_least(0), up_to(9), finite])
def test_what_is_no_number_is_no_number_in_any_range(check):
    """NaN as a price limit would be below no price, and so limit nothing."""
    check(float, 1.0)
    check(float, None)
    with pytest.raises(ValueError, match=r"It must be"):
        check(float, math.nan)
