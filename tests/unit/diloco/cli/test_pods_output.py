"""What pods and providers write reaches the terminal without control characters."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from diloco.cli import experiments, pods
from diloco.cli.pod_tables import print_table
from diloco.cli.pods_flags import say, shouted
from diloco.errors import print_box
from provisioning.errors import MachineError
from provisioning.experiments.runs import Result
from provisioning.launchers import ray_cluster
from provisioning.launchers.ray_cluster import RayCluster, RayJob
from provisioning.ledger.keys import LAST_ACTION
from provisioning.ledger.ledger import Ledger
from provisioning.machines.jobs import JobState
from provisioning.machines.machine import Answer
from provisioning.pods.pod import Offer, PodSpec, Row, State
from provisioning.swarm import logs, status
from provisioning.swarm.status import Overview, Status

EVIL = "a\x1b[2J\x1b]0;title\x07\r\x9bb\nc\x08"
SEEN = ("?b", "c?")


@pytest.fixture
def printed(capsys):
    """Checks that EVIL was printed, as SEEN, and that nothing that was printed commands the terminal."""

    def check() -> str:
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert all(word in text for word in SEEN)
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        return text

    return check


def row() -> Row:
    offer = Offer(id="o", provider="ssh", gpu_type="A100", gpu_count=1, price_per_hour=2.0)
    return Row(
        **{"name": "pod-0", "label": "l", "state": State.RUNNING, "provider_id": "p", "offer": offer},
        **{"spec": PodSpec(name="pod-0", provider="ssh"), "asked_at": 0.0, "ends_at": None},
    )


@pytest.mark.parametrize(
    "show",
    [
        lambda: say("pod-0", EVIL),
        lambda: shouted({"pod-0": MachineError(EVIL)}),
        lambda: print_table(("pod", "peer"), ("step",), [("pod-0", EVIL, "3")]),
        lambda: print_box("diloco", EVIL),
        lambda: experiments.print_results(
            [Result(name="a", pod="pod-0", job="j", ok=False, trouble=EVIL)], "loss"
        ),
    ],
    ids=["progress", "failures", "table", "box", "experiments"],
)
def test_a_text_of_a_pod_does_not_command_the_terminal(show, printed):
    show()
    printed()


def test_a_status_of_a_pod_does_not_command_the_terminal(tmp_path, monkeypatch, printed, capsys):
    async def seen(*_: object) -> Overview:
        return Overview([Status(row(), True, EVIL)], {"vast": EVIL})

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(status, "overview", seen)
    path = tmp_path / "pods.sqlite"
    ledger = Ledger(path)
    ledger.remember(LAST_ACTION, EVIL)
    ledger.close()
    assert pods.status(state_file=path) == 0
    text = printed()
    assert "!!! vast did not list its pods" in text and "last automatic action" in text
    assert pods.status(state_file=path, as_json=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["peer"] == EVIL and captured.out.strip().isprintable()


def test_a_log_does_not_command_the_terminal(tmp_path, monkeypatch, printed):
    async def follow(*_: object, write, **__: object) -> dict[str, Exception]:
        for line in EVIL.split("\n"):
            write("pod-0", line)
        write("pod-0/\x1b]0;title\x07", "the name of a job")
        return {}

    monkeypatch.setattr(logs, "follow_all", follow)
    path = tmp_path / "pods.sqlite"
    Ledger(path).close()
    assert pods.logs(state_file=path) == 0
    text = printed()
    assert "pod-0 | a?]0;title?\npod-0 | ?b\npod-0 | c?\n" in text
    assert "pod-0/?]0;title? | the name of a job\n" in text


async def test_the_output_of_a_ray_job_does_not_command_the_terminal_and_is_read_in_pieces(
    monkeypatch, printed
):
    output = f"{EVIL}\n{'x' * 5000}\nthe end\n".encode()

    class Head:
        async def run(self, script: str, **_: object) -> Answer:
            if "tail -c" not in script:
                return Answer(0, "", "")
            first, most = map(int, re.findall(r"-c \+?(\d+)", script))
            return Answer(0, output[first - 1 :][:most].decode(), "")

    async def reached(_: object) -> tuple[Head, None]:
        return Head(), None

    async def state(*_: object) -> JobState:
        return JobState(is_running=True, code=None)

    async def finished(machine: object, label: str, name: str, on_poll) -> int:
        await on_poll()
        return 0

    monkeypatch.setattr(ray_cluster, "_MAX_SHOWN_BYTES", 1000)
    monkeypatch.setattr(ray_cluster.jobs, "state", state)
    monkeypatch.setattr(ray_cluster.jobs, "finished", finished)
    renters = {"ssh": SimpleNamespace(reached=reached)}

    class Renters(dict):
        def say(self, name: str, text: str) -> None:
            pass

    cluster = RayCluster(Renters(renters), [row()], "python")
    job = RayJob(num_nodes=1, program=["p"], storage="s", use_gpu=False)
    assert await cluster.run(job) == 0
    text = printed()
    assert text.count("x") == 5000 and text.endswith("\nthe end\n")
