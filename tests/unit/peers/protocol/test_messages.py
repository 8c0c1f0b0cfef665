"""Everything that crosses the network is read back as it was written, or refused."""

from __future__ import annotations

import msgspec
import pytest

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


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_read_back_as_it_was_written(message):
    assert decode_message(encode(message)) == message


def test_a_certificate_in_a_file_is_read_back_as_it_was_written():
    assert decode_certificate(encode(CERTIFICATE)) == CERTIFICATE
    with pytest.raises(ProtocolError, match="not a certificate"):
        decode_certificate(encode(CERTIFICATE)[:-1])
    with pytest.raises(ProtocolError, match="not a certificate"):
        decode_certificate(encode(STATUS))


def test_a_phase_is_one_that_is_known_and_a_hash_a_hash():
    fields = msgspec.msgpack.decode(encode(STATUS))
    for name, value in (
        ("phase", "asleep"),
        *(("head", head) for head in ("b" * 63, "B" * 64, "b" * 64 + "\n")),
    ):
        with pytest.raises(ProtocolError, match="not a message of the swarm"):
            decode_message(msgspec.msgpack.encode({**fields, name: value}))


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
