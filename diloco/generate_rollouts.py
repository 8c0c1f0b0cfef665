"""Generates and judges rollouts for the daemon of a rollout peer (peers/daemon/generator.py), which starts it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from diloco.data.tokenizer import load_tokenizer
from diloco.launch.worker import exit_code
from diloco.options.trainer import TrainConfig, parse_train_config
from diloco.process_end import exit_process
from diloco.rl.adapters import merged, with_adapters
from diloco.rl.generator import Generator, of_model, of_server, prompts_at_once
from diloco.rl.rollouts import opened_server
from diloco.rl.sampling import BadPolicy
from diloco.rl.task_choice import open_task
from diloco.rl.weights import BadBlob
from diloco.train.devices import visible_gpus
from diloco.train.model import load_model
from diloco.train.sharding import Precision, full_state
from diloco.train.signals import CleanUps, LeaveOnSignal, cleaned_up_on_failure
from peers.daemon.link import LINK_ENV, WorkerLink
from peers.errors import LinkLost


def main() -> NoReturn:
    signals = LeaveOnSignal()
    exit_process(exit_code(lambda: run(sys.argv[1:], signals.clean_ups)))


def run(argv: Sequence[str], clean_ups: CleanUps) -> None:
    """Serve the daemon until it closes the link. Raises UserError."""
    config, _ = parse_train_config(argv, "grpo")
    with cleaned_up_on_failure(clean_ups), contextlib.ExitStack() as stack:
        generator = stack.enter_context(opened(config, clean_ups))
        link = stack.enter_context(
            contextlib.closing(WorkerLink.connect(os.environ[LINK_ENV], silence_s=None))
        )
        with contextlib.suppress(LinkLost):
            serve(link, generator, at_once=prompts_at_once(config))


@contextlib.contextmanager
def opened(config: TrainConfig, clean_ups: CleanUps) -> Iterator[Generator]:
    """The generator: the model in this process, or a vLLM server, which then has the GPU. Raises UserError."""
    gpus = [] if config.device == "cpu" else visible_gpus(os.environ)
    uses_server = config.grpo.rollout == "vllm"
    device = torch.device("cuda" if gpus and not uses_server else "cpu")
    dtype = Precision.of(config.precision, torch.device("cuda" if gpus else "cpu")).compute
    task, tokenizer = open_task(config.grpo, seed=config.seed), load_tokenizer(config.path_model)
    model = load_model(
        config.path_model,
        seed=config.seed,
        device=device,
        attn_implementation=config.attn_implementation,
        keeps_dtype=uses_server,
    )
    model = with_adapters(model, config.grpo.lora_rank, seed=config.seed)
    if not uses_server:
        yield of_model(config, task, tokenizer, model, dtype)
        return
    assert config.run_dir is not None
    server = opened_server(
        config,
        Path(config.run_dir),
        merged(model, full_state(model).items()),
        tokenizer,
        dtype=dtype,
        gpu=config.grpo.vllm_gpu or (gpus[-1] if gpus else None),
        environment=os.environ,
        on_event=lambda **_: None,
    )
    clean_ups.append(server.close)
    with contextlib.closing(server):
        generator = of_server(config, task, tokenizer, model, server)
        # Most machines with a GPU for 8B have main memory for few copies.
        del model
        yield generator


def serve(link: WorkerLink, generator: Generator, *, at_once: int) -> None:
    """Answer the daemon's requests. Raises LinkLost at the end."""
    link.send(
        "generates",
        num_examples=generator.task.num_examples,
        at_once=at_once,
        most_bytes=generator.most_bytes,
    )
    while True:
        request = link.receive("load", "generate")
        if request["kind"] == "generate":
            # Policies come from learners: this process must survive any of them, and say that one is at fault.
            try:
                groups = generator.generate(request["examples"])
            except BadPolicy as error:
                link.send("failed", reason=str(error))
            else:
                link.send("generated", groups=groups)
        elif reason := _unloaded(generator, request["paths"], request["digest"]):
            link.send("failed", reason=reason)
        else:
            link.send("loaded")


def _unloaded(generator: Generator, paths: Sequence[str], digest: str) -> str:
    """Load the policy of this digest. Returns why it cannot be used; empty if it can."""
    try:
        generator.load(Path(path).read_bytes() for path in paths)
        if generator.digest == digest:
            return ""
        reason = "they do not produce the announced weights"
    except (BadBlob, OSError) as error:
        reason = str(error)
    generator.forget()
    return f"the policy's files cannot be used: {reason}"


if __name__ == "__main__":
    main()
