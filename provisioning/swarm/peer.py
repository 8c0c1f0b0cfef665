"""The progress of a pod's peer, and messages about it while a command waits for the first epoch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from provisioning.machines import jobs
from provisioning.machines.answers import Amount, decoded
from provisioning.machines.machine import MAX_LOG_BYTES, Machine
from provisioning.machines.paths import JOBS, PEER_RUN, pod_directory
from provisioning.swarm.commands import PEER_JOB

_LOG_LINES = 15
_LINE_INTERVAL_S = 10.0


@dataclass(frozen=True)
class PeerProgress:
    """The progress of a peer, read from its job, metrics and log."""

    job: jobs.JobState
    epoch: int = 0
    step: int = 0
    last_lines: str = ""
    num_contributors: int = 0
    """In its last epoch."""
    loss: float | None = None
    """At its last step."""
    tokens: int = 0
    """Tokens that it has trained itself since it joined."""

    @property
    def has_finished(self) -> bool:
        return self.job.code == 0


class _Record(msgspec.Struct, frozen=True):
    """What is read of a line of metrics.jsonl."""

    kind: str = ""
    epoch: Amount = 0
    step: Amount = 0
    tokens: Amount = 0
    loss: float | None = None
    contributors: Sequence[Amount] | None = None


class PeerNews:
    """Messages for a user who waits for a peer's first epoch: what it does, and the epoch itself."""

    def __init__(self, began_at: float) -> None:
        self._began_at, self._said_at, self._line = began_at, began_at, ""
        self._num_updates = 0

    def of(self, progress: PeerProgress, now: float) -> str:
        """The message for this progress; empty: none."""
        self._num_updates += 1
        if progress.epoch >= 1 or progress.has_finished:
            return self._end(progress, now)
        line = progress.last_lines.rpartition("\n")[2].removeprefix("this peer: ")
        if line in ("", self._line) or now - self._said_at < _LINE_INTERVAL_S:
            return ""
        self._said_at, self._line = now, line
        return line

    def _end(self, progress: PeerProgress, now: float) -> str:
        if self._num_updates == 1 or not progress.num_contributors:
            return f"is in epoch {progress.epoch}"
        peers = f"{progress.num_contributors} peer{'' if progress.num_contributors == 1 else 's'}"
        loss = "" if progress.loss is None else f", loss {progress.loss:.3f}"
        return (
            f"epoch {progress.epoch} averaged by {peers}{loss}, {now - self._began_at:.0f} s after the start"
        )


async def read_progress(machine: Machine, label: str) -> PeerProgress:
    """The progress of the peer on this pod. Raises MachineError."""
    job = await jobs.state(machine, label, PEER_JOB)
    directory = shlex.quote(pod_directory(label))
    script = f"""
cd {directory} || exit 9
grep -m 1 -E '"event": ?"start"' {PEER_RUN}/metrics.jsonl 2>/dev/null
grep -E '"kind": ?"step"' {PEER_RUN}/metrics.jsonl 2>/dev/null | tail -n 1
grep -E '"kind": ?"epoch"' {PEER_RUN}/metrics.jsonl 2>/dev/null | tail -n 1
echo ---
tail -n {_LOG_LINES} {JOBS}/{PEER_JOB}/log 2>/dev/null | tail -c {MAX_LOG_BYTES}; exit 0
"""
    answer = (await machine.run(script)).checked("looking at the peer")
    figures, _, lines = answer.partition("---\n")
    records = [record for line in figures.splitlines() if (record := decoded(line, _Record))]
    epoch = next((record for record in records if record.kind == "epoch"), _Record())
    step = next((record for record in records if record.kind == "step"), _Record())
    start = next((record for record in records if record.kind == "event"), _Record())
    return PeerProgress(
        job,
        epoch=int(epoch.epoch),
        step=int(max(epoch.step, step.step)),
        last_lines=end_of(lines)[-MAX_LOG_BYTES:],
        num_contributors=len(epoch.contributors or ()),
        loss=step.loss,
        tokens=int(max(step.tokens - start.tokens, 0)),
    )


def end_of(log: str) -> str:
    """The text of the last box in the log, such as an error message; without a box, the last lines."""
    lines = log.strip().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("╭─")]
    if starts:
        return " ".join(line.strip("│ ") for line in lines[starts[-1] + 1 :] if not line.startswith("╰"))
    return "\n".join(lines[-_LOG_LINES:])
