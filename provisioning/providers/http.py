"""A JSON API over HTTP: one request at a time, not faster than it allows, and what each failure means for us."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

from provisioning.errors import NoCapacity, OutcomeUnknown, ProviderError, Unavailable, UserError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 16 << 20


class NotThere(ProviderError):
    """The provider says that there is nothing of this id."""


class Says(Enum):
    """What an answer that says no means."""

    BAD_KEY = auto()
    NO_MONEY = auto()
    """A balance, a quota or a permission: the user has to see to it."""
    NO_CAPACITY = auto()
    """Of an order: another offer may do."""
    NOT_THERE = auto()


_BY_STATUS = {401: Says.BAD_KEY, 402: Says.NO_MONEY, 403: Says.NO_MONEY, 404: Says.NOT_THERE}


@dataclass(frozen=True)
class Refusal:
    """An answer that says no."""

    message: str
    says: Says | None = None
    """What this API means by it; None: what its status means everywhere."""


@dataclass(kw_only=True)
class JsonApi:
    """One API. `refusal_of(status, body)` reads an error answer as this API words it."""

    name: str
    """As people know the provider."""
    url: str
    key: str
    key_env: str
    key_header: str = "Authorization"
    key_prefix: str = "Bearer "
    """The header that carries the key, and what stands before the key in it."""
    refusal_of: Callable[[int, Any], Refusal]
    interval_s: float = 0.0
    order_interval_s: float = 0.0

    def __post_init__(self) -> None:
        self._client: httpx.AsyncClient | None = None
        self._lock, self._next_at, self._next_order_at = asyncio.Lock(), 0.0, 0.0

    async def request(self, method: str, path: str, body: Any = None, *, is_order: bool = False) -> Any:
        """The answer, decoded. `is_order`: it may make a pod, so an answer that is lost is OutcomeUnknown.

        Raises ProviderError and its like, UserError, and NotThere for a 404 that is no order's.
        """
        async with self._lock:
            begin_at = max(self._next_at, self._next_order_at if is_order else 0.0)
            await asyncio.sleep(max(begin_at - time.monotonic(), 0.0))
            try:
                return await self._answered(method, path, body, is_order)
            finally:
                self._next_at = time.monotonic() + self.interval_s
                if is_order:
                    self._next_order_at = time.monotonic() + self.order_interval_s

    def understood(self, read: Callable[[Any], T], answer: Any, *, is_order: bool = False) -> T:
        """What `read` makes of an answer. Raises ProviderError where it is not what the API is said to answer."""
        try:
            return read(answer)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            kind = OutcomeUnknown if is_order else ProviderError
            raise kind(
                f"{self.name}'s answer is of no known form ({type(error).__name__}: {error})"
            ) from error

    async def close(self) -> None:
        """May be repeated."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _answered(self, method: str, path: str, body: Any, is_order: bool) -> Any:
        import httpx

        lost = OutcomeUnknown if is_order else Unavailable
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, headers, content = await self._exchanged(method, path, body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(f"{self.name} cannot be reached at {self.url}: no connection") from error
        except (httpx.HTTPError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            raise lost(f"{self.name} gave no whole answer to {method} {path}: {why}") from error
        try:
            answer = json.loads(content) if content else None
        except ValueError as error:
            if status < 400:
                raise lost(
                    f"{self.name} gave no answer that makes sense to {method} {path}: {error}"
                ) from error
            answer = None
        if status >= 400:
            raise self._trouble(status, answer, headers.get("Retry-After", ""), is_order)
        return answer

    async def _exchanged(self, method: str, path: str, body: Any) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        if self._client is None:
            headers = {self.key_header: f"{self.key_prefix}{self.key}", "User-Agent": "diloco"}
            self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S)
        content = b""
        async with self._client.stream(method, f"{self.url}{path}", json=body) as response:
            async for block in response.aiter_bytes():
                content += block
                if len(content) > _MAX_ANSWER_BYTES:
                    raise httpx.DecodingError("more than 16 MiB")
            return response.status_code, response.headers, content

    def _trouble(self, status: int, answer: Any, retry_after: str, is_order: bool) -> Exception:
        try:
            refusal = self.refusal_of(status, answer)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            refusal = Refusal("")
        said, says = f"{self.name}: {refusal.message or status}", refusal.says
        if says is None or (says is Says.NO_CAPACITY and not is_order):
            says = _BY_STATUS.get(status)
        if says is Says.BAD_KEY:
            return UserError(
                f"{self.name} does not accept the key in {self.key_env} ({refusal.message}). Nothing was rented."
            )
        if status == 429:
            return Unavailable(said, float(retry_after) if retry_after.isdigit() else None)
        if says is Says.NO_CAPACITY:
            return NoCapacity(said)
        if status >= 500:
            return (OutcomeUnknown if is_order else Unavailable)(f"{said} ({status})")
        if says is Says.NOT_THERE:
            return NoCapacity(said) if is_order else NotThere(said)
        if says is Says.NO_MONEY:
            return UserError(f"{said} Nothing was rented.")
        return ProviderError(f"{said} ({status})")
