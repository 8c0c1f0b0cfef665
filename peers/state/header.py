"""What identifies an outer state: its figures, the digests of its chunks, and the lineage that follows from both.

Chunks are hashed one by one, and the digests of the chunks again: so hashing runs on several cores, one who knows only
the lineage can check a header, and one who holds the header can check every single chunk, whoever it comes from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from peers.errors import ProtocolError

HEADER_FILE = "outer.json"
"""Where a state that is kept on a disk has its header."""
STATE_CHUNK_NUMEL = 1 << 20
"""Values per hashed chunk: 4 MiB."""
DIGEST_BYTES = 32
MAX_ANCESTORS = 64
"""Of a split that is longer ago nobody knows where it was."""
_MAX_COUNT = 1 << 61
"""Half of what an announcement may say: a state that somebody hands over leaves the counters room to grow."""


@dataclass(frozen=True)
class StateChunk:
    """Values [start, stop) of one fragment; `position` counts the chunks of all fragments."""

    position: int
    fragment: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def chunks_of(sizes: Sequence[int]) -> Iterator[StateChunk]:
    """All chunks of the fragments, in order. An empty fragment has none."""
    position = 0
    for fragment, size in enumerate(sizes):
        for start in range(0, size, STATE_CHUNK_NUMEL):
            yield StateChunk(position, fragment, start, min(start + STATE_CHUNK_NUMEL, size))
            position += 1


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """Everything about an outer state but its values. Immutable: a commit makes a new one."""

    sizes: tuple[int, ...]
    """Values in each fragment."""
    epoch: int
    parent: str
    """Lineage before the last commit; empty at epoch 0."""
    committed_tokens: int
    data_base: int
    """First data block of this epoch."""
    data_width: int
    """Data blocks the epoch before has handed out."""
    anchor_chunks: bytes
    """BLAKE3 of each anchor chunk, concatenated: as hard to forge as sha256, at four times its speed."""
    momentum_chunks: bytes
    ancestors: tuple[str, ...] = ()
    """Lineages before the parent's, newest first: they tell a fork from a state that trails. Not of old checkpoints."""

    @cached_property
    def anchor_digest(self) -> str:
        return hashlib.sha256(self.anchor_chunks).hexdigest()

    @cached_property
    def momentum_digest(self) -> str:
        return hashlib.sha256(self.momentum_chunks).hexdigest()

    @cached_property
    def lineage(self) -> str:
        """Hex sha256 over the parent's lineage and everything that the commit has set."""
        text = (
            f"diloco outer state {self.sizes} {self.epoch} {self.parent} {self.anchor_digest} {self.momentum_digest} "
            f"{self.committed_tokens} {self.data_base} {self.data_width}"
        )
        if self.ancestors:
            # A chain of digests anyhow; but who hands a state over is not to make these up.
            text += f" {' '.join(self.ancestors)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def path_since_split(self, other: StateHeader) -> tuple[str, ...]:
        """The lineages from the last that both have come by up to this one's own, oldest first.

        Empty where one has only gone on from the other, or the split is too long ago to be known.
        """
        mine = self.lineage, self.parent, *self.ancestors
        theirs = {other.lineage, other.parent, *other.ancestors} - {""}
        num_own = next((index for index, lineage in enumerate(mine) if lineage in theirs), 0)
        return mine[num_own::-1] if num_own and mine[num_own] != other.lineage else ()

    def has_unknown_split_from(self, other: StateHeader) -> bool:
        """Neither goes back to the other, and where both come from is too long ago. Of what nobody has trained: no."""
        theirs = {other.lineage, other.parent, *other.ancestors} - {""}
        is_near = abs(self.epoch - other.epoch) <= MAX_ANCESTORS
        return self.epoch > 0 and is_near and theirs.isdisjoint((self.lineage, self.parent, *self.ancestors))

    def with_chunks(
        self, chunks: Sequence[StateChunk], digests: Sequence[tuple[bytes, bytes]]
    ) -> StateHeader:
        """The same with other digests, of anchor and momentum, of these chunks, which follow one another."""
        return replace(
            self,
            anchor_chunks=_spliced(self.anchor_chunks, chunks, [anchor for anchor, _ in digests]),
            momentum_chunks=_spliced(self.momentum_chunks, chunks, [momentum for _, momentum in digests]),
        )

    def to_message(self) -> dict[str, Any]:
        """A map that msgpack takes."""
        return {
            "sizes": list(self.sizes),
            "epoch": self.epoch,
            "parent": self.parent,
            "committed_tokens": self.committed_tokens,
            "data_base": self.data_base,
            "data_width": self.data_width,
            "anchor_chunks": self.anchor_chunks,
            "momentum_chunks": self.momentum_chunks,
            "ancestors": list(self.ancestors),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any], sizes: Sequence[int] | None = None) -> StateHeader:
        """Raises ProtocolError unless it is a header of a state of these sizes (None: of any)."""
        try:
            header = cls(
                sizes=tuple(_count(size) for size in message["sizes"]),
                epoch=_count(message["epoch"]),
                parent=_lineage_or_empty(message["parent"]),
                committed_tokens=_count(message["committed_tokens"]),
                data_base=_count(message["data_base"]),
                data_width=_count(message["data_width"]),
                anchor_chunks=_digests(message["anchor_chunks"]),
                momentum_chunks=_digests(message["momentum_chunks"]),
                # Checkpoints of old have none.
                ancestors=tuple(_lineage_or_empty(lineage) for lineage in message.get("ancestors", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not the header of a state: {error!r:.200}") from error
        if len(header.ancestors) > MAX_ANCESTORS:
            raise ProtocolError(f"a state with {len(header.ancestors)} ancestors")
        if sizes is not None and header.sizes != tuple(sizes):
            raise ProtocolError(
                f"a state of other fragments: {header.sizes!s:.100}, not {tuple(sizes)!s:.100}"
            )
        num_bytes = DIGEST_BYTES * sum(-(-size // STATE_CHUNK_NUMEL) for size in header.sizes)
        if not len(header.anchor_chunks) == len(header.momentum_chunks) == num_bytes:
            raise ProtocolError(f"a state of sizes {header.sizes!s:.100} has {num_bytes} bytes of digests")
        return header


def _spliced(digests: bytes, chunks: Sequence[StateChunk], replacements: Sequence[bytes]) -> bytes:
    if not chunks:
        return digests
    start = chunks[0].position * DIGEST_BYTES
    new = b"".join(replacements)
    return digests[:start] + new + digests[start + len(new) :]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"not a count: {value!r:.40}")
    return value


def _digests(value: Any) -> bytes:
    # bytes() of a number would be as many zeros as a stranger asks for.
    if not isinstance(value, bytes | bytearray):
        raise ValueError(f"not digests: {value!r:.40}")
    return bytes(value)


def _lineage_or_empty(value: Any) -> str:
    if not isinstance(value, str) or (
        value and (len(value) != 64 or not set(value) <= set("0123456789abcdef"))
    ):
        raise ValueError(f"not a lineage: {value!r:.80}")
    return value
