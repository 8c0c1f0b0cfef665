"""One round among peers in one process: the product's reduction over socket pairs, with a thread per member."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.core.weights import Aggregation
from peers.protocol.certificates import Work
from peers.reduce.all_reduce import reduce_pseudo_gradients
from peers.reduce.arithmetic import norm_of_pseudo_gradient
from peers.reduce.plan import ATTEMPT_BYTES, ReducePlan, ReduceReport, equal_bounds
from peers.reduce.residuals import Residuals

# Long, since a process that shares its cores with many others may not be scheduled for a while.
STALL_TIMEOUT_S = 300.0
_DEFAULT_AGGREGATION = Aggregation()


@dataclass(frozen=True)
class Member:
    """One peer's input to a round of one fragment, and the buffer for its result."""

    local: Tensor
    tokens: int
    """Tokens trained since the fragment was last averaged."""
    residuals: Residuals
    result: Tensor
    """Buffer for the average."""


def average(
    anchor: Tensor,
    members: Sequence[Member],
    *,
    codec: str,
    decay: float,
    aggregation: Aggregation = _DEFAULT_AGGREGATION,
) -> int:
    """Write the averaged pseudo-gradient to every member's `result`, and commit their residuals, scaled by `decay`.

    Returns the mean number of bytes that a member has sent. Raises peers.errors.RoundFailed, and AssertionError unless
    all members have bit-identical results.
    """
    plans = plans_of(anchor, members, codec, aggregation)
    reports = _reduced(plans, anchor, members)
    first, *others = (member.result.view(torch.int32) for member in members)
    assert all(torch.equal(first, other) for other in others), "members hold different averages"
    for plan, member in zip(plans, members, strict=True):
        member.residuals.commit(plan, anchor, member.local, decay=decay)
    return sum(report.sent_bytes for report in reports) // len(reports)


def plans_of(
    anchor: Tensor, members: Sequence[Member], codec: str, aggregation: Aggregation
) -> list[ReducePlan]:
    """The plans of all members, as the leader of a round would make them."""
    norms = [norm_of_pseudo_gradient(anchor, m.local, m.residuals.contribution_residual) for m in members]
    works = [
        Work(tokens=member.tokens, norm=norm, step=0, based_on=0)
        for member, norm in zip(members, norms, strict=True)
    ]
    attempt = secrets.token_bytes(ATTEMPT_BYTES)
    return [
        ReducePlan(
            attempt=attempt,
            members=tuple(range(len(members))),
            me=me,
            weights=aggregation.weights_of(works, epoch=1, num_fragments=1),
            norms=tuple(norms),
            bounds=equal_bounds(anchor.numel(), len(members)),
            codec=codec,
            rule=aggregation.rule,
            trim=aggregation.trim,
        )
        for me in range(len(members))
    ]


def _reduced(plans: Sequence[ReducePlan], anchor: Tensor, members: Sequence[Member]) -> list[ReduceReport]:
    cancelled = threading.Event()
    with contextlib.ExitStack() as stack:
        send, receive = _connected(stack, len(members))

        def reduce(me: int) -> ReduceReport:
            member = members[me]
            return reduce_pseudo_gradients(
                plans[me],
                anchor,
                member.local,
                member.result,
                send[me],
                receive[me],
                stall_timeout_s=STALL_TIMEOUT_S,
                cancelled=cancelled,
                residuals=member.residuals,
            )

        pool = stack.enter_context(ThreadPoolExecutor(len(members), "member"))
        return list(pool.map(reduce, range(len(members))))


def _connected(
    stack: contextlib.ExitStack, count: int
) -> tuple[list[dict[int, socket.socket]], list[dict[int, socket.socket]]]:
    """For each member, its sockets to and from each other member. The stack closes them."""
    send: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    receive: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(count):
            if one != other:
                ends = socket.socketpair()
                send[one][other], receive[other][one] = (stack.enter_context(end) for end in ends)
    return send, receive
