"""One daemon's runtime without other peers: it answers the worker once and in order, and nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from peers.core import effects, events
from peers.core.peer import Peer
from peers.core.round import Stage
from peers.core.settings import Settings
from peers.daemon.averaging import Averaging, WorkInHand
from peers.daemon.downloads import fetch_state
from peers.daemon.pledges import Pledges
from peers.daemon.runtime import Runtime
from peers.errors import PeersError, StateUnavailable
from peers.monitor.journal import Journal
from peers.net.identity import load_or_create
from peers.net.streams import StreamPool
from peers.protocol.certificates import verify_signature
from peers.protocol.messages import Ask, Message, Status
from peers.protocol.reports import Incident
from peers.reduce.all_reduce import reduce_pseudo_gradients
from peers.reduce.commit_log import KEPT_FOR_S, Recording
from peers.reduce.plan import Chunk
from peers.reduce.residuals import Residuals
from peers.state.handover import Memories
from peers.state.outer_state import OuterState
from tests.support.certified import begun, commit
from tests.support.in_process import Network
from tests.support.state_network import RUN, serve
from tests.unit.peers.core.driven import Driven
from tests.unit.peers.core.made import digest, genesis, work

SIZE = 1000


class NoTransport:
    async def open(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("nobody is there")

    async def serve(self, *_args: Any) -> None:
        raise AssertionError("nobody is there")


async def fetch(*_args: Any) -> OuterState:
    raise StateUnavailable("nobody is there")


class Told:
    """Records the messages that other peers would have been sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.num_statuses = 0
        self.expected: list[frozenset[str]] = []

    def expect(self, peer_ids: frozenset[str]) -> None:
        self.expected.append(peer_ids)

    def send_to(self, peer_id: str, message: Message) -> None:
        self.messages.append(message)

    def broadcast(self, message: Message) -> None:
        self.messages.append(message)

    def send_status(self, peer_id: str) -> None:
        self.num_statuses += 1

    def broadcast_status(self) -> None:
        self.num_statuses += 1


