"""Machines reached over real SSH: OpenSSH's server where it is installed, else asyncssh's, each on loopback.

Each has its own home directory and, first on its PATH, a `bin` for programs that a test installs.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.links import free_port
from provisioning.machines.paths import PODS

SSHD = "/usr/sbin/sshd"
_START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class SshHost:
    """A machine that answers on this address."""

    home: Path
    port: int
    user: str
    host_key: str
    num_ports: int = 3
    address: str = "127.0.0.1"

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    def install(self, name: str, script: str) -> None:
        """Install a program on the machine's PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


def end_processes(host: SshHost) -> None:
    """SIGKILL to everything that was started on this machine."""
    wanted = f"HOME={host.home}".encode()
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wipe(host: SshHost) -> None:
    """End all processes and remove all directories but `bin`, as if a provider took the machine back."""
    end_processes(host)
    for path in host.home.iterdir():
        if path != host.bin and path.is_dir():
            shutil.rmtree(path)


def client_key(directory: Path) -> Path:
    """A new key that only its owner can read."""
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519")
    path = directory / "client_key"
    key.write_private_key(path)
    key.write_public_key(path.with_suffix(".pub"))
    path.chmod(0o600)
    return path


def free_ports(number: int) -> list[int]:
    return [free_port() for _ in range(number)]


def inventory(path: Path, hosts: list[SshHost], key: Path, **changes: str) -> Path:
    """An inventory of these machines. Fields with an empty value in `changes` are left out."""
    tables = []
    for index, host in enumerate(hosts):
        fields = {
            "name": f'"machine{index}"',
            "host": '"127.0.0.1"',
            "port": str(host.port),
            "user": f'"{host.user}"',
            "key": f'"{key}"',
            "host_key": f'"{host.host_key}"',
            "gpu_count": "0",
            "ports": str(free_ports(3)),
            **changes,
        }
        lines = (f"{name} = {value}" for name, value in fields.items() if value)
        tables.append("[[machines]]\n" + "\n".join(lines))
    path.write_text("\n\n".join(tables))
    return path


@contextmanager
def ssh_host(
    directory: Path,
    public_keys: Callable[[], str] | str,
    *,
    disk_kb: int | None = None,
    variables: Sequence[str] = (),
) -> Iterator[SshHost]:
    """A machine that accepts these keys (OpenSSH lines). It ends with the context, and so does its server.

    `variables`: NAME=VALUE for its environment (needs OpenSSH's server). `disk_kb`: size of a disk for its pods, which
    no other machine sees (needs root and OpenSSH's server).
    """
    home, authorized, public = _prepared(
        directory, public_keys if isinstance(public_keys, str) else public_keys()
    )
    serve = _openssh if Path(SSHD).exists() else _asyncssh
    if disk_kb is not None:
        serve = functools.partial(_openssh, prefix=_on_small_disk(home / PODS, disk_kb))
    with serve(directory, home, authorized) as port:
        if variables:
            session = directory / "session.sh"
            lines = session.read_text().partition("\n")[2]
            session.write_text(f"#!/bin/sh\nexport {shlex.join(variables)}\n{lines}")
        yield from _served(SshHost(home, port, getpass.getuser(), public))


@contextmanager
def cloud_machine(
    directory: Path,
    *,
    namespace: str,
    address: str,
    user: str,
    public_keys: str = "",
    own_directories: Sequence[Path] = (),
) -> Iterator[SshHost]:
    """Like `ssh_host`, but in its own network namespace: SSH is on port 22 for this user, all other ports are free.

    It sees no processes but its own, and has empty `own_directories` that no other machine sees. Needs root and
    OpenSSH's server. Call it from a network namespace that reaches the machine.
    """
    home, authorized, host_key = _prepared(directory, public_keys)
    passwd = directory / "passwd"
    # The first line, so that programs that look up the home of their user id find this one.
    passwd.write_text(f"{user}:*:0:0::{home}:/bin/sh\n" + Path("/etc/passwd").read_text())
    mounts = [f"mount -t tmpfs own {shlex.quote(str(path))}" for path in own_directories]
    for path in own_directories:
        path.mkdir(parents=True, exist_ok=True)
    script = " && ".join(['mount --bind "$1" /etc/passwd', *mounts, 'shift && exec "$@"'])
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    prefix = ["ip", "netns", "exec", namespace, *isolated, "sh", "-c", script, "sh", str(passwd)]
    with _openssh(directory, home, authorized, prefix, address, 22) as port:
        yield from _served(SshHost(home, port, user, host_key, address=address))


