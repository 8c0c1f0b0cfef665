"""How long each phase takes from the plan to the first commit, on three SSH machines that have only Python.

`pytest -m pods --exhaustive -s tests/pods/test_first_epoch.py` prints a table. DILOCO_ON_MACHINES="NAME=VALUE …" sets
environment variables on the machines, such as UV_FIND_LINKS where PyTorch's own index cannot be reached.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.support.commands import ROOT, check_gone, model_directory
from tests.support.pods_commands import DOWN, tiny_training
from tests.support.ssh_machines import SSHD, client_key, inventory, needs_rsync, ssh_host

pytestmark = [
    pytest.mark.pods,
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync()),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="needs OpenSSH's server"),
]

TIMEOUT_S = 1200.0
PHASES = {
    "code and environments": "sending code",
    "the DHT": "starting the DHT",
    "peers and the first epoch": "starting its peer",
    "": r"epoch \d+ averaged by 3 peers",
}
"""The message that marks the beginning of each phase."""


def test_three_machines_with_nothing_on_them_train_together(tmp_path, run):
    key, variables = client_key(tmp_path), os.environ.get("DILOCO_ON_MACHINES", "").split()
    public = key.with_suffix(".pub").read_text()
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(ssh_host(tmp_path / f"machine{index}", public, variables=variables))
            for index in range(3)
        ]
        inventory(tmp_path / "machines.toml", hosts, key, gpu_count="")
        where = ("--provider", "ssh", "--inventory", tmp_path / "machines.toml", "--source", ROOT)
        flags = tiny_training(model_directory(tmp_path / "model"))
        began = datetime.now()
        up = run("diloco provision --pods 3", *where, "--", *flags, timeout_s=TIMEOUT_S)
        assert up.code == 0, up.stderr
        print(table(up.stderr, began))
        down = run(DOWN)
        assert down.code == 0, down.stderr
        check_gone(up)


def table(said: str, began: datetime) -> str:
    """Seconds by phase. A phase begins at its first message; the last one ends at the last pod's averaged epoch."""
    lines, previous, name = [], began, "plan and first contact"
    for following, words in PHASES.items():
        found = re.findall(rf"^(\d\d:\d\d:\d\d) \S+ +.*{words}", said, re.M)
        assert found, f"nobody said: {words}\n{said}"
        clock = datetime.strptime(found[0 if following else -1], "%H:%M:%S")
        at = began.replace(hour=clock.hour, minute=clock.minute, second=clock.second)
        at += timedelta(days=at < began - timedelta(seconds=2))
        lines.append(f"{(at - previous).total_seconds():6.0f} s  {name}")
        previous, name = at, following
    return "\n".join([*lines, f"{(previous - began).total_seconds():6.0f} s  in all"])
