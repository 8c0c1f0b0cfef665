"""How many GPUs and cores this machine lends us, without loading torch."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence

from diloco.errors import UserError

_NVIDIA_SMI_TIMEOUT_S = 10.0


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name: its own entries where it is set, else nvidia-smi's indices."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return _told_by_nvidia_smi("index", ())


def hardware_in_words(environment: Mapping[str, str], device: str) -> str:
    """What a peer trains on, for people: "2 × NVIDIA A100-SXM4-80GB", "CPU, 8 cores"."""
    names: list[str] = []
    if device != "cpu":
        # None to be seen is none, and not all of them.
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None or (chosen := visible_gpus(environment)):
            names = _told_by_nvidia_smi("name", () if visible is None else chosen)
    if not names:
        return f"CPU, {num_cores()} cores"
    return ", ".join(f"{number} × {name}" for name, number in Counter(names).items())


def _told_by_nvidia_smi(field: str, gpus: Sequence[str]) -> list[str]:
    """One line for each of these GPUs, or of all; nothing where there is no nvidia-smi, or it fails."""
    only = ["-i", ",".join(gpus)] if gpus else []
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", *only],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def num_ranks(wanted: str, device: str, num_gpus: int) -> int:
    """Ranks of a peer for `--nproc-per-node`: a number, or `auto`: one per GPU, one on a CPU."""
    if wanted == "auto":
        return 1 if device == "cpu" else max(num_gpus, 1)
    if not wanted.isdigit() or int(wanted) < 1:
        raise UserError(f'--nproc-per-node "{wanted}" is neither `auto` nor a number from 1 on.')
    if device == "cuda" and int(wanted) > num_gpus:
        raise UserError(f"--nproc-per-node {wanted} is more than this machine's {num_gpus} GPUs.")
    return int(wanted)


def threads_per_rank(cores: int, ranks: int) -> int:
    """OMP_NUM_THREADS for each of so many ranks on so many cores."""
    return max(cores // ranks, 1)
