"""Base class of clouds with a JSON API: sends one request at a time, and interprets failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from provisioning.errors import (
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    ProvisioningError,
    TooManyRequests,
    Unavailable,
    UserError,
)
from provisioning.pods.pod import Pod
from provisioning.providers.backoff import Pace
from provisioning.providers.cloud import Cloud

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 16 << 20


class NotFound(ProviderError):
    """The provider says that nothing has this id."""


_BY_STATUS: Mapping[int, type[ProvisioningError]] = {
    401: UserError,
    402: UserError,
    403: UserError,
    404: NotFound,
}


class HttpCloud(Cloud):
    """A cloud with a JSON API. By default without idempotency keys and without a rental end."""

    repeatable = False
    settle_s = 60.0
    doubt_s = 600.0

    title: str
    """Its name in messages."""
    pod_path: str
    """Path of one pod in the API, with {} for its id."""
    interval_s = 0.0
    """Minimum time between two requests, in seconds."""
    order_interval_s = 0.0
    """Minimum time between two orders, in seconds."""

    def __init__(self, environment: Mapping[str, str], ssh_key: Path) -> None:
        super().__init__(environment, ssh_key)
        self._client: httpx.AsyncClient | None = None
        self._pace, self._next_order_at = Pace(self.interval_s), 0.0

    @staticmethod
    @abstractmethod
    def refusal(status: int, body: Any) -> tuple[str, type[ProvisioningError] | None]:
        """The message in an error answer, and its meaning in this API; None: the HTTP status decides.

        If the body does not have the API's own form, return an empty message or raise any exception: a 404 without a
        message is taken for a gateway's, after which a pod may still exist. Meanings: UserError (key, balance, quota),
        NoCapacity (for orders), NotFound.
        """

    @abstractmethod
    def pod_in(self, found: Any) -> Pod | None:
        """The pod in an answer; None if it has been deleted."""

    async def request(self, method: str, path: str, body: Any = None, *, is_order: bool = False) -> Any:
        """The decoded answer. `is_order`: the request may make a pod, so a lost answer raises OutcomeUnknown.

        Raises ProviderError or a subclass, UserError, and NotFound for a 404, except for orders. If an answer of an
        unknown form causes an exception in a subclass, `repeated` (backoff.py) translates it.
        """
        async with self._pace.turn(self._next_order_at if is_order else 0.0):
            try:
                return await self._answered(method, path, body, is_order)
            finally:
                if is_order:
                    self._next_order_at = time.monotonic() + self.order_interval_s

    async def check(self) -> None:
        self.check_tools()
        await self.pods()

    async def find(self, pod_id: str) -> Pod | None:
        try:
            return self.pod_in(await self.request("GET", self.pod_path.format(quote(pod_id, safe=""))))
        except NotFound:
            return None

    async def destroy(self, pod_id: str) -> None:
        with contextlib.suppress(NotFound):
            await self.delete(pod_id)

    async def delete(self, pod_id: str) -> None:
        """Request the deletion. Raises NotFound if the pod does not exist."""
        await self.request("DELETE", self.pod_path.format(quote(pod_id, safe="")))

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
            raise Unavailable(f"{self.title} cannot be reached at {self._url}: no connection") from error
        except (httpx.HTTPError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            raise lost(f"{self.title} gave no complete answer to {method} {path}: {why}") from error
        try:
            answer = json.loads(content) if content else None
        except (ValueError, RecursionError) as error:
            if status < 400:
                raise lost(f"{self.title} gave an invalid answer to {method} {path}: {error}") from error
            answer = None
        if status >= 400:
            raise self._trouble(status, answer, headers.get("Retry-After", ""), is_order)
        return answer

    async def _exchanged(self, method: str, path: str, body: Any) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        if self._client is None:
            headers = {"Authorization": f"Bearer {self._key}", "User-Agent": "diloco"}
            self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S)
        content = b""
        async with self._client.stream(method, f"{self._url}{path}", json=body) as response:
            async for block in response.aiter_bytes():
                content += block
                if len(content) > _MAX_ANSWER_BYTES:
                    raise httpx.DecodingError("more than 16 MiB")
            return response.status_code, response.headers, content

    def _trouble(self, status: int, answer: Any, retry_after: str, is_order: bool) -> ProvisioningError:
        try:
            message, kind = self.refusal(status, answer)
        except Exception:  # noqa: BLE001 - an unknown form: the status alone decides
            message, kind = "", None
        said = f"{self.title}: {message or status}"
        if kind is None or (kind is NoCapacity and not is_order):
            kind = _BY_STATUS.get(status, ProviderError)
        if status == 429:
            return TooManyRequests(said, float(retry_after) if retry_after.isdigit() else None)
        if kind is not NoCapacity and (status >= 500 or status == 408):
            return (OutcomeUnknown if is_order else Unavailable)(f"{said} ({status})")
        if kind is UserError:
            return UserError(
                f"{said.rstrip('.')}; check the key in {self.key_env}, and the account's balance and quotas"
            )
        if kind is NotFound and is_order:
            return NoCapacity(said)
        if kind is NotFound and not message:
            # The answer may come from a gateway, while the pod exists.
            return Unavailable(f"{said}; the answer may not come from its API")
        return kind(f"{said} ({status})")
