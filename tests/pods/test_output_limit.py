"""What a machine writes is read up to a limit, and nothing of it after an answer is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from provisioning.errors import MachineError
from provisioning.machines import ssh
from provisioning.machines.local import LocalMachine
from provisioning.machines.machine import BLOCK_BYTES, MAX_OUTPUT_BYTES
from provisioning.machines.ssh import Address, SshMachine
from tests.support.ssh_machines import client_key

asyncssh = pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")

_ENDLESS = 16 * MAX_OUTPUT_BYTES
# Of both streams; the rest waits in SSH's windows and in the kernel's buffers.
_MOST_BYTES = 4 * MAX_OUTPUT_BYTES


@dataclass
class Hostile:
    """An SSH server that obeys only `flood`, `mute`, and `greet`."""

    sent_bytes: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def obey(self, process) -> None:
        self.began.set()
        what = process.command.split()[-1].strip("'")
        with suppress(OSError, asyncssh.Error):
            while what.startswith("flood") and self.sent_bytes < _ENDLESS:
                stream = process.stderr if what.endswith("stderr") else process.stdout
                stream.write(b"x" * BLOCK_BYTES)
                self.sent_bytes += BLOCK_BYTES
                await stream.drain()
            if what == "greet":
                process.stdout.write(await process.stdin.read())
                process.exit(3)
            await process.wait_closed()
        if what != "greet":
            self.closed.set()


@asynccontextmanager
async def reached(tmp_path: Path) -> AsyncIterator[tuple[SshMachine, Hostile]]:
    class Server(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return False

    hostile, key = Hostile(), asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(
        Server, "127.0.0.1", 0, server_host_keys=[key], process_factory=hostile.obey, encoding=None
    )
    machine = SshMachine(
        Address(
            host="127.0.0.1",
            port=server.get_port(),
            user="ada",
            key_path=client_key(tmp_path),
            host_key=" ".join(key.export_public_key().decode().split()[:2]),
        )
    )
    try:
        yield machine, hostile
    finally:
        await machine.close()
        server.close()
        await server.wait_closed()


async def greeted(machine: SshMachine) -> None:
    answer = await machine.run("greet", stdin=b"good day", timeout_s=20.0)
    assert (answer.code, answer.stdout) == (3, "good day")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_script_that_writes_without_end_is_given_up_at_the_limit(tmp_path, stream):
    async with reached(tmp_path) as (machine, hostile):
        with pytest.raises(MachineError, match="wrote more than 4 MiB on ada@127"):
            await machine.run(f"flood-{stream}", timeout_s=60.0)
        await asyncio.wait_for(hostile.closed.wait(), 20.0)
        assert hostile.sent_bytes <= _MOST_BYTES
        await greeted(machine)


async def test_after_the_deadline_a_script_has_no_channel_any_more(tmp_path):
    async with reached(tmp_path) as (machine, hostile):
        with pytest.raises(MachineError, match=r"longer than 0\.2 s"):
            await machine.run("mute", timeout_s=0.2)
        await asyncio.wait_for(hostile.closed.wait(), 20.0)
        await greeted(machine)


async def test_a_script_that_is_cancelled_has_no_channel_any_more(tmp_path):
    async with reached(tmp_path) as (machine, hostile):
        running = asyncio.create_task(machine.run("mute"))
        await asyncio.wait_for(hostile.began.wait(), 20.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(hostile.closed.wait(), 20.0)
        await greeted(machine)


@pytest.mark.parametrize("stream", ["1", "2"])
async def test_a_local_script_that_writes_without_end_is_ended_at_the_limit(tmp_path, stream):
    machine = LocalMachine(tmp_path)
    with pytest.raises(MachineError, match="wrote more than 4 MiB on this machine"):
        await machine.run(f"yes >&{stream}", timeout_s=60.0)
    answer = await machine.run("cat; echo bad >&2; exit 3", stdin=b"x" * 1_000_000)
    assert (answer.code, len(answer.stdout), answer.stderr) == (3, 1_000_000, "bad\n")
    # The script may end without reading its input.
    assert (await machine.run("exit 4", stdin=b"x" * 1_000_000)).code == 4


async def test_of_what_rsync_says_the_end_is_kept():
    script = "cat >/dev/null; yes | head -c 3000000 >&2; echo 'the reason' >&2; exit 5"
    code, said = await ssh._rsync_once(["sh", "-c", script], "fetching", b"a\nb\n")
    assert code == 5 and said.endswith("\nthe reason\n") and len(said) == BLOCK_BYTES


async def test_an_rsync_that_writes_errors_without_progress_is_ended(monkeypatch):
    monkeypatch.setattr(ssh, "_MAX_SILENCE_S", 0.2)
    with pytest.raises(MachineError, match=r"fetching made no progress for 0\.2 s"):
        await ssh._rsync_once(["sh", "-c", "exec yes >&2"], "fetching", b"")
