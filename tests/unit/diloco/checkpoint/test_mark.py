"""A flipped, missing, torn or altered byte anywhere in a checkpoint is found, named, and skipped."""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco.checkpoint.digests import flushed_records
from diloco.checkpoint.mark import COMPLETE, Damaged, Mark, names_below, write_mark
from diloco.checkpoint.restore import fetched
from diloco.checkpoint.store import own_part
from diloco.errors import UserError
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Position
from diloco.outer.world import World
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.outer_state import OuterState
from peers.state.whole_files import write_bytes, write_tensors

SIZE = 700
FILES = (
    COMPLETE,
    "model/config.json",
    "outer.json",
    "outer.safetensors",
    "rank_0.safetensors",
    "rank_1.safetensors",
    "residuals.safetensors",
)


def checkpoint(path: Path, step: int) -> Path:
    """A checkpoint of world rank 3 with every kind of file."""
    directory = path / f"model_step_{step}" / own_part(3)
    (directory / "model").mkdir(parents=True)
    state = OuterState.initial([torch.full((SIZE,), float(step))])
    kept = Residuals.from_tensors(SIZE, {"contribution": torch.ones(SIZE)})
    state_files.save(state, directory, [kept])
    for rank in (0, 1):
        write_tensors(directory / f"rank_{rank}.safetensors", {"model.w": torch.rand(9, 5)})
    write_bytes(directory / "model" / "config.json", b'{"model_type": "llama"}\n')
    position = Position(epoch=step // 4, local_step=step % 4, data_base=7)
    mark = Mark(
        position=position,
        tokens=(step,),
        num_ranks=2,
        files=flushed_records(directory, names_below(directory)),
        saved_at_ms=step,
        contributors=(3,),
        head=state.head,
    )
    write_mark(directory, mark)
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Two checkpoints, of steps 4 and 8."""
    path = tmp_path_factory.mktemp("checkpoints")
    assert sorted(p.name for p in checkpoint(path, 4).rglob("*") if p.is_file()) == sorted(
        Path(name).name for name in FILES
    )
    checkpoint(path, 8)
    return path


def found(path: Path, resume: str, skipped: list[str] | None = None) -> int:
    """The epoch of the checkpoint that would be resumed; the faults of those passed over are added to `skipped`."""
    config, told = CkptConfig(path=str(path), resume=resume), [] if skipped is None else skipped
    with contextlib.ExitStack() as stack:
        what = fetched(config, World(), 3, path / "scratch", stack, on_skipped=told.append)
    assert what is not None and what.is_own
    return what.mark.position.epoch


def test_a_worker_that_starts_again_in_a_live_run_fetches_no_outer_state(saved, tmp_path, monkeypatch):
    url, files = f"memory://{uuid.uuid4().hex}", MemoryFileSystem()
    files.put(str(saved), url, recursive=True)
    asked = []

    def get_file(self, path, local, **kwargs):
        asked.append(Path(path).name)
        AbstractFileSystem.get_file(self, path, local, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file, raising=False)
    config = CkptConfig(path=url, resume="auto")
    for needs_outer in (True, False):
        asked.clear()
        with contextlib.ExitStack() as stack:
            what = fetched(config, World(), 3, tmp_path, stack, needs_outer=needs_outer)
            names = {path.name for path in what.directory.rglob("*") if path.is_file()}
        of_daemon = {"outer.json", "outer.safetensors", "residuals.safetensors"}
        assert names == {Path(name).name for name in FILES} - (set() if needs_outer else of_daemon)
        assert set(asked) == names
        assert what.is_own and what.mark.position.epoch == 2


def test_damage_to_an_outer_state_that_nobody_needs_is_passed_over(saved):
    directory = saved / "model_step_8" / own_part(3)
    config = CkptConfig(path=str(saved), resume="auto")
    with damaged(directory / "outer.safetensors", lambda before: before[:-1] + b"!"):
        for needs_outer, epoch in ((True, 1), (False, 2)):
            with contextlib.ExitStack() as stack:
                what = fetched(config, World(), 3, saved / "scratch", stack, needs_outer=needs_outer)
            assert what.mark.position.epoch == epoch


@contextlib.contextmanager
def damaged(file: Path, change: Callable[[bytes], bytes | None]) -> Iterator[None]:
    before = file.read_bytes()
    after = change(before)
    if after is None:
        file.unlink()
    else:
        file.write_bytes(after)
    try:
        yield
    finally:
        file.write_bytes(before)


def check_found_named_and_skipped(saved: Path, name: str, change, caplog) -> None:
    newest = saved / "model_step_8"
    file = newest / own_part(3) / name
    with damaged(file, change), caplog.at_level(logging.WARNING):
        caplog.clear()
        skipped: list[str] = []
        assert found(saved, "auto", skipped) == 1
        # A directory without a mark is no checkpoint and is skipped without a message.
        assert str(file) in caplog.text or not file.exists()
        assert (len(skipped) == 1 and str(file) in skipped[0]) or not file.exists()
        with pytest.raises(UserError, match=name if file.exists() else "no complete checkpoint|" + name):
            found(saved, str(newest))
    assert found(saved, "auto") == found(saved, str(newest)) == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_and_its_checkpoint_skipped(saved, name, caplog):
    check_found_named_and_skipped(saved, name, lambda content: None, caplog)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found_named_and_skipped(saved, caplog, name, place, bit):
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[int(place * len(content))] ^= 1 << bit
        return bytes(changed)

    check_found_named_and_skipped(saved, name, flip, caplog)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_found_named_and_skipped(saved, caplog, name, place):
    check_found_named_and_skipped(saved, name, lambda content: content[: int(place * len(content))], caplog)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), start=st.floats(0, 1), stop=st.floats(0, 1), fill=st.binary(max_size=40))
def test_a_stretch_of_other_bytes_is_found_named_and_skipped(saved, caplog, name, start, stop, fill):
    def change(content: bytes) -> bytes:
        low, high = sorted((int(start * len(content)), int(stop * len(content))))
        changed = content[:low] + fill + content[high:]
        return changed if changed != content else content + b"\0"

    check_found_named_and_skipped(saved, name, change, caplog)


@given(raw=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_bytes_that_are_no_mark_are_refused_and_never_crash(raw):
    with pytest.raises(ValueError, match="seal"):
        Mark.from_bytes(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    field=st.sampled_from(
        [f for f in json.loads(Mark(position=Position(), tokens=(), num_ranks=1).to_bytes())]
    ),
    value=json_values,
)
def test_a_sealed_mark_with_other_content_is_read_or_refused_but_never_crashes(field, value):
    from blake3 import blake3

    content = json.loads(Mark(position=Position(), tokens=(5,), num_ranks=1).to_bytes())
    content = {**content, field: value, "seal": "0" * 64}
    text = json.dumps(content, indent=2) + "\n"
    raw = text.replace("0" * 64, blake3(text.encode()).hexdigest()).encode()
    with contextlib.suppress(ValueError):
        assert isinstance(Mark.from_bytes(raw), Mark)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../b", ""])
def test_a_mark_cannot_name_files_outside_of_its_checkpoint(name):
    record = {"num_bytes": 1, "digest": "x"}
    with pytest.raises(ValueError, match="outside"):
        Mark._of(
            {
                **json.loads(Mark(position=Position(), tokens=(), num_ranks=1).to_bytes()),
                "files": {name: record},
            }
        )


def test_a_mark_that_names_more_ranks_than_have_files_is_skipped(saved):
    """Its seal is valid: whoever writes to the store can make one."""
    directory = saved / "model_step_8" / own_part(3)

    def of_more_ranks(raw: bytes) -> bytes:
        return replace(Mark.from_bytes(raw), num_ranks=3).to_bytes()

    skipped: list[str] = []
    with damaged(directory / COMPLETE, of_more_ranks):
        assert found(saved, "auto", skipped) == 1
    assert len(skipped) == 1 and "names 3 ranks, but the files of 2" in skipped[0]


def test_a_mark_comes_back_as_it_was():
    place = Position(epoch=3, local_step=1)
    mark = Mark(position=place, tokens=(4, 5), num_ranks=2, steps_per_epoch=2, head="ab")
    assert Mark.from_bytes(mark.to_bytes()) == mark
    before = {name: value for name, value in asdict(mark).items() if name != "steps_per_epoch"}
    assert Mark._of(before).steps_per_epoch == 0


def test_what_was_refused_says_what_to_do(saved):
    file = saved / "model_step_8" / own_part(3) / "rank_1.safetensors"
    with damaged(file, lambda content: content[:-1]), pytest.raises(Damaged, match=r"resume auto"):
        found(saved, str(saved / "model_step_8"))
