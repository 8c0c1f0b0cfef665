"""Reductions along the columns and rows of a grid: the neighbours of a member, the sums, and who is to blame."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from peers.errors import ProtocolError, RoundFailed
from peers.protocol.codecs import CODEC_NAMES
from peers.reduce.arithmetic import Arithmetic, Scratch
from peers.reduce.frames import HEADER, Kind
from peers.reduce.grid import Grid, best_grid, can_divide
from peers.reduce.plan import CHUNK_NUMEL, Chunk
from peers.reduce.progress import Progress
from peers.reduce.residuals import Residuals
from tests.support.exhaustive import exhaustive_but
from tests.support.reduction_group import RANKS, assert_blamed, outcomes, play_dead

SEVERAL_CHUNKS = 4 * 3 * CHUNK_NUMEL + 1234


def assert_equal_bits(group):
    for result in group.results[1:]:
        assert torch.equal(result.view(torch.int32), group.results[0].view(torch.int32))


def mean_of(group):
    return sum((group.anchor - local).double() for local in group.locals) / len(group)


@pytest.mark.parametrize("num_members", [4, 5, 7, 16, 17, 21, 24, 50, 101, 1000])
def test_everybody_collects_from_somebody_and_has_few_neighbours(num_members):
    grid = best_grid(num_members)
    heights = {len(column) for column in grid.columns}
    assert max(heights) - min(heights) <= 1
    for member in range(num_members):
        assert grid.sources(member)
        neighbours = grid.neighbours(member)
        assert all(member in grid.neighbours(other) for other in neighbours)
        assert len(neighbours) <= 2 * (num_members**0.5 + 2)


@pytest.mark.parametrize("num_members", [4, 7, 16, 23])
def test_every_members_values_come_to_every_owner_once_and_back(num_members):
    grid = best_grid(num_members)
    for owner in range(num_members):
        collected = [m for mate in grid.column(owner) for m in (mate, *grid.sources(mate))]
        assert sorted(collected) == list(range(num_members))


def test_with_one_member_a_column_all_exchange_with_all():
    grid = Grid(7, 7)
    for member in range(7):
        assert grid.sources(member) == grid.neighbours(member) == tuple(m for m in range(7) if m != member)
        assert grid.mates(member) == ()


@pytest.mark.parametrize(("num_members", "num_columns"), [(4, 1), (5, 2), (4, 5), (4, 0), (21, 5)])
def test_a_grid_in_which_somebody_would_collect_nothing_is_refused(num_members, num_columns):
    assert not can_divide(num_members, num_columns)
    with pytest.raises(ValueError, match="columns"):
        Grid(num_members, num_columns)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("numel", [1, 1000, SEVERAL_CHUNKS])
@pytest.mark.parametrize(("num_members", "num_columns"), [(4, 2), (8, 3), (9, 3)])
def test_all_members_hold_the_same_bits_and_the_right_average(swarm, num_members, num_columns, numel, codec):
    group = swarm(num_members, numel, codec=codec, num_columns=num_columns)
    reports = outcomes(group, range(num_members)).values()
    assert_equal_bits(group)
    assert sum(r.sent_bytes for r in reports) == sum(r.received_bytes for r in reports)
    if codec in ("fp32", "fp16", "int8"):
        error = (group.results[0] - mean_of(group)).norm() / mean_of(group).norm()
        assert error < {"fp32": 1e-6, "fp16": 1e-3, "int8": 2e-2}[codec]


def test_it_takes_as_many_bytes_as_among_all(swarm):
    numel = 18 * CHUNK_NUMEL
    for num_columns in (9, 3):
        group = swarm(9, numel, num_columns=num_columns)
        for report in outcomes(group, range(9)).values():
            assert report.sent_bytes == pytest.approx(2 * 8 / 9 * 4 * numel, rel=1e-4)


def test_the_bits_do_not_depend_on_who_comes_first(swarm):
    results = []
    for slow in (0, 5):
        group = swarm(6, 1000, num_columns=3)
        with socket_delayed(group, slow):
            outcomes(group, range(6))
        results.append(group.results[0])
    assert torch.equal(*results)


@contextlib.contextmanager
def socket_delayed(group, sender):
    """Make what this member sends arrive a moment later."""
    threads = []
    for receiver in list(group.send[sender]):
        inlet, ours = socket.socketpair()
        outlet, group.send[sender][receiver] = group.send[sender][receiver], inlet

        def pass_on(ours=ours, outlet=outlet):
            with ours, outlet:
                while piece := ours.recv(1 << 16):
                    time.sleep(0.02)
                    outlet.sendall(piece)

        threads.append(threading.Thread(target=pass_on))
        threads[-1].start()
    try:
        yield
    finally:
        for sock in group.send[sender].values():
            sock.shutdown(socket.SHUT_WR)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("codec", "num_rounds"), [("int8", 16), ("int4", 16), ("topk", 200)])
def test_what_coding_loses_of_a_sum_comes_with_the_next(swarm, codec, num_rounds):
    """The mean of many averages of the same values is closer to them than one average."""
    group = swarm(4, 3000, codec=codec, num_columns=2)
    residuals, total = [Residuals(3000) for _ in range(4)], torch.zeros(3000)
    errors = []
    for number in range(1, 1 + num_rounds):
        group.num_attempts = number
        sent = [group.anchor - local for local in group.locals]
        for me, kept in enumerate(residuals):
            own = kept.contribution_residual
            group.norms[me] = float((sent[me] + (own if own is not None else 0)).norm())
        with_residuals(group, residuals)
        total += group.results[0]
        for me, kept in enumerate(residuals):
            kept.commit(group.plan(me), group.anchor, group.locals[me], decay=1.0)
        errors.append(float((total / number - mean_of(group)).norm()))
    assert errors[-1] < errors[0] / 4


def with_residuals(group, residuals):
    with ThreadPoolExecutor(len(group)) as pool:
        list(pool.map(lambda me: group.reduce(me, residuals=residuals[me]), range(len(group))))


def test_every_part_is_reported_once_when_it_is_final(swarm):
    group = swarm(6, 7 * CHUNK_NUMEL, codec="int8", num_columns=3)
    parts = []
    outcomes(group, range(6), settled=lambda part: parts.append((part.start, part.stop)))
    assert sorted(parts) == sorted(6 * sorted(set(parts)))
    assert sum(stop - start for start, stop in parts) == 6 * 7 * CHUNK_NUMEL


def arithmetic_of(group, me):
    return Arithmetic(group.plan(me), group.anchor, group.locals[me], group.results[me])


def test_a_sum_beyond_what_its_members_have_announced_is_refused(swarm):
    group = swarm(4, 4000, num_columns=2)
    arithmetic, scratch = arithmetic_of(group, 0), Scratch(group.plan(0))
    values = np.full(1000, 1.0, np.float32)
    with pytest.raises(ProtocolError, match="sum of pseudo-gradients that is larger"):
        arithmetic.add_sum(1, Chunk(0, 0), values.view(np.uint8), scratch)


def test_a_result_that_is_too_large_is_refused_before_it_is_passed_on(swarm):
    group = swarm(4, 4000, num_columns=2, codec="fp16")
    arithmetic, scratch = arithmetic_of(group, 0), Scratch(group.plan(0))
    payload = np.full(1000, 1.0, np.float16).view(np.uint8)
    with pytest.raises(ProtocolError, match="average that is larger"):
        arithmetic.hold_result(Chunk(1, 0), payload, scratch)


@pytest.mark.parametrize("culprit", [0, 4, 8])
def test_a_member_that_dies_midway_is_named_by_all_survivors(swarm, culprit):
    group = swarm(9, SEVERAL_CHUNKS, num_columns=3)
    survivors = [me for me in range(9) if me != culprit]
    thread = threading.Thread(target=play_dead, args=(group, culprit, 100_000))
    thread.start()
    started = time.monotonic()
    failures = outcomes(group, survivors)
    thread.join()
    assert time.monotonic() - started < 15
    assert_blamed(failures, culprit, group)


@pytest.mark.parametrize("culprit", exhaustive_but((0,), [0, 4]))
def test_a_member_that_stalls_is_named_by_all_survivors(swarm, culprit):
    group = swarm(9, SEVERAL_CHUNKS, num_columns=3)
    failures = outcomes(group, [me for me in range(9) if me != culprit], stall_timeout_s=3.0)
    assert_blamed(failures, culprit, group)


def test_a_mate_that_sends_a_false_sum_is_named_by_its_mates(swarm):
    group = swarm(4, 4000, num_columns=2)
    plan = group.plan(0)
    assert plan.mates == (1,)
    payload = np.full(1000, 1e3, np.float32).tobytes()
    group.send[1][0].sendall(HEADER.pack(Kind.CONTRIBUTION, 0, len(payload)) + payload)
    failures = outcomes(group, [0, 2, 3], stall_timeout_s=5.0)
    assert failures[0].suspects == failures[0].offenders == {RANKS[1]}
    assert all(isinstance(failure, RoundFailed) for failure in failures.values())


@pytest.mark.parametrize("num_members", [16, 18, 24, 28, 32, 50, 100])
def test_columns_are_of_one_length_where_few_neighbours_allow_it(num_members):
    assert len({len(column) for column in best_grid(num_members).columns}) == 1


def test_an_average_that_comes_before_this_peers_sum_is_refused(swarm):
    """Otherwise it would be written where the sum is still being added up, and be passed on with it."""
    group = swarm(6, 600, num_columns=2, codec="int8")
    assert group.plan(0).mates == (1, 2)
    early = HEADER.pack(Kind.RESULT, 0, 102) + bytes(102)
    group.send[2][0].sendall(early)
    failures = outcomes(group, [0, 1, 3, 4, 5], stall_timeout_s=5.0)
    assert failures[0].suspects == failures[0].offenders == {RANKS[2]}
    assert all(not failures[me].offenders for me in (1, 3, 4, 5))


def test_a_sender_gives_signs_of_life_while_others_have_frames_to_send(swarm):
    """Chunks that this peer collects or passes on wake every sender, even if it has nothing to send."""
    group = swarm(4, 40 * CHUNK_NUMEL, num_columns=2)
    progress = Progress(group.plan(0))
    assert (group.plan(0).mates, group.plan(0).sources) == ((1,), (2,))
    for _ in progress_of(progress, 2):
        pass
    stop = threading.Event()

    def keep_waking():
        until = time.monotonic() + 20
        while not stop.wait(0.05) and time.monotonic() < until:
            progress.chunk_added(2, 0)

    thread = threading.Thread(target=keep_waking)
    thread.start()
    started = time.monotonic()
    assert progress.next_frame(2, 0.3) == (Kind.ALIVE, 0)
    assert time.monotonic() - started < 10
    stop.set()
    thread.join()


def progress_of(progress, other):
    """The contributions that this peer can send to `other` at once."""
    while (frame := progress.next_frame(other, 0.0)) != (Kind.ALIVE, 0):
        yield frame


def test_hearsay_keeps_the_name_of_the_first_accuser_over_two_hops(swarm):
    """A member that hears it from one that has not seen the fault itself still knows whose word it is."""
    group = swarm(6, 6000, num_columns=2)
    stalled = 4
    failures = outcomes(group, [me for me in range(6) if me != stalled], stall_timeout_s=60.0, timeout_s=5.0)
    assert {failure.suspects for failure in failures.values()} == {frozenset({RANKS[stalled]})}
    first_hand = {RANKS[neighbour] for neighbour in group.plan(stalled).neighbours}
    assert all(failures[me].told_by & first_hand for me in (0, 2))
