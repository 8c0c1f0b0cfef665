"""What a donor keeps of the commits that come while somebody downloads its state, for that one to make them too.

A download of the whole state takes as long as the link says; where epochs are shorter the state would be old when it
has come, and the next one again. A commit is far less: the average as it went on the wire. So the joiner asks for the
commits since (peers/state/replay.py), and comes closer each time, as a round moves more bytes through any link than
that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from peers.codecs import result_codec_named
from peers.errors import ProtocolError
from peers.reduction.kernels import Bytes
from peers.reduction.plan import CHUNK_NUMEL, ReducePlan
from peers.round.messages import MAX_MEMBERS

KEPT_FOR_S = 30.0
"""After the last download: a joiner comes back for the commits when it has put its state together."""
_MAX_COUNT = 1 << 62
_FLOAT_BYTES = 4


class Recording:
    """The averages of one attempt as they went on the wire. Chunks come from several threads, each of them once."""

    def __init__(self) -> None:
        self._payloads: dict[tuple[int, int], Bytes] = {}

    def keep(self, owner: int, index: int, payload: Bytes) -> None:
        """`owner` is an index in the group; the payload is copied."""
        self._payloads[owner, index] = payload.copy()

    def in_order(self) -> tuple[Bytes, ...]:
        return tuple(self._payloads[key] for key in sorted(self._payloads))


@dataclass(frozen=True)
class CommitHeader:
    """All that a commit does but for its values; it leads from one lineage to another."""

    parent: str
    lineage: str
    fragment: int
    tokens: int
    data_width: int
    num_members: int
    codec: str
    """Of the average."""
    bounds: tuple[int, ...]
    """Each owner's share lies from bound to bound."""

    def to_message(self) -> dict[str, Any]:
        return {**vars(self), "bounds": list(self.bounds)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any], sizes: Sequence[int]) -> Self:
        """Of a state whose fragments have these sizes. Raises ProtocolError."""
        try:
            header = cls(
                parent=_text(message["parent"]),
                lineage=_text(message["lineage"]),
                fragment=_count(message["fragment"], len(sizes) - 1),
                tokens=_count(message["tokens"]),
                data_width=_count(message["data_width"]),
                num_members=_count(message["num_members"], MAX_MEMBERS),
                codec=_text(message["codec"]),
                bounds=tuple(_count(bound) for bound in message["bounds"]),
            )
            result_codec_named(header.codec)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not the header of a commit: {error!r:.200}") from error
        bounds = header.bounds
        if not 1 < len(bounds) <= MAX_MEMBERS + 1 or bounds[0] or list(bounds) != sorted(bounds):
            raise ProtocolError(f"not the bounds of shares: {bounds!s:.80}")
        if bounds[-1] != sizes[header.fragment] or header.num_members < 1:
            raise ProtocolError("a commit of another fragment, or of nobody")
        return header

    def parts(self) -> Iterator[tuple[slice, int]]:
        """Where each chunk lies in the fragment, and the bytes of its payload."""
        codec = result_codec_named(self.codec)
        for start, stop in pairwise(self.bounds):
            for first in range(start, stop, CHUNK_NUMEL):
                part = slice(first, min(first + CHUNK_NUMEL, stop))
                yield part, codec.encoded_bytes(part.stop - part.start)


@dataclass(frozen=True)
class RecordedCommit:
    header: CommitHeader
    payloads: tuple[Bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads)


class CommitLog:
    """Of one peer: consecutive commits, the newest led to the state it holds.

    It takes as much memory as anchor and momentum at most. Used from the event loop and from threads that commit.
    """

    def __init__(self) -> None:
        self._commits: list[RecordedCommit] = []
        self._lock = threading.Lock()
        self._num_downloads = 0
        self._wanted_until = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Somebody downloads."""
        with self._lock:
            self._num_downloads += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_downloads -= 1
                self._wanted_until = time.monotonic() + KEPT_FOR_S

    @property
    def is_wanted(self) -> bool:
        return self._num_downloads > 0 or time.monotonic() < self._wanted_until

    def add(self, recording: Recording | None, header: CommitHeader, state_numel: int) -> None:
        """A commit is done. None: nothing was recorded of it, and what came before leads nowhere."""
        with self._lock:
            if recording is None or (self._commits and self._commits[-1].header.lineage != header.parent):
                self._commits.clear()
            if recording is None:
                return
            self._commits.append(RecordedCommit(header, recording.in_order()))
            while sum(commit.num_bytes for commit in self._commits) > 2 * _FLOAT_BYTES * state_numel:
                del self._commits[0]

    def clear(self) -> None:
        """The state comes from elsewhere."""
        with self._lock:
            self._commits.clear()

    def between(self, since: str, until: str) -> list[RecordedCommit]:
        """Those that lead from one lineage to the other; empty where they are not here."""
        with self._lock:
            commits = list(self._commits)
        first = next((i for i, commit in enumerate(commits) if commit.header.parent == since), None)
        last = next((i for i, commit in enumerate(commits) if commit.header.lineage == until), None)
        return [] if first is None or last is None else commits[first : last + 1]


def header_of(
    plan: ReducePlan, *, parent: str, lineage: str, fragment: int, tokens: int, data_width: int
) -> CommitHeader:
    """Of a commit whose average was made under this plan."""
    return CommitHeader(
        parent=parent,
        lineage=lineage,
        fragment=fragment,
        tokens=tokens,
        data_width=data_width,
        num_members=len(plan.members),
        codec=plan.codec,
        bounds=plan.bounds,
    )


def decoded(header: CommitHeader, part: slice, payload: Bytes, average: np.ndarray[Any, Any]) -> None:
    """One chunk, to its place. Raises ProtocolError for what no encoder wrote or is not finite."""
    values = result_codec_named(header.codec).decode(payload, average[part])
    if not np.isfinite(values).all():
        raise ProtocolError("a commit with values that are not finite")
    if values.base is not average:
        average[part] = values


def _count(value: Any, most: int = _MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"not a count: {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > 64:
        raise ValueError(f"not a short text: {value!r:.80}")
    return value
