"""Figures for people."""

from __future__ import annotations

_FACTORS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short_figure(value: float) -> str:
    """A count to three digits: 950, 12.3k, 4.5M."""
    for factor, letter in _FACTORS:
        # From where three digits round up to it: 999_999 is 1M, not 1e+03k.
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def span(seconds: float) -> str:
    """4 s, 12 min, 3.1 h, 2.5 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
