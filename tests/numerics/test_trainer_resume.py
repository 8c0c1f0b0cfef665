"""A training that is interrupted and resumed gives bit for bit the figures of an undisturbed one."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import datasets
import fsspec
import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from diloco.checkpoint import checkpoint
from diloco.checkpoint.shards import state_to_write
from diloco.data.streaming import HubDataset
from diloco.errors import DilocoError, UserError
from diloco.launch.worker import Assignment
from diloco.options.flags import CkptConfig, HvConfig
from diloco.outer.world import World, on_every_rank
from diloco.train_fsdp import Trainer
from peers.daemon.link import LINK_ENV
from tests.support.exhaustive import exhaustive_but
from tests.support.scripted_daemon import ScriptedDaemon, halving, joining, slow_rounds
from tests.support.torch_ranks import Ranks
from tests.support.training import of_kind, tiny_config, train

FIGURES = ("step", "loss", "lr", "grad_norm", "tokens")


def stopped_and_resumed(world, directory, precision, optimizer="adamw"):
    """Figures of an undisturbed run of six steps, and of a run that stops after step 3 and resumes from step 2."""
    config = tiny_config(directory, precision=precision, optimizer=optimizer)
    whole = train(config, directory / "whole", world)
    ckpt = CkptConfig(path=config.ckpt.path, interval=2)
    first = train(replace(config, max_steps=3, ckpt=ckpt), directory / "parts", world)
    both = train(replace(config, ckpt=replace(ckpt, resume="auto")), directory / "parts", world)
    return of_kind("step", whole, *FIGURES), of_kind("step", both[len(first) :], *FIGURES)


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("precision", exhaustive_but(("32-true",), ["32-true", "bf16-mixed", "fp16-mixed"]))
def test_resumed_figures_equal_the_undisturbed_ones(tmp_path, precision):
    whole, resumed = stopped_and_resumed(World(), tmp_path, precision)
    assert [figures[0] for figures in resumed] == [3, 4, 5, 6]
    assert resumed == whole[2:]


@pytest.mark.parametrize("optimizer", exhaustive_but(("muon",), ["adamw", "muon"]))
def test_sharded_ranks_resume_from_their_own_shards(tmp_path, two, optimizer):
    whole, resumed = two.run(stopped_and_resumed, tmp_path, "32-true", optimizer)[0]
    assert [figures[0] for figures in resumed] == [3, 4, 5, 6]
    assert resumed == whole[2:]


def test_a_streamed_dataset_is_read_on_where_the_checkpoint_was_saved(tmp_path, monkeypatch):
    texts = [f"{n} lorem ipsum dolor sit amet" for n in range(4000)]
    rows = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=3)
    begun, documents = [], HubDataset.documents

    def noted(self, lane, cycle, start=(0, 0)):
        begun.append(start)
        return documents(self, lane, cycle, start)

    monkeypatch.setattr(HubDataset, "documents", noted)
    monkeypatch.setattr(
        "diloco.data.batches.open_hub_dataset", lambda name, column, seed: HubDataset(name, rows, seed=seed)
    )
    config = tiny_config(tmp_path, fake_data=False, dataset_name_or_path="far/away", total_steps=16)
    whole = train(config, tmp_path / "whole")
    ckpt = CkptConfig(path=config.ckpt.path, interval=12)
    train(replace(config, max_steps=12, ckpt=ckpt), tmp_path / "first")
    assert (tmp_path / "checkpoints" / "model_step_12" / "stream.json").is_file()
    begun.clear()
    resumed = train(replace(config, ckpt=replace(ckpt, resume="auto")), tmp_path / "second")
    assert of_kind("step", resumed, *FIGURES) == of_kind("step", whole, *FIGURES)[12:]
    # The first read, from the start, counts bytes; the second one continues the stream where the checkpoint was.
    assert begun[0] == (0, 0) and len(begun) == 2 and begun[1] > (0, 0)
    (said,) = [record for record in whole if record.get("event") == "few_files"]
    assert (said["num_files"], said["num_parts"]) == (3, 64)


def streamed_and_resumed(world, directory):
    """As `stopped_and_resumed`, with a streamed dataset; and whether this rank has read it for training."""
    texts = [f"{n} lorem ipsum dolor sit amet" for n in range(4000)]
    rows = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=3)
    config = tiny_config(directory, fake_data=False, dataset_name_or_path="far/away", total_steps=16)
    ckpt, cycles, documents = CkptConfig(path=config.ckpt.path, interval=12), [], HubDataset.documents

    def noted(self, lane, cycle, start=None):
        cycles.extend([] if start is None else [cycle])
        return documents(self, lane, cycle, start or (0, 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HubDataset, "documents", noted)
        patch.setattr(
            "diloco.data.batches.open_hub_dataset", lambda name, *_, seed: HubDataset(name, rows, seed=seed)
        )
        whole = train(config, directory / "whole", world)
        train(replace(config, max_steps=12, ckpt=ckpt), directory / "first", world)
        resumed = train(replace(config, ckpt=replace(ckpt, resume="auto")), directory / "second", world)
    figures = [of_kind("step", records, *FIGURES) for records in (whole, resumed)]
    return *figures, bool(cycles)


def test_one_rank_reads_a_streamed_dataset_for_both_and_reads_on_where_it_was(tmp_path, two):
    (tmp_path / "alone").mkdir()
    alone, _, _ = streamed_and_resumed(World(), tmp_path / "alone")
    (whole, resumed, is_first_reading), (_, _, is_second_reading) = two.run(streamed_and_resumed, tmp_path)
    assert resumed == whole[12:] and is_first_reading and not is_second_reading
    losses = [[loss for _, loss, *_ in figures] for figures in (alone, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_peer_resumes_in_mid_epoch_with_its_outer_state(tmp_path, link):
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(tmp_path / "checkpoints"), interval=5))
    with ScriptedDaemon(link, world_rank=1, local_steps=4):
        whole = train(config, tmp_path / "whole")
    part = tmp_path / "checkpoints" / "model_step_5" / "diloco_rank_1"
    assert (part / "outer.bin").is_file()
    with ScriptedDaemon(link, world_rank=1, local_steps=4) as daemon:
        resume = CkptConfig(path=config.ckpt.path, resume=str(part.parent))
        resumed = train(replace(config, ckpt=resume), tmp_path / "resumed")
    assert daemon.messages[0]["resume"] == str(part)
    assert of_kind("step", resumed, *FIGURES) == of_kind("step", whole, *FIGURES)[5:]
    with ScriptedDaemon(link, world_rank=1, local_steps=1), pytest.raises(UserError, match="local-steps 4"):
        train(replace(config, ckpt=resume, hv=HvConfig(local_steps=1)), tmp_path / "other")


def test_only_the_newest_of_a_peers_own_checkpoints_are_kept(tmp_path):
    path = tmp_path / "checkpoints"
    (path / "model_step_1" / "diloco_rank_0").mkdir(parents=True)
    train(tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=1, topk=2)), tmp_path / "run")
    assert sorted(p.name for p in path.iterdir() if (p / "complete.json").exists()) == [
        "model_step_5",
        "model_step_6",
    ]
    # Only the peer's own checkpoints are deleted; this one is another peer's.
    assert (path / "model_step_1" / "diloco_rank_0").is_dir()


def test_a_damaged_checkpoint_is_passed_over_and_the_metrics_say_so(tmp_path):
    ckpt = CkptConfig(path=str(tmp_path / "checkpoints"), interval=2)
    train(tiny_config(tmp_path, ckpt=ckpt, max_steps=4), tmp_path / "first")
    damaged = tmp_path / "checkpoints" / "model_step_4" / "rank_0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    config = tiny_config(tmp_path, ckpt=replace(ckpt, resume="auto"), max_steps=4)
    records = train(config, tmp_path / "second")
    assert of_kind("step", records, "step") == [(3,), (4,)]
    (said,) = [record for record in records if record.get("event") == "checkpoint_skipped"]
    assert str(damaged) in said["reason"]


@pytest.mark.parametrize("in_swarm", [False, True])
def test_where_no_checkpoint_is_whole_nobody_begins_anew_unasked(tmp_path, monkeypatch, in_swarm):
    def life(rule, name, **changes):
        with contextlib.ExitStack() as stack:
            if in_swarm:
                monkeypatch.setenv(LINK_ENV, str(tmp_path / "link.sock"))
                stack.enter_context(ScriptedDaemon(tmp_path / "link.sock", rule, world_rank=1, local_steps=2))
            return train(tiny_config(tmp_path, hv=HvConfig(local_steps=2), **changes), tmp_path / name)

    ckpt = CkptConfig(path=str(tmp_path / "checkpoints"), interval=2)
    life(halving, "first", ckpt=ckpt, max_steps=4)
    files = sorted((tmp_path / "checkpoints").rglob("rank_0.safetensors"))
    assert len(files) == 2
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    again = replace(ckpt, resume="auto")
    with pytest.raises(UserError, match=r"rank_0\.safetensors .* Leave out --ckpt\.resume to begin anew"):
        life(halving, "second", ckpt=again)
    assert sorted((tmp_path / "checkpoints").rglob("rank_0.safetensors")) == files
    if in_swarm:
        # A swarm that is still training lets the peer join; it does not begin anew.
        records = life(joining(3, 0.25), "third", ckpt=again, total_steps=8)
        assert [step for (step,) in of_kind("step", records, "step")] == [7, 8]
        assert len([record for record in records if record.get("event") == "checkpoint_skipped"]) == 2


@pytest.mark.parametrize(
    ("resume", "message"),
    [("nowhere", "no complete checkpoint in nowhere"), ("{checkpoints}/model_step_4", "holds another model")],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, resume, message):
    path = tmp_path / "checkpoints"
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=4), max_steps=4)
    train(config, tmp_path / "first")
    other = (tmp_path / "model" / "config.json").read_text().replace("27", "29")
    (tmp_path / "model" / "config.json").write_text(other)
    ckpt = CkptConfig(path=str(path), resume=resume.format(checkpoints=path))
    with pytest.raises(UserError, match=message):
        train(replace(config, ckpt=ckpt), tmp_path / "second")


def saved_after_three_steps(world, config, directory):
    """Train three steps. Returns the directory of the checkpoint of step 3."""
    train(replace(config, max_steps=3), directory / "saving", world)
    return Path(config.ckpt.path) / "model_step_3"


def restored(world, config, directory):
    """A peer right after it has resumed: its position, its tokens, and each rank's shards and random state."""
    config = replace(config, ckpt=replace(config.ckpt, resume="auto"))
    (directory / "restored").mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        Assignment(config=config, run_dir=directory / "restored"), world, torch.device("cpu"), []
    )
    mine = {
        name: (world.rank, one.to_local().clone() if isinstance(one, DTensor) else one.clone())
        for name, one in state_to_write(trainer.inner, world.rank).items()
        if not name.startswith("rng.")
    }
    with trainer.metrics:
        trainer.checkpoints.close()
    return trainer.outer.position, trainer.outer.tokens, on_every_rank(lambda: (mine, torch.get_rng_state()))


