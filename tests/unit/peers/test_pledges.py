"""What a peer has signed is known to its next life, whatever became of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.daemon.pledges import MAX_HEADS, Pledges


def test_what_was_signed_is_known_after_a_restart(tmp_path: Path):
    pledges = Pledges(tmp_path / "pledges")
    assert not pledges.attempts
    for head, attempt in (("a", 0), ("b", 2), ("a", 5)):
        pledges.add(head, attempt)
    assert Pledges(tmp_path / "pledges").attempts == {"a": 5, "b": 2}


@pytest.mark.parametrize("rest", [b'["c", ', b"\xff\xfe", b"[]", b'"c"', b'["c", null]'])
def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path, rest: bytes):
    Pledges(tmp_path / "pledges").add("a", 1)
    with (tmp_path / "pledges").open("ab") as file:
        file.write(rest)
    again = Pledges(tmp_path / "pledges")
    assert again.attempts == {"a": 1}
    again.add("b", 0)
    assert Pledges(tmp_path / "pledges").attempts == {"a": 1, "b": 0}


def test_heads_long_passed_are_forgotten_and_the_file_stays_small(tmp_path: Path):
    pledges = Pledges(tmp_path / "pledges")
    for number in range(40 * MAX_HEADS):
        pledges.add(f"{number:064x}", 0)
    assert len(pledges.attempts) == MAX_HEADS
    assert f"{40 * MAX_HEADS - 1:064x}" in Pledges(tmp_path / "pledges").attempts
    assert (tmp_path / "pledges").stat().st_size < 100 * 20 * MAX_HEADS
