"""One peer's place in the swarm: its world rank, what it announces about itself, and its view of the other peers.

Other peers are found through their announcements in the DHT. From then on the mesh says whether they live, so that a
slow or missing DHT makes no peer look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

from peers.admission.ranks import request_rank
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.channels import Reached
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.net.mesh import Mesh
from peers.protocol.records import (
    MAX_MADDRS,
    NO_RANK,
    PEERS_KEY,
    TRAINING_STATES,
    Announcement,
    View,
)
from peers.tasks import is_set_within
from peers.timing import (
    ANSWER_S,
    CLOCK_TOLERANCE_S,
    EARLY_INTERVAL_S,
    OFTEN_S,
    RECORD_TTL_S,
    announce_interval_s,
    look_interval_s,
    rest_s,
)

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 2 * OFTEN_S
"""How long leaving may take: the user may be waiting for this process to end."""
COORDINATOR_TIMEOUT_S = ANSWER_S
"""How long a peer looks for a coordinator if it needs a rank from it."""
COORDINATOR_GLANCE_S = 2 * OFTEN_S
"""How long a peer that already has a rank looks for a coordinator. Its ledger should contain the rank, but need not."""


class Presence:
    """Used from one event loop. `describe` returns the current announcement; `on_change` is called on each new view."""

    def __init__(
        self,
        *,
        run_id: str,
        identity: Identity,
        dht: Dht,
        mesh: Mesh,
        galaxy_size: int | None,
        describe: Callable[[], Announcement],
        on_change: Callable[[], None],
        gate: Gate,
    ) -> None:
        self._gate, self.mesh = gate, mesh
        self.me = identity.peer_id
        self._run_id, self._identity, self._dht = run_id, identity, dht
        self._describe, self._on_change = describe, on_change
        self._galaxy_size = galaxy_size
        self._changed = asyncio.Event()
        self._announce_now = asyncio.Event()
        self._announced: tuple[object, ...] = ()
        self.world_rank = NO_RANK
        """The rank that the user or the coordinator gave; NO_RANK where this peer is to claim one."""
        self.on_clock: Callable[[str], None] = lambda _text: None
        """Called with what is wrong when this machine's clock has gone wrong, with an empty text when it is right."""
        self._is_clock_off = False
        self.maddrs: tuple[str, ...] = ()
        """Where others reach this peer; none before it has entered."""

    @property
    def galaxy_size(self) -> int:
        """How many peers the run starts with: by the flag, else by the coordinator, else one."""
        return self._galaxy_size or 1

    @property
    def view(self) -> View:
        """All live peers by peer id, this one included."""
        return {peer.peer_id: peer for peer in (*self.mesh.peers, self._describe())}

    async def enter(self, wanted_rank: int | None) -> None:
        """Obtain the world rank, and connect to the peers that are announced before deciding that others are absent.

        Raises UserError when this peer is refused, PeerUnreachable when there is nobody to join, perhaps for a while.
        """
        self.world_rank = await self._obtain_rank(wanted_rank)
        await self.mesh.start()
        # Announce first, then look: of two peers that come at the same time, one then sees the other.
        await self._announce()
        # From now on, a peer that is given these addresses reaches this one.
        log.info("listening on %s", " ".join(self.maddrs))
        await self._meet(await self._records())
        self._settle_rank()

    def _settle_rank(self) -> None:
        """Give up a rank that another live peer claims, perhaps falsely: the roster decides."""
        other = next((peer for peer in self.mesh.peers if peer.world_rank == self.world_rank), None)
        if other is None or self.world_rank == NO_RANK:
            return
        log.warning(
            "the peer %s also claims world rank %d: the swarm decides which rank this peer has",
            other.peer_id,
            self.world_rank,
        )
        self.world_rank = NO_RANK

    async def _meet(self, records: Mapping[str, Announcement]) -> None:
        """Connect to all peers that are announced. Raises UserError if they refuse this one, PeerUnreachable.

        Looks again while no peer is reached and one may still answer: otherwise a peer that has not yet found the
        others would begin a run of its own.
        """
        deadline, gone = time.monotonic() + RECORD_TTL_S, {self._identity.peer_id}
        while True:
            others = [record for peer_id, record in records.items() if peer_id not in gone]
            reached = await self._reach(others)
            gone |= {peer_id for peer_id, how in reached.items() if how == "gone"}
            silent = [record for record in others if reached.get(record.peer_id) == "silent"]
            if (why := self.mesh.turned_away) is not None:
                raise UserError(why.advice(self._identity.peer_id))
            is_other_version = not records and self._gate.other_version is not None
            if self.mesh.peers or not (silent or self._dht.silent_initial_peers or is_other_version):
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(EARLY_INTERVAL_S)
            records = await self._records()
        if is_other_version:
            self._check_version()
        # The record of a peer that has died meanwhile is not renewed.
        renewed = [record for record in silent if record.time > time.time() - RECORD_TTL_S / 2]
        if renewed:
            names = ", ".join(f"{record.peer_id} at {' '.join(record.maddrs)}" for record in renewed[:3])
            raise PeerUnreachable(
                f"none of the run's announced peers answers this machine: {names}. Is this machine's way to them open "
                "(firewall, VPN, --hv.announce-maddrs)?"
            )
        if not self._dht.is_answered:
            names = ", ".join(sorted(self._dht.silent_initial_peers))
            raise PeerUnreachable(
                f"the initial peers {names} are connected, but sent no list of peers within {RECORD_TTL_S:g} s. Are "
                "they running well? Otherwise give other --initial-peers"
            )

    async def _reach(self, others: Sequence[Announcement]) -> dict[str, Reached]:
        """Call these peers; by peer id, what came of it. Of many only the neighbours are called, who pass on what all
        say; the rest if no neighbour is here, as anybody can put records of peers that do not exist into the DHT."""
        near = self.mesh.neighbours_among([record.peer_id for record in others])
        reached: dict[str, Reached] = {}
        for is_near in (True, False):
            called = [record for record in others if (record.peer_id in near) is is_near]
            if called and "here" not in reached.values():
                hows = await asyncio.gather(*(self.mesh.reach(record) for record in called))
                reached |= {record.peer_id: how for record, how in zip(called, hows, strict=True)}
        return reached

    async def announce_forever(self) -> None:
        """Renew this peer's announcement, and look for other peers. `enter` has announced it first."""
        clock = asyncio.get_running_loop().time
        announced_at = clock()
        while True:
            num_peers = len(self.view)
            # Other peers must hear of this one before they claim a world rank.
            is_early = self._describe().world_rank == NO_RANK
            least_s, usual_s = rest_s(num_peers), announce_interval_s(num_peers, is_early=is_early)
            await asyncio.sleep(least_s)
            await is_set_within(self._announce_now, usual_s - least_s)
            self._announce_now.clear()
            if not await self._announce():
                log.debug("the DHT did not take this peer's record")
            passed_s, announced_at = clock() - announced_at, clock()
            if random.random() * look_interval_s(num_peers, is_early=is_early) < passed_s:
                records, ahead_s = await asyncio.gather(self._records(), self._dht.clock_ahead_s())
                self.mesh.discovered(records)
                self._judge_clock(ahead_s)
            for peer in self.mesh.neighbours:
                self._dht.remember(peer.peer_id, peer.maddrs)

    def _judge_clock(self, ahead_s: float | None) -> None:
        """`ahead_s`: of the initial peers, which the user has named; others could say anything."""
        if ahead_s is None or (abs(ahead_s) > CLOCK_TOLERANCE_S) is self._is_clock_off:
            return
        self._is_clock_off = not self._is_clock_off
        off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        refused = "" if self.mesh.peers else ", so other peers may refuse what this one announces"
        self.on_clock(
            f"this machine's clock is {off} the initial peers'{refused}: set right the one that is wrong "
            "(`timedatectl set-ntp true`)"
            if self._is_clock_off
            else ""
        )

    def publish(self) -> None:
        """Must be called when what `describe` returns has changed.

        A change of identity goes to the mesh at once and to the DHT soon, progress with the next heartbeat.
        """
        if self._announced != _identity_in(self._describe()):
            self.mesh.broadcast_status()
            self._announce_now.set()
        self.view_changed()

    async def wait_for_change(self) -> None:
        """Wait until the view changes, at most for OFTEN_S."""
        self._changed.clear()
        await is_set_within(self._changed, OFTEN_S)

    async def leave(self) -> None:
        """Tell the others that this peer leaves, so that they do not wait for it. `describe` must say "leaving"."""
        self.mesh.broadcast_status()
        with contextlib.suppress(TimeoutError, PeersError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._announce()

    async def _obtain_rank(self, wanted: int | None) -> int:
        grant = await request_rank(
            self._dht,
            self._run_id,
            wanted,
            timeout_s=COORDINATOR_TIMEOUT_S if wanted is None else COORDINATOR_GLANCE_S,
            gate=self._gate,
            token=self._describe().token,
        )
        if grant is not None:
            self._galaxy_size = self._galaxy_size or grant.galaxy_size
            return grant.world_rank
        # A user who has mistyped the run's name should not train alone.
        if wanted is None and self.galaxy_size == 1 and not (await self._records()).keys() - {self.me}:
            self._check_version()
            raise PeerUnreachable(
                f"no coordinator answers, and no peer of the run {self._run_id} is found: is the --run-id right? Start "
                f"a coordinator with `diloco dht start --run-id {self._run_id}` and give its address to "
                "--initial-peers, or begin the run with --world-rank 0"
            )
        return NO_RANK if wanted is None else wanted

    def _check_version(self) -> None:
        """To be called where no peer of the run is found. Raises UserError if some are there, of another version: this
        peer would begin a run of its own beside theirs."""
        if self._gate.other_version is not None:
            raise UserError(str(self._gate.other_version))

    async def _records(self) -> dict[str, Announcement]:
        """The announcements of peers that are not leaving, by peer id."""
        found = await announced(
            self._dht, PEERS_KEY(self._run_id), Announcement, self._run_id, self._gate.check_record
        )
        return {peer_id: record for peer_id, record in found.items() if record.state != "leaving"}

    async def _announce(self) -> bool:
        """Store this peer's announcement in the DHT. Returns whether any node took it."""
        # Addresses may change: a router or a DHCP server gives another one.
        self.maddrs = tuple((await self._dht.maddrs())[:MAX_MADDRS]) or self.maddrs
        status = self._describe()
        self._announced = _identity_in(status)
        blob = status.encode(self._identity)
        return await self._dht.store(PEERS_KEY(self._run_id), self.me, blob, ttl_s=RECORD_TTL_S)

    def view_changed(self) -> None:
        """Must be called when the mesh has changed."""
        self._changed.set()
        self._on_change()


def _identity_in(status: Announcement) -> tuple[object, ...]:
    """The part of an announcement by which other peers and observers decide: only a peer that has trained can be lost.

    Progress is not in it, since the cores send it to one another.
    """
    return status.world_rank, status.manifest_digest, status.state in TRAINING_STATES
