"""README.md, CONTRIBUTING.md and the tutorials as a newcomer uses them: run every command, look at every file.

Commands are taken from the documents. `typed` and each test state what they change: free ports, a model that trains in
milliseconds, and flags that end a training early. A command that several documents contain is run once. Commands that
need other machines are only parsed, in tests/unit/test_documents.py.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.train.metrics_file import Tail
from peers.daemon.link import LINK_ENV
from tests.support import checkpoint_commands, pods_commands
from tests.support.commands import ROOT, Command, wait_until
from tests.support.documents import CONTRIBUTING, PAGES, README, blocks, commands, names_in_table, typed
from tests.support.exhaustive import exhaustive_but
from tests.support.scripted_daemon import ScriptedDaemon, joining

DEMO = "make demo"
RUN = ".venv/bin/diloco run --peers 3 --max-steps 200"
INSTALL = (
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "pip install --constraint constraints.txt --editable '.[dashboard,data]'",
)
DHT = "diloco dht start --host-maddrs /ip4/0.0.0.0/tcp/30001"
FIRST = "diloco peer --initial-peers <maddr> --path-model 150m --hv.local-steps 100"
SECOND = "diloco peer --initial-peers <maddr>"
SLOW = (
    "diloco peer --initial-peers <maddr> --path-model 150m --hv.local-steps 100 --hv.compression int4 "
    "--hv.num-fragments 4 --hv.overlap-steps 5"
)
UNEVEN = (
    "diloco peer --initial-peers <maddr> --path-model 150m --hv.local-time auto --hv.aggregation trimmed-mean"
)
POD = (
    "diloco peer --initial-peers <maddr> --hv.host-maddrs /ip4/0.0.0.0/tcp/30002 "
    "--hv.announce-maddrs /ip4/203.0.113.7/tcp/41002 --hv.data-port 30003 "
    "--hv.announce-data-maddrs /ip4/203.0.113.7/tcp/41003"
)
CLOSED_DHT = "diloco dht start --host-maddrs /ip4/0.0.0.0/tcp/30001 --admission"
ADMITTED = "diloco peer --initial-peers <maddr> --swarm-secret-file swarm-secret"
BAN = "diloco peers ban <peer-id> --initial-peers <maddr>"
LIST_BANS = "diloco peers list --initial-peers <maddr>"
UNBAN = "diloco peers unban <peer-id> --initial-peers <maddr>"
NEW_SECRET = "diloco peers new-secret"
DOCTOR = "diloco doctor --initial-peers <maddr>"
DOCTOR_HERE = ".venv/bin/diloco doctor --path-model 2m"
SIMULATE = (
    "diloco simulate --params 10e9 --peers 14 --gpu H100 --bandwidth 500mbit --rtt 80ms --local-steps 100 "
    "--codec int8 --fragments 10 --overlap 5 --price 16 --plot plan.svg"
)
STATUS = "diloco status --initial-peers <maddr>"
WATCH = "diloco status --initial-peers <maddr> --watch"
DASHBOARD = "diloco dashboard --initial-peers <maddr>"
OWN_LOOP = (
    "diloco peer --initial-peers <maddr> --hv.galaxy-size 2 --hv.local-steps 20 --hv.outer-lr 0.8 "
    '--hv.outer-momentum 0.5 --worker "python loop.py"'
)
TORCHRUN = (
    "torchrun --standalone --nproc_per_node=2 diloco/train_fsdp.py --per-device-train-batch-size 4 "
    "--total-batch-size 16 --lr 1e-2 --path-model tests/models/llama-2m-fresh --metric-logger-type dummy "
    "--no-torch-compile --fake-data --max-steps 5 --hv.initial-peers <maddr> --hv.galaxy-size 2 "
    "--hv.world-rank 0 --hv.local-steps 2"
)
SLURM = "diloco launch config.toml 2 --engine slurm --gpus-per-node 8 --time-limit 12:00:00 --dry-run"
PBS = "diloco launch config.toml 2 --engine pbs --gpus-per-node 8 --cpus-per-node 96 --dry-run"
GRPO_MODEL = "python -m benchmarks.format_model tiny-grpo"
GRPO = (
    "diloco run --mode grpo --path-model tiny-grpo --rollout hf "
    "--dataset reasoning-gym:chain_sum,min_terms=1,max_terms=1,min_digits=1,max_digits=1 "
    "--lr 2e-3 --warmup-steps 0 --total-steps 60 --hv.local-steps 5 --hv.outer-lr 0.9 --hv.outer-momentum 0.3 "
    "--grpo.max-completion-length 32"
)
ADAPTERS = GRPO.replace("--lr 2e-3", "--lr 1e-2") + " --grpo.lora-rank 8"
ROLLOUT_LEARNER = "diloco peer --initial-peers <maddr> --mode grpo --path-model tiny-grpo --rollout peers"
ROLLOUT_PEER = "diloco peer --initial-peers <maddr> --role rollout --rollout hf --path-model tiny-grpo"
IN_CONTRIBUTING = {
    ".venv/bin/python -m pytest tests/unit/peers/core/test_rounds.py -k leader",
    "make fast",
    ".venv/bin/python -m pytest tests/swarm",
    ".venv/bin/python -m pytest --exhaustive tests/swarm/test_faults.py",
    ".venv/bin/python -m benchmarks.inner_loop --quick",
    ".venv/bin/diloco run --peers 3 --max-steps 100",
    ".venv/bin/python -m diloco.sim.replay 17",
    "DILOCO_POD_SCHEDULES=10000 .venv/bin/python -m pytest tests/unit/provisioning/renting/test_no_pod_is_lost.py",
    ".venv/bin/python -m pytest --exhaustive tests/pods/test_conformance.py",
}

KEYS = {
    "step": {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "time"},
    "epoch": {
        *("epoch", "step", "anchor_digest", "num_peers", "contributors"),
        *("sent_bytes", "received_bytes", "round_s", "wait_s", "time"),
    },
    "eval": {"step", "epoch", "loss", "bits_per_byte", "time"},
    "event": {"event", "time"},
}
DOCUMENTED = {
    kind: names_in_table(PAGES["docs/api.md"], f"<!-- test: record {kind} -->") for kind in ("step", "eval")
} | {
    "epoch": {"step"}
    | names_in_table(PAGES["docs/api.md"], "<!-- test: fields diloco.outer.diloco.Commit -->")
}
"""The keys that docs/api.md lists for the records of a pretraining."""
STATUS_KEYS = {
    *("peer_id", "world_rank", "state", "epoch", "step", "head"),
    *("anchor_digest", "tokens_per_s", "last_seen_s"),
}


def flags_of(text: str) -> set[str]:
    """All `--flags` of a command or of a help text."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", text))


