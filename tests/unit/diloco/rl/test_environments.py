"""Environments of several turns, in dialogues with a scripted model."""

from __future__ import annotations

import math
import re

import pytest

from benchmarks.format_model import bare_model
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import UserError
from diloco.options.flags import GrpoConfig
from diloco.rl.dialogues import judged, judged_again, own_mask
from diloco.rl.environments import EnvironmentTask
from diloco.rl.evaluation import measured
from diloco.rl.generator import generated
from diloco.rl.sampling import token_ids
from diloco.rl.server_client import Sampling, Written
from diloco.rl.task_choice import check_task, open_task
from tests.support.commands import ROOT

SECRET_5 = 4
"""The example whose secret is 5."""


@pytest.fixture(scope="module")
def guess(tmp_path_factory):
    text = (ROOT / "docs" / "tutorials" / "grpo.md").read_text()
    code = re.search(r"<!-- test: environment -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code
    path = tmp_path_factory.mktemp("environment") / "guess.py"
    path.write_text(code[1])
    return open_task(GrpoConfig(dataset=f"{path}:Guess"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(bare_model(tmp_path_factory.mktemp("model") / "bare")))


class Model:
    """Says these texts, one after the other, in each dialogue, and ends each."""

    def __init__(self, tokenizer, *said: list[str]) -> None:
        self._tokenizer, self._said = tokenizer, [iter(texts) for texts in said]
        self._talking = list(range(len(said)))
        self.asked: list[list[list[int]]] = []
        self.most: list[int | tuple[int, ...]] = []

    def complete(self, prompts, count, sampling, seed):
        self.asked.append(list(prompts))
        self.most.append(sampling.max_tokens)
        found = []
        for _ in range(len(prompts)):
            ids = []
            for _ in range(count):
                text = next(self._said[self._talking.pop(0)])
                ids.append([*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.end])
            found.append(Written(ids, [[-0.5] * len(one) for one in ids]))
        return found

    @property
    def end(self) -> int:
        return self._tokenizer.eos_token_id

    def goes_on(self, *dialogues: int) -> Model:
        self._talking += dialogues
        return self


def test_a_model_is_answered_until_it_is_right_and_is_trained_on_its_own_words_only(guess, tokenizer):
    model = Model(tokenizer, ["3", "7", "5"], ["5"]).goes_on(0, 0)
    example = guess.example(SECRET_5)
    [[first, second]] = judged(
        guess, tokenizer, [example], 2, model.complete, Sampling(max_tokens=200), seed=1
    )
    assert (first["scores"], second["scores"]) == ([1.0], [1.0])
    assert len(first["turns"]) == 5 and second["turns"] == []
    mask = own_mask(first["turns"], len(first["tokens"]))
    assert [p for p, own in zip(first["logprobs"], mask, strict=True) if not own] == [0.0] * mask.count(0)
    own = [token for token, is_own in zip(first["tokens"], mask, strict=True) if is_own]
    assert tokenizer.decode(own, skip_special_tokens=True) == "375"
    # The last prompt is the whole conversation, rendered by the chat template.
    talk = [
        *example.prompt,
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "lower"},
    ]
    [whole] = token_ids(tokenizer, [talk])
    assert [token for token in model.asked[-1][0] if token != model.end] == whole
    assert [len(asked) for asked in model.asked] == [1, 1, 1]


def test_a_dialogue_ends_after_its_turns_and_where_its_tokens_are_used_up(guess, tokenizer):
    model = Model(tokenizer, ["1", "2", "3", "4"]).goes_on(0, 0, 0)
    [[one]] = judged(
        guess, tokenizer, [guess.example(SECRET_5)], 1, model.complete, Sampling(max_tokens=500), seed=1
    )
    assert len(one["turns"]) == 2 * guess.max_turns - 1 and one["scores"] == [0.0]
    told = one["turns"][1]
    for room, turns in ((2 + told, 1), (3 + told, 3), (1, 1)):
        model = Model(tokenizer, ["1", "2", "3", "4"]).goes_on(0, 0, 0)
        [[one]] = judged(
            guess, tokenizer, [guess.example(SECRET_5)], 1, model.complete, Sampling(max_tokens=room), seed=1
        )
        got = one["turns"] or [len(one["tokens"])]
        assert len(got) == turns and sum(got) == len(one["tokens"]) <= room


def test_no_dialogue_may_add_more_tokens_than_are_left_to_it_whatever_is_left_to_others(guess, tokenizer):
    model = Model(tokenizer, ["3", "7", "5"], ["1 2 3 4", "5"]).goes_on(0, 1, 0)
    examples = [guess.example(SECRET_5)] * 2
    judged(guess, tokenizer, examples, 1, model.complete, Sampling(max_tokens=200), seed=1)
    first, second = ([len(asked) for asked in prompts] for prompts in model.asked[:2])
    assert model.most[0] == 200 and len(set(model.most[1])) == 2
    assert model.most[1] == tuple(200 - (now - then) for then, now in zip(first, second, strict=True))


def test_an_environment_is_asked_once_a_turn(guess, tokenizer, monkeypatch):
    asked = []
    reply = guess.reply
    monkeypatch.setattr(guess, "reply", lambda example, said: asked.append(len(said)) or reply(example, said))
    model = Model(tokenizer, ["3", "7", "5"]).goes_on(0, 0)
    example = guess.example(SECRET_5)
    [[one]] = judged(guess, tokenizer, [example], 1, model.complete, Sampling(max_tokens=200), seed=1)
    assert asked == [1, 2, 3]
    judged_again(guess, tokenizer, [(SECRET_5, one["tokens"], one["turns"])])
    assert asked == [1, 2, 3, 1, 2]


def test_a_learner_finds_the_scores_again_and_words_that_the_environment_would_not_have_said(
    guess, tokenizer
):
    model = Model(tokenizer, ["3", "5"], ["9", "8", "1", "2"]).goes_on(0, 1, 1, 1)
    grpo = GrpoConfig(num_generations=2, max_completion_length=200)
    [group] = generated(guess, tokenizer, [SECRET_5], grpo, model.complete, 1)
    honest = [(SECRET_5, one["tokens"], one["turns"]) for one in group]
    tokens, turns = list(group[0]["tokens"]), group[0]["turns"]
    tokens[turns[0] + 1] += 1
    forged = (SECRET_5, tokens, turns)
    first, second = (one["scores"] for one in group)
    assert judged_again(guess, tokenizer, [honest[0], forged, honest[1]]) == [first, [math.inf], second]
    plain = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    assert judged_again(plain, tokenizer, [(0, tokens, turns)]) == [[math.inf]]


@pytest.mark.parametrize(("part", "turns"), [("reply", [1, 1, 1]), ("scores", [])])
def test_a_completion_that_cannot_be_judged_has_infinite_scores(guess, tokenizer, monkeypatch, part, turns):
    """No completion of a rollout peer may end a learner."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(guess, part, fail)
    assert judged_again(guess, tokenizer, [(SECRET_5, [65, 66, 67], turns)]) == [[math.inf]]


def test_an_evaluation_counts_the_dialogues_that_earn_everything(guess, tokenizer):
    model = Model(tokenizer, ["5"], ["1", "2", "3", "4"]).goes_on(1, 1, 1)
    [figures] = measured(
        guess, tokenizer, [guess.example(SECRET_5)], model.complete, samples=2, max_tokens=200, seed=1
    )
    assert figures == {"reward": 0.5, "pass_at_1": 0.5, "pass_at_2": 1.0}


def test_what_may_take_long_is_left_to_the_pool(guess, tokenizer, monkeypatch):
    asked = []

    def each(question, here, every, **_):
        asked.append((question, len(every)))
        return [here(*one) for one in every]

    monkeypatch.setattr(guess.pool, "each", each)
    model = Model(tokenizer, ["3", "5"], ["5"]).goes_on(0)
    example = guess.example(SECRET_5)
    measured(guess, tokenizer, [example], model.complete, samples=2, max_tokens=200, seed=1)
    assert asked == [("reply", 2), ("reply", 1), ("scores", 2), ("is_solved", 2)]
    judged_again(guess, tokenizer, [(SECRET_5, [65], [])] * 3)
    assert asked[4:] == [("reply", 0), ("scores", 3)]
    # All replies of all dialogues at once: what the model said is known beforehand.
    judged_again(guess, tokenizer, [(SECRET_5, [65, 66, 67, 66, 65], [1] * 5)] * 3)
    assert asked[6:] == [("reply", 6), ("scores", 0)]
    # Nobody asks for the replies of a dialogue that is longer than any may be.
    judged_again(guess, tokenizer, [(SECRET_5, [65] * 99, [1] * 99)])
    assert asked[8:] == [("reply", 0), ("scores", 0)]


def test_a_reply_that_ends_its_process_gives_no_verdict_on_the_peer(guess, tokenizer, monkeypatch):
    def each(question, here, every, *, no_verdict):
        return [
            no_verdict if question == "reply" and said == ["B"] else here(example, said)
            for example, said in every
        ]

    monkeypatch.setattr(guess.pool, "each", each)
    assert tokenizer.decode([66]) == "B"
    found = judged_again(
        guess, tokenizer, [(SECRET_5, [65, 66, 67], [1] * 3), (SECRET_5, [66, 66, 67], [1] * 3)]
    )
    assert found == [[math.inf], []]


def test_a_reply_that_cannot_be_tokenized_is_not_the_one_in_a_dialogue_and_ends_no_learner(
    guess, tokenizer, monkeypatch
):
    # The second is a reply like any other, though it is empty.
    monkeypatch.setattr(guess, "reply", lambda _, said: {"B": "\ud800", "3": ""}.get(said[-1]))
    model = Model(tokenizer, ["3", "5"]).goes_on(0)
    examples, sampling = [guess.example(SECRET_5)], Sampling(max_tokens=200)
    [[sound]] = judged(guess, tokenizer, examples, 1, model.complete, sampling, seed=1)
    assert tokenizer.decode([66]) == "B" and len(sound["turns"]) == 3
    completions = [(SECRET_5, [66] * 5, [1] * 5), (SECRET_5, sound["tokens"], sound["turns"])]
    assert judged_again(guess, tokenizer, completions) == [[math.inf], sound["scores"]]


def test_held_out_examples_follow_those_that_are_trained_on(guess):
    assert isinstance(guess, EnvironmentTask)
    assert guess.held_out(0).data["number"] == guess.num_examples


@pytest.mark.parametrize(
    ("code", "options", "says"),
    [
        ("class Env: num_examples = 1", "", "has no prompt; it needs num_examples, prompt, reply, reward"),
        ("class Env:\n    def __init__(self, size): pass", "", "failed with TypeError"),
        ("class Env: pass", ",size", "'size' is not option=value"),
        ("import no_such_thing", "", "fails with ModuleNotFoundError"),
    ],
)
def test_an_environment_that_cannot_work_is_told_by_its_name(tmp_path, code, options, says):
    path = tmp_path / "environment.py"
    path.write_text(code)
    with pytest.raises(UserError, match=rf"--dataset {path}:Env{options}.*{says}|{says}"):
        open_task(GrpoConfig(dataset=f"{path}:Env{options}"), seed=0)


@pytest.mark.parametrize(
    ("grpo", "says"),
    [
        (GrpoConfig(dataset="nowhere.py:Env"), "there is no file nowhere.py"),
        (GrpoConfig(dataset="tests.unit:Env", reward="math:sin"), "has a reward of its own; leave out"),
    ],
)
def test_an_environment_that_there_is_not_is_refused_before_anything_starts(grpo, says):
    with pytest.raises(UserError, match=says):
        check_task(grpo)


def test_errors_of_the_environments_code_are_the_users(tmp_path):
    path = tmp_path / "environment.py"
    path.write_text(
        "class Env:\n    num_examples = 1\n    def prompt(self, n): return 'p'\n"
        "    def reply(self, n, said): return 1 / 0\n    def reward(self, n, said): return float('nan')\n"
    )
    task = open_task(GrpoConfig(dataset=f"{path}:Env"), seed=0)
    with pytest.raises(UserError, match="failed with ZeroDivisionError"):
        task.reply(task.example(0), ["x"])
    with pytest.raises(UserError, match="must return a finite number"):
        task.reward(task.example(0), ["x"])
