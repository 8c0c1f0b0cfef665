"""Makes TRL's trainer use our servers instead of its own vLLM client, which would need vLLM and NCCL here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trl.trainer.grpo_trainer as trl_grpo
from accelerate.utils import gather_object
from trl.generation.vllm_generation import VLLMGeneration

from diloco.outer.world import on_rank_zero
from diloco.rl.peer_rollouts import PeerRollouts
from diloco.rl.rollouts import Rollouts
from diloco.rl.server_client import Sampling


class ServerGeneration(VLLMGeneration):
    """Replaces GRPOTrainer's VLLMGeneration. `servers` is set on the main process only.

    With --rollout peers it is a PeerRollouts, and only `sync_weights` is used: completions come with the prompts.
    """

    servers: Rollouts | PeerRollouts | None = None
    seed_of: Callable[[], int] = staticmethod(lambda: 0)

    def _init_vllm(self) -> None:
        self.mode = "server"
        self.vllm_client: Any = _NoClient()
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Push the weights. TRL calls it before the first rollout after each inner step, so after outer steps too."""

        def take() -> None:
            assert self.servers is not None
            self.servers.publisher.take(self._iter_named_params())

        if self.accelerator.is_main_process:
            take()
        else:
            # Gathering a sharded parameter is a collective.
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
        """As TRL's: `prompts` has each prompt `num_generations` times. Returns this rank's completions."""
        all_prompts = gather_object(prompts)
        answer = on_rank_zero(lambda: self._complete(all_prompts[::num_generations], num_generations))
        own = slice(self.accelerator.process_index * len(prompts), None)
        ids, logprobs = ([*part][own][: len(prompts)] for part in answer)
        return prompts, ids, logprobs, [[[token] for token in one] for one in ids]

    def _complete(
        self, prompts: Sequence[list[int]], count: int
    ) -> tuple[list[list[int]], list[list[list[float | None]]]]:
        assert isinstance(self.servers, Rollouts)
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
    """Answers the one question that GRPOTrainer asks its client. All our servers run with this setting."""

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


@contextlib.contextmanager
def generating_by_servers() -> Iterator[None]:
    """A GRPOTrainer constructed in this block uses ServerGeneration. TRL has no argument for that."""
    module: Any = trl_grpo
    before, module.VLLMGeneration = module.VLLMGeneration, ServerGeneration
    try:
        yield
    finally:
        module.VLLMGeneration = before


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
