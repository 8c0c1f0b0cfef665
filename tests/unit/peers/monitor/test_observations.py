from __future__ import annotations

import json
import time

from peers.monitor.observations import (
    COMING_BACK_S,
    FORGET_S,
    MAX_OBSERVATIONS,
    NEVER_MET_S,
    QUIET_AFTER_S,
    Observations,
)
from peers.monitor.summary import holders_of, path_in_a_word, stragglers_of, summary_of
from peers.protocol.certificates import Body, Certificate, Member, Plan
from peers.protocol.reports import Certified, Evaluation, Incident, Phase, Point, Standing
from tests.support.announcements import announced
from tests.support.certified import signed_genesis
from tests.support.sighted import entry, figures_of, reported


def three(now: float = 0.0) -> Observations:
    """Peers A, B and C of ranks 0, 1 and 2, which all answer and see each other."""
    observations = Observations()
    ids = ("A", "B", "C")
    for rank, peer_id in enumerate(ids):
        others = tuple(other for other in ids if other != peer_id)
        reported(observations, peer_id, now, sees=others, world_rank=rank, epoch=3)
    observations.note(now, 1000.0, silently=True)
    return observations


def a_and_b_report(observations: Observations, now: float, *more: str) -> None:
    """A and B report that they see each other and the peers in `more`."""
    for peer_id, other, rank in (("A", "B", 0), ("B", "A", 1)):
        reported(observations, peer_id, now, sees=(other, *more), world_rank=rank)


def states(observations: Observations, now: float) -> dict[str, str]:
    return {peer_id: observations.state_of(peer_id, now) for peer_id in observations.peers}


def test_peers_that_answer_are_in_the_state_that_they_tell():
    assert states(three(), 1.0) == {"A": "training", "B": "training", "C": "training"}


def test_a_broken_stream_alone_makes_nobody_lost_whom_others_still_have():
    observations = three()
    observations.missed("C")
    assert states(observations, 0.1)["C"] == "training"
    assert not observations.peers["C"].answers(0.1)


def test_a_peer_is_lost_as_soon_as_those_who_are_there_do_not_have_it_any_more():
    observations = three()
    observations.missed("C")
    a_and_b_report(observations, 0.2)
    observations.note(0.3, 1000.3)
    assert states(observations, 0.3) == {"A": "training", "B": "training", "C": "lost"}
    assert [(e.world_rank, e.what, e.time) for e in observations.events] == [(2, "was lost", 1000.3)]


def test_one_witness_that_has_it_is_enough():
    observations = three()
    observations.missed("C")
    reported(observations, "A", 0.2, sees=("B",), world_rank=0)
    assert states(observations, 0.3)["C"] == "training"


def test_a_witness_that_has_gone_quiet_does_not_count():
    observations = three()
    observations.missed("C")
    late = QUIET_AFTER_S + 1.0
    reported(observations, "A", late, sees=("B",), world_rank=0)
    # B has not reported since, so its word on C is out of date.
    assert states(observations, late) == {"A": "training", "B": "training", "C": "lost"}


def test_the_last_peer_of_all_is_lost_when_its_stream_breaks_and_cannot_be_had_again():
    observations = Observations()
    reported(observations, "A", 0.0, world_rank=0)
    observations.missed("A")
    assert states(observations, 0.1) == {"A": "lost"}


def test_a_peer_that_gives_no_report_is_there_for_as_long_as_it_says_so():
    observations = Observations()
    observations.announced(announced("A", world_rank=0), 0.0)
    observations.missed("A", "this swarm is closed")
    assert states(observations, 0.1) == {"A": "training"}
    seen = summary_of("run", observations, now=0.1, unix_now=1000.0)
    assert seen["verdict"]["text"] == "this swarm is closed"
    observations.missed("A")
    assert states(observations, 0.2) == {"A": "silent"}
    assert "is closed" not in str(summary_of("run", observations, now=0.2, unix_now=1000.0))


def test_one_peer_that_gives_no_report_does_not_close_the_swarm():
    observations = Observations()
    for rank, peer_id in enumerate("AB"):
        observations.announced(announced(peer_id, world_rank=rank), 0.0)
    observations.missed("B", "this swarm is closed")
    reported(observations, "A", 0.1, world_rank=0)
    assert states(observations, 0.2) == {"A": "training", "B": "training"}
    seen = summary_of("run", observations, now=0.2, unix_now=1000.0)
    assert seen["verdict"] == {"level": "good", "text": "healthy: 2 peers", "more": ()}
    # Once it reports, it is judged like any other.
    reported(observations, "B", 0.3, world_rank=1)
    observations.missed("B")
    assert states(observations, 0.4)["B"] == "lost"


