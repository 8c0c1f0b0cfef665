"""After a restart a peer knows what it has signed before, however its last life ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.daemon.pledges import FILE_BYTES, NUM_PLACES, Pledges
from peers.errors import PeersError, UserError
from tests.support.full_disk import full_disk

A, B, C = (letter * 64 for letter in "abc")


def test_what_was_signed_is_known_after_a_restart(tmp_path: Path):
    pledges = Pledges(tmp_path / "pledges")
    assert not pledges.attempts
    for head, attempt in ((A, 0), (B, 2), ("", 1), (A, 5)):
        pledges.add(head, attempt)
    assert Pledges(tmp_path / "pledges").attempts == {A: 5, B: 2, "": 1}


@pytest.mark.parametrize("at", [0, 8, 45, 51])
def test_a_pledge_that_was_cut_off_costs_no_other(tmp_path: Path, at: int):
    path = tmp_path / "pledges"
    pledges = Pledges(path)
    pledges.add(A, 1)
    pledges.add(C, 1)
    contents = bytearray(path.read_bytes())
    contents[2 * (FILE_BYTES // NUM_PLACES) + at] ^= 0xFF
    path.write_bytes(contents)
    again = Pledges(path)
    assert again.attempts == {A: 1}
    again.add(B, 0)
    assert Pledges(path).attempts == {A: 1, B: 0}


def test_the_oldest_pledges_give_way_and_the_file_stays_as_large(tmp_path: Path):
    path = tmp_path / "pledges"
    pledges = Pledges(path)
    for number in range(NUM_PLACES + 10):
        pledges.add(f"{number + 1:064x}", 0)
    assert list(Pledges(path).attempts) == [f"{number + 11:064x}" for number in range(NUM_PLACES)]
    assert path.stat().st_size == FILE_BYTES


def test_a_full_disk_keeps_nobody_from_signing(tmp_path: Path):
    path = tmp_path / "pledges"
    pledges = Pledges(path)
    with full_disk(FILE_BYTES - 1):
        pledges.add(A, 3)
        with pytest.raises(UserError, match="cannot keep"):
            Pledges(tmp_path / "other")
    assert Pledges(path).attempts == {A: 3}


def test_a_peer_whose_disk_takes_no_pledge_says_so_and_does_not_sign(tmp_path: Path):
    """As on a full disk whose file system copies on write."""
    path = tmp_path / "pledges"
    pledges = Pledges(path)
    pledges.add(A, 3)
    with Path("/dev/full").open("r+b", buffering=0) as full, pytest.MonkeyPatch.context() as patched:
        patched.setattr(pledges, "_file", full)
        with pytest.raises(PeersError, match=f"cannot write to {path} .*: No space left on device"):
            pledges.add(B, 0)
    assert Pledges(path).attempts == {A: 3}
