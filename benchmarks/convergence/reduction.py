"""One round among peers of one process: the reduction's own arithmetic, with memory in place of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from peers.outer_optimizer import norm_of_pseudo_gradient
from peers.reduce_arithmetic import Arithmetic, Scratch
from peers.reduce_plan import ATTEMPT_BYTES, ReducePlan, equal_bounds
from peers.round_messages import Proposal
from peers.verdicts import weights_of


@dataclass(frozen=True)
class Member:
    """What one peer brings: its copy of the fragment, and the tokens it is worth."""

    local: Tensor
    tokens: int


def average(anchor: Tensor, members: Sequence[Member], results: Sequence[Tensor], *, codec: str) -> None:
    """Leave the averaged pseudo-gradient in every member's result; raises AssertionError unless all are one."""
    plans = _plans(anchor, members, codec)
    arithmetics = [
        Arithmetic(plan, anchor, member.local, result)
        for plan, member, result in zip(plans, members, results, strict=True)
    ]
    scratch = Scratch(codec)
    for owner, plan in enumerate(plans):
        for index in range(plan.num_chunks(owner)):
            _reduce_chunk(arithmetics, owner, index, scratch)
    digests = {arithmetic.share_digests() for arithmetic in arithmetics}
    assert len(digests) == 1, "members hold different averages"


def _reduce_chunk(arithmetics: Sequence[Arithmetic], owner: int, index: int, scratch: Scratch) -> None:
    """Contributions to the owner in order of world rank, then its result to all."""
    mine = arithmetics[owner]
    for member, arithmetic in enumerate(arithmetics):
        if member == owner:
            mine.add_own(index, scratch)
        else:
            mine.add(member, index, arithmetic.encode_contribution(owner, index, scratch), scratch)
    payload = mine.encode_result(index, scratch).clone()
    for member, arithmetic in enumerate(arithmetics):
        if member != owner:
            arithmetic.take_result(owner, index, payload, scratch)
    mine.settle_result(index, payload)


def _plans(anchor: Tensor, members: Sequence[Member], codec: str) -> list[ReducePlan]:
    """As the round's leader makes them, one for each member."""
    norms = [norm_of_pseudo_gradient(anchor, member.local) for member in members]
    proposals = [
        Proposal(rank=rank, tokens=member.tokens, norm=norm, step=0, last=False)
        for rank, (member, norm) in enumerate(zip(members, norms, strict=True))
    ]
    return [
        ReducePlan(
            attempt=bytes(ATTEMPT_BYTES),
            members=tuple(range(len(members))),
            me=me,
            weights=weights_of(proposals),
            norms=tuple(norms),
            bounds=equal_bounds(anchor.numel(), len(members)),
            codec=codec,
        )
        for me in range(len(members))
    ]
