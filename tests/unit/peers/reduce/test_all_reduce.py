import contextlib
import math
import os
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
from peers.reduce.codecs import codec_named
from peers.reduce.frames import HEADER, NOBODY, Kind
from peers.reduce.plan import CHUNK_NUMEL, Chunk, ReducePlan, equal_bounds
from tests.support.coding import coded
from tests.support.exhaustive import exhaustive_but
from tests.support.reduction_group import RANKS, assert_blamed, outcomes, play_dead

SEVERAL_CHUNKS = 2 * 3 * CHUNK_NUMEL + 1234


def reference(swarm):
    """The same average in float64, with the codec applied to every contribution and to the result."""
    codec, numel = codec_named(swarm.codec), swarm.anchor.numel()

    total = torch.zeros(numel, dtype=torch.float64)
    for weight, local in zip(swarm.weights, swarm.locals, strict=True):
        total += weight * coded(codec, swarm.anchor - local).double()
    return coded(codec, total.float()).double()


def assert_close(value, expected, rtol):
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    assert float((value.double() - expected).abs().amax(dim=0)) <= rtol * scale if expected.numel() else True


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
@pytest.mark.parametrize("numel", [0, 1, 7, SEVERAL_CHUNKS])
@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
def test_all_members_hold_the_same_bits_and_the_right_average(swarm, num_members, numel, codec):
    group = swarm(num_members, numel, codec=codec)
    outcomes(group, range(num_members))
    for result in group.results[1:]:
        assert torch.equal(result.view(torch.int32), group.results[0].view(torch.int32))
    # In fp16 the last bit of a sum may change its rounding, by one unit of half precision.
    assert_close(group.results[0], reference(group), 1e-6 if codec == "fp32" else 2.0**-10)


def test_sent_and_received_bytes_are_exact(swarm):
    group = swarm(3, SEVERAL_CHUNKS, codec="fp16", bounds=(0, 10, 10 + 2 * CHUNK_NUMEL, SEVERAL_CHUNKS))
    reports = outcomes(group, range(3))
    chunks = [group.plan(0).num_chunks(owner) for owner in range(3)]
    sizes = [group.bounds[owner + 1] - group.bounds[owner] for owner in range(3)]
    assert chunks == [1, 2, 5]
    for me, report in reports.items():
        others = [owner for owner in range(3) if owner != me]
        contributions = sum(2 * sizes[owner] + HEADER.size * chunks[owner] for owner in others)
        results = 2 * (2 * sizes[me] + HEADER.size * chunks[me])
        assert report.sent_bytes == contributions + results
    assert sum(r.sent_bytes for r in reports.values()) == sum(r.received_bytes for r in reports.values())


@pytest.mark.parametrize("num_members", [1, 2])
def test_threads_stand_back_for_training_where_it_need_not_wait_for_them(swarm, num_members):
    found = set()

    def look(part):
        found.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    outcomes(swarm(num_members, SEVERAL_CHUNKS), range(num_members), settled=look, niceness=3)
    # The highest niceness is 19.
    assert found == {min(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + 3, 19)}


def test_a_peer_that_is_alone_reduces_in_all_threads_and_says_of_each_chunk_that_it_has_settled(
    swarm, monkeypatch
):
    parts, both = [], threading.Barrier(2)

    def settled(part):
        both.wait(10)
        parts.append((part.start, part.stop))

    monkeypatch.setattr("peers.threads.num_cores", lambda: 2)
    group = swarm(1, 4 * CHUNK_NUMEL, codec="int8")
    group.reduce(0, settled=settled)
    assert sorted(parts) == [(first * CHUNK_NUMEL, (first + 1) * CHUNK_NUMEL) for first in range(4)]
    assert_close(group.results[0], reference(group), 1e-6)


