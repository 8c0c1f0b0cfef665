"""The `diloco peer --role rollout` command: learners train on what rollout peers generate, while those come and go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from peers.daemon.rollout_peer import SLOT_PREFIX
from peers.net.identity import load, load_or_create
from peers.protocol.rollouts import learner_for
from tests.e2e.test_readme import CLOSED_DHT, ROLLOUT_LEARNER, ROLLOUT_PEER
from tests.support.commands import (
    DILOCO,
    check_gone,
    coordinator_at,
    digests_of,
    records_of,
    text_of_boxes,
    wait_until,
)
from tests.support.documents import MADDR, typed
from tests.support.tiny_model import small_bare_model

REWARD = '''
def early(completion, example):
    """The share of bytes from the first half of the alphabet: every model earns some, and can earn more."""
    return sum(byte < 128 for byte in completion.text.encode()) / max(len(completion.text.encode()), 1)
'''
LEARNER = ("--hv.local-steps", 4, "--warmup-steps", 0, "--lr", "1e-3")
SHORT = ("--total-batch-size", 8, "--grpo.num-generations", 4, "--grpo.max-completion-length", 8)
RUN_ID = "diloco"
"""The default: the commands do not set --run-id."""
NUM_STEPS = 12
"""Steps that the learner must take after the loss of a rollout peer."""


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    return f"{tmp_path / 'reward.py'}:early"


def senders(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The latest record of each rollout peer whose rollouts were trained on, by peer id."""
    return {record["peer_id"]: record for record in records_of(run_dir, "rollouts") if record["taken"]}


def key(directory: Path, slot: str) -> Path:
    """The key file of a command that runs in this directory."""
    return directory / "state" / "diloco" / RUN_ID / f"{slot}.key"


def draw_key(path: Path, learner: str, learners: list[str]) -> str:
    """Draw keys until one belongs to a rollout peer that is assigned to this learner (by the hash of its peer id), and
    leave that key in `path`. Returns the peer id."""
    while True:
        identity = load_or_create(path)
        identity.release()
        if learner_for(RUN_ID, identity.peer_id, learners) == learner:
            return identity.peer_id
        path.unlink()


