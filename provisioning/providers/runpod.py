"""RunPod, by its REST API, version 2. It has no rental end, so the watcher enforces it; no idempotency keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from provisioning.errors import NoCapacity, ProvisioningError
from provisioning.pods.pod import MANY, PORTS, Listing, Offer, Pod, Row, id_in
from provisioning.providers.http import HttpCloud

IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
_DISK_GB = 100
_COUNTS = (1, 2, 4, 8)
_POOLS = ("SECURE", "COMMUNITY")
_SSH_PORT = 22
_GONE = {"TERMINATED"}
# A stopped pod still costs money for its disk.
_FAILED = {"EXITED", "ERROR"}


class RunPodProvider(HttpCloud):
    name = "runpod"
    takes = ("image", "volume_id")
    title = "RunPod"
    url = "https://api.runpod.io/v2"
    key_env = "RUNPOD_API_KEY"
    keys_at = "https://console.runpod.io/user/settings"
    pod_path = "/pods/{}"

    @staticmethod
    def refusal(status: int, body: Any) -> tuple[str, type[ProvisioningError] | None]:
        more = "; ".join(str(one) for one in body.get("errors") or ())
        message = " ".join(filter(None, (str(body.get("detail") or body.get("title") or ""), more)))
        # By its documentation, 400 also means no capacity, and 403 a pool that this account may not use.
        return message, NoCapacity if status in (400, 403) else None

    def pod_in(self, found: Any) -> Pod | None:
        if found.get("status") in _GONE:
            return None
        status, direct = str(found.get("status", "")), (found.get("ssh") or {}).get("direct") or {}
        opened = {
            int(port["private"]): int(port["public"])
            for port in (found.get("runtime") or {}).get("ports") or ()
            if port.get("type") == "tcp" and port.get("public")
        }
        return Pod(
            id=id_in(found["id"]),
            label=str(found.get("name") or ""),
            is_ready=status == "RUNNING" and bool(direct) and all(port in opened for port in PORTS),
            failure=f"RunPod says that it is {status}" if status in _FAILED else "",
            gpu_count=(found.get("gpu") or {}).get("count"),
            price_per_hour=None if found.get("cost") is None else float(found["cost"]),
            host=str(direct.get("host") or ""),
            ssh_port=int(direct.get("port") or _SSH_PORT),
            user=str(direct.get("username") or "root"),
            ports=tuple((port, opened[port]) for port in PORTS if port in opened),
        )

    async def offers(self) -> list[Offer]:
        """Asks for each number of GPUs: the price per GPU is the same, but the availability differs."""
        found: list[Offer] = []
        for pool in _POOLS:
            for count in _COUNTS:
                query = urlencode(
                    {"include": "AVAILABILITY", "product": "POD", "cloud": pool, "count": count}
                )
                answer = await self.request("GET", f"/catalog/gpus?{query}")
                found += [offer for kind in answer["gpus"] for offer in _offers(kind, pool, count)]
        return found

    async def create(self, row: Row) -> str:
        details = row.offer.details
        body: dict[str, Any] = {
            "name": row.label,
            "image": row.spec.image or IMAGE,
            "cloud": details["cloud"],
            "gpu": {"id": details["gpu"], "count": row.offer.gpu_count},
            "disk": _DISK_GB,
            "ports": [f"{port}/tcp" for port in (_SSH_PORT, *PORTS)],
            "env": {"PUBLIC_KEY": self.public_key()},
            "startSsh": True,
        }
        if details["data_center"]:
            body["dataCenterIds"] = [details["data_center"]]
        if row.spec.volume_id:
            body["mounts"] = {"network": [{"volumeId": row.spec.volume_id, "path": "/workspace"}]}
        return id_in((await self.request("POST", "/pods", body, is_order=True))["id"])

    async def pods(self) -> Listing:
        answer = await self.request("GET", "/pods")
        return Listing(pods=[pod for one in answer["pods"] if (pod := self.pod_in(one)) is not None])


def _offers(kind: Mapping[str, Any], pool: str, count: int) -> list[Offer]:
    """One offer per data centre with `count` GPUs of this kind; without data centres, one for the whole pool."""
    which = pool.lower()
    if not kind[which] or count > kind["maxCount"][which] or kind.get("availability", "NONE") == "NONE":
        return []
    listed = kind.get("dataCenters") or [{"id": "", "name": None, "availability": kind["availability"]}]
    return [
        Offer(
            id=f"{kind['id']}:{which}:{count}:{place['id']}",
            provider=RunPodProvider.name,
            gpu_type=str(kind["id"]),
            gpu_count=count,
            price_per_hour=float(kind["price"][which]) * count,
            country=_country(place["id"]),
            city=place.get("name"),
            num_available=MANY,
            details={"gpu": kind["id"], "cloud": pool, "data_center": place["id"]},
        )
        for place in listed
        if place.get("availability", "NONE") != "NONE"
    ]


def _country(data_center: str) -> str | None:
    """The country in a name like US-KS-2, CA-MTL-1, EU-RO-1 or EUR-IS-2; None: there is none."""
    parts = data_center.split("-")
    word = parts[0] if parts[0] in ("US", "CA") else (parts[1] if len(parts) > 1 else "")
    return word if len(word) == 2 else None
