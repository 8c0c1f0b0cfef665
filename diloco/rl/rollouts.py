"""The vLLM server of a trainer: pushes weights to it, has it complete prompts, and restarts it when it is lost."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.errors import DilocoError, UserError
from diloco.options.model_files import load_model_config, save_pretrained_dir
from diloco.options.trainer import TrainConfig
from diloco.rl.own_server import OwnServer, vllm_command
from diloco.rl.push import Publisher
from diloco.rl.sampling import BadPolicy
from diloco.rl.server_client import RequestRefused, Sampling, ServerClient, ServerLost, Written
from diloco.rl.weights import own_copies
from diloco.train.run_dir import last_words
from peers.daemon.restarts import restart_delay_s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
_MAX_SEQUENCES = 1024
"""Completions that the server is asked for at once. A request is for all those of one prompt."""
_MAX_REQUESTS = 512
"""Each takes a thread and an open file, of which many systems allow a process 1024."""
_LOOK_S = 30.0
"""While completions are awaited, the server is asked so often whether it lives."""


class Rollouts:
    """Used on the main rank only. Owns the server, which runs already."""

    def __init__(
        self,
        server: OwnServer,
        directory: Path,
        publisher: Publisher,
        on_event: Callable[..., None] = lambda **_: None,
    ) -> None:
        """`directory`: where weights lie while the server reads them."""
        self._server, self.publisher = server, publisher
        self.last_push: dict[str, Any] = {}
        """The server's answer to the last push that sent weights, with our own figures added."""
        self._client, self._blob = ServerClient(server.socket), directory / "pushed"
        self._on_event = on_event

    def push(self) -> None:
        """Push the newest weights. Raises DilocoError if the server is lost for good, BadPolicy if it works without
        these weights only."""
        self._until_done(self._push_newest)

    def complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, *, seed: int
    ) -> list[Written]:
        """`count` completions of each prompt by the newest weights. Completions of a failed attempt are discarded.

        Raises DilocoError and BadPolicy as `push` does, and UserError if a prompt is too long.
        """

        def attempt() -> list[Written]:
            # A restarted server has its initial weights. If no weights have to be sent, this is quick.
            self._push_newest()
            return self._complete(prompts, count, sampling, seed)

        return self._until_done(attempt)

    def close(self) -> None:
        self._server.stop()

    def _push_newest(self) -> None:
        held = self._client.served()
        if held == self.publisher.digest:
            return
        began = time.monotonic()
        label, blob = self.publisher.blob_for(held)
        try:
            self._write(blob)
            answer = self._client.pull(self._blob, hashlib.sha256(blob).hexdigest())
        finally:
            self._blob.unlink(missing_ok=True)
        if answer.get("is_lost"):
            raise ServerLost(f"the weights were not loaded: {answer['error']}")
        if not answer["ok"]:
            raise BadPolicy(f"the vLLM server refused the weights: {answer['error']}")
        self.last_push = {
            **answer,
            "is_patch": bool(label.base),
            "whole_bytes": self.publisher.whole_bytes,
            "push_s": time.monotonic() - began,
            "server_restarts": self._server.num_restarts,
        }

    def _write(self, blob: bytes) -> None:
        try:
            self._blob.write_bytes(blob)
        except OSError as error:
            raise DilocoError(f"the weights for the vLLM server cannot be written: {error}") from error

    def _complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[Written]:
        context = self._client.model.context
        each = [sampling.of_prompt(number) for number in range(len(prompts))]
        for prompt, own in zip(prompts, each, strict=True):
            if len(prompt) + own.most_tokens > context:
                raise UserError(
                    f"a prompt of {len(prompt)} tokens and {own.most_tokens} more do not fit into the server's "
                    f"context of {context}; lower --grpo.max-completion-length"
                )
        # vLLM counts on from a request's seed, one for each completion; completions with the same seed may be copies of
        # each other. So every prompt has a range of seeds of its own, and so has every `seed`.
        first = random.Random(seed).getrandbits(31)

        def completed(number: int) -> Written:
            return self._client.complete(prompts[number], count, each[number], seed=first + number * count)

        num_requests = min(max(_MAX_SEQUENCES // count, 1), _MAX_REQUESTS, len(prompts))
        pool = ThreadPoolExecutor(max_workers=num_requests)
        asked = [pool.submit(completed, number) for number in range(len(prompts))]
        pool.shutdown(wait=False)
        while wait(asked, _LOOK_S).not_done:
            try:
                self._client.served()
            except ServerLost:
                # The requests have no deadline, and end with the server.
                self._server.end()
                raise
        written = [one.result() for one in asked]
        # What is written for training must come from these weights, whoever else has used the server meanwhile.
        if self._client.served() != self.publisher.digest:
            raise ServerLost("another trainer has changed the weights meanwhile")
        return written

    def _until_done(self, action: Callable[[], Any]) -> Any:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            at_fault: type[DilocoError] = DilocoError
            try:
                if attempt > 1:
                    self._server.restart(delay_s=restart_delay_s(attempt - 1))
                    self._on_event(event="server_restarted", restarts=self._server.num_restarts)
                    # With its initial weights the server has just completed a prompt.
                    at_fault = BadPolicy
                return action()
            except RequestRefused as error:
                # NaNs stay in the server's caches, where they would spoil the completions by the next weights.
                self._server.end()
                raise BadPolicy(f"the vLLM server does not work with these weights: {error}") from error
            except ServerLost as error:
                log.warning("the vLLM server was lost: %s", error)
                self._on_event(event="server_lost", reason=str(error), attempt=attempt)
                if attempt == MAX_ATTEMPTS:
                    path = self._server.command.log_path
                    raise at_fault(
                        f"the vLLM server failed {attempt} times in a row: {error}; the end of {path}:\n"
                        f"{last_words(path)}"
                    ) from error
        raise AssertionError


def opened_server(
    config: TrainConfig,
    run_dir: Path,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    gpu: str | None,
    environment: Mapping[str, str],
    on_event: Callable[..., None],
) -> Rollouts:
    """Start this peer's server. Raises UserError if it does not serve.

    `weights` are written to disk for its start; the weights to serve are pushed before each rollout.
    """
    grpo, served = config.grpo, run_dir.resolve() / "served"
    state = own_copies(weights, dtype, may_change=False)
    save_pretrained_dir(served, state, load_model_config(config.path_model), tokenizer)
    del state
    server = OwnServer(
        vllm_command(
            python=grpo.vllm_python,
            model=served,
            dtype=str(dtype).removeprefix("torch."),
            gpu=gpu,
            more=grpo.vllm_args,
            log_path=run_dir / "logs" / "vllm.log",
            timeout_s=grpo.vllm_timeout,
            environment=environment,
        )
    )
    server.start()
    return Rollouts(server, served, Publisher(dtype), on_event)