def joined(ranks):
    """Whole tensors, put together from the shards of all ranks."""
    found = {}
    for mine, _ in ranks:
        for name, shard in mine.items():
            found.setdefault(name, []).append(shard)
    parts = {
        name: [part for _, part in sorted(shards, key=lambda one: one[0])] for name, shards in found.items()
    }
    return {name: torch.cat(these) if these[0].ndim else these[0] for name, these in parts.items()}


def content_of(directory):
    """Whole tensors, put together from the files of a checkpoint."""
    found, files = {}, sorted(directory.glob("rank_*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if not name.startswith("rng."):
                    found.setdefault(name, []).append(file.get_tensor(name))
    return {name: torch.cat(these) if these[0].ndim else these[0] for name, these in found.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def saved_by_two_and_restored(two, tmp_path, strategy):
    """What two ranks saved, what one rank and what two ranks restored of it, and the configuration to restore it."""
    ckpt = CkptConfig(path=str(tmp_path / "checkpoints"), interval=3)
    config = tiny_config(tmp_path, ckpt=ckpt, sharding_strategy=strategy, total_batch_size=6)
    config = replace(config, per_device_train_batch_size=1)
    saved = content_of(two.run(saved_after_three_steps, config, tmp_path)[0])
    alone = restored(World(), config, tmp_path / "one")
    again = two.run(restored, config, tmp_path / "two")[0]
    assert len([name for name in saved if name.startswith("optimizer.")]) > 20
    for _, _, ranks in (alone, again):
        assert same(joined(ranks), saved)
    return saved, alone, again, config


@pytest.mark.exhaustive
def test_other_numbers_of_ranks_resume_what_two_have_saved_bit_for_bit(tmp_path, two):
    saved, alone, again, config = saved_by_two_and_restored(two, tmp_path, "FULL_SHARD")
    with Ranks(3) as three:
        more = three.run(restored, config, tmp_path / "three")[0]
    assert same(joined(more[2]), saved)
    assert alone[0] == again[0] == more[0]
    # The trained tokens (three steps of 6 samples of 16 tokens) are divided among the ranks.
    assert (alone[1], again[1], more[1]) == ([3 * 6 * 16], [3 * 3 * 16], [3 * 2 * 16])
    # A rank that saved resumes its random state; a new rank starts from its seed.
    [(_, random_0)] = alone[2]
    assert torch.equal(random_0, again[2][0][1]) and torch.equal(random_0, more[2][0][1])
    assert torch.equal(again[2][1][1], more[2][1][1])
    assert not torch.equal(more[2][1][1], more[2][2][1])


def test_what_is_on_every_rank_is_saved_once_and_resumed_by_other_numbers_of_ranks(tmp_path, two):
    saved, *_ = saved_by_two_and_restored(two, tmp_path, "NO_SHARD")
    sizes = [p.stat().st_size for p in sorted((tmp_path / "checkpoints" / "model_step_3").glob("rank_*"))]
    assert sizes[0] > 4 * sum(tensor.numel() for tensor in saved.values()) > 3 * sizes[1]


@pytest.mark.parametrize("optimizer", exhaustive_but(("muon",), ["adamw", "muon"]))
def test_what_one_rank_saved_goes_on_over_two_with_the_same_figures_but_for_rounding(
    tmp_path, two, optimizer
):
    ckpt = CkptConfig(path=str(tmp_path / "checkpoints"), interval=3)
    config = tiny_config(tmp_path, ckpt=ckpt, optimizer=optimizer)
    whole = train(config, tmp_path / "whole")
    resume = replace(config, ckpt=replace(ckpt, resume=str(tmp_path / "checkpoints" / "model_step_3")))
    resumed = two.run(train_on, resume, tmp_path / "resumed")[0]
    expected = of_kind("step", whole, "loss")[3:]
    found = of_kind("step", resumed, "loss")
    assert len(found) == 3 and torch.tensor(found) == pytest.approx(torch.tensor(expected), abs=1e-5)


def train_on(world, config, directory):
    return train(config, directory, world)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, monkeypatch):
    """Writing is blocked until the next step has been trained; the file still has the values from before that step."""
    gate, written_at = threading.Event(), []
    write = checkpoint.write_tensors

    def held_up(*arguments):
        assert gate.wait(30)
        written_at.append(time.monotonic())
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", held_up)
    path = tmp_path / "checkpoints"
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=2))
    (tmp_path / "run").mkdir()
    trainer = Trainer(Assignment(config=config, run_dir=tmp_path / "run"), World(), torch.device("cpu"), [])
    with trainer.metrics, trainer.samples_left() as steps:
        samples = iter(steps)
        for _ in range(3):
            trainer.step(torch.from_numpy(next(samples)))
        assert trainer.outer.nominal_step == 3 and not written_at and trainer.checkpoints.events() == []
        wait = trainer.checkpoints._saver.wait

        def waited(timeout_s=None):
            threading.Timer(0.2, gate.set).start()
            return wait(timeout_s)

        # The checkpoint of step 4 is due and must wait for that of step 2.
        monkeypatch.setattr(trainer.checkpoints._saver, "wait", waited)
        trainer.step(torch.from_numpy(next(samples)))
        assert len(written_at) >= 1
        trainer.checkpoints.close()
    events = trainer.checkpoints.events()
    assert [event["step"] for event in events][-1] == 4 and events[-1]["blocked_s"] > 0.1
    monkeypatch.setattr(checkpoint, "write_tensors", write)
    straight = tiny_config(
        tmp_path, ckpt=CkptConfig(path=str(tmp_path / "straight"), interval=2), max_steps=4
    )
    train(straight, tmp_path / "again")
    for step in (2, 4):
        assert same(
            content_of(path / f"model_step_{step}"), content_of(tmp_path / "straight" / f"model_step_{step}")
        )


