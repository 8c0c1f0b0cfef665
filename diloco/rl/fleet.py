"""The inference servers a trainer uses: new weights to all of them, prompts dealt out among them.

Several trainers may share servers. Each takes a lease of all of its own, in the same order as the others, from its
push to the end of its rollouts, so that no completion is written by somebody else's weights; the version is asked
again afterwards. Leases are short and renewed, so that nobody waits long for a trainer that died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from diloco.errors import DilocoError
from diloco.rl.blob_server import BlobServer, address_towards
from diloco.rl.http_json import SHOWN, ServerLost, ask, understood
from diloco.rl.publisher import Publisher

log = logging.getLogger(__name__)

LEASE_S = 60.0
_RENEWAL_S = 15.0
_LEASE_TIMEOUT_S = 900.0
_SAID_AFTER_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
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
        # Two trainers that took the same servers in different orders would wait for each other.
        self.urls = sorted(self.urls)
        self._blobs = {host: BlobServer(host) for host in {address_towards(url) for url in self.urls}}
        self._models: dict[str, str] = {}
        self._leased: set[str] = set()

    def close(self) -> None:
        for url in self.urls:
            # Whoever is gone has no lease to give back.
            with contextlib.suppress(ServerLost):
                self._give_back(url, timeout_s=_GOODBYE_TIMEOUT_S)
        for blobs in self._blobs.values():
            blobs.close()

    def push(self) -> None:
        """The publisher's newest version to every server that does not have it. Raises PushRefused."""
        with self._kept_leases():
            answers = [self._push(url) for url in self.urls]
        if any(answer["pushed"] for answer in answers):
            self.pushed = answers

    def complete(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, *, seed: int
    ) -> list[Written]:
        """`count` completions of each prompt by the newest version, and by no other. Raises ServerLost."""
        places = [(self.urls[number % len(self.urls)], number) for number in range(len(prompts))]
        with self._kept_leases(), ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(prompts))) as pool:
            written = list(
                pool.map(
                    lambda place: self._complete(
                        place[0], prompts[place[1]], count, sampling, seed + place[1]
                    ),
                    places,
                )
            )
        for url in self.urls:
            publisher, version = _served(url)
            if (publisher, version) != (self.publisher.name, self.publisher.version):
                raise ServerLost(f"{url} changed to version {version} of {publisher} meanwhile")
            self._give_back(url)
        return written

    def _push(self, url: str) -> dict[str, Any]:
        self._lease(url)
        publisher, version = _served(url)
        if (publisher, version) == (self.publisher.name, self.publisher.version):
            return {"ok": True, "version": version, "bytes": 0, "pushed": False}
        began = time.monotonic()
        push = self.publisher.push_for(publisher, version)
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
        if answer.get("unfetched"):
            raise ServerLost(f"{url} could not fetch the weights: {answer['error']}")
        if not answer.get("ok"):
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
        began, said = time.monotonic(), False
        while True:
            answer = self._ask_for_lease(url)
            if answer.get("ok"):
                self._leased.add(url)
                return
            waited_s = time.monotonic() - began
            if waited_s > _LEASE_TIMEOUT_S:
                raise ServerLost(f"{url} has been {answer['error']} for {_LEASE_TIMEOUT_S:g} s")
            if waited_s > _SAID_AFTER_S and not said:
                log.warning("%s is %s; waiting until it is free", url, answer["error"])
                said = True
            time.sleep(_BUSY_POLL_S)

    def _give_back(self, url: str, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> None:
        self._leased.discard(url)
        _rpc(url, "diloco_lease", timeout_s=timeout_s, owner=self.publisher.name, seconds="0")

    def _ask_for_lease(self, url: str) -> dict[str, Any]:
        return _rpc(url, "diloco_lease", owner=self.publisher.name, seconds=str(LEASE_S))

    @contextlib.contextmanager
    def _kept_leases(self) -> Iterator[None]:
        """Renew the leases that are held, as long as the block takes."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(_RENEWAL_S):
                for url in self.urls:
                    # Whoever asks it for completions finds out by himself that it is lost.
                    with contextlib.suppress(ServerLost):
                        if url in self._leased:
                            self._ask_for_lease(url)

        thread = threading.Thread(target=renew, name="leases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

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
        with understood(url, answer):
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            reasons = [choice["finish_reason"] for choice in choices]
            ids = [list(choice["token_ids"]) for choice in choices]
            logprobs = [list(choice["logprobs"]["token_logprobs"]) for choice in choices]
        if len(choices) != count or not set(reasons) <= {"stop", "length"}:
            raise ServerLost(f"{url} gave {len(choices)} of {count} completions, which ended by {reasons}")
        if list(map(len, ids)) != list(map(len, logprobs)):
            raise ServerLost(f"{url} gave other numbers of tokens than of log-probabilities")
        return Written(ids, logprobs)

    def _model_of(self, url: str) -> str:
        if url not in self._models:
            answer = ask(f"{url}/v1/models", timeout_s=_CONTROL_TIMEOUT_S)
            with understood(url, answer):
                self._models[url] = str(answer["data"][0]["id"])
        return self._models[url]


def served_dtype(url: str) -> str:
    """The type of a server's weights, as torch prints it. Raises ServerLost where it has not our extension."""
    state = _rpc(url, "diloco_state")
    with understood(url, state):
        return str(state["dtype"])


def _served(url: str) -> tuple[str, int]:
    """Whose weights a server has, and which version of them."""
    state = _rpc(url, "diloco_state")
    with understood(url, state):
        return str(state["publisher"]), int(state["version"])


def _rpc(url: str, method: str, *, timeout_s: float = _CONTROL_TIMEOUT_S, **arguments: str) -> dict[str, Any]:
    """Call a method of our extension on all workers of a server; one that refuses speaks for all."""
    answer = ask(
        f"{url}/collective_rpc",
        {"method": method, "kwargs": arguments, "timeout": timeout_s},
        timeout_s=timeout_s,
    )
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not results or not all(_is_verdict(result) for result in results):
        raise ServerLost(f"{url} has no worker extension of diloco, or it failed: {str(answer)[:SHOWN]}")
    refused = [result for result in results if not result.get("ok")]
    chosen: dict[str, Any] = (refused or results)[0]
    return chosen


def _is_verdict(result: Any) -> bool:
    return isinstance(result, dict) and (result.get("ok") is True or isinstance(result.get("error"), str))
