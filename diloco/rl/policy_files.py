"""A learner's newest policies as files, which its daemon hands to rollout peers: all weights now and then, and patches.

A newcomer takes all weights and the patches since; who has the weights before takes one patch. Older files go.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.rl.push import Publisher

MAX_PATCHES = 16
"""Between two files of all weights; fewer where they are as long together."""


@dataclass(frozen=True, kw_only=True)
class PolicyFile:
    """One file, as peers.daemon.policies.WeightsFile has it."""

    path: str
    sha256: str
    num_bytes: int
    leads_to: str
    base: str = ""


class PolicyFiles:
    """Owns its directory, and what lies in it."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        self._files: list[PolicyFile] = []
        self._digest = ""

    def write(self, publisher: Publisher) -> list[dict[str, Any]]:
        """Write the publisher's newest version, unless it is there. Returns all files, the oldest first."""
        if publisher.digest == self._digest:
            return [asdict(file) for file in self._files]
        label, blob = publisher.blob_for(publisher.name, publisher.version - 1)
        base = "" if label.base is None else self._digest
        self._files.append(self._written(blob, label.digest, base))
        if base and self._needs_whole(publisher.whole_bytes):
            label, blob = publisher.blob_for("", 0)
            self._files.append(self._written(blob, label.digest, ""))
        self._digest = label.digest
        self._forget()
        return [asdict(file) for file in self._files]

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _written(self, blob: bytes, leads_to: str, base: str) -> PolicyFile:
        sha256 = hashlib.sha256(blob).hexdigest()
        path = self._directory / f"{sha256}.safetensors"
        partial = path.with_suffix(".partial")
        partial.write_bytes(blob)
        partial.replace(path)
        return PolicyFile(path=str(path), sha256=sha256, num_bytes=len(blob), leads_to=leads_to, base=base)

    def _needs_whole(self, whole_bytes: int) -> bool:
        last = max(index for index, file in enumerate(self._files) if not file.base)
        patches = self._files[last + 1 :]
        return len(patches) > MAX_PATCHES or sum(file.num_bytes for file in patches) > whole_bytes

    def _forget(self) -> None:
        """Keep what has come since the last file but one of all weights."""
        wholes = [index for index, file in enumerate(self._files) if not file.base]
        first = wholes[-2] if len(wholes) > 1 else 0
        kept = self._files[first:]
        still = {file.path for file in kept}
        for file in self._files[:first]:
            if file.path not in still:
                Path(file.path).unlink(missing_ok=True)
        self._files = kept
