"""Size of a push of weights to an inference server as a patch, relative to all weights, and whether it is exact.

A model is trained with fp32 weights, as in a trainer. After each step the weights are rounded to the server's dtype,
the changes are packed, unpacked and applied to the server's weights, and the digests are compared. The loss is
next-token prediction, which gives every weight a gradient; with GRPO fewer weights change.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import Result, parser, report
from diloco.options.model_files import load_model_config
from diloco.rl.push import Publisher
from diloco.rl.weights import State, digest_of, patched, unpacked
from diloco.train.inner import InnerLoop
from diloco.train.model import load_model
from diloco.train.optim import adamw
from diloco.train.sharding import Precision

NUM_STEPS = 20
_CASES = ((1e-6, torch.bfloat16), (1e-5, torch.bfloat16), (1e-4, torch.bfloat16), (1e-6, torch.float32))
_BATCH, _SEQ_LENGTH = 4, 64


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--path-model", default=None, help="default: 2m, under --quick demo")
    flags.add_argument("--steps", type=int, default=NUM_STEPS)
    flags.add_argument(
        "--half-billion",
        action="store_true",
        help="only lr 1e-6 in bf16, on the shapes of Qwen2.5-0.5B; needs 12 GiB",
    )
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path_model = arguments.path_model or ("demo" if arguments.quick else "2m")
        if arguments.half_billion:
            path_model = half_billion(Path(name) / "0.5b")
        results = [
            result
            for lr, dtype in _CASES[: 1 if arguments.half_billion else None]
            for result in measured(path_model, lr=lr, dtype=dtype, num_steps=arguments.steps)
        ]
    report("weight_push", results, arguments.json, keeps=True)


def half_billion(directory: Path, **changes: object) -> str:
    """A configuration with 494 million parameters, and random weights."""
    directory.mkdir()
    shapes = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    config = {**load_model_config("demo"), **shapes, **changes}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


def measured(path_model: str, *, lr: float, dtype: torch.dtype, num_steps: int) -> list[Result]:
    """One run: the size of each push, and how many of the pushes reproduced the new weights exactly."""
    publisher = Publisher(dtype)
    served: State = {}
    exact = 0
    sizes: list[float] = []
    shares: list[float] = []
    seconds: list[float] = []
    arrivals: list[float] = []
    for parameters in trained(path_model, lr=lr, num_steps=num_steps):
        held = publisher.digest
        publisher.take(parameters)
        if not served:
            served = unpacked(publisher.blob_for(held)[1])[1]
            continue
        began = time.perf_counter()
        _, blob = publisher.blob_for(held)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        label, tensors = unpacked(blob)
        served = patched(served, tensors) if label.base else tensors
        exact += digest_of(served) == label.digest
        arrivals.append(time.perf_counter() - began)
        sizes.append(float(len(blob)))
        shares.append(publisher.whole_bytes / len(blob))
    case = f"{Path(path_model).name} {str(dtype).removeprefix('torch.')} lr {lr:g}"
    return [
        Result.of(case, "bytes per push", "B", sizes),
        Result.of(case, "all weights / push", "ratio", shares),
        Result.of(case, "packing", "s", seconds),
        Result.of(case, "unpacking and checking", "s", arrivals),
        Result.of(case, f"exact of {len(sizes)} pushes", "pushes", [float(exact)]),
    ]


def trained(path_model: str, *, lr: float, num_steps: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the weights before the first step and after each step."""
    device = torch.device("cpu")
    model = load_model(path_model, seed=0)
    inner = InnerLoop(
        model,
        adamw(model, weight_decay=0.0),
        precision=Precision.of("auto", device),
        device=device,
        micro_batch_size=_BATCH,
        max_grad_norm=1.0,
    )
    generator = torch.Generator().manual_seed(0)
    yield list(model.named_parameters())
    for _ in range(num_steps):
        samples = torch.randint(0, model.config.vocab_size, (_BATCH, _SEQ_LENGTH + 1), generator=generator)
        inner.step(samples, lr=lr)
        yield list(model.named_parameters())


if __name__ == "__main__":
    main()
