from __future__ import annotations

from diloco.cli.offers import print_offers
from diloco.cli.provision import print_plan
from provisioning.pods.pod import Offer
from provisioning.pods.spec import PodSpec
from provisioning.renting.plan import Creation, Plan

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
