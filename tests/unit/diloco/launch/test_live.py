"""The live view: reading a growing file and showing its records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from rich.console import Console

from diloco.launch.live import PeerRow, caption_of, row_cells, show, table_of
from diloco.launch.phase_file import write_phase
from diloco.train.metrics_file import Tail, line_of
from peers.protocol.reports import Phase

STEP = {"kind": "step", "step": 7, "epoch": 1, "loss": 2.34567, "tokens_per_s": 12345.6, "tokens": 100}
EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "num_peers": 3,
    "contributors": [0, 1],
    "round_s": 0.257,
    "sent_bytes": 8_400_000,
    "received_bytes": 8_400_000,
    "anchor_digest": "0123456789abcdef",
}
EVALUATION = {"kind": "eval", "step": 0, "epoch": 0, "loss": 5.5, "bits_per_byte": 7.95}


def test_a_tail_yields_each_complete_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.read() == [{"a": 1}, {"a": 2}]
    with path.open("a") as file:
        file.write(": 3}\nrubbish\n[4]\n")
    assert tail.read() == [{"a": 3}]
    assert tail.read() == []


def test_a_file_that_starts_over_is_read_from_its_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    tail.read()
    path.write_text('{"b": 1}\n')
    assert tail.read() == [{"b": 1}]


def test_of_a_long_file_a_tail_reads_the_end_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.writelines(f"{json.dumps({**STEP, 'step': at, 'time': at})}\n" for at in range(1, 10_001))
    for since, num_at_most in ((9_990.0, 1_000), (5_000.0, 10_000), (20_000.0, 1_000)):
        steps = [record["step"] for record in Tail(path, since=since).records()]
        assert len(steps) <= num_at_most and steps[0] < since and steps[-1] == 10_000
    assert len(Tail(path).read()) == len(Tail(path, since=0.5).read()) == 10_000


def test_a_row_shows_epoch_step_loss_speed_peers_bytes_and_time():
    assert set(row_cells({})) == {"–"}
    cells = row_cells({"step": STEP, "epoch": EPOCH})
    assert cells == ["1", "7", "2.346", "12.3k", "2", "8.4MB", "0.26 s"]


def test_records_with_nulls_are_shown_as_dashes():
    step = {"kind": "step", "step": 1, "epoch": 0, "loss": None, "tokens_per_s": None}
    assert row_cells({"step": step})[2:4] == ["–", "–"]
    assert line_of({"kind": "step", "step": 1, "loss": None}) is not None


def test_the_table_is_readable_on_80_columns(tmp_path):
    console = Console(width=80)
    newest = {"step": {**STEP, "step": 88_000}, "epoch": EPOCH}
    phase = Phase(name="receiving the state", done=1e9, total=4e9, unit="bytes")
    with console.capture() as captured:
        console.print(table_of([PeerRow("this peer", tmp_path, phase=phase)], [newest]))
    words = captured.get().split()
    assert {"sent", "receiving", "25%", "88000", "2.346", "12.3k", "8.4MB", "0.26"} <= set(words)


@contextlib.asynccontextmanager
async def shown(peer, **settings):
    view = asyncio.create_task(show([peer], terminal=False, **settings))
    yield
    view.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await view


async def test_records_of_a_life_before_are_not_shown_again(tmp_path, capsys):
    lines = [
        json.dumps({"kind": "event", "event": name, "time": at}) for name, at in (("old", 1), ("new", 9))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    async with shown(PeerRow("peer", tmp_path, since=5.0)):
        await asyncio.sleep(0)
    assert capsys.readouterr().out == "peer: new\n"


async def test_without_a_terminal_epochs_and_evaluations_become_lines(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (EVALUATION, STEP, EPOCH)))
    seen = []
    async with shown(
        PeerRow("peer 0", tmp_path), on_records=lambda index, new: seen.append((index, len(new)))
    ):
        while not seen:
            await asyncio.sleep(0)
        with path.open("a") as file:
            file.write(json.dumps({"kind": "event", "event": "finished"}) + "\n")
    assert capsys.readouterr().out.splitlines() == [
        "peer 0: evaluation at step 0: loss 5.500, 7.950 bits per byte",
        "peer 0: step 7  epoch 1  loss 2.346  12.3k tokens/s",
        "peer 0: epoch 1 averaged by 2 peers in 0.26 s, 8.4MB sent, 8.4MB received, anchor 0123456789ab",
        "peer 0: finished",
    ]
    assert seen == [(0, 3), (0, 1)]


async def test_what_a_peer_does_is_shown_in_the_table_and_said_in_lines_once_it_has_lasted(tmp_path, capsys):
    peer = PeerRow("peer 0", tmp_path, since=time.time())
    phase = Phase(name="evaluating", done=30.0, total=120.0, unit="windows", left_s=9.0, for_s=3.0)
    write_phase(tmp_path, phase)
    async with shown(peer):
        while peer.phase is None:
            await asyncio.sleep(0)
    assert capsys.readouterr().out == "peer 0: evaluating, 30 of 120 windows, 9 s left\n"
    assert peer.state_text == "evaluating 25%"
    peer.restarted(time.time() + 1)
    peer.update_phase()
    assert peer.state_text == "restarting" and peer.phase is None


def test_of_a_peer_that_is_done_nobody_is_told_what_it_did_last(tmp_path):
    write_phase(tmp_path, Phase(name="leaving"))
    peer = PeerRow("peer 0", tmp_path, state="training")
    peer.update_phase()
    assert peer.state_text == "leaving"
    peer.state = "done"
    peer.update_phase()
    assert peer.state_text == "done" and peer.phase is None


def test_a_row_shows_the_epoch_that_its_last_steps_ended_in():
    assert row_cells({"step": {"step": 8, "epoch": 1}, "epoch": {"epoch": 2}})[0] == "2"


def test_the_caption_says_how_far_the_run_is_and_when_it_will_be_done():
    training = Phase(name="training", done=20.0, total=80.0, unit="steps", left_s=600.0)
    phases = {"peer 0": training, "peer 1": None, "peer 2": Phase(name="starting")}
    assert caption_of([], elapsed_s=5, phases=phases) == "0:05, step 20 of 80, 10 min left"


def test_the_time_left_in_the_caption_is_that_of_the_furthest_peer_as_in_status():
    furthest = Phase(name="training", done=20.0, total=80.0, unit="steps", left_s=600.0)
    behind = Phase(name="training", done=15.0, total=80.0, unit="steps", left_s=50.0)
    for phases in ({"peer 0": furthest, "peer 1": behind}, {"peer 0": behind, "peer 1": furthest}):
        assert caption_of([], elapsed_s=5, phases=phases).endswith("step 20 of 80, 10 min left")


def test_until_somebody_trains_the_caption_says_what_keeps_each_peer():
    phases = {
        "peer 0": Phase(name="starting", detail="the training process"),
        "peer 1": Phase(name="waiting for peers", done=1, total=2, unit="peers"),
    }
    assert caption_of([], elapsed_s=5, phases=phases) == (
        "0:05, peer 0 is starting: the training process, peer 1 is waiting for peers, 1 of 2 are here"
    )


def test_records_of_a_life_before_do_not_make_a_restarted_peer_training(tmp_path):
    peer = PeerRow("peer 0", tmp_path)
    peer.note_records([{**STEP, "time": 10.0}])
    assert peer.state == "training"
    peer.restarted(now=20.0)
    peer.note_records([{**STEP, "time": 19.0}])
    assert peer.state == "restarting"
    peer.note_records([{**STEP, "time": 21.0}])
    assert peer.state == "training"
