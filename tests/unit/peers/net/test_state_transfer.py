import asyncio
import time
from collections import deque

import pytest
import torch
from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, StateUnavailable
from peers.net.channel import Channel, call
from peers.net.states import server as state_server
from peers.net.states import transfer as state_transfer
from peers.net.states.server import MAX_OTHER_HEADS
from peers.protocol.states import State, WantChunk, WantState, state_protocol
from peers.state.header import STATE_CHUNK_NUMEL, StateHeader, chunks_of
from tests.support.certified import begun
from tests.support.in_process import until
from tests.support.state_network import (
    RUN,
    SIZES,
    advance,
    answer_with_header,
    assert_same,
    committed_state,
    download,
    send_chunk,
    serve,
    serve_badly,
)


@pytest.mark.parametrize("donors", [["a"], ["a", "b", "c"], ["a", "nobody"]])
async def test_a_state_arrives_bit_for_bit(network, donors):
    state = committed_state()
    for peer_id in {*donors} - {"nobody"}:
        await serve(network, peer_id, state)
    reported = []
    loaded = await download(
        network, donors, state, progress=lambda done, total: reported.append((done, total))
    )
    assert_same(loaded, state)
    # The second fragment's momentum is still zero, so it is not sent.
    num_bytes = 4 * (2 * SIZES[0] + SIZES[1])
    assert reported[-1] == (num_bytes, num_bytes)
    assert loaded.is_intact() and loaded.anchor_digest == state.anchor_digest


@pytest.mark.parametrize("is_spoilt", [False, True])
async def test_of_a_state_only_what_has_changed_is_fetched_and_what_is_wrong_here(network, is_spoilt):
    sizes = (3 * STATE_CHUNK_NUMEL, 2 * STATE_CHUNK_NUMEL + 10)
    mine, state = committed_state(sizes), committed_state(sizes)
    advance(state)
    if is_spoilt:
        mine.anchor[1][5] += 1
    await serve(network, "a", state)
    reported = []
    with mine.snapshot() as have:
        loaded = await download(
            network, ["a"], state, have=have, progress=lambda done, total: reported.append(total)
        )
    assert_same(loaded, state)
    # Fragment 1 has not been averaged since, so only a spoilt chunk of it is fetched.
    spoilt = 4 * STATE_CHUNK_NUMEL if is_spoilt else 0
    assert reported[-1] == 4 * 2 * sizes[0] + spoilt


@pytest.mark.parametrize("sizes", [(0,), (), (1,)])
async def test_the_smallest_states_arrive(network, sizes):
    state = begun([torch.ones(size) for size in sizes])
    await serve(network, "a", state)
    assert_same(await download(network, ["a"], state), state)


async def test_from_a_fast_donor_many_chunks_are_requested_ahead(network, monkeypatch):
    weights = committed_state((1000,)).anchor[0]
    monkeypatch.setattr("peers.state.header.STATE_CHUNK_NUMEL", 10)
    # However busy this machine is, the donor counts as fast.
    monkeypatch.setattr(state_transfer, "OFTEN_S", 1e9)
    state = begun([weights])

    async def hesitant(_peer, sock):
        channel, num_read, num_sent = Channel(sock), 0, 0
        requests = deque()
        await answer_with_header(channel, sock, state)
        while num_sent < 100:
            # The donor sends nothing until so many chunks are requested.
            ahead = state_transfer._MOST_AHEAD if num_sent else state_transfer._LEAST_AHEAD
            while num_read < min(num_sent + ahead, 100):
                requests.append(await channel.read(Decoder(WantChunk)))
                num_read += 1
            await send_chunk(channel, state, requests.popleft())
            num_sent += 1
        channel.close()

    await network.transport("a").serve(state_protocol(RUN), hesitant)
    assert_same(await download(network, ["a"], state), state)


def test_a_donor_owes_no_more_than_it_delivers_in_a_second():
    num_ahead = [state_transfer._num_ahead(part_s) for part_s in (0.0, 0.01, 0.1, 0.3, 4.0)]
    assert num_ahead == [16, 16, 10, 3, 2]


def test_looking_up_a_digest_copies_that_digest_only():
    copied = []

    class Digests(bytes):
        def __getitem__(self, key):
            copied.append(len(found := bytes.__getitem__(self, key)))
            return found

    sizes = (100 * STATE_CHUNK_NUMEL,)
    digests = Digests(bytes(range(100)) * 32)
    header = StateHeader(sizes=sizes, anchor_chunks=digests, momentum_chunks=b"")
    chunk = list(chunks_of(sizes))[40]
    assert state_transfer._digest_in(header, "anchor", chunk) == bytes(digests)[1280:1312]
    assert copied == [32]