def test_a_peer_that_never_answered_is_silent_where_nobody_else_could_tell():
    observations = Observations()
    observations.announced(announced("A"), 0.0)
    assert states(observations, 0.0) == {"A": "training"}
    observations.missed("A")
    assert states(observations, 0.1) == {"A": "silent"}


def test_a_frozen_peer_is_not_lost_before_its_own_say_so():
    observations = three()
    now = QUIET_AFTER_S + 1.0
    a_and_b_report(observations, now, "C")
    assert states(observations, now)["C"] == "training"
    assert not observations.peers["C"].answers(now)
    a_and_b_report(observations, now + 4)
    assert states(observations, now + 4)["C"] == "lost"


def test_a_newcomer_is_not_lost_because_nobody_has_met_it_yet():
    observations = three()
    observations.announced(announced("D", world_rank=3, state="joining"), 0.0)
    observations.missed("D")
    assert states(observations, 0.1)["D"] == "joining"


def test_a_dead_peers_record_in_the_dht_brings_nobody_back():
    observations = three()
    observations.announced(announced("D", world_rank=3, time=time.time() - 10), 0.0)
    observations.missed("D")
    assert states(observations, 0.1)["D"] == "lost"


def test_a_peer_that_comes_back_is_told_of():
    observations = Observations()
    reported(observations, "A", 0.0, sees=("B",), world_rank=0)
    reported(observations, "B", 0.0, sees=("A",), world_rank=1)
    observations.note(0.0, 1000.0, silently=True)
    observations.missed("B")
    reported(observations, "A", 1.0, world_rank=0)
    observations.note(1.0, 1001.0)
    reported(observations, "B", 2.0, sees=("A",), world_rank=1)
    observations.note(2.0, 1002.0)
    assert [event.what for event in observations.events] == ["was lost", "came back"]


def test_one_that_was_started_again_has_a_moment_to_be_met_by_all():
    observations = three()
    observations.missed("C")
    a_and_b_report(observations, 0.2)
    assert states(observations, 0.3)["C"] == "lost"
    observations.announced(announced("C", world_rank=2, incarnation=2, time=time.time() + 1), 0.4)
    observations.missed("C")
    assert states(observations, 0.5)["C"] == "training"
    late = 1.0 + COMING_BACK_S
    a_and_b_report(observations, late)
    assert states(observations, late)["C"] == "lost"


def test_one_that_was_started_again_and_has_answered_is_lost_as_quickly_as_any():
    observations = three()
    reported(observations, "C", 0.4, world_rank=2, incarnation=2, time=time.time() + 1)
    observations.missed("C")
    a_and_b_report(observations, 0.5)
    assert states(observations, 0.6)["C"] == "lost"


def test_who_leaves_is_not_lost_and_not_shown():
    observations = three()
    reported(observations, "C", 0.5, world_rank=2, state="leaving", time=time.time() + 1)
    observations.missed("C")
    observations.note(1.0, 1001.0)
    assert [event.what for event in observations.events] == ["left"]
    assert list(observations.shown()) == ["A", "B"]


def test_the_lost_are_shown_for_a_while_and_then_forgotten():
    observations = Observations()
    reported(observations, "A", 0.0, world_rank=0)
    observations.missed("A")
    observations.note(1.0, 1001.0)
    assert list(observations.peers) == ["A"]
    observations.note(2.0 + FORGET_S, 1002.0 + FORGET_S)
    assert list(observations.peers) == []


def test_records_of_peers_that_nobody_has_met_take_no_room_for_long():
    observations, now = Observations(), time.time()
    for number in range(2 * MAX_OBSERVATIONS):
        observations.announced(announced(f"P{number}", time=now), 0.0)
    assert len(observations.peers) == MAX_OBSERVATIONS
    observations.note(0.0, now + NEVER_MET_S + 1)
    assert not observations.peers


def test_what_a_peer_tells_twice_is_kept_once():
    observations = Observations()
    point, round_ = Point(time=5.0, step=1, loss=1.0, tokens_per_s=2.0), entry(1, 6.0)
    for now in (0.0, 1.0):
        reported(
            observations,
            "A",
            now,
            points=(point,),
            rounds=(round_,),
            incidents=(Incident(time=7.0, text="x"),),
        )
    peer = observations.peers["A"]
    assert (len(peer.curve.points), len(peer.rounds), len(peer.incidents)) == (1, 1, 1)