@contextlib.contextmanager
def a_runtime(directory: Path, *, codec: str = "fp32", local_steps: int = 2):
    identity = load_or_create(directory / "key")
    pledges = Pledges(directory / "pledges")
    core = Peer(
        keys=identity,
        verify=verify_signature,
        settings=Settings(manifest="f" * 64, steps_per_epoch=local_steps),
        incarnation=1,
        world_rank=0,
        pledges=pledges.attempts,
        now=time.monotonic(),
    )

    manifest = {
        "hv.compression": codec,
        "hv.local_steps": local_steps,
        "hv.outer_lr": 0.7,
        "hv.outer_momentum": 0.9,
    }
    averaging = Averaging(core, manifest, pool=StreamPool(NoTransport(), "t"), forwarded_bytes=lambda: 0)
    try:
        yield Runtime(
            core,
            mesh=Told(),
            averaging=averaging,
            pledges=pledges,
            fetch=fetch,
            on_change=lambda: None,
            on_tell=lambda _: None,
        )
    finally:
        identity.release()


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with a_runtime(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def running(runtime: Runtime) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(runtime.run())
    try:
        async with asyncio.timeout(30):
            yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def memories(value: float = 1.0) -> Memories:
    return Memories((torch.full((SIZE,), value),), (torch.full((SIZE,), 9.0),))


def work_in(memories: Memories, step: int = 2) -> WorkInHand:
    return WorkInHand(memories, 0, tokens=1, step=step, last=False)


def offered() -> OuterState:
    return OuterState.initial([torch.zeros(SIZE)])


async def test_a_worker_begins_with_the_anchor_in_its_memory(runtime):
    mine = memories()
    async with running(runtime):
        start = await runtime.begin_worker(mine.inn, offered())
    assert (start.epoch, start.local_step, start.head) == (0, 0, runtime.core.head)
    assert not mine.inn[0].any()


async def test_the_parts_of_a_round_add_up_to_it_and_its_result_is_in_the_workers_memory(runtime):
    mine = memories()
    async with running(runtime):
        await runtime.begin_worker(mine.inn, offered())
        outcome = await runtime.average(work_in(mine, step=2))
    parts = (outcome.connect_s, outcome.reduce_s, outcome.preview_s, outcome.vote_s, outcome.apply_s)
    assert all(part > 0 for part in parts)
    assert 0 < outcome.propose_s <= outcome.wait_s
    assert sum(parts) <= outcome.round_s < sum(parts) + 10
    assert (outcome.epoch, outcome.contributors, outcome.head) == (1, [0], runtime.core.head)
    assert runtime.state is not None and torch.equal(mine.inn[0], runtime.state.anchor[0])
    assert runtime.state.is_intact() and runtime.state.anchor_digest == outcome.anchor_digest


async def test_what_another_peer_wrote_reaches_no_log_and_no_report_with_control_characters(runtime, caplog):
    caplog.set_level("INFO", "peers.daemon.runtime")
    journal = Journal()
    runtime._on_tell = lambda tell: journal.happened(1.0, tell.text)
    await runtime._perform(
        effects.Tell("left_out", "peer 3 is left out; its last fault: \x1b[2J\u202eall is well")
    )
    (incident,) = journal.incidents
    assert msgspec.convert(msgspec.to_builtins(incident), Incident).text.endswith("fault: ?[2J?all is well")
    assert caplog.messages == [incident.text]


async def test_no_worker_begins_between_anothers_readiness_and_its_commit(runtime):
    first, second = memories(), memories()
    async with running(runtime):
        await runtime.begin_worker(first.inn, offered())
        averaging = asyncio.create_task(runtime.average(work_in(first, step=2)))
        await asyncio.sleep(0)
        # The worker has died; its successor may not begin before this work is committed.
        runtime.post(events.WorkerGone())
        start = await runtime.begin_worker(second.inn, offered())
        assert start.epoch == 1 and (await averaging).contributors == [0]
        assert runtime.state is not None and torch.equal(second.inn[0], runtime.state.anchor[0])


async def test_weights_that_are_not_finite_are_the_end_of_their_worker_and_its_next_life_begins_from_the_anchor(
    runtime,
):
    spoilt, mine = memories(float("nan")), memories()
    async with running(runtime) as task:
        await runtime.begin_worker(spoilt.inn, offered())
        with pytest.raises(PeersError, match="not finite"):
            await runtime.average(work_in(spoilt, step=2))
        runtime.post(events.WorkerGone())
        start = await runtime.begin_worker(mine.inn, offered())
        assert (start.epoch, start.head) == (0, runtime.core.head)
        outcome = await runtime.average(work_in(mine, step=2))
        assert (outcome.epoch, outcome.contributors) == (1, [0]) and not task.done()
        assert torch.isfinite(mine.inn[0]).all()


async def test_a_stream_to_a_peer_that_was_lost_and_is_back_is_open_before_the_round(runtime, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(runtime.averaging.pool, "open_ahead", opened.append)
    async with running(runtime):
        await runtime.begin_worker(memories().inn, offered())
        here = Status(incarnation=1, sequence=1, world_rank=1, phase="training", head=runtime.core.head)
        for event in (
            events.Received("other", here),
            events.Disconnected("other"),
            events.Received("other", replace(here, sequence=2)),
            events.Received("other", replace(here, sequence=3)),
        ):
            runtime.post(event)
        while (status := runtime.core.swarm.status("other")) is None or status.sequence < 3:
            await asyncio.sleep(0)
    assert opened == ["other", "other"]


async def test_what_goes_wrong_in_a_reduction_ends_the_daemon_with_that_reason(runtime, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for it")

    monkeypatch.setattr("peers.daemon.averaging.reduce_pseudo_gradients", broken)
    mine = memories()
    async with running(runtime) as task:
        await runtime.begin_worker(mine.inn, offered())
        averaging = asyncio.create_task(runtime.average(work_in(mine, step=2)))
        with pytest.raises(MemoryError):
            await task
        averaging.cancel()


def test_while_an_effect_takes_long_the_last_status_stands_and_cancelling_waits_for_threads(
    tmp_path, monkeypatch
):
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(self: Pledges, head: str, attempt: int) -> None:
        began.set()
        assert may_end.wait(20)
        ended.set()

    async def scenario(runtime: Runtime) -> None:
        mine = memories()
        async with running(runtime):
            await runtime.begin_worker(mine.inn, offered())
            monkeypatch.setattr(Pledges, "add", slow)
            averaging = asyncio.create_task(runtime.average(work_in(mine, step=2)))
            await asyncio.to_thread(began.wait, 20)
            # The mesh reads the status at every heartbeat.
            status = runtime.status
            assert status is not None and status.epoch == 0
            may_end.set()
            await averaging
            assert runtime.status is not None and runtime.status.epoch == 1

    with a_runtime(tmp_path) as runtime:
        asyncio.run(scenario(runtime))
    assert ended.is_set()


async def test_a_runtime_that_ends_tells_the_others_that_this_peer_leaves(runtime):
    async with running(runtime):
        await runtime.begin_worker(memories().inn, offered())
        while runtime.status is None or runtime.status.phase != "training":
            await asyncio.sleep(0)
        num_statuses = runtime._mesh.num_statuses
    assert runtime.status.phase == "leaving"
    assert runtime._mesh.num_statuses == num_statuses + 1


async def test_a_reduction_is_over_before_the_runtime_is(runtime, monkeypatch):
    began, over = threading.Event(), threading.Event()

    def endless(*_: Any, cancelled: threading.Event, **__: Any) -> None:
        began.set()
        assert cancelled.wait(20)
        over.set()
        raise PeersError("cancelled")

    monkeypatch.setattr("peers.daemon.averaging.reduce_pseudo_gradients", endless)
    mine = memories()
    async with running(runtime):
        await runtime.begin_worker(mine.inn, offered())
        averaging = asyncio.create_task(runtime.average(work_in(mine, step=2)))
        await asyncio.to_thread(began.wait, 20)
    assert over.is_set()
    averaging.cancel()


async def test_what_a_peer_says_while_nobody_listens_takes_bounded_memory(runtime):
    for _ in range(100_000):
        runtime.post(events.Received("talker", Ask(head="a" * 64)))
    assert runtime._events.qsize() < 10_000
    # Events from the daemon itself are never dropped.
    mine = memories()
    async with running(runtime):
        await runtime.begin_worker(mine.inn, offered())


def test_what_top_k_holds_back_is_forgotten_by_the_step(tmp_path):
    async def kept_after(runtime: Runtime, local_steps: int) -> torch.Tensor:
        mine = memories(value=1.0)
        async with running(runtime):
            await runtime.begin_worker(mine.inn, offered())
            await runtime.average(work_in(mine, step=local_steps))
        kept = runtime.averaging.residuals[0].contribution_residual
        assert kept is not None
        return kept

    for local_steps, decay in ((6, 0.95 ** (6 / 30)), (500, 0.95)):
        (directory := tmp_path / str(local_steps)).mkdir()
        with a_runtime(directory, codec="topk", local_steps=local_steps) as runtime:
            kept = asyncio.run(kept_after(runtime, local_steps))
        # Of equal values top-k sends the first ones, without loss.
        assert float(kept[0]) == 0 and float(kept[-1]) == pytest.approx(-decay)


def test_while_a_commit_stores_residuals_nobody_takes_hold_of_the_state_before_it(tmp_path, monkeypatch):
    store, held = Residuals.commit, []

    def stored(kept: Residuals, *args: Any, **kwargs: Any) -> None:
        held.append(runtime.state and runtime.state.snapshot())
        store(kept, *args, **kwargs)

    async def averaged() -> None:
        mine = memories()
        async with running(runtime):
            await runtime.begin_worker(mine.inn, offered())
            await runtime.average(work_in(mine))

    monkeypatch.setattr(Residuals, "commit", stored)
    with a_runtime(tmp_path, codec="int8") as runtime:
        asyncio.run(averaged())
        assert held == [None] and runtime.state and runtime.state.snapshot() is not None


@pytest.mark.parametrize(("num_newcomers", "downloads"), [(1, True), (1, False), (0, True)])
async def test_a_commit_is_kept_for_a_newcomer_whose_download_begins_during_its_attempt(
    runtime, monkeypatch, num_newcomers, downloads
):
    """However long its worker has taken to load the model."""
    log, open_downloads = runtime.averaging.commit_log, contextlib.ExitStack()

    def reduced(*args: Any, **kwargs: Any) -> Any:
        if downloads:
            open_downloads.enter_context(log.held())
        return reduce_pseudo_gradients(*args, **kwargs)

    monkeypatch.setattr("peers.daemon.averaging.reduce_pseudo_gradients", reduced)
    mine = memories()
    async with running(runtime):
        await runtime.begin_worker(mine.inn, offered())
        before = runtime.core.head
        for number in range(num_newcomers):
            status = Status(incarnation=1, sequence=1, world_rank=-1, phase="waiting")
            runtime.post(events.Received(f"newcomer {number}", status))
        outcome = await runtime.average(work_in(mine))
    kept = [commit.head for commit in log.between(before, outcome.head)]
    assert kept == ([outcome.head] if num_newcomers and downloads else [])


@pytest.mark.parametrize("is_missed", [True, False])
async def test_a_commit_is_kept_for_a_live_peer_that_it_leaves_out(runtime, monkeypatch, is_missed):
    """It will ask for this commit, which is far smaller than the state."""
    log, mine = runtime.averaging.commit_log, memories()
    async with running(runtime):
        await runtime.begin_worker(mine.inn, offered())
        before = runtime.core.head
        if is_missed:
            status = Status(incarnation=1, sequence=1, world_rank=1, phase="training", head=before)
            runtime.post(events.Received("late", status))
        outcome = await runtime.average(work_in(mine))
    assert [commit.head for commit in log.between(before, outcome.head)] == [outcome.head] * is_missed


class LonePeer:
    """A lone peer whose epochs last 5 s, and a joiner that downloads its state. Of fp32 averages, the log holds two."""

    def __init__(self, averaging: Averaging, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driven, self.averaging, self.log = Driven.at(genesis("a")), averaging, averaging.commit_log
        self.timing, self.heads, self.rate = self.driven.peer.timing, [self.driven.peer.head], 0.0
        self.timing.set_sizes(fragment_bytes=5 * 10**8, state_bytes=10**9)
        self._ready_at = 5.0
        clock = SimpleNamespace(monotonic=lambda: self.driven.now)
        for module in ("peers.daemon.averaging", "peers.reduce.commit_log"):
            monkeypatch.setattr(f"{module}.time", clock)

    def run(self, seconds: float, *, is_last: bool = False) -> int:
        """Let time pass. Returns how many commits were made."""
        driven, before, until = self.driven, len(self.heads), self.driven.now + seconds
        while driven.now < until:
            self.log.sent_bytes += int(0.4 * self.rate)
            made = driven.feed(events.LogNeeded(self.averaging.is_log_needed(1))) + driven.run(0.4)
            if driven.now >= self._ready_at:
                made, self._ready_at = made + driven.ready(work(last=is_last)), math.inf
            for reduce in driven.of(effects.Reduce, made):
                made = driven.feed(events.Reduced(reduce.plan.digest, "a" * 64, digest(driven.now)))
                (commit,) = driven.of(effects.Apply, made)
                self._committed(commit.certificate.head)
        return len(self.heads) - before

    def _committed(self, head: str) -> None:
        recording = Recording()
        recording.keep(Chunk(0, 0), np.zeros(4, np.uint8))
        self.log.add(recording, parent=self.heads[-1], head=head, state_numel=1)
        self.heads.append(head)
        self._ready_at = self.driven.now + 5.0

    @property
    def learned(self) -> tuple[float, ...]:
        """The longest rounds, epochs, and waits that it has learned."""
        timing = self.timing
        return tuple(max(each) for each in (timing._rounds, timing._epochs, timing._waits, timing._gathers))


@pytest.fixture
def lone(runtime, monkeypatch) -> LonePeer:
    made = LonePeer(runtime.averaging, monkeypatch)
    assert made.run(60) > 8
    return made


def test_a_joiner_gets_in_with_a_lone_peer_whose_epochs_are_far_shorter_than_its_download(lone):
    """The download takes as long as 34 epochs. What the peer has learned about rounds does not change."""
    before, since = lone.learned, lone.heads[-1]
    lone.log.clear()
    lone.rate = 1e9 / 170
    with lone.log.held(since):
        assert lone.run(170) == 2
    assert len(lone.log.between(since, lone.heads[-1])) == 2
    # It has a while to ask for them; then nobody waits for it any more.
    lone.rate = 0.0
    assert lone.run(KEPT_FOR_S - 1) == 0 and lone.run(20) > 2
    assert any("for a peer that downloads the state" in tell.text for tell in lone.driven.of(effects.Tell))
    assert lone.learned == pytest.approx(before, abs=0.5)


@pytest.mark.parametrize(("rate", "longest_s"), [(0.0, 30), (5e5, 60), (2e6, 1000)])
def test_a_lone_peer_waits_for_a_download_at_a_usual_rate_and_once_no_longer_than_for_a_round(
    lone, rate, longest_s
):
    before, lone.rate = lone.learned, rate
    with lone.log.held(lone.heads[-1]):
        assert lone.run(longest_s) == 2
        # What the joiner needed next is gone: nothing is of use to it any more.
        assert lone.run(60) > 5
    assert lone.learned == pytest.approx(before, abs=0.5)


@pytest.mark.parametrize("is_last", [False, True])
def test_the_last_work_of_a_lone_peer_waits_for_no_download(lone, is_last):
    lone.rate = 2e6
    with lone.log.held(lone.heads[-3]):
        assert lone.run(6, is_last=is_last) == is_last


async def test_the_core_is_told_whether_joiners_need_the_recorded_commits(runtime, monkeypatch):
    told = []
    log = runtime.averaging.commit_log
    monkeypatch.setattr(log, "would_drop_needed", lambda _numel: log.is_wanted)
    handle = runtime.core.handle

    def heard(event: events.Event | None, now: float) -> Sequence[effects.Effect]:
        told.extend([event.is_needed] if isinstance(event, events.LogNeeded) else [])
        return handle(event, now)

    monkeypatch.setattr(runtime.core, "handle", heard)
    monkeypatch.setattr("peers.reduce.commit_log.KEPT_FOR_S", 0.0)
    monkeypatch.setattr("peers.daemon.averaging.FETCH_S", math.inf)
    mine = memories()
    async with running(runtime):
        await runtime.begin_worker(mine.inn, offered())
        with runtime.averaging.commit_log.held():
            averaging = asyncio.create_task(runtime.average(work_in(mine)))
            while not told:
                await asyncio.sleep(0)
            assert told == [True] and runtime.core.round.stage is Stage.GATHER
        assert (await averaging).epoch == 1
    assert told == [True, False]


class ScriptedCore(SimpleNamespace):
    """A core that answers each event with the effects from its script, and records all events."""

    def __init__(self, script: Callable[[events.Event], Sequence[effects.Effect]]) -> None:
        super().__init__(me="me", world_rank=0, phase="waiting", deadline=0.0, head="", last_failures=())
        self.swarm, self.hears_a_run = SimpleNamespace(live=dict), False
        self.script, self.heard = script, list[events.Event]()

    def handle(self, event: events.Event | None, now: float) -> Sequence[effects.Effect]:
        self.deadline = now + 60
        if event is None:
            return ()
        self.heard.append(event)
        return self.script(event)


async def test_once_a_joiner_has_the_swarms_state_it_lets_go_of_its_own_initial_one(runtime):
    fetched = begun([torch.ones(SIZE)])
    certificate = fetched.header.certificate

    def script(event: events.Event) -> Sequence[effects.Effect]:
        match event:
            case events.StateOffered():
                return (effects.Fetch((certificate,), ("donor",), 10.0),)
            case events.Fetched():
                return effects.Adopt(certificate), effects.Answer("begin", certificate, 0)
        return ()

    async def hand_over(*_: Any) -> OuterState:
        return fetched

    runtime.core, runtime._fetch_state = ScriptedCore(script), hand_over
    mine, own = memories(), offered()
    unused = weakref.ref(own)
    assert runtime.needs_offer and not runtime.run_is_alive
    runtime.core.hears_a_run = True
    assert runtime.run_is_alive
    runtime.core.hears_a_run = False
    async with running(runtime):
        beginning = asyncio.create_task(runtime.begin_worker(mine.inn, own))
        del own
        await beginning
        assert runtime.run_is_alive
        assert runtime.state is fetched and not runtime.needs_offer and mine.inn[0].all()
        del beginning
        gc.collect()
        assert unused() is None


async def test_who_missed_the_founding_downloads_nothing_of_what_its_worker_offers(runtime):
    """All peers have loaded the same weights."""
    state, received = begun([torch.ones(SIZE)]), []
    certificate = state.header.certificate

    def script(event: events.Event) -> Sequence[effects.Effect]:
        match event:
            case events.StateOffered():
                return (effects.Fetch((certificate,), ("donor",), 10.0),)
            case events.Fetched():
                return effects.Adopt(certificate), effects.Answer("begin", certificate, 0)
        return ()

    mine, runtime.core = memories(), ScriptedCore(script)
    async with Network() as network:
        await serve(network, "donor", state)
        bound = {"run_id": RUN, "transport": network.transport("me"), "manifest": {}}
        runtime._fetch_state = partial(fetch_state, **bound, on_received=received.append)
        async with running(runtime):
            await runtime.begin_worker(mine.inn, OuterState.initial([torch.ones(SIZE)]))
    # Else it would also be told of what has been received.
    assert received == [(0, 2 * 4 * SIZE), None]
    assert runtime.state is not None and runtime.state.head == state.head and mine.inn[0].all()


async def test_a_fetched_state_that_is_not_needed_any_more_is_not_kept(runtime):
    first, second = begun([torch.ones(SIZE)]), begun([torch.zeros(SIZE)])
    unused, head = weakref.ref(first), first.head
    paths = [(state.header.certificate,) for state in (first, second)]

    def script(event: events.Event) -> Sequence[effects.Effect]:
        match event:
            case events.StateOffered():
                return (effects.Fetch(paths[0], ("donor",), 10.0),)
            case events.WorkerGone():
                return (effects.Fetch(paths[1], ("donor",), 10.0),)
        return ()

    async def hand_over(path: Any, *_: Any) -> OuterState:
        nonlocal first
        if path is paths[1]:
            await asyncio.Event().wait()
        # The runtime handles this event before it hears that the fetch has ended.
        runtime.post(events.WorkerGone())
        found, first = first, None
        return found

    runtime.core, runtime._fetch_state = ScriptedCore(script), hand_over
    async with running(runtime):
        beginning = asyncio.create_task(runtime.begin_worker(memories().inn, offered()))
        while events.WorkerGone() not in runtime.core.heard:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        gc.collect()
        assert unused() is None and events.Fetched(head) not in runtime.core.heard
        beginning.cancel()


def forked() -> OuterState:
    """A state of two fragments, one commit after the genesis; always the same."""
    state = begun([torch.ones(SIZE), torch.ones(SIZE)])
    commit(state, torch.ones(SIZE), fragment=0)
    return state


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ("missed", [True, True]),
        ("contains this peer's work", [True, False]),
        ("fetched once more", [True, True]),
        ("fork", [False, False]),
    ],
)
async def test_what_the_codec_has_kept_back_goes_with_the_history_that_it_belongs_to(runtime, case, kept):
    old, new = forked(), forked()
    path = [new.header.certificate]
    if case == "fork":
        new = begun([torch.zeros(SIZE), torch.ones(SIZE)])
        path = [new.header.certificate, commit(new, torch.ones(SIZE), fragment=1)]
    elif case != "fetched once more":
        path = [commit(new, torch.ones(SIZE), fragment=1)]

    def script(event: events.Event) -> Sequence[effects.Effect]:
        match event:
            case events.WorkerGone():
                return (effects.Fetch(tuple(path), ("donor",), 10.0),)
            case events.Fetched():
                return (effects.Adopt(path[-1]),)
        return ()

    async def hand_over(*_: Any) -> OuterState:
        return new

    runtime.core, runtime._fetch_state, runtime.state = ScriptedCore(script), hand_over, old
    runtime.averaging._me = "peer1" if case == "contains this peer's work" else "another"
    residuals = [Residuals.from_tensors(SIZE, {"contribution": torch.ones(SIZE)}) for _ in range(2)]
    runtime.averaging.residuals = residuals
    async with running(runtime):
        runtime.post(events.WorkerGone())
        while runtime.state is not new:
            await asyncio.sleep(0)
    found = [one.contribution_residual is not None for one in runtime.averaging.residuals]
    assert found == kept


async def test_a_worker_whose_peer_adopts_a_state_in_mid_epoch_is_based_on_another_one_until_it_begins(
    runtime,
):
    old, new = forked(), forked()
    certificate = commit(new, torch.ones(SIZE), fragment=1)

    def script(event: events.Event) -> Sequence[effects.Effect]:
        match event:
            case events.WorkerGone():
                return (effects.Fetch((certificate,), ("donor",), 10.0),)
            case events.Fetched():
                return (effects.Adopt(certificate),)
            case events.WorkerWaits():
                return (effects.Answer("begin", certificate, 0),)
        return ()

    async def hand_over(*_: Any) -> OuterState:
        return new

    runtime.core, runtime._fetch_state, runtime.state = ScriptedCore(script), hand_over, old
    runtime.averaging.residuals = [Residuals(SIZE) for _ in range(2)]
    assert runtime.is_workers_base
    async with running(runtime):
        runtime.post(events.WorkerGone())
        while runtime.state is not new:
            await asyncio.sleep(0)
        assert not runtime.is_workers_base
        await runtime.begin_worker([torch.zeros(SIZE) for _ in range(2)], None)
        assert runtime.is_workers_base


@pytest.mark.parametrize(("leader", "expected"), [("me", {"a", "b"}), ("a", set())])
def test_who_leads_the_next_round_expects_to_write_to_all_others(runtime, monkeypatch, leader, expected):
    monkeypatch.setattr(runtime.averaging, "expect", lambda bandwidths: None)
    here = dict.fromkeys("ab", SimpleNamespace(world_rank=1))
    core = runtime.core = ScriptedCore(lambda _: ())
    core.phase, core.head = "training", "head"
    core.swarm = SimpleNamespace(live_at=lambda head: here, roster=frozenset(), status=here.get)
    core.chain = SimpleNamespace(newest=begun([torch.zeros(1)]).header.certificate)
    core.round = SimpleNamespace(attempt=0, leader_of=lambda attempt: leader)
    runtime._expect_others()
    assert runtime._mesh.expected == [expected]