async def test_what_is_downloaded_can_be_committed_to(network):
    state = committed_state()
    await serve(network, "a", state)
    loaded = await download(network, ["a"], state)
    advance(loaded)
    advance(state)
    assert_same(loaded, state)


async def test_a_commit_during_the_download_does_not_change_what_arrives(network):
    state = committed_state()
    expected = committed_state()
    await serve(network, "a", state)
    commits = []

    def commit_once(_done, _total):
        if not commits:
            commits.append(advance(state))

    loaded = await download(network, ["a"], expected, progress=commit_once)
    assert commits
    assert_same(loaded, expected)
    assert state.epoch == expected.epoch + 1


async def test_a_donor_that_has_gone_on_says_where_it_is_and_is_no_suspect(network):
    state, later = committed_state(), committed_state(commits=2)
    await serve(network, "a", later)
    with pytest.raises(StateUnavailable, match=f"a: it holds the state '{later.head[:8]}") as caught:
        await download(network, ["a"], state)
    assert not caught.value.suspects


async def test_a_donor_holds_few_states_at_a_time_for_joiners_that_take_long(network):
    state = committed_state((8,))
    server, streams = await serve(network, "a", state), []
    for number in range(MAX_OTHER_HEADS):
        stream = await call(network.transport(f"slow {number}"), "a", state_protocol(RUN), timeout_s=5)
        streams.append(stream)
        await stream.send(WantState(head=state.head))
        assert await stream.read(Decoder(State), 5) == State()
        advance(state)
    with pytest.raises(StateUnavailable, match="a: it serves as many states as it can") as caught:
        await download(network, ["a"], state)
    assert not caught.value.suspects and len(state._snapshots) == MAX_OTHER_HEADS
    streams.pop().close()
    await until(lambda: len(state._snapshots) < MAX_OTHER_HEADS)
    assert_same(await download(network, ["a"], state), state)
    streams.pop().close()
    await until(lambda: not server._newest)


async def test_a_donor_hands_over_nothing_that_its_memory_cannot_hold_twice(network, monkeypatch):
    state, free = committed_state((8, 24)), [255]
    monkeypatch.setattr(state_server, "available_memory_bytes", lambda: free[0])
    await serve(network, "a", state)
    with pytest.raises(StateUnavailable, match=r"a: .* too little memory") as caught:
        await download(network, ["a"], state)
    assert not caught.value.suspects and not state._snapshots
    # Anchor and momentum of 32 values.
    free[0] = 256
    stream = await call(network.transport("slow"), "a", state_protocol(RUN), timeout_s=5)
    await stream.send(WantState(head=state.head))
    assert await stream.read(Decoder(State), 5) == State()
    # Another joiner of the same state costs nothing more.
    free[0] = 0
    assert_same(await download(network, ["a"], state), state)
    stream.close()


async def test_a_donor_whose_system_does_not_tell_its_free_memory_serves(network, monkeypatch):
    monkeypatch.setattr(state_server, "available_memory_bytes", lambda: None)
    state = committed_state((8,))
    await serve(network, "a", state)
    assert_same(await download(network, ["a"], state), state)


async def test_nobody_to_ask_is_an_error(network):
    with pytest.raises(StateUnavailable, match="no donors"):
        await download(network, [], committed_state((4,)))
    with pytest.raises(StateUnavailable, match="nobody there"):
        await download(network, ["x"], committed_state((4,)))


# Donors that misbehave: a good one delivers what they do not.


@pytest.mark.parametrize("answer", [lambda b: b"\xff" + b[1:], lambda b: None, lambda b: b[:-8] + bytes(8)])
async def test_chunks_that_a_bad_donor_does_not_deliver_come_from_a_good_one(network, answer):
    state = committed_state()
    await serve_badly(network, "bad", state, answer)
    await serve(network, "good", state)
    assert_same(await download(network, ["bad", "good"], state), state)
    with pytest.raises(StateUnavailable, match="bad: ") as caught:
        await download(network, ["bad"], state)
    assert caught.value.suspects == {"bad"}


async def test_a_donor_that_falls_silent_is_left_for_another(network, monkeypatch):
    monkeypatch.setattr(state_transfer, "STALL_S", 3.0)
    state = committed_state()
    await serve_badly(network, "silent", state, lambda b: b"")
    await serve(network, "good", state)
    assert_same(await download(network, ["silent", "good"], state), state)


