"""Vast.ai's REST API as its documents and its own client have it, with instances that are SSH servers on loopback."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from tests.support.http_api import HttpApi, Refusal, Request
from tests.support.ssh_machines import SshHost, free_ports, wipe

KEY = "vast-test-key"
_PAGE = 1


def ask(number: int, gpu: str, num_gpus: int, dollars: float) -> dict[str, Any]:
    return {
        "id": number,
        "gpu_name": gpu,
        "num_gpus": num_gpus,
        "dph_total": dollars,
        "inet_up": 830.5,
        "inet_down": 912.0,
        "geolocation": "Amsterdam, NL",
        "direct_port_count": 20,
    }


class VastApi(HttpApi):
    prefix = "/api"

    def __init__(self, hosts: Sequence[SshHost]) -> None:
        super().__init__()
        self.free_hosts = list(hosts)
        self.asks = {one["id"]: one for one in (ask(11, "A100 PCIE", 1, 0.9), ask(12, "RTX 4090", 2, 0.7))}
        self.rented: dict[int, dict[str, Any]] = {}
        self.boot_s = 0.2
        self._next_id = 7_000_000

    @property
    def environment(self) -> dict[str, str]:
        return {"VAST_API_KEY": KEY, "VAST_BASE_URL": self.url}

    def error_body(self, code: str, message: str) -> Any:
        return {"success": False, "error": code, "msg": message}

    def answer(self, request: Request) -> Any:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise Refusal(401, "auth_error", "Invalid user key")
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["v0", "bundles"]:
                wanted = request.body["direct_port_count"]["gte"]
                return {"offers": [one for one in self.asks.values() if one["direct_port_count"] >= wanted]}
            case "PUT", ["v0", "asks", number]:
                return self._create(int(number), request.body)
            case "GET", ["v1", "instances"]:
                return self._page(int(request.query.get("after_token", 0)))
            case "GET", ["v0", "instances", number]:
                found = self.rented.get(int(number)) if number.isdigit() else None
                return {"instances": self._shown(found) if found else None}
            case "DELETE", ["v0", "instances", number] if number.isdigit() and int(number) in self.rented:
                instance = self.rented.pop(int(number))
                wipe(instance["_host"])
                self.free_hosts.append(instance["_host"])
                self.asks[instance["_ask"]["id"]] = instance["_ask"]
                return {"success": True}
        raise Refusal(404, "not_found", f"no {request.path}")

    def _page(self, after: int) -> Any:
        """One instance per page, so that a client that reads only the first page misses some."""
        ids = [number for number in sorted(self.rented) if number > after]
        page = ids[:_PAGE]
        return {
            "instances": [self._shown(self.rented[number]) for number in page],
            "next_token": str(page[-1]) if len(ids) > _PAGE else None,
        }

    def _create(self, number: int, body: dict[str, Any]) -> Any:
        if number not in self.asks or not self.free_hosts:
            raise Refusal(404, "no_such_ask", f"Instance type by id {number} is not available.")
        assert body["runtype"] == "ssh_direct" and body["image"]
        host, found = self.free_hosts.pop(0), self.asks.pop(number)
        key = re.search(r"ssh-\S+ \S+", body["onstart"])
        assert key is not None
        (host.home.parent / "authorized_keys").write_text(f"{key[0]}\n")
        inside = [int(words.split()[1].partition(":")[0]) for words in body["env"]]
        self._next_id += 1
        self.rented[self._next_id] = {
            "id": self._next_id,
            "label": body["label"],
            **{name: found[name] for name in ("num_gpus", "gpu_name", "dph_total")},
            "_ask": found,
            "_host": host,
            "_began": time.time(),
            "_ports": dict(zip((22, *inside), (host.port, *free_ports(len(inside))), strict=True)),
        }
        return {"success": True, "new_contract": self._next_id}

    def _shown(self, instance: dict[str, Any]) -> dict[str, Any]:
        shown = {name: value for name, value in instance.items() if not name.startswith("_")}
        if time.time() - instance["_began"] < self.boot_s:
            return {**shown, "actual_status": "loading", "public_ipaddr": None, "ports": None}
        ports = {
            f"{inside}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(outside)}]
            for inside, outside in instance["_ports"].items()
        }
        host: SshHost = instance["_host"]
        return {**shown, "actual_status": "running", "public_ipaddr": f"{host.address}\n", "ports": ports}
