"""The user's own machines over SSH, listed as `[[machines]]` in a TOML file. Each has room for one pod."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from provisioning.errors import HostKeyChanged, MachineError, UserError
from provisioning.machines.keys import key_at
from provisioning.machines.machine import Machine
from provisioning.machines.ssh import Address, SshMachine, shown_host_key
from provisioning.pods.pod import Offer
from provisioning.pods.tables import read_toml, tables_in, typed
from provisioning.providers.cloud import check_programs
from provisioning.providers.hosts import Host, HostsProvider


def read_inventory(path: Path | None) -> list[Host]:
    """The machines in the file. Raises UserError if there is no file, or a field is invalid."""
    if path is None:
        raise UserError("--provider ssh needs --inventory FILE.toml with your [[machines]].")
    origin = f"--inventory {path}"
    found = [
        typed(Host, {"name": str(table.get("host", "")), **table}, f"{origin}, machine {index}")
        for index, table in enumerate(tables_in(read_toml(path), "machines", origin))
    ]
    if len({entry.name for entry in found}) < len(found):
        raise UserError(f"{origin} has two machines with the same name.")
    return found


class SshProvider(HostsProvider):
    name = "ssh"

    def __init__(self, inventory: Path | None) -> None:
        self.hosts = read_inventory(inventory)
        # If all machines are this one, listen on loopback only.
        is_here = {host.reached_at for host in self.hosts} == {"127.0.0.1"}
        self.listens_on = "127.0.0.1" if is_here else "0.0.0.0"
        self._machines: dict[str, SshMachine] = {}
        # One lock per host, so that a host that does not answer delays no other.
        self._connecting = {host.name: asyncio.Lock() for host in self.hosts}

    async def check(self) -> None:
        check_programs()
        for host in self.hosts:
            key_at(Path(host.key))
        found = await asyncio.gather(*(self.connect(host) for host in self.hosts), return_exceptions=True)
        silent = [result for result in found if isinstance(result, MachineError)]
        for result in found:
            if isinstance(result, BaseException) and result not in silent:
                raise result
        if len(silent) == len(self.hosts):
            raise UserError(f"{silent[0]}. Nothing was changed.") from silent[0]

    async def offers(self) -> list[Offer]:
        free = await asyncio.gather(*(self._places_now(host) for host in self.hosts))
        return [
            Offer(
                id=host.name,
                provider=self.name,
                gpu_type=host.gpu_type,
                gpu_count=host.gpu_count or host.nproc_per_node,
                price_per_hour=host.price_per_hour,
                country=host.country,
                upload_mbps=host.upload_mbps,
                download_mbps=host.download_mbps,
                is_cpu=host.gpu_count == 0,
                details={"host": host.name},
            )
            for host, places in zip(self.hosts, free, strict=True)
            if places > 0
        ]

    async def _places_now(self, host: Host) -> int:
        """Number of free places; 0 if the machine does not answer."""
        try:
            return await self.free_places(host)
        except MachineError:
            return 0

    async def connect(self, host: Host) -> Machine:
        async with self._connecting[host.name]:
            if host.name not in self._machines:
                address = Address(
                    host=host.host,
                    port=host.port,
                    user=host.user,
                    key_path=key_at(Path(host.key)),
                    host_key=await _pinned(host),
                )
                self._machines[host.name] = SshMachine(address)
        machine = self._machines[host.name]
        (await machine.run("true")).checked(f"the first command on {host.name}")
        return machine

    def ports(self, host: Host) -> list[int]:
        return list(host.ports)

    def python(self) -> str | None:
        found = {host.python for host in self.hosts}
        return found.pop() if len(found) == 1 else None

    async def close(self) -> None:
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()


async def _pinned(entry: Host) -> str:
    """The host key in the inventory or known_hosts. Raises UserError if neither has it: a shown key is not trusted."""
    import asyncssh

    if entry.host_key:
        try:
            asyncssh.import_public_key(entry.host_key)
        except asyncssh.KeyImportError as error:
            raise UserError(
                f'{entry.name}: host_key = "{entry.host_key}" is no public key: {error}.'
            ) from error
        return " ".join(entry.host_key.split()[:2])
    path = Path("~/.ssh/known_hosts").expanduser()
    if path.is_file():
        keys = asyncssh.match_known_hosts(str(path), entry.host, _address_of(entry.host), entry.port)[0]
        if keys:
            return " ".join(keys[0].export_public_key().decode().split()[:2])
    try:
        shown = await shown_host_key(entry.host, entry.port)
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
