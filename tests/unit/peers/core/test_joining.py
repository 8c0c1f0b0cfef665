"""Which manifests are refused, which peer's manifest counts, and how their differences are named."""

from __future__ import annotations

import math

import pytest
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.core import joining
from peers.core.schedule import AS_LONG_AS_THE_ROUND
from peers.errors import ProtocolError
from peers.protocol.mesh import Manifest
from peers.protocol.wire import decode, encode
from peers.timing import START_S
from tests.support.announcements import announced


def received(fields):
    """Decode and check a manifest as if another peer had sent it."""
    joining.check_manifest(
        decode(Decoder(Manifest), encode({"type": "manifest", "fields": fields}), 1 << 20).fields
    )


def test_a_manifest_in_order_is_taken_and_so_is_one_that_leaves_all_to_the_literature():
    received({})
    received(dict.fromkeys(("hv.local_steps", "hv.outer_lr", "hv.aggregation", "hv.trim", "hv.local_time")))
    received(
        {"hv.local_steps": 500, "hv.outer_lr": 1, "hv.aggregation": "clip", "hv.max_weight": 2, "more": "x"}
    )


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        [],
        {"a": [1]},
        {1: "a"},
        {"a" * 301: 1},
        {str(number): number for number in range(257)},
        {"a": "x" * joining.MAX_MANIFEST_BYTES},
        {"mode": "pretrain", "total_batch_size": float("nan"), "seq_length": 8, "hv.local_steps": 5},
        {"mode": "pretrain", "total_batch_size": float("inf"), "seq_length": 8, "hv.local_steps": 5},
        {"mode": "pretrain", "total_batch_size": "many", "seq_length": 8, "hv.local_steps": 5},
        {"hv.local_steps": "many"},
        {"hv.local_steps": 0},
        {"hv.local_steps": True},
        {"hv.outer_lr": "high"},
        {"hv.outer_lr": float("nan")},
        {"hv.outer_momentum": float("inf")},
        {"hv.outer_momentum": -1},
        {"hv.outer_momentum": 1001},
        {"hv.num_fragments": 4097},
        {"hv.num_fragments": 2.0},
        {"hv.local_steps": 500, "hv.num_fragments": 3},
        {"hv.overlap_steps": -2},
        {"hv.overlap_steps": 500},
        {"hv.aggregation": "median"},
        {"hv.aggregation": 1},
        {"hv.max_weight": 0.5},
        {"hv.max_weight": float("nan")},
        {"hv.trim": 0},
        {"hv.trim": 0.6},
        {"hv.trim": "0.2"},
        {"hv.local_time": -1},
        {"hv.local_time": float("inf")},
        {"hv.mixing": 1.5},
        {"hv.mixing": True},
        {"hv.staleness_discount": float("nan")},
    ],
)
def test_what_is_no_manifest_is_refused(manifest):
    with pytest.raises((ProtocolError, ValueError)):
        received(manifest)


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


def source(*peers, me, galaxy_size=2, late_s=-math.inf):
    view = {peer.peer_id: peer for peer in peers}
    found = joining.manifest_source(view, me=me, galaxy_size=galaxy_size, late_s=late_s)
    return found if found in (None, "own") else found.peer_id


def test_before_a_run_has_begun_the_manifest_of_the_lowest_world_rank_counts():
    a, b = announced("a", world_rank=2), announced("b", world_rank=1)
    assert (source(a, b, me="b"), source(a, b, me="a")) == ("own", None)
    b = replace(b, manifest_digest="bb")
    assert source(a, b, me="a") == "b"
    assert source(a, me="a") is None
    assert source(a, me="a", late_s=0.1) == source(replace(a, world_rank=0), me="a") == "own"


def test_after_the_deadline_peers_that_publish_nothing_are_passed_over_one_by_one():
    silent, b, c = (announced(peer_id, world_rank=rank) for rank, peer_id in enumerate("abc"))
    assert [source(silent, b, c, me=p, galaxy_size=3, late_s=0.1) for p in "bc"] == [None, None]
    assert [source(silent, b, c, me=p, galaxy_size=3, late_s=START_S + 0.1) for p in "bc"] == ["own", None]
    b = replace(b, manifest_digest="bb")
    assert source(silent, b, c, me="c", galaxy_size=3, late_s=2 * START_S + 0.1) == "b"


def test_of_peers_that_have_no_world_rank_yet_the_smallest_peer_id_counts():
    a, b, c = (announced(p, world_rank=-1) for p in "abc")
    assert [source(a, b, c, me=p) for p in "abc"] == ["own", None, None]
    assert source(replace(c, world_rank=7), a, b, me="c") == "own"
    assert source(a, me="a", galaxy_size=1) == "own"
    assert source(a, me="a") is None


def test_of_a_run_that_has_begun_the_manifest_counts_that_most_have():
    a = announced("a", world_rank=0, head="", manifest_digest="aa")
    b = announced("b", world_rank=1, head="h", manifest_digest="bb")
    c, d = (announced(p, world_rank=rank, head="h", manifest_digest="cc") for rank, p in ((2, "c"), (3, "d")))
    assert source(a, b, c, d, announced("e", world_rank=-1), me="e") == "c"


def test_a_time_that_is_learned_is_told_as_it_is_typed():
    (line,) = joining.manifest_differences(
        {"hv.local_time": 0.0}, {"hv.local_time": 120.0}, {"hv.local_time"}
    )
    assert line == "hv.local_time: here 'auto', in the swarm 120.0"
    (line,) = joining.manifest_differences(
        {"hv.overlap_steps": AS_LONG_AS_THE_ROUND}, {"hv.overlap_steps": 5}, {"hv.overlap_steps"}
    )
    assert line == "hv.overlap_steps: here 'auto', in the swarm 5"


def test_models_that_differ_go_by_their_names_and_else_by_what_differs():
    def told(here, there):
        return joining.manifest_differences(here, there, {"model", "lr"})

    small, large = '{"hidden_size": 64, "model_type": "llama"}', '{"hidden_size": 96, "model_type": "llama"}'
    ours = {"model": small, "path_model": "2m", "lr": 0.1}
    assert told(ours, {"model": large, "path_model": "demo", "lr": 0.2}) == [
        "lr: here 0.1, in the swarm 0.2",
        "model: here 2m, in the swarm demo",
    ]
    # A directory's name means nothing on other machines, and what a peer sends may be neither JSON nor printable.
    assert told(ours, {"model": large, "path_model": ""}) == [
        "model: here hidden_size 64, in the swarm hidden_size 96"
    ]
    assert told(ours, {"model": large, "path_model": "\x1b[2J"}) == [
        "model: here hidden_size 64, in the swarm hidden_size 96"
    ]
    (line,) = told(ours, {"model": "[" * 100_000, "path_model": ""})
    assert "in the swarm hidden_size not set" in line
