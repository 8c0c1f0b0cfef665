"""TRL's GRPO as the inner loop of the real trainer, with a tiny model and a reward that even this model earns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from diloco import train_grpo
from diloco.errors import UserError
from diloco.launch.worker import Assignment
from diloco.options.flags import CkptConfig, GrpoConfig, HvConfig, TrainConfig
from diloco.options.trainer import with_mode_defaults
from diloco.outer.world import World
from diloco.rl import sampling
from diloco.rl.answers import Completion
from diloco.rl.push import Publisher
from diloco.rl.sampling import sampled
from diloco.rl.task_choice import open_task
from diloco.rl.tasks import Example, Reward, Task
from diloco.rl.trainer import PeerTrainer
from diloco.train.model import load_model
from diloco.train_grpo import Training
from tests.support.scripted_daemon import ScriptedDaemon, halving, leaving_a_fork
from tests.support.tiny_model import small_bare_model

FIGURES = ("step", "loss", "reward", "grad_norm", "lr", "tokens")


def letters() -> Task:
    """Prompts are numbers; the reward is the share of lower-case letters, of which random bytes contain some."""

    def example(index: int) -> Example:
        return Example([{"role": "user", "content": str(index)}], str(index))

    def share(completion: Completion, example: Example) -> float:
        return sum(letter.islower() for letter in completion.text) / len(completion.text)

    return Task(
        name="letters",
        num_examples=40,
        num_held_out=4,
        example=example,
        held_out=example,
        rewards=(Reward("letters", 1.0, share),),
        solved=lambda completion, example: float(share(completion, example) > 0.5),
    )


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(train_grpo, "open_task", lambda grpo, seed: letters())
    model = small_bare_model(tmp_path / "model", num_hidden_layers=1, intermediate_size=32)
    own = TrainConfig(
        mode="grpo",
        path_model=str(model),
        lr=1e-2,
        warmup_steps=0,
        total_steps=4,
        total_batch_size=8,
        per_device_train_batch_size=4,
        device="cpu",
        grpo=GrpoConfig(
            rollout="hf", num_generations=4, max_completion_length=8, eval_prompts=2, eval_samples=2
        ),
        hv=HvConfig(local_steps=2),
        ckpt=CkptConfig(path=str(tmp_path / "checkpoints")),
    )
    return with_mode_defaults(
        own, {"lr", "warmup_steps", "total_steps", "total_batch_size", "hv.local_steps"}
    )


@pytest.fixture
def made(monkeypatch):
    """The inputs of TRL's loss, one entry for each generation."""
    found = []
    scored = PeerTrainer._generate_and_score_completions

    def noted(self, inputs):
        found.append(scored(self, inputs))
        return found[-1]

    monkeypatch.setattr(PeerTrainer, "_generate_and_score_completions", noted)
    return found


def trained(config, run_dir):
    """The records of a whole training."""
    run_dir.mkdir(parents=True)
    training = Training(Assignment(config=config, run_dir=run_dir), World(), torch.device("cpu"), [])
    with training.metrics:
        training.train()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(records):
    return [tuple(r[name] for name in FIGURES) for r in records if r["kind"] == "step"]


def test_runs_of_one_seed_earn_the_same_rewards_and_those_of_another_seed_others(config, tmp_path):
    first, again, other = (
        steps(trained(replace(config, seed=seed), tmp_path / name))
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again and len(first) == 4
    assert [figures[2] for figures in other] != [figures[2] for figures in first]
    assert all(figures[2] > 0 for figures in first)


def test_a_reward_of_the_users_own_is_what_is_trained_on(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train_grpo, "open_task", open_task)
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def spaces(completion, example):\n    return completion.text.count(' ') - len(completion.text)\n"
    )
    own = replace(config.grpo, dataset="reasoning-gym:chain_sum", reward=f"{rewards}:spaces")
    records = trained(replace(config, grpo=own, total_steps=2), tmp_path / "run")
    paid = [record["reward_spaces"] for record in records if record["kind"] == "step"]
    assert len(paid) == 2 and all(value < 0 for value in paid)
    assert paid == [record["reward"] for record in records if record["kind"] == "step"]


