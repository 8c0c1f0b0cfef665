"""A trainer that pushes its weights to an inference server, and checks that every such server has to pass."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from diloco.rl.own_server import OwnServer
from diloco.rl.push import Publisher
from diloco.rl.rollouts import Rollouts
from diloco.rl.server_client import ServerClient
from tests.support.rollouts import CLOSE, PROMPTS, SAMPLING, difference, refused_blobs, train_a_little


class Trainer:
    """A model, and how its weights get to a running server, which is started again if it dies."""

    def __init__(self, directory: Path, server: OwnServer) -> None:
        self.directory = directory
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.publisher, self.events = Publisher(torch.float32), list[str]()
        self.client = ServerClient(server.socket)
        self.rollouts = Rollouts(
            server, directory, self.publisher, lambda **event: self.events.append(event["event"])
        )

    def push(self, seed: int, *, share: float = 1.0) -> None:
        """Train a little, and hand over the weights."""
        train_a_little(self.model, seed, share=share)
        self.publisher.take(self.model.named_parameters())
        self.rollouts.push()

    def is_close(self, seed: int) -> bool:
        """Whether the server generates with this trainer's weights."""
        return difference(self.model, self.rollouts.complete(PROMPTS, 2, SAMPLING, seed=seed)) <= CLOSE


def check_pushes(trainer: Trainer) -> None:
    """Assert that the server has the trainer's log-probabilities after every push, and not without one."""
    kinds = []
    for step, share in enumerate((1.0, 0.01, 1.0)):
        trainer.push(step, share=share)
        kinds.append(trainer.rollouts.last_push["is_patch"])
        assert trainer.is_close(step)
    assert kinds == [False, True, False]
    train_a_little(trainer.model, 9)
    assert not trainer.is_close(9)


def check_refusals(trainer: Trainer) -> None:
    """Assert that invalid weights are refused with the right message, and that the old ones stay in use."""
    path = trainer.directory / "blob"
    for step in range(2):
        trainer.push(step)
    before = trainer.client.call("diloco_state")
    for blob, words in refused_blobs(trainer.publisher.state):
        path.write_bytes(blob)
        answer = trainer.client.pull(path, hashlib.sha256(blob).hexdigest())
        assert not answer["ok"] and not answer.get("is_lost")
        assert re.search(words, answer["error"]), answer["error"]
        assert trainer.client.call("diloco_state") == before
    assert "not the one announced" in trainer.client.pull(path, "0" * 64)["error"]
    path.unlink()
    assert "No such file" in trainer.client.pull(path, "0" * 64)["error"]
    assert trainer.is_close(3)