def waiting_leader(observations: Observations, *missing: int, step: str = "seeking") -> None:
    standing = Standing(step=step, leader=0, missing=missing, waits_for="peers")
    reported(observations, "A", 0.5, sees=("B", "C"), world_rank=0, standing=standing, state="averaging")


def test_what_a_peer_claims_of_the_future_is_not_taken_down():
    """The time 1e18 could not even be shown, since no date is that late."""
    observations, now = three(), time.time()
    for at in (now - 5, now + 60, 1e18):
        point, round_ = Point(time=at, step=1 << 62, loss=1e18, tokens_per_s=1.0), entry(4, at)
        incident = Incident(time=at, text="all is well")
        reported(observations, "A", 1.0, points=(point,), rounds=(round_,), incidents=(incident,), time=now)
    peer = observations.peers["A"]
    told = [*peer.rounds, *peer.incidents, *peer.curve.points]
    assert [one.time for one in told] == [now - 5] * 3


def test_of_two_that_claim_one_rank_the_one_that_is_there_holds_it():
    observations = three()
    # Z is the machine of B after it has lost its key: another peer id, the same rank.
    reported(observations, "Z", 0.1, sees=("A",), world_rank=1)
    observations.missed("B")
    for peer_id, other, rank in (("A", "Z", 0), ("C", "A", 2)):
        reported(observations, peer_id, 0.2, sees=(other,), world_rank=rank)
    assert states(observations, 0.3)["B"] == "lost"
    holders = holders_of(observations, now=0.3)
    assert {rank: peer.announcement.peer_id for rank, peer in holders.items()} == {0: "A", 1: "Z", 2: "C"}


def reasons(observations: Observations, now: float = 1.0) -> dict[int, str]:
    peers = {peer.announcement.world_rank: peer for peer in observations.peers.values()}
    shown = {
        peer.announcement.world_rank: observations.state_of(peer_id, now)
        for peer_id, peer in observations.peers.items()
    }
    return {straggler["world_rank"]: straggler["reason"] for straggler in stragglers_of(peers, shown)}


def test_a_straggler_that_still_trains_is_named_with_the_steps_and_the_time_it_has_left():
    observations = three()
    points = tuple(Point(time=float(t), step=10 * t, loss=None, tokens_per_s=1.0) for t in range(1, 5))
    figures = figures_of(steps_per_epoch=100)
    reported(
        observations, "B", 0.5, sees=("A",), world_rank=1, local_step=40, points=points, figures=figures,
        time=time.time() + 1,
    )  # fmt: skip
    waiting_leader(observations, 1)
    assert reasons(observations) == {1: "it still trains, at step 40 of 100, about 6 s to go"}


def test_why_a_straggler_is_late_follows_what_it_says_itself():
    observations = three()
    waiting_leader(observations, 1, 2, 7)
    standing = Standing(step="joining", waits_for="the swarm's state")
    reported(
        observations,
        "C",
        0.6,
        sees=("A",),
        world_rank=2,
        state="waiting",
        standing=standing,
        time=time.time() + 1,
    )
    assert reasons(observations) == {
        1: "it still trains, at step 0 of its epoch",
        2: "it is joining: waits for the swarm's state",
        7: "it is lost",
    }


def test_who_keeps_an_attempt_waiting_is_named():
    observations = three()
    waiting_leader(observations, 0, 2, step="voted")
    assert reasons(observations) == {2: "it has not voted yet"}


def test_a_straggler_whose_turn_it_is_to_lead_is_named_by_those_who_are_ready():
    observations = three()
    standing = Standing(step="seeking", leader=1, missing=(1,), waits_for="peers 1")
    reported(observations, "A", 0.5, sees=("B", "C"), world_rank=0, standing=standing, state="averaging")
    assert reasons(observations) == {1: "it still trains, at step 0 of its epoch"}
    # C believes that it waits for A, but its leader B does not confirm that.
    reported(
        observations, "C", 0.5, world_rank=2, standing=Standing(step="seeking", leader=1, missing=(0,)),
        time=time.time() + 1,
    )  # fmt: skip
    assert reasons(observations).keys() == {1}


def test_nobody_is_late_where_nobody_waits():
    assert reasons(three()) == {}


