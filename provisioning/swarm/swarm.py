"""Starts a swarm on pods that are set up: the DHT with the coordinator on one pod, a peer on each."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from provisioning.errors import MachineError
from provisioning.ledger.keys import DHT_POD, FLAGS
from provisioning.ledger.ledger import Ledger
from provisioning.machines import jobs
from provisioning.machines.keys import write_private
from provisioning.machines.machine import MAX_LOG_BYTES, Machine
from provisioning.machines.paths import JOBS, PEER_RUN, SWARM_SECRET, pod_directory
from provisioning.machines.setup import Setup, put_private
from provisioning.pods.pod import Row, State
from provisioning.renting.each import Failures, each
from provisioning.renting.renter import Say
from provisioning.renting.renters import Renters
from provisioning.swarm.commands import (
    ADDRESS_FLAG,
    DHT_JOB,
    PEER_JOB,
    address_in,
    coordinator_file,
    dht_argv,
    peer_argv,
)
from provisioning.swarm.peer import PeerNews, PeerProgress, end_of, read_progress

_DHT_TIMEOUT_S = 120.0
_POLL_S = 1.0
_MAX_FAILED_POLLS = 5


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """The settings of a swarm."""

    run_id: str = "diloco"
    flags: Sequence[str] = ()
    """The user's flags for all peers."""
    epoch_timeout_s: float = 3600.0
    """Time limit until all peers are in epoch 1."""


