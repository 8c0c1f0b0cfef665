"""Everything that crosses the network is read back as it was written, or refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.errors import ProtocolError
from peers.protocol import limits
from peers.protocol.certificates import (
    Body,
    Certificate,
    Contributor,
    Member,
    Plan,
    Signature,
    Work,
    decode_certificate,
)
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
    decode_message,
)
from peers.protocol.wire import encode

A, B, C = "a" * 64, "b" * 64, "c" * 64
WORK = Work(tokens=7, norm=1.5, step=3, based_on=1, last=True, bandwidth=2.5)
SIGNATURE = Signature(public_key=b"key", signature=b"signed")
PLAN = Plan(
    manifest=A,
    parent=B,
    epoch=4,
    fragment=1,
    attempt=2,
    contributors=(Contributor(peer_id="p", world_rank=0, work=WORK, weight=1.0),),
    roster=(Member(peer_id="p", world_rank=0), Member(peer_id="q", world_rank=5)),
    data_base=9,
    tokens=11,
)
BODY = Body(plan=PLAN, anchor=B, momentum=C)
CERTIFICATE = Certificate(body=BODY, signatures=(SIGNATURE,))
OFFER = Offer(anchor=A, momentum=B, certificate=CERTIFICATE)
STATUS = Status(
    incarnation=1,
    sequence=2,
    world_rank=-1,
    phase="ready",
    genesis=A,
    head=B,
    epoch=3,
    attempt=4,
    work=WORK,
    offer=OFFER,
    local_step=5,
    step_s=0.25,
)
ODD = OddVote(peer_id="q", anchor=A, momentum=B, signature=SIGNATURE)
MESSAGES = [
    STATUS,
    Status(incarnation=0, sequence=0, world_rank=0, phase="waiting"),
    Propose(plan=PLAN),
    Vote(head=A, attempt=1, plan=B, anchor=A, momentum=C, signature=SIGNATURE),
    Vote(head="", attempt=0, plan=B, anchor=A, momentum=C, signature=SIGNATURE),
    Decline(head=A, attempt=1, reason="busy", suspects=("q",)),
    Abort(head=A, attempt=1, reason="lost q", lost=("q",), votes=(ODD,)),
    Certificates(head=A, certificates=(CERTIFICATE, CERTIFICATE)),
    Certificates(head=A, certificates=()),
    Ask(head=A, have=B),
    Found(body=BODY),
]


def raw(message) -> dict:
    return msgspec.msgpack.decode(encode(message))


def changed(message, path: str, value: object) -> bytes:
    """The message with the field at this dotted path replaced; an unknown one is added."""
    fields = raw(message)
    *way, last = path.split(".")
    at, typed = fields, message
    for name in way:
        at = at[place_of(name, at, typed)]
        typed = typed[int(name)] if name.isdigit() else getattr(typed, name)
    place = place_of(last, at, typed)
    if place == len(at):
        at.append(value)
    else:
        at[place] = value
    return msgspec.msgpack.encode(fields)


def place_of(name: str, at: dict | list, typed) -> str | int:
    """Where a field is in what its struct was written as: some go without the names of their fields."""
    if isinstance(at, dict):
        return name
    names = list(getattr(typed, "__struct_fields__", ()))
    return int(name) if name.isdigit() else names.index(name) if name in names else len(at)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_read_back_as_it_was_written(message):
    assert decode_message(encode(message)) == message


def test_a_certificate_in_a_file_is_read_back_as_it_was_written():
    assert decode_certificate(encode(CERTIFICATE)) == CERTIFICATE
    with pytest.raises(ProtocolError, match="not a certificate"):
        decode_certificate(encode(CERTIFICATE)[:-1])
    with pytest.raises(ProtocolError, match="not a certificate"):
        decode_certificate(encode(STATUS))


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        *[(STATUS, f"work.{name}", -1) for name in ("tokens", "norm", "step", "based_on", "bandwidth")],
        (STATUS, "work.tokens", limits.MAX_TOKENS + 1),
        (STATUS, "work.step", limits.MAX_COUNT + 1),
        (STATUS, "work.norm", math.nan),
        (STATUS, "work.norm", math.inf),
        (STATUS, "work.norm", 1.1 * limits.MAX_NORM),
        (STATUS, "work.bandwidth", math.nan),
        (STATUS, "work.bandwidth", math.inf),
        (STATUS, "work.last", 1),
        (STATUS, "step_s", math.nan),
        (STATUS, "step_s", -1.0),
        (STATUS, "world_rank", -2),
        (STATUS, "world_rank", limits.MAX_WORLD_RANK + 1),
        (STATUS, "phase", "asleep"),
        (STATUS, "phase", None),
        (STATUS, "head", "b" * 63),
        (STATUS, "head", "B" * 64),
        (STATUS, "head", "b" * 64 + "\n"),
        (STATUS, "head", "\n"),
        (STATUS, "head", None),
        (STATUS, "attempt", limits.MAX_COUNT),
        (STATUS, "incarnation", limits.MAX_COUNT + 1),
        (STATUS, "sequence", 1.5),
        (STATUS, "offer.certificate", 1),
        (STATUS, "offer.anchor", ""),
        (STATUS, "more", 1),
        (STATUS, "work.more", 1),
        (STATUS, "type", "letter"),
        (STATUS, "type", 3),
        (Propose(plan=PLAN), "plan.roster", []),
        (Propose(plan=PLAN), "plan.parent", "x"),
        (Propose(plan=PLAN), "plan.manifest", ""),
        (Propose(plan=PLAN), "plan.contributors.0.weight", math.nan),
        (Propose(plan=PLAN), "plan.contributors.0.weight", 1.5),
        (Propose(plan=PLAN), "plan.contributors.0.weight", -0.5),
        (Propose(plan=PLAN), "plan.contributors.0.peer_id", ""),
        (Propose(plan=PLAN), "plan.contributors.0.peer_id", "p" * 129),
        (Propose(plan=PLAN), "plan.contributors.0.world_rank", -1),
        (MESSAGES[3], "signature.signature", b"s" * 1025),
        (MESSAGES[3], "signature.public_key", b"k" * 1025),
        (MESSAGES[3], "signature.signature", "text"),
        (MESSAGES[3], "plan", ""),
        (MESSAGES[5], "reason", "r" * 301),
        (MESSAGES[5], "suspects", ["q"] * (limits.MAX_PEERS + 1)),
        (MESSAGES[6], "lost", [""]),
        (MESSAGES[7], "head", ""),
        (MESSAGES[7], "certificates.0.signatures", []),
    ],
)
def test_a_value_outside_its_limits_is_refused(message, path, value):
    with pytest.raises(ProtocolError, match="not a message of the swarm"):
        decode_message(changed(message, path, value))


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (STATUS, "type"),
        (STATUS, "sequence"),
        (STATUS, "phase"),
        (MESSAGES[2], "plan"),
        (MESSAGES[3], "signature"),
    ],
)
def test_a_message_without_a_field_that_it_needs_is_refused(message, name):
    fields = raw(message)
    del fields[name]
    with pytest.raises(ProtocolError, match="not a message of the swarm"):
        decode_message(msgspec.msgpack.encode(fields))


def test_more_certificates_than_one_message_may_carry_are_refused():
    many = Certificates(head=A, certificates=(CERTIFICATE,) * (limits.MAX_CERTIFICATES + 1))
    with pytest.raises(ProtocolError, match="length"):
        decode_message(encode(many))


def test_a_message_longer_than_the_limit_is_refused_before_it_is_read():
    with pytest.raises(ProtocolError, match=str(limits.MAX_MESSAGE_BYTES)):
        decode_message(b"\xc0" * (limits.MAX_MESSAGE_BYTES + 1))


def test_bytes_after_a_message_are_refused():
    with pytest.raises(ProtocolError):
        decode_message(encode(STATUS) + b"\0")


def test_every_counter_at_its_maximum_can_be_read_back():
    most = limits.MAX_COUNT
    work = Work(
        tokens=limits.MAX_TOKENS,
        norm=limits.MAX_NORM,
        step=most,
        based_on=most,
        bandwidth=limits.MAX_REAL,
    )
    status = Status(
        incarnation=most,
        sequence=most,
        world_rank=limits.MAX_WORLD_RANK,
        phase="leaving",
        epoch=2 * limits.MAX_EPOCH,
        attempt=limits.MAX_ATTEMPT,
        work=work,
        local_step=most,
        step_s=limits.MAX_REAL,
    )
    assert decode_message(encode(status)) == status


def test_a_plan_of_as_many_peers_as_a_roster_may_have_fits_into_a_message():
    work = Work(tokens=limits.MAX_TOKENS, norm=1.0, step=1 << 40, based_on=1 << 40, bandwidth=1e8)
    names = [f"12D3KooW{n:044d}" for n in range(limits.MAX_PEERS)]
    plan = Plan(
        manifest=A,
        parent=B,
        epoch=1 << 40,
        fragment=0,
        attempt=0,
        contributors=tuple(
            Contributor(peer_id=name, world_rank=n, work=work, weight=0.01) for n, name in enumerate(names)
        ),
        roster=tuple(Member(peer_id=name, world_rank=n) for n, name in enumerate(names)),
        data_base=1 << 40,
        tokens=1 << 40,
    )
    assert decode_message(encode(Propose(plan=plan))) == Propose(plan=plan)
    signature = Signature(public_key=b"k" * 36, signature=b"s" * 64)
    certificate = Certificate(
        body=Body(plan=plan, anchor=A, momentum=B), signatures=(signature,) * limits.MAX_PEERS
    )
    answer = Certificates(head=certificate.head, certificates=(certificate,))
    assert decode_message(encode(answer)) == answer
    odd = tuple(OddVote(peer_id=name, anchor=A, momentum=B, signature=signature) for name in names)
    abort = Abort(head=A, attempt=0, reason="differ", lost=tuple(names), votes=odd)
    assert decode_message(encode(abort)) == abort


@given(st.binary(max_size=300))
def test_garbage_is_refused_as_such(blob):
    with pytest.raises(ProtocolError):
        decode_message(blob)


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=70)
    | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_any_value_in_any_field_is_read_or_refused(message, data):
    fields = raw(message)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json)
    try:
        decoded = decode_message(msgspec.msgpack.encode(fields))
    except ProtocolError:
        return
    assert decode_message(encode(decoded)) == decoded


@given(st.sampled_from(MESSAGES), st.integers(0, 400), st.integers(0, 255))
def test_a_message_with_one_byte_changed_is_read_or_refused(message, at, byte):
    blob = bytearray(encode(message))
    blob[at % len(blob)] = byte
    try:
        decoded = decode_message(bytes(blob))
    except ProtocolError:
        return
    assert decode_message(encode(decoded)) == decoded