def test_in_an_environment_only_the_models_own_words_are_trained_on(config, tmp_path, monkeypatch, made):
    monkeypatch.setattr(train_grpo, "open_task", open_task)
    (tmp_path / "echo.py").write_text(
        "class Echo:\n    num_examples, num_held_out, max_turns = 40, 4, 2\n"
        "    def prompt(self, number): return str(number)\n"
        "    def reply(self, number, said): return 'go on'\n"
        "    def reward(self, number, said): return len(said) / 2 - 1e-6 * sum(map(ord, said[-1]))\n"
    )

    def short(model, tokenizer, *asked, **named):
        """Ends every answer after three tokens: an untrained model hardly ever emits the end token."""
        for one in (found := sampled(model, tokenizer, *asked, **named)):
            one.token_ids[:] = [[*ids[:3], tokenizer.eos_token_id] for ids in one.token_ids]
            one.logprobs[:] = [[*logprobs[:3], -5.0] for logprobs in one.logprobs]
        return found

    monkeypatch.setattr(train_grpo, "sampled", short)
    own = replace(config.grpo, dataset=f"{tmp_path}/echo.py:Echo", max_completion_length=60)
    records = trained(replace(config, grpo=own, total_steps=2), tmp_path / "run")
    told = sum(int((one["completion_mask"] * (1 - one["tool_mask"])).sum()) for one in made)
    dialogues = sum(int((one["tool_mask"] == 0).any(dim=1).sum()) for one in made)
    # The chat template renders each reply of the environment as a line end, the message, and the next speaker.
    assert dialogues == 16 and told == dialogues * len("\nuser: go on\nassistant: ")
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 2 and all(record["grad_norm"] > 0 for record in steps)
    assert [record["kind"] for record in records].count("eval") == 2


@pytest.mark.parametrize("trains", [{}, {"lora_rank": 2, "beta": 0.1}], ids=["weights", "adapters"])
def test_a_peer_resumes_bit_for_bit_with_the_swarms_state(config, tmp_path, link, trains):
    config = replace(config, grpo=replace(config.grpo, **trains))
    ckpt = CkptConfig(path=config.ckpt.path, interval=1)
    with ScriptedDaemon(link, world_rank=1, local_steps=2):
        whole = trained(replace(config, ckpt=ckpt), tmp_path / "whole")
    for step in (2, 3):
        part = tmp_path / "checkpoints" / f"model_step_{step}" / "diloco_rank_1"
        assert (part / "outer.bin").is_file()
        with ScriptedDaemon(link, world_rank=1, local_steps=2) as daemon:
            resume = CkptConfig(path=config.ckpt.path, resume=str(part.parent))
            resumed = trained(replace(config, ckpt=resume), tmp_path / f"resumed-{step}")
        assert daemon.messages[0]["resume"] == str(part)
        assert steps(resumed) == steps(whole)[step:]
    assert [r["epoch"] for r in whole if r["kind"] == "epoch"] == [1, 2]
    assert [r["step"] for r in whole if r["kind"] == "eval"] == []


def test_another_peers_checkpoint_restarts_the_run_where_its_epoch_began(config, tmp_path, link):
    ckpt = CkptConfig(path=config.ckpt.path, interval=1)
    with ScriptedDaemon(link, world_rank=1, local_steps=2):
        trained(replace(config, ckpt=ckpt), tmp_path / "first")
    shutil.rmtree(tmp_path / "checkpoints" / "model_step_4")
    resume = CkptConfig(path=config.ckpt.path, resume="auto")
    with ScriptedDaemon(link, world_rank=0, local_steps=2) as daemon:
        records = trained(replace(config, ckpt=resume), tmp_path / "second")
    offered = daemon.messages[0]
    newest = tmp_path / "checkpoints" / "model_step_3" / "diloco_rank_1"
    assert (offered["resume"], offered["is_own"], offered["epoch"]) == (str(newest), False, 1)
    assert [record["step"] for record in records if record["kind"] == "step"] == [3, 4]


def test_where_no_checkpoint_is_whole_it_does_not_begin_anew_unasked(config, tmp_path):
    ckpt = CkptConfig(path=str(tmp_path / "kept"), interval=2)
    trained(replace(config, ckpt=ckpt), tmp_path / "first")
    for file in (tmp_path / "kept").rglob("model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="to begin anew"):
        trained(replace(config, ckpt=replace(ckpt, resume="auto")), tmp_path / "second")


def test_alone_it_evaluates_saves_and_keeps_the_newest_checkpoints(config, tmp_path):
    from transformers import AutoModelForCausalLM

    own = replace(config, eval_interval=2, ckpt=CkptConfig(path=str(tmp_path / "kept"), interval=1, topk=2))
    records = trained(own, tmp_path / "run")
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 2, 4]
    assert all(0 <= r["pass_at_1"] <= r["pass_at_2"] <= 1 for r in records if r["kind"] == "eval")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["model_step_3", "model_step_4"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.hidden_size == 32
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "model"]


