"""The daemon's part of a checkpoint: the outer state as it was at one moment, written while training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import DilocoError
from peers.daemon.link import WorkerLink
from peers.state.whole_files import FileRecord


@dataclass
class OuterFiles:
    """What is being written into `directory`; without a daemon nothing is."""

    directory: Path
    link_path: Path | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    """By name, once `wait` has returned."""
    head: str = ""

    def wait(self) -> OuterFiles:
        """Until the daemon is done, from any thread of rank 0; repeating it costs nothing.

        Raises DilocoError where it could not, peers.errors.LinkLost where it is gone.
        """
        if self.link_path is None or self.files:
            return self
        # A connection of its own: the training has the other one.
        link = WorkerLink.connect(self.link_path)
        try:
            link.send("written", directory=str(self.directory.absolute()))
            answer = link.receive("checkpointed", "failed")
        finally:
            link.close()
        if answer["kind"] == "failed":
            raise DilocoError(f"the outer state was not saved to {self.directory}: {answer['reason']}")
        self.files = {name: FileRecord(*record) for name, record in answer["files"].items()}
        self.head = str(answer["head"])
        return self
