"""Where a peer stands in its round, for people."""

from __future__ import annotations

from peers.core.peer import Peer
from peers.core.round import Stage
from peers.protocol.reports import Standing

_STEPS = {Stage.GATHER: "seeking", Stage.REDUCE: "reducing", Stage.VOTE: "voted"}
_WAITS = {Stage.REDUCE: "the sums", Stage.VOTE: "the votes"}


def standing_of(core: Peer) -> Standing:
    """What this peer waits for, and for whom."""
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
        waits_for = f"{core.num_lacking} more peers, without which its rule averages nothing"
    elif round_.stage is Stage.GATHER:
        peers = f"peer{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
        waits_for = peers if missing else "the next attempt"
    return Standing(step=_STEPS[round_.stage], leader=leader, missing=missing, waits_for=waits_for)
