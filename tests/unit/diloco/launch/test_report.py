"""The figures at the end of a run."""

from __future__ import annotations

from dataclasses import replace

from diloco.launch.report import baseline_line, plot_run, print_report, report_of, text_if_already_complete
from diloco.launch.run_facts import disagreements
from diloco.options.flags import HvConfig, TrainConfig
from peers.core.schedule import AS_LONG_AS_THE_ROUND


def epoch(number, digest, sent=100, contributors=(0, 1)):
    return {
        "kind": "epoch",
        "epoch": number,
        "anchor_digest": digest,
        "sent_bytes": sent,
        "contributors": contributors,
        "time": 50.0 + number,
    }


def step(number, loss):
    return {"kind": "step", "step": number, "loss": loss, "time": 20.0 + number}


def evaluation(number, bits, time):
    more = {"unigram_bits_per_byte": 4.9, "eval_bytes": 262_144}
    return {"kind": "eval", "step": number, "loss": bits * 0.693, "bits_per_byte": bits, "time": time, **more}


RECORDS = {
    "peer 0": [evaluation(0, 8.02, 10.0), step(1, 5.0), epoch(1, "aa"), step(2, 4.0), epoch(2, "bb")],
    "peer 1": [step(1, 5.1), epoch(1, "aa"), step(2, 4.1), epoch(2, "bb"), evaluation(2, 2.1, 70.0)],
}


CONFIG = TrainConfig(total_batch_size=10, seq_length=100)


def report_text(records, config=CONFIG):
    return report_of(config, records)[0]


def test_the_report_tells_before_after_tokens_time_bytes_and_agreement():
    text, agrees = report_of(CONFIG, RECORDS)
    assert text == (
        "verdict                 healthy: 2 peers\n"
        "bits per byte on validation (262kB held out)\n"
        "  uniform               8.000\n"
        "  byte frequencies      4.900\n"
        "  before training       8.020 (above uniform: random weights prefer some bytes)\n"
        "  after training        2.100\n"
        "trained                 4k tokens in 60 s, all peers together\n"
        "lost                    peer 0, 42 s into training, and not back\n"
        "averaged                2 epochs by all 2 peers, 400B sent\n"
        "agreement               all peers held bit-identical anchors after every epoch"
    )
    assert agrees


def test_peers_whose_anchors_differ_are_found_and_named():
    broken = {**RECORDS, "peer 2": [epoch(1, "aa"), epoch(2, "cc")]}
    assert disagreements(broken) == {2: {"peer 0": "bb", "peer 1": "bb", "peer 2": "cc"}}
    text, agrees = report_of(CONFIG, broken)
    assert not agrees
    assert "PROBLEM: anchors differed after 1 of 2 epochs" in text and "peer 2 cc" in text


def test_a_peer_that_came_back_and_missed_an_epoch_is_no_disagreement():
    assert disagreements({**RECORDS, "peer 2": [epoch(2, "bb")]}) == {}


def test_a_run_without_any_epoch_does_not_count_as_agreement():
    text, agrees = report_of(CONFIG, {"peer 0": [step(1, 5.0)]})
    assert not agrees and "no epoch was completed" in text


def test_a_run_that_was_resumed_at_its_end_is_said_to_be_complete():
    def said(*records, **changes):
        config = TrainConfig(total_steps=100, **changes)
        return text_if_already_complete(config, {"peer 0": records, "peer 1": []})

    start, finished = {"kind": "event", "event": "start"}, {"kind": "event", "event": "finished"}
    assert said({**start, "step": 100}, finished) == (
        "the run is complete already: step 100 of 100. To go on, raise --total-steps"
    )
    assert "step 50 of 50. To go on, raise --max-steps" in said({**start, "step": 50}, max_steps=50)
    assert said() == said({**start, "step": 99}) == said({**start, "step": 0}, step(1, 5.0)) == ""
    # A run that was killed after its last step and started again.
    assert said({**start, "step": 0}, step(100, 5.0), {**start, "step": 100}) == ""


def test_the_first_evaluation_of_a_resumed_run_is_not_taken_for_one_before_training():
    text = report_text({"peer 0": [step(51, 4.0), evaluation(60, 2.1, 70.0)]})
    assert "before training       not recorded\n  after training        2.100\n" in text


def test_paths_stand_below_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    print_report("text", {"model": tmp_path / "model", "everything": tmp_path.parent})
    assert capsys.readouterr().out == (
        f"text\nmodel                   model\neverything              {tmp_path.parent}\n"
    )


def test_what_a_peer_came_to_alone_is_told_beside_the_swarms_result():
    records = [evaluation(0, 8.02, 100.0), evaluation(2, 2.4, 145.0)]
    assert baseline_line(records, RECORDS) == (
        "alone                   2.400 bits per byte after as many steps as each peer's, in 45 s; "
        "the swarm 2.100, in 60 s for 2 times the tokens"
    )


def test_the_report_tells_how_many_epochs_hold_everybodys_work():
    assert "2 epochs by all 2 peers, 400B sent" in report_text(RECORDS)
    alone = {**RECORDS, "peer 0": [*RECORDS["peer 0"], epoch(3, "cc", contributors=(0,))]}
    assert "3 epochs, 2 of them by all 2 peers" in report_text(alone)


