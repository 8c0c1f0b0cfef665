"""Vast.ai, by its REST API: a market where each machine is offered once. The watcher enforces the rental end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from provisioning.errors import NoCapacity, ProvisioningError, UserError
from provisioning.pods.pod import PORTS, Listing, Offer, Pod, Row, id_in
from provisioning.providers.http import HttpCloud

IMAGE = "pytorch/pytorch:latest"
_DISK_GB = 100
_MAX_OFFERS = 1000
_PAGE = 25
_MAX_PAGES = 400
_FAILED = {"exited", "stopped", "offline"}


class VastProvider(HttpCloud):
    name = "vast"
    takes = ("image",)
    title = "Vast.ai"
    url = "https://console.vast.ai/api"
    key_env = "VAST_API_KEY"
    keys_at = "https://cloud.vast.ai/manage-keys/"
    pod_path = "/v0/instances/{}/?owner=me"
    user = "root"

    @staticmethod
    def refusal(status: int, body: Any) -> tuple[str, type[ProvisioningError] | None]:
        code = str(body.get("error") or "")
        message = str(body.get("msg") or code)
        # Each machine is offered once: somebody else has rented it, or its host has withdrawn it.
        if code == "no_such_ask" or status in (409, 410):
            return message, NoCapacity
        return message, UserError if "credit" in code else None

    def pod_in(self, found: Any) -> Pod | None:
        return None if found["instances"] is None else _pod(found["instances"], self.user)

    async def offers(self) -> list[Offer]:
        """On-demand offers of verified hosts with enough open ports for a peer and a DHT."""
        query = {
            **{name: {"eq": True} for name in ("verified", "rentable")},
            **{name: {"eq": False} for name in ("external", "rented")},
            "direct_port_count": {"gte": len(PORTS) + 1},
            "type": "on-demand",
            "order": [["dph_total", "asc"]],
            "limit": _MAX_OFFERS,
            "allocated_storage": _DISK_GB,
        }
        answer = await self.request("POST", "/v0/bundles/", query)
        return [_offer(one) for one in answer["offers"]]

    async def create(self, row: Row) -> str:
        # Add our key on this machine only, and leave the account's keys unchanged.
        key = shlex.quote(self.public_key())
        body = {
            "client_id": "me",
            "image": row.spec.image or IMAGE,
            "label": row.label,
            "disk": _DISK_GB,
            "runtype": "ssh_direct",
            "env": {f"-p {port}:{port}": "1" for port in PORTS},
            "onstart": f"mkdir -p ~/.ssh && printf '%s\\n' {key} >>~/.ssh/authorized_keys",
        }
        path = f"/v0/asks/{quote(str(row.offer.details['ask']), safe='')}/"
        return id_in((await self.request("PUT", path, body, is_order=True))["new_contract"])

    async def pods(self) -> Listing:
        found: list[Pod] = []
        query = {"limit": str(_PAGE), "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
        for _ in range(_MAX_PAGES):
            answer = await self.request("GET", f"/v1/instances/?{urlencode(query)}")
            found += [_pod(one, self.user) for one in answer["instances"]]
            query["after_token"] = str(answer.get("next_token") or "")
            if not query["after_token"]:
                break
        return Listing(pods=found)

    async def delete(self, pod_id: str) -> None:
        await self.request("DELETE", f"/v0/instances/{quote(pod_id, safe='')}/", {})


def _offer(found: Mapping[str, Any]) -> Offer:
    place = str(found.get("geolocation") or "")
    country = place.rpartition(",")[2].strip()
    return Offer(
        id=id_in(found["id"]),
        provider=VastProvider.name,
        gpu_type=str(found["gpu_name"]),
        gpu_count=int(found["num_gpus"]),
        price_per_hour=float(found["dph_total"]),
        country=country if len(country) == 2 else None,
        city=place.rpartition(",")[0].strip() or None,
        upload_mbps=found.get("inet_up"),
        download_mbps=found.get("inet_down"),
        details={"ask": found["id"]},
    )


def _pod(found: Mapping[str, Any], user: str) -> Pod:
    status = str(found.get("actual_status") or "")
    opened = {
        int(inside.partition("/")[0]): int(outside[0]["HostPort"])
        for inside, outside in (found.get("ports") or {}).items()
        if inside.endswith("/tcp") and outside
    }
    host = str(found.get("public_ipaddr") or "").strip()
    return Pod(
        id=id_in(found["id"]),
        label=str(found.get("label") or ""),
        is_ready=status == "running" and bool(host) and all(port in opened for port in (22, *PORTS)),
        failure=f"Vast.ai says that it is {status}" if status in _FAILED else "",
        gpu_count=found.get("num_gpus"),
        price_per_hour=None if found.get("dph_total") is None else float(found["dph_total"]),
        host=host,
        ssh_port=opened.get(22, 22),
        user=user,
        ports=tuple((port, opened[port]) for port in PORTS if port in opened),
    )
