"""Runs the daemon of a peer that was started by torchrun, as a child of local rank 0 that dies with it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from diloco.errors import USER_ERROR, DilocoError, UserError
from diloco.launch.swarm_config import daemon_config
from diloco.options.trainer import Scalar, TrainConfig
from diloco.train.run_dir import last_words
from peers.daemon.link import WorkerLink
from peers.errors import LinkLost
from peers.net.socket_directory import SocketDirectory
from peers.system import with_parent

START_TIMEOUT_S = 600.0
"""For its imports, from a file system that many nodes may share."""
STOP_TIMEOUT_S = 10.0


def wants_swarm(config: TrainConfig) -> bool:
    """Whether any flag asks for a swarm."""
    hv = config.hv
    return bool(hv.initial_peers) or hv.world_rank is not None or hv.galaxy_size is not None


class DaemonProcess:
    """A running daemon. It ends by itself when its worker has finished or died."""

    def __init__(self, config: TrainConfig, named: Collection[str], *, log_path: Path) -> None:
        """Start the daemon; does not wait until it listens. Raises UserError for invalid settings."""
        self._directory = SocketDirectory()
        self._log_path = log_path
        self.link_path = self._directory.path / "link.sock"
        fields = daemon_config(config, named, link_path=str(self.link_path))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent([sys.executable, "-m", "peers.daemon.main"], signal.SIGTERM),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(fields).encode())

    def manifest(self) -> dict[str, Scalar]:
        """Wait for the swarm's manifest. Raises UserError if this peer cannot join."""
        link = self._connect()
        try:
            with self.explains():
                link.send("adopt")
                return dict(link.receive("manifest")["manifest"])
        finally:
            link.close()

    @contextlib.contextmanager
    def explains(self) -> Iterator[None]:
        """If the worker loses its daemon in this block, raise an error with the daemon's last output."""
        try:
            yield
        except LinkLost as error:
            # The daemon closes the link before it has printed the reason.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            raise self._failure(f"the connection to the swarm's daemon was lost: {error}") from error

    def stop(self) -> None:
        """Wait until the daemon has left the swarm, and kill it after STOP_TIMEOUT_S. Repeating it is safe."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._directory.remove()

    def kill(self) -> None:
        """Send SIGTERM without waiting; the daemon cleans up by itself."""
        self._process.terminate()
        self._directory.remove()

    def _connect(self) -> WorkerLink:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return WorkerLink.connect(self.link_path, timeout_s=0.5)
            except LinkLost as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise self._failure("the swarm's daemon did not start") from error

    def _failure(self, what: str) -> Exception:
        code, output = self._process.poll(), last_words(self._log_path)
        if code == USER_ERROR and output:
            return UserError(output)
        return DilocoError(f"{what} (exit code {code}); the end of {self._log_path}:\n{output}")
