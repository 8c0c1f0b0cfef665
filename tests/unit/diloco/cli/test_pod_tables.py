from __future__ import annotations

import time
from dataclasses import replace

import pytest

from diloco.cli.pod_tables import plan_json, print_offers, print_plan, print_status, tell_unmoved_ends
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.machines.jobs import JobState
from provisioning.pods.pod import Offer
from provisioning.pods.spec import PodSpec
from provisioning.renting.plan import Creation, Plan
from provisioning.swarm.peer import PeerProgress
from provisioning.swarm.status import Overview, Status

OFFER = Offer(
    id="0f8fad5b-d9cb-469f-a165-70867728950e:8",
    provider="lium",
    gpu_type="NVIDIA A100-SXM4-80GB",
    gpu_count=8,
    price_per_hour=1234.56,
    city="Amsterdam",
    country="NL",
    upload_mbps=900.0,
    download_mbps=950.0,
)


def test_prices_are_whole_on_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    spec = PodSpec(name="multi-dataset-0", ttl_hours=8)
    print_plan(Plan(create=(Creation(spec, OFFER),), keep=(), destroy=()), to_stderr=False)
    shown = capsys.readouterr().out
    assert "1234.56" in shown and "9876.48" in shown
    print_offers([OFFER])
    shown = capsys.readouterr().out
    assert "1234.56" in shown and "950" in shown and max(map(len, shown.splitlines())) <= 80


def test_a_number_that_a_provider_does_not_say_is_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    print_offers([replace(OFFER, num_available=7), replace(OFFER, id="x", num_available=100)])
    _, counted, uncounted = capsys.readouterr().out.splitlines()
    assert " 7 " in counted and " 100 " not in uncounted


def kept(tmp_path, monkeypatch, *, asked_hours, wanted_hours, extended_hours=0):
    """A plan that keeps one pod for 2 $/h, ordered an hour ago, and the ledger that has it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ledger, now = Ledger(tmp_path / "diloco/pods.sqlite"), time.time()
    ends_at = None if asked_hours is None else now + (asked_hours - 1 + extended_hours) * 3600
    spec = PodSpec(name="pod-0", ttl_hours=asked_hours)
    row = ledger.add(spec, replace(OFFER, price_per_hour=2.0), now=now - 3600, ends_at=ends_at)
    wanted = replace(row, spec=replace(spec, ttl_hours=wanted_hours))
    return Plan(create=(), keep=(wanted,), destroy=()), ledger


def test_pods_that_are_kept_cost_until_their_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    agreed, _ = kept(tmp_path, monkeypatch, asked_hours=6, wanted_hours=6)
    new = replace(agreed, create=(Creation(PodSpec(name="new", ttl_hours=1), OFFER),))
    print_plan(new, to_stderr=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2][-3:] == ["2.00", "5.0", "10.00"]
    assert lines[3][-2:] == ["1236.56", "1244.56"]
    assert plan_json(new)["price_until_end"] == pytest.approx(1244.56, abs=0.01)
    agreed, _ = kept(tmp_path / "endless", monkeypatch, asked_hours=None, wanted_hours=None)
    assert plan_json(agreed)["price_until_end"] is None


@pytest.mark.parametrize(
    ("asked", "wanted", "extended", "said"),
    [
        (6, 6, 0, ""),
        (6, 6, 5, ""),
        (6, 8, 2, ""),
        (
            6,
            8,
            0,
            "still ends in 5.0 h: ttl_hours counts for new pods only. `diloco pods extend pod-0 --hours 2`",
        ),
        (
            6,
            None,
            0,
            "still ends in 5.0 h: ttl_hours counts for new pods only. `diloco pods extend pod-0 --hours ",
        ),
        (6, 4, 0, "still ends in 5.0 h: ttl_hours counts for new pods only. `diloco pods down pod-0`"),
        (None, 4, 0, "has no end: ttl_hours counts for new pods only. `diloco pods down pod-0`"),
    ],
)
def test_a_changed_ttl_that_changes_nothing_is_said(
    asked, wanted, extended, said, tmp_path, monkeypatch, capsys
):
    hours = {"asked_hours": asked, "wanted_hours": wanted, "extended_hours": extended}
    tell_unmoved_ends(*kept(tmp_path, monkeypatch, **hours))
    told = capsys.readouterr().err
    assert told.startswith(f"note: pod-0 is kept and {said}") if said else told == ""


def test_a_command_to_be_typed_names_a_state_file_that_is_not_the_default(tmp_path, monkeypatch, capsys):
    agreed, _ = kept(tmp_path, monkeypatch, asked_hours=6, wanted_hours=8)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    tell_unmoved_ends(agreed, Ledger(tmp_path / "diloco/pods.sqlite"))
    assert f"--hours 2 --state-file {tmp_path}/diloco/pods.sqlite`" in capsys.readouterr().err


def test_the_status_has_its_figures_whole_on_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    offer = replace(OFFER, price_per_hour=12.34)
    row = Row(
        **{"name": "pod-0", "label": "l", "state": State.RUNNING, "provider_id": "id", "offer": offer},
        **{"spec": PodSpec(name="pod-0"), "asked_at": 0.0, "ends_at": None},
    )
    look = PeerProgress(JobState(False, 0), epoch=120, step=12_345, tokens=84_992)
    pod = Status(row, True, "finished", look, dollars=123.45)
    print_status(Overview([pod], {}))
    shown = capsys.readouterr().out
    assert all(word in shown for word in (" 12.34 ", " 123.45 ", " 12345 ", " 85k ", "finished"))
    assert "e+" not in shown
