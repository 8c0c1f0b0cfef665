"""The commits that a donor records while somebody downloads its state, for the joiner to repeat.

Where epochs are shorter than a download of the state, each state would be old by the time it has arrived. A commit is
far smaller: the average as it went on the wire. So the joiner then asks for the commits since
(peers/net/states/replay.py), and catches up, since a round moves more bytes than that through every link.
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
from peers.protocol.certificates import Plan
from peers.reduce.codecs import result_codec_named
from peers.reduce.kernels import Bytes
from peers.reduce.plan import CHUNK_NUMEL
from peers.reduce.shares import bounds_of
from peers.timing import START_S

KEPT_FOR_S = START_S
"""After the last download: a joiner comes back for the commits when it has put its state together."""
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
class RecordedCommit:
    """`parent` and `head`: the hashes of the certificates before and after it."""

    parent: str
    head: str
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

    def add(self, recording: Recording | None, *, parent: str, head: str, state_numel: int) -> None:
        """A commit is done. None: nothing was recorded of it, and what came before leads nowhere."""
        with self._lock:
            if recording is None or (self._commits and self._commits[-1].head != parent):
                self._commits.clear()
            if recording is None:
                return
            self._commits.append(RecordedCommit(parent, head, recording.in_order()))
            while sum(commit.num_bytes for commit in self._commits) > 2 * _FLOAT_BYTES * state_numel:
                del self._commits[0]

    def clear(self) -> None:
        """The state comes from elsewhere."""
        with self._lock:
            self._commits.clear()

    def between(self, since: str, until: str) -> list[RecordedCommit]:
        """Those that lead from one head to the other; empty where they are not here."""
        with self._lock:
            commits = list(self._commits)
        first = next((i for i, commit in enumerate(commits) if commit.parent == since), None)
        last = next((i for i, commit in enumerate(commits) if commit.head == until), None)
        return [] if first is None or last is None else commits[first : last + 1]


def parts_of(plan: Plan, numel: int, codec: str) -> Iterator[tuple[slice, int]]:
    """Where each chunk of a commit's average lies in its fragment of so many values, and the bytes of its payload."""
    result_codec = result_codec_named(codec)
    for start, stop in pairwise(bounds_of([c.work.bandwidth for c in plan.contributors], numel)):
        for first in range(start, stop, CHUNK_NUMEL):
            part = slice(first, min(first + CHUNK_NUMEL, stop))
            yield part, result_codec.encoded_bytes(part.stop - part.start)


def decoded(codec: str, part: slice, payload: Bytes, average: np.ndarray[Any, Any]) -> None:
    """One chunk, to its place. Raises ProtocolError for what no encoder wrote or is not finite."""
    values = result_codec_named(codec).decode(payload, average[part])
    if not np.isfinite(values).all():
        raise ProtocolError("a commit with values that are not finite")
    if values.base is not average:
        average[part] = values
