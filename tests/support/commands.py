"""Runs the real commands, and finds all processes that a command has started, even if their parents have ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.train.metrics_file import Tail

ROOT = Path(__file__).parents[2]
DILOCO = (sys.executable, "-m", "diloco")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
TRAINER = ("-m", "diloco.train_fsdp")

GONE_WITHIN_S = 25.0
"""Time in which all processes of a command must end after a signal. torchrun kills its own after 30 s."""
TIMEOUT_S = 400.0
_MARK = "DILOCO_TEST_MARK"

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def model_directory(path: Path, **changes: Any) -> Path:
    """A byte-level Llama of 24 thousand parameters without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**MODEL, **changes}), encoding="utf-8")
    return path


def training_flags(model: Path, **changes: Any) -> list[str]:
    """Flags that train this model on random tokens without end; a change to None leaves a flag out."""
    flags = {
        "path-model": model,
        "fake-data": True,
        "seq-length": 64,
        "total-batch-size": 4,
        "per-device-train-batch-size": 4,
        "eval-tokens": 64,
        "device": "cpu",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [
        word
        for name, value in flags.items()
        if value is not None
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]


@dataclass
class Command:
    """A command in a session of its own. Everything it starts inherits a mark, by which it is found."""

    argv: Sequence[str]
    directory: Path
    cwd: Path | None = None
    """Default: the directory, which also gets stdout, stderr, state and temporary files."""

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "TMPDIR": str(self.directory / "tmp"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            _MARK: self.mark,
        }
        Path(environment["TMPDIR"]).mkdir(exist_ok=True)
        with (self.directory / "stdout").open("wb") as out, (self.directory / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                list(self.argv),
                cwd=self.cwd or self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def files(self, name: str) -> list[Path]:
        """The files of this name below the directory. rglob would fail if a directory were removed meanwhile."""
        return [Path(parent, name) for parent, _, names in os.walk(self.directory) if name in names]

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit code as in a shell, 128 + n after signal n; None while the command runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        wait_until(lambda: self.code is not None, f"the end of {' '.join(self.argv[2:])}", timeout_s, self)
        assert self.code is not None
        return self.code

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def send(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self.interrupt()
        else:
            self.process.send_signal(number)

    def processes(self) -> dict[int, str]:
        """All running processes with the mark: command lines by pid."""
        return dict(_marked(self.mark))

    def close(self) -> None:
        """Kill all processes that are left."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S, command: Command | None = None
) -> Any:
    """Poll until the condition is true, and return its value. Fails early if the command ends before."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        late, ended = time.monotonic() > deadline, command is not None and command.code is not None
        if late or (ended and not condition()):
            said = f"\nstdout:\n{command.stdout}\nstderr:\n{command.stderr}" if command else ""
            why = (
                f"was not to be seen in {timeout_s:g} s"
                if late
                else f"had not come when it ended: {command.code}"
            )
            raise AssertionError(f"{what} {why}{said}")
        time.sleep(0.02)
    return value


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def coordinator_at(start: Callable[..., Command]) -> str:
    """The address of a coordinator on loopback, which `start` ends with the test."""
    command = start(*DILOCO, "dht", "start", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", name="dht")
    wait_until(lambda: "\n" in command.stdout, "the line to paste", command=command)
    return command.stdout.splitlines()[0].split()[1]


def check_gone(command: Command, within_s: float = GONE_WITHIN_S) -> float:
    """Assert that all processes of the command end within so many seconds. Returns how long it took."""
    began = time.monotonic()
    # A process that ends loses its environment, and so its mark, a moment before it can be waited for.
    while (left := command.processes()) or command.code is None:
        assert time.monotonic() - began < within_s, f"still running after {within_s:g} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began


def check_whole_files(directory: Path) -> None:
    """Assert that no file below the directory is half-written, and that no temporary file is left."""
    paths = [path for path in directory.rglob("*") if path.is_file() or path.is_dir()]
    for path in paths:
        if path.suffix == ".jsonl" and (content := path.read_bytes()):
            assert content.endswith(b"\n"), f"half a line in {path}"
            assert all(isinstance(json.loads(line), dict) for line in content.splitlines())
    odd = [p for p in paths if p.suffix in (".new", ".partial", ".old", ".tmp") or p.name.startswith(".")]
    assert not odd, f"left behind: {odd}"
    for path in paths:
        if path.name == "config.json":
            json.loads(path.read_text())


def check_nothing_left(command: Command) -> None:
    """Assert that nothing half-written or temporary is left. For commands that were able to clean up."""
    check_whole_files(command.directory)
    left = list((command.directory / "tmp").glob("diloco-*"))
    assert not left, f"temporary directories left behind: {left}"


def records_of(run_dir: Path, kind: str = "") -> list[dict[str, Any]]:
    """The records that a trainer has written so far, of one kind or all."""
    found = Tail(run_dir / "metrics.jsonl").read()
    return [dict(record) for record in found if kind in ("", record["kind"])]


def digests_of(run_dir: Path) -> dict[int, str]:
    """The anchor's digest after each epoch."""
    return {record["epoch"]: record["anchor_digest"] for record in records_of(run_dir, "epoch")}


def text_of_boxes(stderr: str) -> list[str]:
    """The message of each box, without frame and line breaks."""
    boxes: list[list[str]] = []
    is_inside = False
    for line in stderr.splitlines():
        if line.startswith("╭─"):
            boxes.append([])
            is_inside = True
        elif line.startswith("╰─"):
            is_inside = False
        elif is_inside:
            boxes[-1].append(line.strip("│ "))
    return [" ".join(box) for box in boxes]


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    wanted = f"{_MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                # Zombies are not found here: their environment is empty.
                argv = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(process.name), argv.decode(errors="replace").strip()