def output_of(*argv: Any) -> str:
    return subprocess.run([*map(str, argv)], cwd=ROOT, check=True, capture_output=True, text=True).stdout


Start = Callable[..., Command]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`run(argv, name, cwd=…)` starts a command in a directory of that name; all are ended after this module."""
    base, started = tmp_path_factory.mktemp("newcomer"), []

    def make(argv: list[str], name: str, cwd: Path | None = None) -> Command:
        started.append(Command(argv, base / name, cwd))
        return started[-1]

    yield make
    for command in started:
        command.close()


@pytest.fixture(scope="module")
def coordinator(run: Start) -> Command:
    """The README's coordinator, on a free port."""
    command = run(typed(DHT, host_maddrs="/ip4/127.0.0.1/tcp/0"), "dht")
    wait_until(lambda: "\n" in command.stdout, "the line to paste", command=command)
    return command


@pytest.fixture(scope="module")
def maddr(coordinator: Command) -> str:
    flag, address = coordinator.stdout.splitlines()[0].split()
    assert flag == "--initial-peers"
    return address


@pytest.fixture(scope="module")
def pair(run: Start, maddr: str, model: Path) -> tuple[Command, Command, dict[str, Any], str]:
    """The README's two peers after their training, and `diloco status` (JSON and table) while the first one waited.

    They train a tiny model on random tokens for 300 steps, in place of the model of 150 million parameters.
    """
    short = ("--fake-data", "--seq-length", 64, "--total-batch-size", 4, "--eval-tokens", 64)
    more = ("--max-steps", 300, "--galaxy-size", 2, *short)
    first = run(typed(FIRST, *more, maddr=maddr, path_model=model), "first")
    wait_until(lambda: "this peer: waiting for peers" in first.stdout, "that it waits", command=first)
    status: dict[str, Any] = {"peers": []}
    looks = 0
    while not any(peer["state"] == "waiting" for peer in status["peers"]):
        looks += 1
        look = run(typed(STATUS, "--json", maddr=maddr), f"look{looks}")
        table = run(typed(STATUS, maddr=maddr), f"table{looks}")
        for command in (look, table):
            assert command.wait() == 0, command.stderr
        status = json.loads(look.stdout)
        assert first.code is None, first.stderr
        assert looks < 20, status
    # Join through the address that the first peer prints, as one does after the coordinator has died.
    printed = re.search(r"join through this one: --initial-peers (\S+)", first.stdout)
    assert printed is not None, first.stdout
    second = run(typed(SECOND, maddr=printed.group(1)), "second")
    for peer in (first, second):
        assert peer.wait() == 0, peer.stderr
    return first, second, status, table.stdout


