"""Pods on this machine, which cost nothing: for first trials and for tests."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
from pathlib import Path

from provisioning.errors import UserError
from provisioning.machines.local import LocalMachine
from provisioning.machines.machine import Machine
from provisioning.pods.pod import PORTS, Offer
from provisioning.providers.hosts import Host, HostsProvider

SIZES = (1, 2, 4)
"""Numbers of training processes that are offered."""
MAX_PODS = 16
_PROGRAMS = ("setsid", "flock", "grep", "find")


class LocalProvider(HostsProvider):
    """`home` contains the directories of all pods."""

    name = "local"
    listens_on = "127.0.0.1"
    pods_per_host = MAX_PODS
    hosts = (Host(name="here", host="127.0.0.1", user=""),)

    def __init__(self, home: Path) -> None:
        self._machine = LocalMachine(home)
        self._given: set[int] = set()

    async def check(self) -> None:
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            raise UserError(
                f"--provider local needs {', '.join(missing)} on this machine (util-linux, grep, findutils)."
            )

    async def offers(self) -> list[Offer]:
        free = await self.free_places(self.hosts[0])
        return [
            Offer(
                id=f"cpu-{size}",
                provider=self.name,
                gpu_type=f"cpu-{size}",
                gpu_count=size,
                price_per_hour=0.0,
                is_cpu=True,
                num_available=max(free, 0),
                details={"host": self.hosts[0].name},
            )
            for size in SIZES
        ]

    async def connect(self, host: Host) -> Machine:
        return self._machine

    def ports(self, host: Host) -> list[int]:
        """Free ports, without those given to earlier pods, whose peers may not listen yet."""
        found: list[int] = []
        with contextlib.ExitStack() as stack:
            while len(found) < len(PORTS):
                # Stays bound until all are found, so that they differ.
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
                if port not in self._given:
                    found.append(port)
        self._given.update(found)
        return found

    def python(self) -> str | None:
        return sys.executable
