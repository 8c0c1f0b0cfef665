"""A real Ray with a head and one other node, on two local pods in a network namespace. `make test-ray`."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from diloco.train.metrics_file import Tail
from provisioning.launchers.ray_yaml import RayHost, cluster_yaml
from tests.support.commands import ROOT, Command, check_gone, model_directory, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed; try make test-ray"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

TIMEOUT_S = 900.0
DILOCO = f"{sys.executable} -m diloco"
SCRIPT = """
set -e
ip link set lo up
{diloco} provision --pods 2 --gpu-type cpu-1 --deploy-only
{launches}
{then}
{diloco} pods down
exit ${{code:-0}}
"""
LAUNCH = "launch --engine ray {config} 2 --cpus-per-node 2 {more}"


RAY = f"{sys.executable} -m ray.scripts.scripts"
# Of anybody who reaches the ports of Ray but has no token.
STRANGER = f"""
{RAY} job submit --address http://127.0.0.1:8265 -- echo stranger-ran 2>&1 || echo stranger-refused
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=wrong {RAY} job submit --address http://127.0.0.1:8265 -- echo stranger-ran 2>&1 \
  || echo stranger-refused
{RAY} status --address 127.0.0.1:6379 2>&1 || echo stranger-refused
"""


def in_namespace(directory: Path, *launches: str, then: str = "") -> Command:
    """A command that makes two pods, launches on them and gives them back, in its own network namespace."""
    lines = "\n".join(f"{DILOCO} {words} || code=$?" for words in launches)
    script = SCRIPT.format(diloco=DILOCO, launches=lines, then=then)
    return Command(
        ["unshare", "-n", "-p", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script], directory
    )


def placements(said: str) -> list[tuple[str, str]]:
    """The nodes of the two workers, for each time that the workers were placed."""
    return re.findall(r"one worker on each of 2 nodes: (\w+) at [\d.]+, (\w+) at", said)


def left_in_tmp() -> set[str]:
    return {path.name for pattern in ("diloco-pod-*", "ray*") for path in Path("/tmp").glob(pattern)}


def ranks(command: Command) -> list[int]:
    """Process ids of the trainers that Ray's workers have started, without the processes that wait for them."""
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
    before = left_in_tmp()
    command = in_namespace(tmp_path / "ray", LAUNCH.format(config=config, more=""))
    commands.append(command)

    def has_checkpoint() -> bool:
        return bool(list((tmp_path / "ckpt").glob("model_step_*/complete.json"))) and len(ranks(command)) == 2

    wait_until(has_checkpoint, "a checkpoint", TIMEOUT_S, command)
    os.kill(ranks(command)[1], signal.SIGKILL)
    killed_at = time.time()
    assert command.wait(TIMEOUT_S) == 0, command.stdout + command.stderr
    check_gone(command, 30.0)
    assert "the Ray cluster has 2 nodes" in command.stderr
    placed = placements(command.stdout)
    assert len(placed) >= 2 and all(first != second for first, second in placed), command.stdout
    assert left_in_tmp() == before
    records = Tail(tmp_path / "run/metrics.jsonl").read()
    starts = [one for one in records if one["kind"] == "event" and one["event"] == "start"]
    assert starts[-1]["step"] >= 10 and starts[-1]["time"] > killed_at
    assert max(one["step"] for one in records if one["kind"] == "step") == 200


def test_alexnet_runs_on_two_nodes_as_one_training(tmp_path, commands):
    """The example's own words, on fewer pictures and a narrower net."""
    config = tmp_path / "alexnet.toml"
    text = (ROOT / "examples/alexnet.toml").read_text()
    config.write_text(f'{text}\npasses = 2\nmade = 1200\nwidth = 0.125\ndata = "{tmp_path / "data"}"\n')
    program = "--program examples/alexnet_ray.py"
    command = in_namespace(tmp_path / "ray", LAUNCH.format(config=config, more=program), then=STRANGER)
    commands.append(command)
    assert command.wait(TIMEOUT_S) == 0, command.stdout + command.stderr
    check_gone(command, 30.0)
    placed = placements(command.stdout)
    assert len(placed) >= 2 and all(first != second for first, second in placed), command.stdout
    assert len(re.findall(r"pass 2: train accuracy 0\.\d+, validation accuracy 0\.\d+", command.stdout)) == 1
    assert len(re.findall(r"test accuracy 0\.\d+ by 2 ranks$", command.stdout, re.M)) == 1
    assert command.stdout.count("stranger-refused") == 3
    assert command.stdout.count("ray.exceptions.AuthenticationError") == 3
    assert "\nstranger-ran" not in command.stdout


def test_the_cluster_can_be_written_down_for_rays_own_launcher():
    """The file passes Ray's own validation."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    values = yaml.safe_load(
        cluster_yaml(
            [
                RayHost(inside="10.0.0.1", outside="203.0.113.1"),
                RayHost(inside="10.0.0.2", outside="203.0.113.2", ssh_port=2222),
            ],
            owner="abcd",
            user="ada",
            key=Path("/home/ada/.ssh/id"),
            python="venv/bin/python",
            cpus=None,
        )
    )
    validate_config(prepare_config(values))
    assert values["provider"]["external_head_ip"] == "203.0.113.1"
    assert values["provider"]["worker_ips"] == ["10.0.0.2"]
    assert (values["min_workers"], values["auth"]["ssh_user"]) == (1, "ada")


def test_nothing_of_ray_listens_beyond_loopback_but_its_own_port(tmp_path: Path):
    from provisioning.launchers.ray_cluster import RayJob, start_argv, submit_argv
    from provisioning.pods.pod import Pod

    head = Pod(id="1", label="x", is_ready=True, host="10.0.0.1")
    words = start_argv("python", head, head, cpus=None)
    assert "--dashboard-host=127.0.0.1" in words and "--node-ip-address=10.0.0.1" in words
    job = RayJob(num_nodes=2, program=["train.py"], storage="/shared", use_gpu=True)
    assert "http://127.0.0.1:8265" in submit_argv("python", "/pod/venv/bin/python", job)
