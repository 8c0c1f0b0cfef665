"""Files sent by --mount arrive unchanged, with their modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioning.machines.local import LocalMachine
from provisioning.machines.machine import Machine
from provisioning.machines.paths import PODS
from provisioning.machines.setup import Setup, mount_of, send
from provisioning.machines.ssh import Address, SshMachine
from tests.support.pods_driver import source_of
from tests.support.ssh_machines import client_key, needs_rsync, ssh_host

There = tuple[Machine, Path]


@pytest.fixture(params=["local", "ssh"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[There]:
    """A machine, and the directory of the pod `label` on it."""
    if request.param == "local":
        yield LocalMachine(tmp_path / "home"), tmp_path / "home" / PODS / "label"
        return
    if needs_rsync():
        pytest.skip(needs_rsync())
    key = client_key(tmp_path)
    with ssh_host(tmp_path / "host", key.with_suffix(".pub").read_text()) as host:
        address = Address(
            **{"host": "127.0.0.1", "port": host.port, "user": host.user},
            **{"key_path": key, "host_key": host.host_key},
        )
        yield SshMachine(address), host.home / PODS / "label"


async def test_files_and_directories_arrive_with_their_modes_and_again_as_they_are_then(
    there: There, tmp_path
):
    machine, pod = there
    script, link, directory = tmp_path / "run.sh", tmp_path / "link.sh", tmp_path / "tools"
    script.write_text("#!/bin/sh\necho first\n")
    script.chmod(0o755)
    link.symlink_to("run.sh")
    directory.mkdir()
    (directory / "tool").write_bytes(b"\0" * (3 << 20))
    (directory / "tool").chmod(0o640)
    words = [f"{script}:bin/run.sh", f"{link}:bin/link.sh", f"{directory}:tools"]
    setup = Setup(
        source=source_of(tmp_path), python="true", mounts=[mount_of(word) for word in words], min_free_mb=1
    )

    async def said() -> str:
        await send(machine, "label", setup, num_gpus=None)
        return (await machine.run(f"cd {PODS}/label && bin/run.sh && bin/link.sh")).checked("running it")

    try:
        assert await said() == "first\nfirst\n"
        (pod / "bin/of-the-pod").write_text("stays")
        (pod / "tools/checkpoint").write_text("stays")
        script.write_text("#!/bin/sh\necho second\n")
        assert await said() == "second\nsecond\n"
    finally:
        await machine.close()
    assert (pod / "bin/run.sh").stat().st_mode & 0o777 == 0o755
    assert not (pod / "bin/link.sh").is_symlink()
    assert (pod / "tools/tool").stat().st_mode & 0o777 == 0o640
    assert (pod / "tools/tool").stat().st_size == 3 << 20
    assert (pod / "bin/of-the-pod").read_text() == (pod / "tools/checkpoint").read_text() == "stays"
