"""What a peer tells those who look on, and the checks it passes before it is shown.

    observer                                        peer      (protocol diloco/<run_id>/report)
    {kind: "hello", version}                   ->
                                               <-  {kind: "nonce", nonce}        only where the run has a swarm secret
    {kind: "proof", proof}                     ->
                                               <-  {kind: "report", version, …}  at once, on news, and every second
                                               <-  {kind: "refused", why} | {kind: "busy"}

The first report holds what the peer remembers, the next ones what has come since. A reader passes over fields that it
does not know, so a later version may add some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from peers import checked_values as checked
from peers.errors import ProtocolError
from peers.identity import verify_signature
from peers.onlookers.journal import (
    MAX_FAILURES,
    MAX_INCIDENTS,
    MAX_POINTS,
    MAX_ROUNDS,
    MAX_SHOWN_RANKS,
    MAX_TEXT,
    PARTS,
    Incident,
    Point,
    RoundEntry,
)
from peers.onlookers.standing import STEPS, Standing
from peers.protocol.certificates import Certificate, decode_certificate
from peers.protocol.records import MAX_RECORD_BYTES
from peers.protocol.wire import encode

VERSION = 1
MAX_SEEN = 512
"""Peers that one peer tells of; a larger swarm is shown by what several tell."""
REPORT_INTERVAL_S = 1.0
MAX_HARDWARE_CHARACTERS = 64
MAX_CERTIFICATE_BYTES = 256 << 10
"""Of some three hundred members; a larger one is not shown."""
_MAX_PEER_ID_CHARACTERS = 100
_MAX_DIGEST_CHARACTERS = 128


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How a peer is doing: for people, decisions rest on none of it."""

    loss: float | None = None
    hardware: str = ""
    """What it trains on: "2 × NVIDIA A100-SXM4-80GB", "CPU, 8 cores"."""
    steps_per_epoch: int = 0
    num_rounds: int = 0
    """Since the peer was started, as are the next five."""
    num_failures: int = 0
    """Attempts at rounds that failed."""
    num_worker_losses: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    forwarded_bytes: int = 0
    upload_bytes_per_s: float = 0.0
    """Of the last reduction; 0 before there is one."""
    download_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    """What its link carries each way at the most, as the shares of rounds go by; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One of a peer's answers. `status` is its signed announcement, for the reader to check as any other."""

    status: bytes
    figures: Figures = field(default_factory=Figures)
    standing: Standing = field(default_factory=Standing)
    sees: Mapping[str, float] = field(default_factory=dict)
    """The peers it has live channels with, and when each last said so, by its own clock."""
    points: tuple[Point, ...] = ()
    rounds: tuple[RoundEntry, ...] = ()
    incidents: tuple[Incident, ...] = ()
    certified: Certified | None = None


@dataclass(frozen=True)
class Certified:
    """The certificate of a peer's state, and since when it has had it (Unix time)."""

    time: float
    certificate: Certificate


def to_message(report: Report) -> dict[str, Any]:
    return {
        "kind": "report",
        "version": VERSION,
        "status": report.status,
        "figures": dataclasses.asdict(report.figures),
        "standing": dataclasses.asdict(report.standing),
        "sees": [[peer_id, at] for peer_id, at in list(report.sees.items())[:MAX_SEEN]],
        "points": [[point.time, point.step, point.loss, point.tokens_per_s] for point in report.points],
        "rounds": [dataclasses.asdict(entry) for entry in report.rounds],
        "incidents": [[incident.time, incident.text] for incident in report.incidents],
        "certified": [report.certified.time, encode(report.certified.certificate)]
        if report.certified
        else [],
    }


