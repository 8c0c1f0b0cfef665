"""`diloco experiments run lr_sweep` on two pods of this machine, with a model that trains in milliseconds."""

from __future__ import annotations

import json

import pytest

from provisioning.machines.paths import PODS
from tests.support.commands import check_gone, model_directory
from tests.support.pods_commands import argv_of

RUN = (
    "diloco experiments run lr_sweep --trainer pretrain --provider local --total-steps 4 --batch-size 2 "
    "--grad-accum-steps 2 --json"
)
MORE = ("--fake-data", "--warmup-steps", 1, "--seq-length", 64, "--eval-tokens", 64, "--device", "cpu")


@pytest.mark.pods
def test_four_experiments_on_two_pods_have_four_learning_rates_in_four_results(run, tmp_path):
    model = model_directory(tmp_path / "model")
    sweep = argv_of(RUN, "--model-id", model, "--dataset", "stdlib", "--ttl-hours", 1, "--", *MORE)
    first = run(sweep)
    assert first.code == 0, first.stderr
    results = json.loads(first.stdout)["experiments"]
    assert [result["name"] for result in results] == ["lr-1e-06", "lr-3e-06", "lr-5e-06", "lr-1e-05"]
    assert [result["pod"] for result in results] == ["lr-sweep-0", "lr-sweep-1"] * 2
    assert all((result["ok"], result["step"]) == (True, 4) for result in results)
    assert len({result["figure"] for result in results}) == 4

    # Finished experiments are not repeated; all failures are reported, and the exit code is 1.
    again = run(sweep)
    assert again.stderr.count("is done already") == 4 and "begins" not in again.stderr
    failing = run(sweep, "--precision", "fp8")
    found = json.loads(failing.stdout)["experiments"]
    assert failing.code == 1 and [result["ok"] for result in found] == [False] * 4
    assert "--precision" in found[0]["trouble"]

    logs = run("diloco pods logs", "--state-file", tmp_path / "here/state/diloco/experiments/lr_sweep.sqlite")
    assert logs.code == 0 and "lr-sweep-0/lr-1e-06" in logs.stdout, logs.stderr

    gone = run("diloco experiments destroy lr_sweep")
    assert gone.code == 0, gone.stderr
    # Finished experiments need no pod and are not repeated.
    for more in ((), ("--no-deploy",)):
        finished = run(sweep[: -len(MORE) - 1], *more, "--", *MORE)
        assert finished.code == 0, finished.stderr
        assert [one["ok"] for one in json.loads(finished.stdout)["experiments"]] == [True] * 4
    # The process that watches the pods' time has ended, too.
    check_gone(first)
    assert not (tmp_path / "here/state/diloco/local" / PODS).exists()
