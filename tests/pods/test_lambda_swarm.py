"""The commands with Lambda's emulator: Lambda's user name, port 22, and an own address for each machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.commands import check_gone, model_directory
from tests.support.lambda_api import LambdaApi
from tests.support.namespaces import hub, inside, why_not
from tests.support.pods_commands import (
    ALL_DOWN,
    LAMBDA_DEPLOY,
    LAMBDA_OFFERS,
    argv_of,
    tiny_training,
)
from tests.support.ssh_machines import SSHD, cloud_machine, needs_rsync

pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
WHY_NOT = why_not() or needs_rsync() or ("" if shutil.which(SSHD) else "needs OpenSSH's server")
pytestmark = [pytest.mark.pods, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LambdaApi]:
    """Two machines behind a router; the commands run on the router."""
    with ExitStack() as stack:
        lan = stack.enter_context(hub(2, forwards=True))
        stack.enter_context(inside(lan.middle))
        hosts = []
        for index, spoke in enumerate(lan.spokes):
            directory, address = tmp_path / f"host{index}", lan.address_of(index)
            machine = cloud_machine(directory, namespace=spoke, address=address, user="ubuntu")
            hosts.append(stack.enter_context(machine))
            hosts[-1].install("nvidia-smi", "echo 'A100, 40960 MiB'")
        api = stack.enter_context(LambdaApi(hosts))
        (tmp_path / "user").mkdir()
        for name, value in {**api.environment, "HOME": str(tmp_path / "user")}.items():
            monkeypatch.setenv(name, value)
        yield api


def test_two_instances_train_together_and_are_given_back(api, run, tmp_path):
    model = model_directory(tmp_path / "model")
    offers = json.loads(run(LAMBDA_OFFERS, "--json").stdout)
    assert sorted(one["price_per_hour"] for one in offers) == [0.75, 1.29, 14.32]
    common = ("--python", sys.executable, "--ttl-hours", 2, "--yes")
    deployed = run(LAMBDA_DEPLOY, *common)
    assert (deployed.code, api.num_launched) == (0, 2), deployed.stderr
    provision = argv_of(LAMBDA_DEPLOY.replace(" --deploy-only", ""))
    up = run(provision, *common, "--", *tiny_training(model, device="cpu"))
    assert up.code == 0, up.stderr
    launches = [one.body for one in api.requests if one.path.endswith("/launch")]
    assert [one["instance_type_name"] for one in launches] == ["gpu_1x_a100", "gpu_1x_a10"]
    found = json.loads(run("diloco pods status --json").stdout)
    assert [(one["peer"], one["epoch"] >= 1) for one in found] == [("trains", True)] * 2
    assert "averaged by 2 peers" in run("diloco pods logs pod-1").stdout
    again = run(provision, *common, "--", *tiny_training(model, device="cpu"))
    assert (again.code, api.num_launched) == (0, 2), again.stderr
    assert run(ALL_DOWN).code == 0
    assert all(one["_ended"] for one in api.instances.values())
    check_gone(up)
    cost = json.loads(run("diloco pods cost --json").stdout)
    assert sorted(one["price_per_hour"] for one in cost["pods"]) == [0.75, 1.29]
