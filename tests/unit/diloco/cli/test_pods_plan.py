from __future__ import annotations

from dataclasses import replace

from diloco.cli.offers import print_offers
from diloco.cli.pods import print_status
from diloco.cli.provision import print_plan
from provisioning.ledger.row import Row, State
from provisioning.machines.jobs import JobState
from provisioning.machines.use import Use
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


def test_the_status_has_its_figures_and_the_use_whole_on_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    offer = replace(OFFER, price_per_hour=12.34)
    row = Row(
        **{"name": "pod-0", "label": "l", "state": State.RUNNING, "provider_id": "id", "offer": offer},
        **{"spec": PodSpec(name="pod-0"), "asked_at": 0.0, "ends_at": None},
    )
    look = PeerProgress(JobState(False, 0), epoch=120, step=12_345, tokens=84_992)
    pod = Status(row, True, "finished", look, Use(cpu=100.0), dollars=123.45)
    print_status(Overview([pod], {}, dollars=123.45))
    shown = capsys.readouterr().out
    assert all(word in shown for word in (" 12.34 ", " 123.45 ", " 12345 ", " 85k ", "CPU 100 %", "finished"))
    assert "85k tokens trained" in shown and "e+" not in shown
