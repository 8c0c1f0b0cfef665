"""Lium's HTTP API as its client (lium.io 0.32) uses it, with pods that are real SSH servers on loopback."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.http_api import HttpApi, Refusal, Request
from tests.support.ssh_machines import SshHost, free_ports, wipe

KEY = "test-key"
_IMAGE = {"docker_image": "daturaai/pytorch", "docker_image_tag": "2.8.0-py3.11-cuda12.8"}
_TEMPLATE = {
    **_IMAGE,
    "id": "template-1",
    "name": "PyTorch",
    "category": "PYTORCH",
    "status": "VERIFY_SUCCESS",
    "user_id": "u1",
    "supports_volume_encryption": False,
}


def hasten_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lium's client waits a fiftieth of its time before it repeats a request or looks for a pod."""
    quick = SimpleNamespace(**{**vars(time), "sleep": lambda wait_s: time.sleep(wait_s / 50)})
    for module in ("client", "utils"):
        monkeypatch.setattr(f"lium.sdk.{module}.time", quick)


def now_text(at: float | None = None) -> str:
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def executor(
    name: str,
    gpus: int,
    price_per_gpu: float,
    *,
    country: str = "NL",
    up: float = 900,
    down: float = 950,
    smallest: int | None = None,
) -> dict[str, Any]:
    """A node. `smallest`: the fewest of its GPUs that can be rented; None: only all of them."""
    return {
        "id": str(uuid.uuid4()),
        "machine_name": name,
        "executor_ip_address": "127.0.0.1",
        "gpu_count": gpus,
        "available_gpu_count": gpus,
        "min_gpu_count_for_rental": smallest,
        "price_per_gpu": price_per_gpu,
        "status": "available",
        "tier": "secure",
        "max_cuda_version": 12.8,
        "effective_upload_speed_mbps": up,
        "effective_download_speed_mbps": down,
        "location": {"city": "Amsterdam", "country": "Netherlands", "country_code": country},
        "reliability_score": 99.1,
        "specs": {
            "gpu": {"count": gpus, "driver": "570.86", "details": [{"name": name, "capacity": 81559}] * gpus},
            "cpu": {"count": 64},
            "sysbox_runtime": False,
            "available_port_count": 20,
        },
    }


