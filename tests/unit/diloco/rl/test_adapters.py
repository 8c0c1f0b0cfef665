"""Adapters: the part of a model that is trained and sent, and the model with its adapters merged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diloco.data.tokenizer import load_tokenizer
from diloco.options.flags import GrpoConfig, TrainConfig
from diloco.rl.adapters import merged, trained, with_adapters
from diloco.rl.generator import of_model, of_server
from diloco.rl.push import Publisher
from diloco.rl.task_choice import open_task
from diloco.rl.weights import BadBlob
from diloco.train.model import load_model
from diloco.train.sharding import full_state
from tests.support.rollouts import CLOSE
from tests.support.tiny_model import small_bare_model

RANK = 4
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(small_bare_model(tmp_path_factory.mktemp("model") / "bare"))


@pytest.fixture
def model(directory):
    return load_model(directory, seed=0)


def adapted_and_moved(model, seed=1):
    """An adapted model in which no adapter is zero, as if it had been trained."""
    adapted = with_adapters(model, RANK, seed=0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(adapted).values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return adapted


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_without_a_rank_the_whole_model_is_trained(model):
    names = [name for name, _ in model.named_parameters()]
    assert with_adapters(model, None, seed=0) is model
    assert list(trained(model)) == names
    assert dict(merged(model, model.named_parameters())).keys() == set(names)


def test_new_adapters_change_nothing_and_are_the_same_for_the_same_seed(directory, model):
    before, state = logits(model), torch.random.get_rng_state()
    adapted, other = (with_adapters(one, RANK, seed=7) for one in (model, load_model(directory, seed=0)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(adapted), before)
    assert all(torch.equal(tensor, trained(other)[name]) for name, tensor in trained(adapted).items())


def test_two_matrices_a_layer_are_trained_of_every_layer_but_the_head(model):
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    names = list(trained(with_adapters(model, RANK, seed=0)))
    assert len(names) == 2 * len(linear)
    assert all(any(f".{layer}.lora_" in name for layer in linear) for name in names)


def test_merged_weights_are_a_plain_model_with_the_same_outputs(directory, model):
    adapted = adapted_and_moved(model)
    plain = load_model(directory, seed=0)
    assert not torch.allclose(logits(plain), logits(adapted), atol=1e-3)
    state = dict(merged(adapted, full_state(adapted).items()))
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state)
    assert torch.allclose(logits(plain), logits(adapted), atol=CLOSE)
    # Merging does not change the adapted model.
    assert dict(merged(adapted, adapted.named_parameters())).keys() == {
        n for n, _ in plain.named_parameters()
    }
    assert torch.allclose(logits(plain), logits(adapted), atol=CLOSE)


def test_a_model_that_is_kept_in_bf16_is_merged_in_fp32(directory):
    """Otherwise a rollout peer's server would not have the learner's weights."""
    kept, widened = (adapted_and_moved(load_model(directory, seed=0).bfloat16()) for _ in range(2))
    widened.float()
    assert {tensor.dtype for tensor in trained(kept).values()} == {torch.float32}
    ours, theirs = (dict(merged(one, one.named_parameters())) for one in (kept, widened))
    assert all(torch.equal(tensor.float(), theirs[name]) for name, tensor in ours.items())


@pytest.fixture
def config():
    return TrainConfig(grpo=GrpoConfig(num_generations=2, max_completion_length=4, lora_rank=RANK))


def test_a_rollout_peer_takes_the_adapters_alone(directory, model, config):
    learner, publisher = adapted_and_moved(model), Publisher(torch.float32)
    own = with_adapters(load_model(directory, seed=0), RANK, seed=0)
    generator = of_model(
        config, open_task(config.grpo, seed=0), load_tokenizer(directory), own, torch.float32
    )
    publisher.take(trained(learner).items())
    assert publisher.whole_bytes < sum(p.nbytes for p in model.parameters()) / 2
    generator.load([publisher.blob_for("")[1]])
    assert torch.equal(logits(own), logits(learner))

    whole = Publisher(torch.float32)
    whole.take(merged(learner, learner.named_parameters()))
    with pytest.raises(BadBlob, match="is missing"):
        generator.load([whole.blob_for("")[1]])


def test_its_server_is_given_whole_weights(directory, model, config):
    learner, publisher = adapted_and_moved(model), Publisher(torch.float32)
    publisher.take(trained(learner).items())
    own = with_adapters(load_model(directory, seed=0), RANK, seed=0)
    server = SimpleNamespace(publisher=Publisher(torch.float32))
    task, tokenizer = open_task(config.grpo, seed=0), load_tokenizer(directory)
    of_server(config, task, tokenizer, own, server).load([publisher.blob_for("")[1]])
    served = load_model(directory, seed=0)
    assert served.load_state_dict(server.publisher.state).missing_keys == []
    assert torch.allclose(logits(served), logits(learner), atol=CLOSE)