async def test_a_download_keeps_its_deadline(network):
    state = committed_state()
    await serve_badly(network, "silent", state, lambda b: b"")
    started = time.monotonic()
    with pytest.raises(StateUnavailable, match=r"received 0 of \d+ bytes in 0\.3 s"):
        await download(network, ["silent"], state, timeout_s=0.3)
    assert time.monotonic() - started < 30


async def test_a_header_of_another_state_is_refused_even_under_the_right_name(network):
    state, other = committed_state(), committed_state(commits=2)
    await serve_badly(network, "liar", other, lambda b: b)
    with pytest.raises(StateUnavailable, match="not the one of the commit"):
        await download(network, ["liar"], state)


async def test_a_state_of_other_sizes_is_refused(network):
    state, other = committed_state((8,)), committed_state((9,))
    await serve(network, "a", other)
    with pytest.raises(StateUnavailable, match="does not match its digest"):
        await download(network, ["a"], state, certificate=other.header.certificate)


async def test_values_that_are_not_finite_are_refused(network):
    state = begun([torch.tensor([1.0, float("inf")])])
    await serve(network, "a", state)
    with pytest.raises(StateUnavailable, match="not finite"):
        await download(network, ["a"], state)


@pytest.mark.parametrize(
    "request_",
    [
        *(
            {"type": "want chunk", "values": values, "position": 0}
            for values in ("weights", None, ["anchor"])
        ),
        *(
            {"type": "want chunk", "values": "anchor", "position": n}
            for n in (1, 99, -1, True, 0.5, "0", None)
        ),
        {"type": "want chunk"},
        {"type": "want chunk", "values": "anchor", "position": 0, "more": 1},
        {"type": "go", "values": "anchor", "position": 0},
        {"type": "want state", "head": "a" * 64},
    ],
)
async def test_a_donor_hangs_up_on_requests_that_cannot_be(network, request_):
    async def ask_for_the_state_first(channel, sock, state):
        await channel.send(WantState(head=state.head))
        await channel.read(Decoder(State), 5)
        await asyncio.get_running_loop().sock_recv(sock, 64)

    await assert_hangs_up(network, request_, ask_for_the_state_first)


async def nothing_first(channel, sock, state):
    pass


async def assert_hangs_up(network, request_, first=nothing_first):
    """A donor hangs up when it receives this request after `first`, and keeps no snapshot for it."""
    state = committed_state((8,))
    await serve(network, "a", state)
    sock = await network.transport("joiner").open("a", state_protocol(RUN), timeout_s=1)
    channel = Channel(sock)
    await first(channel, sock, state)
    await channel.send(request_)
    with pytest.raises(PeerUnreachable):
        await channel.read(Decoder(State), 5)
    channel.close()
    assert state._snapshots == []


@pytest.mark.parametrize(
    "request_",
    [
        *(
            {"type": "want state", "head": head}
            for head in ("", "a" * 63, "A" * 64, "a" * 64 + "\n", None, 7)
        ),
        {"type": "want state"},
        {"head": "a" * 64},
        {"type": "want commits", "since": "a" * 64},
        *(
            {"type": "want commits", "since": since, "until": "a" * 64}
            for since in ("", "x", None, ["a" * 64])
        ),
        *({"type": "want commits", "since": "a" * 64, "until": until} for until in ("", "x", None, {"a": 1})),
        {"type": "want chunk", "values": "anchor", "position": 0},
    ],
)
async def test_a_donor_hangs_up_on_who_asks_for_what_is_no_state(network, request_):
    await assert_hangs_up(network, request_)


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "unavailable", "head": "\x1b[2J"},
        {"type": "unavailable", "head": "x" * 65},
        {"type": "unavailable", "head": None},
        {"type": "state", "digests": b""},
        {"type": "commits", "count": 1},
        {},
    ],
)
async def test_a_donor_that_answers_something_else_is_a_suspect(network, answer):
    state = committed_state((8,))

    async def handler(_peer, sock):
        channel = Channel(sock)
        await channel.read(Decoder(WantState))
        await channel.send(answer)
        channel.close()

    await network.transport("a").serve(state_protocol(RUN), handler)
    with pytest.raises(StateUnavailable, match="not a message of the swarm") as caught:
        await download(network, ["a"], state)
    assert caught.value.suspects == {"a"}