def run_dir_of(command: Command) -> Path:
    """The run directory that the command prints; it is where the README says."""
    path = Path(command.stdout.splitlines()[0].removeprefix("run directory: "))
    assert path.parent == command.directory / "runs"
    assert re.fullmatch(r"\d{8}-\d{6}-\w+", path.name)
    return path


def records_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [record for record in Tail(run_dir / "metrics.jsonl").read() if record["kind"] == kind]
    assert all(KEYS[kind] <= record.keys() for record in found)
    if kind in DOCUMENTED:
        assert all(DOCUMENTED[kind] | {"kind", "time"} == record.keys() for record in found)
    return [dict(record) for record in found]


def check_run_dir(path: Path) -> None:
    """Check what the README promises about every run directory that a trainer writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for kind in KEYS:
        assert records_of(path, kind) or kind == "eval"
    assert tomllib.loads((path / "config.toml").read_text())["path_model"]
    assert list((path / "logs").glob("*.log"))
    saved = AutoModelForCausalLM.from_pretrained(path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    assert tokenizer.decode(tokenizer("hi", add_special_tokens=False)["input_ids"]) == "hi"
    assert saved.config.vocab_size == len(tokenizer)


def digests(run_dir: Path) -> dict[int, str]:
    return {record["epoch"]: record["anchor_digest"] for record in records_of(run_dir, "epoch")}


def test_the_documents_have_no_command_that_is_not_tested_here():
    known = {DEMO, *INSTALL, DHT, FIRST, SECOND, SLOW, UNEVEN, POD, STATUS, OWN_LOOP, TORCHRUN}
    known |= {GRPO_MODEL, GRPO, ADAPTERS, SLURM, PBS, RUN, SIMULATE}
    known |= {WATCH, DASHBOARD}
    # These are run by test_admission.py, test_doctor.py, test_recipes.py and test_rollout_peers.py, and the
    # commands for pods by tests/pods.
    known |= {
        ROLLOUT_LEARNER,
        ROLLOUT_PEER,
        CLOSED_DHT,
        ADMITTED,
        BAN,
        LIST_BANS,
        UNBAN,
        NEW_SECRET,
        DOCTOR,
        DOCTOR_HERE,
        ".venv/bin/diloco run --config recipes/laptop.toml",
    } | pods_commands.ALL
    known |= checkpoint_commands.ALL
    typed_in = {command for text in (README, *PAGES.values()) for command in commands(text)}
    assert typed_in == known
    assert set(re.findall(r"^\| .* \| `(.*)` \|$", CONTRIBUTING, re.MULTILINE)) == IN_CONTRIBUTING
    assert commands(CONTRIBUTING) == []


def test_the_documents_name_only_files_that_exist():
    for text in (README, CONTRIBUTING):
        links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
        paths = re.findall(r"`((?:peers|diloco|tests|docs|benchmarks)/[\w./-]+)`", text)
        assert all((ROOT / path).exists() for path in (*links, *paths)), (links, paths)


def test_make_demo_runs_a_command_whose_flags_exist():
    last = output_of("make", "--no-print-directory", "-n", "demo").splitlines()[-1]
    assert last.startswith(".venv/bin/diloco run ")
    assert flags_of(last) <= flags_of(output_of(*typed("diloco run --help-all")))


@pytest.mark.parametrize("target", ["test", "test-all", "check", "fast", "docs"])
def test_the_make_targets_of_the_documents_exist(target):
    assert f"make {target}" in README + CONTRIBUTING
    assert ".venv/bin/" in output_of("make", "-n", target)


def test_the_commands_of_contributing_find_what_they_name():
    for command in IN_CONTRIBUTING:
        if "pytest" in command:
            path, *rest = re.findall(r"tests/\S+|(?<=-k )\w+", command)
            assert (ROOT / path).exists()
            assert not rest or re.search(rf"^def test_\w*{rest[0]}", (ROOT / path).read_text(), re.MULTILINE)
        elif ".sim." in command:
            assert output_of(sys.executable, *shlex.split(command)[1:]).startswith("seed 17")
        elif "benchmarks" in command:
            help_text = output_of(sys.executable, *shlex.split(command)[1:-1], "--help")
            assert flags_of(command) <= flags_of(help_text)


def test_every_verb_of_the_readme_has_a_help():
    section = README.partition("## Commands\n")[2].partition("\n\n`--help`")[0]
    verbs = re.findall(r"`(diloco .*?)`", section)
    assert sorted(verbs) == sorted(
        [
            *("diloco run", "diloco dht start", "diloco peer", "diloco export", "diloco ckpt rebuild"),
            *("diloco grpo-sweep", "diloco doctor", "diloco simulate", "diloco status", "diloco dashboard"),
            *("diloco provision", "diloco pods", "diloco experiments", "diloco launch", "diloco peers"),
        ]
    )
    for verb in verbs:
        assert f"Usage: {verb} " in output_of(*typed(f"{verb} --help"))


def test_python_m_diloco_is_diloco():
    version = output_of(sys.executable, "-m", "diloco", "--version")
    assert version == output_of(*typed("diloco --version"))
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version)


def test_two_peers_train_what_the_first_one_says(pair):
    run_dirs = [run_dir_of(peer) for peer in pair[:2]]
    for path in run_dirs:
        check_run_dir(path)
        assert [record["step"] for record in records_of(path, "epoch")] == [100, 200, 300]
        assert all(record["contributors"] == [0, 1] for record in records_of(path, "epoch"))
    assert digests(run_dirs[0]) == digests(run_dirs[1])
    before, after = (record for path in run_dirs for record in records_of(path, "eval"))
    assert (before["step"], after["step"]) == (0, 300)


def test_a_peer_tells_of_its_epochs_and_of_nothing_that_need_not_worry(pair):
    for peer in pair[:2]:
        assert "epoch 3 averaged by 2 peers" in peer.stdout
        assert "training is done" in peer.stdout.splitlines()
        assert peer.stdout.splitlines()[-1].startswith("everything ")
        assert peer.stderr == ""


def test_status_is_as_programs_may_rely_on(pair):
    status = pair[2]
    assert (status["run_id"], status["epoch"]) == ("diloco", 0)
    (peer,) = status["peers"]
    assert peer.keys() >= STATUS_KEYS
    # It waits for the other peer: the run has not begun, so there is no anchor yet.
    assert (peer["world_rank"], peer["step"], peer["head"], peer["anchor_digest"]) == (0, 0, "", "")
    assert status["certificates"] == {}
    assert "waiting" in pair[3] and "run diloco: epoch 0, 1 peer" in pair[3]


def test_a_swarm_is_watched_until_ctrl_c(run: Start, maddr: str) -> None:
    """Output goes to a pipe, and the port is a free one; tests/e2e/test_dashboard.py opens the page in a browser."""
    pytest.importorskip("uvicorn", reason="needs the extra `dashboard`: pip install -e '.[dev]'")
    watch = run(typed(WATCH, maddr=maddr), "watch")
    page = run(typed(DASHBOARD, "--port", 0, maddr=maddr), "dashboard")
    wait_until(lambda: watch.stdout.count("run diloco: epoch") >= 2, "a second look", command=watch)
    wait_until(
        lambda: re.search(r"^dashboard: http://127.0.0.1:\d+/\?token=\S+$", page.stdout, re.M), "its address"
    )
    for command in (watch, page):
        command.interrupt()
    for command in (watch, page):
        assert (command.wait(), command.stderr) == (130, "")


def test_the_coordinator_tells_who_came_and_went(pair, coordinator):
    wait_until(lambda: coordinator.stdout.count(" left at ") >= 2, "two that left", command=coordinator)
    # The peers train for less than a second, so the coordinator may have polled only before and after.
    assert coordinator.stdout.count(" joined, ") >= 2
    assert "lost" not in coordinator.stdout
    assert coordinator.stderr == ""


@pytest.mark.exhaustive
def test_torchrun_with_swarm_flags_is_a_peer(pair, run, maddr):
    """Two torchrun peers in the repository's root, on shorter sequences. `pair` has ended: its run id is reused."""
    peers = []
    for rank in (0, 1):
        more = ("--seq-length", 32, "--eval-tokens", 64, "--run-dir", pair[0].directory / f"torchrun{rank}")
        argv = typed(TORCHRUN, *more, maddr=maddr, hv__world_rank=rank)
        peers.append(run(argv, f"torchrun{rank}", cwd=ROOT))
    for peer in peers:
        assert peer.wait() == 0, peer.stderr
    run_dirs = [pair[0].directory / f"torchrun{rank}" for rank in (0, 1)]
    for path in run_dirs:
        check_run_dir(path)
    assert digests(run_dirs[0]) == digests(run_dirs[1])
    assert list(digests(run_dirs[0])) == [1, 2, 3]


