"""Agrees with the swarm on the run's manifest: a peer publishes its own, adopts another's, or has to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping

from peers.core import joining
from peers.daemon.config import codec_of
from peers.daemon.presence import Presence
from peers.errors import ProtocolError, UserError
from peers.protocol.mesh import OWN_WORKER, WORKER, Manifest, Scalar, WantManifest
from peers.protocol.records import Announcement
from peers.reduce.codecs import codec_named
from peers.timing import PROBE_S

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = PROBE_S
MAX_FAILURES = 3
"""A peer that announces a manifest and fails to send it this many times is not asked again."""
_THEY_TRAIN_THEIR_OWN = (
    "The swarm trains with a program of its own, this peer with diloco's trainer, and their tensors differ: give the "
    "--worker that the other peers have, or begin another run with --run-id."
)
_WE_TRAIN_OUR_OWN = (
    "The swarm trains with diloco's trainer, this peer with a program of its own, and their tensors differ: leave out "
    "--worker, or begin another run with --run-id."
)


class Agreement:
    """This peer's copy of the manifest, which is empty until the swarm has agreed on one."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._failures: Counter[str] = Counter()
        self._awaited: dict[str, asyncio.Future[dict[str, Scalar]]] = {}
        self.manifest: dict[str, Scalar] = {}
        self.digest = ""
        self.is_own = False
        """Whether the manifest is this peer's own proposal: no other peer had one."""

    async def reach(
        self, proposal: Mapping[str, Scalar], named: Collection[str], *, deadline: float
    ) -> dict[str, Scalar]:
        """The swarm's manifest, or this peer's own proposal if it is the peer that publishes one.

        No more founders are waited for after `deadline`, by time.monotonic; those that are there then have a while to
        publish theirs (`joining.manifest_source`). Raises UserError where the swarm's manifest contradicts a setting
        that the user has named.
        """
        presence, theirs = self._presence, None
        # Peers that are there now have yet to say what they propose.
        deadline = max(deadline, time.monotonic())
        while theirs is None:
            source = joining.manifest_source(
                {p: peer for p, peer in presence.view.items() if self._failures[p] < MAX_FAILURES},
                me=presence.me,
                galaxy_size=presence.galaxy_size,
                late_s=time.monotonic() - deadline,
            )
            if source == "own":
                self.is_own, theirs = True, dict(proposal)
            elif source is not None:
                theirs = await self._fetch(source)
                if theirs is None:
                    self._failures[source.peer_id] += 1
                elif wrong := joining.misfits(proposal, theirs):
                    log.warning(
                        "ignored the manifest of peer %d: %s", source.world_rank, ", ".join(wrong)[:200]
                    )
                    self._failures[source.peer_id], theirs = MAX_FAILURES, None
            else:
                await presence.wait_for_change()
        # Compare with the manifest, which most of the swarm has, not with what one donor says of its state: a donor
        # that lies could stop all other peers.
        here, there = proposal.get(WORKER), theirs.get(WORKER)
        if None not in (here, there) and here != there:
            raise UserError(_THEY_TRAIN_THEIR_OWN if there == OWN_WORKER else _WE_TRAIN_OUR_OWN)
        check_settings(proposal, theirs, named)
        if self.is_own:
            log.info("nobody has begun this run: it begins with the settings of this peer")
        self.manifest = {**proposal, **theirs}
        self.digest = joining.manifest_digest(theirs)
        presence.publish()
        return self.manifest

    def received(self, sender: Announcement, message: Manifest | WantManifest) -> None:
        """Answer a request for the manifest, or take one. Raises ProtocolError."""
        if isinstance(message, WantManifest):
            if self.manifest:
                self._presence.mesh.send_to(sender.peer_id, Manifest(fields=self.manifest))
            return
        check_manifest(message.fields)
        awaited = self._awaited.get(joining.manifest_digest(message.fields))
        if awaited is not None and not awaited.done():
            awaited.set_result(message.fields)

    async def _fetch(self, peer: Announcement) -> dict[str, Scalar] | None:
        """Ask this peer for the manifest that it announces. None if it does not arrive in time."""
        awaited = self._awaited[peer.manifest_digest] = asyncio.get_running_loop().create_future()
        self._presence.mesh.send_to(peer.peer_id, WantManifest())
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await awaited
        except TimeoutError:
            return None
        finally:
            del self._awaited[peer.manifest_digest]


def check_manifest(manifest: Mapping[str, Scalar]) -> None:
    """Raises ProtocolError unless this peer can run by another peer's manifest."""
    try:
        joining.check_manifest(manifest)
        codec_named(codec_of(manifest))
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def check_settings(
    proposal: Mapping[str, Scalar], theirs: Mapping[str, Scalar], named: Collection[str]
) -> None:
    """Raises UserError where the swarm's manifest contradicts a setting that the user has named."""
    if unlike := joining.manifest_differences(proposal, theirs, named):
        raise UserError(
            "these settings differ from the swarm's:\n"
            + "\n".join(f"  {line}" for line in unlike)
            + "\nLeave them out to take over the swarm's, or begin another run with --run-id."
        )
