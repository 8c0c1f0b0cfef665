"""Whole swarms that train a torch model, compared with the algorithms that they implement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.outer.world import World
from tests.support.swarm import LightSwarm
from tests.support.torch_ranks import Ranks
from tests.support.torch_worker import flat, fresh_model, inner_step, loss_of, optimizer_of

PLAIN_AVERAGING = {"hv.outer_lr": 1.0, "hv.outer_momentum": 0.0}
ENDS_WITHIN_S = 180.0


@pytest.fixture
def run(swarm):
    """`run(peers=3, manifest={...}, **worker settings)`: runs such a swarm to its end and returns it.

    Commits need all peers and no worker trains ahead of a late commit, so that the machine's load changes no result.
    """

    def finished(*, peers: int, manifest: dict[str, float] | None = None, **worker: Any) -> LightSwarm:
        light = swarm(goes_ahead=False, **worker)
        light.worker_module, light.manifest = "tests.support.torch_worker", manifest or {}
        light.extra = {"quorum": 0.99}
        light.start_all(peers)
        light.wait_finished(timeout_s=ENDS_WITHIN_S)
        light.check_digests()
        for rank, peer in light.peers.items():
            for record in peer.epochs:
                assert record["contributors"] == list(range(peers)), (
                    f"a peer was left out of epoch {record['epoch']}, as peer {rank} says, so nothing can be compared: "
                    f"{record['contributors']}"
                )
        return light

    return finished


@pytest.mark.exhaustive
def test_one_peer_with_outer_lr_1_and_no_momentum_is_plain_training_at_every_sync(run):
    light = run(peers=1, manifest=PLAIN_AVERAGING, local_steps=3, max_steps=12, optimizer="adamw")

    model = fresh_model()
    optimizer = optimizer_of("adamw", model)
    for step in range(12):
        inner_step(model, optimizer, 0, step)
        if step % 3 == 2:
            synced = np.load(light.directory / "peer0" / f"history.jsonl.epoch{step // 3 + 1}.npy")
            np.testing.assert_allclose(synced, flat(model), rtol=0, atol=2e-6)


@pytest.mark.exhaustive
def test_two_peers_with_one_local_step_and_sgd_are_distributed_data_parallel(run):
    light = run(peers=2, manifest=PLAIN_AVERAGING, local_steps=1, max_steps=6, optimizer="sgd")

    with Ranks(2) as ranks:
        expected = ranks.run(train_data_parallel, 6)[0]
    synced = np.load(light.directory / "peer1" / "history.jsonl.epoch6.npy")
    np.testing.assert_allclose(synced, expected, rtol=0, atol=1e-6)


@pytest.mark.exhaustive
def test_three_peers_are_plain_diloco_of_one_process(run):
    light = run(peers=3, local_steps=5, max_steps=20, optimizer="adamw")

    expected = plain_diloco(num_peers=3, local_steps=5, epochs=4)
    for epoch, weights in enumerate(expected, start=1):
        synced = np.load(light.directory / "peer2" / f"history.jsonl.epoch{epoch}.npy")
        np.testing.assert_allclose(synced, weights, rtol=0, atol=1e-6)


def test_three_peers_with_fragments_and_overlap_are_streaming_diloco_of_one_process(run):
    streaming = {"hv.num_fragments": 2, "hv.overlap_steps": 1}
    light = run(peers=3, manifest=streaming, local_steps=6, max_steps=12, optimizer="adamw")

    expected = streaming_diloco(num_peers=3, steps_per_epoch=3, overlap_steps=1, epochs=5)
    for epoch, weights in enumerate(expected, start=1):
        if epoch != 4:
            # Epoch 4 is skipped: the worker sees the weights only after both last averagings, as those of epoch 5.
            merged = np.load(light.directory / "peer2" / f"history.jsonl.epoch{epoch}.npy")
            np.testing.assert_allclose(merged, weights, rtol=0, atol=1e-6)


def train_data_parallel(world: World, num_steps: int) -> np.ndarray:
    model = DistributedDataParallel(fresh_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
    return flat(model.module)


def plain_diloco(*, num_peers: int, local_steps: int, epochs: int) -> list[np.ndarray]:
    """The weights after each epoch of DiLoCo (arXiv 2311.08105, algorithm 1), with torch's own Nesterov SGD."""
    anchor = [p.detach().clone() for p in fresh_model().parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    peers = [(model := fresh_model(), optimizer_of("adamw", model)) for _ in range(num_peers)]
    weights = []
    for epoch in range(epochs):
        for rank, (model, optimizer) in enumerate(peers):
            load(model, anchor)
            for step in range(local_steps):
                inner_step(model, optimizer, rank, epoch * local_steps + step)
        for index, value in enumerate(anchor):
            locals_ = [list(model.parameters())[index].detach() for model, _ in peers]
            value.grad = torch.stack([value - local for local in locals_]).mean(dim=0)
        outer.step()
        weights.append(torch.cat([value.reshape(-1) for value in anchor]).numpy().copy())
    return weights


def streaming_diloco(
    *, num_peers: int, steps_per_epoch: int, overlap_steps: int, epochs: int
) -> list[np.ndarray]:
    """The last peer's weights after each epoch of Streaming DiLoCo (arXiv 2501.18512) with two fragments.

    The layers of the model are the fragments. The last epoch trains nothing: it averages the other fragment.
    """
    anchor = list(fresh_model())
    outer = torch.optim.SGD(
        [p for layer in anchor for p in layer.parameters()], lr=0.7, momentum=0.9, nesterov=True
    )
    peers = [(model := fresh_model(), optimizer_of("adamw", model)) for _ in range(num_peers)]
    weights = []
    for epoch in range(epochs):
        layer = 0 if epoch % 2 == 0 else 2
        num_steps = steps_per_epoch if epoch < epochs - 1 else 0
        leaves_at = num_steps - overlap_steps if epoch < epochs - 2 else num_steps
        snapshots = []
        for rank, (model, optimizer) in enumerate(peers):
            for step in range(num_steps):
                if step == leaves_at:
                    snapshots.append([p.detach().clone() for p in model[layer].parameters()])
                inner_step(model, optimizer, rank, epoch * steps_per_epoch + step)
            if leaves_at == num_steps:
                snapshots.append([p.detach().clone() for p in model[layer].parameters()])
        outer.zero_grad()
        for index, value in enumerate(anchor[layer].parameters()):
            value.grad = torch.stack([value.detach() - taken[index] for taken in snapshots]).mean(dim=0)
        outer.step()
        with torch.no_grad():
            for (model, _), taken in zip(peers, snapshots, strict=True):
                for p, value, old in zip(
                    model[layer].parameters(), anchor[layer].parameters(), taken, strict=True
                ):
                    p.copy_(value + (p - old))
        weights.append(flat(peers[-1][0]))
    return weights


@torch.no_grad()
def load(model: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
