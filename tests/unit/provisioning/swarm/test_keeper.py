"""When a pod counts as dead, and which pods of a swarm are still wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from provisioning.errors import Busy, MachineError, ProviderError, UserError
from provisioning.ledger.keys import RUN_BEGAN, WANTED
from provisioning.ledger.ledger import Ledger
from provisioning.machines.jobs import JobState
from provisioning.machines.setup import Mount, Setup
from provisioning.pods.pod import Listing, Offer, Pod, PodSpec, Row, State
from provisioning.providers.registry import Access
from provisioning.renting.plan import Creation, Plan
from provisioning.renting.renter import Renter
from provisioning.swarm import keeper, watcher
from provisioning.swarm.keeper import Fate, Wanted, begin_run, fate, keep, no_longer_wanted
from provisioning.swarm.peer import PeerProgress
from provisioning.swarm.status import Overview, Status
from provisioning.swarm.swarm import SwarmOptions

SPECS = [PodSpec(name=f"pod-{index}", provider="lium,lambda", max_price=3.0) for index in range(2)]
OFFER = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=2.0)


def row(state: State = State.RUNNING, name: str = "pod-0", label: str = "l") -> Row:
    return Row(
        **{"name": name, "label": label, "state": state},
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
        # Neither a connection that is lost for a while nor a provider that does not answer makes a pod dead.
        (Status(row(), True, ""), 60.0, Fate.LIVES),
        (Status(row(), True, ""), 301.0, Fate.DIED),
        (Status(row(), None, ""), 301.0, Fate.LIVES),
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


@dataclass
class Watched:
    """A keeper that sees the pods in `seen`, and only records what it would do."""

    ledger: Ledger
    keeper: keeper.Keeper = field(init=False)
    seen: list[Status] = field(default_factory=list)
    now: float = 0.0
    done: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        access = Access(state_dir=self.ledger.path.parent, environment={"MINE": "open sesame"})
        self.keeper = keeper.Keeper(
            self.ledger, access, lambda name, text: self.told.append(text), clock=lambda: self.now
        )

    def look(self, *seen: Status, passed_s: float = 15.0) -> list[str]:
        """What the keeper does when it looks next, `passed_s` later."""
        self.seen, self.now, before = list(seen), self.now + passed_s, len(self.done)
        asyncio.run(self.keeper.tick())
        return self.done[before:]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched(Ledger(tmp_path / "pods.sqlite"))

    async def look(*_: object) -> Overview:
        return Overview(found.seen, {})

    async def restore(wanted: Wanted, dead: Mapping[str, object], obstacle: str) -> None:
        found.done += [f"{'gives back' if obstacle else 'replaces'} {name}" for name in dead]

    async def stop(wanted: Wanted) -> None:
        found.done.append("stops")

    monkeypatch.setattr(keeper, "overview", look)
    monkeypatch.setattr(found.keeper, "_restore", restore)
    monkeypatch.setattr(found.keeper, "_stop", stop)
    yield found
    found.ledger.close()


RUNS, FINISHED, FAILED, KILLED = looked(is_running=True), looked(code=0), looked(code=1), looked()


def first(progress: PeerProgress | None = None, **changes: Any) -> Status:
    return Status(row(**changes), True, "", progress)


def second(progress: PeerProgress | None = None, **changes: Any) -> Status:
    return first(progress, name="pod-1", label="l1", **changes)


def test_a_night_in_which_this_machine_slept_is_no_silence_of_its_pods(watched):
    wanted().write(watched.ledger)
    silent = (first(), second(RUNS))
    assert watched.look(*silent) == []
    # The laptop's lid was closed, and its network is not up yet.
    assert watched.look(*silent, passed_s=8 * 3600.0) == []
    for _ in range(15):
        assert watched.look(*silent) == []
    assert watched.look(*silent) == ["replaces pod-0"]


def test_no_pod_is_replaced_while_none_answers(watched):
    wanted().write(watched.ledger)
    for _ in range(40):
        assert watched.look(first(), second()) == []
    assert watched.told == [
        "no pod answers: this machine's own network may be down, so none is replaced for that"
    ]
    # The network is back, but so far only one pod is connected.
    assert watched.look(first(), second(RUNS)) == []
    assert watched.told[1:] == ["pods answer again"]
    assert watched.look(first(RUNS), second(RUNS)) == []
    # The provider's word counts, whichever pods answer.
    assert watched.look(first(), replace(second(), failure="preempted")) == ["replaces pod-1"]
    assert watched.look(first(), replace(second(), is_there=False)) == ["replaces pod-1"]


@pytest.mark.parametrize(
    ("provider", "done"), [("lambda", []), ("lium", ["replaces pod-0", "replaces pod-1"])]
)
def test_silence_counts_only_while_another_pod_of_the_same_provider_answers(watched, provider, done):
    """Some networks let only port 22 through, at which only the pods of some providers answer."""
    wanted().write(watched.ledger)
    third = first(RUNS, name="pod-2", label="l2")
    third = replace(third, row=replace(third.row, offer=replace(OFFER, provider=provider)))
    for _ in range(21):
        assert watched.look(first(), second(), third) == []
    assert watched.look(first(), second(), third) == done
    assert ("pod-0 is silent, but not replaced: no pod of lium answers" in watched.told) == (not done)
    # Pods that nobody can reach keep no others once the run has ended.
    replace(wanted(), replaces=False, stops_when_idle=True).write(watched.ledger)
    assert watched.look(first(), replace(third, progress=FINISHED)) == ["stops"]


def test_a_repair_is_repeated_ever_more_rarely_until_there_is_more_to_repair_or_an_epoch(watched):
    wanted().write(watched.ledger)

    def repairs(looks: int) -> list[float]:
        return [watched.now for _ in range(looks) if watched.look(first(KILLED), second(RUNS))]

    assert repairs(110) == [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1560.0]
    assert watched.look(first(KILLED), second(KILLED)) == ["replaces pod-0", "replaces pod-1"]
    assert watched.look(first(KILLED), second(KILLED)) == ["replaces pod-0", "replaces pod-1"]
    assert watched.look(first(KILLED), second(RUNS)) == []
    # Its peer runs, which it may have done before each time, and dies again.
    assert watched.look(first(RUNS), second(RUNS)) == []
    assert watched.look(first(KILLED), second(RUNS)) == ["replaces pod-0"]
    assert watched.look(first(KILLED), second(RUNS)) == []
    # From its first epoch on, it is like any other pod.
    assert watched.look(first(replace(RUNS, epoch=1)), second(RUNS)) == []
    assert watched.look(first(KILLED), second(RUNS)) == ["replaces pod-0"]


def test_a_pod_whose_peer_has_ended_with_an_error_is_not_replaced_and_that_is_said(watched):
    wanted().write(watched.ledger)
    assert watched.look(first(FAILED), second(RUNS)) == []
    assert watched.told == [
        "pod-0 is not replaced: its peer ended with 1; `diloco pods logs pod-0` shows why"
    ]


def test_a_machine_of_which_nobody_knows_is_not_replaced(watched):
    wanted().write(watched.ledger)
    for _ in range(40):
        assert watched.look(replace(first(), is_there=None), second(RUNS)) == []
    assert watched.told == ["pod-0 is silent, but not replaced: it is unknown whether it still runs"]
    # Its provider answers again, from when on the pod's silence is counted anew.
    assert watched.look(first(), second(RUNS)) == []


@pytest.mark.parametrize(
    ("seen", "replaces", "done"),
    [
        ([first(FINISHED), second(FINISHED)], False, ["stops"]),
        ([first(FINISHED), second(KILLED)], False, ["stops"]),
        ([first(FAILED), second(KILLED)], False, ["stops"]),
        ([first(KILLED), second(KILLED)], False, ["stops"]),
        ([first(FINISHED), second(state=State.DELETING)], False, ["stops"]),
        ([first(RUNS), second(KILLED)], False, []),
        ([first(FINISHED), second()], False, []),
        ([first(state=State.SYNCED), second(KILLED)], False, []),
        ([first(FINISHED), second(KILLED)], True, ["stops"]),
        ([first(FAILED), second(KILLED)], True, ["replaces pod-1"]),
        ([first(RUNS), second(KILLED)], True, ["replaces pod-1"]),
    ],
)
def test_pods_are_given_back_once_no_peer_runs_and_none_will(watched, seen, replaces, done):
    replace(wanted(), replaces=replaces, stops_when_idle=True).write(watched.ledger)
    assert watched.look(*seen) == done


def test_a_pod_of_which_nothing_is_known_keeps_no_others_once_one_has_finished(watched):
    replace(wanted(), replaces=False, stops_when_idle=True).write(watched.ledger)
    unknown = replace(second(), is_there=None)
    for _ in range(30):
        assert watched.look(first(RUNS), unknown) == []
    assert watched.look(first(FINISHED), unknown) == ["stops"]


def test_the_budget_is_for_the_pods_of_this_run(watched):
    ledger = watched.ledger
    replace(wanted(), stops_when_idle=True).write(ledger)

    def rent(began_at: float, ended_at: float) -> None:
        rented = ledger.advance(ledger.add(SPECS[0], OFFER, now=began_at), State.CREATING)
        ledger.forget(ledger.set_pod(rented, f"id{began_at}", None), now=ended_at)

    rent(0.0, 20 * 3600.0)
    ledger.remember(RUN_BEGAN, str(21 * 3600.0))
    rent(22 * 3600.0, 41 * 3600.0)
    watched.now = 50 * 3600.0
    assert watched.look(first(KILLED), second(RUNS)) == ["replaces pod-0"]
    rent(41 * 3600.0, 42 * 3600.0)
    assert watched.look(first(KILLED), second(RUNS)) == ["gives back pod-0"]
    assert watched.look(first(FAILED), second(KILLED)) == ["stops"]
    # A replacement that was set up before, and could not be started, will not be started now.
    assert watched.look(first(FAILED), second(KILLED, state=State.SYNCED)) == ["stops"]


def test_a_run_begins_where_there_are_no_pods(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    begin_run(ledger)
    began = ledger.recall(RUN_BEGAN)
    assert float(began) > 0
    ledger.add(SPECS[0], OFFER, now=0.0)
    begin_run(ledger)
    assert ledger.recall(RUN_BEGAN) == began
    ledger.close()


def test_without_its_secrets_a_keeper_gives_back_and_says_why_it_replaces_nothing(watched, monkeypatch):
    ledger, returned = watched.ledger, []
    watched.keeper.access = replace(watched.keeper.access, environment={})
    replace(wanted(), stops_when_idle=True).write(ledger)

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Returning]:
        yield Returning(returned)

    monkeypatch.undo()
    monkeypatch.setattr(keeper, "overview", lambda *_: asyncio.sleep(0, Overview(watched.seen, {})))
    monkeypatch.setattr(keeper, "renters", opened)
    without = watched.keeper.access
    having = replace(without, environment={"MINE": "x"})
    assert not watcher.lacks(ledger, having)
    watched.look(first(KILLED), second(RUNS))
    assert returned == ["pod-0"]
    assert watched.told == [
        "pod-0 has died: all its processes were killed; it is given back",
        "nothing is replaced: this process has no MINE; run `diloco pods status` where that variable is set",
    ]
    assert watcher.lacks(ledger, having) and not watcher.lacks(ledger, without)

    watched.look(first(FINISHED))
    assert watched.told[2:] == ["the run has ended: fetching its results, and giving its pods back"]
    assert ledger.recall(WANTED) == ""


@dataclass
class Returning:
    """Renters that only record which pods are given back."""

    returned: list[str]

    async def give_back(self, rows: Sequence[Row], **_: object) -> dict[str, Exception]:
        self.returned += [one.name for one in rows]
        return {}

    async def down(self, names: Sequence[str]) -> dict[str, Exception]:
        return {}


def test_nothing_is_wanted_once_the_time_of_all_pods_is_over(watched):
    replace(wanted(), ends_at={"pod-0": 100.0, "pod-1": 100.0}).write(watched.ledger)
    watched.look(first(RUNS), second(RUNS), passed_s=99.0)
    assert watched.ledger.recall(WANTED)
    assert watched.look() == []
    assert watched.ledger.recall(WANTED) == ""


def test_nothing_is_wanted_where_a_command_has_rented_nothing(watched):
    replace(wanted(), replaces=False, stops_when_idle=True).write(watched.ledger)
    with watched.ledger.locked(), pytest.raises(Busy):
        watched.look()
    assert watched.ledger.recall(WANTED)
    assert watched.look() == []
    assert watched.ledger.recall(WANTED) == ""


@dataclass
class Odd:
    """A provider that gives an unexpected answer."""

    name: str
    error: Exception | None
    destroyed: list[str]
    listed: Sequence[Pod] = ()
    settle_s = doubt_s = 0.0
    repeatable = keeps_time = False

    async def pods(self) -> Listing:
        if self.error:
            raise self.error
        return Listing(pods=self.listed)

    async def find(self, pod_id: str) -> None:
        return None

    async def destroy(self, pod_id: str) -> None:
        self.destroyed.append(pod_id)
        if self.error:
            raise self.error

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [RecursionError("too deep"), OverflowError("infinity"), KeyError("x")])
def test_no_answer_of_a_provider_ends_the_watcher_or_keeps_a_pod_whose_time_is_over(
    tmp_path, monkeypatch, error
):
    ledger, destroyed, told = Ledger(tmp_path / "pods.sqlite"), [], []
    for name, provider in (("odd", "lium"), ("other", "lambda")):
        spec = PodSpec(name=name, provider=provider, ttl_hours=1)
        rented = ledger.advance(ledger.add(spec, replace(OFFER, provider=provider), now=0.0), State.CREATING)
        ledger.set_pod(rented, f"{name}-id", None)
    monkeypatch.setattr(
        "provisioning.renting.renters.open_provider",
        lambda name, access: Odd(name, error if name == "lium" else None, destroyed),
    )
    watching = watcher.watch(
        ledger,
        Access(state_dir=tmp_path, environment={}),
        lambda name, text: told.append(text),
        interval_s=0.0,
        stop=lambda: destroyed.count("odd-id") >= 3,
    )
    asyncio.run(watching)
    assert any(f"unknown form ({type(error).__name__}: {error})" in text for text in told)
    # The row of the other pod is deleted: its provider says that it is gone.
    assert [one.name for one in ledger.rows()] == ["odd"]
    ledger.close()


def test_a_watcher_makes_way_for_one_that_can_open_the_provider_of_a_new_pod(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "pods.sqlite")
    old, new = (Access(state_dir=tmp_path, environment=keys) for keys in ({"lium": "x"}, {"lambda": "x"}))

    def opened(name: str, access: Access) -> Odd:
        if name not in access.environment:
            raise UserError(f"there is no key for {name}")
        return Odd(name, None, [])

    for module in ("provisioning.renting.renters", "provisioning.swarm.watcher"):
        monkeypatch.setattr(f"{module}.open_provider", opened)

    def order(provider: str) -> None:
        spec = PodSpec(name=provider, provider=provider, ttl_hours=1)
        ledger.add(spec, replace(OFFER, provider=provider), now=0.0)

    order("lium")
    asyncio.run(watcher.watch(ledger, old, lambda name, text: None, stop=lambda: True))
    assert not watcher.lacks(ledger, old) and not watcher.lacks(ledger, new)
    order("lambda")
    assert not watcher.lacks(ledger, old) and watcher.lacks(ledger, new)
    ledger.close()


def test_a_deletion_that_failed_is_tried_again_by_the_watcher(tmp_path, monkeypatch):
    ledger, destroyed = Ledger(tmp_path / "pods.sqlite"), []
    left = ledger.advance(ledger.add(PodSpec(name="left", provider="lium"), OFFER, now=0.0), State.CREATING)
    ledger.advance(ledger.set_pod(left, "left-id", None), State.DELETING)
    provider = Odd("lium", None, destroyed)
    provider.listed = [Pod(id="left-id", label=left.label, is_ready=True)]
    monkeypatch.setattr("provisioning.renting.renters.open_provider", lambda name, access: provider)
    assert watcher.needs_watcher(ledger)
    access = Access(state_dir=tmp_path, environment={})
    asyncio.run(watcher.watch(ledger, access, lambda name, text: None, interval_s=0.0))
    assert (destroyed, ledger.rows()) == (["left-id"], [])
    ledger.close()


def test_a_rental_ends_on_time_while_the_keeper_works(tmp_path, monkeypatch):
    ledger, destroyed, before_its_end = Ledger(tmp_path / "pods.sqlite"), [], list[str]()
    rented = ledger.advance(ledger.add(PodSpec(name="a", provider="lium"), OFFER, now=0.0), State.CREATING)
    rented = ledger.set_pod(rented, "id", None)
    wanted().write(ledger)
    monkeypatch.setattr(
        "provisioning.renting.renters.open_provider", lambda name, access: Odd("lium", None, destroyed)
    )

    async def tick(self: keeper.Keeper) -> None:
        """Holds the lock, as a tick does that replaces a pod."""
        with ledger.locked():
            ledger.advance(rented, rented.state, ends_at=1.0)
            for _ in range(1000):
                await asyncio.sleep(0)
        ledger.remember(WANTED, "")
        before_its_end.extend(destroyed)

    monkeypatch.setattr(keeper.Keeper, "tick", tick)
    access = Access(state_dir=tmp_path, environment={})
    asyncio.run(watcher.watch(ledger, access, lambda name, text: None, interval_s=0.0))
    assert before_its_end and ledger.rows() == []
    ledger.close()


def test_results_are_fetched_before_the_end_until_they_are_there_whatever_else_is_to_be_done(
    tmp_path, monkeypatch
):
    ledger, attempts, fetched = Ledger(tmp_path / "pods.sqlite"), list[str](), set[Any]()
    for name, ends_at in (("ending", 1100.0), ("in-doubt", None)):
        added = ledger.add(PodSpec(name=name, provider="lium"), OFFER, now=0.0)
        ledger.advance(added, State.CREATING, ends_at=ends_at)
    ledger.set_pod(ledger.rows()[0], "id", None)

    async def fetch(self: Renter, row: Row) -> None:
        attempts.append(row.name)
        if len(attempts) == 1:
            raise MachineError("no network")
        if len(attempts) == 3:
            await asyncio.sleep(3600)

    provider = Odd("lium", ProviderError("502"), [])
    monkeypatch.setattr("provisioning.renting.renters.open_provider", lambda name, access: provider)
    monkeypatch.setattr(Renter, "fetch_results", fetch)
    access = Access(state_dir=tmp_path, environment={})

    def looked_at(now: float) -> float:
        work = watcher.keep_time(ledger, access, lambda name, text: None, fetched, 60.0, lambda: now)
        return asyncio.run(work)

    assert [looked_at(1000.0) for _ in range(3)] == [60.0] * 3
    assert attempts == ["ending"] * 2
    # The end of the rental cuts off another attempt.
    fetched.clear()
    assert looked_at(1099.99) == pytest.approx(0.01)
    assert attempts == ["ending"] * 3 and fetched == set()
    # A rental that is extended after they were fetched has a new end.
    looked_at(1000.0)
    ledger.advance(ledger.rows()[0], State.BOOTING, ends_at=5000.0)
    for now in (1000.0, 4700.0, 4800.0):
        looked_at(now)
    assert attempts == ["ending"] * 5
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
    found = Wanted.read(ledger)
    assert found is not None
    assert (found.specs, found.replaces, found.budget) == (SPECS, True, 40.0)
    assert found.setup == replace(wanted().setup, secrets={"MINE": ""})
    assert (found.options.run_id, found.options.flags) == ("r", ["--path-model", "150m"])
    ledger.close()


def test_what_was_agreed_on_is_kept_where_it_costs_money_and_replaced_for_half_more_at_most(tmp_path):
    ledger = Ledger(tmp_path / "pods.sqlite")
    setup, options = wanted().setup, wanted().options

    def kept(*specs: PodSpec, price: float, **care: Any) -> Wanted | None:
        offer = replace(OFFER, price_per_hour=price)
        agreed = Plan(create=tuple(Creation(spec, offer) for spec in specs), keep=(), destroy=())
        keep(ledger, agreed, setup, options, **{"replaces": False, "stops": None, **care})
        return Wanted.read(ledger)

    found = kept(
        PodSpec(provider="lium", name="any"),
        PodSpec(provider="lium", name="cheap", max_price=2.5),
        price=2.0,
        replaces=True,
    )
    assert found is not None and [spec.max_price for spec in found.specs] == [3.0, 2.5]
    assert found.replaces and found.stops_when_idle
    assert kept(PodSpec(provider="lium", name="any"), price=2.0, stops=False) is None
    assert kept(PodSpec(provider="lium", name="free"), price=0.0) is None
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
    found = Wanted.read(ledger)
    assert found is not None and [spec.name for spec in found.specs] == ["pod-0"]
    no_longer_wanted(ledger, [])
    assert ledger.recall(WANTED) == ""
    ledger.close()
