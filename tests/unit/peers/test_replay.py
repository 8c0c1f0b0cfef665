"""A joiner makes the commits that have come while it downloaded."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from peers.codecs import codec_named, result_codec_named
from peers.errors import ProtocolError, StateUnavailable
from peers.outer_optimizer import OuterOptimizer
from peers.reduction.plan import ReducePlan
from peers.state.commit_log import CommitHeader, CommitLog, Recording, header_of
from peers.state.replay import replay_commits
from peers.state.server import StateServer
from tests.support.state_network import RUN, assert_same, committed_state, run

SIZES = ((1 << 18) + 333, 1000)


def optimizer_for(num_members: int) -> OuterOptimizer:
    return OuterOptimizer(lr=0.1 * num_members, momentum=0.9)


def commit(state, log: CommitLog, codec: str, seed: int, *, record: bool = True) -> None:
    """As a round of three members does it."""
    fragment = state.epoch % 2
    size = SIZES[fragment]
    plan = ReducePlan(
        attempt=bytes(16),
        members=(0, 1, 2),
        me=0,
        weights=(1 / 3,) * 3,
        norms=(1.0,) * 3,
        bounds=(0, size // 2, size // 2, size),
        codec=codec,
    )
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).numpy()
    average, recording = np.empty_like(values), Recording()
    coder = result_codec_named(codec)
    for owner in reversed(range(3)):
        for index in range(plan.num_chunks(owner)):
            part = plan.chunk(owner, index)
            length = part.stop - part.start
            payload = coder.encode(values[part].copy(), np.empty(coder.encoded_bytes(length), np.uint8))
            payload = payload.view(np.uint8)
            recording.keep(owner, index, payload)
            average[part] = coder.decode(payload.copy(), np.empty(length, np.float32))
    parent = state.lineage
    optimizer_for(3).commit(state, fragment, torch.from_numpy(average), tokens=9, data_width=3)
    header = header_of(plan, parent=parent, lineage=state.lineage, fragment=fragment, tokens=9, data_width=3)
    log.add(recording if record else None, header, sum(SIZES))


async def serve(network, state, log, peer_id="a"):
    await StateServer(network.transport(peer_id), RUN, lambda: state, log).start()


async def replayed(network, have, lineage, donors=("a",)):
    with have.snapshot() as snapshot:
        return await replay_commits(
            donors, network.transport("joiner"), RUN, snapshot, lineage, optimizer_for, timeout_s=20
        )


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4", "topk"])
def test_the_commits_since_lead_to_the_very_same_bits(codec):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), CommitLog()
    before = have.lineage
    for seed in range(3 if codec != "fp32" else 2):
        commit(state, log, codec, seed)

    async def scenario(network):
        await serve(network, state, log)
        assert_same(await replayed(network, have, state.lineage, ("nobody", "a")), state)
        # What the joiner held is as it was, should it be needed still.
        assert have.lineage == before and have.verify().anchor == have.anchor_digest

    run(scenario)


def test_up_to_the_lineage_that_is_wanted_and_no_further():
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), CommitLog()
    commit(state, log, "int8", 0)
    wanted = state.lineage
    commit(state, log, "int8", 1)

    async def scenario(network):
        await serve(network, state, log)
        assert (await replayed(network, have, wanted)).lineage == wanted

    run(scenario)


@pytest.mark.parametrize("gap", ["before", "between"])
def test_where_a_commit_is_missing_the_others_lead_nowhere(gap):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), CommitLog()
    for seed in range(3):
        commit(state, log, "int8", seed, record=seed != (0 if gap == "before" else 1))

    async def scenario(network):
        await serve(network, state, log)
        with pytest.raises(StateUnavailable):
            await replayed(network, have, state.lineage)

    run(scenario)


def test_a_log_takes_no_more_memory_than_the_state():
    state, log = committed_state(SIZES, 0), CommitLog()
    for seed in range(7):
        commit(state, log, "fp32", seed)
    assert sum(c.num_bytes for c in log._commits) <= 8 * sum(SIZES)
    assert log._commits[-1].header.lineage == state.lineage


@pytest.mark.parametrize("spoil", ["value", "not finite", "tokens", "fragment"])
def test_a_donor_that_sends_something_else_is_found_out_and_another_one_asked(spoil):
    have, state, log, spoilt = (
        committed_state(SIZES, 0),
        committed_state(SIZES, 0),
        CommitLog(),
        CommitLog(),
    )
    commit(state, log, "fp32", 0)
    good = log._commits[0]
    payloads = [payload.copy() for payload in good.payloads]
    header = good.header
    match spoil:
        case "value":
            payloads[0].view(np.float32)[7] += 1
        case "not finite":
            payloads[0].view(np.float32)[7] = np.nan
        case "tokens":
            header = dataclasses.replace(header, tokens=10)
        case "fragment":
            header = dataclasses.replace(header, fragment=1)
    spoilt._commits.append(dataclasses.replace(good, header=header, payloads=tuple(payloads)))

    async def scenario(network):
        await serve(network, state, spoilt, "bad")
        await serve(network, state, log, "good")
        with pytest.raises(StateUnavailable):
            await replayed(network, have, state.lineage, ["bad"])
        assert_same(await replayed(network, have, state.lineage, ["bad", "good"]), state)

    run(scenario)


def test_a_donor_that_falls_silent_holds_nobody_up_for_long(monkeypatch):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), CommitLog()
    commit(state, log, "int8", 0)
    monkeypatch.setattr("peers.state.transfer.STALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr("peers.state.replay.COMMIT_TIMEOUT_S", 0.2)

    async def scenario(network):
        async def silent(_peer, sock):
            await asyncio.sleep(10)
            sock.close()

        await network.transport("bad").serve(f"diloco/{RUN}/state", silent)
        await serve(network, state, log)
        assert_same(await replayed(network, have, state.lineage, ["bad", "a"]), state)

    run(scenario, timeout_s=5)


def a_header(**changes) -> dict[str, object]:
    message = {
        "parent": "a",
        "lineage": "b",
        "fragment": 1,
        "tokens": 1,
        "data_width": 1,
        "num_members": 2,
        "codec": "int8",
        "bounds": [0, 10, 1000],
    }
    return {**message, **changes}


def test_a_header_survives_the_wire():
    header = CommitHeader.from_message(a_header(), SIZES)
    assert CommitHeader.from_message(header.to_message(), SIZES) == header
    assert sum(part.stop - part.start for part, _ in header.parts()) == 1000
    assert codec_named("int8").encoded_bytes(10) == next(header.parts())[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"fragment": 2},
        {"fragment": -1},
        {"bounds": [0, 10]},
        {"bounds": [0, 1001]},
        {"bounds": [5, 1000]},
        {"bounds": [0, 900, 800, 1000]},
        {"bounds": []},
        {"bounds": None},
        {"num_members": 0},
        {"num_members": 1 << 40},
        {"codec": "zip"},
        {"tokens": -1},
        {"tokens": True},
        {"lineage": "x" * 65},
    ],
)
def test_a_header_that_cannot_be_is_refused(changes):
    with pytest.raises(ProtocolError):
        CommitHeader.from_message(a_header(**changes), SIZES)
