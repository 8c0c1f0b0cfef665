from __future__ import annotations

import time
from dataclasses import replace

import pytest

from diloco.cli.pod_tables import print_offers, print_status
from diloco.cli.provision import plan_json, print_plan
from provisioning.ledger.ledger import Ledger
from provisioning.machines.jobs import JobState
from provisioning.pods.pod import Offer, PodSpec, Row, State
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
    spec = PodSpec(provider="lium", name="multi-dataset-0", ttl_hours=8)
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
    assert counted.split()[-1] == "7" and uncounted.split()[-1] == "950"


def kept(tmp_path, *, hours):
    """A plan that keeps one pod for 2 $/h, ordered an hour ago."""
    spec = PodSpec(provider="lium", name="pod-0", ttl_hours=hours)
    offer = replace(OFFER, price_per_hour=2.0)
    row = Ledger(tmp_path / "pods.sqlite").add(spec, offer, now=time.time() - 3600)
    return Plan(create=(), keep=(row,), destroy=())


def test_pods_that_are_kept_cost_until_their_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    agreed = kept(tmp_path, hours=6)
    new = replace(agreed, create=(Creation(PodSpec(provider="lium", name="new", ttl_hours=1), OFFER),))
    print_plan(new, to_stderr=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2][-3:] == ["2.00", "5", "10.00"]
    assert lines[3][-2:] == ["1236.56", "1244.56"]
    assert plan_json(new)["price_until_end"] == pytest.approx(1244.56, abs=0.01)
    agreed = kept(tmp_path / "endless", hours=None)
    assert plan_json(agreed)["price_until_end"] is None


def test_the_status_has_its_figures_whole_on_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    offer = replace(OFFER, price_per_hour=12.34)
    row = Row(
        **{"name": "pod-0", "label": "l", "state": State.RUNNING, "provider_id": "id", "offer": offer},
        **{"spec": PodSpec(provider="lium", name="pod-0"), "asked_at": 0.0, "ends_at": None},
    )
    look = PeerProgress(JobState(False, 0), epoch=120, step=12_345, tokens=84_992)
    pod = Status(row, True, "finished", look, dollars=123.45)
    print_status(Overview([pod], {}))
    shown = capsys.readouterr().out
    assert all(word in shown for word in (" 12.34 ", " 123.45 ", " 12345 ", " 85k", "finished"))
    assert "e+" not in shown
