"""The members of a reduction in one process, joined by socket pairs."""

from __future__ import annotations

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from peers.errors import RoundFailed
from peers.reduce.all_reduce import reduce_pseudo_gradients
from peers.reduce.plan import ReducePlan, equal_bounds

RANKS = (2, 5, 7, 11, *range(20, 40))


class ReductionGroup:
    """A group of members in one process, joined by socket pairs: one for each direction of each pair."""

    def __init__(
        self,
        num_members,
        numel,
        *,
        codec="fp32",
        weights=None,
        bounds=None,
        seed=0,
        rule="clip",
        num_columns=0,
    ):
        self.rule, self.num_columns = rule, num_columns
        self.generator, self.num_attempts = torch.Generator().manual_seed(seed), 0
        self.anchor = torch.randn(numel, generator=self.generator)
        self.locals = [
            self.anchor + 1e-2 * torch.randn(numel, generator=self.generator) for _ in range(num_members)
        ]
        self.results = [torch.full((numel,), float("nan")) for _ in range(num_members)]
        self.codec, self.bounds = codec, bounds or equal_bounds(numel, num_members)
        self.weights = weights or (1 / num_members,) * num_members
        self.norms = [float((self.anchor - local).double().norm()) for local in self.locals]
        self.cancelled = [threading.Event() for _ in range(num_members)]
        self.send = [{} for _ in range(num_members)]
        self.receive = [{} for _ in range(num_members)]
        for a in range(num_members):
            for b in range(num_members):
                if a != b:
                    self.send[a][b], self.receive[b][a] = socket.socketpair()

    def __len__(self):
        return len(self.locals)

    def plan(self, me):
        return ReducePlan(
            attempt=self.num_attempts.to_bytes(16, "little"),
            members=RANKS[: len(self)],
            me=me,
            weights=tuple(self.weights),
            norms=tuple(self.norms),
            bounds=self.bounds,
            codec=self.codec,
            rule=self.rule,
            num_columns=self.num_columns,
        )

    def sockets(self, me):
        """The sockets to send on and those to receive from, by world rank."""
        return tuple(
            {RANKS[other]: sock for other, sock in ends[me].items()} for ends in (self.send, self.receive)
        )

    def reduce(self, me, stall_timeout_s=20.0, timeout_s=math.inf, **options):
        return reduce_pseudo_gradients(
            self.plan(me),
            self.anchor,
            self.locals[me],
            self.results[me],
            *self.sockets(me),
            stall_timeout_s=stall_timeout_s,
            cancelled=self.cancelled[me],
            timeout_s=timeout_s,
            **options,
        )

    def close(self):
        for sockets in (*self.send, *self.receive):
            for sock in sockets.values():
                sock.close()


def outcomes(swarm, members, **kwargs):
    """What reduce returned or raised, by member."""

    def attempt(me):
        try:
            return swarm.reduce(me, **kwargs)
        except RoundFailed as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return dict(zip(members, pool.map(attempt, members), strict=True))


def assert_blamed(failures, culprit, swarm):
    for failure in failures.values():
        assert isinstance(failure, RoundFailed)
        assert failure.suspects == {RANKS[culprit]}, str(failure)
    assert all(sock.fileno() >= 0 for me in failures for sock in swarm.send[me].values())


def play_dead(group, culprit, num_bytes):
    """Receive a few bytes from each neighbour, then close everything, as a killed process does."""
    for neighbour in group.plan(culprit).neighbours:
        sock = group.receive[culprit][neighbour]
        sock.settimeout(10)
        sock.recv(num_bytes)
    for sock in (*group.receive[culprit].values(), *group.send[culprit].values()):
        sock.close()
