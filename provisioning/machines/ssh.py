"""The Machine protocol over SSH and rsync: one connection, reopened after it breaks, with a pinned host key."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from provisioning.errors import HostKeyChanged, MachineError, UserError
from provisioning.machines.keys import key_at
from provisioning.machines.machine import (
    BLOCK_BYTES,
    EXCLUDED,
    Answer,
    end,
    end_of_stream,
    exchange,
    lines_of,
    spawned,
    whole,
)

if TYPE_CHECKING:
    import asyncssh

_CONNECT_TIMEOUT_S = 20.0
_KEEPALIVE_S = 15.0
_SSH_PORT = 22
# Longer than both sides take to read a file of 50 GB, to find what an interrupted transfer has left to send.
_MAX_SILENCE_S = 900.0
_PARTIAL_DIR = ".rsync-partial"
_KEEP_PARTIAL_S = 5.0
_RESERVE_BYTES = 1 << 30
# A fast disk takes about as much as the reserve in this time.
_SPACE_INTERVAL_S = 0.5
_NO_SPACE = "No space left on device"
_CANNOT_WRITE = 11
# The next transfer goes on with what an interrupted one has left.
_RESUMES = ("--progress", f"--partial-dir={_PARTIAL_DIR}")
# Exit code: a file was removed while rsync ran.
_VANISHED = 24
# The error output of a failing remote rsync is sometimes lost when ssh ends.
_MAX_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a machine, and the keys of both sides."""

    host: str
    port: int
    user: str
    key_path: Path
    host_key: str
    """The machine's pinned OpenSSH public key; a machine with another key is never used."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"

    @property
    def known_hosts(self) -> str:
        # The format of known_hosts omits port 22.
        where = self.host if self.port == _SSH_PORT else f"[{self.host}]:{self.port}"
        return f"{where} {self.host_key}\n"


class SshMachine:
    def __init__(self, address: Address) -> None:
        self.address = address
        self._connection: asyncssh.SSHClientConnection | None = None
        self._lock = asyncio.Lock()
        self._directory = tempfile.TemporaryDirectory(prefix="diloco-ssh-")
        self._known_hosts = Path(self._directory.name) / "known_hosts"
        self._known_hosts.write_text(address.known_hosts, encoding="utf-8")

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        import asyncssh

        connection = await self._connected()
        try:
            # `sh -c`: the login shell may not be a POSIX shell, and stdin is needed for the caller's input.
            async with asyncio.timeout(timeout_s):
                process = await connection.create_process(f"sh -c {shlex.quote(script)}", encoding=None)
                try:
                    streams = (
                        whole(stream, str(self.address)) for stream in (process.stdout, process.stderr)
                    )
                    out, err = await exchange(process.stdin, stdin, *streams)
                    await process.wait_closed()
                finally:
                    # After a failure or cancellation: whatever it still sends is not read.
                    process.channel.abort()
        except TimeoutError as error:
            raise MachineError(f"a script took longer than {timeout_s:g} s on {self.address}") from error
        except (asyncssh.Error, OSError) as error:
            await self._drop()
            raise MachineError(f"the connection to {self.address} broke: {error}") from error
        if process.exit_status is None or process.exit_status < 0:
            raise MachineError(f"a script was killed on {self.address}: {process.exit_signal}")
        return Answer(process.exit_status, out.decode(errors="replace"), err.decode(errors="replace"))

    async def sync(
        self, source: Path, into: str, *, excluded: Sequence[str] = EXCLUDED, mirrors: bool = True
    ) -> None:
        directory = into if source.is_dir() else str(PurePosixPath(into).parent)
        (await self.run(f"mkdir -p {shlex.quote(directory)}")).checked(f"making {directory}")
        argv = _sending_argv(source, self._rsync_path(into), excluded, self._rsync_shell(), mirrors=mirrors)
        await _run_rsync(argv, f"sending {source} to {self.address}", str(self.address))

    async def fetch(self, directory: str, paths: Sequence[str], into: Path) -> None:
        names = "".join(f"{path}\n" for path in paths).encode()
        source, shell = f"{self._rsync_path(directory)}/", self._rsync_shell()
        try:
            # What a killed rsync leaves is removed with this directory.
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=into) as temporary:
                argv = _fetch_argv(source, into, Path(temporary).absolute(), shell)
                work = _run_rsync(argv, f"fetching from {self.address}", str(self.address), names)
                await _keeping_space(work, into, f"results of {self.address}")
        except OSError as error:
            raise UserError(f"nothing can be written to {into}: {error.strerror}") from error

    def _rsync_path(self, path: str) -> str:
        return f"{self.address.user}@{self.address.host}:{path}"

    def _rsync_shell(self) -> str:
        """Raises UserError if rsync is not installed here."""
        if shutil.which("rsync") is None:
            raise UserError("rsync is not on this machine; install it (apt install rsync).")
        return shlex.join([*ssh_argv(self.address, self._known_hosts), "-o", "BatchMode=yes"])

    async def follow(self, script: str) -> AsyncIterator[str]:
        import asyncssh

        connection = await self._connected()
        try:
            argv = f"sh -c {shlex.quote(script)}"
            async with connection.create_process(argv, encoding=None) as process:
                async for line in lines_of(functools.partial(process.stdout.read, BLOCK_BYTES)):
                    yield line
        except (asyncssh.Error, OSError) as error:
            await self._drop()
            raise MachineError(f"the connection to {self.address} broke: {error}") from error

    def shell_argv(self, directory: str, ports: Sequence[int] = ()) -> list[str]:
        command = f'cd {shlex.quote(directory)} && exec "$SHELL" -l'
        target = f"{self.address.user}@{self.address.host}"
        tunnels = [word for port in ports for word in ("-L", f"127.0.0.1:{port}:127.0.0.1:{port}")]
        return [*ssh_argv(self.address, self._known_hosts), *tunnels, "-t", "--", target, command]

    async def close(self) -> None:
        await self._drop()
        self._directory.cleanup()

    async def _connected(self) -> asyncssh.SSHClientConnection:
        import asyncssh

        async with self._lock:
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            key = key_at(self.address.key_path)
            try:
                self._connection = await asyncio.wait_for(
                    asyncssh.connect(
                        self.address.host,
                        port=self.address.port,
                        username=self.address.user,
                        client_keys=[str(key)],
                        known_hosts=asyncssh.import_known_hosts(self.address.known_hosts),
                        config=None,
                        agent_path=None,
                        keepalive_interval=_KEEPALIVE_S,
                    ),
                    _CONNECT_TIMEOUT_S,
                )
            except asyncssh.HostKeyNotVerifiable as error:
                raise HostKeyChanged(
                    f"{self.address} shows another host key than the pinned one; nothing was sent to it. Unless the "
                    "machine was reinstalled, somebody may be intercepting the connection. If it was reinstalled: give "
                    "a rented machine back by `diloco pods down`; for your own, correct host_key in the inventory, or "
                    "the line in ~/.ssh/known_hosts."
                ) from error
            except asyncssh.PermissionDenied as error:
                raise MachineError(f"{self.address} does not accept the key {key}") from error
            except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
                raise UserError(f"{key} is not a usable SSH key: {error}.") from error
            except (asyncssh.Error, OSError, TimeoutError) as error:
                raise MachineError(
                    f"{self.address} cannot be reached: {error or 'no answer in time'}"
                ) from error
            return self._connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(connection.wait_closed(), 5.0)


async def shown_host_key(host: str, port: int) -> str:
    """The host key that the machine shows now, to pin on first use. Raises MachineError."""
    import asyncssh

    try:
        key = await asyncio.wait_for(
            asyncssh.get_server_host_key(host, port, config=None), _CONNECT_TIMEOUT_S
        )
    except (asyncssh.Error, OSError, TimeoutError) as error:
        raise MachineError(f"{host}:{port} cannot be reached: {error or 'no answer in time'}") from error
    if key is None:
        raise MachineError(f"{host}:{port} shows no host key")
    return " ".join(key.export_public_key().decode().split()[:2])


def ssh_argv(address: Address, known_hosts: Path) -> list[str]:
    """The command line of `ssh`, without the user's configuration, and with only the pinned host key accepted."""
    options = {
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "ServerAliveInterval": "15",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", "-p", str(address.port), "-i", str(address.key_path.expanduser()), *words]


def _sending_argv(
    source: Path, target: str, excluded: Sequence[str], shell: str, *, mirrors: bool
) -> list[str]:
    """Sends a directory or a file to the remote `target`; `mirrors` as in `sync`. `shell`: the ssh command line."""
    excludes = [f"--exclude={pattern}" for pattern in excluded]
    # A slash at the end means the contents of the directory. A link to a file is sent as that file.
    paths = [f"{source}/", f"{target}/"] if source.is_dir() else [str(source.resolve()), target]
    deletes = ["--delete"] if mirrors else []
    return ["rsync", "-az", *_RESUMES, *deletes, *excludes, "-e", shell, "--", *paths]


def _fetch_argv(source: str, into: Path, temporary: Path, shell: str) -> list[str]:
    """Copies the files and directories named on stdin, without symbolic links. `temporary`: see --temp-dir."""
    names = ["--files-from=-", f"--temp-dir={temporary}"]
    return ["rsync", "-rtz", *_RESUMES, *names, "-e", shell, "--", source, f"{into}/"]


async def _keeping_space(work: Coroutine[Any, Any, None], into: Path, what: str) -> None:
    """Do this work, which writes to `into`, while its disk has space left. Raises UserError once it has not.

    The sizes that a pod claims are not trusted, and a small compressed stream may become a huge file.
    """
    reserve = min(_RESERVE_BYTES, shutil.disk_usage(into).free // 2)
    task = asyncio.create_task(work)
    try:
        while not task.done():
            if shutil.disk_usage(into).free < reserve:
                task.cancel()
                await asyncio.wait([task])
                for partial in into.rglob(_PARTIAL_DIR):
                    shutil.rmtree(partial, ignore_errors=True)
                raise UserError(
                    f"the {what} do not fit: less than {reserve >> 20} MiB would stay free on the disk of "
                    f"{into}; make room there, or fetch less by --fetch"
                )
            await asyncio.wait([task], timeout=_SPACE_INTERVAL_S)
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _run_rsync(argv: Sequence[str], what: str, where: str, stdin: bytes = b"") -> None:
    """Run rsync. Raises MachineError if it fails. `what` and `where` describe the work in its message."""
    for number in range(1, _MAX_TRIES + 1):
        code, said = await _rsync_once(argv, what, stdin)
        if code in (0, _VANISHED):
            return
        if said.strip() or number == _MAX_TRIES:
            raise MachineError(_trouble(code, said, what, where))


async def _rsync_once(argv: Sequence[str], what: str, stdin: bytes) -> tuple[int, str]:
    """The exit code, and the error output.

    Raises MachineError if rsync, which runs with --progress, prints no progress for _MAX_SILENCE_S. A transfer may take
    any time, and rsync's own --timeout misses a stalled one: what rsync sends meanwhile to keep the connection counts.
    """
    process = await spawned(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        async with asyncio.timeout(_MAX_SILENCE_S) as silence:
            watched = _read_progress(process.stdout, silence)
            _, said = await exchange(process.stdin, stdin, watched, end_of_stream(process.stderr))
            await process.wait()
    except TimeoutError as error:
        raise MachineError(f"{what} made no progress for {_MAX_SILENCE_S:g} s") from error
    finally:
        await _end_rsync(process)
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


async def _read_progress(stream: asyncio.StreamReader, silence: asyncio.Timeout) -> bytes:
    while await stream.read(BLOCK_BYTES):
        silence.reschedule(asyncio.get_running_loop().time() + _MAX_SILENCE_S)
    return b""


async def _end_rsync(process: asyncio.subprocess.Process) -> None:
    """End it with ssh and its own children, which might go on writing. May be repeated."""
    if process.returncode is None:
        # On SIGTERM, it moves a partial file to --partial-dir.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _KEEP_PARTIAL_S
    while process.returncode is None and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await end(process)


def _trouble(code: int, said: str, what: str, where: str) -> str:
    if _NO_SPACE in said and not what.startswith("fetching"):
        return f"the disk of {where} is full; take a larger machine or volume"
    if code in (12, 127) and ("rsync: not found" in said or "command not found" in said):
        return f"there is no rsync on {where}; take an image that has it"
    if code == _CANNOT_WRITE and not said.strip():
        return f"files could not be written on {where}; is its disk full?"
    return f"{what} failed ({code}): {said.strip()[-600:]}"
