"""The inference servers a trainer uses: new weights to all of them, prompts dealt out among them.

Several trainers may share a server. Each takes a lease of it from its push to the end of its rollouts, so that no
completion is written by somebody else's weights; the version is asked again afterwards.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from diloco.errors import DilocoError
from diloco.grpo.blob_server import BlobServer, address_towards
from diloco.grpo.http_json import ServerLost, ask
from diloco.grpo.publisher import Publisher

log = logging.getLogger(__name__)

LEASE_S = 600.0
_CONTROL_TIMEOUT_S = 60.0
_PUSH_TIMEOUT_S = 600.0
_COMPLETION_TIMEOUT_S = 600.0
_BUSY_POLL_S = 0.2
_AT_ONCE = 64


class PushRefused(DilocoError):
    """A server would not take the weights; it still serves those it had."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Written:
    """Completions of one prompt: token ids, and the log-probability of each."""

    token_ids: list[list[int]]
    logprobs: list[list[float | None]]


@dataclass
class Fleet:
    """Servers by their base URL. Raises ServerLost wherever one of them does not answer as it should."""

    urls: Sequence[str]
    publisher: Publisher
    pushed: list[dict[str, Any]] = field(default_factory=list)
    """What each server said of the last push that sent something."""

    def __post_init__(self) -> None:
        self._blobs = {host: BlobServer(host) for host in {address_towards(url) for url in self.urls}}
        self._models: dict[str, str] = {}

    def close(self) -> None:
        for url in self.urls:
            try:
                _rpc(url, "diloco_lease", owner=self.publisher.name, seconds="0")
            except ServerLost:
                # Whoever is gone has no lease to give back.
                continue
        for blobs in self._blobs.values():
            blobs.close()

    def push(self) -> None:
        """The publisher's newest version to every server that does not have it. Raises PushRefused."""
        answers = [self._push(url) for url in self.urls]
        if any(answer["pushed"] for answer in answers):
            self.pushed = answers

    def complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, *, seed: int
    ) -> list[Written]:
        """`count` completions of each prompt by the newest version, and by no other. Raises ServerLost."""
        places = [(self.urls[number % len(self.urls)], number) for number in range(len(prompts))]
        with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(prompts))) as pool:
            written = list(
                pool.map(
                    lambda place: self._complete(
                        place[0], prompts[place[1]], count, sampling, seed + place[1]
                    ),
                    places,
                )
            )
        for url in self.urls:
            state = _rpc(url, "diloco_state")
            if (state["publisher"], state["version"]) != (self.publisher.name, self.publisher.version):
                raise ServerLost(
                    f"{url} changed to version {state['version']} of {state['publisher']} meanwhile"
                )
            _rpc(url, "diloco_lease", owner=self.publisher.name, seconds="0")
        return written

    def _push(self, url: str) -> dict[str, Any]:
        self._lease(url)
        state = _rpc(url, "diloco_state")
        if (state["publisher"], state["version"]) == (self.publisher.name, self.publisher.version):
            return {"ok": True, "version": state["version"], "bytes": 0, "pushed": False}
        began = time.monotonic()
        push = self.publisher.push_for(state["publisher"], state["version"])
        order = {
            "publisher": self.publisher.name,
            "version": push.version,
            "parts": self._blobs[address_towards(url)].publish(push.blobs),
            "timeout_s": _PUSH_TIMEOUT_S,
        }
        ask(f"{url}/pause?mode=keep", post=True, timeout_s=_CONTROL_TIMEOUT_S)
        try:
            answer = _rpc(url, "diloco_pull", timeout_s=_PUSH_TIMEOUT_S, order=json.dumps(order))
            # What it has computed of the beginnings of prompts was by the old weights.
            ask(f"{url}/reset_prefix_cache", post=True, timeout_s=_CONTROL_TIMEOUT_S)
        finally:
            ask(f"{url}/resume", post=True, timeout_s=_CONTROL_TIMEOUT_S)
        if answer.get("fatal"):
            raise ServerLost(f"{url} failed while it loaded weights: {answer['error']}")
        if not answer["ok"]:
            raise PushRefused(f"{url} refused version {push.version}: {answer['error']}")
        return {
            **answer,
            "pushed": True,
            "is_patch": push.base is not None,
            "whole_bytes": push.whole_bytes,
            "push_s": time.monotonic() - began,
        }

    def _lease(self, url: str) -> None:
        """Wait until the server is free, and take it."""
        deadline = time.monotonic() + LEASE_S
        while True:
            answer = _rpc(url, "diloco_lease", owner=self.publisher.name, seconds=str(LEASE_S))
            if answer["ok"]:
                return
            if time.monotonic() > deadline:
                raise ServerLost(f"{url} has been {answer['error']} for {LEASE_S:g} s")
            time.sleep(_BUSY_POLL_S)

    def _complete(
        self, url: str, prompt: Sequence[int], count: int, sampling: Sampling, seed: int
    ) -> Written:
        body = {
            "model": self._model_of(url),
            "prompt": list(prompt),
            "n": count,
            "seed": seed % 2**31,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = ask(f"{url}/v1/completions", body, timeout_s=_COMPLETION_TIMEOUT_S)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != count or not all(
            choice["finish_reason"] in ("stop", "length") for choice in choices
        ):
            reasons = [choice.get("finish_reason") for choice in choices]
            raise ServerLost(f"{url} gave {len(choices)} of {count} completions, which ended by {reasons}")
        return Written(
            [list(choice["token_ids"]) for choice in choices],
            [list(choice["logprobs"]["token_logprobs"]) for choice in choices],
        )

    def _model_of(self, url: str) -> str:
        if url not in self._models:
            self._models[url] = str(ask(f"{url}/v1/models", timeout_s=_CONTROL_TIMEOUT_S)["data"][0]["id"])
        return self._models[url]


def served_dtype(url: str) -> str:
    """The type of a server's weights, as torch prints it. Raises ServerLost where it has not our extension."""
    return str(_rpc(url, "diloco_state")["dtype"])


def _rpc(url: str, method: str, *, timeout_s: float = _CONTROL_TIMEOUT_S, **arguments: str) -> dict[str, Any]:
    """Call a method of our extension on all workers of a server; one that refuses speaks for all."""
    answer = ask(
        f"{url}/collective_rpc",
        {"method": method, "kwargs": arguments, "timeout": timeout_s},
        timeout_s=timeout_s,
    )
    results = answer.get("results") if isinstance(answer, dict) else None
    if not results or not all(isinstance(result, dict) for result in results):
        raise ServerLost(f"{url} has no worker extension of diloco, or it failed: {answer}")
    refused = [result for result in results if not result["ok"]]
    chosen: dict[str, Any] = (refused or results)[0]
    return chosen
