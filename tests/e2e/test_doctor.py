"""`diloco doctor` on machines with planted faults: it names each fault and says how to fix it.

The faults are real: files, limits, clocks, disks and peers in the state that they would have on a faulty machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.app import exit_code
from diloco.cli.doctor import check_network
from diloco.options.trainer import parse_train_config
from peers.admission.secrets import AdmissionKey
from peers.net.identity import load_or_create
from peers.protocol.tokens import Token
from tests.e2e.test_readme import DOCTOR, DOCTOR_HERE
from tests.support.closed_swarm import closed_run
from tests.support.commands import DILOCO, ROOT, Command, model_directory, wait_until
from tests.support.documents import typed
from tests.support.namespaces import hub, why_not

RUN = "examined"
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
OF_A_MACHINE = {
    *("python", "packages", "torch", "gpu", "memory", "speed", "descriptors"),
    *("run directory", "state directory", "temporary files", "ports", "p2pd"),
}
OF_A_SWARM = {"initial peers", "admission", "swarm", "bandwidth", "libp2p port", "data port", "nat", "clock"}
TRILLIONS = {"hidden_size": 65536, "num_hidden_layers": 160, "intermediate_size": 262144}

Start = Callable[..., Command]
Findings = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with closed_run(tmp_path_factory.mktemp("coordinator"), RUN, admission=False) as found:
        yield found.address


def by_name(command: Command) -> Findings:
    """The checks by name, from the JSON output of a command in which at least one check fails."""
    assert command.wait() == 1, command.stdout + command.stderr
    said = json.loads(command.stdout)
    assert said["ok"] is False
    assert all(bool(check["fix"]) != (check["verdict"] == "pass") for check in said["checks"])
    return {check["name"]: check for check in said["checks"]}


def network(*flags: Any) -> Findings:
    """Run only the command's network checks, in this process, with these flags."""
    config, _ = parse_train_config(["--run-id", RUN, *LOOPBACK, *map(str, flags)])

    async def examine() -> Findings:
        return {finding.name: asdict(finding) async for finding in check_network(config.hv, 20)}

    return asyncio.run(examine())


def failing(findings: Findings) -> set[str]:
    return {name for name, check in findings.items() if check["verdict"] == "fail"}


def with_python_path(*directories: Path) -> tuple[str, ...]:
    return ("env", f"PYTHONPATH={os.pathsep.join(map(str, (*directories, ROOT)))}")


def test_a_machine_and_a_swarm_that_are_well_pass_line_by_line(start, coordinator, model):
    command = start(*typed(DOCTOR, "--run-id", RUN, *LOOPBACK, "--path-model", model, maddr=coordinator))
    assert command.wait() == 0, command.stdout + command.stderr
    lines = [line for line in command.stdout.splitlines() if line[:4] in ("pass", "warn", "fail")]
    found = {line[6:24].strip(): line[:4] for line in lines}
    assert found.keys() == OF_A_MACHINE | OF_A_SWARM
    # The swarm is on this same machine, so NAT cannot be judged; a batch of 512 is large for two cores.
    assert {name for name, verdict in found.items() if verdict != "pass"} <= {
        "nat",
        "bandwidth",
        "speed",
        "run directory",
    }
    assert command.stderr == ""
    assert not (command.directory / "runs").exists() and not (command.directory / "state").exists()


