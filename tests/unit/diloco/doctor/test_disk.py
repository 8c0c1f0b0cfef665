"""How much space a peer's checkpoints need, where some are there already."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from diloco.checkpoint import shards
from diloco.checkpoint.store import Store, own_part
from diloco.data.corpus import FileCorpus
from diloco.data.token_cache import tokenized
from diloco.data.tokenizer import load_tokenizer
from diloco.doctor import before_start, resources
from diloco.doctor.before_start import check_memory_and_disk
from diloco.doctor.resources import check_place, checkpoint_bytes_per_parameter, places_to_check
from diloco.errors import UserError
from diloco.options.flags import CkptConfig, HvConfig
from diloco.options.trainer import TrainConfig
from diloco.train.devices import Machine
from diloco.train.inner import InnerLoop
from diloco.train.optim import optimizer_of
from diloco.train.sharding import Precision
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.outer_state import OuterState
from peers.state.whole_files import write_tensors

GB = 10**9
NUM = GB
SIZE = 20 * NUM


def kept(path, *, rank: int | None = 3, **ckpt) -> TrainConfig:
    hv = HvConfig(world_rank=rank)
    return TrainConfig(ckpt=CkptConfig(path=str(path), interval=100, **ckpt), hv=hv)


def sparse(directory, num_bytes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "rank_0.safetensors").open("wb") as file:
        file.truncate(num_bytes)


def needed(config, state_dir, **more) -> int:
    return places_to_check(config, state_dir, NUM, **more)[-1].needed_bytes


def test_checkpoints_that_will_be_deleted_make_room_for_new_ones(tmp_path):
    config, path = kept(tmp_path / "kept", topk=3), tmp_path / "kept"
    assert needed(config, tmp_path) == 4 * SIZE
    for step in (1, 2):
        sparse(path / f"model_step_{step}" / own_part(3), SIZE)
        sparse(path / f"model_step_{step}" / own_part(30), SIZE)
    assert needed(config, tmp_path) == 2 * SIZE
    for step in range(3, 9):
        sparse(path / f"model_step_{step}" / own_part(3), SIZE)
    # The oldest is deleted only after the newest is there.
    assert needed(config, tmp_path) == SIZE
    # Removed when the worker starts.
    sparse(Store(path).staging(9, own_part(3)), SIZE - 5)
    assert needed(config, tmp_path) == 5


def test_the_parts_of_one_swarm_are_about_equal_where_the_own_rank_is_not_known(tmp_path):
    for rank, num_bytes in ((0, SIZE), (1, SIZE + 1), (2, SIZE - 1)):
        sparse(tmp_path / "kept" / "model_step_1" / own_part(rank), num_bytes)
    config = kept(tmp_path / "kept", rank=None, topk=1)
    assert needed(config, tmp_path) == SIZE
    assert needed(kept(tmp_path / "kept", rank=7, topk=1), tmp_path) == 2 * SIZE
    assert needed(config, tmp_path, num_peers=3) == 3 * SIZE


def test_a_restart_on_a_disk_that_was_large_enough_is_not_refused(tmp_path, monkeypatch):
    config = kept(tmp_path / "kept", topk=3)
    free = 4 * SIZE
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert check_place(places_to_check(config, tmp_path, NUM)[-1]).verdict != "fail"
    for step in (1, 2, 3):
        sparse(tmp_path / "kept" / f"model_step_{step}" / own_part(3), SIZE)
        free -= SIZE
    assert check_place(places_to_check(config, tmp_path, NUM)[-1]).verdict != "fail"
    free -= 1
    assert check_place(places_to_check(config, tmp_path, NUM)[-1]).verdict == "fail"


def test_a_checkpoint_for_a_url_is_assembled_in_the_run_directory(tmp_path):
    config = kept("s3://bucket/run")
    assert places_to_check(config, tmp_path, NUM)[0].needed_bytes == SIZE + 4 * NUM
    assert places_to_check(TrainConfig(), tmp_path, NUM)[0].needed_bytes == 4 * NUM


def test_the_tokens_of_files_that_are_still_to_be_tokenised_take_room(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "texts"
    root.mkdir()
    for name in ("one", "two"):
        (root / f"{name}.txt").write_text(name * 10_000)
    monkeypatch.setattr("diloco.data.corpus._PART_BYTES", 1)
    config = TrainConfig(dataset_name_or_path=str(root), path_model="2m")

    def tokens(config, **more) -> list[int]:
        places = places_to_check(config, tmp_path, NUM, **more)
        return [place.needed_bytes for place in places if place.name == "tokens"]

    # Two bytes for each of the text, of which there is usually half as much as of the files.
    assert tokens(config) == [60_000]
    assert tokens(config, is_settled=False) == [12_000]
    with monkeypatch.context() as larger:
        larger.setattr(resources, "num_token_ids", lambda _: 128_000)
        assert tokens(config) == [24_000]
    tokenized(FileCorpus(root / "one.txt"), load_tokenizer("2m"))
    assert tokens(config) == [30_000]
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        killed.setattr("pathlib.Path.rename", _killed)
        with pytest.raises(KeyboardInterrupt):
            tokenized(FileCorpus(root), load_tokenizer("2m"))
    # The next process deletes what has been written of the other file: 30 001 ids.
    assert tokens(config) == []
    (partial,) = (tmp_path / "cache").rglob("*.partial")
    os.truncate(partial / "train.bin", 20_000)
    assert tokens(config) == [10_000]
    tokenized(FileCorpus(root), load_tokenizer("2m"))
    assert tokens(config) == []
    assert tokens(TrainConfig()) == tokens(TrainConfig(dataset_name_or_path="owner/name")) == []
    assert tokens(TrainConfig(dataset_name_or_path=str(tmp_path / "none.txt"))) == []


def test_no_start_is_refused_for_an_estimate_of_what_tokens_take(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=GB))
    monkeypatch.setattr(resources, "_least_num_parameters", lambda _: 0)
    monkeypatch.setattr(before_start, "check_peers_fit", lambda *_args, **_kwargs: None)
    with (tmp_path / "rows.jsonl").open("wb") as rows:
        rows.truncate(10 * GB)
    config = TrainConfig(dataset_name_or_path=str(rows.name), path_model="2m", run_dir=str(tmp_path / "run"))
    check_memory_and_disk(config, Machine(num_cores=1), tmp_path)
    assert "0.9 GiB free, about 9.3 GiB needed; try export XDG_CACHE_HOME=" in capsys.readouterr().err
    with monkeypatch.context() as full:
        full.setattr("os.fsync", _no_space)
        found = check_place(places_to_check(config, tmp_path, 0)[-1])
    assert (found.name, found.verdict) == ("tokens", "warn") and "No space left" in found.said


def _killed(*_):
    raise KeyboardInterrupt


def _no_space(_descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_keeps_all_its_checkpoints_is_told_at_its_start_that_they_do_not_fit(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=500 * GB))
    monkeypatch.setattr(resources, "_least_num_parameters", lambda _: NUM)
    monkeypatch.setattr(before_start, "check_peers_fit", lambda *_args, **_kwargs: None)

    def told(*, is_settled: bool = True, **ckpt) -> str:
        check_memory_and_disk(kept(tmp_path, **ckpt), Machine(num_cores=1), tmp_path, is_settled=is_settled)
        return capsys.readouterr().err

    # 88 000 steps, a checkpoint every 100.
    assert "16391.3 GiB needed to keep all checkpoints of the run; try --ckpt.topk 3" in told()
    # The swarm may train fewer steps.
    assert told(is_settled=False) == told(topk=3) == ""
    with pytest.raises(UserError, match=r"checkpoints: .*; try --ckpt\.path /a/larger/disk"):
        told(topk=100)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("codec", "num_peers"), [("fp32", 4), ("int4", 4), ("topk", 64)])
def test_a_saved_checkpoint_is_as_large_as_estimated(tmp_path, codec, num_peers, optimizer):
    model = torch.nn.Linear(512, 512)
    inner = InnerLoop(
        model,
        optimizer_of(optimizer, model, weight_decay=0.1),
        precision=Precision(torch.float32),
        device=torch.device("cpu"),
        micro_batch_size=1,
        max_grad_norm=1.0,
    )
    shards.make_optimizer_state(inner)
    numel = model.weight.numel()
    residuals = {
        "contribution": torch.zeros(numel),
        "result": torch.zeros(numel // num_peers),
        "result_start": torch.tensor([0]),
    }
    saved = state_files.save(
        OuterState.initial([torch.zeros(numel)]),
        tmp_path,
        [] if codec == "fp32" else [Residuals.from_tensors(numel, residuals)],
    )
    saved["rank_0"] = write_tensors(tmp_path / "rank_0", shards.state_to_write(inner, 0))
    size = sum(record.num_bytes for record in saved.values())
    estimate = checkpoint_bytes_per_parameter(
        TrainConfig(optimizer=optimizer, hv=HvConfig(compression=codec))
    )
    # The result residual, of 4 / N bytes, is left out.
    assert estimate * numel <= size < 1.07 * estimate * numel
