from __future__ import annotations

from pathlib import Path

import pytest

from diloco.doctor.reachability import LARGER_BUFFERS, judge_bandwidth
from peers.net.paths.reachability import Speed

ROOT = Path(__file__).parents[4]
FOUR_MB = 4 << 20


def judged(mb_per_s: float, round_trip_s: float, buffer_bytes: int | None = FOUR_MB) -> tuple[str, str, str]:
    found = judge_bandwidth("peer 1", Speed(1e6 * mb_per_s, 1e6 * mb_per_s), round_trip_s, buffer_bytes)
    return found.verdict, found.said, found.fix


def test_buffers_that_may_be_smaller_than_the_link_are_named_with_the_command_that_enlarges_them():
    verdict, said, fix = judged(20.0, 0.09)
    assert verdict == "warn" and said.endswith(
        "TCP is set to carry 47 MB/s at most in one stream over that time"
    )
    assert fix.startswith(LARGER_BUFFERS)
    assert LARGER_BUFFERS in (ROOT / "docs/tuning.md").read_text()


@pytest.mark.parametrize(
    ("mb_per_s", "round_trip_s", "buffer_bytes"),
    [
        (5.0, 0.09, FOUR_MB),
        (20.0, 0.09, 1 << 26),
        (20.0, 0.01, FOUR_MB),
        (20.0, 0.0, FOUR_MB),
        (20.0, 0.09, None),
    ],
    ids=["the link is slower", "larger buffers", "near", "no time", "unknown"],
)
def test_buffers_that_do_not_hold_the_link_back_are_no_warning(mb_per_s, round_trip_s, buffer_bytes):
    assert judged(mb_per_s, round_trip_s, buffer_bytes)[0] == "pass"


def test_a_slow_link_gets_the_flags_for_slow_links():
    assert judged(1.0, 0.5)[2].startswith("--hv.compression")