class LiumApi(HttpApi):
    prefix = "/api"

    def __init__(self, executors: Sequence[dict[str, Any]], hosts: Sequence[SshHost]) -> None:
        super().__init__()
        self.executors, self.free_hosts = list(executors), list(hosts)
        self.rented: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, dict[str, Any]] = {}
        self.boot_s = 0.2
        self.balance = 42.5
        self.ignores_gpu_count = False
        self.ignores_end = False
        self.never_ready: set[str] = set()
        """Executors whose pods never come up."""
        self.num_rented = 0
        self.dearer = 1.0
        """How much more a pod costs than its node was offered for."""
        self.end_shown_after_s = 0.0
        self.num_empty_lists = 0
        """How many of the next listings are empty."""

    @property
    def environment(self) -> dict[str, str]:
        return {"LIUM_API_KEY": KEY, "LIUM_BASE_URL": self.url}

    def vanish(self, label_part: str) -> None:
        """Take a pod away without notice, as a provider may."""
        (found,) = [pod_id for pod_id, pod in self.rented.items() if label_part in pod["pod_name"]]
        self._release(found)

    def error_body(self, code: str, message: str) -> Any:
        error = {"code": code, "message": message, "hint": None, "request_id": "req-1"}
        return {"error": error, "message": message}

    def answer(self, request: Request) -> Any:
        if request.headers.get("X-Api-Key", request.headers.get("X-API-KEY")) != KEY:
            raise Refusal(401, "UNAUTHORIZED", "bad key")
        parts = request.path.strip("/").split("/")
        simple: dict[str, Any] = {
            "GET version": {"version": "1.0", "features": ["rent_idempotency"]},
            "GET users/me": {"id": "u1", "email": "a@example.org", "balance": self.balance},
            "GET machines": [{"name": one["machine_name"]} for one in self.executors],
            "GET executors/default-docker-image": [_IMAGE],
            "GET templates": [_TEMPLATE],
            f"GET templates/{_TEMPLATE['id']}": _TEMPLATE,
            "GET ssh-keys": [],
            "GET volumes": [],
        }
        line = f"{request.method} {'/'.join(parts)}"
        if line in simple:
            return simple[line]
        match request.method, parts:
            case "GET", ["executors"]:
                return [one for one in self.executors if one["available_gpu_count"] > 0]
            case "POST", ["ssh-keys"]:
                return {"id": str(uuid.uuid4()), "created_at": now_text(), **request.body}
            case "POST", ["executors", executor_id, "rent"]:
                return self._rent(executor_id, request)
            case "GET", ["pods"] if self.num_empty_lists > 0:
                self.num_empty_lists -= 1
                return []
            case "GET", ["pods"]:
                return [self._shown(pod) for pod in self.rented.values()]
            case "GET", ["pods", pod_id] if pod_id in self.rented:
                return self._shown(self.rented[pod_id])
            case "DELETE", ["pods", pod_id] if pod_id in self.rented:
                self._release(pod_id)
                return {"success": True}
            case "POST", ["pods", pod_id, "schedule-removal"] if pod_id in self.rented:
                if not self.ignores_end:
                    self.rented[pod_id]["_end"] = request.body["removal_scheduled_at"]
                    self.rented[pod_id]["_end_set_at"] = time.time()
                return {"success": True}
        raise Refusal(404, "NOT_FOUND", request.path)

    def _rent(self, executor_id: str, request: Request) -> Any:
        key = request.headers.get("Idempotency-Key", "")
        if key in self.by_key:
            return self.by_key[key]
        node = next((one for one in self.executors if one["id"] == executor_id), None)
        free = node["available_gpu_count"] if node else 0
        body = request.body
        count = free if self.ignores_gpu_count else body.get("gpu_count") or free
        smallest = (node or {}).get("min_gpu_count_for_rental") or free
        if node is None or not free or count > free or count < min(smallest, free) or not self.free_hosts:
            raise Refusal(409, "NO_CAPACITY", "Node is not available")
        host = self.free_hosts.pop(0)
        (host.home.parent / "authorized_keys").write_text("\n".join(body["user_public_key"]) + "\n")
        node["available_gpu_count"] -= count
        hours = body.get("termination_hours")
        pod_id = str(uuid.uuid4())
        ends = datetime.now(UTC) + timedelta(hours=hours) if hours and not self.ignores_end else None
        self.rented[pod_id] = {
            "id": pod_id,
            "pod_name": body["pod_name"],
            "_began": time.time(),
            "_host": host,
            "_node": node,
            "ports_mapping": {"22": host.port, **{str(port): port for port in free_ports(3)}},
            "created_at": now_text(),
            "updated_at": now_text(),
            "executor": node,
            "template": _TEMPLATE,
            "price": node["price_per_gpu"] * count * self.dearer,
            "gpu_count": str(count),
            "removal_scheduled_at": ends.isoformat() if ends else None,
            "api_key_id": "k1",
        }
        self.num_rented += 1
        self.by_key[key] = {"success": True, "pod_id": pod_id}
        return self.by_key[key]

    def _release(self, pod_id: str) -> None:
        pod = self.rented.pop(pod_id)
        pod["_node"]["available_gpu_count"] += int(pod["gpu_count"])
        wipe(pod["_host"])
        self.free_hosts.append(pod["_host"])

    def _shown(self, pod: dict[str, Any]) -> dict[str, Any]:
        is_up = time.time() - pod["_began"] > self.boot_s and pod["executor"]["id"] not in self.never_ready
        host: SshHost = pod["_host"]
        if "_end" in pod and time.time() - pod["_end_set_at"] >= self.end_shown_after_s:
            pod["removal_scheduled_at"] = pod["_end"]
        shown = {name: value for name, value in pod.items() if not name.startswith("_")}
        return {
            **shown,
            "status": pod.get("status") or ("RUNNING" if is_up else "PENDING"),
            "ssh_connect_cmd": f"ssh {host.user}@127.0.0.1 -p {host.port}" if is_up else None,
        }