def test_a_peer_that_gives_up_a_fork_trains_to_the_end_of_the_run(config, tmp_path, link, monkeypatch):
    """transformers makes only as many passes as a run from its start to its end takes."""
    monkeypatch.setattr("diloco.rl.trainer._GENERATIONS_PER_PASS", 1)
    with ScriptedDaemon(link, leaving_a_fork(), local_steps=2) as daemon:
        *_, finished = trained(config, tmp_path / "run")
    assert (finished["event"], finished["step"]) == ("finished", 4)
    ready = [message for message in daemon.messages if message["kind"] == "ready"]
    assert [(message["epoch"], message["last"]) for message in ready] == [(0, False), (0, False), (1, True)]


@pytest.fixture
def asked(monkeypatch):
    """The step and the prompts of each generation."""
    found, numbers = [], Training.example_numbers

    def noted(self):
        found.append((self.trainer.state.global_step, numbers(self)))
        return found[-1][1]

    monkeypatch.setattr(Training, "example_numbers", noted)
    return found


@pytest.mark.parametrize("per_generation", [None, 1], ids=["one in a step", "two in a step"])
def test_alone_each_generation_has_prompts_of_its_own(config, tmp_path, asked, per_generation):
    own = replace(config.grpo, steps_per_generation=per_generation, eval_prompts=0)
    trained(replace(config, grpo=own), tmp_path / "run")
    assert len(asked) == (8 if per_generation else 4)
    assert len({number for _, numbers in asked for number in numbers}) == 8


def test_after_a_resume_within_a_generation_the_next_one_begins_where_it_would_have(config, tmp_path, asked):
    """Otherwise every outer step would come between the two steps that one generation serves."""
    ckpt = CkptConfig(path=config.ckpt.path, interval=1)
    own = replace(config, grpo=replace(config.grpo, steps_per_generation=4, eval_prompts=0), ckpt=ckpt)
    trained(replace(own, max_steps=1), tmp_path / "first")
    trained(replace(own, ckpt=replace(ckpt, resume="auto")), tmp_path / "second")
    assert [step for step, _ in asked] == [0, 1, 2]
    assert asked[0][1] == asked[1][1] != asked[2][1]


def test_after_a_jump_into_a_generation_the_next_one_begins_where_it_would_have(
    config, tmp_path, link, asked
):
    """The answer to the first epoch, whose round was late, is the place of the others: within the second epoch."""

    def late(message, out, inn):
        answer = halving(message, out, inn)
        if answer and message["kind"] == "ready" and message["epoch"] == 0:
            answer[1]["local_step"] = 1
        return answer

    grpo = replace(config.grpo, steps_per_generation=4, eval_prompts=0)
    with ScriptedDaemon(link, late, local_steps=2):
        trained(replace(config, grpo=grpo, total_steps=6), tmp_path / "run")
    assert [step for step, _ in asked] == [0, 3, 4]


def test_a_model_is_rebuilt_from_the_deltas_of_a_training_that_was_resumed(config, tmp_path):
    from safetensors.torch import load_file

    from diloco.cli.app import exit_code

    ckpt = CkptConfig(
        path=config.ckpt.path, interval=2, delta_interval=1, delta_path=str(tmp_path / "deltas")
    )
    trained(replace(config, max_steps=3, ckpt=ckpt), tmp_path / "first")
    trained(replace(config, ckpt=replace(ckpt, resume="auto")), tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "deltas").glob("step_*"))
    assert names == [f"step_{step}.safetensors" for step in range(5)]
    words = ["ckpt", "rebuild", str(tmp_path / "deltas"), str(tmp_path / "rebuilt")]
    assert exit_code(words) == 0
    saved, made = (load_file(tmp_path / name / "model.safetensors") for name in ("second/model", "rebuilt"))
    assert saved.keys() == made.keys()
    assert all(torch.equal(saved[name].bfloat16(), made[name]) for name in saved)
    assert exit_code(words) == 2


def test_generations_that_outlive_an_outer_step_are_refused_before_training(config, tmp_path):
    own = replace(config, grpo=replace(config.grpo, steps_per_generation=6), hv=HvConfig(local_steps=5))
    with pytest.raises(UserError, match="multiple of 3, say 6"):
        trained(own, tmp_path / "run")


def test_a_reference_model_needs_weights_to_load(config, tmp_path):
    own = replace(config, grpo=replace(config.grpo, beta=0.1, eval_prompts=0), total_steps=1)
    with pytest.raises(UserError, match=r"has no weights yet: leave --grpo\.beta out"):
        trained(own, tmp_path / "refused")
    load_model(config.path_model, seed=5).save_pretrained(config.path_model)
    (step,) = (record for record in trained(own, tmp_path / "run") if record["kind"] == "step")
    assert step["kl"] == pytest.approx(0, abs=1e-6)


