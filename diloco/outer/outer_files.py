"""The daemon's part of a checkpoint: the outer state as it was at one moment, written while training continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import DilocoError
from peers.daemon.link import WorkerLink
from peers.state.whole_files import FileRecord


@dataclass
class OuterFiles:
    """The files that the daemon is writing into `directory`; without a daemon there are none."""

    directory: Path
    link_path: Path | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    """By name; filled in by `wait`."""
    head: str = ""

    def wait(self) -> OuterFiles:
        """Wait until the daemon has written the files. May be called from any thread of rank 0, and repeated.

        Raises DilocoError if the daemon failed, peers.errors.LinkLost if it is gone.
        """
        if self.link_path is None or self.files:
            return self
        # A second connection: training uses the first.
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