def test_faults_of_a_machine_are_found_all_at_once(start, coordinator, tmp_path):
    """torch is too old, the model too large, the state directory's parent a file, the disk full, and the clock half a
    minute behind (time.time() is patched in the doctor's process)."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    site = tmp_path / "site"
    (site / "torch-2.9.1.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n"
    (site / "torch-2.9.1.dist-info" / "METADATA").write_text(metadata)
    late = "import time\n_right = time.time\ntime.time = lambda: _right() - 30\n"
    (site / "sitecustomize.py").write_text(late)
    (tmp_path / "file").write_text("")
    (tmp_path / "disk").mkdir()
    full = f'mount -t tmpfs -o size=256k none {tmp_path}/disk && exec "$@"'
    around = (
        *("unshare", "-m", "sh", "-c", full, "sh"),
        *with_python_path(site),
        f"XDG_STATE_HOME={tmp_path}/file/state",
    )
    swarm = ("--initial-peers", coordinator, "--run-id", RUN, *LOOPBACK)
    more = ("--json", "--run-dir", tmp_path / "disk" / "run", *swarm)
    huge = model_directory(tmp_path / "huge", **TRILLIONS)
    found = by_name(start(*around, *typed(DOCTOR_HERE, *more, path_model=huge)))
    assert failing(found) == {"packages", "memory", "run directory", "state directory", "clock"}
    assert "torch 2.9.1 is installed" in found["packages"]["said"]
    assert found["packages"]["fix"].startswith('pip install "torch')
    assert "GiB of memory" in found["memory"]["said"] and found["memory"]["fix"].startswith("--path-model ")
    assert "No space left on device" in found["run directory"]["said"]
    assert found["run directory"]["fix"].startswith("--run-dir ")
    assert "cannot be written to" in found["state directory"]["said"]
    assert found["state directory"]["fix"].startswith("export XDG_STATE_HOME=")
    assert re.search(r"clock is (29|3[0-4])\.\d s behind the swarm's", found["clock"]["said"])
    assert found["clock"]["fix"] == "sudo timedatectl set-ntp true"


def test_too_few_files_are_found():
    script = (
        "import dataclasses, json\n"
        "from diloco.doctor.resources import check_descriptors\n"
        "print(json.dumps([dataclasses.astuple(one) for one in check_descriptors()]))\n"
    )
    limited = ("sh", "-c", 'ulimit -Hn 256; ulimit -n 256; exec "$@"', "sh")
    answer = subprocess.run(
        [*limited, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    ((name, verdict, said, mend),) = json.loads(answer.stdout)
    assert (name, verdict) == ("descriptors", "fail")
    assert "may open 256 files" in said and mend.startswith("ulimit -Hn")


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = network("--hv.data-port", port)
    assert failing(found) == {"ports"}
    assert f"port {port} is in use" in found["ports"]["said"]
    assert "--hv.data-port 0" in found["ports"]["fix"]


def hivemind_without_p2pd(site: Path) -> Path:
    """Make `site`, for PYTHONPATH, with a hivemind that lacks p2pd. Returns the path at which p2pd would be."""
    import hivemind

    real, ours = Path(hivemind.__file__).parent, site / "hivemind"
    (ours / "hivemind_cli").mkdir(parents=True)
    for entry in (*real.iterdir(), *(real / "hivemind_cli").iterdir()):
        if entry.name not in ("hivemind_cli", "p2pd"):
            (ours / entry.relative_to(real)).symlink_to(entry)
    return ours / "hivemind_cli" / "p2pd"


CHECK_P2PD = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from diloco.doctor.p2pd import check_p2pd
from diloco.options.flags import HvConfig
from peers.net.identity import load_or_create

own, program = load_or_create(Path(sys.argv[1]) / "own.key"), Path(sys.argv[2])
for content in (None, "#!/bin/sh\\necho 'Illegal instruction'\\nexit 132\\n"):
    if content:
        program.write_text(content)
        program.chmod(0o755)
    finding = asyncio.run(check_p2pd(HvConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",)), own))
    print(json.dumps(dataclasses.astuple(finding)))
"""


def test_a_p2pd_that_is_missing_or_does_not_start_is_found(tmp_path):
    """Runs this one check, in a process that imports the planted hivemind."""
    program = hivemind_without_p2pd(tmp_path / "site")
    argv = [
        *with_python_path(tmp_path / "site"),
        sys.executable,
        "-c",
        CHECK_P2PD,
        str(tmp_path),
        str(program),
    ]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    said = ("p2pd is missing or not executable", "p2pd could not start: Illegal instruction")
    for line, words in zip(answer.stdout.splitlines(), said, strict=True):
        name, verdict, found, mend = json.loads(line)
        assert (name, verdict, words in found) == ("p2pd", "fail", True), found
        assert mend == "pip install --force-reinstall --no-deps hivemind==1.1.12"


def test_a_peer_that_is_not_there_is_found():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
        found = network("--initial-peers", address)
    assert failing(found) == {"initial peers"}
    assert f"{address}: connection refused" in found["initial peers"]["said"]
    assert (
        f"diloco dht start --host-maddrs /ip4/0.0.0.0/tcp/{port} --run-id {RUN}"
        in found["initial peers"]["fix"]
    )


