"""Machines that you own, listed in a TOML file. One pod each; they cost what the file says, by default nothing.

[[machines]]
name = "office"
host = "192.0.2.7"
user = "ada"                      # default: yours
port = 22
key = "~/.ssh/id_ed25519"
host_key = "ssh-ed25519 AAAA…"    # default: as ~/.ssh/known_hosts has it
gpu_type = "RTX 4090"
gpu_count = 1                     # 0: it trains on its processors
ports = [30001, 30002, 30003]     # open to the other machines
address = "203.0.113.9"           # how they reach it, where that is not `host`
price_per_hour = 0.0
country = "NL"
upload_mbps = 900.0
download_mbps = 900.0
python = "/opt/env/bin/python"    # default: an environment is made
"""

from __future__ import annotations

import asyncio
import getpass
import shutil
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioning.errors import HostKeyChanged, MachineError, UserError
from provisioning.machines.keys import key_at
from provisioning.machines.machine import Machine
from provisioning.machines.ssh import Address, SshMachine, shown_host_key
from provisioning.pods.files import check_type
from provisioning.pods.pod import Offer, PodSpec
from provisioning.providers.hosts import Host, HostsProvider

_PORTS = [30001, 30002, 30003]
_TYPES = {
    **dict.fromkeys(("name", "host", "user", "key", "host_key", "gpu_type", "address"), "str"),
    **dict.fromkeys(("country", "python"), "str"),
    **dict.fromkeys(("port", "gpu_count", "nproc_per_node"), "int"),
    **dict.fromkeys(("price_per_hour", "upload_mbps", "download_mbps"), "float"),
    "ports": "Sequence[int]",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One machine of the inventory."""

    name: str
    host: str
    values: Mapping[str, Any]

    @property
    def num_gpus(self) -> int:
        return int(self.values.get("gpu_count", 0))

    @property
    def ssh_port(self) -> int:
        return int(self.values.get("port", 22))

    @property
    def user(self) -> str:
        return str(self.values.get("user") or getpass.getuser())

    @property
    def key(self) -> Path:
        return Path(self.values.get("key", "~/.ssh/id_ed25519"))


def read_inventory(path: Path | None) -> list[Entry]:
    """Raises UserError with the field that is wrong."""
    if path is None:
        raise UserError("--provider ssh needs --inventory FILE.toml with your [[machines]].")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("machines")
    except OSError as error:
        raise UserError(f"--inventory {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--inventory {path} is not TOML: {error}.") from error
    if not isinstance(tables, list) or not tables:
        raise UserError(f"--inventory {path} has no [[machines]].")
    entries = []
    for index, table in enumerate(tables):
        where = f"--inventory {path}, machine {index}"
        if not isinstance(table, dict):
            raise UserError(f"--inventory {path} has no [[machines]].")
        unknown = sorted(set(table) - set(_TYPES))
        if unknown:
            raise UserError(f"{where}: unknown field {unknown[0]}; there are {', '.join(sorted(_TYPES))}.")
        for name, value in table.items():
            check_type(name, value, _TYPES[name], where)
        if not table.get("host"):
            raise UserError(f"{where}: host is missing.")
        entries.append(
            Entry(name=str(table.get("name", table["host"])), host=str(table["host"]), values=table)
        )
    if len({entry.name for entry in entries}) < len(entries):
        raise UserError(f"--inventory {path} has two machines of one name.")
    return entries


class SshProvider(HostsProvider):
    name = "ssh"

    def __init__(self, inventory: Path | None) -> None:
        self._entries = {entry.name: entry for entry in read_inventory(inventory)}
        self._machines: dict[str, SshMachine] = {}
        # Each its own, so that nobody waits for one that does not answer.
        self._connecting = {name: asyncio.Lock() for name in self._entries}

    @property
    def hosts(self) -> Sequence[Host]:
        return [
            Host(
                name=entry.name,
                num_pods=1,
                host=str(entry.values.get("address") or entry.host),
                ssh_port=entry.ssh_port,
                user=entry.user,
            )
            for entry in self._entries.values()
        ]

    @property
    def listens_on(self) -> str:
        # On loopback alone, where all machines are this one.
        addresses = {str(entry.values.get("address") or entry.host) for entry in self._entries.values()}
        return "127.0.0.1" if addresses == {"127.0.0.1"} else "0.0.0.0"

    async def check(self) -> None:
        for program in ("rsync", "ssh"):
            if shutil.which(program) is None:
                raise UserError(f"{program} is not on this machine, and pods need it; install it first.")
        for entry in self._entries.values():
            key_at(entry.key)
        found = await asyncio.gather(*(self.connect(host) for host in self.hosts), return_exceptions=True)
        for result in found:
            if isinstance(result, MachineError):
                raise UserError(f"{result}. Nothing was changed.") from result
            if isinstance(result, BaseException):
                raise result

    async def offers(self) -> list[Offer]:
        free = await asyncio.gather(*(self.free_places(host) for host in self.hosts))
        return [
            Offer(
                id=entry.name,
                provider=self.name,
                gpu_type=str(entry.values.get("gpu_type", "cpu")),
                gpu_count=entry.num_gpus or int(entry.values.get("nproc_per_node", 1)),
                price_per_hour=float(entry.values.get("price_per_hour", 0.0)),
                country=entry.values.get("country"),
                upload_mbps=entry.values.get("upload_mbps"),
                download_mbps=entry.values.get("download_mbps"),
                is_cpu=entry.num_gpus == 0,
                details={"host": entry.name},
            )
            for entry, places in zip(self._entries.values(), free, strict=True)
            if places > 0
        ]

    async def connect(self, host: Host) -> Machine:
        entry = self._entries[host.name]
        async with self._connecting[host.name]:
            if host.name not in self._machines:
                address = Address(
                    host=entry.host,
                    port=entry.ssh_port,
                    user=entry.user,
                    key_path=key_at(entry.key),
                    host_key=await _pinned(entry),
                )
                self._machines[host.name] = SshMachine(address)
        machine = self._machines[host.name]
        (await machine.run("true")).checked(f"the first command on {host.name}")
        return machine

    def ports(self, host: Host) -> list[int]:
        return list(self._entries[host.name].values.get("ports", _PORTS))

    def swarm_flags(self, spec: PodSpec, offer: Offer) -> list[str]:
        return ["--nproc-per-node", str(offer.gpu_count)] if offer.is_cpu else []

    def python(self) -> str | None:
        found = {entry.values.get("python") for entry in self._entries.values()}
        return str(found.pop()) if len(found) == 1 and None not in found else None

    async def close(self) -> None:
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()


async def _pinned(entry: Entry) -> str:
    """The machine's host key by the inventory or known_hosts; never by what it shows itself. Raises UserError."""
    import asyncssh

    given = entry.values.get("host_key")
    if given:
        try:
            asyncssh.import_public_key(given)
        except asyncssh.KeyImportError as error:
            raise UserError(f'{entry.name}: host_key = "{given}" is no public key: {error}.') from error
        return " ".join(given.split()[:2])
    path = Path("~/.ssh/known_hosts").expanduser()
    if path.is_file():
        keys = asyncssh.match_known_hosts(str(path), entry.host, _address_of(entry.host), entry.ssh_port)[0]
        if keys:
            return " ".join(keys[0].export_public_key().decode().split()[:2])
    try:
        shown = await shown_host_key(entry.host, entry.ssh_port)
    except MachineError as error:
        raise UserError(f"{entry.name}: {error}.") from error
    raise HostKeyChanged(
        f"The host key of {entry.name} is not known. If the one that it shows is right, put this line into its "
        f'[[machines]] entry:\nhost_key = "{shown}"'
    )


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host
