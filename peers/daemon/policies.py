"""Which files a learner hands to a rollout peer, so that it gets the newest weights by the fewest bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.protocol.rollouts import MAX_BLOBS, BlobName, Policy


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """A file that the trainer has written: all weights, or what has changed since others."""

    path: Path
    name: BlobName
    leads_to: str
    """Digest of the weights that are there after it."""
    base: str = ""
    """Digest of the weights that it changes; empty: it holds all of them."""


class Policies:
    """Of one trainer, which says with each new version which files there are."""

    def __init__(self) -> None:
        self._files: dict[str, WeightsFile] = {}
        self._newest: tuple[str, int] | None = None

    def published(self, digest: str, step: int, files: Iterable[WeightsFile]) -> None:
        self._files = {file.name.digest: file for file in files}
        self._newest = digest, step

    def newest(self, held: str) -> Policy | None:
        """The newest weights, and the files that lead to them from those that are held; None before the first."""
        if self._newest is None:
            return None
        digest, step = self._newest
        files = way_to(digest, held, tuple(self._files.values()))
        return None if files is None else Policy(digest=digest, step=step, blobs=tuple(f.name for f in files))

    def file(self, digest: str) -> WeightsFile | None:
        return self._files.get(digest)


def way_to(newest: str, held: str, files: Sequence[WeightsFile]) -> list[WeightsFile] | None:
    """The files to apply one after the other, of the fewest bytes together; None if nothing leads there."""
    wholes = {file.leads_to: file for file in files if not file.base}
    patches = {file.leads_to: file for file in files if file.base}
    ways: list[list[WeightsFile]] = []
    at, way = newest, list[WeightsFile]()
    while len(way) < MAX_BLOBS:
        if at == held:
            ways.append(way)
            break
        if at in wholes:
            ways.append([wholes[at], *way])
        if at not in patches:
            break
        way = [patches[at], *way]
        at = patches[at].base
    return min(ways, key=lambda way: sum(file.name.num_bytes for file in way), default=None)
