"""A swarm as an observer sees it, without any network."""

from __future__ import annotations

from typing import Any

from peers.monitor.observations import Observations
from peers.protocol.reports import (
    Evaluation,
    Figures,
    Incident,
    Parts,
    Phase,
    Point,
    Report,
    RolloutSender,
    RoundEntry,
    Standing,
)
from tests.support.announcements import announced

PARTS = Parts(wait_s=1.0, connect_s=0.01, reduce_s=0.5, preview_s=0.02, vote_s=0.03, apply_s=0.04)

SENDER = RolloutSender(
    peer_id="Qmsender",
    is_here=True,
    received=30,
    taken=20,
    dropped=4,
    staleness_mean=1.5,
    staleness_max=3,
    rollouts_per_s=2.5,
)


def entry(epoch: int, at: float, **fields: Any) -> RoundEntry:
    usual: dict[str, Any] = {
        "fragment": 0,
        "anchor_digest": f"{epoch:064x}",
        "contributors": (0, 1),
        "sent_bytes": 1000,
        "received_bytes": 2000,
        "num_failures": 0,
        "failures": (),
        "parts": PARTS,
        "round_s": 0.6,
    }
    return RoundEntry(**{**usual, **fields, "epoch": epoch, "time": at})


def reported(
    observations: Observations, peer_id: str, now: float, *, sees: tuple[str, ...] | None = (), **fields: Any
) -> None:
    """This peer has answered. `fields` are a Report's or an announcement's."""
    own = {name: fields.pop(name) for name in list(fields) if name in Report.__struct_fields__}
    nothing = {"standing": Standing(), "points": (), "rounds": (), "incidents": ()}
    said = {"status": b"", "figures": figures_of(), "sees": sees, **nothing, **own}
    observations.reported(announced(peer_id, **fields), Report(**said), now)


def figures_of(**told: Any) -> Figures:
    """The figures of a peer that has reported little."""
    return Figures(
        **{
            **dict.fromkeys(Figures.__struct_fields__, 0),
            "loss": None,
            "hardware": "",
            "compression": "",
            "overlaps": False,
            **told,
        }
    )


def full_report(**fields: Any) -> Report:
    """A report in which every field has a value."""
    usual: dict[str, Any] = {
        "status": b"s",
        "figures": figures_of(
            loss=2.5,
            hardware="CPU, 2 cores",
            steps_per_epoch=100,
            num_rounds=3,
            num_failures=1,
            sent_bytes=10,
            received_bytes=20,
            upload_bytes_per_s=1e6,
            download_bytes_per_s=2e6,
            link_bytes_per_s=3e6,
        ),
        "standing": Standing(step="seeking", leader=0, missing=(2,), waits_for="peers 2"),
        "sees": ("A", "B"),
        "points": (Point(time=1.0, step=10, loss=3.0, tokens_per_s=100.0),),
        "rounds": (entry(1, 2.0, num_failures=1, failures=("lost peer 2",)),),
        "incidents": (Incident(time=3.0, text="lost peer 2"),),
        "phase": Phase(name="evaluating", done=3.0, total=12.0, unit="windows", left_s=9.0, for_s=3.0),
        "evaluations": (Evaluation(time=3.0, step=10, loss=3.5),),
        "troubles": ("its disk is full",),
        "rollout_peers": (SENDER,),
    }
    return Report(**{**usual, **fields})
