"""Lambda's HTTP API, version 1, with instances that are real SSH servers on loopback."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from tests.support.http_api import HttpApi, Refusal, Request
from tests.support.ssh_machines import SshHost, wipe

KEY = "secret_test_key"
REGION = {"name": "us-west-1", "description": "California, USA"}


def instance_type(name: str, gpus: int, cents: int, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"{gpus}x {description}",
        "gpu_description": description,
        "price_cents_per_hour": cents,
        "specs": {"vcpus": 30, "memory_gib": 200, "storage_gib": 512, "gpus": gpus},
    }


TYPES = {
    "gpu_1x_a100": instance_type("gpu_1x_a100", 1, 129, "A100 (40 GB PCIe)"),
    "gpu_1x_a10": instance_type("gpu_1x_a10", 1, 75, "A10 (24 GB PCIe)"),
    "gpu_8x_a100": instance_type("gpu_8x_a100", 8, 1432, "A100 (80 GB SXM4)"),
}


class LambdaApi(HttpApi):
    prefix = "/api/v1"

    def __init__(self, hosts: Sequence[SshHost]) -> None:
        super().__init__()
        self.free_hosts = list(hosts)
        self.instances: dict[str, dict[str, Any]] = {}
        self.keys: list[dict[str, Any]] = []
        self.capacity = {name: [REGION] for name in TYPES}
        self.boot_s = 0.2
        self.terminating_s = 0.3
        self.refuses_launch_of: set[str] = set()
        """Instance types that are listed but cannot be launched."""
        self.num_launched = 0
        self.late_s = 0.0
        """Seconds for which a new instance is not listed."""

    @property
    def environment(self) -> dict[str, str]:
        return {"LAMBDALABS_API_KEY": KEY, "LAMBDALABS_BASE_URL": self.url}

    def answer(self, request: Request) -> Any:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise Refusal(401, "global/invalid-api-key", "API key was invalid, expired, or deleted.")
        self._forget_terminated()
        match request.method, request.path:
            case "GET", "/instance-types":
                data: Any = {
                    name: {"instance_type": kind, "regions_with_capacity_available": self.capacity[name]}
                    for name, kind in TYPES.items()
                }
            case "GET", "/instances":
                now = time.time()
                data = [
                    self._shown(one) for one in self.instances.values() if now - one["_began"] >= self.late_s
                ]
            case "GET", path if path.removeprefix("/instances/") in self.instances:
                data = self._shown(self.instances[path.removeprefix("/instances/")])
            case "GET", "/ssh-keys":
                data = self.keys
            case "POST", "/ssh-keys":
                data = self._add_key(request.body)
            case "POST", "/instance-operations/launch":
                data = self._launch(request.body)
            case "POST", "/instance-operations/terminate":
                data = self._terminate(request.body["instance_ids"])
            case _:
                raise Refusal(404, "global/object-does-not-exist", request.path)
        return {"data": data}

    def _add_key(self, body: dict[str, Any]) -> dict[str, Any]:
        if any(key["name"] == body["name"] for key in self.keys):
            raise Refusal(400, "global/duplicate", "SSH key name already in use.")
        made = {**body, "id": uuid.uuid4().hex}
        self.keys.append(made)
        return made

    def _launch(self, body: dict[str, Any]) -> Any:
        name = body["instance_type_name"]
        if name in self.refuses_launch_of or not self.free_hosts:
            raise Refusal(
                400,
                "instance-operations/launch/insufficient-capacity",
                "Not enough capacity to fulfill launch request.",
            )
        assert len(body["ssh_key_names"]) == 1
        host = self.free_hosts.pop(0)
        lines = [key["public_key"] for key in self.keys if key["name"] in body["ssh_key_names"]]
        (host.home.parent / "authorized_keys").write_text("\n".join(lines) + "\n")
        instance_id = uuid.uuid4().hex
        self.instances[instance_id] = {
            "id": instance_id,
            "name": body["name"],
            "instance_type": TYPES[name],
            "region": REGION,
            "_host": host,
            "_began": time.time(),
            "_ended": None,
        }
        self.num_launched += 1
        return {"instance_ids": [instance_id]}

    def _terminate(self, ids: list[str]) -> Any:
        for instance_id in ids:
            if instance_id not in self.instances:
                raise Refusal(404, "global/object-does-not-exist", "Specified instance does not exist.")
            self.instances[instance_id]["_ended"] = self.instances[instance_id]["_ended"] or time.time()
        return {"terminated_instances": [self._shown(self.instances[one]) for one in ids]}

    def _forget_terminated(self) -> None:
        for instance_id, one in list(self.instances.items()):
            if one["_ended"] and time.time() - one["_ended"] > self.terminating_s:
                host = self.instances.pop(instance_id)["_host"]
                wipe(host)
                self.free_hosts.append(host)

    def _shown(self, one: dict[str, Any]) -> dict[str, Any]:
        host: SshHost = one["_host"]
        shown = {name: value for name, value in one.items() if not name.startswith("_")}
        if one["_ended"]:
            return {**shown, "status": "terminating", "ip": host.address}
        if time.time() - one["_began"] < self.boot_s:
            return {**shown, "status": "booting"}
        shown |= {"status": "active", "ip": host.address}
        # Machines on loopback share one address; the real ones have their own, and answer on port 22.
        # Only LoopbackLambda reads it.
        return {**shown, "ssh_port": host.port}
