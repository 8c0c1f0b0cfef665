import asyncio
import contextlib
import socket
import time

import pytest
import torch

from peers import state_transfer
from peers.errors import PeerUnreachable, StateUnavailable
from peers.messages import Channel
from peers.outer_optimizer import OuterOptimizer
from peers.outer_state import OuterState
from peers.state_header import STATE_CHUNK_NUMEL
from peers.state_transfer import StateServer, download_state, state_protocol

SIZES = (3 * STATE_CHUNK_NUMEL + 1234, 10)
RUN = "run"


class Network:
    """Transports in one process, joined by socket pairs; counts what each peer sends."""

    def __init__(self):
        self.handlers, self.tasks = {}, []

    def transport(self, peer_id):
        return Endpoint(self, peer_id)

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Endpoint:
    def __init__(self, network, peer_id):
        self.network, self.peer_id = network, peer_id

    async def open(self, peer_id, protocol, *, timeout_s):
        if (peer_id, protocol) not in self.network.handlers:
            raise PeerUnreachable("nobody there")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        handler = self.network.handlers[peer_id, protocol]
        self.network.tasks.append(asyncio.create_task(handler(self.peer_id, theirs)))
        return ours

    async def serve(self, protocol, handler):
        self.network.handlers[self.peer_id, protocol] = handler


def committed_state(sizes=SIZES, commits=1):
    generator = torch.Generator().manual_seed(0)
    state = OuterState.initial([torch.randn(size, generator=generator) for size in sizes])
    for _ in range(commits):
        advance(state)
    return state


def advance(state):
    average = torch.full((state.sizes[0],), 0.25)
    OuterOptimizer(lr=0.7, momentum=0.9).commit(state, 0, average, tokens=7, data_width=2)


def run(scenario, timeout_s=30):
    async def with_network():
        network = Network()
        try:
            await scenario(network)
        finally:
            await network.close()

    asyncio.run(asyncio.wait_for(with_network(), timeout_s))


async def serve(network, peer_id, state):
    await StateServer(network.transport(peer_id), RUN, lambda: state).start()


def download(network, donors, state, **kwargs):
    options = {"timeout_s": 20, **kwargs}
    lineage = options.pop("lineage", state.lineage)
    return download_state(donors, network.transport("joiner"), RUN, lineage, state.sizes, **options)