def test_the_trainer_generates_no_more_at_once_than_it_trains_on_at_once(config, tmp_path, monkeypatch):
    sizes, batch = [], sampling._batch

    def noted(model, tokenizer, prompts, *more):
        sizes.append(len(prompts))
        return batch(model, tokenizer, prompts, *more)

    monkeypatch.setattr(sampling, "_batch", noted)
    own = replace(config, grpo=replace(config.grpo, eval_samples=3), total_steps=1)
    trained(replace(own, per_device_train_batch_size=2), tmp_path / "run")
    assert sizes == [2] * (3 + 4 + 3)


def test_each_rank_evaluates_and_generates_its_share(config):
    ranks = [SimpleNamespace(config=config, world=World(rank=rank, num_ranks=3)) for rank in range(3)]
    assert [Training.shared(rank, list, "abcd") for rank in ranks] == [["a", "b"], ["c"], ["d"]]


class Sender:
    """Stands in for the link to a daemon: its rollouts have constant log-probabilities, whatever the policy."""

    def __init__(self, *logprobs: float) -> None:
        """Takes one log-probability for each prompt."""
        self._logprobs = logprobs
        self.turns: list[bool] = []
        """Whether the learner is alone, in each of the next turns, in which no rollouts come."""
        self._rollouts: list[dict[str, object]] = []

    def send(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...

    def receive(self, kind: str) -> dict[str, object]:
        if kind == "rollout":
            return self._rollouts.pop(0)
        if self.turns:
            return {"num_rollouts": 0, "num_uniform": 0, "senders": {}, "is_alone": self.turns.pop(0)}
        self._rollouts = [
            {
                "peer_id": "peer",
                "example": example,
                "staleness": 8,
                "completions": [
                    {"tokens": [letter] * 8, "logprobs": [logprob] * 8, "scores": [score], "turns": []}
                    for letter, score in zip(b"abAB", (1.0, 1.0, 0.0, 0.0), strict=True)
                ],
            }
            for example, logprob in enumerate(self._logprobs)
        ]
        return {"num_rollouts": len(self._rollouts), "num_uniform": 0, "senders": {}}


@pytest.mark.parametrize("logprob, learns", [(-5.5, True), (-6.2, True), (-20.0, False), (-1000.0, False)])
def test_what_has_become_much_more_probable_since_it_was_sampled_moves_nothing(
    logprob, learns, config, tmp_path, monkeypatch
):
    """An untrained model gives every token a probability of about e^-5.5. Sampled at e^-6.2, the ratio is below 4, the
    bound for low rewards; at e^-20 it is also above the bound for high rewards."""

    def opened(self, *_):
        self.peer_rollouts = self.rollouts_by(Sender(logprob, logprob))

    monkeypatch.setattr(Training, "open_peer_rollouts", opened)
    own = replace(config, grpo=replace(config.grpo, rollout="peers"), total_steps=1)
    (step,) = (record for record in trained(own, tmp_path / "run") if record["kind"] == "step")
    assert step["grad_norm"] > 0 if learns else step["grad_norm"] == 0


def test_a_learner_waits_in_turns_while_a_rollout_peer_is_there_and_generates_its_own_when_alone(
    config, tmp_path, monkeypatch
):
    sender = Sender(-5.5, -5.5)
    sender.turns = [False, False, True, False]

    def opened(self, *_):
        self.peer_rollouts = self.rollouts_by(sender)

    monkeypatch.setattr(Training, "open_peer_rollouts", opened)
    own = replace(config.grpo, rollout="peers", eval_prompts=0)
    records = trained(replace(config, grpo=own, total_steps=2), tmp_path / "run")
    assert [record["rollout_peers"] for record in records if record["kind"] == "step"] == [0, 1]
    assert sender.turns == []


def test_rollout_peers_get_the_policy_before_the_first_evaluation_and_only_once(
    config, tmp_path, monkeypatch
):
    done: list[str] = []

    class Noted(Sender):
        def send(self, kind: str, **_: object) -> None:
            done.append(kind)

    def opened(self, *_):
        self.peer_rollouts = self.rollouts_by(Noted(-5.5, -5.5))

    def measured(self, examples):
        done.append("evaluation")
        return [{"reward": 0.0}]

    monkeypatch.setattr(Training, "open_peer_rollouts", opened)
    monkeypatch.setattr(Training, "measured", measured)
    trained(replace(config, grpo=replace(config.grpo, rollout="peers"), total_steps=1), tmp_path / "run")
    assert done == ["policy", "evaluation", "take", "evaluation"]


def test_how_far_a_sampler_is_off_is_told_of_the_very_completion_without_a_pass_of_its_own(
    config, tmp_path, monkeypatch
):
    """This holds although TRL shuffles a generation and trains on it in several batches."""
    told: list[list[tuple[int, float]]] = []
    passes = []
    compute = GRPOTrainer._get_per_token_logps_and_entropies

    def opened(self, *_):
        self.peer_rollouts = self.rollouts_by(Sender(-5.5, -8.5))

    def counted(*arguments, **named):
        passes.append(torch.is_grad_enabled())
        return compute(*arguments, **named)

    monkeypatch.setattr(Training, "open_peer_rollouts", opened)
    monkeypatch.setattr(Training, "compared", lambda self, pairs: told.append(pairs))
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    own = replace(config, grpo=replace(config.grpo, rollout="peers", eval_prompts=0), total_steps=1)
    (step,) = (record for record in trained(own, tmp_path / "run") if record["kind"] == "step")
    found = dict(pair for pairs in told for pair in pairs)
    assert len(told) == len(passes) > 1 and all(passes)
    assert sorted(found) == list(range(8))
    assert all(found[row] < 1.0 < 2.0 < found[row + 4] < 4.0 for row in range(4))
    assert step["logp_difference_max"] > 2.0 and 1.0 < step["logp_difference_mean"] < 2.5


class Server:
    """Stands in for the inference server: a model with the weights that were pushed last."""

    last_push = None

    def __init__(self, training: Training) -> None:
        self.publisher = Publisher(torch.float32)
        self._model, self._tokenizer = load_model(training.config.path_model, seed=5), training.tokenizer

    def push(self) -> None:
        self._model.load_state_dict(self.publisher.state, strict=False)

    def complete(self, prompts, count, sampling, *, seed):
        return train_grpo.sampled(self._model, self._tokenizer, prompts, count, sampling, seed=seed)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("rollout", "off_by", "learns"), [("vllm", 0.0, True), ("vllm", 0.5, False), ("hf", 0.5, True)]
)
def test_tokens_are_weighted_by_the_trainers_probability_over_the_servers_but_not_over_its_own(
    rollout, off_by, learns, config, tmp_path, monkeypatch
):
    """8 tokens that are off by 0.5 nats make a completion e^4 times as probable as reported: TRL leaves it out."""

    def opened(self, *_):
        self.server = Server(self)

    def off(*asked, **named):
        for one in (found := sampled(*asked, **named)):
            one.logprobs[:] = [[value - off_by for value in logprobs] for logprobs in one.logprobs]
        return found

    monkeypatch.setattr(train_grpo, "sampled", off)
    monkeypatch.setattr(Training, "open_server", opened)
    own = replace(config.grpo, rollout=rollout)
    records = trained(replace(config, grpo=own, total_steps=2), tmp_path / "run")
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 2 and all((record["grad_norm"] > 0) is learns for record in steps)
    differences = [round(record["logp_difference_max"], 5) for record in steps if rollout == "vllm"]
    assert differences == ([off_by] * 2 if rollout == "vllm" else [])


def test_weights_that_replace_a_forks_at_the_same_step_are_pushed(config, tmp_path, link, monkeypatch):
    """The first commit returns the peer to step 0, at which the fork's weights have been pushed."""
    pushed, answer = [], leaving_a_fork()

    class Noted(Server):
        def push(self) -> None:
            super().push()
            pushed.append(self.publisher.digest)

    def opened(self, *_):
        self.server = Noted(self)

    def rule(message, out, inn):
        found = answer(message, out, inn)
        if found and message["kind"] == "ready":
            found[1]["head"] = f"{message['epoch']} {found[1]['epoch']}"
        return found

    monkeypatch.setattr(Training, "open_server", opened)
    grpo = replace(config.grpo, rollout="vllm", steps_per_generation=4, eval_prompts=0)
    with ScriptedDaemon(link, rule, local_steps=2):
        trained(replace(config, grpo=grpo), tmp_path / "run")
    assert len(set(pushed)) == 3


def test_generations_of_one_step_have_completions_of_their_own(config, tmp_path, made):
    own = replace(config.grpo, steps_per_generation=1, eval_prompts=0)
    trained(replace(config, grpo=own, total_steps=1), tmp_path / "run")
    first, second = (one["completion_ids"].tolist() for one in made)
    assert first != second
