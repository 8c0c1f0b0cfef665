from __future__ import annotations

import json

import pytest
import torch

from diloco.checkpoint.export import own_weights
from diloco.checkpoint.shards import HostCopies, load, make_optimizer_state, read, save, state_to_write
from diloco.errors import UserError
from diloco.train.inner import InnerLoop, LossScale
from diloco.train.sharding import Precision
from peers.state.whole_files import write_tensors


def saved(directory, state):
    """Have one rank write this state, as `save` does."""
    finished = {}

    def write(tensors, metadata):
        return {"rank_0.safetensors": write_tensors(directory / "rank_0.safetensors", tensors, metadata)}

    copies = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.fill_(-1)
    num_bytes = save(state, copies, write, finished.update, None)
    assert num_bytes == finished["rank_0.safetensors"].num_bytes
    return copies


def test_what_is_written_are_the_copies_and_every_bit_comes_back(tmp_path):
    state = {"a": torch.randn(3, 4), "step": torch.tensor(7.5, dtype=torch.float64), "b": torch.arange(5)}
    copies = saved(tmp_path, state)
    found = read(tmp_path, lambda there: {name: torch.zeros_like(state[name]) for name in there})
    assert found.keys() == copies.keys() and all(torch.equal(found[name], copies[name]) for name in copies)


def test_copies_share_one_memory_of_their_size_which_is_reused():
    weights = {"a": torch.randn(3, 5).t(), "b": torch.arange(7, dtype=torch.uint8), "none": torch.ones(0, 4)}
    both = {**weights, "step": torch.tensor(7.5, dtype=torch.float64), "m": torch.randn(40).bfloat16()}
    room = HostCopies()
    first = room.take(weights)
    (memory,) = {copy.untyped_storage() for copy in first.values()}
    assert memory.nbytes() == 2 * 64
    places = {name: copy.data_ptr() for name, copy in first.items()}
    both["a"] += 1
    second = room.take(both)
    assert {name: second[name].data_ptr() for name in places} == places
    assert second["m"].untyped_storage().data_ptr() == second["step"].untyped_storage().data_ptr()
    assert all(torch.equal(second[name], tensor) for name, tensor in both.items())
    assert room.take(weights).keys() == weights.keys()


def inner_loop(dtype):
    model = torch.nn.Linear(4, 4)
    return InnerLoop(
        model,
        torch.optim.AdamW(model.parameters()),
        precision=Precision(dtype),
        device=torch.device("cpu"),
        micro_batch_size=1,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [
        (torch.float16, torch.float16, LossScale(scale=8.0, good_steps=3)),
        (torch.bfloat16, torch.float16, LossScale()),
        (torch.float16, torch.bfloat16, LossScale(scale=1.0, interval=0)),
    ],
    ids=str,
)
def test_the_loss_scale_is_restored_where_both_runs_scale_and_left_alone_otherwise(
    tmp_path, before, after, scale
):
    one, other = inner_loop(before), inner_loop(after)
    if before == torch.float16:
        one.loss_scale = LossScale(scale=8.0, good_steps=3)
    make_optimizer_state(one)
    saved(tmp_path, {name: tensor.clone() for name, tensor in state_to_write(one, 0).items()})
    load(tmp_path, other, rank=0, with_random=False)
    assert other.loss_scale == scale
    assert torch.equal(other.model.weight, one.model.weight)


def test_a_rank_that_cannot_write_fails_as_a_disk_does():
    def full(tensors, metadata):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save({"a": torch.ones(2)}, {"a": torch.ones(2)}, full, lambda files: None, None)


@pytest.mark.parametrize(
    "wanted", [{"other": torch.ones(2)}, {"a": torch.ones(3)}, {"a": torch.ones(2, 2)}], ids=str
)
def test_another_models_tensors_are_refused(tmp_path, wanted):
    saved(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(UserError, match="holds another model"):
        read(tmp_path, lambda there: wanted)


@pytest.mark.parametrize("start", [1, 2**50, -1])
def test_rows_that_are_missing_are_not_made_up(tmp_path, start):
    places = {"DCP_SHARDING_INFO": json.dumps({"model.a": {"saved_offsets": [start]}})}
    write_tensors(tmp_path / "rank_1.safetensors", {"model.a": torch.ones(2)}, places)
    with pytest.raises(UserError, match="holds another model"):
        own_weights(tmp_path)


def test_the_rows_that_an_earlier_version_saved_become_a_model(tmp_path):
    weight, norm = torch.randn(5, 2), torch.randn(3)
    parts = [
        ({"model.w": weight[:3], "model.n": norm, "rng.cpu": torch.zeros(4, dtype=torch.uint8)}, [0, 0]),
        ({"model.w": weight[3:], "optimizer.w.step": torch.tensor(1.0)}, [3]),
    ]
    for rank, (tensors, starts) in enumerate(parts):
        rows = {"model.w": [starts[0], 5, 2], "model.n": [0, 3]}
        metadata = {"pieces": json.dumps({name: rows[name] for name in tensors if name in rows})}
        write_tensors(tmp_path / f"rank_{rank}.safetensors", tensors, metadata)
    found = own_weights(tmp_path)
    assert found.keys() == {"w", "n"}
    assert torch.equal(found["w"], weight) and torch.equal(found["n"], norm)
