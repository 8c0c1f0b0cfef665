"""The servers of a trainer: pushes weights to them, distributes prompts among them, and recovers lost ones.

The version is checked again after each rollout: another trainer that pushes to the same server would otherwise go
unnoticed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.errors import DilocoError, UserError
from diloco.options.model_files import load_model_config, save_pretrained_dir
from diloco.options.trainer import TrainConfig
from diloco.rl.own_server import OwnServer, vllm_command
from diloco.rl.push import Offers, Publisher, address_towards
from diloco.rl.server_client import RequestRefused, Sampling, ServerClient, ServerLost, Written
from diloco.rl.weights import own_copies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
RETURN_TIMEOUT_S = 600.0
_HEALTH_TIMEOUT_S = 10.0
_POLL_S = 0.2
_MAX_CONCURRENT = 64


class PushRefused(DilocoError):
    """A server has rejected the weights and still serves its previous ones."""


class Rollouts:
    """Used on the main rank only. A lost server is restarted if it is the trainer's own, else waited for."""

    def __init__(
        self,
        urls: Sequence[str],
        publisher: Publisher,
        own: OwnServer | None = None,
        on_event: Callable[..., None] = lambda **_: None,
    ) -> None:
        self.servers = [ServerClient(url) for url in urls]
        self.publisher, self.own = publisher, own
        self.last_push: dict[str, Any] = {}
        """A server's answer to the last push that sent weights, with our own figures added."""
        self._on_event = on_event
        self._offers = {host: Offers(host) for host in {address_towards(url) for url in urls}}

    def push(self) -> None:
        """Push the newest weights to all servers. Raises DilocoError if one is lost for good or rejects them."""
        self._until_done(self._push_to_all)

    def complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, *, seed: int
    ) -> list[Written]:
        """`count` completions of each prompt by the newest weights. Completions of a failed attempt are discarded."""

        def attempt() -> list[Written]:
            # A restarted server has its initial weights. If no weights have to be sent, this is quick.
            self._push_to_all()
            return self._complete(prompts, count, sampling, seed)

        return self._until_done(attempt)

    def close(self) -> None:
        for offers in self._offers.values():
            offers.close()
        if self.own:
            self.own.stop()

    def _push_to_all(self) -> None:
        for server in self.servers:
            publisher, version = server.served()
            if (publisher, version) != (self.publisher.name, self.publisher.version):
                self.last_push = self._push(server, publisher, version)

    def _push(self, server: ServerClient, publisher: str, version: int) -> dict[str, Any]:
        began = time.monotonic()
        label, blob = self.publisher.blob_for(publisher, version)
        offers = self._offers[address_towards(server.url)]
        url = offers.blob(blob)
        try:
            answer = server.pull(url)
        finally:
            offers.withdraw(url)
        if answer.get("is_lost"):
            raise ServerLost(f"{server.url} did not get the weights: {answer['error']}")
        if not answer["ok"]:
            raise PushRefused(f"{server.url} refused version {label.version}: {answer['error']}")
        return {
            **answer,
            "is_patch": label.base is not None,
            "whole_bytes": self.publisher.whole_bytes,
            "push_s": time.monotonic() - began,
        }

    def _complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seed: int
    ) -> list[Written]:
        def completed(number: int) -> Written:
            server = self.servers[number % len(self.servers)]
            return server.complete(prompts[number], count, sampling, seed=seed + number)

        with ThreadPoolExecutor(max_workers=min(_MAX_CONCURRENT, len(prompts))) as pool:
            written = list(pool.map(completed, range(len(prompts))))
        for server in self.servers:
            publisher, version = server.served()
            if (publisher, version) != (self.publisher.name, self.publisher.version):
                raise ServerLost(
                    f"{server.url} changed to other weights meanwhile; give each trainer servers of its own"
                )
        return written

    def _until_done(self, action: Callable[[], Any]) -> Any:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                result = action()
            except RequestRefused as error:
                raise UserError(
                    f"a rollout server refuses what it is asked for: {error}. A prompt and "
                    "--grpo.max-completion-length have to fit into the model's context together"
                ) from error
            except ServerLost as error:
                log.warning("a rollout server was lost: %s", error)
                self._on_event(event="server_lost", reason=str(error), attempt=attempt)
                if attempt == MAX_ATTEMPTS:
                    raise DilocoError(f"no rollout after {attempt} attempts: {error}") from error
                if self.own:
                    self.own.restart()
                    self._on_event(event="server_restarted", restarts=self.own.num_restarts)
                else:
                    self._wait_for_return()
            else:
                if self.own:
                    self.own.note_served()
                return result
        raise AssertionError

    def _wait_for_return(self) -> None:
        """Wait for servers that this trainer has not started. Raises DilocoError after RETURN_TIMEOUT_S."""
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        for server in self.servers:
            while True:
                try:
                    server.check_health(timeout_s=_HEALTH_TIMEOUT_S)
                    break
                except ServerLost as error:
                    if time.monotonic() > deadline:
                        raise DilocoError(
                            f"{server.url} has not come back within {RETURN_TIMEOUT_S:g} s: {error}"
                        ) from error
                time.sleep(_POLL_S)


_DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


def opened_servers(
    config: TrainConfig,
    run_dir: Path,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    gpu: str | None,
    environment: Mapping[str, str],
    on_event: Callable[..., None],
) -> Rollouts:
    """Start this peer's own server, or connect to those that the user named. Raises UserError if one does not serve.

    `weights` are written to disk for the start of an own server; the weights to serve are pushed before each rollout.
    """
    grpo = config.grpo
    if grpo.rollout_url:
        return Rollouts(grpo.rollout_url, Publisher(_dtype_of(grpo.rollout_url)), on_event=on_event)
    served = run_dir / "served"
    save_pretrained_dir(
        served, own_copies(weights.items(), dtype), load_model_config(config.path_model), tokenizer
    )
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
    return Rollouts([server.url], Publisher(dtype), server, on_event)


def _dtype_of(urls: tuple[str, ...]) -> torch.dtype:
    try:
        found = {url: ServerClient(url).dtype() for url in urls}
    except ServerLost as error:
        raise UserError(
            f"--rollout-url: {error}. A server needs VLLM_SERVER_DEV_MODE=1 in its environment, and "
            "--worker-extension-cls diloco.rl.server_extension.WeightsExtension with this package on its PYTHONPATH"
        ) from error
    if len(set(found.values())) > 1 or next(iter(found.values())) not in _DTYPES:
        raise UserError(f"--rollout-url: the servers' types are {found}; give all of them the same --dtype")
    return _DTYPES[next(iter(found.values()))]