def test_the_report_tells_how_long_trainings_stood_still_and_what_would_shorten_it():
    def records(blocked_s):
        steps = [step(n, 4.0) for n in range(10)]
        return {"peer 0": [*steps, {**epoch(1, "aa"), "blocked_s": blocked_s}]}

    # The records span 31 s.
    assert "stood still             0.3% of the time, for averaging\n" in report_text(records(0.1))
    overlapping = replace(CONFIG, hv=HvConfig(overlap_steps=AS_LONG_AS_THE_ROUND))
    overlapped = report_text(records(9.0), overlapping)
    assert "averaging takes 29% of the time: try more --hv.local-steps\n" in overlapped
    assert "--hv.overlap-steps" not in overlapped
    text = report_text(records(9.0))
    assert text.startswith(
        "verdict                 averaging takes 29% of the time: try more --hv.local-steps"
    )


def test_the_report_of_one_peer_counts_the_peers_of_the_swarm():
    records = [
        step(1, 5.0),
        {**epoch(1, "aa"), "num_peers": 1},
        step(2, 4.0),
        {**epoch(2, "bb"), "num_peers": 2},
    ]
    assert report_text({"this peer": records}).startswith("verdict                 healthy: 2 peers\n")
    assert report_text({"this peer": [step(1, 5.0)]}).startswith("verdict                 healthy: 1 peer\n")


def test_a_peers_own_report_calls_it_by_its_world_rank():
    failed = {
        "kind": "event",
        "event": "checkpoint_failed",
        "step": 20,
        "reason": "no space left",
        "time": 60.0,
    }
    starts = [{"kind": "event", "event": "start", "world_rank": rank, "time": 1.0} for rank in (0, 3)]
    first_line = report_text({"this peer": [*starts, step(1, 5.0), failed]}).splitlines()[0]
    assert (
        first_line
        == "verdict                 peer 3: 1 checkpoint was not saved, the last one of step 20: no space left"
    )


def test_the_report_begins_with_the_verdict_and_names_what_was_not_saved():
    assert report_text(RECORDS).startswith("verdict                 healthy: 2 peers\n")
    failed = {"kind": "event", "event": "checkpoint_failed", "step": 20, "reason": "no space left"}
    records = {**RECORDS, "peer 1": [*RECORDS["peer 1"], failed, {**failed, "step": 40}]}
    lines = report_text(records).splitlines()
    assert lines[0] == (
        "verdict                 peer 1: 2 checkpoints were not saved, the last one of step 40: no space left"
    )
    finished = {"kind": "event", "event": "finished", "time": 80.0}
    one_ended = {**RECORDS, "peer 0": [*RECORDS["peer 0"], finished]}
    assert "verdict                 peer 1 was lost, " in report_text(one_ended)
    lost = {"peer 0": [step(1, 5.0), step(2, None), step(3, None)]}
    assert "its loss is not a number since step 2" in report_text(lost)


def test_the_report_names_peers_that_were_lost_and_when_they_were_back():
    start = {"kind": "event", "event": "start"}
    finished = {"kind": "event", "event": "finished"}
    records = {
        "peer 0": [{**start, "time": 10.0}, {**step(1, 5.0), "time": 60.0}, {**finished, "time": 90.0}],
        "peer 1": [
            {**start, "time": 10.0},
            {**step(1, 5.0), "time": 40.0},
            {**start, "time": 52.0},
            {**finished, "time": 90.0},
        ],
        "peer 2": [{**start, "time": 10.0}, {**step(1, 5.0), "time": 70.0}],
    }
    lines = report_text(records).splitlines()
    assert [line for line in lines if line.startswith("lost")] == [
        "lost                    peer 1, 30 s into training, back 12 s later",
        "lost                    peer 2, 60 s into training, and not back",
    ]


def test_a_wait_for_a_slower_peer_is_told_from_a_slow_link():
    steps = [step(n, 4.0) for n in range(10)]
    late = {**epoch(1, "aa"), "blocked_s": 6.2, "wait_s": 6.1, "round_s": 0.1}
    text = report_text({"peer 0": [*steps, late]})
    # The records span 31 s.
    assert (
        "stood still             20.0% of the time: 0.3% for averaging, 19.7% waiting for the slowest peer\n"
        in text
    )

    # With overlap the training went on during the wait, so it stood still for the round alone.
    slow = {**epoch(1, "aa"), "blocked_s": 3.0, "wait_s": 6.0, "round_s": 9.0}
    text = report_text({"peer 0": [*steps, slow]})
    assert "stood still             9.7% of the time, for averaging\n" in text


def test_a_plot_that_cannot_be_written_is_a_note_and_the_report_has_no_plot(tmp_path, capsys):
    for mode in ("pretrain", "grpo"):
        assert plot_run(TrainConfig(mode=mode), RECORDS, tmp_path / "missing", "title") == {}
        assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert plot_run(TrainConfig(), RECORDS, tmp_path, "title") == {
        "plot of the losses": tmp_path / "loss.png"
    }
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
