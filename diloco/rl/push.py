"""A trainer's newest weights, and the files by which rollout peers get them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.rl.weights import Label, State, digest_of, own_copies, packed, packed_smaller


class Publisher:
    """One trainer's newest weights, and those that it handed out last, in the dtype that generators compute in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.state: State = {}
        self.digest = ""
        self._dtype = dtype
        self._handed_out: State = {}
        self._digest_handed_out = ""

    @property
    def whole_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def take(self, parameters: Iterable[tuple[str, Tensor]], *, may_change: bool = True) -> None:
        """Copy the weights to the CPU in that dtype; see `own_copies`."""
        state = own_copies(parameters, self._dtype, may_change=may_change)
        digest = digest_of(state)
        if digest != self.digest:
            self.state, self.digest = state, digest

    def blob_for(self, held: str) -> tuple[Label, bytes]:
        """The blob for who holds the weights of this digest: a patch if they were handed out last, else all weights.

        The newest weights then count as handed out.
        """
        before, is_known = self._handed_out, bool(held) and held == self._digest_handed_out
        self._handed_out, self._digest_handed_out = self.state, self.digest
        if is_known:
            return packed_smaller(before, self.state, Label(digest=self.digest, base=held))
        label = Label(digest=self.digest)
        return label, packed(self.state, label)


MAX_PATCHES = 16
"""Most patches between two files of all weights; fewer if together they are longer than such a file."""


class PolicyFiles:
    """A learner's newest policies as files, which its daemon hands to rollout peers. Owns its directory.

    A new rollout peer takes the last file of all weights and the patches after it; one that has the previous policy
    takes one patch. Older files are deleted.
    """

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        self._files: list[dict[str, Any]] = []
        """With the fields of peers.daemon.rollout_service.WeightsFile."""
        self._digest = ""

    def write(self, publisher: Publisher) -> list[dict[str, Any]]:
        """Write the publisher's newest weights, unless that was done. Returns all files, the oldest first."""
        if publisher.digest == self._digest:
            return list(self._files)
        label, blob = publisher.blob_for(self._digest)
        self._files.append(self._written(label, blob))
        if label.base and self._needs_whole(publisher.whole_bytes):
            self._files.append(self._written(*publisher.blob_for("")))
        self._digest = label.digest
        self._forget()
        return list(self._files)

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _written(self, label: Label, blob: bytes) -> dict[str, Any]:
        sha256 = hashlib.sha256(blob).hexdigest()
        path = self._directory / f"{sha256}.safetensors"
        partial = path.with_suffix(".partial")
        partial.write_bytes(blob)
        partial.replace(path)
        return {
            "path": str(path),
            "sha256": sha256,
            "num_bytes": len(blob),
            "leads_to": label.digest,
            "base": label.base,
        }

    def _needs_whole(self, whole_bytes: int) -> bool:
        last = max(index for index, file in enumerate(self._files) if not file["base"])
        patches = self._files[last + 1 :]
        return len(patches) > MAX_PATCHES or sum(file["num_bytes"] for file in patches) > whole_bytes

    def _forget(self) -> None:
        """Delete all before the last file but one of all weights."""
        wholes = [index for index, file in enumerate(self._files) if not file["base"]]
        first = wholes[-2] if len(wholes) > 1 else 0
        kept = self._files[first:]
        still = {file["path"] for file in kept}
        for file in self._files[:first]:
            if file["path"] not in still:
                Path(file["path"]).unlink(missing_ok=True)
        self._files = kept
