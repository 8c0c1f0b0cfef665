"""Which pods the flags of `diloco provision` and the tables of its --file ask for."""

from __future__ import annotations

import pytest

from diloco.cli.provision import PodFlags
from diloco.errors import UserError
from provisioning.errors import UserError as ProvisioningUserError


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
