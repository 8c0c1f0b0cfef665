"""How busy a machine is, by its own words."""

from __future__ import annotations

import pytest

from provisioning.machines.use import UNKNOWN, Use, use_in

STAT = "cpu  100 0 100 700 100 0 0 0 0 0\ncpu  130 0 110 750 110 0 0 0 0 0\n"


def test_gpus_are_averaged_and_processors_are_busy_where_they_neither_idle_nor_wait():
    use = use_in(f"90\n50\n---\n{STAT}")
    assert use == Use(gpu=70.0, cpu=pytest.approx(40.0))
    assert (str(use), str(use_in(f"---\n{STAT}")), str(UNKNOWN)) == ("GPU 70 %", "CPU 40 %", "–")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "---\n",
        "[N/A]\n---\ncpu\ncpu\n",
        f"{'9' * 5000}\n---\n{STAT.splitlines()[0]}\n" * 2,
        "-5\n---\n²\n",
    ],
)
def test_words_of_no_known_form_say_nothing(text):
    assert use_in(text) == UNKNOWN