@pytest.mark.exhaustive
def test_on_slow_links_fragments_travel_while_training_goes_on(pair, run, maddr, model):
    """For 80 steps, and with two fragments instead of four: the tiny model has too few layers for more."""
    short = ("--fake-data", "--seq-length", 64, "--total-batch-size", 4, "--eval-tokens", 64)
    more = ("--max-steps", 80, "--galaxy-size", 2, *short)
    fewer = {"hv__num_fragments": 2, "hv__local_steps": 40}
    peers = [
        run(typed(SLOW, *more, maddr=maddr, path_model=model, **fewer), f"slow{number}") for number in (0, 1)
    ]
    for peer in peers:
        assert peer.wait() == 0, peer.stderr
    run_dirs = [run_dir_of(peer) for peer in peers]
    assert digests(run_dirs[0]) == digests(run_dirs[1])
    records = records_of(run_dirs[0], "epoch")
    assert [(record["epoch"], record["fragment"]) for record in records] == [
        (epoch, (epoch - 1) % 2) for epoch in range(1, 6)
    ]
    uncompressed = 4 * 24_000
    assert all(record["sent_bytes"] < uncompressed / 7 for record in records)


@pytest.mark.exhaustive
def test_a_time_budget_ends_epochs_before_their_steps_are_done(run, maddr, model):
    """Two seconds in place of two minutes, which end before the thousand steps of an epoch. Three peers, because the
    trimmed mean needs at least three."""
    short = ("--fake-data", "--seq-length", 64, "--total-batch-size", 64, "--eval-tokens", 64)
    more = ("--hv.local-steps", 1000, "--max-steps", 4000, "--run-id", "uneven", "--galaxy-size", 3, *short)
    typed_by_all = typed(UNEVEN, *more, maddr=maddr, path_model=model, hv__local_time="2s")
    peers = [run([*typed_by_all, "--world-rank", str(rank)], f"uneven{rank}") for rank in range(3)]
    found = []
    for peer in peers:
        assert peer.wait() == 0, peer.stderr
        run_dir = run_dir_of(peer)
        found.append({e["epoch"]: e for e in records_of(run_dir, "epoch")})
        assert all(record["step"] == 1000 * epoch for epoch, record in found[-1].items())
        assert len(records_of(run_dir, "step")) < 2000
    # On a busy machine a peer may be late for an epoch; the other two then commit it.
    assert set().union(*found) == {1, 2, 3, 4}
    for epoch in set().union(*found):
        assert len({told[epoch]["anchor_digest"] for told in found if epoch in told}) == 1
    assert any(record["contributors"] == [0, 1, 2] for record in found[0].values())


