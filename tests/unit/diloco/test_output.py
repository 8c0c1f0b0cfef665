"""Output that cannot be written ends nothing; a reader that is gone does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.cli.app import exit_code
from tests.support.commands import ROOT

FULL = Path("/dev/full")
PRINTS = """
import sys
from diloco.output import lose_unwritable
lose_unwritable("stdout", "stderr")
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("x" * 10_000, file=stream, flush=True)
"""


def run(*words: str, **streams) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, text=True, timeout=60, check=False, **streams)


def test_on_a_full_disk_output_is_lost_and_the_process_goes_on():
    with FULL.open("w") as full:
        assert run("-c", PRINTS, stdout=full, stderr=full).returncode == 0
        # A mistyped command: the box with the reason goes to stderr.
        assert run("-m", "diloco", "pear", stderr=full).returncode == 2


def test_a_reader_that_is_gone_ends_the_process():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = run("-c", PRINTS, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert ended.returncode != 0 and "BrokenPipeError" in ended.stderr


def test_a_result_that_cannot_be_written_is_a_failure():
    with FULL.open("w") as full:
        assert run("-m", "diloco", "experiments", "list", "--json", stdout=full, stderr=full).returncode == 1


@pytest.mark.parametrize(
    "command",
    [
        "run --lose-peer 9",
        "peer --worker nothing-of-this-name",
        "dht start --identity-path {none}",
        "grpo-sweep --path-model nothing-of-this-name",
        "launch nothing-of-this-name",
    ],
)
def test_commands_that_train_do_not_depend_on_their_output(command, monkeypatch):
    lost = []
    words = command.format(none=__file__).split()
    module = words[0].replace("-", "_")
    monkeypatch.setattr(f"diloco.cli.{module}.lose_unwritable", lambda *names: lost.extend(names))
    assert exit_code(words) == 2
    assert lost == ["stdout"]
