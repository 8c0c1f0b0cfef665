"""The plan of faults, the links that they hit, and the checker, which must find every fault that it is shown."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.history import History, Struck
from benchmarks.chaos.links import Doors
from benchmarks.chaos.plan import KINDS, draw
from benchmarks.chaos.swarm import Life

Records = list[dict[str, Any]]


def test_a_plan_is_drawn_again_from_its_seed_and_strikes_nobody_twice_at_once():
    plan = draw(3, seconds=3600, num_peers=6, mean_s=5)
    assert (
        plan == draw(3, seconds=3600, num_peers=6, mean_s=5) != draw(4, seconds=3600, num_peers=6, mean_s=5)
    )
    assert {fault.kind for fault in plan} == set(KINDS)
    away = {rank: 0.0 for rank in range(6)}
    for fault in plan:
        if KINDS[fault.kind].is_death or fault.kind in ("freeze", "kill worker"):
            assert away[fault.ranks[0]] <= fault.at_s
            away[fault.ranks[0]] = fault.until_s
    assert len(plan) == pytest.approx(3600 / 5, rel=0.2)


# The checker


def a_commit(rank: int, epoch: int, *, at: float, **other: Any) -> dict[str, Any]:
    return {
        "rank": rank, "pid": 100 + rank, "time": at, "epoch": epoch, "parent": f"l{epoch - 1}", "head": f"l{epoch}",
        "tokens": 30, "committed_tokens": 30 * epoch, "anchor_digest": f"a{epoch}", "momentum_digest": "m", **other,
    }  # fmt: skip


def an_epoch(rank: int, epoch: int, *, at: float, **other: Any) -> Records:
    """The worker's records of one epoch: the work that it handed over, and the outcome that it was told."""
    told = {
        "kind": "epoch", "time": at + 0.1, "epoch": epoch, "head": f"l{epoch}", "anchor_digest": f"a{epoch}",
        "contributors": [0, 1, 2],
    }  # fmt: skip
    return [{"kind": "ready", "time": at - 0.5, "epoch": epoch - 1, "tokens": 10}, {**told, **other}]


@pytest.fixture
def good() -> tuple[dict[int, Records], dict[int, Records]]:
    """Three peers and three epochs: the commits that their daemons recorded, and the records of their workers."""
    epochs = [(epoch, 10.0 + 5 * epoch) for epoch in (1, 2, 3)]
    commits = {
        rank: [a_commit(rank, epoch, at=at + 0.01 * rank) for epoch, at in epochs] for rank in range(3)
    }
    workers = {
        rank: [
            {"kind": "start", "time": 10.0},
            *(record for epoch, at in epochs for record in an_epoch(rank, epoch, at=at)),
        ]
        for rank in range(3)
    }
    return commits, workers


def history(
    directory: Path, commits: dict[int, Records], workers: dict[int, Records], **more: Any
) -> History:
    for rank in commits:
        peer = directory / f"peer{rank}"
        peer.mkdir()
        for name, records in (("commits", commits[rank]), ("history", workers[rank])):
            (peer / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lives = more.pop("lives", [Life(rank, 9.0, 100 + rank) for rank in commits])
    return History(directory, lives, **more)


def test_nothing_is_found_where_nothing_is_wrong(tmp_path, good):
    found = history(tmp_path, *good)
    assert found.faults_found() == []
    assert (found.num_forks, found.lost_tokens, found.epoch_s()) == (0, 0, pytest.approx(5.0))
    # Three peers commit 60 tokens in the ten seconds between the first commit and the last.
    assert found.tokens_per_live_second() == pytest.approx(60 / 30)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"anchor_digest": "other"}, "not the same everywhere"),
        ({"momentum_digest": "other"}, "not the same everywhere"),
        ({"rank": 0}, "twice, or two peers are of one rank"),
        ({"committed_tokens": 20}, "not the same everywhere"),
    ],
)
def test_a_commit_that_one_peer_has_otherwise_is_found(tmp_path, good, change, said):
    commits, workers = good
    commits[2][1].update(change)
    found = history(tmp_path, commits, workers).faults_found()
    assert any(said in line for line in found)


