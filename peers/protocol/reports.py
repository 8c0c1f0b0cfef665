"""The monitoring protocol: reports that a peer sends to observers.

    observer                  peer                           protocol diloco/<run_id>/report
    Hello               ->
                        <-    Nonce | Busy                   a nonce only if the run has a swarm secret
    Proof               ->
                        <-    Report... | Refusal            at once, on news, and every second

The first report holds everything that the peer remembers, each later one what is new. Readers ignore fields of a report
that they do not know, so that a later version may add some.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from peers.protocol.certificates import Certificate
from peers.protocol.limits import MAX_REAL, Count, HashOrNone, Real, ShownText, WorldRank
from peers.protocol.records import MAX_RECORD_BYTES
from peers.protocol.wire import Struct

MAX_POINTS = 256
MAX_ROUNDS = 32
MAX_INCIDENTS = 32
MAX_SHOWN_RANKS = 256
"""Ranks shown per round; of a larger round, the lowest ones."""
MAX_FAILURES = 8
MAX_TEXT = 160
MAX_PHASE_CHARACTERS = 32
MAX_TROUBLES = 8
MAX_HARDWARE_CHARACTERS = 64
MAX_ROLLOUT_PEERS = 64
MAX_SEEN = 512
"""Peers in one report; an observer sees a larger swarm through several peers."""
MAX_CERTIFICATE_BYTES = 256 << 10
"""Enough for some three hundred members; a larger certificate is not reported."""

Step = Literal["joining", "idle", "seeking", "reducing", "voted"]
STEPS = frozenset(get_args(Step))
Text = Annotated[ShownText, Meta(max_length=MAX_TEXT)]
Loss = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)] | None
Ranks = Annotated[tuple[WorldRank, ...], Meta(max_length=MAX_SHOWN_RANKS)]


def report_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/report"


class Hello(Struct, frozen=True, tag="hello"):
    pass


class Busy(Struct, frozen=True, tag="busy"):
    """The peer serves its maximum number of observers already."""


class _Told(Struct, frozen=True, forbid_unknown_fields=False):
    """Part of a report."""


class Point(_Told, frozen=True):
    """The progress of training at one moment."""

    time: Real
    step: Count
    """Nominal step."""
    loss: Loss
    """None: the worker does not report it."""
    tokens_per_s: Real


class Parts(_Told, frozen=True):
    """Durations of the parts of one epoch, in their order; peers/state/handover.py defines them.

    Those of a round are of its last attempt.
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
    """When its worker was answered."""
    epoch: Count
    """Outer steps done, this one included."""
    fragment: Count
    anchor_digest: HashOrNone
    contributors: Ranks
    sent_bytes: Count
    received_bytes: Count
    num_failures: Count
    failures: Annotated[tuple[Text, ...], Meta(max_length=MAX_FAILURES)]
    """Why attempts failed, as far as this peer knows."""
    parts: Parts
    round_s: Real
    """From the formation of the group to the commit, failed attempts included."""


class Incident(_Told, frozen=True):
    """An event worth showing to people."""

    time: Real
    text: Text


class Evaluation(_Told, frozen=True):
    """The loss of the weights on held-out text."""

    time: Real
    step: Count
    loss: Loss


class Phase(_Told, frozen=True):
    """What a peer is doing, and its progress. Durations are by its own clock."""

    name: Annotated[ShownText, Meta(max_length=MAX_PHASE_CHARACTERS)] = ""
    """Starting, tokenizing, compiling, waiting for peers, receiving the state, training and so on, as named by the part
    that does it; empty: not reported."""
    detail: Text = ""
    """A step within the phase, or the peers that it waits for."""
    done: Real = 0.0
    total: Real = 0.0
    """In `unit`; 0: not known."""
    unit: Annotated[ShownText, Meta(max_length=MAX_PHASE_CHARACTERS)] = ""
    left_s: Annotated[float, Meta(ge=0, le=MAX_REAL)] | None = None
    """Estimated seconds until the phase ends; None: no estimate."""
    for_s: Real = 0.0
    """Seconds since the phase began."""
    idle_s: Real = 0.0
    """Seconds without progress."""