def test_the_summary_is_what_programs_rely_on():
    observations = three()
    reported(
        observations, "B", 0.5, sees=("A",), world_rank=1, epoch=3, tokens_per_s=5.0,
        paths=((0, "direct"), (2, "relay")), time=time.time() + 1,
        rounds=(entry(3, 900.0, num_failures=1, failures=("lost peer 7",)),),
    )  # fmt: skip
    reported(observations, "A", 0.6, sees=("B",), world_rank=0, rounds=(entry(2, 800.0), entry(3, 901.0)))
    observations.missed("C")
    summary = summary_of("run", observations, now=1.0, unix_now=1000.0)
    assert (summary["run_id"], summary["epoch"], summary["tokens_per_s"]) == ("run", 3, 5.0)
    assert [peer["state"] for peer in summary["peers"]] == ["training", "training", "lost"]
    assert [peer["answers"] for peer in summary["peers"]] == [True, True, False]
    assert summary["peers"][1]["path"] == "direct 1, relay 1"
    assert [(r["epoch"], r["num_failures"], r["failures"], r["agrees"]) for r in summary["rounds"]] == [
        (2, 0, [], True),
        (3, 1, ["lost peer 7"], True),
    ]
    assert [peer["world_rank"] for peer in summary["rounds"][1]["peers"]] == [0, 1]


def test_a_fork_that_has_healed_is_no_fault_and_one_that_lasts_is_named_by_its_first_epoch():
    def verdict(*last: str) -> str:
        observations = Observations()
        for rank, (own, end) in enumerate(zip("ab", last, strict=True)):
            # Only A reports epoch 5, as B would have changed sides then.
            epochs = {3: "c", 4: own, **({5: own} if own == "a" else {}), 6: end, 7: end}
            rounds = tuple(entry(e, 800.0 + e, anchor_digest=64 * digest) for e, digest in epochs.items())
            reported(observations, own.upper(), 0.6, world_rank=rank, rounds=rounds)
        return summary_of("run", observations, now=1.0, unix_now=1000.0)["verdict"]["text"]

    assert "weights" not in verdict("c", "c")
    assert verdict("a", "b").startswith("peers hold different weights since epoch 4")


def test_a_step_that_a_later_version_names_is_shown_as_idle():
    observations = three()
    for step in ("voted", "dreaming"):
        reported(observations, "A", 0.6, world_rank=0, standing=Standing(step=step))
        shown = summary_of("run", observations, now=1.0, unix_now=1000.0)["peers"][0]["standing"]
        assert shown == ("idle" if step == "dreaming" else step)


def test_signers_and_roster_are_those_of_the_certificate_of_the_state_that_a_peer_is_at(tmp_path):
    certificate, observations = signed_genesis(tmp_path), three()
    shown = {"certified": Certified(time=900.0, certificate=certificate), "head": certificate.head}
    reported(observations, "A", 0.6, world_rank=0, anchor_digest=certificate.body.anchor, **shown)
    # B's anchor and C's head are not those of the certificate, so nothing proves which state they have.
    reported(observations, "B", 0.6, world_rank=1, anchor_digest="b" * 64, **shown)
    reported(observations, "C", 0.6, world_rank=2, **{**shown, "head": "c" * 64})
    members = [member.peer_id for member in certificate.plan.roster]
    roster = [{"peer_id": p, "world_rank": rank} for rank, p in enumerate(members)]
    proved = summary_of("run", observations, now=1.0, unix_now=1000.0)["certificates"]
    assert proved == {certificate.head: {"signers": members, "roster": roster}}
    observations.peers.pop("A")
    assert summary_of("run", observations, now=1.0, unix_now=1000.0)["certificates"] == {}


def test_what_two_hundred_peers_hold_in_common_is_shown_once():
    names = [f"12D3KooW{rank:044d}" for rank in range(200)]
    roster = tuple(Member(peer_id=name, world_rank=rank) for rank, name in enumerate(names))
    usual = {"parent": "", "fragment": 0, "attempt": 0, "contributors": (), "data_base": 0, "tokens": 0}
    body = Body(
        plan=Plan(manifest="f" * 64, epoch=0, roster=roster, **usual), anchor="a" * 64, momentum="0" * 64
    )
    certificate = Certificate(body=body, signatures=())
    observations, shown = Observations(), Certified(time=900.0, certificate=certificate)
    for rank, name in enumerate(names):
        reported(
            observations,
            name,
            0.6,
            world_rank=rank,
            certified=shown,
            head=certificate.head,
            anchor_digest="a" * 64,
        )
    summary = summary_of("run", observations, now=1.0, unix_now=1000.0)
    assert [peer["head"] for peer in summary["peers"]] == [certificate.head] * 200
    assert summary["certificates"][certificate.head]["signers"] == names
    assert len(json.dumps(summary)) < 500e3


