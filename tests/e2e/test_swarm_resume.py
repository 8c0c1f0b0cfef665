"""A swarm whose peers all died resumes from its checkpoints and computes the same bits as an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from diloco.checkpoint.mark import COMPLETE
from diloco.checkpoint.store import STEP, own_part
from diloco.train.metrics_file import Tail
from tests.support.commands import (
    DILOCO,
    ROOT,
    Command,
    check_whole_files,
    coordinator_at,
    records_of,
    training_flags,
    wait_until,
)

INTERVAL = 6
# Six steps per checkpoint and four per epoch: some checkpoints are in mid-epoch. int4 has residuals to restore.
FLAGS = {
    "total-steps": 5000,
    "warmup-steps": 2,
    "lr": 1e-2,
    "hv.local-steps": 4,
    "hv.compression": "int4",
    "ckpt.interval": INTERVAL,
    "ckpt.topk": 3,
}
NEVER_AHEAD = "from peers.core.late_work import LateWork\nLateWork.go_ahead = lambda *_: False\n"
"""Makes workers wait for late commits. A worker that trains ahead, as on a busy machine, puts that work into another
epoch, and the bits differ."""
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
SAME = ("loss", "lr", "grad_norm", "tokens")


def by_step(records: list[dict[str, Any]], kind: str) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in records if record["kind"] == kind}


def whole_steps(saved: Path, ranks: tuple[int, ...] = (0, 1)) -> list[int]:
    """Steps of which all these peers have a complete checkpoint."""
    steps = {int(found[1]): path for path in saved.glob("*") if (found := STEP.fullmatch(path.name))}
    parts = [own_part(rank) for rank in ranks]
    return sorted(
        step for step, path in steps.items() if all((path / part / COMPLETE).is_file() for part in parts)
    )


def kill(command: Command) -> int:
    """SIGKILL every process of the command at once. Returns how many there were."""
    victims = command.processes()
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.close()
    return len(victims)


def repeatable(directory: Path) -> tuple[str, ...]:
    """The start of a command whose workers wait for every commit, however late it is."""
    site = directory / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(NEVER_AHEAD)
    return ("env", f"PYTHONPATH={os.pathsep.join(map(str, (site, ROOT)))}", *DILOCO, "run")


class Lives:
    """One run that is started, killed, and started again, always by the same command."""

    def __init__(self, start, model: Path, directory: Path, chance: random.Random) -> None:
        self.run_dir, self.saved, self._chance = directory / "run", directory / "saved", chance
        self._start = start
        self._number = 0
        more = {"run-dir": self.run_dir, "ckpt.path": self.saved, "ckpt.resume": "auto"}
        self._words = (*repeatable(directory), *training_flags(model, **FLAGS, **more))

    def begin(self, *more: Any) -> Command:
        self._number += 1
        return self._start(*self._words, *more, name=f"life-{self._number}")

    def killed_while_training(self, most_s: float) -> None:
        """Start the run and kill it at a random moment, up to `most_s` after both peers have taken a step."""
        before = (
            [len(records_of(self.run_dir / f"peer-{rank}")) for rank in (0, 1)] if self._number else [0, 0]
        )
        command = self.begin()
        for rank in (0, 1):
            tail = Tail(self.run_dir / f"peer-{rank}" / "metrics.jsonl")
            seen: list[Any] = []

            def trains(seen=seen, tail=tail, rank=rank) -> bool:
                seen.extend(tail.read())
                return any(record["kind"] == "step" for record in seen[before[rank] :])

            wait_until(trains, f"a step of peer {rank}", command=command)
        self._wait(command, self._chance.uniform(0, most_s))

    def killed_while_starting(self, most_s: float) -> None:
        self._wait(self.begin(), self._chance.uniform(0, most_s))

    def _wait(self, command: Command, seconds: float) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: False, "the moment", seconds, command)
        assert command.code is None, command.stdout + command.stderr
        assert kill(command) >= 1


def check_equal(lives: Lives, whole: Path) -> int:
    """Every record of every life equals the undisturbed run's, and each life began at the step of a checkpoint.

    Returns how often the run was resumed from a checkpoint.
    """
    num_resumed = 0
    for rank in (0, 1):
        ours, expected = records_of(lives.run_dir / f"peer-{rank}"), records_of(whole / f"peer-{rank}")
        steps, epochs = by_step(expected, "step"), by_step(expected, "epoch")
        for record in ours:
            if record["kind"] == "step":
                assert [record[key] for key in SAME] == [steps[record["step"]][key] for key in SAME], record
            if record["kind"] == "epoch":
                assert record["anchor_digest"] == epochs[record["step"]]["anchor_digest"], record
                assert record["contributors"] == [0, 1]
        starts = [record["step"] for record in ours if record.get("event") == "start"]
        assert all(step % INTERVAL == 0 for step in starts)
        assert starts == sorted(starts)
        num_resumed = sum(step > 0 for step in starts)
    return num_resumed


def undisturbed(start, model: Path, directory: Path, steps: int) -> Path:
    # max-steps ends the run early without changing the learning-rate schedule.
    flags = {**FLAGS, "max-steps": steps, "run-dir": directory / "whole", "ckpt.path": directory / "other"}
    run = start(*repeatable(directory), *training_flags(model, **flags), name="whole")
    assert run.wait(600) == 0, run.stdout + run.stderr
    return directory / "whole"


def farthest(run_dir: Path) -> int:
    return max(max(by_step(records_of(run_dir / f"peer-{rank}"), "step")) for rank in (0, 1))


@pytest.mark.exhaustive
def test_after_every_process_was_killed_at_a_random_moment_training_goes_on_bit_for_bit(
    start, model, tmp_path
):
    lives = Lives(start, model, tmp_path, random.Random(7))
    lives.killed_while_training(1.5)
    expected = whole_steps(lives.saved)
    lives.killed_while_training(1.5)
    resumed_at = [r["step"] for r in records_of(lives.run_dir / "peer-1") if r.get("event") == "start"]
    assert resumed_at == [0, expected[-1] if expected else 0]
    end = farthest(lives.run_dir) + 4
    last = lives.begin("--max-steps", end)
    assert last.wait() == 0, last.stdout + last.stderr
    assert "peer 1: epoch" in last.stdout and "all peers held bit-identical anchors" in last.stdout
    check_equal(lives, undisturbed(start, model, tmp_path, end))


@pytest.mark.exhaustive
def test_who_comes_back_with_an_old_checkpoint_takes_what_the_living_swarm_has(start, model, tmp_path):
    saved = tmp_path / "saved"
    flags = {**FLAGS, "ckpt.interval": 4, "ckpt.topk": None, "ckpt.path": saved}

    def peer(rank: int, **more: Any) -> Command:
        named = training_flags(model, **flags, run_dir=tmp_path / "run" / f"peer-{rank}", **more)
        return start(*DILOCO, "peer", "--initial-peers", maddr, *LOOPBACK, *named, name=f"peer-{rank}")

    def epochs(rank: int) -> dict[int, str]:
        records = records_of(tmp_path / "run" / f"peer-{rank}")
        return {r["epoch"]: r["anchor_digest"] for r in records if r["kind"] == "epoch"}

    maddr = coordinator_at(start)
    living, killed = peer(0, galaxy_size=2), peer(1, galaxy_size=2)
    wait_until(lambda: 8 in whole_steps(saved), "the second checkpoint", command=living)
    assert kill(killed) >= 2
    before = max(epochs(0))
    wait_until(lambda: max(epochs(0)) >= before + 3, "three epochs alone", command=living)
    alone = max(epochs(0))
    back = peer(1, **{"ckpt.resume": saved / "model_step_4"})

    def together() -> set[int]:
        return {epoch for epoch in set(epochs(1)) & set(epochs(0)) if epoch > alone}

    wait_until(lambda: len(together()) >= 3, "three epochs together", command=back)
    starts = [r["epoch"] for r in records_of(tmp_path / "run" / "peer-1") if r.get("event") == "start"]
    assert starts[0] == 0 and starts[1] >= alone, starts
    mine, theirs = epochs(1), epochs(0)
    assert list(theirs) == sorted(theirs)
    shared = set(mine) & set(theirs)
    assert {epoch: mine[epoch] for epoch in shared} == {epoch: theirs[epoch] for epoch in shared}
    assert living.code is None and kill(back) and kill(living)


@pytest.mark.kill
def test_twenty_times_every_process_is_killed_and_every_resume_equals_the_undisturbed_run(
    start, model, tmp_path
):
    lives = Lives(start, model, tmp_path, random.Random(20261122))
    for number in range(20):
        if number % 5 == 4:
            lives.killed_while_starting(8.0)
        else:
            lives.killed_while_training(3.0)
        print(f"kill {number + 1}: whole steps {whole_steps(lives.saved)}", flush=True)
    whole = undisturbed(start, model, tmp_path, farthest(lives.run_dir) + 4)
    num_resumed = check_equal(lives, whole)
    print(f"{num_resumed} resumes from checkpoints, {farthest(lives.run_dir)} steps, all equal", flush=True)
    # Four lives were killed while they started, and a life begins anew if no checkpoint was complete before it.
    assert num_resumed >= 12


@pytest.mark.kill
def test_one_peers_checkpoint_restarts_the_run_for_any_number_of_peers(start, model, tmp_path):
    saved = tmp_path / "saved"
    flags = {**FLAGS, "total-steps": 16, "ckpt.path": saved}
    first = start(
        *DILOCO, "run", *training_flags(model, **flags, run_dir=tmp_path / "first", max_steps=12), name="1"
    )
    assert first.wait() == 0, first.stderr
    check_whole_files(saved)
    digests = by_step(records_of(tmp_path / "first" / "peer-0"), "epoch")
    # Peer 1's checkpoints are lost, and another machine takes its world rank.
    for part in saved.glob(f"*/{own_part(1)}"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    again = {**flags, "ckpt.resume": "auto", "run-dir": tmp_path / "again", "peers": 3}
    second = start(*DILOCO, "run", *training_flags(model, **again), name="2")
    assert second.wait() == 0, second.stdout + second.stderr
    for rank in range(3):
        records = records_of(tmp_path / "again" / f"peer-{rank}")
        [begun] = [record for record in records if record.get("event") == "start"]
        assert (begun["step"], begun["epoch"]) == (12, 3)
        log = (tmp_path / "again" / f"peer-{rank}" / "logs" / "daemon.log").read_text()
        assert f"training from epoch 3, step 12, anchor {digests[12]['anchor_digest'][:12]}" in log
        assert max(by_step(records, "step")) == 16
        assert by_step(records, "epoch")[16]["contributors"] == [0, 1, 2]
        assert by_step(records, "epoch")[16]["anchor_digest"] != digests[12]["anchor_digest"]
    over = {**again, "run-dir": tmp_path / "third", "max-steps": 12}
    third = start(*DILOCO, "run", *training_flags(model, **over), name="3")
    assert third.wait() == 0, third.stdout + third.stderr
    assert "the run is complete already: step 12 of 12. To go on, raise --max-steps" in third.stdout
    assert "PROBLEM" not in third.stdout and (tmp_path / "third" / "peer-0" / "model").is_dir()


@pytest.mark.kill
def test_the_demo_kills_a_peer_half_way_and_has_it_back_before_the_end(start, model, tmp_path):
    flags = {**FLAGS, "total-steps": 4000, "ckpt.interval": None, "ckpt.topk": None, "lose-peer": 1}
    run = start(*DILOCO, "run", *training_flags(model, **flags, run_dir=tmp_path / "run"))
    assert run.wait(300) == 0, run.stdout + run.stderr
    assert re.search(r"killed peer 1 \(SIGKILL to its \d+ processes\) at step 2\d\d\d of 4000", run.stdout)
    assert "all peers held bit-identical anchors" in run.stdout
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000
    first, again = (r["step"] for r in records_of(tmp_path / "run" / "peer-1") if r.get("event") == "start")
    assert first == 0 and 2000 < again < 4000
    mine, others = (by_step(records_of(tmp_path / "run" / f"peer-{rank}"), "epoch")[4000] for rank in (0, 1))
    assert mine["contributors"] == others["contributors"] == [0, 1]
    assert mine["anchor_digest"] == others["anchor_digest"]
