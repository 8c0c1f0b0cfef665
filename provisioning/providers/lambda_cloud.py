"""Lambda Cloud, by its HTTP API, version 1. It has no rental end, so the watcher enforces it; no idempotency keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provisioning.errors import NoCapacity, ProvisioningError, UserError
from provisioning.pods.pod import MANY, PORTS, Listing, Offer, Pod, Row, id_in
from provisioning.providers.http import HttpCloud, NotFound

_GONE = {"terminated"}
_LEAVING = {"terminating", "preempted"}
_KINDS: Mapping[str, type[ProvisioningError]] = {
    "api-key": UserError,
    "insufficient-capacity": NoCapacity,
    "file-system-in-wrong-region": NoCapacity,
    "does-not-exist": NotFound,
    "quota": UserError,
    "payment": UserError,
    "credit": UserError,
}
"""By a substring of the error code."""


class LambdaProvider(HttpCloud):
    name = "lambda"
    takes = ("volume_id",)
    title = "Lambda"
    url = "https://cloud.lambda.ai/api/v1"
    key_env = "LAMBDALABS_API_KEY"
    keys_at = "https://cloud.lambda.ai/api-keys"
    pod_path = "/instances/{}"
    interval_s = 1.0
    order_interval_s = 12.0
    user = "ubuntu"

    @staticmethod
    def refusal(status: int, body: Any) -> tuple[str, type[ProvisioningError] | None]:
        error = body["error"]
        code = str(error.get("code", ""))
        message = " ".join(str(error[name]) for name in ("message", "suggestion") if error.get(name))
        return message or code, next((kind for part, kind in _KINDS.items() if part in code), None)

    def pod_in(self, found: Any) -> Pod | None:
        if found.get("status") in _GONE:
            return None
        status, kind = str(found.get("status", "")), found.get("instance_type") or {}
        price = kind.get("price_cents_per_hour")
        return Pod(
            id=id_in(found["id"]),
            label=str(found.get("name") or ""),
            is_ready=status == "active" and bool(found.get("ip")),
            failure=f"Lambda says that it is {status}" if status in {"unhealthy", *_LEAVING} else "",
            gpu_count=(kind.get("specs") or {}).get("gpus"),
            price_per_hour=None if price is None else price / 100,
            host=str(found.get("ip") or ""),
            user=self.user,
            # The user has to open them in the account's firewall, which by default allows SSH only.
            ports=tuple((port, port) for port in PORTS),
        )

    async def offers(self) -> list[Offer]:
        return _offers(await self.request("GET", "/instance-types"))

    async def create(self, row: Row) -> str:
        body: dict[str, Any] = {
            "region_name": row.offer.details["region"],
            "instance_type_name": row.offer.details["type"],
            "ssh_key_names": [await self._key_name()],
            "name": row.label,
        }
        if row.spec.volume_id:
            body["file_system_names"] = [row.spec.volume_id]
        answer = await self.request("POST", "/instance-operations/launch", body, is_order=True)
        return id_in(answer["instance_ids"][0])

    async def pods(self) -> Listing:
        data = await self.request("GET", "/instances")
        return Listing(pods=[pod for one in data if (pod := self.pod_in(one)) is not None])

    async def delete(self, pod_id: str) -> None:
        await self.request("POST", "/instance-operations/terminate", {"instance_ids": [pod_id]})

    async def request(self, method: str, path: str, body: Any = None, *, is_order: bool = False) -> Any:
        """The `data` of the answer."""
        return (await super().request(method, path, body, is_order=is_order))["data"]

    async def _key_name(self) -> str:
        """The name of our public key at Lambda; it is uploaded if it is missing."""
        material = self.public_key().split()[:2]
        for key in await self.request("GET", "/ssh-keys"):
            if str(key.get("public_key", "")).split()[:2] == material:
                return str(key["name"])
        name = f"diloco-{material[1][-8:].replace('/', '_').replace('+', '_')}"
        await self.request("POST", "/ssh-keys", {"name": name, "public_key": " ".join(material)})
        return name


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
            num_available=MANY,
            details={"type": name, "region": region["name"]},
        )
        for name, found in data.items()
        for region in found.get("regions_with_capacity_available", ())
    ]


def _country(region: str) -> str | None:
    """us-west-1: US. None for other regions, whose names begin with a continent (europe-, me-, asia-)."""
    return "US" if region.startswith("us-") else None
