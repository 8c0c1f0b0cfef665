"""Whatever comes from the network, each decoder decodes it or raises its one error, and takes little memory.

Three kinds of garbage: any bytes, any values in place of fields, and valid messages that are cut or changed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import operator
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Decoder

from peers.core import joining
from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import Channel
from peers.net.paths import greeting
from peers.net.paths.greeting import Hello
from peers.net.paths.tls import public_key_of
from peers.protocol import reach, relays, reports, rollouts, states
from peers.protocol.admission import (
    NONCE_BYTES,
    PROOF_BYTES,
    AskRank,
    Bans,
    Grant,
    Issued,
    Join,
    Nonce,
    Proof,
    Taken,
)
from peers.protocol.certificates import decode_certificate
from peers.protocol.limits import MAX_MESSAGE_BYTES
from peers.protocol.mesh import Announced, Introduction, Manifest, Ping, Pong, Said, WantManifest
from peers.protocol.messages import (
    Abort,
    Ask,
    Certificates,
    Decline,
    Found,
    OddVote,
    Offer,
    Propose,
    Status,
    Vote,
)
from peers.protocol.records import Spoken
from peers.protocol.refusal import Refusal, Why
from peers.protocol.wire import Struct, decode, encode
from peers.state import files
from peers.state.header import StateHeader
from tests.support import certified
from tests.support.announcements import spoken
from tests.support.certified import begun
from tests.support.keys import credentials
from tests.support.rollout_messages import rollout
from tests.support.sighted import full_report

MAX_DECODED_BYTES = 4 << 20
"""Far more than the garbage of these tests needs, far less than a length in it may ask for."""
STATE = begun([torch.zeros(5)])
CERTIFICATE = certified.commit(STATE, torch.ones(5))
PLAN, SIGNATURE = CERTIFICATE.plan, CERTIFICATE.signatures[0]
DIGESTS = {"anchor": "ab" * 32, "momentum": "cd" * 32}
HEADER = StateHeader(sizes=(5,), anchor_chunks=b"a" * 32, momentum_chunks=b"m" * 32)
NO_HEADER = (ValueError, msgspec.DecodeError, ProtocolError)
MANIFEST = {
    "hv.local_steps": 5,
    "hv.outer_lr": 0.7,
    "hv.num_fragments": 1,
    "hv.aggregation": "clip",
    "hv.trim": 0.2,
    "hv.mixing": 0.5,
    "model": "{}",
}
SAID_DECODER, INTRODUCTION = Decoder(Said), Decoder(Introduction)
INTRODUCTIONS: list[Introduction] = [Announced(record=b"r"), Bans(signed=b"b"), Refusal(why=Why.BANNED)]
SAID: list[Said] = [
    Announced(record=b"r"),
    Bans(signed=b"b"),
    Ping(),
    Pong(),
    WantManifest(),
    Manifest(fields=MANIFEST),
    Propose(plan=PLAN),
    Vote(head=PLAN.parent, attempt=0, plan=PLAN.digest, signature=SIGNATURE, **DIGESTS),
    Decline(head=PLAN.parent, attempt=0, reason="because", suspects=("peer1",)),
    Abort(
        head=PLAN.parent,
        attempt=0,
        reason="because",
        votes=(OddVote(peer_id="peer1", signature=SIGNATURE, **DIGESTS),),
    ),
    Certificates(head=CERTIFICATE.head, certificates=(CERTIFICATE,)),
    Ask(head=CERTIFICATE.head),
    Found(body=CERTIFICATE.body),
]
STANDING = [
    spoken(
        "a",
        Status(
            incarnation=1,
            sequence=2,
            world_rank=-1,
            phase="ready",
            head=PLAN.parent,
            work=PLAN.contributors[0].work,
        ),
    ),
    spoken("a", Status(incarnation=1, sequence=2, world_rank=3, phase="waiting", offer=Offer(**DIGESTS))),
    spoken("a"),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=70)
    | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=10,
)


def of_structs(messages: list[Any]) -> tuple[list[dict[str, Any]], Callable[[Any], object], type[Exception]]:
    """These messages unpacked, a decoder that takes any of them, and its error. Checks the round trip of each."""
    decoder = Decoder(functools.reduce(operator.or_, map(type, messages)))
    assert [decoder.decode(encode(message)) for message in messages] == messages
    return (
        [msgpack.unpackb(encode(message)) for message in messages],
        lambda message: decode(decoder, msgpack.packb(message), MAX_MESSAGE_BYTES),
        ProtocolError,
    )


WORDS: dict[str, list[Any]] = {
    "about how a machine is reached": [
        reach.Hello(token=b"t"),
        reach.Here(host="203.0.113.7", time=1.7e9),
        reach.Busy(),
        reach.Dial(port=22),
        reach.Dialled(error="connection refused"),
        reach.Speed(),
        reach.Burst(num_bytes=reach.BURSTS[0]),
        reach.Got(),
        reach.Took(num_bytes=5, seconds=1.0),
    ],
    "about a relayed stream": [
        relays.Want(to="peer1"),
        relays.No(reason="because"),
        relays.Offer(rate=1e6, load=2),
        relays.Go(),
        relays.Ready(),
        relays.Deliver(caller="peer1"),
    ],
    "about a state": [
        states.WantState(head="a" * 64),
        states.State(),
        states.WantChunk(values="anchor", position=7),
        states.WantCommits(since="a" * 64, until="b" * 64),
        states.Commits(count=3),
        states.Go(),
        states.Unavailable(head="c" * 64),
    ],
    "about a world rank": [
        AskRank(wanted=1, token=b"t"),
        Grant(world_rank=1, galaxy_size=3),
        Taken(holder="p"),
    ],
    "about admission": [
        Join(),
        Nonce(nonce=b"n" * NONCE_BYTES),
        Proof(proof=b"p" * PROOF_BYTES),
        Issued(token=b"t"),
    ],
    "about the deny list": [Bans(signed=b"b")],
    "about rollouts": [
        rollouts.Hello(token=b"t"),
        rollouts.Welcome(manifest=Manifest(fields=MANIFEST), next_number=7),
        rollouts.NoPolicy(why="it was left out: lies"),
        rollouts.WantPolicy(held="a" * 64),
        rollouts.Policy(
            digest="a" * 64, step=3, base="", blobs=(rollouts.BlobName(digest="b" * 64, num_bytes=9),)
        ),
        rollouts.WantBlob(digest="b" * 64),
        rollouts.Blob(),
        rollouts.NoBlob(),
        rollouts.Signed(payload=b"p", signature=SIGNATURE),
        rollouts.Verdict(dropped="stale"),
    ],
    "a rollout": [rollout()],
    "to those who look on": [
        reports.Hello(),
        Nonce(nonce=b"n" * NONCE_BYTES),
        Proof(proof=b"p" * PROOF_BYTES),
        reports.Busy(),
        full_report(certified=reports.Certified(time=5.0, certificate=CERTIFICATE)),
    ],
}
Errors = type[Exception] | tuple[type[Exception], ...]
DECODERS: dict[str, tuple[list[dict[str, Any]], Callable[[dict[str, Any]], object], Errors]] = {
    **{name: of_structs(messages) for name, messages in WORDS.items()},
    "what peers say over the mesh": (
        [msgpack.unpackb(encode(message)) for message in SAID],
        lambda message: decode(SAID_DECODER, msgpack.packb(message), MAX_MESSAGE_BYTES),
        ProtocolError,
    ),
    "what a peer says of itself": (
        [msgpack.unpackb(encode(one)) for one in STANDING],
        lambda message: decode(Decoder(Spoken), msgpack.packb(message), MAX_MESSAGE_BYTES),
        ProtocolError,
    ),
    "an introduction": (
        [msgpack.unpackb(encode(message)) for message in INTRODUCTIONS],
        lambda message: decode(INTRODUCTION, msgpack.packb(message), MAX_MESSAGE_BYTES),
        ProtocolError,
    ),
    "a certificate": (
        [msgpack.unpackb(encode(CERTIFICATE))],
        lambda message: decode_certificate(msgpack.packb(message)),
        ProtocolError,
    ),
    "the header of a state": (
        [json.loads(files._header_bytes(header)) for header in (HEADER, STATE.header)],
        lambda message: files._header_in(msgspec.json.encode(message)),
        NO_HEADER,
    ),
    "a manifest": (
        [msgpack.unpackb(encode(Manifest(fields=MANIFEST)))],
        lambda message: joining.check_manifest(
            decode(Decoder(Manifest), msgpack.packb(message), MAX_MESSAGE_BYTES).fields
        ),
        (ProtocolError, ValueError),
    ),
}


def decoded(read: Callable[[Any], object], garbage: Any, error: Errors) -> None:
    """Decode `garbage`, which may raise `error` alone and take no more than MAX_DECODED_BYTES of memory."""
    tracemalloc.start()
    try:
        read(garbage)
    except error:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MAX_DECODED_BYTES


@pytest.mark.parametrize("name", DECODERS)
def test_true_messages_are_taken(name):
    messages, read, _ = DECODERS[name]
    for message in messages:
        read(msgpack.unpackb(msgpack.packb(message), strict_map_key=True))


NASTY: list[Any] = [
    *(None, True, -1, 2**31, 2**40, 2**62, 2**64 - 1, 1e308, math.nan, -math.inf),
    *("", "x" * 100_000, b"", b"x" * 100_000, [], [2**62], [[]] * 1000, {}, {"a": {}}),
]


@pytest.mark.parametrize("name", DECODERS)
def test_a_nasty_value_in_any_place_is_taken_or_its_error(name):
    messages, read, error = DECODERS[name]
    for message in messages:
        for field in message:
            for value in NASTY:
                decoded(read, {**message, field: value}, error)
                if isinstance(message[field], dict):
                    for inner in message[field]:
                        decoded(read, {**message, field: {**message[field], inner: value}}, error)


@settings(deadline=None)
@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_any_value_in_any_place_of_a_message_is_taken_or_its_error(name, data):
    messages, read, error = DECODERS[name]
    message = dict(data.draw(st.sampled_from(messages)))
    for field in data.draw(st.lists(st.sampled_from([*message, "another"]), max_size=3)):
        message[field] = data.draw(VALUES)
    for field in data.draw(st.lists(st.sampled_from(sorted(message)), max_size=1)):
        del message[field]
    decoded(read, message, error)


@settings(deadline=None)
@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_flipped_bits_in_a_message_are_taken_or_its_error(name, data):
    messages, read, error = DECODERS[name]
    packed = bytearray(msgpack.packb(data.draw(st.sampled_from(messages))))
    for bit in data.draw(st.lists(st.integers(0, 8 * len(packed) - 1), min_size=1, max_size=5)):
        packed[bit // 8] ^= 1 << bit % 8
    try:
        message = msgpack.unpackb(bytes(packed), strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException):
        return
    if isinstance(message, dict):
        decoded(read, message, error)


@pytest.mark.parametrize("depth", [100, 1_000, 10_000, 100_000])
def test_nested_arrays_are_an_error_however_deep(depth):
    """Before the decoder of a union knows the kind of message, it skips unknown fields."""
    nested = b"\x82\xa1x" + b"\x91" * depth + b"\xc0" + b"\xa4type\xa7refused"
    with pytest.raises(ProtocolError):
        decode(SAID_DECODER, nested, MAX_MESSAGE_BYTES)


BODIES = st.binary(max_size=200) | VALUES.map(msgpack.packb)


@settings(deadline=None)
@given(body=BODIES, length=st.none() | st.integers(0, 2**32 - 1), cut=st.integers(0, 200))
def test_any_bytes_on_a_channel_are_a_message_or_an_error(body, length, cut):
    """The announced length may differ from the actual one, and the frame may be cut off."""
    frame = struct.pack("<I", len(body) if length is None else length) + body
    ours, theirs = socket.socketpair()

    async def receive() -> None:
        channel = Channel(ours, max_message_bytes=1024)
        try:
            assert isinstance(await channel.read(SAID_DECODER, 5.0), Struct)
        except (ProtocolError, PeerUnreachable):
            pass
        finally:
            channel.close()

    with theirs:
        theirs.sendall(frame[: max(0, len(frame) - cut)])
        theirs.shutdown(socket.SHUT_WR)
        decoded(lambda _: asyncio.run(receive()), None, ProtocolError)


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    directory: Path = tmp_path_factory.mktemp("keys")
    yield Hello.of(credentials(directory, "a"), plain=False).encode()


@settings(deadline=None)
@given(data=st.data())
def test_any_greeting_is_one_or_an_error(hello, data):
    changed = bytearray(hello)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(changed) - 1), max_size=5)):
        changed[bit // 8] ^= 1 << bit % 8
    garbage = data.draw(st.binary(max_size=300) | st.just(bytes(changed)))[: data.draw(st.integers(0, 600))]
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def read() -> None:
        try:
            async with asyncio.timeout(5.0):
                said = await greeting.read_hello(ours)
            assert said.peer_id
        except (ProtocolError, OSError):
            # An OSError if the greeting breaks off.
            pass

    with ours, theirs:
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        decoded(lambda _: asyncio.run(read()), None, ProtocolError)


@settings(deadline=None)
@given(certificate=st.binary(max_size=3000))
def test_any_certificate_is_one_or_a_protocol_error(certificate):
    decoded(public_key_of, certificate, ProtocolError)