def _served(host: SshHost) -> Iterator[SshHost]:
    try:
        yield host
    finally:
        end_processes(host)


def _prepared(directory: Path, keys: str) -> tuple[Path, Path, str]:
    """A home directory, the file of keys that are let in, and the public host key."""
    import asyncssh

    home = directory / "home"
    (home / "bin").mkdir(parents=True)
    authorized = directory / "authorized_keys"
    authorized.write_text(keys)
    authorized.chmod(0o600)
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    host_key.write_private_key(directory / "host_key")
    (directory / "host_key").chmod(0o600)
    return home, authorized, " ".join(host_key.export_public_key().decode().split()[:2])


def _on_small_disk(path: Path, size_kb: int) -> list[str]:
    """Words in front of a command, to run it in a mount namespace with a disk of this size at `path`."""
    path.mkdir()
    script = 'mount -t tmpfs -o "size=$1k" pods "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(size_kb), str(path)]


@contextmanager
def _openssh(
    directory: Path,
    home: Path,
    authorized: Path,
    prefix: Sequence[str] = (),
    address: str = "127.0.0.1",
    port: int = 0,
) -> Iterator[int]:
    if os.geteuid() == 0:
        # Debian's server needs this directory, which no service manager has made here.
        Path("/run/sshd").mkdir(exist_ok=True)
    port = port or free_port()
    session = directory / "session.sh"
    session.write_text(
        f"#!/bin/sh\nexport HOME={shlex.quote(str(home))} PATH={shlex.quote(str(home / 'bin'))}:$PATH\n"
        'cd "$HOME" || exit 1\nexec sh -c "${SSH_ORIGINAL_COMMAND:-exec sh -l}"\n'
    )
    session.chmod(0o755)
    lines = {
        "Port": port,
        "ListenAddress": address,
        "HostKey": directory / "host_key",
        "PidFile": "none",
        "AuthorizedKeysFile": authorized,
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "ForceCommand": session,
        "MaxStartups": "100",
    }
    config = directory / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
    with (directory / "sshd.log").open("wb") as log:
        argv = [*prefix, SSHD, "-D", "-e", "-f", str(config)]
        process = subprocess.Popen(argv, stderr=log, start_new_session=True)
    try:
        _wait_for(address, port, lambda: process.poll() is None, directory / "sshd.log")
        yield port
    finally:
        # The whole group: `unshare` ignores SIGTERM, and ends with its child.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)


@contextmanager
def _asyncssh(directory: Path, home: Path, authorized: Path) -> Iterator[int]:
    import asyncssh

    class Server(asyncssh.SSHServer):
        """Reads the keys at each login, as OpenSSH's server does, since a cloud writes them later."""

        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            self._conn = conn

        def begin_auth(self, username: str) -> bool:
            if authorized.read_text().strip():
                self._conn.set_authorized_keys(str(authorized))
            return True

    async def handle(session: asyncssh.SSHServerProcess) -> None:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            session.command or "exec sh -l",
            stdin=-1,
            stdout=-1,
            stderr=-1,
            cwd=home,
            env={**os.environ, "HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"},
        )
        await session.redirect(stdin=process.stdin, stdout=process.stdout, stderr=process.stderr)
        code = await process.wait()
        await session.stdout.drain()
        session.exit(code)

    ready: list[int] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = await asyncssh.create_server(
            Server,
            "127.0.0.1",
            0,
            server_host_keys=[str(directory / "host_key")],
            process_factory=handle,
            encoding=None,
        )
        ready.append(server.get_port())
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def _wait_for(address: str, port: int, lives: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection((address, port), 1.0).close()
            return
        except OSError:
            assert lives() and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)


def needs_rsync() -> str:
    """Why a test of pods over SSH cannot run here; empty: it can."""
    return "" if shutil.which("rsync") and shutil.which("ssh") else "rsync and ssh are needed"
