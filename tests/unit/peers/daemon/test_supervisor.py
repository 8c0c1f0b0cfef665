"""The supervisor against real, small processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.train.run_dir import reason_in
from peers.daemon.restarts import WorkerEnd
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.errors import PeersError, UserError
from tests.support.commands import ROOT, is_running, wait_until

WITHIN_S = 10.0


def command(tmp_path: Path, script: str, num_ranks: int = 1) -> WorkerCommand:
    return WorkerCommand(
        argv=(sys.executable, "-c", script),
        env=dict(os.environ),
        cwd=tmp_path,
        log_path=tmp_path / "logs" / "worker.log",
        num_ranks=num_ranks,
    )


def recorder(exits: list[tuple[int, bool]]) -> Callable[[WorkerEnd], None]:
    return lambda end: exits.append((end.code, end.restarts))


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what, WITHIN_S)


async def test_a_worker_that_finishes_ends_the_run_with_0_and_its_output_is_in_the_log(tmp_path):
    assert (await Supervisor(command(tmp_path, "print('hello')")).run()).code == 0
    assert (tmp_path / "logs" / "worker.log").read_text() == "hello\n"


async def test_a_users_mistake_is_not_tried_again(tmp_path):
    exits: list[tuple[int, bool]] = []
    script = "raise SystemExit(2)"
    assert (await Supervisor(command(tmp_path, script), recorder(exits)).run()).code == 2
    assert exits == [(2, False)]


async def test_a_worker_that_died_once_is_started_again(tmp_path):
    script = (
        "import pathlib, sys\nmark = pathlib.Path('mark')\nfirst = not mark.exists()\n"
        "mark.touch()\nsys.exit(7 * first)"
    )
    exits: list[tuple[int, bool]] = []
    assert (await Supervisor(command(tmp_path, script), recorder(exits)).run()).code == 0
    assert exits == [(7, True), (0, False)]


async def test_it_gives_up_after_deaths_in_a_row_and_returns_the_last_code(tmp_path):
    exits: list[tuple[int, bool]] = []
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert (
        await Supervisor(command(tmp_path, script), recorder(exits), max_deaths=2).run()
    ).code == 128 + signal.SIGKILL
    assert exits == [(137, True), (137, False)]


async def test_progress_makes_earlier_deaths_not_count(tmp_path):
    exits: list[int] = []
    supervisor: Supervisor

    def on_exit(end: WorkerEnd) -> None:
        exits.append(end.code)
        if len(exits) == 1:
            supervisor.restarts.progressed()

    supervisor = Supervisor(command(tmp_path, "raise SystemExit(3)"), on_exit, max_deaths=2)
    assert (await supervisor.run()).code == 3
    # The first death is judged before the callback reports progress; two more deaths follow the progress.
    assert exits == [3, 3, 3]


async def test_it_gives_up_on_the_third_end_for_the_same_reason_of_this_life(tmp_path):
    """Whatever progress the worker reports. Another reason in between restarts the count."""
    script = (
        "import pathlib, sys\nlives = pathlib.Path('lives')\n"
        "life = len(lives.read_text()) if lives.exists() else 0\nlives.write_text('x' * (life + 1))\n"
        "sys.exit('too hot' if life != 1 else 'too cold')"
    )
    ends: list[WorkerEnd] = []
    supervisor: Supervisor

    def on_exit(end: WorkerEnd) -> None:
        ends.append(end)
        supervisor.restarts.progressed()

    supervisor = Supervisor(command(tmp_path, script), on_exit)
    last = await supervisor.run()
    assert [end.reason for end in ends] == ["too hot", "too cold", "too hot", "too hot", "too hot"]
    assert [end.restarts for end in ends] == [True, True, True, True, False]
    assert last == ends[-1] and (last.code, last.num_same) == (1, 3)


async def test_stop_kills_a_worker_that_ignores_sigterm_and_its_children(tmp_path):
    script = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('child.tmp').write_text(str(child.pid)); pathlib.Path('child.tmp').rename('child')\n"
        "time.sleep(600)\n"
    )
    supervisor = Supervisor(command(tmp_path, script), stop_timeout_s=0.3)
    run = asyncio.create_task(supervisor.run())
    await until((tmp_path / "child").exists, "its child")
    await supervisor.stop()
    code, child = (await run).code, int((tmp_path / "child").read_text())
    assert code == 128 + signal.SIGKILL
    wait_until(lambda: not is_running(child), "the end of its child", WITHIN_S)


async def test_cancelling_the_run_leaves_no_process(tmp_path):
    supervisor = Supervisor(command(tmp_path, "import time; time.sleep(600)"))
    run = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.pids, "the worker")
    (pid,) = supervisor.pids
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert not is_running(pid)


async def test_ranks_get_torchruns_environment_and_a_failure_of_one_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.daemon.supervisor.STOP_S", 0.01)
    script = (
        "import os, pathlib, sys, time\n"
        "print(os.environ['RANK'], os.environ['LOCAL_WORLD_SIZE'], os.environ['MASTER_ADDR'], flush=True)\n"
        "said = pathlib.Path('said')\n"
        "if os.environ['LOCAL_RANK'] == '0':\n    said.touch()\n    time.sleep(600)\n"
        "while not said.exists():\n    time.sleep(0.01)\n"
        "sys.exit(2)\n"
    )
    assert (await Supervisor(command(tmp_path, script, num_ranks=2)).run()).code == 2
    assert (tmp_path / "logs" / "worker.log").read_text() == "0 2 127.0.0.1\n"
    assert (tmp_path / "logs" / "worker-rank1.log").read_text() == "1 2 127.0.0.1\n"


@pytest.mark.parametrize(("code", "error"), [(2, UserError), (1, PeersError)])
async def test_the_reason_is_that_of_the_rank_that_failed(tmp_path, monkeypatch, code, error):
    monkeypatch.setattr("peers.daemon.supervisor.STOP_S", 0.01)
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n    print('step 1', flush=True)\n    time.sleep(600)\n"
        f"print('its disk is full', flush=True)\nsys.exit({code})\n"
    )
    with pytest.raises(error, match="its disk is full") as raised:
        await Supervisor(command(tmp_path, script, num_ranks=2), max_deaths=1).run_to_its_end()
    assert code == 2 or str(tmp_path / "logs" / "worker-rank1.log") in str(raised.value)


async def test_a_users_error_keeps_the_workers_lines_and_its_reason_is_one(tmp_path):
    box = "╭─ diloco ─────╮\n│ not enough:    │\n│   2 GPUs       │\n│ add one        │\n╰────────────────╯"
    script = command(tmp_path, f"print({box!r}); raise SystemExit(2)")
    supervisor = Supervisor(replace(script, reason_in=reason_in))
    with pytest.raises(UserError) as raised:
        await supervisor.run_to_its_end()
    assert str(raised.value) == "not enough:\n  2 GPUs\nadd one"
    assert (await supervisor.run()).reason == "not enough:   2 GPUs add one"


async def test_a_rank_that_fails_by_itself_leaves_the_others_time_to_tell_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.daemon.supervisor.OFTEN_S", 0.01)
    os.mkfifo(tmp_path / "fifo")
    # Rank 0 reads until rank 1 has ended.
    script = (
        "import os, pathlib, sys, time\n"
        "if os.environ['RANK'] == '1':\n    open('fifo', 'w')\n    os._exit(1)\n"
        "open('fifo').read()\ntime.sleep(0.2)\npathlib.Path('told').touch()\nsys.exit(1)\n"
    )
    assert (await Supervisor(command(tmp_path, script, num_ranks=2), max_deaths=1).run()).code == 1
    assert (tmp_path / "told").exists()


def test_a_worker_dies_with_its_supervisor_even_when_that_is_killed(tmp_path):
    worker = "import os, pathlib, time; pathlib.Path('pid.tmp').write_text(str(os.getpid()))\n"
    worker += "pathlib.Path('pid.tmp').rename('pid'); time.sleep(600)"
    script = (
        "import asyncio, os, pathlib, sys\n"
        "from peers.daemon.supervisor import Supervisor, WorkerCommand\n"
        f"command = WorkerCommand(argv=(sys.executable, '-c', {worker!r}), env=dict(os.environ),\n"
        "    cwd=pathlib.Path('.'), log_path=pathlib.Path('log'))\n"
        "async def main():\n    await Supervisor(command).run()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment) as supervisor:
        try:
            wait_until((tmp_path / "pid").exists, "its pid", WITHIN_S)
        finally:
            supervisor.kill()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid), "the end of the worker", WITHIN_S)
