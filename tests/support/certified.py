"""Outer states with certificates, as rounds leave them. Their signatures are empty, except in `signed_genesis`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from peers.net.identity import claim_slot
from peers.protocol.certificates import Body, Certificate, Contributor, Member, Plan, Signature, Work
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState
from peers.state.preview import Preview

MANIFEST = "f" * 64


def begun(anchor: Sequence[Tensor], *, num_members: int = 3, epoch: int = 0) -> OuterState:
    """A state that a run begins from."""
    state = OuterState.initial(anchor)
    plan = _genesis(_roster(num_members), epoch)
    state.certify(_signed(Body(plan=plan, anchor=state.anchor_digest, momentum=state.header.momentum_digest)))
    return state


def commit(
    state: OuterState,
    average: Tensor,
    *,
    optimizer: OuterOptimizer | None = None,
    fragment: int = 0,
    tokens: int = 9,
    num_members: int = 3,
    data_width: int = 3,
    bandwidth: float = 0.0,
    into: Tensor | None = None,
) -> Certificate:
    """Make an outer step with so many members. Returns its certificate."""
    optimizer = optimizer or OuterOptimizer(lr=0.7, momentum=0.9)
    with Preview(optimizer, state, fragment, average) as preview:
        preview.settled(slice(0, average.numel()))
        header = preview.header()
    certificate = certificate_after(
        state,
        anchor=header.anchor_digest,
        momentum=header.momentum_digest,
        fragment=fragment,
        tokens=tokens,
        num_members=num_members,
        data_width=data_width,
        bandwidth=bandwidth,
    )
    optimizer.commit(state, fragment, average, certificate=certificate, previewed=header, into=into)
    return certificate


def signed_genesis(
    directory: Path, anchor: str = "a" * 64, momentum: str = "0" * 64, *, num_members: int = 2
) -> Certificate:
    """A genesis with valid signatures, by identities that are created in `directory`."""
    identities = [claim_slot(directory, f"member{rank}", None) for rank in range(num_members)]
    roster = tuple(Member(peer_id=one.peer_id, world_rank=rank) for rank, one in enumerate(identities))
    body = Body(plan=_genesis(roster, epoch=0), anchor=anchor, momentum=momentum)
    signatures = tuple(one.sign(body.signed_bytes) for one in identities)
    for identity in identities:
        identity.release()
    return Certificate(body=body, signatures=signatures)


def certificate_after(
    state: OuterState,
    *,
    anchor: str,
    momentum: str,
    fragment: int = 0,
    tokens: int = 9,
    num_members: int = 3,
    data_width: int = 3,
    bandwidth: float = 0.0,
) -> Certificate:
    """The certificate of a commit that follows this state and leads to these digests."""
    header = state.header
    assert header.certificate is not None
    plan = Plan(
        manifest=MANIFEST,
        parent=header.head,
        epoch=header.epoch + 1,
        fragment=fragment,
        attempt=0,
        contributors=tuple(
            Contributor(
                peer_id=member.peer_id,
                world_rank=member.world_rank,
                work=Work(
                    tokens=tokens // num_members, norm=1.0, step=1, based_on=header.epoch, bandwidth=bandwidth
                ),
                weight=1 / num_members,
            )
            for member in _roster(num_members)
        ),
        roster=_roster(num_members),
        data_base=(header.certificate.plan.data_base if header.certificate else 0) + data_width,
        tokens=header.committed_tokens + tokens,
    )
    return _signed(Body(plan=plan, anchor=anchor, momentum=momentum))


def _genesis(roster: tuple[Member, ...], epoch: int) -> Plan:
    nothing = {"parent": "", "fragment": 0, "attempt": 0, "contributors": (), "data_base": 0, "tokens": 0}
    return Plan(manifest=MANIFEST, epoch=epoch, roster=roster, **nothing)


def _roster(num_members: int) -> tuple[Member, ...]:
    return tuple(Member(peer_id=f"peer{rank}", world_rank=rank) for rank in range(num_members))


def _signed(body: Body) -> Certificate:
    nobodys = Signature(public_key=b"", signature=b"")
    return Certificate(body=body, signatures=tuple(nobodys for _ in body.plan.signers))
