"""What is taken for the death of a pod, and what of a swarm is still wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from provisioning.errors import UserError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.machines.jobs import JobState
from provisioning.machines.setup import Mount, Setup
from provisioning.pods.pod import Offer
from provisioning.pods.spec import PodSpec
from provisioning.providers.registry import Access
from provisioning.renting.operations import WANTED
from provisioning.swarm import keeper
from provisioning.swarm.keeper import Fate, Wanted, fate, no_longer_wanted
from provisioning.swarm.peer import PeerProgress
from provisioning.swarm.status import Overview, Status
from provisioning.swarm.swarm import SwarmOptions

SPECS = [PodSpec(name=f"pod-{index}", provider="lium,lambda", max_price=3.0) for index in range(2)]
OFFER = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=2.0)


def row(state: State = State.RUNNING) -> Row:
    return Row(
        **{"name": "pod-0", "label": "l", "state": state},
        **{"provider_id": "id", "spec": SPECS[0], "offer": OFFER, "asked_at": 0.0, "ends_at": None},
    )


def looked(*, is_running: bool = False, code: int | None = None) -> PeerProgress:
    return PeerProgress(JobState(is_running, code))


@pytest.mark.parametrize(
    ("status", "silent_s", "is_so"),
    [
        (Status(row(), True, "", looked(is_running=True)), 0.0, Fate.LIVES),
        (Status(row(), False, ""), 0.0, Fate.DIED),
        (Status(row(), True, "", failure="preempted"), 0.0, Fate.DIED),
        (Status(row(), True, "", looked()), 0.0, Fate.DIED),
        (Status(row(), True, "", looked(code=0)), 0.0, Fate.ENDED),
        (Status(row(), True, "", looked(code=1)), 0.0, Fate.ENDED),
        # A connection that is lost for a while is no death, nor is a provider that does not answer.
        (Status(row(), True, ""), 60.0, Fate.LIVES),
        (Status(row(), True, ""), 301.0, Fate.DIED),
        (Status(row(), None, ""), 0.0, Fate.LIVES),
        (Status(row(State.SYNCED), True, "", looked()), 0.0, Fate.LIVES),
    ],
    ids=[
        "runs",
        "gone",
        "failed",
        "killed",
        "finished",
        "gave up",
        "quiet",
        "silent",
        "unknown",
        "not started",
    ],
)
def test_a_pod_is_dead_when_something_says_so_of_it(status, silent_s, is_so):
    assert fate(status, silent_s)[0] is is_so


def test_a_night_in_which_this_machine_slept_is_no_silence_of_its_pods(tmp_path, monkeypatch):
    ledger, now, replaced = Ledger(tmp_path / "pods.sqlite"), [0.0], []
    wanted().write(ledger)

    async def silent(*_: object) -> Overview:
        return Overview([Status(row(), True, "")], {})

    async def restore(_: Wanted, dead: Mapping[str, object]) -> None:
        replaced.extend(dead)

    monkeypatch.setattr(keeper, "overview", silent)
    access = Access(state_dir=tmp_path, environment={"MINE": "open sesame"})
    one = keeper.Keeper(ledger, access, lambda name, text: None, clock=lambda: now[0])
    monkeypatch.setattr(one, "_restore", restore)

    def look(passed_s: float) -> list[str]:
        now[0] += passed_s
        asyncio.run(one.tick())
        return replaced

    assert look(15.0) == []
    # The lid was closed, and the network is not up yet.
    assert look(8 * 3600.0) == []
    for _ in range(15):
        assert look(15.0) == []
    assert look(15.0) == ["pod-0"]
    ledger.close()


def wanted() -> Wanted:
    return Wanted(
        specs=SPECS,
        replaces=True,
        stops_when_idle=False,
        budget=40.0,
        setup=Setup(
            source=Path("/code"),
            extras=["data"],
            secrets={"MINE": "open sesame"},
            mounts=[Mount(Path("/a"), "b")],
        ),
        options=SwarmOptions(run_id="r", flags=["--path-model", "150m"]),
    )


def test_what_is_wanted_is_read_as_it_was_written_and_no_secret_is_in_the_file(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    wanted().write(ledger)
    assert "open sesame" not in ledger.recall(WANTED)
    found = Wanted.read(ledger, {"MINE": "open sesame"})
    assert found is not None
    assert (found.specs, found.replaces, found.budget) == (SPECS, True, 40.0)
    assert found.setup == wanted().setup
    assert (found.options.run_id, found.options.flags) == ("r", ["--path-model", "150m"])
    with pytest.raises(UserError, match="--secret MINE"):
        Wanted.read(ledger, {})
    ledger.close()


def test_a_replacement_ends_with_the_pod_that_it_replaces_and_none_is_made_after_that():
    found = wanted().at(1000.0, {"pod-0": 1000.0 + 7200, "pod-1": 999.0})
    assert [(spec.name, spec.ttl_hours) for spec in found.specs] == [("pod-0", 2.0)]
    later = found.at(1000.0 + 3600, {})
    assert [spec.ttl_hours for spec in later.specs] == [1.0]
    assert list(later.at(1000.0 + 7200, {}).specs) == []


def test_pods_that_somebody_gives_back_are_not_replaced(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    wanted().write(ledger)
    no_longer_wanted(ledger, ["pod-1"])
    found = Wanted.read(ledger, {"MINE": "x"})
    assert found is not None and [spec.name for spec in found.specs] == ["pod-0"]
    no_longer_wanted(ledger, [])
    assert ledger.recall(WANTED) == ""
    ledger.close()