def test_checkpoints_are_written_where_rounds_take_as_long_as_epochs(tmp_path, monkeypatch):
    link, path = tmp_path / "link.sock", tmp_path / "checkpoints"
    monkeypatch.setenv(LINK_ENV, str(link))
    ckpt, hv = CkptConfig(path=str(path), interval=4), HvConfig(local_steps=2)
    config = tiny_config(tmp_path, ckpt=ckpt, hv=hv, total_steps=13)
    with ScriptedDaemon(link, slow_rounds(), local_steps=2):
        train(config, tmp_path / "run")
    # A checkpoint that is due while a round is in flight is written at the end of the next epoch.
    saved = {directory.name for directory in path.glob("model_step_*")}
    assert saved == {"model_step_6", "model_step_10", "model_step_13"}


def test_a_disk_that_is_full_stops_nothing_and_is_told(tmp_path, monkeypatch):
    write = checkpoint.write_tensors

    def full(path, *arguments):
        if ".model_step_4." in str(path.parent):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    path = tmp_path / "checkpoints"
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=2))
    records = train(config, tmp_path / "run")
    assert [step for (step,) in of_kind("step", records, "step")] == [1, 2, 3, 4, 5, 6]
    events = {r["step"]: r for r in records if r.get("event", "").startswith("checkpoint")}
    assert {step: event["event"] for step, event in events.items()} == {
        2: "checkpoint",
        4: "checkpoint_failed",
        6: "checkpoint",
    }
    assert "No space left" in events[4]["reason"]
    assert sorted(entry.name for entry in path.iterdir()) == ["model_step_2", "model_step_6"]


