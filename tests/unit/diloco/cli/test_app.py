"""What a user reads who typed something wrong: one box on stderr, exit code 2, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.cli.app import exit_code

PEER_ID = "12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
ADDRESS = f"/ip4/127.0.0.1/tcp/30001/p2p/{PEER_ID}"

WRONG = {
    "unknown flag": (["peer", "--percision", "auto"], "Did you mean --precision?"),
    "unknown verb": (["pear"], 'Did you mean "peer"?'),
    "unknown verb below dht": (["dht", "stat"], 'Did you mean "start"?'),
    "stray argument": (["peer", "now"], "flags begin with two dashes"),
    "flag without its value": (["peer", "--lr"], "requires an argument"),
    "address that is none": (["peer", "--initial-peers", "localhost:3000"], "is not an address like"),
    "address without peer id": (
        ["peer", "--initial-peers", "/ip4/127.0.0.1/tcp/30001"],
        "lacks the peer's id",
    ),
    "listening on a peer's address": (["dht", "start", "--host-maddrs", ADDRESS], "names a peer"),
    "status of nothing": (["status"], "--initial-peers is missing"),
    "status of a bad address": (["status", "--initial-peers", "/ip4/1.2.3.400/tcp/1"], "is not a host"),
    "TOML that is not there": (["run", "--config", "/nowhere/run.toml"], "No such file"),
    "rate that is no number": (["peer", "--lr", "fast"], 'unable to convert "fast" into float'),
    "rate that is not finite": (["peer", "--lr", "inf"], "finite"),
    "step count of zero": (["peer", "--max-steps", "0"], "1 or more"),
    "half a step": (["peer", "--max-steps", "1.5"], "not a whole number"),
    "negative rank": (["peer", "--world-rank", "-1"], "0 or more"),
    "unknown precision": (["peer", "--precision", "fp8"], "Choose from"),
    "unknown codec": (
        ["peer", "--hv.compression", "int3"],
        "is not one of fp32, fp16, bf16, int8, int4, topk",
    ),
    "misspelt codec": (["run", "--hv.hivemind_compression", "blockwise8"], 'Did you mean "blockwise8bit"?'),
    "run id with a slash": (["peer", "--run-id", "../other"], "letters, digits"),
    "batch sizes that do not divide": (
        ["run", "--total-batch-size", "10", "--per-device-train-batch-size", "4"],
        "not a multiple",
    ),
    "ranks that do not divide": (["peer", "--total-batch-size", "10", "--nproc-per-node", "3"], "3 ranks"),
    "address of an empty variable": (["peer", "--world-rank", "0", "--initial-peers", ""], "has no value"),
    "address that is missing": (["doctor", "--initial-peers"], "--initial-peers requires at least 1"),
    "number of ranks": (["peer", "--nproc-per-node", "many"], "neither `auto` nor a number"),
    "peer to lose that is not there": (["run", "--peers", "2", "--lose-peer", "2"], "the last one is 1"),
    "model that is none": (["peer", "--path-model", "/nowhere/model", "--run-dir", "RUN"], "is not a model"),
}


def text_of_box(stderr: str) -> str:
    """The message without its frame and its line breaks."""
    return " ".join(line.strip("│╭╮╰╯─ ") for line in stderr.splitlines())


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_gets_a_box_and_exit_code_2(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(argv) == 2
    said = capsys.readouterr().err
    assert message in text_of_box(said)
    assert said.startswith("╭─ diloco ─")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("lr = [", "is not TOML"),
        ("learning_rate = 1.0", 'Unknown key "learning_rate"'),
        ("[hv]\nlocal_step = 3", 'Did you mean "hv.local_steps"?'),
        ("[hw]\nlocal_steps = 3", 'Did you mean "hv.local_steps"?'),
        ("lr = 'fast'", "unable to convert"),
        ("[hv]\ncompression = 'uniform4bit'", "is not one of"),
        ("[hv]\ninitial_peers = ['foo']", "is not an address like"),
    ],
)
def test_wrong_toml_gets_a_box_that_names_the_file(toml, message, capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(toml)
    assert exit_code(["peer", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in text_of_box(said)
    assert "Traceback" not in said


def test_a_run_directory_that_holds_a_run_is_not_run_over(capsys, tmp_path):
    (tmp_path / "peer-0").mkdir()
    (tmp_path / "peer-0" / "metrics.jsonl").touch()
    assert exit_code(["run", "--run-dir", str(tmp_path)]) == 2
    assert "already holds a run" in text_of_box(capsys.readouterr().err)


def test_version_and_module_entry():
    answer = subprocess.run(
        [sys.executable, "-m", "diloco", "--version"],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert answer.returncode == 0
    assert answer.stdout.strip()[0].isdigit()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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
