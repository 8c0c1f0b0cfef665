"""A directory and fsspec's file systems behave alike: the mark is written last, only own checkpoints are deleted."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from diloco.checkpoint.choice import Candidate, Registration
from diloco.checkpoint.digests import flushed_records
from diloco.checkpoint.mark import COMPLETE, Mark, names_below, write_mark
from diloco.checkpoint.restore import OwnCheckpoints, fetched
from diloco.checkpoint.store import RemoteStore, Store, open_store, own_part
from diloco.errors import UserError
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Position
from diloco.outer.world import World

PART = own_part(1)


@pytest.fixture(params=["directory", "file", "memory"])
def store(request, tmp_path):
    # Names with brackets, which glob would read as a pattern.
    paths = {
        "directory": str(tmp_path / "kept [1]"),
        "file": f"file://{tmp_path}/kept [1]",
        "memory": f"memory://{uuid.uuid4().hex}/kept [1]",
    }
    made = open_store(paths[request.param], tmp_path / "scratch")
    assert type(made) is (Store if request.param == "directory" else RemoteStore)
    made.clear(PART)
    return made


def put(
    store,
    step: int,
    *,
    part: str = PART,
    files: tuple[str, ...] = ("a.safetensors", "model/b.json"),
    contributors: tuple[int, ...] = (),
) -> Mark:
    """A checkpoint of these files, whose content is their name."""
    staging = store.staging(step, part)
    for name in files:
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_text(f"{name} of {step}")
    mark = Mark(
        position=Position(),
        tokens=(0,),
        num_ranks=1,
        files=flushed_records(staging, names_below(staging)),
        saved_at_ms=step,
        contributors=contributors,
    )
    store.send(staging, mark.files, step, part)
    write_mark(staging, mark)
    store.finish(staging, step, part)
    assert not staging.exists()
    return mark


def opened(store, step: int, part: str = PART):
    name = f"model_step_{step}"
    mark = Mark.from_bytes(store.mark(name, part))
    return store.opened(Candidate(name=name, part=part, mark=mark))


def content(store, step: int, part: str = PART) -> dict[str, str]:
    with opened(store, step, part) as directory:
        names = [path for path in directory.rglob("*") if path.is_file() and path.name != COMPLETE]
        return {path.relative_to(directory).as_posix(): path.read_text() for path in names}


def test_what_is_put_there_comes_back(store):
    mark = put(store, 4)
    assert {name: Mark.from_bytes(raw) for name, raw in store.marks(PART).items()} == {"model_step_4": mark}
    assert Mark.from_bytes(store.mark("model_step_4", PART)) == mark
    assert content(store, 4) == {"a.safetensors": "a.safetensors of 4", "model/b.json": "model/b.json of 4"}
    assert store.mark("model_step_5", PART) is None and store.marks("") == {}
    put(store, 4, part="")
    assert store.all_marks() == {("model_step_4", PART): mark.to_bytes()}


def test_without_a_mark_there_is_no_checkpoint(store):
    staging = store.staging(4, PART)
    (staging / "a").write_text("half")
    store.send(staging, ["a"], 4, PART)
    assert store.marks(PART) == {} and store.parts("model_step_4") == {}
    store.discard(staging)
    store.discard(staging)
    assert not staging.exists()


def test_a_file_that_another_node_wrote_on_its_own_disk_makes_no_checkpoint(tmp_path):
    store = open_store(str(tmp_path / "kept"), tmp_path / "scratch")
    staging = store.staging(4, PART)
    (staging / "rank_0.safetensors").write_text("mine")
    files = flushed_records(staging, names_below(staging))
    files["rank_1.safetensors"] = files["rank_0.safetensors"]
    write_mark(staging, Mark(position=Position(), tokens=(0,), num_ranks=2, files=files))
    with pytest.raises(OSError, match=r"rank_1\.safetensors was written on another node: --ckpt\.path"):
        store.finish(staging, 4, PART)
    assert store.marks(PART) == {}


def test_a_step_that_is_saved_again_takes_the_place_of_the_one_before(store):
    put(store, 4, files=("a", "b"))
    put(store, 4, files=("a", "c"))
    with opened(store, 4) as directory:
        assert {path.name for path in directory.iterdir()} == {"a", "c", COMPLETE}
    assert list(store.marks(PART)) == ["model_step_4"]
    assert set(Mark.from_bytes(store.mark("model_step_4", PART)).files) == {"a", "c"}


def test_a_peer_deletes_its_own_and_nobody_elses(store):
    for part in (PART, own_part(12), ""):
        put(store, 4, part=part)
    store.delete("model_step_4", "")
    assert set(store.parts("model_step_4")) == {PART, own_part(12)}
    store.delete("model_step_4", PART)
    store.delete("model_step_4", PART)
    assert set(store.parts("model_step_4")) == {own_part(12)}
    assert content(store, 4, own_part(12))


def test_where_there_is_nothing_there_is_no_checkpoint(tmp_path, monkeypatch):
    """As in a bucket that does not exist."""
    store = open_store(f"memory://{uuid.uuid4().hex}", tmp_path)

    def refuse(*_args, **_kwargs):
        raise FileNotFoundError("no such bucket")

    monkeypatch.setattr(store._files, "find", refuse)
    assert store.all_marks() == store.savers() == {}


def test_those_who_save_there_are_known(store):
    assert store.savers() == {}
    for rank in (1, 12, 1):
        store.register(rank)
    first = store.savers()
    assert first.keys() == {1, 12} and not any(one.has_saved for one in first.values())
    assert all(0 < one.at_ms <= time.time() * 1e3 for one in first.values())
    store.register(12, has_saved=True)
    store.register(12)
    assert store.savers() == {1: first[1], 12: replace(first[12], has_saved=True)}


def test_a_checkpoint_that_was_brought_there_from_elsewhere_has_a_saver(store):
    put(store, 4, part=own_part(7))
    put(store, 8, part="")
    assert store.savers() == {7: Registration()}
    store.register(7)
    assert store.savers()[7].has_saved and store.savers()[7].at_ms > 0


def test_a_newcomer_reads_the_marks_that_exist_and_no_others(tmp_path, monkeypatch):
    """Sixty steps by sixty ranks, of which each has saved four."""
    url, files = f"memory://{uuid.uuid4().hex}", MemoryFileSystem()
    store = open_store(url, tmp_path)
    for rank in range(60):
        store.register(rank, has_saved=True)
        for step in range(rank + 1, rank + 5):
            place = Position(epoch=step)
            mark = Mark(position=place, tokens=(0,), num_ranks=0, saved_at_ms=step, contributors=(rank,))
            files.pipe_file(f"{url}/model_step_{step}/{own_part(rank)}/{COMPLETE}", mark.to_bytes())
    asked = []

    def cat_file(self, path, *args, **kwargs):
        asked.append(path)
        return AbstractFileSystem.cat_file(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    config = CkptConfig(path=url, resume="auto")
    with contextlib.ExitStack() as stack:
        found = fetched(config, World(), 77, tmp_path, stack)
    assert found.mark.saved_at_ms == 63 and not found.is_own
    assert len(asked) == len(set(asked)) == 60 * 4 + 60


def test_marks_are_read_several_at_a_time_where_the_library_allows_it(tmp_path, monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}", tmp_path)
    put(store, 4)
    put(store, 8)
    together = threading.Barrier(2, timeout=10)

    def cat_file(self, *args, **kwargs):
        together.wait()
        return AbstractFileSystem.cat_file(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "async_impl", True)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert len(store.marks(PART)) == 2


def test_files_are_fetched_several_at_a_time_where_the_library_allows_it(tmp_path, monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}", tmp_path)
    put(store, 4, files=("a", "b"))
    together = threading.Barrier(2, timeout=10)

    def get_file(self, path, local, **kwargs):
        if not path.endswith(COMPLETE):
            together.wait()
        AbstractFileSystem.get_file(self, path, local, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "async_impl", True)
    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file, raising=False)
    assert content(store, 4) == {"a": "a of 4", "b": "b of 4"}


def test_what_a_killed_life_left_is_cleared_and_others_keep_theirs(tmp_path):
    store = Store(tmp_path)
    mine, theirs = store.staging(4, PART), store.staging(4, own_part(12))
    alone = store.staging(5, "")
    store.clear(PART)
    assert (mine.exists(), theirs.exists(), alone.exists()) == (False, True, True)
    store.clear("")
    assert (theirs.exists(), alone.exists()) == (True, False)


def test_a_peer_with_topk_deletes_its_own_and_not_what_an_absent_peer_keeps(store, tmp_path):
    archive, me = own_part(0), own_part(5)
    for step in (4, 8, 12, 16):
        put(store, step, part=me, contributors=(5,))
    put(store, 4, part=archive, contributors=(0, 5))
    own = OwnCheckpoints(CkptConfig(path=str(tmp_path), topk=2, resume="auto"), tmp_path)
    own.store = store
    own.delete_old(5)
    assert store.all_marks().keys() == {(f"model_step_{step}", me) for step in (12, 16)} | {
        ("model_step_4", archive)
    }


@pytest.mark.parametrize("part", [PART, ""])
def test_what_was_uploaded_before_a_cut_is_cleared_and_nothing_else(tmp_path, part):
    url, files = f"memory://{uuid.uuid4().hex}/kept [1]", MemoryFileSystem()
    store = open_store(url, tmp_path)
    put(store, 4, part=part)
    for name, its_part in (("model_step_8", part), ("model_step_8", own_part(12)), ("older", part)):
        for file in ("rank_0.safetensors", "model/config.json"):
            files.pipe_file("/".join(filter(None, (url, name, its_part, file))), b"cut")
    files.pipe_file("/".join(filter(None, (url, "model_step_9", part, "__0_0.distcp"))), b"OpenDiLoCo's")
    before = set(files.find(url))
    store.clear(part)
    gone = {path.partition("kept [1]/")[2] for path in before - set(files.find(url))}
    cut = ("rank_0.safetensors", "model/config.json")
    assert gone == {"/".join(filter(None, ("model_step_8", part, file))) for file in cut}
    assert content(store, 4, part)


def test_where_removing_a_directory_removes_what_is_in_it_others_keep_theirs(tmp_path, monkeypatch):
    """As on hdfs."""
    url, files = f"memory://{uuid.uuid4().hex}", MemoryFileSystem()
    store = open_store(url, tmp_path)
    put(store, 4)
    put(store, 4, part=own_part(12))
    put(store, 8, part=own_part(12))
    files.pipe_file(f"{url}/model_step_8/{PART}/rank_0.safetensors", b"cut")
    plain_rmdir = MemoryFileSystem.rmdir

    def rmdir(self, path):
        for file in self.find(path):
            self.rm_file(file)
        plain_rmdir(self, path)

    monkeypatch.setattr(MemoryFileSystem, "rmdir", rmdir)
    store.clear(PART)
    store.delete("model_step_4", PART)
    assert store.all_marks().keys() == {(f"model_step_{step}", own_part(12)) for step in (4, 8)}
    assert all(content(store, step, own_part(12)) for step in (4, 8))
    store.delete("model_step_4", own_part(12))
    assert not files.exists(f"{url}/model_step_4")


def test_a_place_that_cannot_be_cleared_keeps_nobody_from_starting(tmp_path, monkeypatch, caplog):
    store = open_store(f"memory://{uuid.uuid4().hex}", tmp_path)

    def refuse(*_args, **_kwargs):
        raise PermissionError("access denied")

    monkeypatch.setattr(store._files, "find", refuse)
    store.clear(PART)
    assert "upload was cut off were not deleted: access denied" in caplog.text


@pytest.mark.parametrize(("url", "said"), [("s4://bucket/x", "s4"), ("nonsense://x", "nonsense")])
def test_a_url_of_no_known_kind_is_refused(url, said, tmp_path):
    with pytest.raises(UserError, match=said):
        open_store(url, tmp_path)


def test_a_disk_that_is_full_is_an_os_error_whatever_the_library_raises(tmp_path, monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}", tmp_path)

    def refuse(*_args, **_kwargs):
        raise RuntimeError("slow down")

    monkeypatch.setattr(store._files, "put_file", refuse)
    staging = store.staging(4, PART)
    Path(staging, "a").write_text("x")
    with pytest.raises(OSError, match="RuntimeError: slow down"):
        store.send(staging, ["a"], 4, PART)
