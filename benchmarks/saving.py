"""The cost of checkpoints in a training: epochs that begin with a save, compared with epochs that do not.

A swarm of one peer, with daemon and worker, trains as with `diloco peer` and saves at the end of every second epoch.
The duration of an epoch that begins with a save is compared with that of the next one, in pairs that are at most
minutes apart. The figure includes the copy, which blocks training, and the CPU and disk time of the thread and the
daemon that write concurrently. The batch is small, so steps are short and the relative cost is at its highest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import Result, parser, report
from diloco.train.metrics_file import Record, Tail

_ROOT = Path(__file__).parent.parent
_STOP_TIMEOUT_S = 15.0
_TIMEOUT_S = 7200.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Parameters of the training."""

    path_model: str = "15m"
    local_steps: int = 100
    batch_size: int = 2
    seq_length: int = 256
    num_pairs: int = 6
    """Pairs of epochs that are measured, after one for warm-up."""

    @property
    def interval(self) -> int:
        """Steps between two saves: every second epoch begins with one."""
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
    """Run a training and return its metrics. Raises RuntimeError if it fails."""
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
    with (directory / "log").open("wb") as log:
        peer = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
    try:
        peer.wait(_TIMEOUT_S)
    finally:
        # The peer ends its workers.
        peer.terminate()
        peer.wait(_STOP_TIMEOUT_S)
    if peer.returncode:
        raise RuntimeError((directory / "log").read_text(errors="replace")[-2000:])
    return Tail(directory / "run" / "metrics.jsonl").read()


def results_of(setting: Setting, records: Sequence[Record]) -> list[Result]:
    """Compare pairs of epochs, of which the first began with a save."""
    ended_at = {
        int(record["step"]): float(record["time"]) for record in records if record.get("kind") == "step"
    }
    size, pair = setting.local_steps, setting.interval
    starts = range(pair, setting.num_steps, pair)
    # A step's record is written before the save that is due after it, so the save counts for the following steps.
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
