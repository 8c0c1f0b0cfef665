"""A real Ray, head and one more node on two pods of this machine, in a network namespace. `make test-ray`."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.metrics_file import Tail
from tests.support.commands import Command, check_gone, model_directory, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed; try make test-ray"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

TIMEOUT_S = 500.0
DILOCO = f"{sys.executable} -m diloco"
SCRIPT = """
set -e
ip link set lo up
{diloco} provision --pods 2 --gpu-type cpu-1 --deploy-only
{diloco} launch --engine ray {config} 2 --cpus-per-node 2 || code=$?
{diloco} pods down
exit ${{code:-0}}
"""


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.close()


def ranks(command: Command) -> list[int]:
    """The trainers that Ray's workers have started, not what waits for them."""
    found = [(pid, words.split()) for pid, words in command.processes().items()]
    return [pid for pid, words in found if words[1:3] == ["-m", "diloco.train_fsdp"]]


def test_our_trainer_on_two_workers_survives_the_loss_of_one(tmp_path, commands):
    """One of the two ranks is killed after the first checkpoint; both go on from it, and Ray leaves nothing."""
    config = tmp_path / "config.toml"
    values = {
        "path_model": str(model_directory(tmp_path / "model")),
        **{"seq_length": 64, "total_batch_size": 4, "eval_tokens": 64, "max_steps": 200, "device": "cpu"},
        "run_dir": str(tmp_path / "run"),
    }
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in values.items()]
    ckpt = ["[ckpt]", "interval = 10", f'path = "{tmp_path / "ckpt"}"', 'resume = "auto"', "topk = 3"]
    config.write_text("\n".join([*lines, "fake_data = true", *ckpt]) + "\n")
    script = SCRIPT.format(diloco=DILOCO, config=config)
    argv = ["unshare", "-n", "-p", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
    command = Command(argv, tmp_path / "ray")
    commands.append(command)

    def has_checkpoint() -> bool:
        return bool(list((tmp_path / "ckpt").glob("model_step_*/complete.json"))) and len(ranks(command)) == 2

    wait_until(has_checkpoint, "a checkpoint", TIMEOUT_S, command)
    os.kill(ranks(command)[1], signal.SIGKILL)
    killed_at = time.time()
    assert command.wait(TIMEOUT_S) == 0, command.stdout + command.stderr
    check_gone(command, 30.0)
    assert "the Ray cluster has 2 nodes" in command.stderr
    records = Tail(tmp_path / "run/metrics.jsonl").read()
    starts = [one for one in records if one["kind"] == "event" and one["event"] == "start"]
    assert starts[-1]["step"] >= 10 and starts[-1]["time"] > killed_at
    assert max(one["step"] for one in records if one["kind"] == "step") == 200


def test_the_cluster_can_be_written_down_for_rays_own_launcher():
    yaml = pytest.importorskip("yaml")
    from provisioning.launchers.ray_cluster import cluster_yaml

    values = yaml.safe_load(cluster_yaml("mine", "ada", "~/.ssh/id", ["10.0.0.1", "10.0.0.2"], "python"))
    assert values["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    assert (values["min_workers"], values["auth"]["ssh_user"]) == (1, "ada")


def test_nothing_of_ray_listens_beyond_loopback_but_its_own_port(tmp_path: Path):
    from provisioning.launchers.ray_cluster import RayJob, head_argv, submit_argv
    from provisioning.pods import Pod

    words = head_argv("python", Pod(id="1", label="x", is_ready=True, host="10.0.0.1"), cpus=None)
    assert "--dashboard-host=127.0.0.1" in words and "--node-ip-address=10.0.0.1" in words
    job = RayJob(num_workers=2, program=["train.py"], storage="/shared", use_gpu=True)
    assert "http://127.0.0.1:8265" in submit_argv("python", job)
