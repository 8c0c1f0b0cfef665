"""Builders of certificates, statuses and keys for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from diloco.sim.keys import KeyRing
from diloco.sim.values import digest
from peers.core.peer import Peer
from peers.core.plans import Entry, plan_of
from peers.core.settings import Settings
from peers.protocol.certificates import Body, Certificate, Member, Plan, Work
from peers.protocol.messages import Offer, Status, Vote

MANIFEST = "f" * 64
SETTINGS = Settings(manifest=MANIFEST, steps_per_epoch=10, galaxy_size=3)


def with_settings(**changes) -> Settings:
    return dataclasses.replace(SETTINGS, **changes)


RING = KeyRing(seed=0)
Keys, verify = RING.keys_of, RING.verify
"""The same keys as in a Swarm (swarm.py)."""


def work(
    tokens: int = 100,
    *,
    norm: float = 1.0,
    step: int = 10,
    based_on: int = 0,
    last: bool = False,
    moves: int = 0,
) -> Work:
    return Work(tokens=tokens, norm=norm, step=step, based_on=based_on, last=last, moves=moves)


def members(names: Iterable[str] | Mapping[str, int]) -> tuple[Member, ...]:
    ranks = names if isinstance(names, Mapping) else {name: rank for rank, name in enumerate(names)}
    return tuple(Member(peer_id=name, world_rank=rank) for name, rank in ranks.items())


def signed(body: Body) -> Certificate:
    return Certificate(
        body=body,
        signatures=tuple(Keys(signer).sign(body.signed_bytes) for signer in body.plan.signers),
    )


def genesis(names: Sequence[str] | Mapping[str, int], *, epoch: int = 0, **others) -> Certificate:
    plan = {
        "manifest": MANIFEST,
        "parent": "",
        "epoch": epoch,
        "fragment": 0,
        "attempt": 0,
        "contributors": (),
        "roster": members(names),
        "data_base": 0,
        "tokens": 0,
        **others,
    }
    return signed(Body(plan=Plan(**plan), anchor=digest("anchor"), momentum=digest("momentum")))


def commit(
    before: Certificate,
    signers: Iterable[str],
    *,
    attempt: int = 0,
    off: Collection[str] = (),
    works: Mapping[str, Work] | None = None,
    salt: object = "",
    **others,
) -> Certificate:
    """The certificate, signed by `signers`, of the plan that follows `before`, with the plan fields in `others`. A
    signer's `moves` are the epochs before unless `works` says otherwise."""
    epoch = before.plan.epoch
    usual = work(based_on=epoch, moves=epoch)
    entries = {name: Entry(-1, (works or {}).get(name, usual)) for name in signers}
    plan = plan_of(before, attempt, entries, off=off, data_width=1, settings=SETTINGS)
    name = before.head, sorted(entries), attempt, salt
    body = Body(
        plan=replace(plan, **others), anchor=digest("anchor", *name), momentum=digest("momentum", *name)
    )
    return signed(body)


def chain_of(before: Certificate, signers: Iterable[str], length: int, **others) -> list[Certificate]:
    made: list[Certificate] = []
    for _ in range(length):
        made.append(commit(made[-1] if made else before, signers, **others))
    return made


OFFER = Offer(anchor=digest("anchor"), momentum=digest("momentum"))


def status(
    certificate: Certificate | None = None,
    phase: str = "training",
    *,
    sequence: int = 1,
    world_rank: int = -1,
    **others,
) -> Status:
    """The status of a peer whose newest certificate is `certificate`."""
    if certificate is not None:
        others = {"head": certificate.head, "epoch": certificate.plan.epoch, **others}
    return Status(incarnation=1, sequence=sequence, world_rank=world_rank, phase=phase, **others)


def a_peer(
    name: str = "a",
    *,
    settings: Settings = SETTINGS,
    pledges: Mapping[str, int] | None = None,
    rank: int = -1,
) -> Peer:
    peer = Peer(
        keys=Keys(name),
        verify=verify,
        settings=settings,
        incarnation=1,
        world_rank=rank,
        pledges=pledges or {},
        now=0.0,
    )
    # Its moves are the epochs before, as in `commit`.
    peer.worker.moves = -1
    return peer


def vote_of(sender: str, body: Body) -> Vote:
    """The vote of `sender` for `body`."""
    plan = body.plan
    return Vote(
        head=plan.parent,
        attempt=plan.attempt,
        plan=plan.digest,
        anchor=body.anchor,
        momentum=body.momentum,
        signature=Keys(sender).sign(body.signed_bytes),
    )
