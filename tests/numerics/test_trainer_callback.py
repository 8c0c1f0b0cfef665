"""DilocoCallback alone makes a transformers Trainer a worker, which resumes from a checkpoint bit for bit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.trainer.utils import RepeatSampler

from diloco.callback import DilocoCallback, check_divides, generation_period
from diloco.errors import DilocoError, UserError
from tests.support.scripted_daemon import ScriptedDaemon, halving, joining, leaving_a_fork, slow_rounds
from tests.support.tiny_model import tiny_llama
from tests.support.trainer_worker import Samples, trainer_of, weights


class Seen(TrainerCallback):
    """Records what a trainer's other callbacks see at the end of each step."""

    def __init__(self):
        self.steps, self.rates = [], []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.steps.append(state.global_step)
        self.rates.append(optimizer.param_groups[0]["lr"])


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_without_a_daemon_the_callback_changes_nothing(tmp_path):
    with_it = trainer_of(tmp_path / "with", DilocoCallback(local_steps=2), save_strategy="no")
    without = trainer_of(tmp_path / "without", TrainerCallback(), save_strategy="no")
    with_it.train()
    without.train()
    assert equal(weights(with_it.model), weights(without.model))


def test_every_epoch_the_weights_become_what_the_daemon_says(tmp_path, link):
    halved = []

    class Compare(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            out, _ = daemon.buffers(0)
            flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            halved.append(state.global_step % 2 == 0 and torch.equal(flat, torch.from_numpy(out.copy()) / 2))

    commits = []
    with ScriptedDaemon(link, local_steps=2) as daemon:
        callback = DilocoCallback(on_commit=commits.append)
        trainer_of(tmp_path, callback, Compare(), save_strategy="no").train()
    assert halved == [False, True] * 3
    assert [commit.epoch for commit in commits] == [1, 2, 3]
    readies = [message for message in daemon.messages if message["kind"] == "ready"]
    assert [message["last"] for message in readies] == [False, False, True]
    assert all(message["tokens"] == 2 * 4 for message in readies), (
        "samples count where a trainer counts no tokens"
    )
    assert daemon.kinds()[-1] == "finished"


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_trainer_that_begins_at_the_end_keeps_the_swarms_weights(tmp_path, link, optim):
    more = {"save_strategy": "no", "lr_scheduler_type": "constant", "weight_decay": 0.1}
    with ScriptedDaemon(link, joining(3, 0.5), local_steps=2) as daemon:
        trainer = trainer_of(tmp_path, DilocoCallback(), optim=optim, **more)
        trainer.train()
    assert trainer.state.global_step == 6 and daemon.kinds() == ["offer", "finished"]
    assert all((parameter == 0.5).all() for parameter in trainer.model.parameters())


class Read(Samples):
    """Records which samples a trainer reads, in order."""

    def __init__(self):
        super().__init__(seed=0)
        self.indices = []

    def __getitem__(self, index):
        self.indices.append(index)
        return super().__getitem__(index)


def read_by_peer(world_rank, directory, link, sampler=None):
    data = Read()
    with ScriptedDaemon(link, local_steps=2, world_rank=world_rank):
        trainer = trainer_of(directory, DilocoCallback(), save_strategy="no", max_steps=4)
        trainer.train_dataset = data
        if sampler:
            trainer._get_train_sampler = lambda dataset=None: sampler(data)
        trainer.train()
    assert len(data.indices) >= 4 * 4
    return data.indices[: 4 * 4]


@pytest.mark.parametrize(
    "sampler",
    [
        None,
        lambda data: RepeatSampler(data, mini_repeat_count=1, batch_size=4, seed=3),
        lambda data: LengthGroupedSampler(4, data, lengths=[64] * 64),
    ],
    ids=["a Trainer's", "TRL's", "by length"],
)
def test_no_two_peers_read_the_same_samples_in_the_same_order(tmp_path, link, sampler):
    read = [read_by_peer(rank, tmp_path / str(rank), link, sampler) for rank in (0, 1, 2)]
    assert read[0] != read[1] != read[2] != read[0]
    # Each peer reads a quarter of 64 samples; two random quarters have four samples in common on average.
    assert len(set(read[0]) & set(read[1])) < 12
    assert read_by_peer(1, tmp_path / "again", link, sampler) == read[1]


def test_data_that_are_not_shuffled_are_warned_about(tmp_path, link, caplog):
    assert read_by_peer(1, tmp_path, link, SequentialSampler) == list(range(16))
    assert "so all peers train on the same samples" in caplog.text


@pytest.mark.parametrize("step", [4, 5], ids=["from a round's boundary", "from between two rounds"])
def test_a_resumed_trainer_ends_with_the_bits_of_one_that_was_not_stopped(tmp_path, link, step):
    with ScriptedDaemon(link, local_steps=4, world_rank=1):
        whole = trainer_of(tmp_path / "run", DilocoCallback(), max_steps=7)
        whole.train()
    checkpoint = tmp_path / "run" / f"checkpoint-{step}"
    with ScriptedDaemon(link, local_steps=4, world_rank=1) as daemon:
        resumed = trainer_of(
            tmp_path / "again", DilocoCallback(resume=checkpoint), max_steps=7, model=tiny_llama(seed=9)
        )
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert daemon.messages[0]["resume"] == str(checkpoint)
    assert (daemon.messages[0]["epoch"], daemon.messages[0]["local_step"]) == divmod(step, 4)
    assert equal(weights(resumed.model), weights(whole.model))
    assert (checkpoint / "outer.bin").is_file()


def resumed_without_the_swarms_state(directory, link, rule=halving):
    """Resume a trainer at step 1 from a checkpoint that was saved without a swarm. Returns its last step."""
    with ScriptedDaemon(link, rule, local_steps=2):
        trainer = trainer_of(directory, DilocoCallback(), max_steps=4)
        trainer.train(resume_from_checkpoint=str(directory / "checkpoint-1"))
    return trainer.state.global_step


def test_a_trainer_resumes_without_the_swarms_state_only_where_the_run_goes_on(tmp_path, link):
    trainer_of(tmp_path, TrainerCallback(), max_steps=1).train()
    with pytest.raises(UserError, match=r"at step 1, .*checkpoint-1 has no complete.json"):
        resumed_without_the_swarms_state(tmp_path, link)
    assert resumed_without_the_swarms_state(tmp_path, link, joining(1, 0.25)) == 4
    # The run's first epoch, in which this worker was restarted.
    assert resumed_without_the_swarms_state(tmp_path, link, joining(0, 0.25)) == 4


def test_a_checkpoint_waits_for_weights_that_are_under_way(tmp_path, link):
    with ScriptedDaemon(link, local_steps=3, overlap_steps=1):
        trainer_of(tmp_path, DilocoCallback(), max_steps=6, save_steps=2).train()
    saved = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*"))
    # Weights are sent at steps 2 and 5 and merged at 3 and 6; a checkpoint that is due in between waits.
    assert saved == [3, 4, 6]
    mark = json.loads((tmp_path / "checkpoint-3" / "complete.json").read_text())
    assert (mark["position"]["epoch"], mark["position"]["local_step"], mark["steps_per_epoch"]) == (1, 0, 3)


def test_checkpoints_are_written_where_rounds_take_as_long_as_epochs(tmp_path, link):
    with ScriptedDaemon(link, slow_rounds(), local_steps=2):
        trainer_of(tmp_path, DilocoCallback(), max_steps=12, save_steps=4).train()
    assert {"checkpoint-6", "checkpoint-10"} <= {path.name for path in tmp_path.glob("checkpoint-*")}


def test_a_peer_that_joins_late_stands_where_the_swarm_does(tmp_path, link):
    seen = Seen()
    with ScriptedDaemon(link, joining(2, 0.25), local_steps=2) as daemon:
        trainer = trainer_of(tmp_path, DilocoCallback(), seen, max_steps=8, save_strategy="no")
        trainer.train()
    assert seen.steps == [5, 6, 7, 8]
    assert seen.rates == pytest.approx([1e-2 * (8 - step) / 8 for step in (5, 6, 7, 8)])
    assert [m["epoch"] for m in daemon.messages if m["kind"] == "ready"] == [2, 3]


@pytest.mark.parametrize(
    ("rule", "collects"),
    [(halving, [True]), (slow_rounds(), [True, False])],
    ids=["between rounds", "during a round"],
)
def test_a_trainer_that_stops_early_keeps_its_best_model_and_hands_nothing_of_it_over(
    tmp_path, link, rule, collects
):
    class Worse(TrainerCallback):
        """The evaluation after the first step is the best."""

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = float(state.global_step)
            control.should_training_stop = state.global_step == 3

    with ScriptedDaemon(link, rule, local_steps=2) as daemon:
        best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
        trainer = trainer_of(tmp_path, DilocoCallback(), Worse(), max_steps=20, **best)
        trainer.train()
    assert trainer.state.best_global_step == 1
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in saved.items())
    assert [m["step"] for m in daemon.messages if m["kind"] == "ready"] == [2]
    # The work of the first two steps is averaged before this peer leaves.
    assert [m["may_go_ahead"] for m in daemon.collects] == collects
    assert daemon.kinds()[-1] == "finished"


