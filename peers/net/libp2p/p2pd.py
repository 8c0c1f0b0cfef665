"""The libp2p daemon (p2pd, a binary that comes with hivemind) as a child process that never outlives this process."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from peers.errors import PeersError, UserError
from peers.net.socket_directory import SocketDirectory
from peers.system import with_parent
from peers.timing import START_S, STOP_S

_CONTROL = "control.sock"


class P2pd:
    """A running p2pd. `control` is its control socket, `directory` a private place for sockets beside it."""

    def __init__(self, directory: SocketDirectory, process: asyncio.subprocess.Process) -> None:
        self.directory = directory.path
        self.control = directory.path / _CONTROL
        self._directory = directory
        self._process = process
        self._last_lines: collections.deque[str] = collections.deque(maxlen=5)
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_output())

    @classmethod
    async def start(
        cls,
        *,
        identity_path: Path,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] = (),
        client_mode: bool = False,
        timeout_s: float = START_S,
    ) -> P2pd:
        """Start it and wait until it listens. Raises UserError with p2pd's last words when it does not."""
        directory = SocketDirectory()
        p2pd: P2pd | None = None
        try:
            control = directory.path / _CONTROL
            arguments = _arguments(control, identity_path, host_maddrs, announce_maddrs, client_mode)
            process = await asyncio.create_subprocess_exec(
                # Otherwise p2pd would run on for half a minute after this process was killed by SIGKILL.
                *with_parent(arguments),
                # By default p2pd dials from the port that it listens on. Two peers that dial each other at once then
                # get a single connection that both believe they have opened: the handshake fails, and is not tried
                # again for seconds.
                env={**os.environ, "LIBP2P_TCP_REUSEPORT": "false"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # Not in the terminal's session: after Ctrl-C this process still needs p2pd to leave the swarm.
                start_new_session=True,
            )
            p2pd = cls(directory, process)
            await p2pd._wait_ready(timeout_s)
            return p2pd
        except BaseException:
            if p2pd is not None:
                await p2pd.stop()
            directory.remove()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def last_words(self) -> str:
        return self._last_lines[-1] if self._last_lines else "(no output)"

    async def wait_dead(self) -> str:
        """Wait until p2pd has ended, for whatever reason; returns its last line."""
        await self._process.wait()
        return self.last_words

    async def stop(self) -> None:
        """End it and remove its sockets. May be repeated."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._reader
        self._directory.remove()

    async def _wait_ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise UserError(
                f"p2pd did not start within {timeout_s:g} s; its last output: {self.last_words}"
            ) from error

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while line := await _read_line(self._process.stdout):
            self._last_lines.append(line)
            if line.startswith("Peer ID:") and not self._ready.done():
                self._ready.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(UserError(f"p2pd could not start: {self.last_words}"))
            self._ready.exception()


def _arguments(
    control: Path,
    identity_path: Path,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    client_mode: bool,
) -> list[str]:
    binary = Path(str(files("hivemind.hivemind_cli"))) / "p2pd"
    if not os.access(binary, os.X_OK):
        raise PeersError(f"{binary} is missing or not executable; install hivemind again")
    # Nothing that asks gateways or strangers: no port mapping, no autonat, no relay, no public bootstrap.
    arguments = [
        str(binary),
        f"-listen=/unix{control}",
        f"-id={identity_path.absolute()}",
        f"-idleTimeout={START_S:.0f}s",
        *("-natPortMap=0", "-autonat=0", "-autoRelay=0", "-relay=0", "-b=0", "-connManager=1", "-tls=1"),
        "-noListenAddrs=1" if client_mode else f"-hostAddrs={','.join(host_maddrs)}",
        "-dhtClient=1" if client_mode else "-dhtServer=1",
    ]
    if announce_maddrs:
        arguments.append(f"-announceAddrs={','.join(announce_maddrs)}")
    return arguments


async def _read_line(stream: asyncio.StreamReader) -> str:
    """One line, cut at the stream's limit; empty at the end."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return ""
        if text := line.decode(errors="replace").strip():
            return text
