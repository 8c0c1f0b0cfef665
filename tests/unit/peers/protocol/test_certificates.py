"""What a certificate proves, and that every peer computes the same hash of it."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from peers.protocol import libp2p_keys
from peers.protocol.certificates import Body, Certificate, Contributor, Member, Plan, Signature, Work
from peers.protocol.messages import Certificates, decode_message
from peers.protocol.wire import encode

A, B, C = "a" * 64, "b" * 64, "c" * 64


class Ed25519Keys:
    """A real identity key."""

    def __init__(self) -> None:
        self._key = libp2p_keys.private_key(libp2p_keys.new_private_key())
        self._public_key = libp2p_keys.public_key(self._key)
        self.peer_id = libp2p_keys.peer_id_of(self._public_key)

    def sign(self, payload: bytes) -> Signature:
        return Signature(public_key=self._public_key, signature=libp2p_keys.sign(self._key, payload))


def verify(peer_id: str, payload: bytes, signature: Signature) -> bool:
    return libp2p_keys.verify(peer_id, signature.public_key, payload, signature.signature)


KEYS = [Ed25519Keys() for _ in range(3)]


def body_of(names, *, is_genesis: bool = False, anchor: str = B) -> Body:
    work = Work(tokens=100, norm=1.5, step=10, based_on=3)
    contributors = tuple(
        Contributor(peer_id=name, world_rank=n, work=work, weight=1 / len(names))
        for n, name in enumerate(names)
    )
    plan = Plan(
        manifest=A,
        parent=B,
        epoch=4,
        fragment=0,
        attempt=2,
        contributors=() if is_genesis else contributors,
        roster=tuple(Member(peer_id=name, world_rank=n) for n, name in enumerate(names)),
        data_base=9,
        tokens=1000,
    )
    return Body(plan=plan, anchor=anchor, momentum=C)


def certificate_of(body: Body, keys=KEYS) -> Certificate:
    return Certificate(body=body, signatures=tuple(key.sign(body.signed_bytes) for key in keys))


NAMES = [key.peer_id for key in KEYS]
BODY = body_of(NAMES)
CERTIFICATE = certificate_of(BODY)


def test_a_certificate_that_all_contributors_have_signed_is_signed():
    assert CERTIFICATE.is_signed(verify)
    assert certificate_of(body_of(NAMES, is_genesis=True)).is_signed(verify)


def test_it_is_still_signed_after_it_has_crossed_the_network():
    message = decode_message(encode(Certificates(head=CERTIFICATE.head, certificates=(CERTIFICATE,))))
    assert message.certificates[0].head == CERTIFICATE.head
    assert message.certificates[0].is_signed(verify)


STRANGER = Ed25519Keys()
OTHER_BODY = body_of(NAMES, anchor=C)


@pytest.mark.parametrize(
    "signatures",
    [
        CERTIFICATE.signatures[:-1],
        (*CERTIFICATE.signatures, CERTIFICATE.signatures[0]),
        (*CERTIFICATE.signatures, STRANGER.sign(BODY.signed_bytes)),
        (CERTIFICATE.signatures[0],) * 3,
        CERTIFICATE.signatures[::-1],
        (*CERTIFICATE.signatures[:-1], STRANGER.sign(BODY.signed_bytes)),
        (*CERTIFICATE.signatures[:-1], KEYS[2].sign(OTHER_BODY.signed_bytes)),
        (*CERTIFICATE.signatures[:-1], KEYS[2].sign(b"")),
        (*CERTIFICATE.signatures[:-1], Signature(public_key=b"", signature=b"")),
    ],
    ids=[
        "one is missing",
        "one twice",
        "a stranger's beside them",
        "one for all",
        "in another order",
        "a stranger's in place of one",
        "one under another body",
        "one under nothing",
        "an empty one",
    ],
)
def test_other_signatures_than_one_of_each_contributor_are_refused(signatures):
    assert not Certificate(body=BODY, signatures=signatures).is_signed(verify)


def test_a_contributor_that_is_named_twice_cannot_sign_twice():
    body = body_of([NAMES[0], NAMES[0]])
    assert not certificate_of(body, [KEYS[0], KEYS[0]]).is_signed(verify)
    body = body_of([NAMES[0], NAMES[0]], is_genesis=True)
    assert not certificate_of(body, [KEYS[0], KEYS[0]]).is_signed(verify)


def test_a_signature_under_a_body_is_none_under_its_plan_or_any_other_text():
    assert BODY.signed_bytes.startswith(b"diloco commit v4\0")
    assert BODY.signed_bytes != encode(Certificates(head=A, certificates=(CERTIFICATE,)))


def test_the_head_changes_with_everything_that_is_signed_and_not_with_the_signatures():
    heads = {
        BODY.head,
        replace(BODY, anchor=C).head,
        replace(BODY, momentum=B).head,
        *(
            replace(BODY, plan=replace(BODY.plan, **change)).head
            for change in (
                {"manifest": C},
                {"parent": C},
                {"epoch": 5},
                {"fragment": 1},
                {"attempt": 3},
                {"contributors": ()},
                {"roster": BODY.plan.roster[:2]},
                {"data_base": 10},
                {"tokens": 1001},
            )
        ),
    }
    assert len(heads) == 12
    assert replace(CERTIFICATE, signatures=CERTIFICATE.signatures[:1]).head == CERTIFICATE.head


def test_the_head_of_a_body_is_what_it_always_was():
    # A change of this value changes the protocol: peers from before and after it cannot share a swarm.
    body = body_of(["peer one", "peer two"])
    assert body.plan.digest == "8e213cbe95efd4d7881be11060e6f55d7c241eb17738091057420ddabce9cc5f"
    assert body.head == "51fce9ea02a288c2bb3d8ee46f7b157cd2106f7e2516ca23f0fbe4ced357ce09"


def test_contributors_sign_and_of_a_genesis_the_roster_does():
    assert BODY.plan.signers == tuple(NAMES)
    late = replace(BODY.plan, contributors=BODY.plan.contributors[:2])
    assert late.signers == tuple(NAMES[:2])
    assert late.signer_set == set(NAMES[:2]) and late.roster_set == set(NAMES)
    genesis = body_of(NAMES, is_genesis=True)
    assert genesis.plan.signers == tuple(NAMES)
    assert certificate_of(genesis).is_genesis
    assert not CERTIFICATE.is_genesis


def test_fifty_members_sign_and_check_a_commit_in_little_more_than_their_signatures_take():
    keys = [Ed25519Keys() for _ in range(50)]
    body = body_of([key.peer_id for key in keys])
    plain = keys[0].sign(b"x" * 100)

    def unit_s() -> float:
        """The time that this machine takes to make one signature and check 51."""
        began = time.thread_time()
        keys[0].sign(b"x" * 100)
        for _ in range(51):
            verify(keys[0].peer_id, b"x" * 100, plain)
        return time.thread_time() - began

    signatures = tuple(key.sign(body.signed_bytes) for key in keys)

    def commit_s() -> float:
        """The time of one member's part: it signs, and checks the certificate that arrives."""
        fresh = replace(body, anchor=body.anchor)
        began = time.thread_time()
        keys[0].sign(fresh.signed_bytes)
        assert Certificate(body=fresh, signatures=signatures).is_signed(verify)
        return time.thread_time() - began

    unit, used = min(unit_s() for _ in range(5)), min(commit_s() for _ in range(5))
    # This is 20 ms on a machine that checks a signature in 130 microseconds.
    assert used < 3 * unit, f"{used * 1e3:.1f} ms; 51 signatures take {unit * 1e3:.1f} ms here"
