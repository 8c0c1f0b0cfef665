"""Utilisation of a machine: of its GPUs by nvidia-smi, of its CPUs by /proc/stat."""

from __future__ import annotations

from dataclasses import dataclass

from provisioning.machines.machine import Machine

# /proc/stat counts ticks since boot, so CPU utilisation needs two samples.
_SCRIPT = """
nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits 2>/dev/null
echo ---
head -n 1 /proc/stat; sleep 0.2; head -n 1 /proc/stat
"""
_IDLE = slice(3, 5)


@dataclass(frozen=True, kw_only=True)
class Use:
    """Mean utilisation in percent; None: unknown."""

    gpu: float | None = None
    cpu: float | None = None

    def __str__(self) -> str:
        kinds = (("GPU", self.gpu), ("CPU", self.cpu))
        return next((f"{kind} {percent:.0f} %" for kind, percent in kinds if percent is not None), "–")


UNKNOWN = Use()


async def use_of(machine: Machine) -> Use:
    """The utilisation of a machine. Raises MachineError."""
    return use_in((await machine.run(_SCRIPT)).stdout)


def use_in(text: str) -> Use:
    """Parses the output of the script, without trusting its form."""
    gpus, _, processors = text.partition("---\n")
    percents = [int(line) for line in gpus.split() if line.isdecimal() and len(line) <= 3]
    return Use(gpu=sum(percents) / len(percents) if percents else None, cpu=_busy(processors.splitlines()))


def _busy(lines: list[str]) -> float | None:
    """CPU utilisation between two samples of ticks: user, nice, system, idle, iowait, and others; None: unknown."""
    samples = [
        [int(word) for word in line.split()[1:9] if word.isdecimal() and len(word) < 20] for line in lines
    ]
    if [len(sample) for sample in samples] != [8, 8]:
        return None
    ticks = [after - before for before, after in zip(*samples, strict=True)]
    return 100 * (1 - sum(ticks[_IDLE]) / sum(ticks)) if sum(ticks) > 0 and min(ticks) >= 0 else None