def parse(message: Mapping[str, Any]) -> Report:
    """What a peer's report says. Raises ProtocolError unless all that is known of it is in order."""
    try:
        if message.get("kind") != "report":
            raise ProtocolError(f"expected a report, got {message.get('kind')!r:.40}")
        status = message["status"]
        if not isinstance(status, bytes) or len(status) > MAX_RECORD_BYTES:
            raise ProtocolError("a report without the status of its peer")
        return Report(
            status=status,
            figures=_figures(checked.fields(message["figures"])),
            standing=_standing(checked.fields(message["standing"])),
            sees={
                checked.text(peer_id, _MAX_PEER_ID_CHARACTERS): checked.amount(at)
                for peer_id, at in checked.items(message["sees"], MAX_SEEN, width=2)
            },
            points=tuple(map(_point, checked.items(message["points"], MAX_POINTS + 1, width=4))),
            rounds=tuple(
                _round(checked.fields(entry)) for entry in checked.items(message["rounds"], MAX_ROUNDS)
            ),
            incidents=tuple(
                Incident(time=checked.amount(at), text=checked.text(text, MAX_TEXT))
                for at, text in checked.items(message["incidents"], MAX_INCIDENTS, width=2)
            ),
            certified=_certified(message.get("certified", [])),
        )
    except KeyError as error:
        raise ProtocolError(f"a report without {error}") from error


def _certified(value: Any) -> Certified | None:
    """Raises ProtocolError also for one that its signers have not signed: an observer shows what is proved."""
    if value == []:
        return None
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], bytes):
        raise ProtocolError("a report whose certificate is none")
    at, blob = checked.amount(value[0]), value[1]
    if len(blob) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"a certificate of {len(blob)} bytes in a report")
    return Certified(at, _proved(blob))


@lru_cache(maxsize=64)
def _proved(blob: bytes) -> Certificate:
    """All peers show the same one; it is checked once."""
    certificate = decode_certificate(blob)
    if not certificate.is_signed(verify_signature):
        raise ProtocolError("a certificate that its signers have not signed")
    return certificate


def _figures(m: Mapping[str, Any]) -> Figures:
    counts = ("steps_per_epoch", "num_rounds", "num_failures", "num_worker_losses")
    sizes = ("sent_bytes", "received_bytes", "forwarded_bytes")
    rates = ("upload_bytes_per_s", "download_bytes_per_s", "link_bytes_per_s")
    numbers: dict[str, Any] = {name: checked.count(m[name]) for name in (*counts, *sizes)}
    numbers |= {name: checked.amount(m[name]) for name in rates}
    return Figures(
        loss=_loss(m["loss"]),
        hardware=checked.text(m["hardware"], MAX_HARDWARE_CHARACTERS),
        **numbers,
    )


def _standing(m: Mapping[str, Any]) -> Standing:
    step, leader = checked.text(m["step"], MAX_TEXT), m["leader"]
    return Standing(
        # What a later version may call a step of its own.
        step=step if step in STEPS else "idle",
        leader=None if leader is None else checked.rank(leader),
        missing=_ranks(m["missing"]),
        waits_for=checked.text(m["waits_for"], MAX_TEXT),
    )


def _point(values: list[Any]) -> Point:
    at, step, loss, tokens_per_s = values
    return Point(
        time=checked.amount(at),
        step=checked.count(step),
        loss=_loss(loss),
        tokens_per_s=checked.amount(tokens_per_s),
    )


def _round(m: Mapping[str, Any]) -> RoundEntry:
    parts = checked.fields(m["parts"])
    return RoundEntry(
        time=checked.amount(m["time"]),
        anchor_digest=checked.text(m["anchor_digest"], _MAX_DIGEST_CHARACTERS),
        contributors=_ranks(m["contributors"]),
        failures=tuple(
            checked.text(reason, MAX_TEXT) for reason in checked.items(m["failures"], MAX_FAILURES)
        ),
        parts={name: checked.amount(parts[name]) for name in PARTS if name in parts},
        round_s=checked.amount(m["round_s"]),
        **{
            name: checked.count(m[name])
            for name in ("epoch", "fragment", "sent_bytes", "received_bytes", "num_failures")
        },
    )


def _loss(value: Any) -> float | None:
    return None if value is None else checked.real(value)


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(checked.rank(rank) for rank in checked.items(value, MAX_SHOWN_RANKS))
