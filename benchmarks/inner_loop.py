"""Tokens per second of a peer between rounds and of a bare torch loop of the same model, interleaved in one process.

The peer does everything that train_fsdp does in a step: it reads data, trains, records metrics, checks what is due. The
bare loop has tokens in memory and does forward, backward, clipping and AdamW. A third variant is a peer with Muon,
whose step orthogonalizes every matrix.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from benchmarks.record import Result, parser, report
from diloco.cli.machine_recipes import RECIPES
from diloco.launch.worker import Assignment
from diloco.options.flags import HvConfig, TrainConfig
from diloco.outer.world import World
from diloco.train.model import load_model
from diloco.train.sharding import Precision, compiles, decoder_layers
from diloco.train_fsdp import Trainer

# Dense bf16 FLOP/s by the manufacturers' data sheets.
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
_LR = 1e-4
_SMALL_TOKENS = 2048
"""Tokens of a step with small batches."""
_SIZES = ("seq_length", "total_batch_size")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--path-model",
        default=None,
        help="a preset, in its recipe's batches; default: 2m in small ones, 150m on GPU",
    )
    flags.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    arguments = flags.parse_args()
    device = World().device(arguments.device)
    config = configuration(arguments.path_model, device, quick=arguments.quick)
    repetitions, steps = (5, 3) if arguments.quick else (9, 8 if device.type == "cpu" else 30)
    if device.type == "cpu":
        # Scale the number of steps, so that as many tokens are trained as with small batches.
        steps = max(1, steps * _SMALL_TOKENS // (config.total_batch_size * config.seq_length))
    with tempfile.TemporaryDirectory() as directory:
        results = measured(config, device, Path(directory), repetitions=repetitions, steps=steps)
    report("inner_loop", results, arguments.json, keeps=True)


def configuration(path_model: str | None, device: torch.device, *, quick: bool) -> TrainConfig:
    """The configuration that all variants train."""
    on_gpu = device.type == "cuda"
    config = TrainConfig(
        path_model=path_model or ("150m" if on_gpu else "2m"),
        seq_length=1024 if on_gpu else 256,
        total_batch_size=64 if on_gpu else _SMALL_TOKENS // 256,
        per_device_train_batch_size=32 if on_gpu else 4,
        lr=_LR,
        warmup_steps=0,
        total_steps=1_000_000,
        eval_tokens=256,
        hv=HvConfig(local_steps=100_000),
    )
    recipe = next((recipe.values for recipe in RECIPES if recipe.values["path_model"] == path_model), {})
    config = replace(config, **{name: recipe[name] for name in _SIZES if name in recipe})
    if quick and on_gpu:
        config = replace(config, total_batch_size=16, per_device_train_batch_size=16)
    return config


def measured(
    config: TrainConfig, device: torch.device, directory: Path, *, repetitions: int, steps: int
) -> list[Result]:
    """Run the variants alternately, so that other load on the machine affects all of them."""
    with_muon = replace(config, optimizer="muon")
    sides: dict[str, Callable[[int], float]] = {
        "peer": peer_steps(config, device, directory),
        "bare": bare_steps(config, device),
        "muon": peer_steps(with_muon, device, directory / "muon"),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(3)
    for repetition in range(repetitions):
        for name in sorted(sides, reverse=bool(repetition % 2)):
            tokens = steps * config.total_batch_size * config.seq_length
            rates[name].append(tokens / sides[name](steps))
    ratios, times = (
        [a / b for a, b in zip(rates["peer"], rates[other], strict=True)] for other in ("bare", "muon")
    )
    case = f"{config.path_model} {device.type} {Precision.of(config.precision, device).compute}"
    results = [Result.of(f"{case} {name}", "throughput", "tokens/s", rates[name]) for name in sides]
    results.append(Result.of(case, "peer / bare", "ratio", ratios))
    results.append(Result.of(case, "time of a step, muon / adamw", "ratio", times))
    if device.type == "cuda":
        results += utilisation(config, case, rates)
    return results


def peer_steps(config: TrainConfig, device: torch.device, directory: Path) -> Callable[[int], float]:
    """A function that runs steps of the trainer and returns their duration in seconds."""
    trainer = Trainer(Assignment(config=config, run_dir=directory), World(), device, [])

    samples_of_steps = iter(trainer.samples_left())

    def run(steps: int) -> float:
        started_at = time.perf_counter()
        for _ in range(steps):
            trainer.step(torch.from_numpy(next(samples_of_steps)))
        return time.perf_counter() - started_at

    return run


def bare_steps(config: TrainConfig, device: torch.device) -> Callable[[int], float]:
    """The same for a bare loop with equal model, batch, precision and compilation, but none of our code."""
    model = load_model(config.path_model, seed=config.seed, device=device)
    if compiles(config, device):
        for layer in decoder_layers(model):
            layer.compile()
    dtype = Precision.of(config.precision, device).compute
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    size = config.per_device_train_batch_size
    parts = config.total_batch_size // size

    def run(steps: int) -> float:
        shape = (steps, parts, size, config.seq_length + 1)
        tokens = torch.randint(0, 256, shape, device=device)
        started_at = time.perf_counter()
        for step in range(steps):
            total = torch.zeros((), device=device)
            for batch in tokens[step]:
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
                loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / parts
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            total.item()
        return time.perf_counter() - started_at

    return run


def utilisation(config: TrainConfig, case: str, rates: dict[str, list[float]]) -> list[Result]:
    """Model FLOPs utilisation relative to dense bf16, with 6 FLOPs per weight and token plus attention."""
    name = torch.cuda.get_device_name()
    peak = next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
    if peak is None:
        return []
    model = load_model(config.path_model, seed=0, device="meta")
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    attention = 12 * model.config.num_hidden_layers * model.config.hidden_size * config.seq_length
    return [
        Result.of(
            f"{case} {side}", "MFU", "fraction", [(6 * weights + attention) * r / peak for r in rates[side]]
        )
        for side in rates
    ]


if __name__ == "__main__":
    main()