def test_the_work_of_all_threads_of_a_peer_that_is_alone_counts_towards_what_it_announced(swarm, monkeypatch):
    monkeypatch.setattr("peers.threads.num_cores", lambda: 4)
    group = swarm(1, 4 * CHUNK_NUMEL)
    # Enough for any three of its four chunks.
    group.norms = [0.99 * norm for norm in group.norms]
    with pytest.raises(RoundFailed, match="larger than announced") as failure:
        group.reduce(0)
    assert failure.value.suspects == {RANKS[0]}


def plan_for(num_members, numel):
    count = (1.0,) * num_members
    bounds = equal_bounds(numel, num_members)
    return ReducePlan(bytes(16), tuple(range(num_members)), 0, count, count, bounds, "fp32")


def test_chunks_cover_every_share():
    plan = plan_for(2, 2 * 64 * CHUNK_NUMEL + 77)
    for owner in range(2):
        chunks = [plan.place(chunk) for chunk in plan.chunks([owner])]
        assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
        assert (chunks[0].start, chunks[-1].stop) == (plan.bounds[owner], plan.bounds[owner + 1])


def test_weights_and_uneven_and_empty_shares_are_respected(swarm):
    group = swarm(4, 1000, weights=[0.5, 0.0, 0.3, 0.05], bounds=(0, 0, 900, 900, 1000))
    outcomes(group, range(4))
    assert_close(group.results[2], reference(group), 1e-6)


@pytest.mark.parametrize(
    ("idle", "codec"),
    [
        pytest.param(idle, codec, marks=() if codec == "fp32" or idle == {0, 1} else pytest.mark.exhaustive)
        for idle in ({0}, {1}, {3}, {0, 1}, {1, 2, 3})
        for codec in CODEC_NAMES
    ],
)
def test_members_without_a_share_still_bring_and_get_everything(swarm, idle, codec):
    size = CHUNK_NUMEL + 777
    bounds = [0]
    for member in range(4):
        bounds.append(bounds[-1] + (0 if member in idle else size))
    group = swarm(4, bounds[-1], bounds=tuple(bounds), codec=codec)
    reports = outcomes(group, range(4))
    for result in group.results[1:]:
        assert torch.equal(result.view(torch.int32), group.results[0].view(torch.int32))
    if codec == "fp32":
        assert_close(group.results[0], reference(group), 1e-6)
        for me, report in reports.items():
            share = bounds[me + 1] - bounds[me]
            values = bounds[-1] + 2 * share
            assert 4 * values < report.sent_bytes < 4.001 * values


def test_the_sum_is_taken_in_member_order_with_separate_roundings(swarm):
    group = swarm(3, 5000, weights=[0.3, 0.3, 0.4])
    outcomes(group, range(3))
    weights = torch.tensor(group.weights, dtype=torch.float32)
    expected = (group.anchor - group.locals[0]) * weights[0]
    for weight, local in zip(weights[1:], group.locals[1:], strict=True):
        expected = expected + (group.anchor - local) * weight
    assert torch.equal(group.results[1], expected)


def test_denormals_are_not_flushed(swarm):
    group = swarm(2, 3)
    group.anchor = torch.zeros(3)
    group.locals = [torch.tensor([-1e-40, 0.0, 3e-45]), torch.tensor([-1e-40, -4e-45, 0.0])]
    outcomes(group, range(2))
    assert (group.results[0] > 0).tolist() == [True, True, False]
    assert float(group.results[0][2]) < 0


def test_streams_serve_several_rounds(swarm):
    group = swarm(3, 5000)
    for _ in range(3):
        assert all(hasattr(report, "sent_bytes") for report in outcomes(group, range(3)).values())


# Faults: the survivors name the culprit, and nobody else, in time.


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_member_that_dies_midway_is_named_by_all_survivors(swarm, culprit):
    group = swarm(4, SEVERAL_CHUNKS)
    survivors = [me for me in range(4) if me != culprit]
    thread = threading.Thread(target=play_dead, args=(group, culprit, 100_000))
    thread.start()
    started = time.monotonic()
    failures = outcomes(group, survivors)
    thread.join()
    # Less than the stall timeout.
    assert time.monotonic() - started < 15
    assert_blamed(failures, culprit, group)


