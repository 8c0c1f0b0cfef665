"""The GPUs, cores and memory of this machine, found without importing torch, and which process gets which GPU."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig
from peers.system import available_memory_bytes, num_cores

# Without persistence mode the driver wakes each GPU first, which takes one to two seconds.
_NVIDIA_SMI_TIMEOUT_S = 30.0
_DEVICES = Path("/dev")
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Resources of a machine, shared by `num_peers` peers."""

    num_cores: int
    memory_bytes: int | None = None
    """Free host memory; None if unknown."""
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them."""
    gpu_bytes: int = 0
    """Memory of the smallest GPU; 0 if the peers train on the CPU."""
    num_peers: int = 1

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)

    @property
    def cores_each(self) -> int:
        return max(self.num_cores // self.num_peers, 1)

    @property
    def memory_bytes_each(self) -> int | None:
        return None if self.memory_bytes is None else self.memory_bytes // self.num_peers

    @property
    def gpu_bytes_each(self) -> int:
        """GPU memory per peer; peers share a GPU if there are more peers than GPUs."""
        return self.gpu_bytes // -(-self.num_peers // max(self.num_gpus, 1))

    def in_words(self) -> str:
        what = f"{self.num_cores} core{'' if self.num_cores == 1 else 's'} without a GPU"
        if self.gpu_bytes:
            what = (
                f"{self.num_gpus} GPU{'' if self.num_gpus == 1 else 's'} of {self.gpu_bytes / _GIB:.0f} GiB"
            )
        return what if self.num_peers == 1 else f"{what}, shared by {self.num_peers} peers"


def this_machine(environment: Mapping[str, str], device: str, *, num_peers: int = 1) -> Machine:
    """The resources that are free now for peers that train on `device`; `cpu` leaves out the GPUs."""
    gpus = [] if device == "cpu" else visible_gpus(environment)
    sizes = _query_nvidia_smi("memory.total", gpus) if gpus else []
    mebibytes = [int(number) for size in sizes if (number := size.partition(" ")[0]).isdigit()]
    return Machine(
        num_cores=num_cores(),
        memory_bytes=available_memory_bytes(),
        gpus=tuple(gpus),
        gpu_bytes=min(mebibytes, default=0) << 20,
        num_peers=num_peers,
    )


def check_gpus_listed(environment: Mapping[str, str], device: str, gpus: Sequence[str]) -> None:
    """Raise UserError if this machine has several GPUs, but `gpus` has none: nvidia-smi is missing or has failed.

    For commands that divide the GPUs among processes, which would otherwise all use the first one.
    """
    if gpus or device == "cpu" or "CUDA_VISIBLE_DEVICES" in environment:
        return
    num_found = len(list(_DEVICES.glob("nvidia[0-9]*")))
    if num_found > 1:
        raise UserError(
            f"this machine has {num_found} GPUs ({_DEVICES}/nvidia*), but nvidia-smi lists none: it is missing, fails, "
            f"or takes over {_NVIDIA_SMI_TIMEOUT_S:g} s. Repair it, or set CUDA_VISIBLE_DEVICES to the GPUs to use, "
            "such as 0,1; or use --device cpu."
        )


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES if it is set, else the indices that nvidia-smi lists, none if it fails."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return _query_nvidia_smi("index", ())


def hardware_in_words(environment: Mapping[str, str], device: str) -> str:
    """The hardware that a peer trains on, such as "2 × NVIDIA A100-SXM4-80GB" or "CPU, 8 cores"."""
    names: list[str] = []
    if device != "cpu":
        # An empty CUDA_VISIBLE_DEVICES means no GPU, but nvidia-smi without -i would list all.
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None or (chosen := visible_gpus(environment)):
            names = _query_nvidia_smi("name", () if visible is None else chosen)
    if not names:
        return f"CPU, {num_cores()} cores"
    return ", ".join(f"{number} × {name}" for name, number in Counter(names).items())


def _query_nvidia_smi(field: str, gpus: Sequence[str]) -> list[str]:
    """The value of `field` for each of `gpus`, or for every GPU if empty; [] if nvidia-smi is missing or fails."""
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


def num_ranks(wanted: str, device: str, num_gpus: int, *, batch_size: int | None = None) -> int:
    """The number of ranks that `--nproc-per-node` asks for; `auto` is one per GPU, or one on the CPU.

    With `batch_size`, that of the run, `auto` is the most of them that divide it.
    """
    if wanted == "auto":
        most = 1 if device == "cpu" else max(num_gpus, 1)
        return next(ranks for ranks in range(most, 0, -1) if (batch_size or most) % ranks == 0)
    if not wanted.isdigit() or int(wanted) < 1:
        raise UserError(f'--nproc-per-node "{wanted}" is neither `auto` nor a number from 1 on.')
    if device == "cuda" and int(wanted) > num_gpus:
        raise UserError(f"--nproc-per-node {wanted} is more than this machine's {num_gpus} GPUs.")
    return int(wanted)


def thread_settings(environment: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """The environment's settings for OpenMP, or ours for one of `num_workers` workers on this machine.

    Ours are an equal share of the cores, and threads that sleep while they wait for each other. By default they spin,
    which takes the cores from other workers: two small loops of two threads each on two cores were 30 times slower.
    """
    own = {"OMP_NUM_THREADS": str(max(num_cores() // num_workers, 1)), "OMP_WAIT_POLICY": "PASSIVE"}
    return {name: environment.get(name) or value for name, value in own.items()}


def starts_server(config: TrainConfig) -> bool:
    """Whether this peer starts a vLLM server."""
    return config.mode == "grpo" and config.grpo.rollout == "vllm"


def needs_two_gpus(config: TrainConfig) -> bool:
    """Whether a peer of one rank, if it trains on a GPU, needs a second one for a vLLM server of its own."""
    return starts_server(config) and config.grpo.vllm_gpu is None and config.device != "cpu"


def gpus_for_ranks(config: TrainConfig, num_gpus: int) -> int:
    """How many of a machine's GPUs are left for training."""
    return max(num_gpus - 1, 1) if num_gpus and starts_server(config) and config.device != "cpu" else num_gpus


def split_gpus(
    gpus: Sequence[str], *, num_ranks: int, server: str | None, starts_server: bool
) -> tuple[tuple[str, ...], str | None]:
    """The GPUs of the ranks, and the server's. Raises UserError if there are too few.

    `server` is the GPU that the user named, which the ranks use too if the others are too few.
    """
    if not gpus:
        return (), None
    if not starts_server:
        return tuple(gpus[:num_ranks]), None
    if server is not None:
        others = [gpu for gpu in gpus if gpu != server]
        return tuple((others if len(others) >= num_ranks else gpus)[:num_ranks]), server
    if len(gpus) <= num_ranks:
        raise UserError(
            f"the vLLM server needs a GPU besides the {num_ranks} used for training, but this machine has "
            f"{len(gpus)}; share one with --grpo.vllm-gpu {gpus[-1]} --grpo.vllm-args --gpu-memory-utilization 0.4, "
            "or use --rollout peers and start peers with --role rollout on other machines"
        )
    return tuple(gpus[:num_ranks]), gpus[-1]
