"""How busy a machine is, as it says itself: its GPUs by nvidia-smi, its processors by /proc/stat."""

from __future__ import annotations

from dataclasses import dataclass

from provisioning.machines.machine import Machine

# Processors are looked at twice: the kernel counts their ticks since the start.
_SCRIPT = """
nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits 2>/dev/null
echo ---
head -n 1 /proc/stat; sleep 0.2; head -n 1 /proc/stat
"""
_IDLE = slice(3, 5)


@dataclass(frozen=True, kw_only=True)
class Use:
    """Percent, the mean of all; None: the machine does not say."""

    gpu: float | None = None
    cpu: float | None = None

    def __str__(self) -> str:
        kinds = (("GPU", self.gpu), ("CPU", self.cpu))
        return next((f"{kind} {percent:.0f} %" for kind, percent in kinds if percent is not None), "–")


UNKNOWN = Use()


async def use_of(machine: Machine) -> Use:
    """Raises MachineError."""
    return use_in((await machine.run(_SCRIPT)).stdout)


def use_in(text: str) -> Use:
    """What the script says; a machine's words are not trusted to have any form."""
    gpus, _, processors = text.partition("---\n")
    percents = [int(line) for line in gpus.split() if line.isdecimal() and len(line) <= 3]
    return Use(gpu=sum(percents) / len(percents) if percents else None, cpu=_busy(processors.splitlines()))


def _busy(lines: list[str]) -> float | None:
    """Between two looks at the ticks of all processors: user, nice, system, idle, waiting for a disk, and more."""
    looks = [
        [int(word) for word in line.split()[1:9] if word.isdecimal() and len(word) < 20] for line in lines
    ]
    if [len(look) for look in looks] != [8, 8]:
        return None
    ticks = [after - before for before, after in zip(*looks, strict=True)]
    return 100 * (1 - sum(ticks[_IDLE]) / sum(ticks)) if sum(ticks) > 0 and min(ticks) >= 0 else None
