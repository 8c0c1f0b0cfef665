"""Trains a small model that has learned the format of a task but few right answers, as a start for GRPO.

    python -m benchmarks.format_model tiny-grpo/ [--steps 250]

Writes tiny-grpo/, a byte-level model trained by diloco.train_fsdp on questions with answers that are mostly one too
high. Its chat template is plain text, because the names of special tokens are encoded as plain text in pretraining.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from diloco.options.flags import GrpoConfig
from diloco.options.model_files import PRESETS_DIR, load_model_config
from diloco.rl.task_choice import open_task

TASK = "reasoning-gym:chain_sum,min_terms=1,max_terms=1,min_digits=1,max_digits=1"
"""Sums of a single one-digit term: the simplest task."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SEED = 20_000
_RIGHT = 0.15
_SEQ_LENGTH = 192
_STEPS = 250
# A head size of 32, which vLLM supports.
_TINY = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "initializer_range": 0.125,
}


def bare_model(directory: Path, **changes: object) -> Path:
    """Write a preset's configuration and tokenizer, with the plain template and without weights."""
    preset = "demo"
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PRESETS_DIR / preset / name, directory / name)
    config = {**load_model_config(preset), **changes}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def write_corpus(path: Path, *, num_documents: int = 4000, right: float = _RIGHT) -> Path:
    """Write conversations in the task's format as JSONL, with a share `right` of right answers, others one too high."""
    task, chance = open_task(GrpoConfig(dataset=TASK), seed=_SEED), random.Random(_SEED)
    with path.open("w", encoding="utf-8") as lines:
        for index in range(num_documents):
            example = task.example(index)
            answer = example.gold if chance.random() < right else str((int(example.gold) + 1) % 10)
            said = "".join(f"{message['role']}: {message['content']}\n" for message in example.prompt)
            text = f"{said}assistant: <SOLUTION>{answer}</SOLUTION>"
            lines.write(json.dumps({"text": text}) + "\n")
    return path


def train_format_model(directory: Path, *, steps: int = _STEPS, **changes: object) -> Path:
    """Train the model with diloco.train_fsdp in a separate process. Returns the directory."""
    with tempfile.TemporaryDirectory(prefix="diloco-format-") as name:
        work = Path(name)
        corpus = write_corpus(work / "corpus.jsonl")
        bare = bare_model(work / "bare", **{**_TINY, **changes})
        flags = {
            "path-model": bare,
            "dataset-name-or-path": corpus,
            "seq-length": _SEQ_LENGTH,
            "total-batch-size": 16,
            "lr": 5e-3,
            "warmup-steps": 20,
            "total-steps": steps,
            "eval-tokens": 4096,
            "run-dir": work / "run",
            "device": "cpu",
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache")}
        environment.pop("DILOCO_LINK", None)
        subprocess.run([sys.executable, "-m", "diloco.train_fsdp", *words], env=environment, check=True)
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(work / "run" / "model", directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--tied", action="store_true", help="tie the head to the embeddings")
    arguments = parser.parse_args()
    train_format_model(arguments.directory, steps=arguments.steps, tie_word_embeddings=arguments.tied)
    print(f"{arguments.directory}: ready for `diloco run --mode grpo --path-model {arguments.directory}`")


if __name__ == "__main__":
    main()
