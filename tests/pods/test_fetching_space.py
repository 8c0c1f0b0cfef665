"""Results of pods never fill the disk of the machine that fetches them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioning.errors import UserError
from provisioning.machines import ssh
from provisioning.machines.ssh import Address, SshMachine
from tests.support.in_process import until
from tests.support.ssh_machines import client_key, needs_rsync, ssh_host


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_fetch_ends_with_all_its_processes_once_the_disk_is_nearly_full(tmp_path, monkeypatch):
    """As of many files, or of one that grows without end."""
    pid = tmp_path / "pid"
    script = f"sh -c 'echo $$ >{pid}.new && mv {pid}.new {pid}; while :; do sleep 1; done' & wait"

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=ssh._RESERVE_BYTES - 1 if pid.exists() else 1 << 40)

    (tmp_path / "model/.rsync-partial").mkdir(parents=True)
    (tmp_path / "model/.rsync-partial/weights").write_bytes(b"some")
    monkeypatch.setattr(ssh, "_SPACE_INTERVAL_S", 0.01)
    monkeypatch.setattr(ssh.shutil, "disk_usage", usage)
    work = ssh._run_rsync(["sh", "-c", script], "fetching", "a pod")
    with pytest.raises(UserError, match=r"results of a pod do not fit: less than 1024 MiB would stay free"):
        await ssh._keeping_space(work, tmp_path, "results of a pod")
    assert list((tmp_path / "model").iterdir()) == []
    # A killed process takes a moment to end.
    await until(lambda: not runs(int(pid.read_text())))


@pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())
async def test_what_fits_is_fetched_and_what_does_not_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
    key, into = client_key(tmp_path), tmp_path / "into"
    into.mkdir()
    with ssh_host(tmp_path / "host", key.with_suffix(".pub").read_text()) as host:
        (host.home / "pod/logs").mkdir(parents=True)
        (host.home / "pod/logs/a").write_text("said")
        machine = SshMachine(
            Address(host=host.address, port=host.port, user=host.user, key_path=key, host_key=host.host_key)
        )
        try:
            with monkeypatch.context() as full, pytest.raises(UserError, match="do not fit"):
                free = iter([1 << 40, 0])
                full.setattr(ssh.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
                await machine.fetch("pod", ["logs"], into)
            assert list(into.iterdir()) == []
            # However little is free, small results are fetched.
            free = iter([1 << 20, *[1 << 19] * 100])
            monkeypatch.setattr(ssh.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
            monkeypatch.setattr(ssh, "_SPACE_INTERVAL_S", 10.0)
            await machine.fetch("pod", ["logs"], into)
        finally:
            await machine.close()
    assert [path.name for path in into.iterdir()] == ["logs"]
    assert (into / "logs/a").read_text() == "said"


@pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())
async def test_an_interrupted_fetch_goes_on_where_it_was(tmp_path, monkeypatch):
    pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
    key, into, content = client_key(tmp_path), tmp_path / "into", random.Random(0).randbytes(3 << 20)
    into.mkdir()
    partial = into / "model/.rsync-partial/weights"
    with ssh_host(tmp_path / "host", key.with_suffix(".pub").read_text()) as host:
        (host.home / "pod/model").mkdir(parents=True)
        (host.home / "pod/model/weights").write_bytes(content)
        machine = SshMachine(
            Address(host=host.address, port=host.port, user=host.user, key_path=key, host_key=host.host_key)
        )
        try:
            with monkeypatch.context() as slow:
                slow.setattr(ssh, "_RESUMES", (*ssh._RESUMES, "--bwlimit=1000"))
                fetching = asyncio.create_task(machine.fetch("pod", ["model"], into))
                await until(lambda: any(one.stat().st_size for one in into.glob(".fetching-*/*")))
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
            assert content.startswith(partial.read_bytes()) and partial.stat().st_size
            assert not list(into.glob(".fetching-*"))
            await machine.fetch("pod", ["model"], into)
        finally:
            await machine.close()
    assert (into / "model/weights").read_bytes() == content
    assert [path.name for path in (into / "model").iterdir()] == ["weights"]