class Swarm:
    """Starts processes that do not run yet. Starting again leaves running ones alone."""

    def __init__(self, renters: Renters, options: SwarmOptions, setup: Setup) -> None:
        self._renters, self._options, self._setup = renters, options, setup
        self._ledger: Ledger = renters.ledger
        self._say: Say = renters.say
        self._dht_address, self._secret = "", b""

    async def start(self) -> Failures:
        """Start the swarm, and wait until all peers are in epoch 1 or have finished. Returns the errors by pod."""
        failures, rows = await self._started()
        return failures | await self._until_in_epoch_one(rows)

    async def start_jobs(self) -> Failures:
        """Start the swarm, without waiting for an epoch. Returns the errors by pod."""
        failures, _ = await self._started()
        return failures

    async def _started(self) -> tuple[Failures, list[Row]]:
        """Start what does not run. Returns the errors by pod, and the pods whose peers run or have finished."""
        set_up = self._set_up()
        progress_of: dict[str, PeerProgress] = {}

        async def read(row: Row) -> None:
            progress_of[row.name] = await self.progress(row)

        failures = await each(set_up, read, self._say)
        if self._ledger.recall(DHT_POD) in failures.keys() | self._deleting():
            # The coordinator on that pod may still run, and a second one would assign the same ranks.
            return failures, []
        rows = [row for row in set_up if row.name in progress_of]
        running = [row for row in rows if progress_of[row.name].job.is_running]
        missing = [row for row in rows if row not in running and not progress_of[row.name].has_finished]
        # The code, a mount or a secret may have been the reason why a peer or the DHT failed, and have been changed.
        old = [row for row in missing if row.label not in self._renters.set_up_here]
        failures |= await each(old, lambda row: self._renters.set_up_one(row, self._setup), self._say)
        missing = [row for row in missing if row.name not in failures]
        # Before new peers start, since the swarm would refuse peers with other settings.
        for row in rows:
            if row not in missing:
                self._tell_other_flags(row)
        if missing or running:
            # Also if all peers run: they can train without a coordinator, but no new peer could join.
            failures |= await each([self._dht_row(rows)], lambda row: self._join_dht(row, running), self._say)
            if not self._dht_address:
                return failures, []
            failures |= await each(missing, lambda row: self._start_peer(row, len(set_up)), self._say)
        under_way = [row for row in rows if row.name not in failures]
        for row in under_way:
            if row.state == State.SYNCED:
                self._ledger.advance(row, State.RUNNING)
        return failures, under_way

    async def unreachable_coordinator(self) -> str:
        """The name of the coordinator's pod if it neither answers nor is gone: `start` would start nothing. Else ""."""
        name = self._ledger.recall(DHT_POD)
        failures = await each([row for row in self._set_up() if row.name == name], self.progress)
        return name if name in failures.keys() | self._deleting() else ""

    async def progress(self, row: Row) -> PeerProgress:
        """The progress of this pod's peer. Raises MachineError."""
        machine = await self._renters[row.provider].machine(row)
        return await read_progress(machine, row.label)

    def _set_up(self) -> list[Row]:
        return [row for row in self._renters.rows if row.state in (State.SYNCED, State.RUNNING)]

    def _deleting(self) -> set[str]:
        return {row.name for row in self._renters.rows if row.state == State.DELETING and row.provider_id}

    def _dht_row(self, rows: Sequence[Row]) -> Row:
        known = self._ledger.recall(DHT_POD)
        return next((row for row in rows if row.name == known), rows[0])

    async def _join_dht(self, row: Row, running: Sequence[Row]) -> None:
        """Start the DHT on this pod unless it runs, and read its address and the swarm secret."""
        renter = self._renters[row.provider]
        machine, pod = await renter.reached(row)
        run_id, directory = self._options.run_id, pod_directory(row.label)
        key_path = admission_key_path(self._ledger.path, run_id)
        remote_key = f"{directory}/{coordinator_file(run_id, 'admission-key')}"
        if key_path.exists():
            # With the same key, a coordinator on another pod admits the same peers.
            await machine.run(f"mkdir -p {shlex.quote(remote_key.rpartition('/')[0])}")
            await put_private(machine, remote_key, key_path.read_bytes())
        argv = dht_argv(self._setup.pod_python, pod, run_id=run_id, listens_on=renter.provider.listens_on)
        others = [other for other in running if other.name != row.name]
        if others and not (await jobs.state(machine, row.label, DHT_JOB)).is_running:
            argv += await self._member_address(others[0])
        if await jobs.start(machine, row.label, DHT_JOB, argv):
            self._say(row.name, "starting the DHT")
        address = await self._printed_address(machine, row)

        async def read(path: str) -> bytes:
            answer = await machine.run(f"cat {shlex.quote(path)}")
            return answer.checked(f"reading {path}").encode()

        if not key_path.exists():
            write_private(key_path, await read(remote_key))
        self._secret = await read(f"{directory}/{coordinator_file(run_id, 'swarm-secret')}")
        self._ledger.remember(DHT_POD, row.name)
        self._dht_address = address

    async def _printed_address(self, machine: Machine, row: Row) -> str:
        deadline = time.monotonic() + _DHT_TIMEOUT_S
        log = shlex.quote(f"{pod_directory(row.label)}/{JOBS}/{DHT_JOB}/log")
        # The log may be long: earlier runs have written to it, too.
        script = f"grep -e {shlex.quote(f'^{ADDRESS_FLAG}')} {log} | tail -n 1; tail -c {MAX_LOG_BYTES} {log}"
        while time.monotonic() < deadline:
            state = await jobs.state(machine, row.label, DHT_JOB)
            text = (await machine.run(script)).stdout
            if not state.is_running:
                raise MachineError(f"`diloco dht start` ended on {row.name} ({state.code}): {end_of(text)}")
            if address := address_in(text):
                return address
            await asyncio.sleep(_POLL_S / 4)
        raise MachineError(f"`diloco dht start` gave no address on {row.name} within {_DHT_TIMEOUT_S:g} s")

    async def _member_address(self, row: Row) -> list[str]:
        """The flag for joining the DHT through this pod's peer; empty if the peer's id is unknown."""
        machine, pod = await self._renters[row.provider].reached(row)
        log = f"{pod_directory(row.label)}/{PEER_RUN}/logs/daemon.log"
        answer = await machine.run(f"grep -o 'starting as [A-Za-z0-9]*' {shlex.quote(log)} | tail -n 1")
        peer_id = answer.stdout.strip().removeprefix("starting as ")
        return ["--initial-peers", f"/ip4/{pod.host}/tcp/{pod.ports[1][1]}/p2p/{peer_id}"] if peer_id else []

    async def _start_peer(self, row: Row, num_peers: int) -> None:
        renter = self._renters[row.provider]
        machine, pod = await renter.reached(row)
        await put_private(machine, f"{pod_directory(row.label)}/{SWARM_SECRET}", self._secret)
        provider = renter.provider
        argv = peer_argv(
            self._setup.pod_python,
            pod,
            run_id=self._options.run_id,
            listens_on=provider.listens_on,
            address=self._dht_address,
            num_peers=num_peers,
            num_peers_here=self._num_peers_with(row),
            flags=[*provider.swarm_flags(row.offer), *self._options.flags],
        )
        if await jobs.start(machine, row.label, PEER_JOB, argv):
            self._ledger.remember(FLAGS + row.label, json.dumps(list(self._options.flags)))
            self._say(row.name, "starting its peer")

    def _tell_other_flags(self, row: Row) -> None:
        """Print a message if this running peer was started with other flags than the present ones."""
        known = self._ledger.recall(FLAGS + row.label)
        flags = json.loads(known) if known else list(self._options.flags)
        if flags != list(self._options.flags):
            self._say(
                row.name,
                f"its peer keeps the flags that it was started with: {shlex.join(flags) or 'none'}. To train with "
                "other flags, run `diloco pods down` first, or rent other pods with another --state-file",
            )

    def _num_peers_with(self, row: Row) -> int:
        """Number of peers on this pod's machine."""
        host = row.offer.details.get("host")
        return sum(host == other.offer.details.get("host") for other in self._renters.rows) if host else 1

    async def _until_in_epoch_one(self, rows: Sequence[Row]) -> Failures:
        """Wait until all peers are in epoch 1, or one fails. Returns the errors by pod."""
        began_at = time.monotonic()
        deadline = began_at + self._options.epoch_timeout_s
        has_failed = False

        async def watch(row: Row) -> None:
            nonlocal has_failed
            failed_polls, news = 0, PeerNews(began_at)
            while not has_failed:
                try:
                    progress = await self.progress(row)
                    failed_polls = 0
                except MachineError:
                    # A lost connection does not mean that the pod is dead.
                    failed_polls += 1
                    if failed_polls > _MAX_FAILED_POLLS:
                        has_failed = True
                        raise
                    await asyncio.sleep(_POLL_S)
                    continue
                if text := news.of(progress, time.monotonic()):
                    self._say(row.name, text)
                if progress.epoch >= 1 or progress.has_finished:
                    return
                if trouble := self._trouble(row, progress, is_late=time.monotonic() > deadline):
                    has_failed = True
                    raise trouble
                await asyncio.sleep(_POLL_S)
            self._say(row.name, "is not in epoch 1 yet; its peer goes on")

        return await each(rows, watch, self._say)

    def _trouble(self, row: Row, progress: PeerProgress, *, is_late: bool) -> MachineError | None:
        if not progress.job.is_running:
            return MachineError(f"its peer ended ({progress.job.code}): {progress.last_lines}")
        if is_late:
            return MachineError(
                f"its peer was not in epoch 1 within {self._options.epoch_timeout_s:g} s; it goes on. "
                f"`diloco pods logs -f {row.name}` shows what it does: {progress.last_lines}"
            )
        return None


def admission_key_path(state_file: Path, run_id: str) -> Path:
    return state_file.with_name(f"{state_file.name}.{run_id}.admission-key")