def test_a_port_that_leads_nowhere_is_found(coordinator):
    """As on a pod whose provider announces a port mapping that does not work."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        announced = ("--hv.announce-data-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
        found = network("--initial-peers", coordinator, *announced)
    assert failing(found) == {"data port"}
    assert f"{port} is not reached by the coordinator" in found["data port"]["said"]
    assert "connection refused" in found["data port"]["said"]
    assert "--hv.announce-data-maddrs" in found["data port"]["fix"]


@pytest.mark.exhaustive
def test_a_firewall_in_front_of_one_port_is_found(start, model):
    """Two machines in network namespaces; the doctor's drops incoming packets for its data port."""
    if reason := why_not():
        pytest.skip(reason)
    with hub(1) as machines:
        (ours,) = machines.spokes
        there = machines.addresses[ours]
        in_ours, in_middle = (("ip", "netns", "exec", name) for name in (ours, machines.middle))
        for rule in (
            *("add pref 100 lookup local", "del pref 0"),
            "add pref 10 iif up0 ipproto tcp dport 30003 blackhole",
        ):
            subprocess.run(["ip", "-n", ours, "rule", *rule.split()], check=True)
        coordinator = start(
            *(*in_middle, *DILOCO, "dht", "start", "--host-maddrs", f"/ip4/{there}/tcp/30001"), name="dht"
        )
        wait_until(lambda: "\n" in coordinator.stdout, "its address", command=coordinator)
        maddr = coordinator.stdout.splitlines()[0].removeprefix("--initial-peers ")
        named = ("--hv.host-maddrs", "/ip4/0.0.0.0/tcp/30002", "--hv.data-port", 30003)
        command = start(*in_ours, *typed(DOCTOR, "--json", *named, "--path-model", model, maddr=maddr))
        found = by_name(command)
    assert failing(found) == {"data port"}
    assert "no answer in time" in found["data port"]["said"]
    assert found["data port"]["fix"].startswith("sudo ufw allow 30003/tcp")
    assert found["libp2p port"]["said"].startswith("30002 is reached by the coordinator")
    assert found["nat"]["said"].startswith("direct: seen as 10.91.1.2, this machine's own address")


def test_a_token_that_has_expired_and_that_nobody_renews_is_found(quiet_bootstrap, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("diloco.doctor.swarm.ADMISSION_TIMEOUT_S", 0.5)
    key = AdmissionKey.new()
    (tmp_path / "secret").write_text(key.secret.to_text())
    identity = load_or_create(tmp_path / "state" / "diloco" / RUN / "0.key")
    now = time.time()
    token = Token(run_id=RUN, peer_id=identity.peer_id, not_before=now - 600, expires=now - 60)
    identity.path.with_suffix(".token").write_bytes(token.encode(key.private_key))
    identity.release()
    found = network("--initial-peers", quiet_bootstrap, "--swarm-secret-file", tmp_path / "secret")
    assert failing(found) == {"admission"}
    assert "token has expired" in found["admission"]["said"]
    assert found["admission"]["fix"].startswith(f"diloco dht start --admission --run-id {RUN} ")


def test_a_swarm_that_asks_for_a_secret_says_so_to_who_has_none(tmp_path):
    with closed_run(tmp_path, RUN) as closed:
        found = network("--initial-peers", closed.address)
        assert failing(found) == {"admission"}
        assert found["admission"]["fix"].startswith("--swarm-secret-file ")
        found = network("--initial-peers", closed.address, "--swarm-secret-file", closed.secret_file)
        assert failing(found) == set()
        # A bandwidth was measured, so the peer was admitted; its value depends on the machine's load.
        assert "MB/s" in found["bandwidth"]["said"]
        assert found["data port"]["verdict"] == "pass"


def test_a_rollout_peer_generates_in_one_process_whatever_nproc_per_node_says(monkeypatch, tmp_path, capfd):
    """Its batch needs not divide by the number of training processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ("doctor", "--role", "rollout", "--rollout", "hf", "--nproc-per-node", "3")
    assert exit_code(list(words)) == 0, capfd.readouterr()


@pytest.mark.parametrize("flags", [("--initial-peers", "here"), ("--worker", "no-such-program")])
def test_wrong_flags_are_no_finding(flags, start):
    command = start(*DILOCO, "doctor", *flags)
    assert command.wait() == 2
    assert command.stdout == ""
