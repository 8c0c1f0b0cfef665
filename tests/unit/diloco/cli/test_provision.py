"""Which pods the flags of `diloco provision` and the tables of its --file ask for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from types import SimpleNamespace

import pytest

from diloco.cli import pods_flags, provision
from diloco.cli.provision import Care, PodFlags, given_back
from diloco.errors import UserError
from provisioning.errors import ProviderError, ResultsNotFetched
from provisioning.errors import UserError as ProvisioningUserError
from provisioning.ledger.ledger import Ledger
from provisioning.providers.registry import Access
from provisioning.renting import renters
from provisioning.swarm.keeper import Keeper, Wanted


def asked(**flags):
    return [(spec.name, spec.provider, spec.gpu_type, spec.gpu_count) for spec in PodFlags(**flags).specs()]


def test_pods_on_this_machine_are_of_one_process_unless_a_gpu_type_says_otherwise():
    assert asked(pods=1) == [("pod-0", "local", "cpu-1", None)]
    assert asked(pods=3, gpu_type=("cpu-2,cpu-4",)) == [
        ("pod-0", "local", "cpu-2", None),
        ("pod-1", "local", "cpu-4", None),
        ("pod-2", "local", "cpu-2", None),
    ]


def test_machines_of_ones_own_are_taken_as_they_are_and_rented_ones_have_eight_a100():
    assert asked(pods=1, provider="ssh") == [("pod-0", "ssh", None, None)]
    assert asked(pods=1, provider="local,ssh") == [("pod-0", "local,ssh", None, None)]
    assert asked(pods=1, provider="ssh", gpu_count=2) == [("pod-0", "ssh", None, 2)]
    assert asked(pods=1, provider="lium") == [("pod-0", "lium", "A100", 8)]
    assert asked(pods=1, provider="ssh,lium") == [("pod-0", "ssh,lium", "A100", 8)]


def test_a_table_of_a_file_gets_the_defaults_of_its_own_provider_and_the_flags_that_it_does_not_say(tmp_path):
    path = tmp_path / "pods.toml"
    path.write_text(
        '[[pods]]\n[[pods]]\nprovider = "lium"\n[[pods]]\ngpu_type = "H100"\n'
        '[[pods]]\nname = "office"\nprovider = "ssh"\n'
    )
    assert asked(file=path) == [
        ("pod-0", "local", "cpu-1", None),
        ("pod-1", "lium", "A100", 8),
        ("pod-2", "local", "H100", None),
        ("office", "ssh", None, None),
    ]
    assert asked(file=path, gpu_type=("cpu-2", "cpu-4"), gpu_count=1) == [
        ("pod-0", "local", "cpu-2", 1),
        ("pod-1", "lium", "cpu-4", 1),
        ("pod-2", "local", "H100", 1),
        ("office", "ssh", "cpu-2", 1),
    ]


def test_flags_that_name_no_pods_or_name_them_twice_are_refused(tmp_path):
    for flags in ({}, {"pods": 2, "file": tmp_path / "pods.toml"}):
        with pytest.raises(UserError, match="one of the two"):
            asked(**flags)
    path = tmp_path / "pods.toml"
    path.write_text('[[pods]]\nname = "a"\n[[pods]]\nname = "a"\n')
    with pytest.raises(ProvisioningUserError, match="two pods named a"):
        asked(file=path)
    path.write_text("[[pods]]\ngpu_count = 0\n")
    with pytest.raises(ProvisioningUserError, match="`gpu_count`"):
        asked(file=path)


def test_offers_are_not_listed_by_a_file(tmp_path):
    with pytest.raises(
        UserError, match=r"--offers works with flags only: in place of --file .*none.toml, give --provider"
    ):
        PodFlags(file=tmp_path / "none.toml").filters()


@pytest.mark.parametrize(
    ("answer", "others", "code"),
    [
        ("n\n", {"pod-2": ProviderError("lium says 500")}, 1),
        ("y\n", {"pod-2": ProviderError("lium says 500")}, 1),
        ("n\n", {}, 1),
        ("y\n", {}, 0),
    ],
)
async def test_a_pod_that_still_costs_is_told_of_whatever_is_answered_about_another_ones_results(
    monkeypatch, capsys, answer, others, code
):
    async def down(names, *, discard_results):
        assert not discard_results or (names, answer) == (["pod-1"], "y\n")
        return {} if discard_results else {"pod-1": ResultsNotFetched("no space left"), **others}

    async def typed():
        asked = "!!! pod-1: no space left\nGive back pod-1 without their results? [y/N] "
        assert capsys.readouterr().err == asked
        return answer

    found = contextlib.nullcontext(SimpleNamespace(down=down))
    monkeypatch.setattr(renters, "renters", lambda *_, **__: found)
    monkeypatch.setattr(pods_flags, "_typed_line", typed)
    monkeypatch.setattr(provision, "ensure_watcher", lambda _: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    ledger = SimpleNamespace(rows=lambda: ["pod-1"])
    assert await given_back(ledger, None, (), None, yes=False) == code
    assert capsys.readouterr().err == "".join(f"!!! {name}: {error}\n" for name, error in others.items())


def test_a_replacement_may_take_as_long_to_boot_as_the_pods_that_were_rented(tmp_path, monkeypatch):
    async def applied(*_: object) -> dict[str, ProviderError]:
        return {"pod-0": ProviderError("it did not come up")}

    async def brought_up(
        self, found: renters.Renters, wanted: Wanted, *_: object
    ) -> dict[str, ProviderError]:
        boots_s.append(found["local"].patience.boot_s)
        return {}

    boots_s = list[float]()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(renters.Renters, "apply", applied)
    monkeypatch.setattr(Keeper, "_brought_up", brought_up)
    path, which = tmp_path / "pods.sqlite", PodFlags(pods=1)
    told = {"care": Care(idle_stop=True), "yes": True, "state_file": path}
    assert provision.provision(which=which, boot_timeout=3600.0, **told) == 1
    # What is only planned changes nothing.
    assert provision.provision(which=which, plan=True, **told) == 0
    ledger = Ledger(path)
    keeper = Keeper(ledger, Access(state_dir=tmp_path, environment={}), lambda name, text: None)
    wanted = Wanted.read(ledger)
    assert wanted is not None
    asyncio.run(keeper._restore(wanted, {}, ""))
    ledger.close()
    assert boots_s == [3600.0]
