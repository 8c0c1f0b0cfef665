"""The outer state of a run: the anchor that all peers agreed on, the outer momentum, and the certificate of both."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from peers.protocol.certificates import Certificate
from peers.state.header import StateChunk, StateHeader, chunks_of
from peers.threads import num_threads


class OuterState:
    """Flat fp32 tensors per fragment, and the header that describes them. They advance together, in
    `OuterOptimizer.commit` only. One thread commits; others may take snapshots meanwhile.
    """

    def __init__(self, header: StateHeader, anchor: Sequence[Tensor], momentum: Sequence[Tensor]) -> None:
        self.header = header
        self.anchor = list(anchor)
        self.momentum = list(momentum)
        self._lock = threading.Lock()
        self._is_changing = False
        self._snapshots: list[Snapshot] = []

    @classmethod
    def initial(cls, anchor: Sequence[Tensor]) -> OuterState:
        """The state of a run that has not begun: these weights, which it takes ownership of, and zero momentum."""
        sizes = tuple(values.numel() for values in anchor)
        zeros = digests_of_zeros(sizes)
        header = StateHeader(
            sizes=sizes,
            anchor_chunks=_hash_all(anchor, sizes),
            momentum_chunks=b"".join(zeros[chunk.numel] for chunk in chunks_of(sizes)),
        )
        return cls(header, anchor, [untouched_zeros(size) for size in sizes])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.header.sizes

    @property
    def epoch(self) -> int:
        return self.header.epoch

    @property
    def head(self) -> str:
        return self.header.head

    @property
    def anchor_digest(self) -> str:
        return self.header.anchor_digest

    def chunks(self, fragment: int) -> list[StateChunk]:
        """The hashed chunks of one fragment, in order."""
        return [chunk for chunk in chunks_of(self.sizes) if chunk.fragment == fragment]

    def certify(self, certificate: Certificate) -> None:
        """Attach the certificate of the commit that led to this state. Raises ProtocolError if the digests differ."""
        with self._lock:
            self.header = self.header.certified_by(certificate)

    def is_intact(self) -> bool:
        """Whether the values have the digests that the header names."""
        found = [
            hashlib.sha256(_hash_all(values, self.sizes)).hexdigest()
            for values in (self.anchor, self.momentum)
        ]
        return found == [self.header.anchor_digest, self.header.momentum_digest]

    def snapshot(self) -> Snapshot | None:
        """This state, unchanged for as long as the snapshot is open: later commits write to other memory.

        None while a commit is being written; try again soon.
        """
        with self._lock:
            if self._is_changing:
                return None
            snapshot = Snapshot(self)
            self._snapshots.append(snapshot)
            return snapshot

    def release(self, snapshot: Snapshot) -> None:
        with self._lock:
            if snapshot in self._snapshots:
                self._snapshots.remove(snapshot)

    def refuse_snapshots(self) -> None:
        """Until `end_change`: the residuals that belong to the state after the commit are about to be stored."""
        with self._lock:
            self._is_changing = True

    def is_still(self, snapshot: Snapshot) -> bool:
        """Whether no commit has been made or begun since this snapshot."""
        with self._lock:
            return not self._is_changing and self.header.head == snapshot.header.head

    def begin_change(self, fragment: int) -> tuple[Tensor, Tensor]:
        """The tensors to write a fragment's new anchor and momentum to: the old ones or, if a snapshot holds them, new
        memory.

        A change that fails is never ended. Then no snapshot is possible any more, so that a half-applied state is
        neither served nor saved.
        """
        with self._lock:
            self._is_changing = True
            held = any(
                s.anchor[fragment] is self.anchor[fragment] or s.momentum[fragment] is self.momentum[fragment]
                for s in self._snapshots
            )
        if held:
            return torch.empty_like(self.anchor[fragment]), torch.empty_like(self.momentum[fragment])
        return self.anchor[fragment], self.momentum[fragment]

    def end_change(self, header: StateHeader, fragment: int, anchor: Tensor, momentum: Tensor) -> None:
        with self._lock:
            self.header = header
            self.anchor[fragment], self.momentum[fragment] = anchor, momentum
            self._is_changing = False


class Snapshot:
    """An outer state that no commit changes. A context manager: leaving it releases the memory."""

    def __init__(self, state: OuterState) -> None:
        self._state = state
        self.header = state.header
        self.anchor = tuple(state.anchor)
        self.momentum = tuple(state.momentum)

    def close(self) -> None:
        """May be repeated."""
        self._state.release(self)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hash_chunk(values: Tensor) -> bytes:
    """BLAKE3 of a chunk's values, little-endian."""
    return blake3(values.numpy().view(np.uint8).data).digest()


def untouched_zeros(numel: int) -> Tensor:
    """Zeros whose memory is not touched until values are written: torch.zeros takes seconds for a gigabyte."""
    # Of an empty array torch makes a tensor of stride 0, which cannot be viewed as bytes.
    return torch.from_numpy(np.zeros(max(numel, 1), np.float32))[:numel]


def digests_of_zeros(sizes: Sequence[int]) -> dict[int, bytes]:
    """The digests of chunks of zeros, by number of values. Takes long, so belongs in a thread."""
    return {numel: hash_chunk(torch.zeros(numel)) for numel in {chunk.numel for chunk in chunks_of(sizes)}}


def _hash_all(fragments: Sequence[Tensor], sizes: Sequence[int]) -> bytes:
    with ThreadPoolExecutor(num_threads(), "outer") as pool:
        return b"".join(
            pool.map(lambda c: hash_chunk(fragments[c.fragment][c.start : c.stop]), chunks_of(sizes))
        )
