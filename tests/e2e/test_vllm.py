"""Real vLLM servers on the CPU, in a virtual environment of their own: `make test-vllm`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from benchmarks.format_model import TASK, bare_model
from diloco.rl.own_server import OwnServer, vllm_command
from diloco.rl.sampling import BadPolicy
from diloco.rl.server_client import Sampling
from diloco.train.model import load_model
from tests.e2e.test_rollout_peers import REWARD
from tests.support.commands import DILOCO, check_gone, wait_until
from tests.support.pushing import Trainer, check_pushes, check_refusals
from tests.support.rollouts import CLOSE, PROMPTS, difference

pytestmark = pytest.mark.vllm
START_TIMEOUT_S = 400.0
RUN_TIMEOUT_S = 1500.0


@pytest.fixture(scope="module")
def python():
    path = os.environ.get("DILOCO_VLLM_PYTHON", "")
    assert Path(path).is_file(), "DILOCO_VLLM_PYTHON names no Python that has vLLM; make test-vllm sets it up"
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request, python, tmp_path_factory):
    """A running server, and the model that it was started with."""
    directory = tmp_path_factory.mktemp("vllm")
    bare = bare_model(directory / "bare", tie_word_embeddings=request.param)
    load_model(str(bare), seed=0).save_pretrained(bare)
    command = vllm_command(
        python=python,
        model=bare,
        dtype="float32",
        gpu=None,
        more=(),
        log_path=directory / "logs" / "vllm.log",
        timeout_s=START_TIMEOUT_S,
        environment={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    with OwnServer(command) as server:
        server.start()
        yield server, bare
        left = processes_of(server.socket)
        assert left
    check_none_lives(left)


def processes_of(socket: Path) -> list[psutil.Process]:
    """The server on this socket, and all that it has started."""
    leaders = [p for p in psutil.process_iter(["cmdline"]) if str(socket) in (p.info["cmdline"] or [])]
    return list({child for leader in leaders for child in (leader, *leader.children(recursive=True))})


def check_none_lives(processes: list[psutil.Process]) -> None:
    """All end within ten seconds. A zombie counts as ended: its parent may never reap it."""
    _, left = psutil.wait_procs(processes, timeout=10)
    living = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.cmdline())
    assert not living


def test_after_every_push_the_server_has_the_trainers_log_probabilities(served):
    server, directory = served
    check_pushes(Trainer(directory, server))


def test_what_is_not_to_be_loaded_is_refused_by_name_and_the_old_weights_serve_on(served):
    server, directory = served
    check_refusals(Trainer(directory, server))


def test_a_server_killed_in_a_rollout_is_restarted_with_the_current_weights_and_asked_again(served):
    server, directory = served
    trainer = Trainer(directory, server)
    trainer.push(1)
    before = processes_of(server.socket)
    # Long enough that the rollout is under way when the server's main process, and not its children, is killed.
    longer = Sampling(max_tokens=400)
    lines = {}
    for process in before:
        # Some processes live only for a moment.
        with contextlib.suppress(psutil.NoSuchProcess):
            lines[process] = " ".join(process.cmdline())
    servers_own = [p for p, line in lines.items() if "api_server" in line and "guardian" not in line]
    leader = min(servers_own, key=lambda process: process.create_time())
    killer = threading.Timer(0.5, lambda: os.kill(leader.pid, signal.SIGKILL))
    killer.start()
    written = trainer.rollouts.complete(PROMPTS * 8, 2, longer, seed=5)
    killer.join()
    assert trainer.events[:2] == ["server_lost", "server_restarted"] and server.num_restarts >= 1
    assert [len(one.token_ids) for one in written] == [2] * 16
    assert difference(trainer.model, written[:2]) <= CLOSE
    check_none_lives(before)


def test_weights_that_give_no_probabilities_are_refused_and_the_next_ones_are_served(served):
    server, directory = served
    trainer = Trainer(directory, server)
    finite = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.model.load_state_dict({name: tensor * 1e12 for name, tensor in finite.items()})
    trainer.publisher.take(trainer.model.named_parameters())
    with pytest.raises(BadPolicy, match="does not work with these weights"):
        trainer.rollouts.complete(PROMPTS, 2, Sampling(max_tokens=5), seed=1)
    assert trainer.events == []
    trainer.model.load_state_dict(finite)
    trainer.push(1)
    assert trainer.is_close(1) and trainer.events == ["server_lost", "server_restarted"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_two_peers_with_a_server_each_keep_to_their_trainers_log_probabilities(start, python, tmp_path, tied):
    model = bare_model(tmp_path / "model", tie_word_embeddings=tied)
    (tmp_path / "reward.py").write_text(REWARD)
    ran = start(
        *(*DILOCO, "run", "--mode", "grpo", "--path-model", model, "--dataset", TASK, "--device", "cpu"),
        # Rewards differ from the first step on: without any, nothing is learned and no weights are pushed.
        *("--grpo.reward", f"{tmp_path / 'reward.py'}:early"),
        *("--grpo.vllm-python", python, "--lr", "1e-3", "--warmup-steps", 0, "--total-steps", 6),
        *("--grpo.vllm-timeout", START_TIMEOUT_S, "--hv.local-steps", 2, "--total-batch-size", 16),
        *("--grpo.max-completion-length", 16, "--grpo.eval-prompts", 4, "--run-dir", tmp_path / "run"),
    )
    assert ran.wait(RUN_TIMEOUT_S) == 0, ran.stderr
    assert "all peers held bit-identical anchors after every epoch" in ran.stdout
    for rank in (0, 1):
        lines = (tmp_path / "run" / f"peer-{rank}" / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
        assert len(steps) == 6 and all(step["logp_difference_max"] <= CLOSE for step in steps)
        assert len({step["push_s"] for step in steps}) == 6, "every rollout has weights of its own"
    check_gone(ran)
    wait_until(lambda: not ran.processes(), "the end of all servers", 30)