@pytest.mark.parametrize("culprit", exhaustive_but((0,), [0, 2]))
def test_a_member_that_stalls_is_named_by_all_survivors(swarm, culprit):
    group = swarm(4, SEVERAL_CHUNKS)
    started = time.monotonic()
    failures = outcomes(group, [me for me in range(4) if me != culprit], stall_timeout_s=3.0)
    assert 2.9 < time.monotonic() - started < 25
    assert_blamed(failures, culprit, group)


def send_after_reading(group, culprit, payload):
    """The culprit reads all that the others send, and sends each of them `payload`. Returns the reading threads."""

    def drain(sock):
        with contextlib.suppress(OSError):
            while sock.recv(1 << 20):
                pass

    threads = [threading.Thread(target=drain, args=(sock,)) for sock in group.receive[culprit].values()]
    for thread in threads:
        thread.start()
    for sock in group.send[culprit].values():
        # A member stops reading if it has heard from another that the round is over.
        with contextlib.suppress(OSError):
            sock.sendall(payload)
    return threads


def end(group, threads, *culprits):
    """End the streams of these culprits, if still open, and then all threads."""
    for sock in (sock for culprit in culprits for sock in group.send[culprit].values()):
        sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


def one_frame(kind, index, values):
    payload = values.numpy().tobytes()
    return HEADER.pack(kind, index, len(payload)) + payload


BAD_BYTES = {
    "garbage": b"\xff" * 64,
    "a huge payload": HEADER.pack(Kind.CONTRIBUTION, 0, 0xFFFF_FFFF),
    "a chunk out of order": one_frame(Kind.CONTRIBUTION, 1, torch.zeros(100)),
    "life signs in place of its contribution": HEADER.pack(Kind.ALIVE, 0, 0),
    "not a number": one_frame(Kind.CONTRIBUTION, 0, torch.full((100,), math.nan)),
    "infinity": one_frame(Kind.CONTRIBUTION, 0, torch.full((100,), math.inf)),
    "more energy than announced": one_frame(Kind.CONTRIBUTION, 0, torch.full((100,), 1e3)),
    "an average that is too large": one_frame(Kind.RESULT, 0, torch.full((100,), 1e3)),
    "a blame of the listener": HEADER.pack(Kind.ABORT, 0, 0),
}


@pytest.mark.parametrize("what", BAD_BYTES)
def test_a_member_that_sends_bad_bytes_is_named(swarm, what):
    group = swarm(2, 200)
    threads = send_after_reading(group, 1, BAD_BYTES[what])
    started = time.monotonic()
    failures = outcomes(group, [0])
    assert time.monotonic() - started < 15
    assert_blamed(failures, 1, group)
    end(group, threads)


@pytest.mark.parametrize("ends", exhaustive_but(("by itself",), ["by itself", "cancelled"]))
def test_who_falls_silent_after_it_has_begun_is_told_from_who_has_not_begun(swarm, ends):
    group = swarm(3, 300)
    # Member 1 sends half a frame. Member 2 sends nothing: it may still be waiting for its own streams.
    threads = send_after_reading(group, 1, HEADER.pack(Kind.CONTRIBUTION, 0, 400) + b"\1" * 200)
    threads += send_after_reading(group, 2, b"")
    if ends == "cancelled":
        threads.append(threading.Timer(2.8, group.cancelled[0].set))
        threads[-1].start()
    failure = outcomes(group, [0], stall_timeout_s=3.0, connect_timeout_s=20.0)[0]
    assert failure.silent == {RANKS[1]}
    end(group, threads, 1, 2)


@pytest.mark.parametrize(("blamed", "is_hearsay"), [(2, True), (0, False), (NOBODY, True)])
def test_what_a_member_says_of_a_third_is_told_from_what_was_seen_here(swarm, blamed, is_hearsay):
    group = swarm(3, 300)
    threads = send_after_reading(group, 1, HEADER.pack(Kind.ABORT, blamed, 0))
    failure = outcomes(group, [0])[0]
    assert failure.suspects == {RANKS[2 if blamed == 2 else 1]}
    assert failure.told_by == ({RANKS[1]} if is_hearsay else set())
    end(group, threads, 2)