def assert_same(loaded, state):
    assert loaded.header == state.header
    for ours, theirs in zip(
        (*loaded.anchor, *loaded.momentum), (*state.anchor, *state.momentum), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("donors", [["a"], ["a", "b", "c"], ["a", "nobody"]])
def test_a_state_arrives_bit_for_bit(donors):
    state = committed_state()

    async def scenario(network):
        for peer_id in {*donors} - {"nobody"}:
            await serve(network, peer_id, state)
        reported = []
        loaded = await download(
            network, donors, state, progress=lambda done, total: reported.append((done, total))
        )
        assert_same(loaded, state)
        # The second fragment's momentum is still zero, and is not sent.
        num_bytes = 4 * (2 * SIZES[0] + SIZES[1])
        assert reported[-1] == (num_bytes, num_bytes)
        assert loaded.verify().anchor == state.anchor_digest

    run(scenario)


@pytest.mark.parametrize("sizes", [(0,), (), (1,)])
def test_the_smallest_states_arrive(sizes):
    state = OuterState.initial([torch.ones(size) for size in sizes])

    async def scenario(network):
        await serve(network, "a", state)
        assert_same(await download(network, ["a"], state), state)

    run(scenario)


def test_what_is_downloaded_can_be_committed_to():
    state = committed_state()

    async def scenario(network):
        await serve(network, "a", state)
        loaded = await download(network, ["a"], state)
        advance(loaded)
        advance(state)
        assert_same(loaded, state)

    run(scenario)


def test_a_commit_during_the_download_does_not_change_what_arrives():
    state = committed_state()
    expected = committed_state()

    async def scenario(network):
        await serve(network, "a", state)
        commits = []

        def commit_once(_done, _total):
            if not commits:
                commits.append(advance(state))

        loaded = await download(network, ["a"], expected, progress=commit_once)
        assert commits
        assert_same(loaded, expected)
        assert state.epoch == expected.epoch + 1

    run(scenario)


def test_a_donor_with_another_lineage_says_which():
    state, later = committed_state(), committed_state(commits=2)

    async def scenario(network):
        await serve(network, "a", later)
        with pytest.raises(StateUnavailable, match=f"a: it holds the state '{later.lineage[:8]}"):
            await download(network, ["a"], state)

    run(scenario)


def test_nobody_to_ask_is_an_error():
    async def scenario(network):
        with pytest.raises(StateUnavailable, match="no donors"):
            await download(network, [], committed_state((4,)))
        with pytest.raises(StateUnavailable, match="nobody there"):
            await download(network, ["x"], committed_state((4,)))

    run(scenario)


# Donors that misbehave: what they fail to deliver, a good one does.


async def serve_badly(network, peer_id, state, answer):
    """A donor with the right header that answers every request for a chunk with `answer(bytes)`, until that is None."""

    async def handler(_peer, sock):
        channel = Channel(sock)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(PeerUnreachable, OSError):
            await channel.receive()
            message = state.header.to_message()
            digests = message.pop("anchor_chunks") + message.pop("momentum_chunks")
            await channel.send({"kind": "state", **message})
            await loop.sock_sendall(sock, digests)
            while True:
                request = await channel.receive()
                chunks = list(state_transfer.chunks_of(state.sizes))
                values = state_transfer._wanted_values(state, chunks, request)
                payload = answer(bytes(values.view(torch.uint8).numpy()))
                if payload is None:
                    break
                await loop.sock_sendall(sock, payload)
        channel.close()

    await network.transport(peer_id).serve(state_protocol(RUN), handler)


@pytest.mark.parametrize("answer", [lambda b: b"\xff" + b[1:], lambda b: None, lambda b: b[:-8] + bytes(8)])
def test_chunks_that_a_bad_donor_does_not_deliver_come_from_a_good_one(answer):
    state = committed_state()

    async def scenario(network):
        await serve_badly(network, "bad", state, answer)
        await serve(network, "good", state)
        assert_same(await download(network, ["bad", "good"], state), state)
        with pytest.raises(StateUnavailable, match="bad: "):
            await download(network, ["bad"], state)

    run(scenario)


def test_a_donor_that_falls_silent_is_left_for_another(monkeypatch):
    monkeypatch.setattr(state_transfer, "_STALL_TIMEOUT_S", 0.5)
    state = committed_state()

    async def scenario(network):
        await serve_badly(network, "silent", state, lambda b: b"")
        await serve(network, "good", state)
        assert_same(await download(network, ["silent", "good"], state), state)

    run(scenario)


def test_a_download_keeps_its_deadline():
    state = committed_state()

    async def scenario(network):
        await serve_badly(network, "silent", state, lambda b: b"")
        started = time.monotonic()
        with pytest.raises(StateUnavailable, match=r"received 0 of \d+ bytes in 0\.3 s"):
            await download(network, ["silent"], state, timeout_s=0.3)
        assert time.monotonic() - started < 5

    run(scenario)


def test_a_header_of_another_state_is_refused_even_under_the_right_name():
    state, other = committed_state(), committed_state(commits=2)

    async def scenario(network):
        await serve_badly(network, "liar", other, lambda b: b)
        with pytest.raises(StateUnavailable, match="does not lead to the lineage"):
            await download(network, ["liar"], state)

    run(scenario)


def test_a_state_of_other_sizes_is_refused():
    state, other = committed_state((8,)), committed_state((9,))

    async def scenario(network):
        await serve(network, "a", other)
        with pytest.raises(StateUnavailable, match="other fragments"):
            await download(network, ["a"], state, lineage=other.lineage)

    run(scenario)


def test_values_that_are_not_finite_are_refused():
    state = OuterState.initial([torch.tensor([1.0, float("inf")])])

    async def scenario(network):
        await serve(network, "a", state)
        with pytest.raises(StateUnavailable, match="not finite"):
            await download(network, ["a"], state)

    run(scenario)


@pytest.mark.parametrize(
    "request_", [{"values": "weights", "position": 0}, {"values": "anchor", "position": 99}, {}]
)
def test_a_donor_hangs_up_on_requests_that_cannot_be(request_):
    state = committed_state((8,))

    async def scenario(network):
        await serve(network, "a", state)
        sock = await network.transport("joiner").open("a", state_protocol(RUN), timeout_s=1)
        channel = Channel(sock)
        await channel.send({"kind": "state", "lineage": state.lineage})
        await channel.receive(timeout_s=5)
        await asyncio.get_running_loop().sock_recv(sock, 64)
        await channel.send({"kind": "chunk", **request_})
        with pytest.raises(PeerUnreachable):
            await channel.receive(timeout_s=5)
        channel.close()
        assert state._snapshots == []

    run(scenario)
