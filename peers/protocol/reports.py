"""What a peer tells those who look on.

    observer                  peer                           protocol diloco/<run_id>/report
    Hello               ->
                        <-    Nonce | Busy                   a nonce only where the run has a swarm secret
    Proof               ->
                        <-    Report... | Refusal            at once, on news, and every second

The first report holds what the peer remembers, the next ones what has come since. A reader passes over fields of a
report that it does not know, so a later version may add some.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from peers.protocol.certificates import Certificate
from peers.protocol.limits import MAX_REAL, Count, HashOrNone, Real, ShownText, WorldRank
from peers.protocol.records import MAX_RECORD_BYTES
from peers.protocol.wire import Struct

VERSION = 1
MAX_POINTS = 256
MAX_ROUNDS = 32
MAX_INCIDENTS = 32
MAX_SHOWN_RANKS = 256
"""Of a larger round, the lowest world ranks are shown."""
MAX_FAILURES = 8
MAX_TEXT = 160
MAX_PHASE_CHARACTERS = 32
MAX_TROUBLES = 8
MAX_HARDWARE_CHARACTERS = 64
MAX_SEEN = 512
"""Peers that one peer tells of; a larger swarm is shown by what several tell."""
MAX_CERTIFICATE_BYTES = 256 << 10
"""Of some three hundred members; a larger one is not shown."""

Step = Literal["joining", "idle", "seeking", "reducing", "voted"]
STEPS = frozenset(get_args(Step))
Text = Annotated[ShownText, Meta(max_length=MAX_TEXT)]
Loss = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)] | None
Ranks = Annotated[tuple[WorldRank, ...], Meta(max_length=MAX_SHOWN_RANKS)]


def report_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/report"


class Hello(Struct, frozen=True, tag="hello"):
    version: Count


class Busy(Struct, frozen=True, tag="busy"):
    """The peer has as many observers as it answers."""


class _Told(Struct, frozen=True, forbid_unknown_fields=False):
    """Part of a report."""


class Point(_Told, frozen=True):
    """How the training went at one moment."""

    time: Real
    step: Count
    """Nominal."""
    loss: Loss
    """None where the worker does not say."""
    tokens_per_s: Real


class Parts(_Told, frozen=True):
    """Seconds of one epoch, in the order in which they come: peers/state/handover.py says what each is.

    Of the last attempt, and of what came before it.
    """

    wait_s: Real = 0.0
    connect_s: Real = 0.0
    reduce_s: Real = 0.0
    preview_s: Real = 0.0
    vote_s: Real = 0.0
    apply_s: Real = 0.0


PARTS = Parts.__struct_fields__


class RoundEntry(_Told, frozen=True):
    """How one epoch ended on one peer."""

    time: Real
    """When its worker had the answer."""
    epoch: Count
    """Outer steps done, this one included."""
    fragment: Count
    anchor_digest: HashOrNone
    contributors: Ranks
    sent_bytes: Count
    received_bytes: Count
    num_failures: Count
    failures: Annotated[tuple[Text, ...], Meta(max_length=MAX_FAILURES)]
    """Why attempts failed, as far as this peer has been told."""
    parts: Parts
    round_s: Real
    """From the group to the commit, failed attempts included."""


class Incident(_Told, frozen=True):
    """Something that people would want to know of."""

    time: Real
    text: Text


class Evaluation(_Told, frozen=True):
    """A score of the weights on held-out text."""

    time: Real
    step: Count
    loss: Loss


class Phase(_Told, frozen=True):
    """What a peer is doing, and how far it is with it. Durations are by its own clock."""

    name: Annotated[ShownText, Meta(max_length=MAX_PHASE_CHARACTERS)] = ""
    """Starting, tokenizing, compiling, waiting for peers, receiving the state, training and so on, by whoever does it;
    empty where the peer does not say."""
    detail: Text = ""
    """Which step of it, or whom it waits for."""
    done: Real = 0.0
    total: Real = 0.0
    """In `unit`; 0: nobody knows."""
    unit: Annotated[ShownText, Meta(max_length=MAX_PHASE_CHARACTERS)] = ""
    left_s: Annotated[float, Meta(ge=0, le=MAX_REAL)] | None = None
    """Seconds until it is done, by the pace so far; None: cannot be told."""
    for_s: Real = 0.0
    """How long it has been in it."""
    idle_s: Real = 0.0
    """How long it has not got any further."""


class Figures(_Told, frozen=True):
    """How a peer is doing: for people, decisions rest on none of it."""

    loss: Loss
    hardware: Annotated[ShownText, Meta(max_length=MAX_HARDWARE_CHARACTERS)]
    """What it trains on: "2 × NVIDIA A100-SXM4-80GB", "CPU, 8 cores"."""
    steps_per_epoch: Count
    num_rounds: Count
    """Since the peer was started, as are the next five."""
    num_failures: Count
    """Attempts at rounds that failed."""
    num_worker_losses: Count
    sent_bytes: Count
    received_bytes: Count
    forwarded_bytes: Count
    upload_bytes_per_s: Real
    """Of the last reduction; 0 before there is one."""
    download_bytes_per_s: Real
    link_bytes_per_s: Real
    """What its link carries each way at the most, as the shares of rounds go by; 0: not known."""
    end_step: Count = 0
    """The nominal step at which training ends; 0: not known."""
    step_s: Real = 0.0
    """Seconds that an inner step takes, of late; 0: not known."""
    compression: Annotated[ShownText, Meta(max_length=MAX_PHASE_CHARACTERS)] = ""
    overlap_steps: Count = 0


class Standing(_Told, frozen=True):
    """What one peer waits for, and for whom."""

    step: Text = "joining"
    """One of STEPS, of the round (peers/core/round.py) or `joining` before there is one, or a later version's."""
    leader: WorldRank | None = None
    """World rank of whom it has told that it is ready; None while its worker trains."""
    missing: Ranks = ()
    """Of a leader: the world ranks that it waits for, to join or to vote."""
    waits_for: Text = ""
    """The same in words; empty while it waits for nothing."""

    @property
    def known_step(self) -> str:
        return self.step if self.step in STEPS else "idle"


class Certified(_Told, frozen=True):
    """The certificate of a peer's state."""

    time: Real
    """Since when the peer has had it, Unix seconds."""
    certificate: Certificate


class Report(_Told, frozen=True, tag="report"):
    """One of a peer's answers."""

    status: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
    """Its signed announcement, for the reader to check as any other."""
    figures: Figures
    standing: Standing
    sees: Annotated[dict[Annotated[ShownText, Meta(max_length=100)], Real], Meta(max_length=MAX_SEEN)]
    """The peers it has live channels with, and when each last said so, by its own clock."""
    points: Annotated[tuple[Point, ...], Meta(max_length=MAX_POINTS + 1)]
    rounds: Annotated[tuple[RoundEntry, ...], Meta(max_length=MAX_ROUNDS)]
    incidents: Annotated[tuple[Incident, ...], Meta(max_length=MAX_INCIDENTS)]
    certified: Certified | None = None
    phase: Phase = Phase()
    evaluations: Annotated[tuple[Evaluation, ...], Meta(max_length=MAX_POINTS)] = ()
    troubles: Annotated[tuple[Text, ...], Meta(max_length=MAX_TROUBLES)] = ()
    """What is wrong with it now, by its own account."""