class Figures(_Told, frozen=True):
    """Figures about a peer. Informational: no decision depends on them."""

    loss: Loss
    hardware: Annotated[ShownText, Meta(max_length=MAX_HARDWARE_CHARACTERS)]
    """For example "2 × NVIDIA A100-SXM4-80GB" or "CPU, 8 cores"."""
    steps_per_epoch: Count
    num_rounds: Count
    """Since the peer was started, as are the next five."""
    num_failures: Count
    """Failed attempts."""
    num_worker_losses: Count
    sent_bytes: Count
    received_bytes: Count
    forwarded_bytes: Count
    upload_bytes_per_s: Real
    """Of the last reduction; 0 before there is one."""
    download_bytes_per_s: Real
    link_bytes_per_s: Real
    """The bandwidth of its link in each direction, by which shares are divided; 0: not known."""
    end_step: Count = 0
    """The nominal step at which training ends; 0: not known."""
    step_s: Real = 0.0
    """Recent seconds per inner step; 0: not known."""
    compression: Annotated[ShownText, Meta(max_length=MAX_PHASE_CHARACTERS)] = ""
    overlaps: bool = False
    """Whether rounds take place while training goes on."""
    overlap_steps: Count = 0
    """Inner steps that are trained at most while a round takes place: those of an epoch with --hv.overlap-steps auto;
    0 although rounds overlap: not reported."""


class Standing(_Told, frozen=True):
    """The stage of one peer's round, and what the peer waits for."""

    step: Text = "joining"
    """One of STEPS: the stage of the round (peers/core/round.py), or `joining` before the first. A later version may
    have others."""
    leader: WorldRank | None = None
    """World rank of the leader of its attempt; None while its worker trains."""
    missing: Ranks = ()
    """From a leader: the world ranks that it waits for, to join or to vote."""
    waits_for: Text = ""
    """What it waits for, in words; empty: nothing."""

    @property
    def known_step(self) -> str:
        return self.step if self.step in STEPS else "idle"


class RolloutSender(_Told, frozen=True):
    """What a rollout peer has sent to a learner since the learner was started."""

    peer_id: Annotated[ShownText, Meta(max_length=100)]
    is_here: bool
    received: Count
    taken: Count
    """Trained on."""
    dropped: Count
    staleness_mean: Real
    """Of those taken: optimizer steps since their policy."""
    staleness_max: Count
    rollouts_per_s: Real


class Certified(_Told, frozen=True):
    """The certificate of a peer's state."""

    time: Real
    """Since when the peer has held this state, Unix seconds."""
    certificate: Certificate


class Report(_Told, frozen=True, tag="report"):
    """One message from a peer to an observer."""

    status: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
    """Its signed announcement, which the reader has to verify."""
    figures: Figures
    standing: Standing
    sees: Annotated[tuple[Annotated[ShownText, Meta(max_length=100)], ...], Meta(max_length=MAX_SEEN)] | None
    """The peers that are here, as it has heard on channels of the mesh; None: the same as in the report before."""
    points: Annotated[tuple[Point, ...], Meta(max_length=MAX_POINTS + 1)]
    rounds: Annotated[tuple[RoundEntry, ...], Meta(max_length=MAX_ROUNDS)]
    incidents: Annotated[tuple[Incident, ...], Meta(max_length=MAX_INCIDENTS)]
    certified: Certified | None = None
    phase: Phase = Phase()
    evaluations: Annotated[tuple[Evaluation, ...], Meta(max_length=MAX_POINTS)] = ()
    troubles: Annotated[tuple[Text, ...], Meta(max_length=MAX_TROUBLES)] = ()
    """Current problems of the peer, as it reports them."""
    rollout_peers: Annotated[tuple[RolloutSender, ...], Meta(max_length=MAX_ROLLOUT_PEERS)] = ()
    """The peers whose rollouts it trains on; if there are too many, those heard last."""
