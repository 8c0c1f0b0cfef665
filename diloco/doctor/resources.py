"""Checks the resources of a peer: file descriptors, memory for its model, and disk space."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco.data.batches import open_corpus
from diloco.data.corpus import FileCorpus
from diloco.data.token_cache import default_cache_dir, to_tokenize
from diloco.data.tokenizer import num_token_ids
from diloco.doctor.findings import Finding, failed, passed, warned
from diloco.errors import UserError
from diloco.options.common_names import closest_name
from diloco.options.model_files import load_model_config, preset_names
from diloco.options.trainer import TrainConfig
from diloco.train.memory import (
    MemoryNeed,
    check_memory,
    check_peers_fit,
    least_num_parameters,
    memory_needed_bytes,
    residual_bytes_per_parameter,
)
from peers.system import available_memory_bytes

_GIB = 2**30
_TEST_BYTES = 1 << 20
_TEMPORARY_BYTES = 64 << 20
_STATE_BYTES = 16 << 20
# fp32: run_dir/model/ holds the weights; a checkpoint holds weights, AdamW's two moments or Muon's one, anchor and
# momentum, and the residuals of a lossy codec.
_MODEL_BYTES_PER_PARAMETER = 4
_CHECKPOINT_BYTES_PER_PARAMETER = {"adamw": 20, "muon": 16}
# Usual values: half of a file of JSON is text, and a token of a vocabulary that is larger than that of bytes stands for
# five of them. Where rows hold more than text, the tokens take far less.
_TEXT_SHARE = 0.5
_BYTES_PER_TOKEN, _MOST_BYTE_IDS = 5, 512
# A peer's checkpoints, and behind a dot those that a killed process has left half-written.
_PEERS_PARTS = "model_step_*/*diloco_rank_*"
_SMALLER_MODEL = "--path-model 2m  # or another that is smaller, shorter samples, or more memory"


@dataclass(frozen=True)
class Place:
    """A directory that a peer writes to, the space that it needs, and what chooses another, such as `--run-dir `."""

    name: str
    path: Path
    needed_bytes: int
    chosen_by: str
    bytes_at_end: int = 0
    """The space that all checkpoints of the run need, if they are all kept."""
    is_estimate: bool = False
    """Whether less than `needed_bytes` may do: then nothing refuses a start."""


def check_descriptors() -> Iterator[Finding]:
    from peers.errors import UserError as TooFew
    from peers.net.dht.descriptors import LEAST, raise_limit

    try:
        yield passed("descriptors", f"{raise_limit()} files and sockets may be open")
    except TooFew as error:
        yield failed("descriptors", str(error), f"ulimit -Hn {8 * LEAST}; ulimit -n {8 * LEAST}  # as root")


def check_model_memory(config: TrainConfig, num_ranks: int, gpu_bytes: int | None) -> Iterator[Finding]:
    """Check the memory for one peer with this configuration; `gpu_bytes` is free GPU memory, None on the CPU."""
    on_gpu = gpu_bytes is not None and config.device != "cpu"
    try:
        model = load_model_config(config.path_model)
    except UserError as error:
        likely = closest_name(config.path_model, preset_names()) or "2m"
        yield failed("memory", str(error), f"--path-model {likely}  # or another preset, directory or hub id")
        return
    try:
        # The cheap lower bound first: counting the parameters of a far too large model with transformers takes long.
        check_peers_fit(
            config.path_model,
            on_gpu=on_gpu,
            optimizer=config.optimizer,
            has_adapters=config.trains_adapters,
            copies_state=config.copies_state,
            compression=config.hv.compression,
        )
    except UserError as error:
        yield failed("memory", str(error), _SMALLER_MODEL)
        return
    num_parameters = _num_parameters(config.path_model)
    num_copies = None if config.shards_model else num_ranks

    def need_of(samples: int) -> MemoryNeed:
        return memory_needed_bytes(
            num_parameters,
            activation_tokens=samples * config.seq_length * num_ranks,
            config=model,
            optimizer=config.optimizer,
            on_gpu=on_gpu,
            has_adapters=config.trains_adapters,
            recomputes=config.activation_checkpointing,
            copies_state=config.copies_state,
            compression=config.hv.compression,
            num_copies=num_copies,
        )

    def problem_of(samples: int) -> str:
        try:
            free_bytes = gpu_bytes if on_gpu else None
            check_memory(need_of(samples), path_model=config.path_model, device_available=free_bytes)
        except UserError as error:
            return str(error)
        return ""

    samples = config.per_device_train_batch_size
    if message := problem_of(samples):
        divisors = (size for size in range(samples - 1, 0, -1) if samples % size == 0)
        fitting = next((size for size in divisors if not problem_of(size)), None)
        smaller = f"--per-device-train-batch-size {fitting}" if fitting else _SMALLER_MODEL
        yield failed("memory", message, smaller)
        return
    need, left = need_of(samples), available_memory_bytes()
    free = f", {_size_text(left)} are free" if left is not None else ""
    gpus = f" and {_size_text(need.device_bytes)} on GPUs" if on_gpu else ""
    yield passed("memory", f"training {config.path_model} takes {_size_text(need.host_bytes)}{gpus}{free}")


def check_disk(
    config: TrainConfig, state_dir: Path, *, num_peers: int = 1, is_settled: bool = True
) -> Iterator[Finding]:
    """Check every directory that `num_peers` peers write to, by writing a temporary file.

    `is_settled=False`: the number of steps, and so of checkpoints, may still come from the swarm.
    """
    num_parameters = _least_num_parameters(config.path_model)
    for place in places_to_check(
        config, state_dir, num_parameters, num_peers=num_peers, is_settled=is_settled
    ):
        yield check_place(place)


def places_to_check(
    config: TrainConfig,
    state_dir: Path,
    num_parameters: int,
    *,
    num_peers: int = 1,
    is_settled: bool = True,
) -> list[Place]:
    """The directories that `num_peers` peers write to; arguments as for `check_disk`."""
    run_dir = Path(config.run_dir or "runs").expanduser()
    model_bytes = num_peers * num_parameters * _MODEL_BYTES_PER_PARAMETER
    checkpoint_bytes = num_peers * num_parameters * checkpoint_bytes_per_parameter(config)
    keeps_whole_models = config.ckpt.interval is not None and not config.trains_adapters
    is_remote = "://" in config.ckpt.path
    if keeps_whole_models and is_remote:
        # Assembled there and then uploaded. What a killed process has left half-written is deleted before.
        model_bytes += checkpoint_bytes - _bytes_below(run_dir / "checkpoints")
    places = [
        Place("run directory", run_dir, model_bytes, "--run-dir "),
        Place("state directory", state_dir, _STATE_BYTES, "export XDG_STATE_HOME="),
        Place("temporary files", Path(tempfile.gettempdir()), _TEMPORARY_BYTES, "export TMPDIR="),
    ]
    if (token_bytes := _usual_token_bytes(config, is_settled=is_settled)) > 0:
        cache = default_cache_dir()
        places.append(Place("tokens", cache, token_bytes, "export XDG_CACHE_HOME=", is_estimate=True))
    if keeps_whole_models and not is_remote:
        places.append(_checkpoints_place(config, checkpoint_bytes, num_peers, is_settled=is_settled))
    return places


def _usual_token_bytes(config: TrainConfig, *, is_settled: bool) -> int:
    """About what the tokens of the files that are still to be tokenised take, besides what has been written of them.

    0 where another check fails.

    `is_settled=False`: the tokenizer may still come with the model of the swarm.
    """
    if config.mode != "pretrain" or config.fake_data:
        return 0
    try:
        corpus = open_corpus(config)
        # The standard library is small.
        if not isinstance(corpus, FileCorpus):
            return 0
        file_bytes, unfinished = to_tokenize(corpus, default_cache_dir())
        num_ids = (num_token_ids(config.path_model) if is_settled else None) or 2**16
    except (UserError, OSError):
        return 0
    bytes_per_token = 1 if num_ids <= _MOST_BYTE_IDS else _BYTES_PER_TOKEN
    token_bytes = file_bytes * _TEXT_SHARE * (2 if num_ids <= 2**16 else 4) / bytes_per_token
    return int(token_bytes) - sum(map(_bytes_below, unfinished))


def checkpoint_bytes_per_parameter(config: TrainConfig) -> int:
    """A lower bound, like that of the residuals."""
    residuals = residual_bytes_per_parameter(config.hv.compression)
    return _CHECKPOINT_BYTES_PER_PARAMETER[config.optimizer] + residuals


def _checkpoints_place(config: TrainConfig, size: int, num_peers: int, *, is_settled: bool) -> Place:
    """The directory of --ckpt.path, for checkpoints of `size` bytes."""
    path, ckpt = Path(config.ckpt.path).expanduser(), config.ckpt
    there, left_over = _own_bytes(path, config.hv.world_rank, num_peers)
    # One more than are kept, since the oldest is deleted only after the newest is complete.
    needed = max(size, ((ckpt.topk or 1) + 1) * size - there) - left_over
    at_end = 0
    if ckpt.interval is not None and ckpt.topk is None and is_settled:
        at_end = config.end_step // ckpt.interval * size - there - left_over
    return Place("checkpoints", path, needed, "--ckpt.path ", at_end)


def _own_bytes(path: Path, world_rank: int | None, num_peers: int) -> tuple[int, int]:
    """The size of the checkpoints that `num_peers` peers of this machine have there, and of those half-written.

    If the coordinator assigns the world rank, the largest parts count as theirs: on a disk that all peers of a swarm
    share, these are about as large as their own.
    """
    whole, left_over = Counter[str](), Counter[str]()
    # Not Path.glob, which fails if another peer deletes its own meanwhile.
    for found in glob.glob(_PEERS_PARTS, root_dir=path, include_hidden=True):  # noqa: PTH207
        directory = path / found
        part = directory.name.strip(".").partition(".")[0]
        counter = left_over if directory.name.startswith(".") else whole
        counter[part] += _bytes_below(directory)
    parts = sorted(whole | left_over, key=lambda part: whole[part] + left_over[part])[-num_peers:]
    if world_rank is not None:
        parts = [f"diloco_rank_{world_rank}"]
    return sum(whole[part] for part in parts), sum(left_over[part] for part in parts)


def _bytes_below(directory: Path) -> int:
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(where, name).stat().st_size
    return total


def check_place(place: Place) -> Finding:
    """Check that a file can be written to the directory, and that there is enough free space."""
    too_little, about = (warned, "about ") if place.is_estimate else (failed, "")
    existing = _existing(place.path)
    larger = f"{place.chosen_by}/a/larger/disk"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(_TEST_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        fix = (
            larger
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else f"{place.chosen_by}/a/directory/of/yours"
        )
        return too_little(place.name, f"{place.path} cannot be written to: {error.strerror}", fix)
    message = f"{place.path}: {_size_text(free)} free"
    if free < place.needed_bytes:
        return too_little(place.name, f"{message}, {about}{_size_text(place.needed_bytes)} needed", larger)
    if free < place.bytes_at_end:
        needed = f"{_size_text(place.bytes_at_end)} needed to keep all checkpoints of the run"
        return warned(place.name, f"{message}, {needed}", "--ckpt.topk 3")
    if free < 2 * place.needed_bytes:
        return warned(place.name, f"{message}, {about}{_size_text(place.needed_bytes)} needed", larger)
    return passed(place.name, message)


def _existing(path: Path) -> Path:
    """The directory itself, or else the nearest of its parents that exists."""
    return next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))


def _num_parameters(path_model: str) -> int:
    from diloco.train.model import num_parameters

    return num_parameters(load_model_config(path_model))


def _least_num_parameters(path_model: str) -> int:
    """A lower bound of the model's number of parameters; 0 if there is no such model, which another check reports."""
    try:
        return least_num_parameters(load_model_config(path_model))
    except UserError:
        return 0


def _size_text(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.0f} MiB"
