"""Digests of a checkpoint's files, which all ranks of a peer compute together: each file is read by one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from diloco.checkpoint.mark import COMPLETE, Damaged, Mark, names_below, problems_of, read_mark
from diloco.checkpoint.shards import rank_of
from diloco.outer.world import World, on_every_rank, on_rank_zero
from peers.state.header import HEADER_FILE, RESIDUALS_FILE, TENSORS_FILE
from peers.state.whole_files import FileRecord, flush_to_disk, record_of

_OUTER_FILES = frozenset({HEADER_FILE, TENSORS_FILE, RESIDUALS_FILE})


def checked_mark(directory: Path, world: World, *, needs_outer: bool = True) -> Mark:
    """The mark of a checkpoint, after verifying its files, those of the outer state with `needs_outer` only.

    A collective. Raises Damaged, which names a file at fault.
    """
    mark = on_rank_zero(partial(read_mark, directory))
    if not needs_outer:
        mark = without_outer(mark)
    if problems := problems_by_ranks(directory, mark, world):
        raise Damaged(f"{problems[0]}; resume from another checkpoint")
    return mark


def problems_by_ranks(directory: Path, mark: Mark, world: World) -> list[str]:
    """One sentence for each of the mark's files that is missing, truncated or altered. A collective."""
    shares = on_every_rank(partial(_problems, directory, mark, world))
    return [problem for share in shares for problem in share]


def without_outer(mark: Mark) -> Mark:
    """The mark without the files that the daemon has written."""
    return replace(mark, files={name: mark.files[name] for name in mark.files if name not in _OUTER_FILES})


def are_ours(names: Iterable[str]) -> bool:
    """Whether among these files is one that only diloco writes."""
    return any(name in _OUTER_FILES or rank_of(name) is not None for name in names)


def records_by_ranks(directory: Path, world: World) -> dict[str, FileRecord]:
    """Size and digest of every file of a checkpoint that has no mark yet, on disk by then. A collective.

    Without the daemon's files, which it may still be writing. Raises OSError.
    """

    def mine() -> dict[str, FileRecord]:
        return flushed_records(directory, share_of(names_below(directory) - _OUTER_FILES, world))

    records: dict[str, FileRecord] = {}
    for share in on_every_rank(mine):
        records |= share
    return records


def flushed_records(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Size and digest of these files, which are on disk by then. Raises OSError."""
    records = {}
    for name in sorted(names):
        flush_to_disk(directory / name)
        records[name] = record_of(directory / name)
    return records


def share_of(names: Iterable[str], world: World) -> list[str]:
    """Those of the files that this rank is to read.

    Files that no rank wrote are divided among the ranks of the first node, where the daemon reads them.
    """
    numbers = {name: rank_of(name) for name in names}
    others = sorted(name for name, number in numbers.items() if number is None)
    mine = others[world.rank :: world.num_local_ranks] if world.node == 0 else []
    for name, number in numbers.items():
        if number is not None and number % world.num_ranks == world.rank:
            mine.append(name)
    return mine


def _problems(directory: Path, mark: Mark, world: World) -> list[str]:
    num_files = sum(rank_of(name) is not None for name in mark.files)
    # Files of transformers' Trainer have other names.
    if num_files and mark.num_ranks != num_files:
        return [f"{directory / COMPLETE} names {mark.num_ranks} ranks, but the files of {num_files}"]
    return problems_of(directory, {name: mark.files[name] for name in share_of(mark.files, world)})
