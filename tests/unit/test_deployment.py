"""Dockerfile and systemd unit, read. tests/pods/test_image.py carries the Dockerfile out."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from diloco.cli.app import make_app
from tests.support.commands import ROOT
from tests.support.image import instructions, values

UNIT = ROOT / "deploy/diloco-peer.service"


def test_all_that_is_copied_into_the_image_is_there_and_let_through():
    ignored = (ROOT / ".dockerignore").read_text().split()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    copied = {word for copy in values("COPY") if not copy.startswith("--from") for word in copy.split()[:-1]}
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)
    # What an installation needs of the repository is copied.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= copied
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
        "include"
    ]
    tops = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    assert {top for top in tops if any(fnmatch.fnmatch(top, pattern) for pattern in packages)} <= copied


def test_what_the_image_installs_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = next(rest for rest in values("ARG") if rest.startswith("EXTRAS=")).partition("=")[2]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    version = re.findall(r"python:(3\.\d+)-", values("FROM")[0])[0]
    assert version in ("3.11", "3.12")


def test_the_image_runs_as_a_user_without_rights_who_owns_its_volume():
    order = [name for name, _ in instructions()]
    made = next(rest for rest in values("RUN") if rest.startswith("useradd"))
    assert values("USER") == [made.split()[-1]] and values("USER") != ["root"]
    assert f"--home-dir {values('VOLUME')[0]}" in made and "--create-home" in made
    # Nothing is installed by that user, and nothing runs as root after it.
    assert "RUN" not in order[order.index("USER") :]


def test_each_shell_command_of_the_image_parses():
    for command in values("RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)


def test_what_the_image_starts_is_a_command_of_ours():
    entry, arguments = (re.findall(r'"([^"]+)"', values(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["diloco"] and arguments[0] in list(make_app())


def unit_values() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_unit_starts_a_peer_again_unless_its_user_has_to_correct_something():
    found = unit_values()
    program, verb, *flags = shlex.split(found["ExecStart"])
    assert program.endswith("/bin/diloco") and verb in list(make_app())
    # Otherwise each of the starts during an outage would leave a run directory.
    assert flags == ["--run-dir", "runs/%N", "$DILOCO_PEER_FLAGS"]
    assert (found["Restart"], found["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert found["StartLimitIntervalSec"] == "0", "an outage may last longer than any number of starts"
    assert found["User"] == "diloco"
    from peers.net.dht.descriptors import LEAST

    assert int(found["LimitNOFILE"]) > LEAST
    from diloco.cli.interrupts import CLEAN_UP_TIMEOUT_S

    assert int(found["TimeoutStopSec"]) > CLEAN_UP_TIMEOUT_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    """The unit's program is replaced by one that exists on this machine."""
    text = UNIT.read_text().replace(unit_values()["ExecStart"].split()[0], sys.executable)
    (tmp_path / UNIT.name).write_text(text)
    answer = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT.name)], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in (answer.stdout + answer.stderr).splitlines() if UNIT.name in line]
    assert (answer.returncode, ours) == (0, [])
