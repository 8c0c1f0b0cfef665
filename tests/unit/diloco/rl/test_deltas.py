"""Delta checkpoints: the model of any step comes back to the bit, and what is damaged is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from diloco.errors import UserError
from diloco.rl.checkpoints import KeepDeltas
from diloco.rl.deltas import DeltaWriter, rebuilt, steps_in
from diloco.rl.weights import digest_of


def history(num_steps, seed=0):
    """Weights after each step of a training that moves some of them a little."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(40, 30, generator=generator), "b": torch.randn(7, generator=generator)}
    yield {name: tensor.clone() for name, tensor in weights.items()}
    for _ in range(num_steps):
        for tensor in weights.values():
            tensor += 1e-4 * torch.randn(tensor.shape, generator=generator)
        yield {name: tensor.clone() for name, tensor in weights.items()}


def in_bf16(state):
    return digest_of({name: tensor.bfloat16() for name, tensor in state.items()})


@pytest.fixture
def written(tmp_path):
    states = list(history(5))
    writer = DeltaWriter(tmp_path, step=0)
    for number, state in enumerate(states):
        writer.write(10 * number, state.items())
    return tmp_path, states


def test_every_step_comes_back_to_the_bit_from_step_0_on(written):
    directory, states = written
    assert steps_in(directory) == [0, 10, 20, 30, 40, 50]
    for number, state in enumerate(states):
        assert digest_of(rebuilt(directory, 10 * number)) == in_bf16(state)
    first, *others = [(directory / f"step_{step}.safetensors").stat().st_size for step in steps_in(directory)]
    assert all(size < first / 2 for size in others)


def test_after_a_resume_the_numbers_go_on_and_the_steps_of_the_life_before_are_gone(written):
    directory, states = written
    other = list(history(6, seed=0))[-1]
    writer = DeltaWriter(directory, step=30)
    assert steps_in(directory) == [0, 10, 20, 30]
    kept = (directory / "step_30.safetensors").read_bytes()
    writer.write(30, other.items())
    assert (directory / "step_30.safetensors").read_bytes() == kept
    writer.write(40, other.items())
    assert digest_of(rebuilt(directory, 40)) == in_bf16(other)
    assert digest_of(rebuilt(directory, 30)) == in_bf16(states[3])


def test_a_run_that_begins_keeps_nothing_of_one_before_it(written):
    directory, _ = written
    (directory / "step_60.partial").write_bytes(b"cut short")
    states = list(history(1, seed=5))
    writer = DeltaWriter(directory, step=0)
    assert not list(directory.iterdir())
    for number, state in enumerate(states):
        writer.write(number, state.items())
        assert digest_of(rebuilt(directory, number)) == in_bf16(state)


def test_the_deltas_of_another_model_are_not_gone_on_with(written):
    directory, _ = written
    writer = DeltaWriter(directory, step=30)
    with pytest.raises(UserError, match=r"of another model; name another --ckpt\.delta-path"):
        writer.write(40, {"a": torch.zeros(3)}.items())


def test_a_disk_that_is_full_costs_one_delta_and_no_training(tmp_path):
    states = {10 * number: state for number, state in enumerate(history(3))}
    state = TrainerState()
    keep = KeepDeltas(tmp_path, interval=10, weights=lambda: states[state.global_step])
    asked: Any = (TrainingArguments(output_dir=str(tmp_path / "trainer")), state, TrainerControl())
    keep.on_train_begin(*asked)
    (tmp_path / "step_10.partial").symlink_to("/dev/full")
    for state.global_step in (10, 20, 30):
        keep.on_step_end(*asked)
    assert steps_in(tmp_path) == [0, 20, 30]
    assert not list(tmp_path.glob("*.partial"))
    for step in (0, 20, 30):
        assert digest_of(rebuilt(tmp_path, step)) == in_bf16(states[step])


def test_a_step_that_is_not_there_and_a_chain_that_is_broken_are_refused(written):
    directory, _ = written
    with pytest.raises(UserError, match="has no step 15; it has 0, 10, 20, 30, 40, 50"):
        rebuilt(directory, 15)
    (directory / "step_20.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"step_30\.safetensors .* the changes since a step whose file is not there"
    ):
        rebuilt(directory, 40)


@pytest.mark.parametrize("changed", [0, 20, 40])
def test_the_file_of_a_chain_that_was_changed_is_named(written, changed):
    directory, _ = written
    path = directory / f"step_{changed}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"step_{changed}\.safetensors (was changed|cannot be used)"):
        rebuilt(directory, 40)


def test_no_delta_is_longer_than_all_weights(tmp_path):
    states = [{"a": torch.randn(900, generator=torch.Generator().manual_seed(seed))} for seed in range(4)]
    states.append({"a": states[-1]["a"] + torch.eye(30).flatten()})
    writer = DeltaWriter(tmp_path, step=0)
    sizes = [writer.write(number, state.items()).stat().st_size for number, state in enumerate(states)]
    assert sizes[:4] == [sizes[0]] * 4 and sizes[4] < sizes[0]
    for number, state in enumerate(states):
        assert digest_of(rebuilt(tmp_path, number)) == in_bf16(state)