def test_who_says_falsely_that_another_is_to_blame_is_named_by_all_who_hear_of_it(swarm):
    group = swarm(4, 4 * SEVERAL_CHUNKS)
    liar, (listener, blamed, bystander) = 3, range(3)
    threads = send_after_reading(group, liar, b"")
    group.send[liar][listener].sendall(HEADER.pack(Kind.ABORT, blamed, 0))
    failures = outcomes(group, range(3))
    said = {me: (failure.suspects, failure.told_by) for me, failure in failures.items()}
    assert said[listener] == ({RANKS[blamed]}, {RANKS[liar]})
    # The blamed member suspects the liar itself, and the bystander at least hears whose word it is.
    assert RANKS[liar] in said[blamed][0]
    assert RANKS[liar] in said[bystander][0] | said[bystander][1]
    end(group, threads, liar)


@pytest.mark.parametrize("rule", ["trimmed-mean", "centered-clip"])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_robust_rules_leave_every_member_with_the_same_bits_and_an_outlier_without_effect(swarm, rule, codec):
    group = swarm(4, SEVERAL_CHUNKS, codec=codec, rule=rule)
    group.locals[3] = group.anchor + 100 * (group.locals[3] - group.anchor)
    group.norms[3] *= 100
    outcomes(group, range(4))
    assert all(torch.equal(group.results[0], result) for result in group.results[1:])
    honest = torch.stack([group.anchor - local for local in group.locals[:3]]).mean(0)
    assert (group.results[0] - honest).norm() < 1.5 * honest.norm()


@pytest.mark.parametrize("numel", [300, SEVERAL_CHUNKS])
def test_a_member_that_lies_about_its_norm_is_named_also_by_those_that_only_hear_of_it(swarm, numel):
    group = swarm(3, numel)
    # The excess of member 2 lies in the share of member 0 alone.
    group.locals[2] = group.locals[2].clone()
    group.locals[2][: group.bounds[1]] += 1.0
    failures = outcomes(group, range(3))
    assert failures[0].suspects == failures[0].offenders == {RANKS[2]}
    # Member 1 has seen no offence. If it hears the liar's accusation first, it knows whose word that is.
    assert RANKS[2] in failures[1].suspects | failures[1].told_by and not failures[1].offenders


def test_a_member_cannot_send_as_much_as_it_has_announced_in_every_chunk_anew():
    plan = ReducePlan(
        attempt=bytes(16),
        members=(2, 5),
        me=0,
        weights=(0.5, 0.5),
        norms=(1.0, 1.0),
        bounds=(0, 2 * CHUNK_NUMEL, 4 * CHUNK_NUMEL),
        codec="fp32",
    )
    zeros = torch.zeros(plan.bounds[-1])
    arithmetic, scratch = Arithmetic(plan, zeros, zeros, zeros.clone()), Scratch(plan)
    values = np.zeros(CHUNK_NUMEL, np.float32)
    values[0] = 0.8
    payload = values.view(np.uint8)
    arithmetic.add(1, Chunk(0, 0), payload, scratch)
    with pytest.raises(ProtocolError, match="larger than announced"):
        arithmetic.add(1, Chunk(0, 1), payload, scratch)
    arithmetic.take_result(Chunk(1, 0), payload)
    with pytest.raises(ProtocolError, match="larger than announced"):
        arithmetic.take_result(Chunk(1, 1), payload)


def test_own_values_that_are_not_finite_are_this_peers_own_fault(swarm):
    group = swarm(1, 10)
    group.locals[0] = torch.full((10,), math.nan)
    with pytest.raises(RoundFailed, match="not finite") as failure:
        group.reduce(0)
    assert failure.value.suspects == {RANKS[0]}


