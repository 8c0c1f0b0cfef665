"""A swarm on pods that have been set up: a DHT and coordinator on one of them, a peer on each."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from provisioning.errors import MachineError, ProvisioningError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.machines import jobs
from provisioning.machines.keys import write_private
from provisioning.machines.machine import Machine
from provisioning.machines.paths import JOBS, PEER_RUN, SWARM_SECRET, pod_directory
from provisioning.machines.setup import put_private
from provisioning.renting.renters import Renters
from provisioning.renting.settler import Say
from provisioning.swarm.commands import (
    DHT_JOB,
    PEER_JOB,
    address_in,
    dht_argv,
    peer_argv,
    secret_path,
)
from provisioning.swarm.peer import PeerLook, PeerNews, end_of, look_at_peer

_DHT_TIMEOUT_S = 120.0
_POLL_S = 1.0
_MAX_SILENT_LOOKS = 5
_DHT_POD = "dht_pod"


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """How the swarm is started."""

    run_id: str = "diloco"
    flags: Sequence[str] = ()
    """For every peer."""
    epoch_timeout_s: float = 3600.0
    """How long it may take until all peers are in epoch 1."""


class Swarm:
    """Starts what does not run yet; called again, it changes nothing that works."""

    def __init__(self, renters: Renters, options: SwarmOptions, python_of: Callable[[str], str]) -> None:
        self._renters, self._options, self._python_of = renters, options, python_of
        self._ledger: Ledger = renters.ledger
        self._say: Say = renters.say
        self._dht_address, self._secret = "", b""

    async def start(self) -> dict[str, ProvisioningError]:
        """Until all peers are in epoch 1, or have finished; what went wrong, by pod."""
        wanted = [row for row in self._renters.rows if row.state in (State.SYNCED, State.RUNNING)]
        failures: dict[str, ProvisioningError] = {}
        looks: dict[str, PeerLook] = {}

        async def attempt(row: Row, work: Awaitable[object]) -> None:
            try:
                await work
            except ProvisioningError as error:
                failures[row.name] = error
                self._say(row.name, f"failed: {error}")

        async def look(row: Row) -> None:
            looks[row.name] = await self.look(row)

        await asyncio.gather(*(attempt(row, look(row)) for row in wanted))
        if self._ledger.recall(_DHT_POD) in failures:
            # Its coordinator may live: a second one would give out the same ranks.
            return failures
        rows = [row for row in wanted if row.name in looks]
        missing = [
            row for row in rows if not looks[row.name].job.is_running and not looks[row.name].has_finished
        ]
        if missing or any(looks[row.name].job.is_running for row in rows):
            # Also where all peers run: they train without a coordinator, but nobody could join them by its address.
            await attempt(self._dht_row(rows), self._join_dht(rows, looks))
            if not self._dht_address:
                return failures
            await asyncio.gather(*(attempt(row, self._start_peer(row, len(wanted))) for row in missing))
        for row in rows:
            if row.name not in failures and row.state == State.SYNCED:
                self._ledger.advance(row, State.RUNNING)
        waiting = [row for row in rows if row.name not in failures]
        return failures | await self._until_in_epoch_one(waiting)

    async def look(self, row: Row) -> PeerLook:
        """Raises MachineError."""
        machine = await self._renters.machine(row.name)
        return await look_at_peer(machine, row.label)

    def _dht_row(self, rows: Sequence[Row]) -> Row:
        known = self._ledger.recall(_DHT_POD)
        return next((row for row in rows if row.name == known), rows[0])

    async def _join_dht(self, rows: Sequence[Row], looks: Mapping[str, PeerLook]) -> None:
        """Learn how the DHT can be joined, after starting it where it does not run."""
        row = self._dht_row(rows)
        machine, pod = await self._renters.machine(row.name), await self._renters.pod(row.name)
        key_path = admission_key_path(self._ledger.path, self._options.run_id)
        remote_key = f"{pod_directory(row.label)}/{secret_path(self._options.run_id)}".replace(
            ".swarm-secret", ".admission-key"
        )
        if key_path.exists():
            # A coordinator on another pod than before admits those whom the first one did.
            await machine.run(f"mkdir -p {shlex.quote(remote_key.rpartition('/')[0])}")
            await put_private(machine, remote_key, key_path.read_bytes())
        argv = dht_argv(
            self._python_of(row.name),
            pod,
            run_id=self._options.run_id,
            listens_on=self._renters.of(row).provider.listens_on,
        )
        others = [other for other in rows if other.name != row.name and looks[other.name].job.is_running]
        if others and not (await jobs.state(machine, row.label, DHT_JOB)).is_running:
            argv += await self._member_address(others[0])
        if await jobs.start(machine, row.label, DHT_JOB, argv):
            self._say(row.name, "starting the DHT")
        address = await self._printed_address(machine, row)
        if not key_path.exists():
            text = (await machine.run(f"cat {shlex.quote(remote_key)}")).checked("reading the admission key")
            write_private(key_path, text.encode())
        self._ledger.remember(_DHT_POD, row.name)
        self._secret = (
            (
                await machine.run(
                    f"cat {shlex.quote(f'{pod_directory(row.label)}/{secret_path(self._options.run_id)}')}"
                )
            )
            .checked("reading the swarm secret")
            .encode()
        )
        self._dht_address = address

    async def _printed_address(self, machine: Machine, row: Row) -> str:
        deadline = time.monotonic() + _DHT_TIMEOUT_S
        log = f"{pod_directory(row.label)}/{JOBS}/{DHT_JOB}/log"
        while time.monotonic() < deadline:
            state = await jobs.state(machine, row.label, DHT_JOB)
            text = (await machine.run(f"cat {shlex.quote(log)}")).stdout
            if not state.is_running:
                raise MachineError(f"`diloco dht start` ended on {row.name} ({state.code}): {end_of(text)}")
            if address := address_in(text):
                return address
            await asyncio.sleep(_POLL_S / 4)
        raise MachineError(f"`diloco dht start` gave no address on {row.name} within {_DHT_TIMEOUT_S:g} s")

    async def _member_address(self, row: Row) -> list[str]:
        """How to join the DHT by a peer that is in it."""
        machine, pod = await self._renters.machine(row.name), await self._renters.pod(row.name)
        log = f"{pod_directory(row.label)}/{PEER_RUN}/logs/daemon.log"
        answer = await machine.run(f"grep -o 'starting as [A-Za-z0-9]*' {shlex.quote(log)} | tail -n 1")
        peer_id = answer.stdout.strip().removeprefix("starting as ")
        return ["--initial-peers", f"/ip4/{pod.host}/tcp/{pod.ports[1][1]}/p2p/{peer_id}"] if peer_id else []

    async def _start_peer(self, row: Row, num_peers: int) -> None:
        machine, pod = await self._renters.machine(row.name), await self._renters.pod(row.name)
        await put_private(machine, f"{pod_directory(row.label)}/{SWARM_SECRET}", self._secret)
        provider = self._renters.of(row).provider
        argv = peer_argv(
            self._python_of(row.name),
            pod,
            run_id=self._options.run_id,
            listens_on=provider.listens_on,
            address=self._dht_address,
            num_peers=num_peers,
            num_peers_here=self._num_peers_with(row),
            flags=[*provider.swarm_flags(row.spec, row.offer), *self._options.flags],
        )
        if await jobs.start(machine, row.label, PEER_JOB, argv):
            self._say(row.name, "starting its peer")

    def _num_peers_with(self, row: Row) -> int:
        """Peers on the machine that this pod is on, where it is one that has several."""
        host = row.offer.details.get("host")
        return sum(host == other.offer.details.get("host") for other in self._renters.rows) if host else 1

    async def _until_in_epoch_one(self, rows: Sequence[Row]) -> dict[str, ProvisioningError]:
        """What went wrong, by pod. Once one peer has ended, those that may be waiting for it are left to it."""
        failures: dict[str, ProvisioningError] = {}
        began_at = time.monotonic()
        deadline = began_at + self._options.epoch_timeout_s
        trainings: set[str] = set()

        async def watch(row: Row) -> None:
            silent_looks, news = 0, PeerNews(began_at, trainings)
            while True:
                error: ProvisioningError | None = None
                try:
                    look = await self.look(row)
                    silent_looks = 0
                    for text in news.of(look, time.monotonic()):
                        self._say(row.name, text)
                    if look.epoch >= 1 or look.has_finished:
                        return
                    error = self._trouble(row, look, is_late=time.monotonic() > deadline)
                except MachineError as lost:
                    # One lost connection is no dead pod.
                    silent_looks += 1
                    error = lost if silent_looks > _MAX_SILENT_LOOKS else None
                if error is not None:
                    failures[row.name] = error
                    self._say(row.name, f"failed: {error}")
                    return
                if failures:
                    self._say(row.name, "is not in epoch 1 yet; its peer goes on")
                    return
                await asyncio.sleep(_POLL_S)

        await asyncio.gather(*(watch(row) for row in rows))
        return failures

    def _trouble(self, row: Row, look: PeerLook, *, is_late: bool) -> MachineError | None:
        if not look.job.is_running:
            return MachineError(f"its peer ended ({look.job.code}): {look.last_lines}")
        if is_late:
            return MachineError(
                f"its peer was not in epoch 1 within {self._options.epoch_timeout_s:g} s; it goes on. "
                f"`diloco pods logs -f {row.name}` shows what it does: {look.last_lines}"
            )
        return None


def admission_key_path(state_file: Path, run_id: str) -> Path:
    return state_file.with_name(f"{state_file.name}.{run_id}.admission-key")
