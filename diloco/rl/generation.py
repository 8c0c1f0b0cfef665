"""TRL's trainer with a fleet of servers in the place of TRL's own vLLM client, which needs vLLM and NCCL here."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trl.trainer.grpo_trainer as trl_grpo
from accelerate.utils import gather_object
from trl.generation.vllm_generation import VLLMGeneration

from diloco.errors import DilocoError, UserError
from diloco.outer.world import on_rank_zero
from diloco.rl.fleet import Fleet, Sampling, Written
from diloco.rl.http_json import RequestRefused, ServerLost, ask
from diloco.rl.own_server import OwnServer

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
RETURN_TIMEOUT_S = 600.0
_HEALTH_TIMEOUT_S = 10.0
_HEALTH_POLL_S = 0.5


class Servers:
    """A fleet that comes back: where a server is lost it is restarted, gets the current weights, and is asked again.

    Used by the rank that speaks to them. Without an own server, others' are given up after MAX_ATTEMPTS.
    """

    def __init__(self, fleet: Fleet, own: OwnServer | None, on_event: Callable[..., None]) -> None:
        self.fleet, self.own = fleet, own
        self._on_event = on_event

    def push(self) -> None:
        """The newest weights to all servers. Raises DilocoError where they cannot be had or would not take them."""
        self._until_done(self.fleet.push)

    def complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, *, seed: int
    ) -> list[Written]:
        """Completions by the newest weights; those of a failed attempt are thrown away, all of them."""

        def attempt() -> list[Written]:
            # After a restart it serves the weights it was started with; where nothing is to be sent, this is quick.
            self.fleet.push()
            return self.fleet.complete(prompts, count, sampling, seed=seed)

        return self._until_done(attempt)

    def close(self) -> None:
        self.fleet.close()
        if self.own:
            self.own.stop()

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
                    self._wait_for_others()
            else:
                if self.own:
                    self.own.has_served()
                return result
        raise AssertionError

    def _wait_for_others(self) -> None:
        """Somebody else's servers come back by somebody else's doing. Raises DilocoError after the deadline."""
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        for url in self.fleet.urls:
            while True:
                try:
                    ask(f"{url}/health", timeout_s=_HEALTH_TIMEOUT_S)
                    break
                except ServerLost as error:
                    if time.monotonic() > deadline:
                        raise DilocoError(
                            f"{url} has not come back within {RETURN_TIMEOUT_S:g} s: {error}"
                        ) from error
                time.sleep(_HEALTH_POLL_S)


class ServerGeneration(VLLMGeneration):
    """What GRPOTrainer takes for its VLLMGeneration. `servers` are there on the main process alone."""

    servers: Servers | None = None
    seed_of: Callable[[], int] = staticmethod(lambda: 0)

    def _init_vllm(self) -> None:
        self.mode = "server"
        self.vllm_client: Any = _NoClient()
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Called by TRL before the first rollout after each inner step, so after each outer step too."""

        def take() -> None:
            assert self.servers is not None
            self.servers.fleet.publisher.take(self._iter_named_params())

        if self.accelerator.is_main_process:
            take()
        else:
            # Gathering a sharded parameter takes all ranks.
            for _ in self._iter_named_params():
                pass
        on_rank_zero(lambda: self.servers.push() if self.servers else None)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[Any, ...]:
        """As TRL's: `prompts` hold each one `num_generations` times; this rank's part of the answer comes back."""
        everybodys = gather_object(prompts)
        answer = on_rank_zero(lambda: self._written(everybodys[::num_generations], num_generations))
        own = slice(self.accelerator.process_index * len(prompts), None)
        ids, logprobs = ([*part][own][: len(prompts)] for part in answer)
        return prompts, ids, logprobs, [[[token] for token in one] for one in ids]

    def _written(
        self, prompts: Sequence[list[int]], count: int
    ) -> tuple[list[list[int]], list[list[list[float | None]]]]:
        assert self.servers is not None
        sampling = Sampling(
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )
        written = self.servers.complete(prompts, count, sampling, seed=self.seed_of())
        ids = [one for prompt in written for one in prompt.token_ids]
        values = [one for prompt in written for one in prompt.logprobs]
        return ids, [[[_number(value)] for value in one] for one in values]


class _NoClient:
    """GRPOTrainer asks its client for this alone; our own servers are started so, and others' are asked before."""

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


@contextlib.contextmanager
def generating_by_servers() -> Iterator[None]:
    """A GRPOTrainer constructed in this block rolls out by ServerGeneration. TRL has no argument for that."""
    module: Any = trl_grpo
    before, module.VLLMGeneration = module.VLLMGeneration, ServerGeneration
    try:
        yield
    finally:
        module.VLLMGeneration = before


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
