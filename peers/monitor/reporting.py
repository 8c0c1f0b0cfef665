"""What a daemon reports to observers: its journal, and the current state of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from peers.monitor.journal import Journal, printable, shown_failures, shown_ranks
from peers.monitor.observations import Observations
from peers.monitor.summary import summary_of
from peers.net.identity import Identity
from peers.protocol.certificates import Certificate
from peers.protocol.records import Announcement
from peers.protocol.reports import (
    MAX_CERTIFICATE_BYTES,
    MAX_HARDWARE_CHARACTERS,
    MAX_SEEN,
    PARTS,
    Certified,
    Figures,
    Parts,
    Phase,
    Report,
    RolloutSender,
    RoundEntry,
    Standing,
)
from peers.state.handover import EpochOutcome


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a peer knows of the run, once it has agreed on it."""

    steps_per_epoch: int = 0
    end_step: int = 0
    step_s: float = 0.0
    compression: str = ""
    overlaps: bool = False


class Reporting:
    """Reads a daemon's parts, from its event loop. `describe` gives its announcement, `met` those of the peers that it
    has live channels with.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        hardware: str,
        identity: Identity,
        describe: Callable[[], Announcement],
        met: Callable[[], Iterable[Announcement]],
        standing: Callable[[], Standing],
        phase: Callable[[], Phase],
        run: Callable[[], RunFigures],
        link_bytes_per_s: Callable[[], float],
        forwarded_bytes: Callable[[], int],
        certificate: Callable[[], Certificate | None],
        rollout_peers: Callable[[], tuple[RolloutSender, ...]] = tuple,
    ) -> None:
        self._journal = journal
        self._hardware = printable(hardware)[:MAX_HARDWARE_CHARACTERS]
        self._identity, self._describe = identity, describe
        self._met, self._standing, self._phase = met, standing, phase
        self._run, self._link_bytes_per_s = run, link_bytes_per_s
        self._forwarded_bytes, self._certificate = forwarded_bytes, certificate
        self._rollout_peers = rollout_peers
        self._certified: Certified | None = None

    def figures(self) -> Figures:
        journal = self._journal
        return Figures(
            loss=journal.loss,
            hardware=self._hardware,
            **asdict(self._run()),
            num_rounds=journal.num_rounds,
            num_failures=journal.num_failures,
            num_worker_losses=journal.num_worker_losses,
            sent_bytes=journal.sent_bytes,
            received_bytes=journal.received_bytes,
            forwarded_bytes=self._forwarded_bytes(),
            upload_bytes_per_s=journal.upload_bytes_per_s,
            download_bytes_per_s=journal.download_bytes_per_s,
            link_bytes_per_s=self._link_bytes_per_s(),
        )

    def report(self, since: float) -> Report:
        """A report, with the entries after `since` (Unix time)."""
        journal, certified = self._journal, self._newest_certified()
        return Report(
            status=self._describe().encode(self._identity),
            figures=self.figures(),
            standing=self._standing(),
            sees={peer.peer_id: peer.time for peer in list(self._met())[:MAX_SEEN]},
            points=tuple(journal.curve.since(since)),
            rounds=tuple(entry for entry in journal.rounds if entry.time > since),
            incidents=tuple(incident for incident in journal.incidents if incident.time > since),
            certified=certified if certified is not None and certified.time > since else None,
            phase=self._phase(),
            evaluations=tuple(one for one in journal.evaluations if one.time > since),
            troubles=tuple(journal.troubles.values()),
            rollout_peers=self._rollout_peers(),
        )

    def _newest_certified(self) -> Certified | None:
        certificate, known = self._certificate(), self._certified
        if certificate is None or certificate.num_bytes > MAX_CERTIFICATE_BYTES:
            return None
        if known is None or known.certificate.head != certificate.head:
            self._certified = Certified(time=time.time(), certificate=certificate)
        return self._certified

    def as_swarm(self) -> dict[str, Any]:
        """The swarm as this peer sees it, in the form of peers/monitor/summary.py, with figures of itself only."""
        observations, own, now = Observations(), self._describe(), time.monotonic()
        for peer in self._met():
            observations.announced(peer, now)
        observations.reported(own, self.report(0.0), now)
        return summary_of(own.run_id, observations, now=now, unix_now=time.time())


def entry_of(outcome: EpochOutcome) -> RoundEntry:
    """What the journal keeps of an epoch that ends now."""
    return RoundEntry(
        time=time.time(),
        epoch=outcome.epoch,
        fragment=outcome.fragment,
        anchor_digest=outcome.anchor_digest,
        contributors=shown_ranks(outcome.contributors),
        sent_bytes=outcome.sent_bytes,
        received_bytes=outcome.received_bytes,
        num_failures=outcome.num_failures,
        failures=shown_failures(outcome.failures),
        parts=Parts(**{part: getattr(outcome, part) for part in PARTS}),
        round_s=outcome.round_s,
    )
