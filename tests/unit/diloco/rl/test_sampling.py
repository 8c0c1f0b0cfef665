"""Completions of a model with the log-probabilities that it gave them."""

from __future__ import annotations

import pytest
import torch

from diloco.data.tokenizer import load_tokenizer
from diloco.rl.sampling import left_padded, sampled, token_ids
from diloco.rl.server_client import Sampling
from diloco.train.model import load_model
from tests.support.rollouts import CLOSE
from tests.support.tiny_model import small_bare_model

PROMPTS = [[10, 20, 30], [40, 50]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = str(small_bare_model(tmp_path_factory.mktemp("model") / "bare", initializer_range=0.3))
    return load_model(directory, seed=0), load_tokenizer(directory)


def test_prompts_of_unlike_lengths_end_where_generation_begins():
    ids, mask = left_padded([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_prompt_ends_with_the_invitation_to_answer(loaded):
    [ids] = token_ids(loaded[1], [[{"role": "user", "content": "Hi"}]])
    assert bytes(ids) == b"user: Hi\nassistant: "


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_model_at_the_temperature(loaded, temperature):
    model, tokenizer = loaded
    sampling = Sampling(max_tokens=6, temperature=temperature)
    written = sampled(model, tokenizer, PROMPTS, 3, sampling, seed=1)
    for prompt, one in zip(PROMPTS, written, strict=True):
        assert len(one.token_ids) == 3 and len({tuple(ids) for ids in one.token_ids}) > 1
        for ids, logprobs in zip(one.token_ids, one.logprobs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0] / temperature
            values = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
            ours = values.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            assert torch.allclose(ours, torch.tensor(logprobs), atol=CLOSE)


def test_a_completion_ends_with_the_first_token_that_ends_one(loaded):
    model, tokenizer = loaded
    written = sampled(model, tokenizer, PROMPTS, 2, Sampling(max_tokens=40), seed=1)
    model.generation_config.eos_token_id = (end := written[0].token_ids[0][2])
    again = sampled(model, tokenizer, PROMPTS, 2, Sampling(max_tokens=40), seed=1)
    model.generation_config.eos_token_id = None
    assert again[0].token_ids[0] == written[0].token_ids[0][:3]
    assert all(end not in ids[:-1] for one in again for ids in one.token_ids)
    assert all(len(i) == len(p) for one in again for i, p in zip(one.token_ids, one.logprobs, strict=True))


def test_the_same_seed_gives_the_same_completions_and_nothing_else_is_touched(loaded):
    model, tokenizer = loaded
    model.train()
    state = torch.random.get_rng_state()
    found = [sampled(model, tokenizer, PROMPTS, 2, Sampling(max_tokens=5), seed=s) for s in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
