"""Lium (https://lium.io), by its client package `lium.io`. Its blocking calls run in threads, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from provisioning.errors import (
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    TooManyRequests,
    Unavailable,
    UserError,
)
from provisioning.pods.pod import PORTS, Listing, Offer, Pod, Row, id_in
from provisioning.providers.backoff import Pace
from provisioning.providers.cloud import Cloud

if TYPE_CHECKING:
    from lium import Lium

T = TypeVar("T")

_SSH_PORT = 22
_MAX_HOURS = 720
_GONE = {"DELETED", "TERMINATED"}
_FAILED = {"FAILED", "STOPPED", "DELETED", "TERMINATED", "ERROR", "BROKEN"}


class LiumProvider(Cloud):
    name = "lium"
    key_env = "LIUM_API_KEY"
    keys_at = "https://lium.io"
    url = ""
    """Empty: the client library has a default."""
    repeatable = True
    settle_s = 30.0
    doubt_s = 600.0
    keeps_time = True
    takes = ("image", "volume_id")

    def __init__(self, environment: Mapping[str, str], ssh_key: Path) -> None:
        super().__init__(environment, ssh_key)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from lium import Config, Lium
        except ModuleNotFoundError as error:
            raise UserError(
                "--provider lium needs the package lium.io: pip install 'diloco[pods]'."
            ) from error
        more = {"base_url": self._url} if self._url else {}
        config = Config(api_key=self._key, ssh_key_path=ssh_key, **more)
        self._client: Lium = Lium(config)
        # One request at a time: the client is not documented to be thread-safe.
        self._pace = Pace()

    async def check(self) -> None:
        self.check_tools()
        balance = await self._call(self._client.balance)
        if balance <= 0:
            raise UserError(f"The balance at Lium is {balance:.2f} $; top it up.")

    async def offers(self) -> list[Offer]:
        return await self._call(
            lambda: [offer for executor in self._client.ls() for offer in _offers_of(executor)]
        )

    async def create(self, row: Row) -> str:
        more: dict[str, Any] = {}
        if row.ends_at is not None:
            # A limit that holds even if this process dies now; the exact end is set afterwards, and read back.
            hours = math.ceil((row.ends_at - time.time()) / 3600)
            more["termination_hours"] = min(max(hours, 1), _MAX_HOURS)
        if row.spec.image:
            more["image"] = row.spec.image
        created = await self._call(
            lambda: self._client.up(
                executor_id=row.offer.details["executor_id"],
                name=row.label,
                volume_id=row.spec.volume_id,
                # One of them is for SSH.
                ports=len(PORTS) + 1,
                ssh_keys=[self.public_key()],
                # Without a number, Lium rents all free GPUs.
                gpu_count=row.offer.gpu_count,
                idempotency_key=row.label,
                **more,
            ),
            is_order=True,
        )
        return id_in(created["id"] if isinstance(created, dict) else created.id)

    async def pods(self) -> Listing:
        return Listing(pods=await self._call(lambda: [_pod(info) for info in self._client.ps()]))

    async def find(self, pod_id: str) -> Pod | None:
        try:
            return await self._call(lambda: _found(self._client.pod(pod_id)))
        except _Gone as gone:
            if not gone.is_of_api and any(pod.id == pod_id for pod in (await self.pods()).pods):
                raise Unavailable(f"{gone}, and it is listed") from gone
            return None

    async def destroy(self, pod_id: str) -> None:
        # `rm` takes a pod, but uses only its id.
        with contextlib.suppress(_Gone):
            await self._call(lambda: self._client.rm(_info({"id": pod_id})))

    async def set_end(self, pod_id: str, ends_at: float) -> None:
        moment = datetime.fromtimestamp(ends_at, UTC).isoformat().replace("+00:00", "Z")
        await self._call(lambda: self._client.schedule_termination(pod_id, termination_time=moment))

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def _call(self, request: Callable[[], T], *, is_order: bool = False) -> T:
        async with self._pace.turn():
            return await asyncio.to_thread(_translated, request, is_order)


class _Gone(ProviderError):
    """The pod does not exist; if not `is_of_api`, the answer may also come from a gateway."""

    def __init__(self, message: str, *, is_of_api: bool) -> None:
        super().__init__(message)
        self.is_of_api = is_of_api


def _translated(request: Callable[[], T], is_order: bool) -> T:
    """The result of `request`. Raises our own errors in place of the client's. The client does not check the form of
    answers; `repeated` (backoff.py) translates the errors that this causes.
    """
    import requests
    from lium.sdk import exceptions as lium_errors

    lost = OutcomeUnknown if is_order else Unavailable
    try:
        return request()
    except lium_errors.LiumRentOutcomeUnknownError as error:
        raise OutcomeUnknown(str(error)) from error
    except (lium_errors.LiumAuthError, lium_errors.LiumPermissionError) as error:
        raise _refused(error) from error
    except lium_errors.LiumRateLimitError as error:
        # The request was not carried out, so even an order may be repeated.
        raise TooManyRequests(f"Lium: {error}", error.retry_after) from error
    except (requests.ConnectionError, requests.Timeout) as error:
        # The error's own text contains internals of an HTTP library.
        where = str(error.request.url) if error.request is not None else "its API"
        why = "no answer in time" if isinstance(error, requests.Timeout) else "no connection"
        raise lost(f"Lium: {where} cannot be reached: {why}") from error
    except (lium_errors.LiumServerError, requests.RequestException) as error:
        raise lost(f"Lium: {error}") from error
    except lium_errors.LiumNotFoundError as error:
        if is_order:
            raise NoCapacity(f"Lium: {error}") from error
        raise _Gone(f"Lium: {error}", is_of_api=bool(error.code)) from error
    except (lium_errors.LiumError, ValueError) as error:
        codes = ("insufficient_balance", "API_KEY_BUDGET_EXCEEDED")
        if getattr(error, "code", None) in codes or str(error).startswith("API error 402"):
            raise _refused(error) from error
        if is_order and str(error).startswith("API error 408"):
            raise OutcomeUnknown(f"Lium: {error}") from error
        # The node was rented meanwhile, or does not rent out this number of its GPUs.
        raise (NoCapacity if is_order else ProviderError)(f"Lium: {error}") from error


def _refused(error: Exception) -> UserError:
    return UserError(
        f"Lium: {error}; check the key in {LiumProvider.key_env}, its budget, and the account's balance"
    )


def _offers_of(executor: Any) -> list[Offer]:
    """One offer for each number of GPUs that can be rented on this node."""
    free = executor.available_gpu_count if executor.available_gpu_count is not None else executor.gpu_count
    if free < 1:
        return []
    splits = executor.whole_host_only is False
    counts = {free, *(number for number in (1, 2, 4, 8) if number < free)} if splits else {free}
    if not splits and free < executor.gpu_count:
        return []
    location = executor.location or {}
    return [
        Offer(
            id=f"{executor.id}:{count}",
            provider="lium",
            gpu_type=executor.machine_name or executor.gpu_type,
            gpu_count=count,
            price_per_hour=float(executor.price_per_gpu) * count,
            country=location.get("country_code"),
            city=location.get("city"),
            upload_mbps=executor.effective_upload_speed_mbps,
            download_mbps=executor.effective_download_speed_mbps,
            spot=executor.tier == "spot",
            details={"executor_id": executor.id},
        )
        for count in sorted(counts)
    ]


def _found(answer: dict[str, Any]) -> Pod | None:
    """The pod in an answer about one pod; None if it was deleted."""
    if str(answer.get("status")).upper() in _GONE:
        return None
    price = answer.get("price")
    return replace(_pod(_info(answer)), price_per_hour=None if price is None else float(price))


def _info(answer: Mapping[str, Any]) -> Any:
    """The answer as the client's PodInfo."""
    from lium.sdk.models import PodInfo

    count = answer.get("gpu_count")
    known = {
        "id": answer["id"],
        "name": answer.get("pod_name"),
        "status": answer.get("status", "unknown"),
        "ssh_cmd": answer.get("ssh_connect_cmd"),
        "ports": answer.get("ports_mapping") or {},
        "removal_scheduled_at": answer.get("removal_scheduled_at"),
        "gpu_count": None if count is None else int(count),
    }
    return PodInfo(**dict.fromkeys(item.name for item in fields(PodInfo)) | known)


def _pod(info: Any) -> Pod:
    status = (info.status or "").upper()
    ports = sorted((int(inside), int(outside)) for inside, outside in (info.ports or {}).items())
    return Pod(
        id=id_in(info.id),
        label=info.name or "",
        is_ready=status == "RUNNING" and bool(info.ssh_cmd),
        failure=f"Lium says that it is {status}" if status in _FAILED else "",
        gpu_count=info.gpu_count,
        price_per_hour=info.executor.price_per_hour if info.executor is not None else None,
        ends_at=_moment(info.removal_scheduled_at),
        host=info.host or "",
        ssh_port=info.ssh_port,
        user=info.username or "root",
        ports=tuple(pair for pair in ports if pair[0] != _SSH_PORT),
    )


def _moment(text: str | None) -> float | None:
    """A time of the API as Unix time; without a zone it is UTC."""
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
