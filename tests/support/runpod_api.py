"""RunPod's REST API, version 2, as its OpenAPI document has it, with pods that are real SSH servers on loopback."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from tests.support.http_api import HttpApi, Refusal, Request
from tests.support.ssh_machines import SshHost, free_ports, wipe

KEY = "rpa_test_key"


def gpu_kind(name: str, secure: float, max_count: int, availability: str = "HIGH") -> dict[str, Any]:
    return {
        "id": name,
        "name": name.removeprefix("NVIDIA "),
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": 80,
        "secure": True,
        "community": False,
        "price": {"secure": secure, "community": 0.0},
        "maxCount": {"secure": max_count, "community": 0},
        "availability": availability,
        "dataCenters": [{"id": "EU-RO-1", "name": "Romania 1", "availability": availability}],
    }


class RunPodApi(HttpApi):
    prefix = "/v2"

    def __init__(self, hosts: Sequence[SshHost]) -> None:
        super().__init__()
        self.free_hosts = list(hosts)
        self.kinds = [gpu_kind("NVIDIA A100 80GB PCIe", 1.19, 8), gpu_kind("NVIDIA H200", 3.99, 8, "NONE")]
        self.rented: dict[str, dict[str, Any]] = {}
        self.boot_s = 0.2

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNPOD_API_KEY": KEY, "RUNPOD_BASE_URL": self.url}

    def error_body(self, code: str, message: str) -> Any:
        return {"title": code, "status": 0, "detail": message}

    def answer(self, request: Request) -> Any:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise Refusal(401, "Unauthorized", "missing or invalid API key")
        match request.method, request.path.strip("/").split("/"):
            case "GET", ["catalog", "gpus"]:
                assert request.query["include"] == "AVAILABILITY" and request.query["product"] == "POD"
                return {"gpus": self.kinds}
            case "GET", ["pods"]:
                return {"pods": [self._shown(pod) for pod in self.rented.values()]}
            case "POST", ["pods"]:
                return self._create(request.body)
            case "GET", ["pods", pod_id] if pod_id in self.rented:
                return self._shown(self.rented[pod_id])
            case "DELETE", ["pods", pod_id] if pod_id in self.rented:
                host = self.rented.pop(pod_id)["_host"]
                wipe(host)
                self.free_hosts.append(host)
                return None
        raise Refusal(404, "Not Found", "pod not found")

    def _create(self, body: dict[str, Any]) -> Any:
        missing = {"name", "image", "gpu"} - set(body)
        if missing or "22/tcp" not in body["ports"] or not body["startSsh"]:
            raise Refusal(422, "Unprocessable Entity", f"missing {missing}")
        kind = next((one for one in self.kinds if one["id"] == body["gpu"]["id"]), None)
        if kind is None or kind["availability"] == "NONE" or not self.free_hosts:
            raise Refusal(400, "Bad Request", "There are no instances currently available")
        host = self.free_hosts.pop(0)
        (host.home.parent / "authorized_keys").write_text(f"{body['env']['PUBLIC_KEY']}\n")
        pod_id, inside = uuid.uuid4().hex[:14], [int(port.partition("/")[0]) for port in body["ports"]]
        self.rented[pod_id] = {
            "id": pod_id,
            "name": body["name"],
            "gpu": body["gpu"],
            "cost": kind["price"][body["cloud"].lower()] * body["gpu"]["count"],
            "_host": host,
            "_began": time.time(),
            "_ports": dict(zip(inside, [host.port, *free_ports(len(inside) - 1)], strict=True)),
        }
        return self._shown(self.rented[pod_id])

    def _shown(self, pod: dict[str, Any]) -> dict[str, Any]:
        shown = {name: value for name, value in pod.items() if not name.startswith("_")}
        if time.time() - pod["_began"] < self.boot_s:
            return {
                **shown,
                "status": "PROVISIONING",
                "ssh": {"proxy": None, "direct": None},
                "runtime": None,
            }
        host: SshHost = pod["_host"]
        ports = [
            {"private": inside, "public": outside, "type": "tcp", "ip": host.address}
            for inside, outside in pod["_ports"].items()
        ]
        direct = {"host": host.address, "port": host.port, "username": host.user, "command": "ssh"}
        return {
            **shown,
            "status": "RUNNING",
            "ssh": {"proxy": None, "direct": direct},
            "runtime": {"ports": ports},
        }
