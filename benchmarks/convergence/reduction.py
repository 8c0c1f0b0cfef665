"""One round among peers of one process: the product's reduction over socket pairs, a thread for each member."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from peers.core.weights import Aggregation
from peers.protocol.certificates import Work
from peers.reduce.all_reduce import reduce_pseudo_gradients
from peers.reduce.plan import ATTEMPT_BYTES, ReducePlan, ReduceReport, equal_bounds
from peers.reduce.residuals import Residuals
from peers.state.outer_optimizer import norm_of_pseudo_gradient

# A process that shares its cores with many others may stand still for long.
STALL_TIMEOUT_S = 300.0
_DEFAULT_AGGREGATION = Aggregation()


@dataclass(frozen=True)
class Member:
    """What one peer brings to a round about one fragment."""

    local: Tensor
    tokens: int
    """Trained since it was averaged before."""
    residuals: Residuals
    result: Tensor
    """Where the average goes."""


def average(
    anchor: Tensor,
    members: Sequence[Member],
    *,
    codec: str,
    decay: float,
    aggregation: Aggregation = _DEFAULT_AGGREGATION,
) -> int:
    """Leave the averaged pseudo-gradient with every member, and commit their residuals, which are kept times `decay`.

    Returns the bytes that a member has sent, in the mean. Raises peers.errors.RoundFailed, and AssertionError unless
    all have got the same bits.
    """
    plans = plans_of(anchor, members, codec, aggregation)
    reports = _reduced(plans, anchor, members)
    assert len({report.share_digests for report in reports}) == 1, "members hold different averages"
    for plan, member in zip(plans, members, strict=True):
        member.residuals.commit(plan, anchor, member.local, decay=decay)
    return sum(report.sent_bytes for report in reports) // len(reports)


def plans_of(
    anchor: Tensor, members: Sequence[Member], codec: str, aggregation: Aggregation
) -> list[ReducePlan]:
    """As the round's leader makes them, one for each member."""
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
    """For each member its sockets to and from each of the others, closed with the stack."""
    send: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    receive: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(count):
            if one != other:
                ends = socket.socketpair()
                send[one][other], receive[other][one] = (stack.enter_context(end) for end in ends)
    return send, receive
