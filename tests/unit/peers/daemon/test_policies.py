"""Which files lead a rollout peer to the newest weights."""

from __future__ import annotations

from pathlib import Path

from peers.daemon.policies import Policies, WeightsFile, way_to
from peers.protocol.rollouts import BlobName

WHOLE, PATCH = 100, 10


def file(leads_to: str, base: str = "", num_bytes: int = 0) -> WeightsFile:
    name = BlobName(
        digest=f"{base}{leads_to}".rjust(64, "0"), num_bytes=num_bytes or (PATCH if base else WHOLE)
    )
    return WeightsFile(path=Path("nowhere"), name=name, leads_to=leads_to, base=base)


FILES = [file("a"), file("b", "a"), file("c", "b"), file("c"), file("d", "c")]


def way(held: str, files: list[WeightsFile] = FILES) -> list[str]:
    found = way_to("d", held, files)
    assert found is not None
    return [f"{one.base}>{one.leads_to}" for one in found]


def test_who_has_earlier_weights_gets_the_patches_since():
    assert way("c") == ["c>d"]
    assert way("a") == ["a>b", "b>c", "c>d"]
    assert way("d") == []


def test_who_has_none_or_others_gets_all_weights_once_and_the_patches_since():
    assert way("") == way("unknown") == [">c", "c>d"]


def test_patches_that_are_longer_than_all_weights_are_not_taken():
    large = [file("a"), file("b", "a", 80), file("d", "b", 80), file("d")]
    assert way("a", large) == [">d"]


def test_weights_to_which_nothing_leads_are_not_promised():
    assert way_to("d", "", [file("d", "c")]) is None
    policies = Policies()
    assert policies.newest("") is None
    policies.published("d", 3, [file("d", "c")])
    assert policies.newest("") is None
    found = policies.newest("c")
    assert found is not None and (found.step, len(found.blobs)) == (3, 1)


def test_a_patch_that_changes_nothing_does_not_lead_round_in_circles():
    assert way_to("d", "x", [file("d", "d")]) is None
