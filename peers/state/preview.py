"""What an attempt would make of the outer state, computed and hashed while its sums still arrive.

Members vote on the result before anybody stores it, so the step is computed twice: here, to be hashed, and once more at
the commit. Here it waits for nothing: where a link sets the pace, processors have the time while the bytes come in, and
when the last sum is in place only the last chunks are left. Where processors set it, the reduction comes first.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from torch import Tensor

from peers.state.header import STATE_CHUNK_NUMEL, StateHeader
from peers.state.outer_optimizer import OuterOptimizer, keep_denormals
from peers.state.outer_state import OuterState
from peers.threads import num_threads, stand_back

NICENESS = 10
"""Of the threads that hash while sums arrive, above that of the others."""


class Preview:
    """A context manager that owns its threads; they only read, and afterwards none of them is left.

    The digests are BLAKE3 of the values that this peer would hold. An owner chooses what it sends, so by a hash that is
    merely fast it could give two members unlike sums that vote alike; by this one it cannot.
    """

    def __init__(self, optimizer: OuterOptimizer, state: OuterState, fragment: int, average: Tensor) -> None:
        """Of `average`, the fragment's averaged pseudo-gradient, no value counts before it is `settled`."""
        self._optimizer, self._state, self._average = optimizer, state, average
        self._chunks = state.chunks(fragment)
        self._num_missing = [chunk.numel for chunk in self._chunks]
        self._whole: deque[int] = deque()
        self._digests: dict[int, tuple[bytes, bytes]] = {}
        self._begun: list[Future[None]] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads(), "preview", _stand_back)

    def __enter__(self) -> Preview:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def settled(self, part: slice) -> None:
        """These values of the average will not change any more. Once for each, from any thread; takes no time."""
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
        """The state's header with the digests that a commit would arrive at, once all values have settled."""
        assert not any(self._num_missing), "part of the average has not settled"
        # Now somebody waits, so what is left is done by threads that stand back for nobody.
        with ThreadPoolExecutor(num_threads(), "preview", keep_denormals) as pool:
            rest = [pool.submit(self._hash_next) for _ in range(len(self._whole))]
        for hashed in (*rest, *self._begun):
            hashed.result()
        digests = [self._digests[index] for index in range(len(self._chunks))]
        return self._state.header.with_chunks(self._chunks, digests)

    def _hash_next(self) -> None:
        try:
            index = self._whole.popleft()
        except IndexError:
            # Another thread was quicker.
            return
        self._digests[index] = self._optimizer.step_chunk(
            self._state, self._chunks[index], self._average, None, hashing=True
        )


def _stand_back() -> None:
    stand_back(NICENESS)
    keep_denormals()
