"""What a rollout peer generates: by the policy that it was given, and judged."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from diloco import generate_rollouts
from diloco.data.tokenizer import load_tokenizer
from diloco.generate_rollouts import _unloaded, opened, serve
from diloco.options.flags import GrpoConfig, TrainConfig
from diloco.rl.generator import of_model, of_server, prompts_at_once
from diloco.rl.push import Publisher
from diloco.rl.sampling import token_ids
from diloco.rl.task_choice import open_task
from diloco.rl.weights import BadBlob
from diloco.train.model import load_model
from peers.errors import LinkLost
from peers.protocol.rollouts import Completion
from tests.support.rollouts import CLOSE, train_a_little
from tests.support.tiny_model import small_bare_model

CONFIG = TrainConfig(grpo=GrpoConfig(num_generations=3, max_completion_length=5))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(small_bare_model(tmp_path_factory.mktemp("model") / "bare"))


@pytest.fixture
def generator(directory):
    task = open_task(CONFIG.grpo, seed=0)
    model = load_model(directory, seed=0)
    return of_model(CONFIG, task, load_tokenizer(directory), model, torch.float32)


def test_rollouts_are_by_the_newest_policy_and_of_the_form_that_learners_take(generator, directory):
    learner, publisher = load_model(directory, seed=0), Publisher(torch.float32)
    for seed in (1, 2):
        train_a_little(learner, seed)
        publisher.take(learner.named_parameters())
        generator.load([publisher.blob_for(generator.digest)[1]])
    assert generator.digest == publisher.digest
    groups = msgspec.convert(generator.generate([4, 9]), list[list[Completion]])
    assert [len(group) for group in groups] == [3, 3]
    [prompt] = token_ids(load_tokenizer(directory), [generator.task.example(4).prompt])
    for completion in groups[0]:
        with torch.no_grad():
            logits = learner(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
        values = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        ours = values.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        assert torch.allclose(ours, torch.tensor(completion.logprobs), atol=CLOSE)


def test_a_policy_that_gives_no_probabilities_does_not_end_the_process(generator):
    """Its weights are finite, so it can be loaded."""
    publisher = Publisher(torch.float32)
    publisher.take(
        (name, torch.full(shape, 3e38 if name == "model.norm.weight" else 1.0))
        for name, (_, shape) in generator._expected.items()
    )
    generator.load([publisher.blob_for("")[1]])
    asked, told = [{"kind": "generate", "examples": [1]}], []

    def receive(*_kinds):
        if not asked:
            raise LinkLost
        return asked.pop()

    link = SimpleNamespace(receive=receive, send=lambda kind, **fields: told.append((kind, fields)))
    with pytest.raises(LinkLost):
        serve(link, generator, at_once=1)
    kind, fields = told[-1]
    assert kind == "failed" and "logits are not finite" in fields["reason"]


def test_a_blob_that_is_not_a_policy_of_this_model_changes_nothing(generator):
    publisher = Publisher(torch.float32)
    publisher.take({"other": torch.ones(3)}.items())
    with pytest.raises(BadBlob):
        generator.load([publisher.blob_for("")[1]])
    assert generator.digest == ""


def test_files_that_have_gathered_make_one_policy_of_which_the_server_gets_the_changes(directory, tmp_path):
    learner, publisher = load_model(directory, seed=0), Publisher(torch.float32)
    paths, digests = [], []
    for seed in range(5):
        train_a_little(learner, seed, share=0.01)
        publisher.take(learner.named_parameters())
        paths.append(tmp_path / str(seed))
        paths[-1].write_bytes(publisher.blob_for(digests[-1] if digests else "")[1])
        digests.append(publisher.digest)

    class Counting(Publisher):
        num_taken = 0

        def take(self, *arguments, **named):
            self.num_taken += 1
            super().take(*arguments, **named)

    server = SimpleNamespace(publisher=Counting(torch.float32))
    generator = of_server(CONFIG, None, None, load_model(directory, seed=0), server)
    assert _unloaded(generator, paths[:1], digests[0]) == ""
    server.publisher.blob_for("")
    assert _unloaded(generator, paths[1:4], digests[3]) == ""
    assert _unloaded(generator, paths[4:], digests[4]) == ""
    assert server.publisher.num_taken == 3
    label, _ = server.publisher.blob_for(digests[0])
    assert (label.base, label.digest) == (digests[0], digests[4])


@pytest.mark.parametrize("rank", [None, 4])
def test_beside_a_server_no_model_is_kept_in_memory_unless_it_has_adapters(
    directory, tmp_path, monkeypatch, rank
):
    grpo = replace(CONFIG.grpo, rollout="vllm", lora_rank=rank)
    config = replace(CONFIG, path_model=directory, device="cpu", run_dir=str(tmp_path), grpo=grpo)
    loaded, served = [], []

    def load(*arguments, **named):
        model = load_model(*arguments, **named)
        loaded.append(weakref.ref(model))
        return model

    def opened_server(_config, _run_dir, weights, *_, **__):
        served.extend(name for name, _ in weights)
        return SimpleNamespace(close=lambda: None, publisher=Publisher(torch.float32))

    monkeypatch.setattr(generate_rollouts, "load_model", load)
    monkeypatch.setattr(generate_rollouts, "opened_server", opened_server)
    with opened(config, []) as generator:
        gc.collect()
        assert (loaded[0]() is None) == (rank is None)
        assert generator.most_bytes > 0 and "model.norm.weight" in served


def test_as_many_prompts_are_taken_at_once_as_fill_a_batch():
    assert prompts_at_once(replace(CONFIG, per_device_train_batch_size=32)) == 10
    assert prompts_at_once(replace(CONFIG, per_device_train_batch_size=2)) == 1
