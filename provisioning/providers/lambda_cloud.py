"""Lambda Cloud by its HTTP API, version 1. It keeps no time, so our watcher does; it knows no idempotency keys."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from provisioning.errors import NoCapacity, OutcomeUnknown, ProviderError, Unavailable, UserError
from provisioning.pods import Listing, Offer, Order, Pod
from provisioning.providers.rented import RentedPods, api_key

T = TypeVar("T")

KEY_ENV, URL_ENV = "LAMBDALABS_API_KEY", "LAMBDALABS_BASE_URL"
BASE_URL = "https://cloud.lambda.ai/api/v1"
_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 16 << 20
_INTERVAL_S, _LAUNCH_INTERVAL_S = 1.0, 12.0
_PORTS = ((30001, 30001), (30002, 30002), (30003, 30003))
"""To be opened in the account's firewall; by default it lets in SSH alone."""
_GONE = {"terminated"}
_LEAVING = {"terminating", "preempted"}


class LambdaProvider(RentedPods):
    name = "lambda"
    repeatable = False
    settle_s = 60.0
    doubt_s = 600.0
    keeps_time = False

    def __init__(
        self,
        environment: Mapping[str, str],
        ssh_key: Path,
        *,
        interval_s: float | None = None,
        launch_interval_s: float | None = None,
        user: str = "ubuntu",
    ) -> None:
        super().__init__(ssh_key)
        self._key = api_key(environment, KEY_ENV, "https://cloud.lambda.ai/api-keys")
        self._url = environment.get(URL_ENV, BASE_URL).rstrip("/")
        self._interval_s = _INTERVAL_S if interval_s is None else interval_s
        self._launch_interval_s = _LAUNCH_INTERVAL_S if launch_interval_s is None else launch_interval_s
        self._user, self._key_lock = user, asyncio.Lock()
        self._lock, self._next_at, self._next_launch_at = asyncio.Lock(), 0.0, 0.0

    async def check(self) -> None:
        self.check_tools()
        await self._request("GET", "/instances")

    async def offers(self) -> list[Offer]:
        return _understood(_offers, await self._request("GET", "/instance-types"))

    async def create(self, order: Order) -> str:
        async with self._key_lock:
            key_name = await self._key_name(order.public_key)
        body: dict[str, Any] = {
            "region_name": order.offer.details["region"],
            "instance_type_name": order.offer.details["type"],
            "ssh_key_names": [key_name],
            "name": order.label,
        }
        if order.spec.volume_id:
            body["file_system_names"] = [order.spec.volume_id]
        answer = await self._request("POST", "/instance-operations/launch", body, is_order=True)
        return _understood(lambda data: str(data["instance_ids"][0]), answer, is_order=True)

    async def pods(self) -> Listing:
        answer = await self._request("GET", "/instances")
        found = _understood(lambda data: [_pod(one, self._user) for one in data if not _is_gone(one)], answer)
        return Listing(pods=found)

    async def find(self, pod_id: str) -> Pod | None:
        try:
            answer = await self._request("GET", f"/instances/{quote(pod_id, safe='')}")
        except _NotThere:
            return None
        return _understood(lambda data: None if _is_gone(data) else _pod(data, self._user), answer)

    async def destroy(self, pod_id: str) -> None:
        try:
            await self._request("POST", "/instance-operations/terminate", {"instance_ids": [pod_id]})
        except _NotThere:
            return

    async def set_end(self, pod_id: str, ends_at: float) -> None:
        return None

    async def close(self) -> None:
        return None

    async def add_key(self, name: str) -> str:
        """Have a key pair made there; the private half, which Lambda gives this once. Raises UserError."""
        if name in [there for there, _ in await self._keys()]:
            raise UserError(
                f"Lambda has a key named {name} already, and gives its private half only once; take another name."
            )
        answer = await self._request("POST", "/ssh-keys", {"name": name})
        return _understood(lambda data: str(data["private_key"]), answer)

    async def _key_name(self, line: str) -> str:
        """The name of our key there, which is put there when it is missing."""
        material = line.split()[:2]
        for there, public in await self._keys():
            if public.split()[:2] == material:
                return there
        name = f"diloco-{material[1][-8:].replace('/', '_').replace('+', '_')}"
        await self._request("POST", "/ssh-keys", {"name": name, "public_key": " ".join(material)})
        return name

    async def _keys(self) -> list[tuple[str, str]]:
        """Names and public halves."""
        answer = await self._request("GET", "/ssh-keys")
        return _understood(
            lambda data: [(str(key["name"]), str(key.get("public_key", ""))) for key in data], answer
        )

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, is_order: bool = False
    ) -> Any:
        """What is in `data`. One request at a time, not faster than the API allows. Raises as errors.py says."""
        async with self._lock:
            begin_at = max(self._next_at, self._next_launch_at if is_order else 0.0)
            await asyncio.sleep(max(begin_at - time.monotonic(), 0.0))
            try:
                return await asyncio.to_thread(self._sent, method, path, body, is_order)
            finally:
                self._next_at = time.monotonic() + self._interval_s
                if is_order:
                    self._next_launch_at = time.monotonic() + self._launch_interval_s

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None, is_order: bool) -> Any:
        request = urllib.request.Request(
            f"{self._url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._key}",
                "Content-Type": "application/json",
                "Accept": "application/json",
                "User-Agent": "diloco",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return _data(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            raise _trouble(error, is_order) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            kind = OutcomeUnknown if is_order else Unavailable
            raise kind(f"Lambda gave no answer that makes sense to {method} {path}: {error}") from error


class _NotThere(ProviderError):
    """There is no such instance any more."""


def _trouble(error: urllib.error.HTTPError, is_order: bool) -> Exception:
    try:
        found = json.loads(error.read(_MAX_ANSWER_BYTES))["error"]
        code, message = str(found.get("code", "")), str(found.get("message", ""))
        if found.get("suggestion"):
            message = f"{message} {found['suggestion']}"
    except (ValueError, KeyError, TypeError, AttributeError, OSError, http.client.HTTPException):
        code, message = "", str(error)
    said = f"Lambda: {message or code or error}"
    if error.code == 401 or (error.code == 403 and "api-key" in code):
        return UserError(f"Lambda does not accept the key in {KEY_ENV} ({message}). Nothing was rented.")
    if "insufficient-capacity" in code or "file-system-in-wrong-region" in code:
        return NoCapacity(said)
    if error.code == 429:
        delay = error.headers.get("Retry-After", "")
        return Unavailable(said, float(delay) if delay.isdigit() else None)
    if error.code >= 500:
        return (OutcomeUnknown if is_order else Unavailable)(f"{said} ({error.code})")
    if error.code == 404 or "object-does-not-exist" in code:
        return NoCapacity(said) if is_order else _NotThere(said)
    if error.code in (402, 403) or "quota" in code or "payment" in code:
        return UserError(f"{said} Nothing was rented.")
    return ProviderError(f"{said} ({error.code})")


def _data(content: bytes) -> Any:
    """Raises ValueError."""
    answer = json.loads(content)
    if not isinstance(answer, dict) or "data" not in answer:
        raise ValueError("there is no data in it")
    return answer["data"]


def _understood(read: Callable[[Any], T], data: Any, *, is_order: bool = False) -> T:
    """What `read` makes of an answer. Raises ProviderError where it is not what the API is said to answer."""
    try:
        return read(data)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        kind = OutcomeUnknown if is_order else ProviderError
        raise kind(f"Lambda's answer is of no known form ({type(error).__name__}: {error})") from error


def _offers(data: Mapping[str, Any]) -> list[Offer]:
    return [
        Offer(
            id=f"{name}@{region['name']}",
            provider=LambdaProvider.name,
            gpu_type=str(found["instance_type"].get("gpu_description") or name),
            gpu_count=int(found["instance_type"]["specs"].get("gpus", 0)),
            price_per_hour=found["instance_type"]["price_cents_per_hour"] / 100,
            country=_country(region["name"]),
            city=region.get("description"),
            # It does not say how many there are.
            num_available=100,
            details={"type": name, "region": region["name"]},
        )
        for name, found in data.items()
        for region in found.get("regions_with_capacity_available", ())
    ]


def _is_gone(found: Mapping[str, Any]) -> bool:
    return found.get("status") in _GONE


def _pod(found: Mapping[str, Any], user: str) -> Pod:
    status, kind = str(found.get("status", "")), found.get("instance_type") or {}
    price = kind.get("price_cents_per_hour")
    return Pod(
        id=str(found["id"]),
        label=str(found.get("name") or ""),
        is_ready=status == "active" and bool(found.get("ip")),
        failure=f"Lambda says that it is {status}" if status in {"unhealthy", *_LEAVING} else "",
        gpu_count=(kind.get("specs") or {}).get("gpus"),
        price_per_hour=None if price is None else price / 100,
        host=str(found.get("ip") or ""),
        ssh_port=int(found.get("ssh_port") or 22),
        user=user,
        ports=_PORTS,
    )


def _country(region: str) -> str | None:
    """The two letters that its regions' names begin with: us-west-1, europe-central-1."""
    head = region.partition("-")[0]
    return head.upper() if len(head) == 2 else None
