from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from provisioning.machines import ssh
from provisioning.machines.machine import spawned
from provisioning.machines.ssh import Address
from tests.support.in_process import until


@pytest.mark.parametrize(("port", "where"), [(22, "192.0.2.7"), (2222, "[192.0.2.7]:2222")])
def test_a_pinned_key_is_written_as_ssh_looks_for_it(port, where):
    address = Address(
        host="192.0.2.7", port=port, user="ada", key_path=Path("k"), host_key="ssh-ed25519 AAAA"
    )
    assert address.known_hosts == f"{where} ssh-ed25519 AAAA\n"


async def test_a_slow_transfer_may_take_any_time(monkeypatch):
    monkeypatch.setattr(ssh, "_MAX_SILENCE_S", 0.2)
    script = "for one in 1 2 3 4 5 6; do echo $one; sleep 0.05; done"
    assert await ssh._rsync_once(["sh", "-c", script], "fetching", b"") == (0, "")


async def test_an_interrupted_rsync_may_keep_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "_KEEP_PARTIAL_S", 60.0)
    trap = f"trap 'echo some >{tmp_path}/partial; exit 20' TERM"
    script = f"{trap}; touch {tmp_path}/began; while :; do sleep 0.02; done"
    running = asyncio.create_task(ssh._rsync_once(["sh", "-c", script], "fetching", b""))
    await until((tmp_path / "began").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "partial").read_text() == "some\n"


async def test_a_copy_that_is_cancelled_while_its_process_starts_leaves_no_process(tmp_path):
    """asyncio itself may wait for ever then, as long as the process's child lives."""
    began, is_cancelled = tmp_path / "began", asyncio.Event()

    async def started(*args, **kwargs):
        process = await asyncio.create_subprocess_exec(*args, **kwargs)
        await is_cancelled.wait()
        return process

    argv = ("sh", "-c", f"sh -c 'echo $$ >{tmp_path}/pid; touch {began}; sleep 60' & wait")
    pipe = asyncio.subprocess.PIPE
    running = asyncio.create_task(
        spawned(started(*argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True))
    )
    await until(began.exists)
    running.cancel()
    is_cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not Path(f"/proc/{pid}/cwd").exists())