@pytest.mark.exhaustive
def test_a_pod_announces_the_ports_it_is_reached_by(run, maddr, model):
    """Inside ports are free ones and the announced ports lead nowhere; the peer only has to wait for another one."""
    short = ("--fake-data", "--path-model", model, "--galaxy-size", 2, "--run-id", "pod", "--world-rank", 0)
    inside = {"hv__host_maddrs": "/ip4/127.0.0.1/tcp/0", "hv__data_port": 0}
    peer = run(typed(POD, *short, maddr=maddr, **inside), "pod")
    wait_until(lambda: "joined the swarm" in peer.stdout, "the pod in the swarm", command=peer)
    found: list[dict[str, Any]] = []
    looks = 0
    while not found:
        look = run(typed(STATUS, "--run-id", "pod", "--json", maddr=maddr), f"pod-look{looks}")
        assert look.wait() == 0, look.stderr
        found, looks = json.loads(look.stdout)["peers"], looks + 1
        assert looks < 20
    assert found[0]["endpoints"] == ["/ip4/203.0.113.7/tcp/41003"]
    assert all(address.startswith("/ip4/203.0.113.7/tcp/41002/p2p/") for address in found[0]["maddrs"])


@pytest.fixture(scope="module")
def loop() -> str:
    """The README's example."""
    _, _, marked = README.partition("<!-- test: example -->")
    return blocks(marked, "python")[0]


def test_the_example_trains_alone(run, loop, tmp_path):
    (tmp_path / "loop.py").write_text(loop)
    command = run(typed("python loop.py"), "alone", cwd=tmp_path)
    assert command.wait() == 0, command.stderr
    assert re.fullmatch(r"loss 0\.\d{4} after 0 epochs\n", command.stdout)
    assert command.stderr == ""