def test_a_disk_that_is_full_ends_a_training_whose_checkpoints_are_required(tmp_path, monkeypatch):

    def full(path, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    path = tmp_path / "checkpoints"
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=2, required=True))
    with pytest.raises(DilocoError, match=r"^the worker failed: the checkpoint of step 2 .*No space left"):
        train(config, tmp_path / "run")


def test_one_rank_whose_disk_is_full_makes_no_half_checkpoint(tmp_path, two):
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(tmp_path / "checkpoints"), interval=3))
    records = two.run(trained_with_a_full_disk, config, tmp_path)[0]
    events = [record for record in records if record.get("event", "").startswith("checkpoint")]
    assert [(event["event"], event["step"]) for event in events] == [
        ("checkpoint_failed", 3),
        ("checkpoint_failed", 6),
    ]
    assert not list(tmp_path.glob("checkpoints/*"))


def trained_with_a_full_disk(world, config, directory):
    """Train while only the second rank's disk is full."""
    write = checkpoint.write_tensors

    def full(path, *arguments):
        if world.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments)

    checkpoint.write_tensors = full
    try:
        return train(config, directory / "run", world)
    finally:
        checkpoint.write_tensors = write


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_checkpoints_at_a_url_are_kept_and_resumed_from(tmp_path, kind):
    path = {"memory": f"memory://{uuid.uuid4().hex}", "file": f"file://{tmp_path}/far"}[kind]
    ckpt = CkptConfig(path=path, interval=1, topk=2)
    whole = train(tiny_config(tmp_path), tmp_path / "whole")
    config = tiny_config(tmp_path, ckpt=ckpt)
    first = train(replace(config, max_steps=4), tmp_path / "parts")
    filesystem, root = fsspec.core.url_to_fs(path)
    kept = sorted(name.rpartition("/")[2] for name in filesystem.ls(root, detail=False))
    assert kept == ["model_step_3", "model_step_4"]
    # The newest checkpoint is damaged; the one before it is used.
    filesystem.pipe_file(f"{root}/model_step_4/rank_0.safetensors", b"torn")
    both = train(replace(config, ckpt=replace(ckpt, resume="auto")), tmp_path / "parts")
    resumed = both[len(first) :]
    assert of_kind("step", resumed, *FIGURES) == of_kind("step", whole, *FIGURES)[3:]
    assert not list((tmp_path / "parts" / "checkpoints").iterdir())
