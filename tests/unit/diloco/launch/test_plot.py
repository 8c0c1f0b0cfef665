"""The picture of a run."""

from __future__ import annotations

from diloco.launch.plot import plot_losses, smoothed, validation_of
from diloco.launch.run_facts import absences, sessions_of


def step(number, loss, at):
    return {"kind": "step", "step": number, "loss": loss, "time": at}


START = {"kind": "event", "event": "start", "step": 0}
RECORDS = {
    "peer 0": [
        {**START, "time": 1.0},
        step(1, 5.0, 2.0),
        {"kind": "epoch", "epoch": 1, "time": 3.0},
        step(2, 4.0, 4.0),
        {"kind": "eval", "step": 2, "loss": 4.2, "time": 5.0},
    ],
    "peer 1": [{**START, "time": 1.0}, step(1, 5.1, 2.0), {**START, "time": 20.0}, step(2, 4.1, 21.0)],
}


def test_a_peer_that_was_started_again_has_two_lives_and_nothing_is_known_of_between():
    lives = sessions_of(RECORDS["peer 1"])
    assert [(life.began_at, life.ended_at) for life in lives] == [(1.0, 2.0), (20.0, 21.0)]
    assert [[record["step"] for record in life.steps] for life in lives] == [[1], [2]]
    assert len(sessions_of(RECORDS["peer 0"])) == 1 and sessions_of([]) == []


def test_a_peer_is_absent_between_its_lives_and_after_one_that_did_not_finish():
    lives = sessions_of(RECORDS["peer 1"])
    assert absences(lives, 22.0) == [(2.0, 20.0)]
    assert absences(lives, 60.0) == [(2.0, 20.0), (21.0, 60.0)]
    finished = [*RECORDS["peer 1"], {"kind": "event", "event": "finished", "time": 22.0}]
    assert absences(sessions_of(finished), 60.0) == [(2.0, 20.0)]


def test_steps_without_a_loss_are_left_out():
    (life,) = sessions_of([step(1, None, 1.0), step(2, 4.0, 2.0)])
    assert [record["step"] for record in life.steps] == [2]


def test_smoothing_averages_over_a_window():
    assert smoothed([1.0, 3.0]) == [1.0, 3.0]
    assert smoothed([float(n) for n in range(40)])[:3] == [0.0, 0.5, 1.5]


def test_validation_losses_stand_at_the_seconds_since_their_own_trainings_beginning():
    later = {"kind": "eval", "step": 9, "loss": 3.0, "time": 9.0}
    unknown = {"kind": "eval", "step": 5, "loss": None, "time": 7.0}
    assert validation_of([later, *RECORDS["peer 0"], unknown]) == [(4.0, 4.2), (8.0, 3.0)]
    assert validation_of([{**record, "time": record["time"] + 100} for record in RECORDS["peer 0"]]) == [
        (4.0, 4.2)
    ]
    assert validation_of([]) == []


def test_the_plot_is_in_the_reports_unit(tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr("matplotlib.axes.Axes.set", lambda axes, **names: labels.append(names["ylabel"]))
    scored = {"kind": "eval", "step": 2, "loss": 4.0, "bits_per_byte": 2.0, "time": 5.0}
    plot_losses({"peer 0": [step(1, 5.0, 2.0), scored]}, tmp_path / "a.png", title="test")
    plot_losses({"peer 0": [step(1, 5.0, 2.0)]}, tmp_path / "b.png", title="test")
    assert labels == ["loss (bits per byte)", "loss (nats per token)"]


def test_a_training_alone_is_drawn_beside_the_swarms(tmp_path):
    plot_losses(RECORDS, tmp_path / "without.png", title="test")
    plot_losses(RECORDS, tmp_path / "with.png", title="test", alone=RECORDS["peer 0"])
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_the_plot_is_a_png_even_of_nothing_and_of_losses_that_are_null(tmp_path):
    for name, records in {"a": RECORDS, "b": {}, "c": {"peer 0": [step(1, None, 1.0)]}}.items():
        path = tmp_path / f"{name}.png"
        plot_losses(records, path, title="test")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".png"] * 3
