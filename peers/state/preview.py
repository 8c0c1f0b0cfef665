"""The digests of the state that an attempt would lead to, computed while the sums of its reduction still arrive.

Members vote on these digests before anybody stores the result, so the outer step is computed twice: here, to be hashed,
and again at the commit. Each chunk is hashed as soon as its sums are final. If links limit the reduction, processors
are idle meanwhile, and only the last chunks remain when the last sum arrives. If processors limit it, the reduction
goes first: these threads have a lower priority.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from torch import Tensor

from peers.state.header import STATE_CHUNK_NUMEL, StateHeader
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState
from peers.threads import exact_threads

NICENESS = 10
"""Niceness of the threads that hash while sums arrive, relative to that of the others."""


class Preview:
    """A context manager that owns its threads. They only read the state; none is left afterwards.

    The digests are BLAKE3 of the values that this peer would hold. The hash must resist collisions: otherwise the owner
    of a share could send two members different sums for which both would vote alike.
    """

    def __init__(self, optimizer: OuterOptimizer, state: OuterState, fragment: int, average: Tensor) -> None:
        """`average`: the fragment's averaged pseudo-gradient. Its values are read only after `settled` was called."""
        self._optimizer, self._state, self._average = optimizer, state, average
        self._chunks = state.chunks(fragment)
        self._num_missing = [chunk.numel for chunk in self._chunks]
        self._whole: deque[int] = deque()
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        self._begun: list[Future[None]] = []
        self._lock = threading.Lock()
        self._pool = exact_threads("preview", NICENESS)

    def __enter__(self) -> Preview:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def settled(self, part: slice) -> None:
        """These values of the average are final. Call once for each value, from any thread; returns at once."""
        if part.start == part.stop:
            return
        for index in range(part.start // STATE_CHUNK_NUMEL, -(-part.stop // STATE_CHUNK_NUMEL)):
            chunk = self._chunks[index]
            num_settled = min(part.stop, chunk.stop) - max(part.start, chunk.start)
            with self._lock:
                self._num_missing[index] -= num_settled
                is_whole = not self._num_missing[index]
            if is_whole:
                self._whole.append(index)
                self._begun.append(self._pool.submit(self._hash_next))

    def header(self) -> StateHeader:
        """The header of the state that a commit would lead to. All values must have settled."""
        assert not any(self._num_missing), "part of the average has not settled"
        # The vote waits for the rest, so it is hashed at normal priority.
        with exact_threads("preview") as pool:
            rest = [pool.submit(self._hash_next) for _ in range(len(self._whole))]
        for hashed in (*rest, *self._begun):
            hashed.result()
        digests = [self._digests[index] for index in range(len(self._chunks))]
        return self._state.header.with_chunks(self._chunks, digests)

    def _hash_next(self) -> None:
        try:
            index = self._whole.popleft()
        except IndexError:
            # Another thread has taken the chunk.
            return
        self._digests[index] = self._optimizer.step_chunk(
            self._state, self._chunks[index], self._average, None, hashing=True
        )
