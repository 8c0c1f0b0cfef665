"""A joiner repeats the commits that were made while it downloaded."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.core.timing import SHARED_BY
from peers.errors import StateUnavailable
from peers.net.channel import Channel
from peers.net.states.replay import can_be_repeated, replay_commits
from peers.net.states.server import StateServer
from peers.protocol.certificates import Certificate
from peers.protocol.codecs import CODEC_NAMES
from peers.protocol.states import Commits, WantCommits
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.commit_log import CommitLog, Recording, parts_of
from peers.reduce.plan import ReducePlan
from peers.reduce.shares import bounds_of
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState
from tests.support import certified
from tests.support.state_network import RUN, assert_same, committed_state

SIZES = ((1 << 18) + 333, 1000)


def optimizer_for(num_members: int) -> OuterOptimizer:
    return OuterOptimizer(lr=0.1 * num_members, momentum=0.9)


def commit(state, log: CommitLog, codec: str, seed: int, *, record: bool = True) -> Certificate:
    """Commit to `state` as a round of three members does, and record the commit in `log`."""
    fragment, parent = state.epoch % 2, state.head
    size = SIZES[fragment]
    plan = ReducePlan(
        attempt=bytes(16),
        members=(0, 1, 2),
        me=0,
        weights=(1 / 3,) * 3,
        norms=(1.0,) * 3,
        bounds=bounds_of([0.0] * 3, size),
        codec=codec,
    )
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).numpy()
    average, recording = np.empty_like(values), Recording()
    coder = result_codec_named(codec)
    for owner in reversed(range(3)):
        for chunk in plan.chunks([owner]):
            part = plan.place(chunk)
            length = part.stop - part.start
            payload = coder.encode(values[part].copy(), np.empty(coder.encoded_bytes(length), np.uint8))
            payload = payload.view(np.uint8)
            recording.keep(chunk, payload)
            average[part] = coder.decode(payload.copy(), np.empty(length, np.float32))
    certificate = certified.commit(
        state, torch.from_numpy(average), optimizer=optimizer_for(3), fragment=fragment
    )
    log.add(recording if record else None, parent=parent, head=certificate.head, state_numel=sum(SIZES))
    return certificate


async def serve(network, state, log, peer_id="a"):
    await StateServer(network.transport(peer_id), RUN, lambda: state, log).start()


async def replayed(network, have, path, codec, donors=("a",), timeout_s=20):
    with have.snapshot() as snapshot:
        return await replay_commits(
            donors,
            network.transport("joiner"),
            RUN,
            snapshot,
            path,
            codec,
            "clip",
            optimizer_for,
            timeout_s=timeout_s,
        )


def a_log() -> CommitLog:
    """A log that a download has just needed."""
    log = CommitLog()
    with log.held():
        return log


@pytest.mark.parametrize("codec", CODEC_NAMES)
async def test_the_commits_since_lead_to_the_very_same_bits(network, codec):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    before = have.head
    path = [commit(state, log, codec, seed) for seed in range(3 if codec != "fp32" else 2)]
    await serve(network, state, log)
    assert_same(await replayed(network, have, path, codec, ("nobody", "a")), state)
    # The state that the joiner already held is unchanged, in case it is still needed.
    assert have.head == before and have.is_intact()


async def test_up_to_the_head_that_is_wanted_and_no_further(network):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    path = [commit(state, log, "int8", seed) for seed in range(2)]
    await serve(network, state, log)
    assert (await replayed(network, have, path[:1], "int8")).head == path[0].head


async def test_what_no_commit_has_changed_is_not_shared_with_the_state_that_was_here(network):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    path = [commit(state, log, "int8", 0)]
    await serve(network, state, log)
    with have.snapshot() as served:
        repeated = await replayed(network, have, path, "int8")
        certified.commit(repeated, torch.ones(SIZES[1]), fragment=1)
        assert torch.equal(served.anchor[1], committed_state(SIZES, 0).anchor[1])


@pytest.mark.parametrize("gap", ["before", "between"])
async def test_where_a_commit_is_missing_the_others_lead_nowhere(network, gap):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    missing = 0 if gap == "before" else 1
    path = [commit(state, log, "int8", seed, record=seed != missing) for seed in range(3)]
    await serve(network, state, log)
    with pytest.raises(StateUnavailable):
        await replayed(network, have, path, "int8")


def test_only_certificates_that_follow_one_by_one_on_the_state_that_is_here_are_repeated():
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    path = [commit(state, log, "int8", seed) for seed in range(3)]
    with have.snapshot() as snapshot:
        assert can_be_repeated(snapshot, path)
        for others in ([], path[1:], [path[0], path[2]], [state.header.certificate] * 2):
            assert not can_be_repeated(snapshot, others)
        # A fork's genesis averages nothing, and its plans may name a fragment that this state does not have.
        for changes in ({"contributors": ()}, {"fragment": len(SIZES)}):
            assert not can_be_repeated(snapshot, [with_plan(path[0], **changes)])
    with OuterState.initial([torch.ones(size) for size in SIZES]).snapshot() as uncertified:
        assert not can_be_repeated(uncertified, path)
        assert not can_be_repeated(uncertified, [with_plan(path[0], parent="")])


def with_plan(certificate: Certificate, **changes) -> Certificate:
    body = certificate.body
    return replace(certificate, body=replace(body, plan=replace(body.plan, **changes)))


def test_a_log_takes_no_more_memory_than_the_state():
    state, log = committed_state(SIZES, 0), a_log()
    for seed in range(7):
        commit(state, log, "fp32", seed)
    assert sum(c.num_bytes for c in log._commits) <= 8 * sum(SIZES)
    assert log._commits[-1].head == state.head


@pytest.mark.parametrize("spoil", ["value", "not finite"])
async def test_a_donor_that_sends_something_else_is_found_out_and_another_one_asked(network, spoil):
    have, state = committed_state(SIZES, 0), committed_state(SIZES, 0)
    log, spoilt = a_log(), a_log()
    path = [commit(state, log, "fp32", 0)]
    good = log._commits[0]
    payloads = [payload.copy() for payload in good.payloads]
    payloads[0].view(np.float32)[7] += 1 if spoil == "value" else np.nan
    spoilt._commits.append(dataclasses.replace(good, payloads=tuple(payloads)))
    await serve(network, state, spoilt, "bad")
    await serve(network, state, log, "good")
    with pytest.raises(StateUnavailable):
        await replayed(network, have, path, "fp32", ["bad"])
    assert_same(await replayed(network, have, path, "fp32", ["bad", "good"]), state)


async def test_a_donor_that_falls_silent_holds_nobody_up_for_long(network):
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    path = [commit(state, log, "int8", 0)]

    async def silent(_peer, sock):
        await asyncio.sleep(10)
        sock.close()

    await network.transport("bad").serve(f"diloco/{RUN}/state", silent)
    await serve(network, state, log)
    async with asyncio.timeout(9):
        assert_same(await replayed(network, have, path, "int8", ["bad", "a"]), state)


async def test_a_donor_that_offers_the_commits_and_sends_none_leaves_time_for_the_next(network, monkeypatch):
    """Though the next one waits for far less than that to be chosen."""
    monkeypatch.setattr("peers.net.states.replay.COMMIT_S", 0.5)
    have, state, log = committed_state(SIZES, 0), committed_state(SIZES, 0), a_log()
    path = [commit(state, log, "int8", 0)]
    has_offered = asyncio.Event()

    async def hoarding(_peer, sock):
        with Channel(sock) as channel:
            await channel.read(Decoder(WantCommits))
            await channel.send(Commits(count=1))
            has_offered.set()
            await asyncio.sleep(60)

    async def second(peer_id, sock):
        await has_offered.wait()
        await good._accepted(peer_id, sock)

    good = StateServer(network.transport("a"), RUN, lambda: state, log)
    await network.transport("bad").serve(f"diloco/{RUN}/state", hoarding)
    await network.transport("a").serve(f"diloco/{RUN}/state", second)
    assert_same(await replayed(network, have, path, "int8", ["bad", "a"], timeout_s=SHARED_BY), state)


def test_the_parts_of_a_commits_average_are_those_of_its_members_shares():
    state = committed_state(SIZES, 0)
    plan = certified.certificate_after(state, anchor="a" * 64, momentum="b" * 64, bandwidth=1e6).plan
    parts = list(parts_of(plan, SIZES[0], "int8", "clip"))
    assert sum(part.stop - part.start for part, _ in parts) == SIZES[0]
    assert all(num_bytes == codec_named("int8").encoded_bytes(p.stop - p.start) for p, num_bytes in parts)
