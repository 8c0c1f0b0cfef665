"""Client of the vLLM server: HTTP on a Unix socket. Every request has a deadline, except those for completions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

MAX_QUOTED = 500
"""Error messages quote at most this many characters of an answer."""
_REFUSALS = (400, 422)
_CONTROL_TIMEOUT_S = 60.0
_TRANSFER_TIMEOUT_S = 600.0
_STEP_TIMEOUT_S = 600.0
"""Of one step of a generation: vLLM answers between steps, and on a CPU one with long prompts takes minutes."""


class ServerLost(Exception):
    """A server did not answer, or answered with an error. Nothing from the request may be used."""


class NotListening(ServerLost):
    """Nobody accepts connections there: the server is still starting, or is gone."""


class RequestRefused(ServerLost):
    """The server works but rejects the request; repeating it is useless. vLLM rejects what leads to NaN."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters."""

    max_tokens: int | tuple[int, ...]
    """Of each completion; a tuple has one number for each prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def most_tokens(self) -> int:
        return self.max_tokens if isinstance(self.max_tokens, int) else max(self.max_tokens)

    def of_prompt(self, number: int) -> Sampling:
        """The same for this prompt alone."""
        return self if isinstance(self.max_tokens, int) else replace(self, max_tokens=self.max_tokens[number])


@dataclass(frozen=True)
class Written:
    """Completions of one prompt: their token ids and log-probabilities, in nats."""

    token_ids: list[list[int]]
    logprobs: list[list[float | None]]


@dataclass(frozen=True)
class ServedModel:
    """The model of a server."""

    name: str
    context: int
    """The most tokens of a prompt and its completion together."""


class ServerClient:
    """A vLLM server with our worker extension. Every method raises ServerLost if the answer is not as expected."""

    def __init__(self, socket: Path) -> None:
        # No keep-alive: the server might close an idle connection just as a request is sent on it.
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(uds=str(socket), limits=limits)
        # Of a URL's host and port, a Unix socket needs none.
        self._http = httpx.Client(transport=transport, trust_env=False, base_url="http://vllm")

    @cached_property
    def model(self) -> ServedModel:
        answer = self._request("/v1/models")
        with _expected_format(answer):
            card = answer["data"][0]
            return ServedModel(str(card["id"]), int(card["max_model_len"]))

    def check_health(self, *, timeout_s: float) -> None:
        self._request("/health", timeout_s=timeout_s)

    def served(self) -> str:
        """The digest of the weights that were pushed last; empty if none were. Answered during a generation as well."""
        state = self.call("diloco_state", timeout_s=_STEP_TIMEOUT_S)
        with _expected_format(state):
            return str(state["digest"])

    def pull(self, blob: Path, sha256: str) -> dict[str, Any]:
        """Make the server load the weights of this file. Returns the server's answer, whose `ok` may be false."""
        self._request("/pause?mode=keep", {})
        try:
            answer = self.call("diloco_pull", timeout_s=_TRANSFER_TIMEOUT_S, path=str(blob), sha256=sha256)
            # The prefix cache holds activations of the old weights.
            self._request("/reset_prefix_cache", {})
        finally:
            self._request("/resume", {})
        return answer

    def complete(self, prompt: Sequence[int], count: int, sampling: Sampling, *, seed: int) -> Written:
        """Has no deadline, since nobody knows how long completions take. The caller must watch the server by `served`,
        and end it if it does not answer."""
        body = {
            "model": self.model.name,
            "prompt": list(prompt),
            "n": count,
            "seed": seed % 2**31,
            **asdict(sampling),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = self._request("/v1/completions", body, timeout_s=None)
        with _expected_format(answer):
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            reasons = [choice["finish_reason"] for choice in choices]
            ids = [list(choice["token_ids"]) for choice in choices]
            logprobs = [list(choice["logprobs"]["token_logprobs"]) for choice in choices]
        if len(choices) != count or not set(reasons) <= {"stop", "length"}:
            raise ServerLost(f"it gave {len(choices)} of {count} completions, which ended by {reasons}")
        if list(map(len, ids)) != list(map(len, logprobs)):
            raise ServerLost("it returned different numbers of tokens and log-probabilities")
        return Written(ids, logprobs)

    def try_out(self, *, timeout_s: float) -> None:
        """Make the server generate one token."""
        body = {"model": self.model.name, "prompt": [1, 2, 3], "max_tokens": 1}
        answer = self._request("/v1/completions", body, timeout_s=timeout_s)
        with _expected_format(answer):
            if not answer["choices"]:
                raise ServerLost(f"it completed nothing: {answer}")

    def call(self, method: str, *, timeout_s: float = _CONTROL_TIMEOUT_S, **arguments: str) -> dict[str, Any]:
        """Call a method of our extension on all workers. Returns the answer of one that refused, if any did."""
        body = {"method": method, "kwargs": arguments, "timeout": timeout_s}
        answer = self._request("/collective_rpc", body, timeout_s=timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(map(_is_verdict, results)):
            raise ServerLost(
                f"diloco's worker extension is missing from it, or failed: {str(answer)[:MAX_QUOTED]}"
            )
        refused = [result for result in results if not result["ok"]]
        chosen: dict[str, Any] = (refused or results)[0]
        return chosen

    def _request(self, path: str, body: Any = None, *, timeout_s: float | None = _CONTROL_TIMEOUT_S) -> Any:
        """The JSON answer to a GET, or to a POST if there is a body; None if it is empty."""
        try:
            method = "GET" if body is None else "POST"
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
            if not answer.is_success:
                kind = RequestRefused if answer.status_code in _REFUSALS else ServerLost
                raise kind(f"{path} answered {answer.status_code}: {answer.text[:MAX_QUOTED]}")
            return answer.json() if answer.content.strip() else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            lost = NotListening if isinstance(error, httpx.ConnectError) else ServerLost
            raise lost(f"{path}: {error or type(error).__name__}") from error


@contextlib.contextmanager
def _expected_format(answer: Any) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerLost(f"it gave an answer of an unknown format: {str(answer)[:MAX_QUOTED]}") from error


def _is_verdict(result: Any) -> bool:
    return isinstance(result, dict) and (result.get("ok") is True or isinstance(result.get("error"), str))