def test_data_that_end_before_the_run_are_an_error_after_their_work_is_averaged(tmp_path, link):
    """64 samples are one pass of 16 steps."""
    trainer = trainer_of(tmp_path, DilocoCallback(), max_steps=16, save_strategy="no")
    error = pytest.raises(DilocoError, match=r"data ended at step 14 of 16.* lost fork")
    with ScriptedDaemon(link, leaving_a_fork(), local_steps=2) as daemon, error:
        trainer.train()
    assert daemon.kinds()[-1] == "finished"


def test_under_peft_only_the_adapters_are_averaged(tmp_path, link):
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with ScriptedDaemon(link, local_steps=2) as daemon:
        trainer_of(tmp_path, DilocoCallback(), max_steps=4, model=model, save_strategy="no").train()
        assert len(daemon.buffers(0)[0]) == num_trainable
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def rollouts(per_generation, iterations, accumulation):
    return SimpleNamespace(
        steps_per_generation=per_generation,
        num_iterations=iterations,
        gradient_accumulation_steps=accumulation,
    )


@pytest.mark.parametrize(
    ("args", "period"),
    [(rollouts(2, 1, 2), 1), (rollouts(8, 1, 2), 4), (rollouts(2, 3, 2), 3), (rollouts(3, 1, 2), 3)],
)
def test_a_generation_serves_as_many_steps_as_its_batches_fill(args, period):
    assert generation_period(args) == period


def test_a_schedule_that_would_leave_old_log_probabilities_is_refused_with_one_that_would_not():
    check_divides(rollouts(8, 1, 2), steps_per_epoch=12)
    with pytest.raises(UserError, match=r"a multiple of 4, say 12"):
        check_divides(rollouts(8, 1, 2), steps_per_epoch=10)