def test_the_example_ends_with_the_others_after_its_worker_was_restarted(
    run, loop, tmp_path, monkeypatch
) -> None:
    """It finds the swarm five steps into its eighteenth epoch of 20."""
    (tmp_path / "loop.py").write_text(loop)
    monkeypatch.setenv(LINK_ENV, str(tmp_path / "link"))
    with ScriptedDaemon(tmp_path / "link", joining(17, 0.1, local_step=5), local_steps=20):
        command = run(typed("python loop.py"), "restarted", cwd=tmp_path)
        assert command.wait() == 0, command.stderr
    assert command.stdout.endswith(" after 20 epochs\n")


@pytest.mark.exhaustive
def test_the_example_is_a_worker_of_two_peers(pair, run, loop, maddr):
    """The loss begins at 8. The one that is printed is of the last batch, before the last averaging."""
    peers = []
    for name in ("loop0", "loop1"):
        (pair[0].directory.parent / name).mkdir()
        (pair[0].directory.parent / name / "loop.py").write_text(loop)
        peers.append(run(typed(OWN_LOOP, maddr=maddr), name))
    for peer in peers:
        assert peer.wait() == 0, peer.stderr
        found = re.search(r"^loss (0\.\d{4}) after 20 epochs$", peer.stdout, re.MULTILINE)
        assert found and float(found[1]) < 0.5, peer.stdout
        assert "epoch 20 averaged by 2 peers" in peer.stdout


@pytest.mark.parametrize("num_peers", exhaustive_but((2,), (2, 3)))
def test_a_whole_swarm_on_one_machine_ends_with_a_report_and_its_files(run, num_peers):
    """The README's own flags, but for 6 steps, and evaluated on little of the held-out text."""
    more = ("--hv.local-steps", 2, "--eval-tokens", 2048)
    command = run(typed(RUN, *more, max_steps=6, peers=num_peers), f"swarm-of-{num_peers}")
    assert command.wait() == 0, command.stdout + command.stderr
    path = run_dir_of(command)
    assert "all peers held bit-identical anchors after every epoch" in command.stdout
    assert "3 epochs" in command.stdout
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    for rank in range(num_peers):
        check_run_dir(path / f"peer-{rank}")
        assert digests(path / f"peer-{rank}") == digests(path / "peer-0")
    assert command.stderr == ""


@pytest.mark.exhaustive
def test_a_plan_is_made_as_written(run: Start, tmp_path: Path) -> None:
    command = run(typed(SIMULATE, "--epochs", 3), "plan", cwd=tmp_path)
    assert command.wait() == 0, command.stderr
    assert "per billion tokens" in command.stdout
    assert "int8, one fragment, blocking" in (tmp_path / "plan.svg").read_text()


@pytest.mark.exhaustive
def test_reinforcement_runs_as_written(run: Start) -> None:
    """Four steps, on a model that was pretrained for two; tests/e2e/test_grpo.py checks that a model learns."""
    made = run(typed(GRPO_MODEL, "--steps", 2), "grpo")
    assert made.wait() == 0, made.stderr
    short = ("--total-batch-size", 8, "--grpo.eval-prompts", 2, "--device", "cpu")
    for words in (GRPO, ADAPTERS):
        learnt = run(typed(words, *short, total_steps=4, hv__local_steps=2), "grpo")
        assert learnt.wait() == 0, learnt.stderr
        assert "all peers held bit-identical anchors after every epoch" in learnt.stdout
    # The first run sends whole models, the second one adapters.
    sent = [
        record["sent_bytes"]
        for kept in sorted(learnt.directory.glob("runs/*/peer-0"))
        for record in records_of(kept, "epoch")[:1]
    ]
    assert sent[1] < sent[0] / 3


@pytest.mark.parametrize(("command", "says"), [(SLURM, "#SBATCH --nodes=2"), (PBS, "#PBS -l select=2")])
def test_a_job_for_a_batch_system_is_printed(command, says, run, tmp_path):
    """The job's configuration is the tutorial's."""
    (tmp_path / "config.toml").write_text(blocks(PAGES["docs/tutorials/multi-node.md"], "toml")[0])
    job = run(typed(command), command.split()[5], cwd=tmp_path)
    assert job.wait() == 0, job.stderr
    assert says in job.stdout and str(tmp_path / "config.toml") in job.stdout