def test_a_worker_that_is_told_of_another_anchor_or_of_a_rank_twice_is_found(tmp_path, good):
    commits, workers = good
    workers[1][2]["anchor_digest"] = "other"
    workers[2][4]["contributors"] = [0, 1, 1]
    found = history(tmp_path, commits, workers).faults_found()
    assert any("told other anchors" in line for line in found)
    assert any("has the contributors" in line for line in found)


def test_tokens_that_were_handed_over_and_not_counted_are_found(tmp_path, good):
    commits, workers = good
    workers[0][3]["tokens"] = 12
    assert [line for line in history(tmp_path, commits, workers).faults_found() if "counts 30 tokens" in line]


def test_a_state_that_does_not_go_back_to_the_beginning_is_found(tmp_path, good):
    commits, workers = good
    for records in commits.values():
        del records[1]
    assert [line for line in history(tmp_path, commits, workers).faults_found() if "goes back to" in line]


def test_a_fork_and_its_tokens_are_counted(tmp_path, good):
    commits, workers = good
    commits[2][2] = a_commit(2, 3, at=25.0, head="fork", tokens=10, committed_tokens=70)
    found = history(tmp_path, commits, workers)
    assert (found.num_forks, found.lost_tokens) == (1, 10)


def test_who_goes_back_along_the_chain_that_counts_is_found(tmp_path, good):
    commits, workers = good
    commits[2].append({**commits[2][0], "time": 30.0})
    commits[2].append({**commits[2][2], "time": 31.0})
    found = history(tmp_path, commits, workers).faults_found()
    assert any("peer 2 went from l3 of epoch 3 to l1 of epoch 1" in line for line in found)


def test_recovery_is_what_the_others_take_beyond_an_epoch_and_time_away_is_no_life(tmp_path, good):
    lives = [Life(0, 9.0, 100), Life(1, 9.0, 101), Life(2, 9.0, 102, ended_at=16.0, ended_by="kill daemon")]
    lives[0].frozen.append((20.0, 24.0))
    found = history(
        tmp_path, *good, lives=lives, faults=[Struck("kill daemon", (2,), 16.0), Struck("clock", (1,), 17.0)]
    )
    assert found.recoveries_s(3.0) == [pytest.approx(2.0)]
    assert found.recoveries_s(3.0, alone=True) == []
    found.faults = [found.faults[0], Struck("freeze", (1,), 5.0, 14.0), Struck("clock", (1,), 21.0)]
    assert found.recoveries_s(3.0, alone=True) == [pytest.approx(2.0)]
    assert found.waits_after_deaths_s() == [pytest.approx(4.0)]
    assert found.tokens_per_live_second() == pytest.approx(60 / (6.0 + 10.0 + 1.0))


# The links


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that echoes what it receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                with sock:
                    try:
                        while data := sock.recv(1000):
                            sock.sendall(data)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def exchange(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    return sock.recv(1000)


def test_a_link_is_told_by_the_process_that_calls_and_can_go_wrong_in_every_way(echo):
    pair = [frozenset((0, 1))]
    with Doors(lambda: {0: [os.getpid()]}) as doors:
        port = doors.open(1, echo)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            assert exchange(sock, b"hello") == b"hello"
            doors.corrupt(pair)
            assert exchange(sock, b"hello") == b"hemlo"
            doors.silence(pair, True)
            sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                exchange(sock, b"lost?")
            sock.settimeout(10)
            doors.silence(pair, False)
            assert sock.recv(1000) == b"lost?"
            doors.cut([frozenset((1, 2))], True)
            assert exchange(sock, b"others'") == b"others'"
            doors.cut(pair, True)
            with pytest.raises(ConnectionError):
                exchange(sock, b"hello")
                exchange(sock, b"hello")
                raise ConnectionError if sock.recv(1) == b"" else AssertionError
        doors.cut(pair, False)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            assert exchange(sock, b"again") == b"again"