def test_a_learner_goes_on_when_one_of_its_rollout_peers_is_killed(start, tmp_path, reward):
    model = small_bare_model(tmp_path / "model", initializer_range=0.2)
    maddr, run_dir = coordinator_at(start), tmp_path / "run"
    common = ("--device", "cpu", "--grpo.reward", reward)
    more = ("--total-steps", 100_000, "--grpo.eval-prompts", 0, "--run-dir", run_dir)
    words = typed(ROLLOUT_LEARNER, *common, *LEARNER, *SHORT, *more, maddr=maddr, path_model=model)
    learner = start(*words, name="learner")
    first, second = (
        start(*typed(ROLLOUT_PEER, *common, maddr=maddr, path_model=model), name=name)
        for name in ("first", "second")
    )
    wait_until(lambda: len(senders(run_dir)) == 2, "rollouts of both", command=learner)

    first.close()
    steps = len(records_of(run_dir, "step"))
    wait_until(
        lambda: len(records_of(run_dir, "step")) > steps + NUM_STEPS, "steps after the loss", command=learner
    )
    assert second.code is None

    learner.interrupt()
    assert learner.wait() == 130
    second.interrupt()
    assert second.wait() == 130
    check_gone(second)
    trained = records_of(run_dir, "step")
    starts = [record for record in records_of(run_dir, "event") if record["event"] == "start"]
    assert len(starts) == 1, "the learner was started again"
    num_senders = [record["rollout_peers"] for record in trained]
    # Before the first rollout peer is up, a learner may generate its own.
    first_from_peers = next(index for index, number in enumerate(num_senders) if number)
    assert all(number in (1, 2) for number in num_senders[first_from_peers:])
    assert all(record["staleness_max"] <= 8 for record in trained)
    # With the same weights, the sampler's log-probabilities equal the trainer's.
    fresh = [record for record in trained if record["staleness_max"] == 0]
    assert all(record["logp_difference_max"] < 1e-3 for record in fresh)
    assert any(record["grad_norm"] > 0 for record in trained)
    assert not list(run_dir.glob("policies")) and not list(second.directory.glob("runs/*/policies"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", [(), ("--grpo.lora-rank", 2)], ids=["weights", "adapters"])
def test_in_a_closed_swarm_two_learners_with_rollout_peers_hold_the_same_bits(
    start, tmp_path, reward, trained
):
    coordinator = start(*typed(CLOSED_DHT, host_maddrs="/ip4/127.0.0.1/tcp/0"), name="dht")
    wait_until(lambda: "swarm secret in" in coordinator.stdout, "where the secret is", command=coordinator)
    maddr = coordinator.stdout.splitlines()[0].split()[1]
    secret = ("--swarm-secret-file", re.findall(r"swarm secret in (\S+?):", coordinator.stdout)[0])
    model = small_bare_model(tmp_path / "model", initializer_range=0.2)
    common = ("--device", "cpu", "--grpo.reward", reward)
    learners, run_dirs = [], [tmp_path / f"run-{rank}" for rank in (0, 1)]
    for rank, run_dir in enumerate(run_dirs):
        more = ("--total-steps", 100_000, "--grpo.eval-prompts", 0, "--run-dir", run_dir, "--galaxy-size", 2)
        words = typed(
            ROLLOUT_LEARNER,
            *common,
            *secret,
            *trained,
            *LEARNER,
            *SHORT,
            *more,
            maddr=maddr,
            path_model=model,
        )
        learners.append(start(*words, "--world-rank", rank, name=f"learner-{rank}"))
    stranger = start(*typed(ROLLOUT_PEER, *common, maddr=maddr, path_model=model), name="stranger")
    keys = [key(tmp_path / f"learner-{rank}", str(rank)) for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in keys), "the learners' keys", command=learners[0])
    ids = [load(path).peer_id for path in keys]
    # The hash of its peer id assigns a rollout peer to a learner. Chosen keys give each learner one rollout peer.
    for rank, run_dir in enumerate(run_dirs):
        name = f"rollout-{rank}"
        peer_id = draw_key(key(tmp_path / name, f"{SLOT_PREFIX}0"), ids[rank], ids)
        start(*typed(ROLLOUT_PEER, *common, *secret, maddr=maddr, path_model=model), name=name)
        wait_until(
            lambda run_dir=run_dir, peer_id=peer_id: peer_id in senders(run_dir),
            "its rollouts",
            command=learners[rank],
        )
    assert stranger.wait() == 2
    assert "admits only peers that have its secret" in text_of_boxes(stranger.stderr)[-1]

    def digests() -> list[dict[int, str]]:
        return [digests_of(run_dir) for run_dir in run_dirs]

    epochs = min(map(len, digests()))
    wait_until(lambda: min(map(len, digests())) >= epochs + 3, "more epochs", command=learners[0])
    first, second = digests()
    assert all(first[epoch] == second[epoch] for epoch in first.keys() & second.keys())
    assert len(set(first.values())) >= 3
    trained = [records_of(run_dir, "step")[-1] for run_dir in run_dirs]
    assert all(record["rollout_peers"] >= 1 for record in trained)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--initial-peers", MADDR, "--rollout", "peers"), "a rollout peer takes --rollout vllm, or hf"),
        (("--initial-peers", MADDR, "--mode", "pretrain"), "--role rollout is for --mode grpo"),
        (("--rollout", "hf"), "--initial-peers is missing"),
    ],
)
def test_a_rollout_peer_that_cannot_work_says_why(start, flags, says):
    ran = start(*DILOCO, "peer", "--role", "rollout", "--device", "cpu", *flags)
    assert ran.wait() == 2
    assert says in text_of_boxes(ran.stderr)[-1]


@pytest.mark.exhaustive
def test_a_rollout_peer_that_no_learner_takes_says_why(start):
    flags = ("--initial-peers", coordinator_at(start), "--rollout", "hf", "--hv.timeout-waiting-for-peers", 1)
    ran = start(*DILOCO, "peer", "--role", "rollout", "--device", "cpu", *flags)
    assert ran.wait() == 1
    assert "no peer of the run diloco took rollouts within 1 s" in text_of_boxes(ran.stderr)[-1]
