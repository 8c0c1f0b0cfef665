"""A transformers Trainer with the callback, on a tiny Llama: in a test's own process, or as a peer's worker.

python -m tests.support.trainer_worker '{"max_steps": 6, "history": "…"}'
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.light_worker import Recorder
from diloco.callback import DilocoCallback
from diloco.outer.diloco import Commit
from tests.support.tiny_model import samples, tiny_llama


class Samples(Dataset):
    """Random token ids, different for each seed."""

    def __init__(self, seed: int) -> None:
        self._ids = samples(64, seed=seed)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def trainer_of(
    directory: Path,
    callback: DilocoCallback,
    *others: TrainerCallback,
    max_steps: int = 6,
    data_seed: int = 0,
    model: nn.Module | None = None,
    **arguments: Any,
) -> Trainer:
    """A trainer on the CPU that saves after every step and logs to nobody."""
    settings = {
        "output_dir": str(directory),
        "max_steps": max_steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        **arguments,
    }
    return Trainer(
        model=model if model is not None else tiny_llama(),
        args=TrainingArguments(**settings),
        train_dataset=Samples(data_seed),
        eval_dataset=Samples(data_seed),
        callbacks=[callback, *others],
    )


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def digest_of(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights(model))).hexdigest()


def as_worker(settings: dict[str, Any]) -> None:
    """Train with the daemon that the environment names, beginning with weights and data of its own."""
    record = Recorder(Path(settings["history"]))

    def tell(commit: Commit) -> None:
        record(
            "epoch",
            epoch=commit.epoch,
            anchor_digest=commit.anchor_digest,
            contributors=commit.contributors,
            own_steps=callback.outer.local_step,
            weights=digest_of(trainer.model),
        )

    own = zlib.crc32(settings["history"].encode())
    callback = DilocoCallback(on_commit=tell)
    trainer = trainer_of(
        Path(settings["history"]).with_suffix(".trainer"),
        callback,
        max_steps=settings["max_steps"],
        data_seed=own,
        model=tiny_llama(seed=own),
        save_strategy="no",
    )
    trainer.train()
    record("finished")


if __name__ == "__main__":
    torch.set_num_threads(1)
    as_worker(json.loads(sys.argv[1]))
