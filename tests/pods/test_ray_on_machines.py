"""The features that the seed documents ask of Ray, as typed in docs/tutorials/gpu-pods.md: by its own launcher, on two
machines over real SSH, each with an address, a network and processes of its own. `make test-ray`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.support.commands import ROOT, Command, check_gone, wait_until
from tests.support.namespaces import hub, inside, why_not
from tests.support.pods_commands import ALEXNET, ALL_DOWN, RAY_UP, WRITE_RAY, argv_of
from tests.support.ssh_machines import SSHD, SshHost, client_key, cloud_machine, needs_rsync

WHY_NOT = (
    ("" if importlib.util.find_spec("ray") else "Ray is not installed; try make test-ray")
    or why_not()
    or needs_rsync()
    or ("" if shutil.which(SSHD) else "needs OpenSSH's server")
)
pytestmark = [pytest.mark.ray, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

TIMEOUT_S = 600.0
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[SshHost]]:
    """Two machines behind a router, on which the commands run; `machines.toml` lists the machines."""
    key = client_key(tmp_path)
    with ExitStack() as stack:
        lan = stack.enter_context(hub(2, forwards=True))
        stack.enter_context(inside(lan.middle))
        hosts, tables = [], []
        for index, spoke in enumerate(lan.spokes):
            machine = cloud_machine(
                tmp_path / f"machine{index}",
                namespace=spoke,
                address=lan.address_of(index),
                user="ubuntu",
                public_keys=key.with_suffix(".pub").read_text(),
                # Where Ray keeps its sessions, and its launcher the state of its machines.
                own_directories=[Path("/tmp/ray")],
            )
            hosts.append(stack.enter_context(machine))
            tables.append(
                f'[[machines]]\nhost = "{hosts[-1].address}"\nuser = "ubuntu"\nkey = "{key}"\n'
                f'host_key = "{hosts[-1].host_key}"\npython = "{sys.executable}"\n'
            )
        (tmp_path / "machines.toml").write_text("\n".join(tables))
        yield hosts


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`run(argv)` runs a command to its end, in the directory of `machines.toml`."""
    commands: list[Command] = []

    def make(argv: list[str]) -> Command:
        commands.append(Command(argv, tmp_path / "here", cwd=tmp_path))
        assert commands[-1].wait(TIMEOUT_S) == 0, commands[-1].stdout + commands[-1].stderr
        return commands[-1]

    yield make
    for command in commands:
        command.close()


def processes_of_ray(hosts: list[SshHost]) -> list[int]:
    """Ray's processes on these machines, recognized by the machines' home directories."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if b"raylet" in words and any(f"HOME={host.home}".encode() in environ for host in hosts):
            found.append(int(process.name))
    return found


def test_ray_up_starts_a_cluster_of_both_machines_from_the_written_file(tmp_path, machines, run):
    config = tmp_path / "config.toml"
    config.write_text('path_model = "150m"\n')
    up = run(argv_of("diloco provision --provider ssh --inventory machines.toml --pods 2 --deploy-only"))
    written = run(argv_of(WRITE_RAY, "--cpus-per-node", 2))
    (tmp_path / "cluster.yaml").write_text(written.stdout)
    name = yaml.safe_load(written.stdout)["cluster_name"]
    (export,) = re.findall(r"^# .* Ray's commands on the head need: (export .*)$", written.stdout, re.M)
    run([*RAY, *RAY_UP.split()[1:], "--yes", "--no-config-cache"])

    def num_nodes() -> int:
        status = f"{export} && {sys.executable} -m ray.scripts.scripts status"
        said = run([*RAY, "exec", "--no-config-cache", "cluster.yaml", status]).stdout
        nodes = said.partition("Active:")[2].partition("Pending:")[0]
        return sum(map(int, re.findall(r"^ *(\d+) local\.", nodes, re.MULTILINE)))

    wait_until(lambda: num_nodes() == 2, "both nodes", TIMEOUT_S)
    assert name and processes_of_ray(machines)
    run(argv_of(ALL_DOWN))
    assert processes_of_ray(machines) == []
    check_gone(up)


def test_alexnet_trains_over_both_machines(tmp_path, machines, run):
    """The example's own words, on fewer pictures and a narrower net."""
    text = (ROOT / "examples/alexnet.toml").read_text()
    (tmp_path / "alexnet.toml").write_text(
        f'{text}\npasses = 2\nmade = 1200\nwidth = 0.125\ndata = "{tmp_path / "data"}"\n'
    )
    up = run(argv_of("diloco provision --provider ssh --inventory machines.toml --pods 2 --deploy-only"))
    words = ALEXNET.replace("examples/alexnet.toml", "alexnet.toml").replace(
        "/shared", str(tmp_path / "shared")
    )
    said = run(argv_of(words, "--cpus-per-node", 2))
    addresses = [host.address for host in machines]
    placed = re.findall(r"one worker on each of 2 nodes: \w+ at ([\d.]+), \w+ at ([\d.]+)", said.stdout)
    assert placed and sorted(placed[0]) == addresses, said.stdout
    assert len(re.findall(r"test accuracy 0\.\d+ by 2 ranks$", said.stdout, re.M)) == 1, said.stdout
    run(argv_of(ALL_DOWN))
    assert processes_of_ray(machines) == []
    check_gone(up)
