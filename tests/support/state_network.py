"""Donors and joiners of an outer state in one process, joined by socket pairs."""

import asyncio
import contextlib
import struct

import torch
from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable
from peers.net.channel import Channel
from peers.net.states import server as state_server
from peers.net.states.server import StateServer
from peers.net.states.transfer import download_state
from peers.protocol.states import State, WantChunk, WantState, state_protocol
from peers.protocol.wire import encode
from peers.state.header import STATE_CHUNK_NUMEL
from tests.support.certified import begun, commit

SIZES = (3 * STATE_CHUNK_NUMEL + 1234, 10)
RUN = "run"


def committed_state(sizes=SIZES, commits=1):
    generator = torch.Generator().manual_seed(0)
    state = begun([torch.randn(size, generator=generator) for size in sizes])
    for _ in range(commits):
        advance(state)
    return state


def advance(state):
    average = torch.full((state.sizes[0],), 0.25)
    return commit(state, average, tokens=7, data_width=2)


def encoded(message):
    """The message as a Channel encodes it."""
    body = encode(message)
    return struct.pack("<I", len(body)) + body


async def serve(network, peer_id, state, commit_log=None):
    server = StateServer(network.transport(peer_id), RUN, lambda: state, commit_log)
    await server.start()
    return server


def download(network, donors, state, **kwargs):
    options = {"timeout_s": 20, **kwargs}
    certificate = options.pop("certificate", state.header.certificate)
    return download_state(donors, network.transport("joiner"), RUN, certificate, state.sizes, **options)


def assert_same(loaded, state):
    assert loaded.header == state.header
    for ours, theirs in zip(
        (*loaded.anchor, *loaded.momentum), (*state.anchor, *state.momentum), strict=True
    ):
        assert torch.equal(ours, theirs)


async def answer_with_header(channel, sock, state):
    """Send what a donor sends first to a peer that asks for a state."""
    await channel.read(Decoder(WantState))
    await channel.send(State())
    digests = state.header.anchor_chunks + state.header.momentum_chunks
    await asyncio.get_running_loop().sock_sendall(sock, digests)


async def send_chunk(channel, state, request):
    """What a donor sends for this request."""
    values = state_server._wanted_values(state, list(state_server.chunks_of(state.sizes)), request)
    await channel.send_bytes(values.view(torch.uint8).numpy().data, 5)


async def serve_badly(network, peer_id, state, answer):
    """A donor with the right header that answers every request for a chunk with `answer(bytes)`, until that is None."""

    async def handler(_peer, sock):
        channel = Channel(sock)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(PeerUnreachable, OSError):
            await answer_with_header(channel, sock, state)
            while True:
                request = await channel.read(Decoder(WantChunk))
                chunks = list(state_server.chunks_of(state.sizes))
                values = state_server._wanted_values(state, chunks, request)
                payload = answer(bytes(values.view(torch.uint8).numpy()))
                if payload is None:
                    break
                await loop.sock_sendall(sock, payload)
        channel.close()

    await network.transport(peer_id).serve(state_protocol(RUN), handler)