def test_cancelling_stops_at_once_and_blames_nobody(swarm):
    group = swarm(3, SEVERAL_CHUNKS)
    done = {}

    def attempt(me):
        done.update(outcomes(group, [me]))

    threads = [threading.Thread(target=attempt, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    group.cancelled[0].set()
    group.cancelled[1].set()
    end(group, threads)
    assert [done[me].suspects for me in (0, 1)] == [frozenset(), frozenset()]


def test_a_failed_reduction_leaves_no_thread_and_shuts_its_sockets_down(swarm):
    group = swarm(2, SEVERAL_CHUNKS)
    play_dead(group, 1, 0)
    assert_blamed(outcomes(group, [0]), 1, group)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reduce")]
    with pytest.raises(OSError):
        group.send[0][1].send(b"x")


def test_a_group_with_a_world_rank_twice_is_refused():
    with pytest.raises(ProtocolError, match="one world rank"):
        ReducePlan(bytes(16), (2, 2), 0, (0.5, 0.5), (1.0, 1.0), (0, 5, 9), "fp32")


@contextlib.contextmanager
def slowly(group, sender, receiver, bytes_per_s):
    """Make what `sender` sends to `receiver` arrive a little at a time, at this rate."""
    inlet, ours = socket.socketpair()
    outlet, group.send[sender][receiver] = group.send[sender][receiver], inlet
    stop = threading.Event()

    def pass_on():
        ours.settimeout(0.02)
        with outlet, ours, contextlib.suppress(OSError):
            while not stop.wait(0.02):
                with contextlib.suppress(TimeoutError):
                    outlet.sendall(ours.recv(max(1, int(0.02 * bytes_per_s))))

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("stall_timeout_s", "timeout_s", "bytes_per_s"),
    [
        # A byte now and then, as a liar sends it to avoid a stall.
        (3.0, math.inf, 50),
        # As slow as a frame may be, until the time of the others is up.
        pytest.param(6.0, 3.0, 4 * CHUNK_NUMEL / 5, marks=pytest.mark.exhaustive),
    ],
)
def test_who_is_slow_to_one_member_has_no_two_others_blame_each_other(
    swarm, stall_timeout_s, timeout_s, bytes_per_s
):
    group = swarm(4, 12 * CHUNK_NUMEL)
    liar, victim = 0, 2
    with slowly(group, liar, victim, bytes_per_s), ThreadPoolExecutor(2) as pool:
        playing = [
            pool.submit(group.reduce, liar, stall_timeout_s=30.0),
            pool.submit(group.reduce, victim, stall_timeout_s),
        ]
        failures = outcomes(group, [1, 3], stall_timeout_s=stall_timeout_s, timeout_s=timeout_s)
        failures[victim] = playing[1].exception()
        assert isinstance(playing[0].exception(), RoundFailed)
    assert {me: failure.suspects for me, failure in failures.items()} == {
        me: {RANKS[liar]} for me in (1, 2, 3)
    }
    # The victim has seen the fault itself, and the others have its word.
    assert failures[victim].told_by <= {RANKS[1], RANKS[3]}
    assert {RANKS[victim]} <= failures[1].told_by | failures[3].told_by


def test_one_that_keeps_all_others_waiting_is_named_when_the_time_is_up(swarm):
    group = swarm(3, SEVERAL_CHUNKS)
    stop = threading.Event()
    # The header, then a byte now and then, which restarts every deadline that counts from the last byte.
    headers = HEADER.pack(Kind.CONTRIBUTION, 0, 4 * CHUNK_NUMEL)

    def trickle():
        for sock in group.send[2].values():
            sock.send(headers)
        while not stop.wait(0.05):
            for sock in group.send[2].values():
                with contextlib.suppress(OSError):
                    sock.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    errors = outcomes(group, [0, 1], stall_timeout_s=10.0, timeout_s=3.0)
    stop.set()
    thread.join()
    assert {me: error.suspects for me, error in errors.items()} == {0: {RANKS[2]}, 1: {RANKS[2]}}
