"""Manifests that no honest peer has."""

from __future__ import annotations

import pytest

from peers import joining


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        [],
        {"a": [1]},
        {1: "a"},
        {"a": "x" * joining.MAX_MANIFEST_BYTES},
        {"hv.local_steps": "many"},
        {"hv.local_steps": 0},
        {"hv.local_steps": True},
        {"hv.outer_lr": "high"},
        {"hv.outer_lr": float("nan")},
        {"hv.outer_momentum": float("inf")},
        {"hv.outer_momentum": -1},
    ],
)
def test_what_is_no_manifest_is_refused(manifest):
    with pytest.raises(ValueError):
        joining.check_manifest(manifest)


def test_a_manifest_of_other_types_than_ours_does_not_fit():
    ours = {"lr": 1e-3, "steps": 3, "name": "a", "flag": True, "none": None}
    assert (
        joining.misfits(ours, {"lr": 1, "steps": 4, "name": "b", "flag": False, "none": 7, "more": []}) == []
    )
    assert joining.misfits(ours, {"lr": "1", "steps": True, "name": None, "flag": 1}) == [
        "flag",
        "lr",
        "steps",
    ]