def test_a_report_says_whom_a_peer_sees_only_if_that_has_changed():
    observations = three()
    observations.missed("C")
    reported(observations, "A", 0.2, sees=("B", "C"), world_rank=0)
    for _ in range(2):
        reported(observations, "A", 0.3, sees=None, world_rank=0)
        reported(observations, "B", 0.3, sees=("A",), world_rank=1)
        assert states(observations, 0.3)["C"] == "training"
    reported(observations, "A", 0.4, sees=("B",), world_rank=0)
    assert states(observations, 0.4)["C"] == "lost"


def test_anchors_that_differ_are_said_to():
    observations = three()
    reported(observations, "A", 0.6, world_rank=0, rounds=(entry(2, 800.0, anchor_digest="aa"),))
    reported(observations, "B", 0.6, world_rank=1, rounds=(entry(2, 800.0, anchor_digest="bb"),))
    (round_,) = summary_of("run", observations, now=1.0, unix_now=1000.0)["rounds"]
    assert round_["agrees"] is False


def test_a_word_says_which_way_a_peers_streams_go():
    assert path_in_a_word(["direct", "direct"]) == "direct"
    assert path_in_a_word(["direct", "relay", "direct"]) == "direct 2, relay 1"
    assert path_in_a_word([]) == ""


def test_in_what_peers_say_others_are_called_by_their_numbers():
    observations = Observations()
    ids = ("12D3KooWone", "12D3KooWtwo")
    failed = entry(1, 2.0, num_failures=1, failures=("lost its leader 12D3KooWtwo",))
    reported(observations, ids[0], 0.0, world_rank=0, rounds=(failed,))
    incident = Incident(time=3.0, text="hung up on 12D3KooWtwo")
    reported(observations, ids[1], 0.0, world_rank=1, incidents=(incident,))
    swarm = summary_of("run", observations, now=0.0, unix_now=4.0)
    assert swarm["rounds"][0]["failures"] == ["lost its leader peer 1"]
    assert swarm["events"][-1]["what"] == "hung up on peer 1"


def test_evaluations_of_all_peers_are_one_curve_by_step():
    observations = Observations()
    scores = (Evaluation(time=1.0, step=0, loss=5.0), Evaluation(time=9.0, step=20, loss=4.0))
    reported(observations, "A", 0.0, world_rank=0, evaluations=scores)
    reported(observations, "B", 0.0, world_rank=1, evaluations=(Evaluation(time=5.0, step=10, loss=None),))
    reported(observations, "A", 1.0, world_rank=0, evaluations=scores)
    swarm = summary_of("run", observations, now=1.0, unix_now=10.0)
    assert swarm["evaluations"] == [{"step": 0, "loss": 5.0}, {"step": 20, "loss": 4.0}]


def test_how_far_the_run_is_follows_the_peer_that_is_furthest():
    observations, figures = Observations(), figures_of(end_step=100)
    points = tuple(Point(time=10.0 + i, step=i, loss=1.0, tokens_per_s=1.0) for i in range(11))
    reported(observations, "A", 0.0, world_rank=0, step=10, figures=figures, points=points)
    reported(observations, "B", 0.0, world_rank=1, step=7, figures=figures)
    swarm = summary_of("run", observations, now=0.0, unix_now=30.0)
    assert swarm["progress"] == {"step": 10, "end_step": 100, "left_s": 90.0}


def test_the_time_left_is_what_the_furthest_training_peer_says():
    observations, figures = Observations(), figures_of(end_step=100)
    points = tuple(Point(time=10.0 + i, step=i, loss=1.0, tokens_per_s=1.0) for i in range(11))
    phase = Phase(name="training", done=10.0, total=100.0, unit="steps", left_s=200.0)
    reported(observations, "A", 0.0, world_rank=0, step=10, figures=figures, phase=phase)
    slower = Phase(name="training", done=7.0, total=100.0, unit="steps", left_s=50.0)
    reported(observations, "B", 0.0, world_rank=1, step=7, figures=figures, points=points, phase=slower)
    swarm = summary_of("run", observations, now=0.0, unix_now=30.0)
    assert swarm["progress"] == {"step": 10, "end_step": 100, "left_s": 200.0}
