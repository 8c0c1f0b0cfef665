"""The membership benchmark's plot; tests/e2e/test_benchmarks.py runs the benchmark."""

from argparse import Namespace

from benchmarks.membership import Measured, _draw


def test_what_was_measured_is_drawn_by_number_of_peers(tmp_path):
    found = [Measured(2, 0.9, 0.6, [0.1], [0.01, 0.02], 0.01), Measured(5, 1.9, 0.7, [0.2], [0.03], 0.02)]
    _draw(Namespace(plot=tmp_path / "plot.svg"), found)
    drawn = (tmp_path / "plot.svg").read_text()
    assert "Membership as peers grow in number" in drawn and "one more trains (s)" in drawn
