"""How much of its time a peer is taken to have stood still for rounds, by what it reports."""

from __future__ import annotations

import pytest

from peers.core.schedule import AS_LONG_AS_THE_ROUND, Schedule
from peers.monitor.observations import Observations
from peers.monitor.summary import peer_facts, summary_of
from peers.monitor.verdict import PeerFacts
from peers.protocol.reports import Parts
from tests.support.sighted import entry, figures_of, reported


def observed(
    *, round_s: float, every_s: float, wait_s: float = 0.0, **figures: float | bool | str
) -> Observations:
    """One peer that has reported nine such rounds, and these figures."""
    parts = Parts(wait_s=wait_s)
    rounds = tuple(
        entry(n, n * every_s, round_s=round_s, parts=parts, sent_bytes=10**8) for n in range(1, 10)
    )
    observations = Observations()
    told = figures_of(num_rounds=9, steps_per_epoch=25, upload_bytes_per_s=2e6, compression="int4", **figures)
    reported(observations, "A", 0.0, world_rank=0, rounds=rounds, figures=told)
    return observations


def facts(observations: Observations) -> PeerFacts:
    return peer_facts(observations.peers["A"], "training", 0.0)


def test_only_the_steps_of_overlap_hide_a_round():
    # 25 steps of 1.8 s, the last 5 of them during a round of 58 s.
    usual = {"round_s": 58.0, "every_s": 94.0, "step_s": 1.8}
    observations = observed(**usual, overlaps=True, overlap_steps=5)
    assert facts(observations).round_share == pytest.approx(49 / 94)
    verdict = summary_of("run", observations, now=0.1, unix_now=1000.0)["verdict"]
    assert verdict["level"] == "warning" and "averaging takes 52% of the time" in verdict["text"]
    assert "or --hv.overlap-steps auto" in verdict["text"]
    assert facts(observed(**usual)).round_share == pytest.approx(58 / 94)


def test_a_round_of_more_than_an_epoch_blocks_training_even_if_the_overlap_is_as_long_as_the_round():
    observations = observed(round_s=100.0, every_s=100.0, step_s=1.6, overlaps=True, overlap_steps=25)
    assert facts(observations).round_share == pytest.approx(0.6)
    text = summary_of("run", observations, now=0.1, unix_now=1000.0)["verdict"]["text"]
    assert "averaging takes 60% of the time" in text and "--hv.overlap-steps auto" not in text


def test_a_hidden_round_and_an_overlap_of_unknown_length_count_for_nothing():
    usual = {"round_s": 8.0, "every_s": 45.0, "overlaps": True}
    for figures in ({"overlap_steps": 5, "step_s": 1.8}, {"overlap_steps": 5}, {"step_s": 1.8}):
        assert facts(observed(**usual, **figures)).round_share == 0.0


def test_overlap_hides_the_wait_for_others_before_the_round():
    waiting = {"round_s": 4.0, "every_s": 60.0, "wait_s": 20.0, "step_s": 1.0, "overlaps": True}
    found = facts(observed(**waiting, overlap_steps=5))
    assert (found.wait_share, found.round_share) == (pytest.approx(15 / 60), pytest.approx(4 / 60))
    found = facts(observed(**waiting, overlap_steps=22))
    assert (found.wait_share, found.round_share) == (0.0, pytest.approx(2 / 60))


@pytest.mark.parametrize(("overlap", "told"), [(0, 0), (5, 5), (AS_LONG_AS_THE_ROUND, 25)])
def test_as_many_steps_hide_a_round_as_the_schedule_allows(overlap, told):
    assert Schedule(local_steps=100, num_fragments=4, overlap_steps=overlap).hidden_steps == told
