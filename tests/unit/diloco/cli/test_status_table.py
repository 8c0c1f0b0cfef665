from __future__ import annotations

import io
import time

from rich.console import Console

from diloco.cli.status_table import render
from peers.monitor.observations import Observations
from peers.monitor.summary import summary_of
from peers.protocol.reports import Phase, Standing
from tests.support.announcements import announced
from tests.support.sighted import SENDER, entry, figures_of, reported


def shown(observations: Observations, *, width: int = 160, height: int | None = None) -> str:
    now = time.time()
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(render(summary_of("run", observations, now=1.0, unix_now=now), width=width, height=height))
    return out.getvalue()


def swarm() -> Observations:
    observations, now = Observations(), time.time()
    standing = Standing(step="seeking", leader=0, missing=(1,), waits_for="peers 1")
    figures = figures_of(loss=2.345, hardware="2 × NVIDIA H100", upload_bytes_per_s=5e6, steps_per_epoch=100)
    reported(
        observations, "Qmzero00", 0.5, world_rank=0, state="averaging", epoch=7, step=700, tokens_per_s=1234.0,
        sees=("Qmone001",), figures=figures, standing=standing, anchor_digest="ab" * 32, paths=((1, "direct"),),
        rounds=(entry(7, now - 5, num_failures=1, failures=("lost peer 2",)),),
    )  # fmt: skip
    reported(
        observations,
        "Qmone001",
        0.5,
        world_rank=1,
        epoch=7,
        local_step=40,
        sees=("Qmzero00",),
        figures=figures,
    )
    observations.announced(announced("Qmtwo002", world_rank=2), 0.0)
    observations.missed("Qmtwo002")
    observations.note(1.0, now, silently=True)
    return observations


def test_the_picture_says_who_is_there_who_is_waited_for_and_what_failed():
    text = shown(swarm())
    assert "run run: epoch 7, 2 peers, 1.23k tokens/s, 1 gone" in text
    (zero,) = [line for line in text.splitlines() if "averaging" in line]
    for part in ("700", "2.345", "1.23k", "abababababab", "direct", "5MB", "…zero00", "2 × NVIDIA H100"):
        assert part in zero
    assert any("lost" in line and "…two002" in line for line in text.splitlines())
    assert "peer 0 waits for peer 1: it still trains, at step 40 of 100" in text
    (round_,) = [line for line in text.splitlines() if "lost peer 2" in line]
    assert round_.split()[:3] == ["7", "5", "s"]


def test_a_narrow_terminal_is_shown_less_and_nothing_cut_off():
    for width in (80, 60):
        lines = shown(swarm(), width=width).splitlines()
        (zero,) = [line for line in lines if "averaging" in line]
        assert "…" not in zero and "H100" not in zero
        for part in ("averaging", "700", "2.345", "1.23k", "direct"):
            assert part in zero
        assert all(len(line) <= width for line in lines)


def test_the_verdict_stands_on_top_and_a_peer_that_stands_still_is_said_to():
    lines = shown(swarm()).splitlines()
    assert lines[1].startswith("peer 2 does not answer, the others go on") or lines[1].startswith(
        "peer 2 was lost"
    )
    observations = Observations()
    phase = Phase(name="training", done=7.0, total=90.0, unit="steps", idle_s=300.0)
    reported(
        observations, "Qmzero00", 0.5, world_rank=0, step=7, phase=phase, figures=figures_of(end_step=90)
    )
    lines = shown(observations).splitlines()
    assert lines[0] == "run run: epoch 0, 1 peer, step 7 of 90"
    assert lines[1].startswith("peer 0 has stood still for 5 min at step 7")
    assert "training, stands still" in lines[3]


def test_a_low_terminal_keeps_the_peers():
    text = shown(swarm(), height=6)
    assert "averaging" in text and "failed" not in text
    assert len(text.splitlines()) <= 7


def test_what_peers_say_is_no_markup():
    observations = Observations()
    figures = figures_of(hardware="[red]a[/red] [link=http://x]b")
    standing = Standing(step="seeking", leader=0, missing=(1,))
    reported(observations, "A" * 8, 0.5, world_rank=0, figures=figures, standing=standing)
    assert "[red]a[/red] [link=http://x]b" in shown(observations)


def test_an_empty_swarm_is_two_lines():
    nobody = "nobody is there: start a peer, or check the name of the run"
    assert shown(Observations()) == f"run run: epoch 0, 0 peers\n{nobody}\n"


def test_a_peer_that_has_no_world_rank_yet_is_shown_without_one():
    observations, now = swarm(), time.time()
    for name in ("Qmthree3", "Qmfour04"):
        reported(observations, name, 0.5, world_rank=-1, state="joining", rounds=(entry(7, now - 5),))
    observations.note(1.0, now)
    lines = shown(observations).splitlines()
    assert len([line for line in lines if line.strip().startswith("–")]) == 2
    assert any("peer – joined" in line for line in lines) and not any("-1" in line for line in lines)


def test_whose_rollouts_a_learner_trains_on_is_shown_with_how_old_they_are():
    observations = swarm()
    reported(observations, "Qmzero00", 0.6, world_rank=0, rollout_peers=(SENDER,), figures=figures_of())
    text = " ".join(shown(observations).split())
    assert (
        "peer 0 trains on rollouts of …sender: 2.5/s, 20 taken, 1.5 steps old on average, 3 at most, 4 dropped"
        in text
    )
