"""Text from providers, pods, logs and users is shown unchanged, including brackets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.cli.experiments import print_results
from diloco.cli.pod_tables import print_offers, print_status
from diloco.cli.provision import print_plan
from provisioning.experiments.runs import Result
from provisioning.pods.pod import Offer, PodSpec, Row, State
from provisioning.renting.plan import Creation, Plan, Removal
from provisioning.swarm.status import Overview, Status

OFFER = Offer(id="o", provider="vast", gpu_type="A100", gpu_count=1, price_per_hour=1.0)
ROW = Row(
    **{"name": "pod-0", "label": "l", "state": State.RUNNING, "provider_id": "id", "offer": OFFER},
    **{"spec": PodSpec(provider="lium", name="pod-0"), "asked_at": 0.0, "ends_at": None},
)


@pytest.mark.parametrize("text", ["[/data/nothing] is not a file", "[rank0]: size [3, 4]", "[bold]x[/]"])
def test_brackets_in_untrusted_text_are_no_markup(text, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    offer = replace(OFFER, gpu_type=text)
    print_offers([offer])
    print_offers([replace(OFFER, city=text)])
    spec = PodSpec(provider="lium", name="pod-0")
    print_plan(Plan(create=(Creation(spec, offer),), keep=(), destroy=()), to_stderr=False)
    print_plan(Plan(create=(), keep=(), destroy=(Removal(ROW, text),)), to_stderr=False)
    print_status(Overview([Status(ROW, True, text)], {}))
    print_results([Result(name="e", pod="p", job="j", ok=False, trouble=text)], "loss")
    assert capsys.readouterr().out.count(text) == 6
