"""What saving costs a training: epochs after which everything is saved, against epochs after which nothing is.

One peer of its own swarm, so daemon and worker, trains as `diloco peer` does and saves at the end of every second
epoch. The steps of an epoch that began with a save are compared with those of the next, which did not: pairs, minutes
apart at most, in one process. All is in the figure: the copy for which training stands still, the thread and the daemon
that write meanwhile and take processor and disk. A batch is small, so steps are short and saving weighs most.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import Result, parser, report
from diloco.train.metrics_file import Record, Tail

_ROOT = Path(__file__).parent.parent
_STOP_TIMEOUT_S = 15.0
_SILENCE_TIMEOUT_S = 300.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and for how long."""

    path_model: str = "15m"
    local_steps: int = 100
    batch_size: int = 2
    seq_length: int = 256
    num_pairs: int = 6
    """Of epochs, after a first pair that does not count."""

    @property
    def interval(self) -> int:
        """Steps between two saves: of two epochs one begins with a save."""
        return 2 * self.local_steps

    @property
    def num_steps(self) -> int:
        return self.interval * (self.num_pairs + 1)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--path-model", default=None, help="default: 15m")
    flags.add_argument("--pairs", type=int, default=None, help="of epochs; default 6")
    chosen = flags.parse_args()
    setting = Setting(local_steps=10, num_pairs=2) if chosen.quick else Setting()
    setting = replace(
        setting,
        path_model=chosen.path_model or setting.path_model,
        num_pairs=chosen.pairs or setting.num_pairs,
    )
    with tempfile.TemporaryDirectory() as directory:
        records = trained(setting, Path(directory))
    report("saving", results_of(setting, records), chosen.json)


def trained(setting: Setting, directory: Path) -> list[Record]:
    """The metrics of a whole training. Raises RuntimeError where it fails, or says nothing for long."""
    flags: dict[str, Any] = {
        "path-model": setting.path_model,
        "seq-length": setting.seq_length,
        "total-batch-size": setting.batch_size,
        "per-device-train-batch-size": setting.batch_size,
        "max-steps": setting.num_steps,
        "eval-tokens": setting.seq_length,
        "device": "cpu",
        "run-dir": directory / "run",
        "hv.local-steps": setting.local_steps,
        "hv.world-rank": 0,
        "hv.host-maddrs": "/ip4/127.0.0.1/tcp/0",
        "ckpt.path": directory / "checkpoints",
        "ckpt.interval": setting.interval,
        "ckpt.topk": 2,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "diloco", "peer", "--fake-data", *words]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "XDG_STATE_HOME": str(directory / "state")}
    tail, records, heard_at = Tail(directory / "run" / "metrics.jsonl"), [], time.monotonic()
    with (directory / "log").open("wb") as log:
        peer = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
    try:
        while peer.poll() is None:
            if new := tail.read():
                records += new
                heard_at = time.monotonic()
            if time.monotonic() - heard_at > _SILENCE_TIMEOUT_S:
                raise RuntimeError(f"the peer was silent for {_SILENCE_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
    finally:
        # It takes its workers along.
        peer.terminate()
        peer.wait(_STOP_TIMEOUT_S)
    if peer.returncode:
        raise RuntimeError((directory / "log").read_text(errors="replace")[-2000:])
    return [*records, *tail.read()]


def results_of(setting: Setting, records: Sequence[Record]) -> list[Result]:
    """Epochs in pairs: the first of each began with a save."""
    ended_at = {
        int(record["step"]): float(record["time"]) for record in records if record.get("kind") == "step"
    }
    size, pair = setting.local_steps, setting.interval
    starts = range(pair, setting.num_steps, pair)
    # A step's record is written before what is due after it, so the save is in the time of the steps that follow.
    saving = [ended_at[start + size] - ended_at[start] for start in starts]
    plain = [ended_at[start + 2 * size] - ended_at[start + size] for start in starts]
    costs = [100 * (a / b - 1) for a, b in zip(saving, plain, strict=True)]
    saves = [record for record in records if record.get("event") == "checkpoint"][1:]
    case = f"{setting.path_model} cpu, every {size} steps"
    return [
        Result.of(case, "cost of saving", "% of time", costs),
        Result.of(case, "epoch without a save", "s", plain),
        Result.of(case, "epoch with a save", "s", saving),
        Result.of(case, "training stood still", "s", [float(save["blocked_s"]) for save in saves]),
        Result.of(case, "written meanwhile in", "s", [float(save["seconds"]) for save in saves]),
        Result.of(case, "a checkpoint", "MB", [float(save["bytes"]) / 1e6 for save in saves]),
    ]


if __name__ == "__main__":
    main()
