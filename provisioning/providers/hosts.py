"""Base of the providers of the user's own machines: a pod is a directory there, and the processes with its mark."""

from __future__ import annotations

import asyncio
import getpass
import json
import shlex
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from provisioning.errors import MachineError, NoCapacity, ProviderError, ProvisioningError, UserError
from provisioning.machines.answers import Count, decoded
from provisioning.machines.jobs import sweep_script
from provisioning.machines.machine import Machine
from provisioning.machines.paths import PODS, pod_directory, temporary_directory
from provisioning.pods.pod import PORTS, Listing, Offer, Pod, Row
from provisioning.pods.tables import Figure
from provisioning.providers.protocol import Provider

_FULL = 8
_DESTROY_TIMEOUT_S = 90.0
_ANSWER_TIMEOUT_S = 12.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine: an entry of `[[machines]]` in an inventory."""

    host: str
    name: str = ""
    """Default: the value of `host`."""
    user: str = field(default_factory=getpass.getuser)
    port: int = 22
    key: str = "~/.ssh/id_ed25519"
    host_key: str = ""
    """Such as "ssh-ed25519 AAAA…"; default: the key in ~/.ssh/known_hosts."""
    gpu_type: str = "cpu"
    gpu_count: int = 0
    """0: it trains on its CPUs."""
    nproc_per_node: int = 1
    """Number of training processes if it has no GPUs."""
    ports: Sequence[int] = PORTS
    """TCP ports that are open to the other machines."""
    address: str = ""
    """IPv4 address for the other machines; default: `host`."""
    price_per_hour: Figure = 0.0
    country: str | None = None
    upload_mbps: Figure | None = None
    download_mbps: Figure | None = None
    python: str | None = None
    """A Python that has all packages; default: an environment is made."""

    @property
    def reached_at(self) -> str:
        return self.address or self.host


class HostsProvider(Provider):
    """Base of local and ssh. A pod's id is `<host>/<label>`, so an order that is sent twice makes one pod."""

    repeatable = True
    settle_s = doubt_s = 0.0
    pods_per_host = 1
    hosts: Sequence[Host]

    @abstractmethod
    async def connect(self, host: Host) -> Machine:
        """The machine of this host; the same object on every call."""

    @abstractmethod
    def ports(self, host: Host) -> list[int]:
        """TCP ports for a new pod's peers."""

    async def create(self, row: Row) -> str:
        host = self._host(row.offer.details["host"])
        record = {
            "label": row.label,
            "gpu_count": row.offer.gpu_count,
            "price": row.offer.price_per_hour,
            "ports": self.ports(host),
        }
        machine = await self.connect(host)
        answer = await machine.run(_create_script(row.label, json.dumps(record), self.pods_per_host))
        if answer.code == _FULL:
            raise NoCapacity(f"{host.name} is taken: {answer.stdout.strip()}")
        answer.checked(f"making a pod on {host.name}")
        return f"{host.name}/{row.label}"

    async def pods(self) -> Listing:
        found: list[Pod] = []
        silent: dict[str, str] = {}

        async def ask(host: Host) -> None:
            try:
                found.extend(await self._asked(host))
            except ProvisioningError as error:
                silent[host.name] = str(error)

        await asyncio.gather(*(ask(host) for host in self.hosts))
        return Listing(pods=found, silent=silent)

    async def find(self, pod_id: str) -> Pod | None:
        there = await self._asked(self._host(pod_id.partition("/")[0]))
        return next((pod for pod in there if pod.id == pod_id), None)

    async def destroy(self, pod_id: str) -> None:
        name, _, label = pod_id.partition("/")
        directory = shlex.quote(pod_directory(label))
        # Remove pod.json last: the pod is listed as long as files are left.
        script = f"""
{sweep_script(label)}
rm -rf {shlex.quote(temporary_directory(label))}; [ -d {directory} ] || exit 0
find {directory} -mindepth 1 -maxdepth 1 ! -name pod.json -exec rm -rf {{}} + && rm -rf {directory} || exit 9
rmdir {PODS} 2>/dev/null; exit 0
"""
        host = self._host(name)
        try:
            machine = await self.connect(host)
            answer = await machine.run(script, timeout_s=_DESTROY_TIMEOUT_S)
            answer.checked(f"ending the processes of {label} and removing its files")
        except MachineError as error:
            raise ProviderError(f"pod {label} on {name}: {error}") from error

    async def machine(self, pod: Pod, host_key: str) -> Machine:
        return await self.connect(self._host(pod.id.partition("/")[0]))

    def swarm_flags(self, offer: Offer) -> list[str]:
        return ["--nproc-per-node", str(offer.gpu_count)] if offer.is_cpu else []

    def _host(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise UserError(
            f"{self.name} knows no machine {name} any more, so its pod cannot be given back: put it back into the "
            "inventory, or end its processes yourself and then run `diloco pods forget`."
        )

    async def _asked(self, host: Host) -> Sequence[Pod]:
        """The pods on this host. Raises ProviderError if it does not answer soon: listings should not wait for it."""
        try:
            return await asyncio.wait_for(self._pods_on(host), _ANSWER_TIMEOUT_S)
        except (MachineError, TimeoutError) as error:
            why = str(error) or f"nothing within {_ANSWER_TIMEOUT_S:g} s"
            raise ProviderError(f"{host.name} does not answer, so its pods are unknown: {why}") from error

    async def _pods_on(self, host: Host) -> Sequence[Pod]:
        machine = await self.connect(host)
        text = (await machine.run(_LIST_SCRIPT)).checked(f"listing the pods on {host.name}")
        records = [decoded(line, _Record) for line in text.splitlines() if line]
        # A pod that is left out would count as gone.
        if None in records:
            raise MachineError(f"{host.name} lists a pod that cannot be read; see {PODS}/*/pod.json there")
        return [_pod(record, host) for record in records if record is not None]

    async def free_places(self, host: Host) -> int:
        return self.pods_per_host - len(await self._pods_on(host))


class _Record(msgspec.Struct, frozen=True):
    """What pod.json of a pod says."""

    label: str
    failure: str = ""
    gpu_count: Count | None = None
    price: float | None = None
    ports: Sequence[Annotated[int, msgspec.Meta(ge=1, le=65535)]] = ()


def _pod(record: _Record, host: Host) -> Pod:
    return Pod(
        id=f"{host.name}/{record.label}",
        label=record.label,
        is_ready=not record.failure,
        failure=record.failure,
        gpu_count=record.gpu_count,
        price_per_hour=record.price,
        host=host.reached_at,
        ssh_port=host.port,
        user=host.user,
        ports=tuple((port, port) for port in record.ports),
    )


def _create_script(label: str, record: str, num_pods: int) -> str:
    directory = shlex.quote(pod_directory(label))
    # The lock keeps two people from taking the last place; the rename makes the creation atomic.
    return f"""
umask 077
(
flock 9 || exit 9
[ -f {directory}/pod.json ] && exit 0
others=$(ls {PODS} 2>/dev/null)
if [ "$(echo "$others" | grep -c .)" -ge {num_pods} ]; then echo $others; exit {_FULL}; fi
mkdir -p {directory} && printf '%s\\n' {shlex.quote(record)} >{directory}/.new &&
mv {directory}/.new {directory}/pod.json || exit 9
) 9>.{PODS}.lock
"""


# After a crash, a directory without pod.json is still listed as a pod, so that it can be removed.
_LIST_SCRIPT = f"""
for directory in {PODS}/*/; do
  [ -d "$directory" ] || continue
  cat "$directory/pod.json" 2>/dev/null ||
    printf '{{"label": "%s", "failure": "exists only in part"}}\\n' "$(basename "$directory")"
done
"""
