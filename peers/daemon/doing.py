"""What this peer is doing, and what it waits for, in words for people."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from peers.core.peer import Peer
from peers.core.round import Stage
from peers.monitor.phases import Doing, PhaseClock
from peers.protocol.records import State
from peers.protocol.reports import Phase, Standing

_STEPS = {Stage.GATHER: "seeking", Stage.REDUCE: "reducing", Stage.VOTE: "voted"}
_TRAINING = "training"
_WAITS = {Stage.REDUCE: "the sums", Stage.VOTE: "the votes"}


@dataclass
class Activity:
    """What the parts of one daemon, and its worker, say they are doing; `phase` sums it up."""

    preparing: str = "joining the network"
    """The step that is under way before there is a state to train from."""
    told: Doing | None = None
    """What keeps the worker from training steps, or how far it is in a long one, as it reports it."""
    received: tuple[int, int] | None = None
    """While a state is being downloaded: the bytes that are here, and those of the whole state."""
    _clock: PhaseClock = field(default_factory=PhaseClock)

    def phase(
        self,
        state: State,
        *,
        training: Doing,
        here: int,
        wanted: int,
        waits_for: str,
    ) -> Phase:
        """`here` of `wanted` peers are in the swarm; `training` is shown where nothing keeps the worker from it."""
        doing = self._doing(state, here, wanted, waits_for) or self._with_micro_batches(training)
        return self._clock.at(doing, time.monotonic())

    def _doing(self, state: State, here: int, wanted: int, waits_for: str) -> Doing | None:
        if state == "leaving":
            return Doing("leaving")
        # A download does not interrupt training.
        if self.received is not None and state != "training":
            return Doing("receiving the state", "", *self.received, "bytes")
        if state == "averaging":
            return Doing("averaging", f"waits for {waits_for}" if waits_for else "")
        if state == "joining" and self.told is None:
            waiting = self._waiting(here, wanted) if here else None
            return waiting or Doing("starting", self.preparing)
        if state == "waiting":
            return self._waiting(here, wanted) or Doing("waiting for the state")
        return self.told if self.told is None or self.told.name != _TRAINING else None

    def _with_micro_batches(self, training: Doing) -> Doing:
        """What the worker tells of a step that takes long counts as getting further."""
        told = self.told
        if told is None or told.name != _TRAINING:
            return training
        return replace(training, detail=f"{told.done:.0f} of {told.total:.0f} {told.unit} of {told.detail}")

    def _waiting(self, here: int, wanted: int) -> Doing | None:
        return Doing("waiting for peers", "", here, wanted, "peers") if here < wanted else None


def standing_of(core: Peer) -> Standing:
    """What this peer waits for in its round, and which peers."""
    round_ = core.round
    if round_ is None:
        return Standing(waits_for="the swarm's state")
    if core.catch_up.target is not None:
        return Standing(step="joining", waits_for=f"the state of epoch {core.catch_up.target.plan.epoch}")
    if core.worker.work is None:
        return Standing(step="idle")
    leader, missing = core.rank_of(round_.leader_of(round_.attempt)), core.missing_ranks
    waits_for = _WAITS.get(round_.stage, "")
    if round_.stage is Stage.GATHER and core.num_lacking:
        more = "1 more peer" if core.num_lacking == 1 else f"{core.num_lacking} more peers"
        waits_for = f"{more}, without which its rule averages nothing"
    elif round_.stage is Stage.GATHER:
        peers = f"peer{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
        waits_for = peers if missing else "the next attempt"
    return Standing(step=_STEPS[round_.stage], leader=leader, missing=missing, waits_for=waits_for)
