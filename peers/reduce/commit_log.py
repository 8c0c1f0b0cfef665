"""The commits that a donor records while a peer downloads its state or misses a commit, for that peer to replay.

If epochs are shorter than a download of the state, the state is out of date when it arrives. A commit is far smaller:
the average as it went on the wire. So the joiner then requests the commits made since (peers/net/states/replay.py). It
catches up, because a round moves more bytes than a commit through every link; a lone peer, whose rounds move none,
waits with its next commit while the log is full (`Averaging.is_log_needed`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from peers.errors import ProtocolError
from peers.protocol.aggregation import Rule
from peers.protocol.certificates import Plan
from peers.protocol.codecs import FLOAT_BYTES
from peers.reduce.codecs import result_codec_named
from peers.reduce.kernels import Bytes
from peers.reduce.plan import CHUNK_NUMEL, Chunk
from peers.reduce.shares import Arrangement
from peers.timing import START_S

NUM_KEPT = 2
"""Commits kept while nobody downloads: for a peer that the last one has left out, and that asks for it late."""
KEPT_FOR_S = START_S
"""After the last download has ended: a joiner requests the commits once it has assembled its state."""


class Recording:
    """The averages of one attempt as they went on the wire. Several threads add chunks, each chunk once."""

    def __init__(self) -> None:
        self._payloads: dict[Chunk, Bytes] = {}

    def keep(self, chunk: Chunk, payload: Bytes) -> None:
        """The payload is copied."""
        self._payloads[chunk] = payload.copy()

    def in_order(self) -> tuple[Bytes, ...]:
        return tuple(self._payloads[chunk] for chunk in sorted(self._payloads))


@dataclass(frozen=True)
class RecordedCommit:
    """`parent` and `head`: the heads before and after the commit."""

    parent: str
    head: str
    payloads: tuple[Bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads)


class CommitLog:
    """Consecutive commits of one peer; the newest led to the state that it holds.

    Takes at most as much memory as anchor and momentum. Used from the event loop and from threads that commit.
    """

    def __init__(self) -> None:
        self._commits: list[RecordedCommit] = []
        self._lock = threading.Lock()
        self._since: list[str] = []
        """The heads from which those that download now will need commits."""
        self._last_since, self._wanted_until = "", 0.0
        """That of the last download that has ended, and how long it counts."""
        self.added_at = 0.0
        """When the newest commit was added."""
        self.sent_bytes = 0
        """Of the state and of commits, sent since then."""

    @contextmanager
    def held(self, since: str = "") -> Iterator[None]:
        """Record commits while this context is open: a peer is handed the state of this head, or commits from it on."""
        with self._lock:
            self._since.append(since)
        try:
            yield
        finally:
            with self._lock:
                self._since.remove(since)
                self._last_since, self._wanted_until = since, time.monotonic() + KEPT_FOR_S

    @property
    def is_wanted(self) -> bool:
        return bool(self._since) or time.monotonic() < self._wanted_until

    def add(self, recording: Recording | None, *, parent: str, head: str, state_numel: int) -> None:
        """A commit was made. `recording` None: it was not recorded, so earlier ones are useless and dropped."""
        with self._lock:
            self.added_at, self.sent_bytes = time.monotonic(), 0
            if recording is None or (self._commits and self._commits[-1].head != parent):
                self._commits.clear()
            if recording is None:
                return
            self._commits.append(RecordedCommit(parent, head, recording.in_order()))
            if not self.is_wanted:
                del self._commits[:-NUM_KEPT]
            while self._num_bytes() > 2 * FLOAT_BYTES * state_numel:
                del self._commits[0]

    def would_drop_needed(self, state_numel: int) -> bool:
        """Whether one more commit as large as the newest would push out the oldest, and that is the next that somebody
        needs. If one that it needs is gone already, the others are of no use to it."""
        with self._lock:
            if not self._commits:
                return False
            needed = {*self._since, *([self._last_since] if time.monotonic() < self._wanted_until else [])}
            is_full = self._num_bytes() + self._commits[-1].num_bytes > 2 * FLOAT_BYTES * state_numel
            return is_full and self._commits[0].parent in needed

    def clear(self) -> None:
        """The state was replaced by another one: drop all commits."""
        with self._lock:
            self._commits.clear()

    def between(self, since: str, until: str) -> list[RecordedCommit]:
        """The commits that lead from one head to the other; empty if one of them is missing."""
        with self._lock:
            commits = list(self._commits)
        first = next((i for i, commit in enumerate(commits) if commit.parent == since), None)
        last = next((i for i, commit in enumerate(commits) if commit.head == until), None)
        return [] if first is None or last is None else commits[first : last + 1]

    def _num_bytes(self) -> int:
        return sum(commit.num_bytes for commit in self._commits)


def parts_of(plan: Plan, numel: int, codec: str, rule: Rule) -> Iterator[tuple[slice, int]]:
    """For each chunk of a commit's average: its place in the fragment of `numel` values, and its payload size."""
    result_codec = result_codec_named(codec)
    for start, stop in pairwise(Arrangement.of(plan, numel, rule).bounds):
        for first in range(start, stop, CHUNK_NUMEL):
            part = slice(first, min(first + CHUNK_NUMEL, stop))
            yield part, result_codec.encoded_bytes(part.stop - part.start)


def decoded(codec: str, part: slice, payload: Bytes, average: np.ndarray[Any, Any]) -> None:
    """Decode one chunk to its place. Raises ProtocolError if no encoder wrote it, or values are not finite."""
    values = result_codec_named(codec).decode(payload, average[part])
    if not np.isfinite(values).all():
        raise ProtocolError("a commit with values that are not finite")
    if values.base is not average:
        average[part] = values
