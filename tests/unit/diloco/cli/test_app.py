"""A mistyped command gives one box on stderr and exit code 2, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.cli.app import exit_code
from diloco.cli.interrupts import run_interruptible
from diloco.options.help import read_page


def text_of_box(stderr: str) -> str:
    """The message without its frame and its line breaks."""
    return " ".join(line.strip("│╭╮╰╯─ ") for line in stderr.splitlines())


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[hw]\nlocal_steps = 3", 'Did you mean "hv.local_steps"?'),
        ("lr = 'fast'", "unable to convert"),
        ("[hv]\ncompression = 'uniform4bit'", "is not one of"),
        ("[hv]\ninitial_peers = ['foo']", "is not an address"),
    ],
)
def test_wrong_toml_gets_a_box_that_names_the_file(toml, message, capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(toml)
    assert exit_code(["peer", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in text_of_box(said)
    assert "Traceback" not in said


def test_the_end_of_a_command_waits_for_threads_and_runs_what_is_registered_for_it():
    script = (
        "import atexit, sys, threading, time\n"
        "from diloco.cli.app import main\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "main(['pear'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout.split("\n")[-3:]) == (2, ["thread", "at exit", ""]), ended.stderr


def test_in_a_locale_without_all_characters_question_marks_are_printed_for_them():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "PYTHONIOENCODING": "latin-1"}
    page = subprocess.run(
        [sys.executable, "-m", "diloco", "peer", "--help"], env=environment, capture_output=True, timeout=60
    )
    assert page.returncode == 0, page.stderr
    assert page.stdout.decode("latin-1") == read_page(["peer"]).encode("latin-1", "replace").decode("latin-1")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_cancels_what_runs_and_sets_the_exit_code(number, code, tmp_path):
    script = (
        "import asyncio, pathlib, sys\n"
        "from diloco.cli.interrupts import run_interruptible\n"
        "async def main():\n"
        "    pathlib.Path('ready').touch()\n"
        "    try:\n        await asyncio.sleep(600)\n"
        "    finally:\n        pathlib.Path('cleaned').touch()\n"
        "sys.exit(run_interruptible(main()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(timeout=10) == code
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "cleaned").exists()


def test_a_signal_after_the_event_loop_is_handled_as_before_it():
    async def main() -> int:
        return 3

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGTERM, own := lambda *_: None)
    try:
        assert run_interruptible(main()) == 3
        assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == [before[0], own]
    finally:
        signal.signal(signal.SIGTERM, before[1])
