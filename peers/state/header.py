"""What identifies an outer state: the certificate of the commit that led to it, and the digests of its chunks.

A hash tree of two levels: each chunk is hashed, and the digests are hashed again. So several cores can hash at once, a
peer that knows only the certificate can verify a header, and with the header it can verify every single chunk,
whichever donor sent it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from peers.errors import ProtocolError
from peers.protocol.certificates import Certificate

HEADER_FILE, TENSORS_FILE, RESIDUALS_FILE = "outer.json", "outer.safetensors", "residuals.safetensors"
"""The files of a saved state: its header, anchor and momentum, and the error feedback of a lossy codec."""
STATE_CHUNK_NUMEL = 1 << 20
"""Values per hashed chunk: 4 MiB."""
DIGEST_BYTES = 32


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
    """Everything about an outer state except its values. Immutable: a commit makes a new one."""

    sizes: tuple[int, ...]
    """Values in each fragment."""
    anchor_chunks: bytes
    """BLAKE3 of each anchor chunk, concatenated: as hard to forge as sha256, at four times its speed."""
    momentum_chunks: bytes
    certificate: Certificate | None = None
    """Of the commit that led here; None: the initial weights of a run that has not begun."""

    @cached_property
    def anchor_digest(self) -> str:
        return hashlib.sha256(self.anchor_chunks).hexdigest()

    @cached_property
    def momentum_digest(self) -> str:
        return hashlib.sha256(self.momentum_chunks).hexdigest()

    @property
    def head(self) -> str:
        """Hash of the certificate; empty before there is one."""
        return self.certificate.head if self.certificate else ""

    @property
    def epoch(self) -> int:
        return self.certificate.plan.epoch if self.certificate else 0

    @property
    def committed_tokens(self) -> int:
        return self.certificate.plan.tokens if self.certificate else 0

    def certified_by(self, certificate: Certificate) -> StateHeader:
        """This header with the certificate of the commit that led to it. Raises ProtocolError if the digests differ."""
        body = certificate.body
        if (body.anchor, body.momentum) != (self.anchor_digest, self.momentum_digest):
            raise ProtocolError(f"a state that is not the one of the commit {certificate.head[:12]}")
        return replace(self, certificate=certificate)

    def with_chunks(
        self, chunks: Sequence[StateChunk], digests: Sequence[tuple[bytes, bytes]]
    ) -> StateHeader:
        """This header with new digests (anchor, momentum) of these consecutive chunks."""
        return replace(
            self,
            anchor_chunks=_spliced(self.anchor_chunks, chunks, [anchor for anchor, _ in digests]),
            momentum_chunks=_spliced(self.momentum_chunks, chunks, [momentum for _, momentum in digests]),
        )


def _spliced(digests: bytes, chunks: Sequence[StateChunk], replacements: Sequence[bytes]) -> bytes:
    if not chunks:
        return digests
    start = chunks[0].position * DIGEST_BYTES
    new = b"".join(replacements)
    return digests[:start] + new + digests[start + len(new) :]
