"""The daemon's side of a worker that dies while its work is averaged, over the real link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diloco.train.progress import Progress
from peers.daemon import host as host_module
from peers.daemon.averaging import WorkInHand
from peers.daemon.host import WorkerHost
from peers.daemon.link import WorkerLink, listen, refuse
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.protocol.reports import Phase
from peers.state.files import Saving, Written
from peers.state.handover import Ahead, EpochOutcome, Start
from peers.state.layout import Layout, ParameterSlot
from peers.state.outer_state import OuterState
from peers.state.whole_files import FileRecord
from tests.support.certified import signed_genesis
from tests.support.scripted_daemon import COMMITTED
from tests.support.swarm import wait_until

NUMEL = 8
LAYOUT = Layout(((ParameterSlot("w", (NUMEL,), 0),),))


class SlowHost(WorkerHost):
    """A host that is its own runtime, monitor and disk, and averages until the test sets `go_on`."""

    phase = Phase(name="testing")
    core = SimpleNamespace(world_rank=0, epoch_s=4.0, timing=SimpleNamespace(set_sizes=lambda **_: None))
    state, averaging, is_workers_base = "training", SimpleNamespace(residuals=[]), True
    needs_offer, run_is_alive = False, True

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(manifest={}), self, None)
        self._saving = self
        self._ready.set_result(self)
        self.news: list[tuple[Any, ...]] = []
        self.began, self.go_on = asyncio.Event(), asyncio.Event()
        self.weights_seen: list[float] = []

    async def average(self, work: WorkInHand) -> EpochOutcome:
        self.began.set()
        await self.go_on.wait()
        self.weights_seen.append(float(work.local[0]))
        raise UserError("that is all the test needs")

    async def begin(self, state: Any, residuals: Any, directory: Path, is_workers_base: bool) -> None:
        if "nowhere" in directory.parts:
            raise OSError("there is no such place")

    async def finish(self, directory: Path) -> Written:
        await self.go_on.wait()
        return Written({"a": FileRecord(5, "digest")}, "head")

    def doing(self, message: Mapping[str, Any] | None) -> None:
        self.news.append(("doing", message["name"] if message else None))

    def evaluated(self, message: Mapping[str, Any]) -> None:
        self.news.append(("evaluated", message["step"], message["loss"]))

    def is_in_trouble(self, what: str, text: str) -> None:
        self.news.append((what, text))

    def handed_over(self, work: WorkInHand, ready: Mapping[str, Any]) -> None: ...

    def goes_ahead(self) -> None: ...
    def waits(self) -> None: ...

    def averaged(self, outcome: EpochOutcome) -> None: ...
    def show(self, state: str) -> None: ...
    def _worker_lost(self) -> None: ...


def connect(path: Path, weight: float) -> WorkerLink:
    link = WorkerLink.connect(path)
    link.hello(LAYOUT, local_rank=0)
    np.frombuffer(link.memories[0].out, np.float32, NUMEL)[:] = weight
    return link


def hang_up(link: WorkerLink) -> None:
    """Hang up as a dying worker does; returns once the daemon has noticed."""
    link._sock.shutdown(socket.SHUT_WR)
    link._sock.settimeout(5.0)
    while link._sock.recv(1):
        pass


async def test_the_next_life_of_a_worker_does_not_write_into_what_is_still_averaged(tmp_path):
    host = SlowHost()
    assert not host.has_met_worker
    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(host.serve(accept))
        first = await asyncio.to_thread(connect, tmp_path / "link", 1.0)
        first.send("ready", fragment=0, tokens=1, step=1, step_s=0.5, last=False)
        await host.began.wait()
        await asyncio.to_thread(hang_up, first)
        second = await asyncio.to_thread(connect, tmp_path / "link", 2.0)
        host.go_on.set()
        while not host.weights_seen:
            await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        first.close()
        second.close()
    assert host.weights_seen == [1.0]
    assert host.has_met_worker


class FailingHost(SlowHost):
    async def average(self, work: WorkInHand) -> EpochOutcome:
        raise PeersError("its weights are not finite any more")


async def test_a_worker_is_told_why_its_work_cannot_be_averaged(tmp_path):
    def work() -> None:
        link = connect(tmp_path / "link", 1.0)
        link.send("ready", fragment=0, tokens=1, step=1, step_s=0.5, last=False)
        link.send("collect")
        try:
            with pytest.raises(PeersError, match="not finite any more") as failure:
                link.receive("committed")
        finally:
            link.close()
        assert type(failure.value) is PeersError

    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(FailingHost().serve(accept))
        await asyncio.to_thread(work)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_worker_goes_on_while_its_daemon_writes_and_hears_of_it_on_another_connection(tmp_path):
    def work(host: SlowHost, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        training, waiting = connect(tmp_path / "link", 1.0), WorkerLink.connect(tmp_path / "link")
        training.send("snapshot", directory=str(tmp_path / "nowhere"))
        assert training.receive("snapped", "failed")["reason"] == "there is no such place"
        training.send("snapshot", directory=str(tmp_path))
        assert training.receive("snapped", "failed")["kind"] == "snapped"
        waiting.send("written", directory=str(tmp_path))
        # Served while the other connection still has no answer.
        training.send("finished")
        training.receive("bye")
        loop.call_soon_threadsafe(host.go_on.set)
        answer = waiting.receive("checkpointed", "failed")
        for link in (waiting, training):
            link.close()
        return answer

    host = SlowHost()
    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(host.serve(accept))
        answer = await asyncio.to_thread(work, host, asyncio.get_running_loop())
        assert (answer["files"], answer["head"]) == ({"a": [5, "digest"]}, "head")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_what_a_worker_tells_beside_its_training_is_heard_until_it_hangs_up(tmp_path):
    host = SlowHost()
    async with listen(tmp_path / "link.sock") as accept:
        serving = asyncio.create_task(host.serve(accept))

        def train() -> None:
            progress = Progress(tmp_path / "link.sock")
            with progress.phase("evaluating", total=5, unit="windows"):
                wait_until(lambda: ("doing", "evaluating") in host.news, "the phase")
            progress.evaluated(7, 2.5)
            progress.is_in_trouble("disk", "it is full")
            progress.close()

        await asyncio.to_thread(train)
        await asyncio.to_thread(wait_until, lambda: host.news[-1] == ("doing", None), "its end")
        serving.cancel()
    news = host.news
    assert news[0] == ("doing", "evaluating") and ("evaluated", 7, 2.5) in news
    assert ("disk", "it is full") in news and news[-1] == ("doing", None)


async def test_a_worker_may_load_for_long_between_its_connection_and_its_first_message(tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "START_S", 0.0)

    def work() -> None:
        loading, link = WorkerLink.connect(tmp_path / "link"), WorkerLink.connect(tmp_path / "link")
        link.send("adopt")
        answer = link.receive("manifest")
        assert (answer["needs_offer"], answer["run_is_alive"]) == (False, True)
        link.close()
        loading.hello(LAYOUT, local_rank=0)
        loading.close()

    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(SlowHost().serve(accept))
        await asyncio.to_thread(work)
        silent = await asyncio.to_thread(WorkerLink.connect, tmp_path / "link")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        silent.close()


class TrainingHost(SlowHost):
    """A host that already has a state, as every life of a worker finds it after the first one."""

    async def begin_worker(self, inn: Any, offered: Any, residuals: Any) -> Start:
        assert offered is None and residuals is None
        return Start(
            world_rank=0,
            epoch=7,
            local_step=0,
            data_base=9,
            anchor_digest="d",
            head="l",
            num_peers=2,
            keep_local=False,
        )

    def started(self, start: Start) -> None: ...


async def test_a_later_life_of_a_worker_offers_no_state_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "offered_state", None)

    def work() -> dict[str, Any]:
        link = connect(tmp_path / "link", 1.0)
        link.send("offer", resume=None, is_own=True, epoch=0, local_step=0)
        try:
            return link.receive("start")
        finally:
            link.close()

    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(TrainingHost().serve(accept))
        start = await asyncio.to_thread(work)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert start["epoch"] == 7


async def test_a_worker_that_asks_how_long_its_epoch_may_last_is_told_what_is_known_by_now(tmp_path):
    def work() -> float:
        link = connect(tmp_path / "link", 1.0)
        link.send("budget")
        try:
            return link.receive("budget")["epoch_s"]
        finally:
            link.close()

    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(SlowHost().serve(accept))
        assert await asyncio.to_thread(work) == 4.0
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class ResumingHost(TrainingHost):
    """A host that writes its state, and whose run begins from the state that its worker offers."""

    def __init__(self, state: OuterState | None = None, *, is_workers_base: bool = True) -> None:
        super().__init__()
        self._agreement = SimpleNamespace(manifest={"hv.compression": "fp32"})
        self._saving, self.state, self.is_workers_base = Saving(), state, is_workers_base

    @property
    def needs_offer(self) -> bool:
        return self.state is None

    async def begin_worker(self, inn: Any, offered: Any, residuals: Any) -> Start:
        self.state = offered
        return await super().begin_worker(inn, None, None)


@pytest.mark.parametrize("is_workers_base", [True, False])
async def test_a_resumed_worker_keeps_its_weights_only_if_they_are_based_on_the_anchor_saved_with_them(
    tmp_path, is_workers_base
):
    """A late worker's peer adopts the others' commits in the middle of its epoch."""
    state = OuterState.initial([torch.ones(NUMEL)])
    state.certify(signed_genesis(tmp_path, state.anchor_digest, state.header.momentum_digest))

    def ask(kind: str, answer: str, **fields: Any) -> dict[str, Any]:
        link = connect(tmp_path / "link", 1.0)
        link.send(kind, **fields)
        try:
            return link.receive(answer)
        finally:
            link.close()

    async def asked(host: WorkerHost, *words: str, **fields: Any) -> dict[str, Any]:
        async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
            serving = asyncio.create_task(host.serve(accept))
            answer = await asyncio.to_thread(ask, *words, **fields)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return answer

    before = ResumingHost(state, is_workers_base=is_workers_base)
    await asked(before, "snapshot", "snapped", directory=str(tmp_path))
    await before._saving.finish(tmp_path)
    offer = {"resume": str(tmp_path), "is_own": True, "epoch": 7, "local_step": 5}
    start = await asked(ResumingHost(), "offer", "start", **offer)
    assert (start["keep_local"], start["local_step"]) == ((True, 5) if is_workers_base else (False, 0))


class LeavingHost(TrainingHost):
    """A host that shows `state`: its worker's last work is committed."""

    state = "leaving"
    _worker_lost = WorkerHost._worker_lost

    def post(self, event: Any) -> None: ...

    def lost(self) -> None:
        self.news.append(("lost",))

    def show(self, state: str) -> None:
        self.news.append(("show", state))


async def test_a_worker_that_fails_after_it_has_finished_counts_as_lost_in_its_next_life(tmp_path):
    def live(*, finishes: bool) -> None:
        link = connect(tmp_path / "link", 1.0)
        link.send("offer", resume=None, is_own=True, epoch=0, local_step=0)
        assert link.receive("start")["epoch"] == 7
        if finishes:
            link.send("finished")
            link.receive("bye")
        hang_up(link)
        link.close()

    host, news = LeavingHost(), []
    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        serving = asyncio.create_task(host.serve(accept))
        for finishes in (True, False):
            await asyncio.to_thread(live, finishes=finishes)
            await asyncio.to_thread(wait_until, lambda: host.news, "its end")
            news.append(host.news)
            host.news = []
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert news == [[("show", "leaving")], [("lost",), ("show", "joining")]]


class LateHost(SlowHost):
    """A host that lets the worker train on at once, and has its commit when the test sets `go_on`."""

    async def average(self, work: WorkInHand) -> EpochOutcome:
        work.ahead.set_result(Ahead(epoch=1, data_base=3))
        self.began.set()
        await self.go_on.wait()
        figures = {**COMMITTED, "epoch": 1, "data_base": 3, "fragment": 0, "last": False}
        return EpochOutcome(**figures, world_rank=0, num_failures=0)


@pytest.mark.parametrize("may_go_ahead", [True, False])
def test_a_worker_that_may_trains_on_and_asks_again_until_its_commit_is_there(tmp_path, may_go_ahead):
    async def scenario() -> list[str]:
        host, answers = LateHost(), list[str]()
        async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
            serving = asyncio.create_task(host.serve(accept))
            link = await asyncio.to_thread(connect, tmp_path / "link", 1.0)

            async def ask(kind: str, **fields: Any) -> dict[str, Any]:
                link.send(kind, **fields)
                answer = await asyncio.to_thread(link.receive, "committed", "ahead", "pending")
                answers.append(answer["kind"])
                return answer

            link.send("ready", fragment=0, tokens=1, step=1, step_s=0.5, last=False)
            await host.began.wait()
            if may_go_ahead:
                ahead = await ask("collect", may_go_ahead=True)
                assert (ahead["epoch"], ahead["data_base"]) == (1, 3)
                await ask("poll")
                host.go_on.set()
                while answers[-1] != "committed":
                    await ask("poll")
            else:
                asyncio.get_running_loop().call_later(0.2, host.go_on.set)
                await ask("collect", may_go_ahead=False)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            link.close()
        return answers

    answers = asyncio.run(scenario())
    assert answers[-1] == "committed"
    assert answers[:2] == (["ahead", "pending"] if may_go_ahead else ["committed"])


def adopt(path: Path) -> None:
    link = WorkerLink.connect(path)
    link.send("adopt")
    link.receive("manifest")


@pytest.mark.parametrize("has_joined_the_dht", [True, False])
@pytest.mark.parametrize(
    "error", [UserError("its rank is taken"), PeerUnreachable("nobody answers")], ids=str
)
async def test_a_worker_is_told_why_its_peer_cannot_join_and_whether_its_user_has_to_act(
    tmp_path, error, has_joined_the_dht
):
    host = WorkerHost(SimpleNamespace(manifest={}), SimpleNamespace(is_in_trouble=lambda *_: None), None)
    async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
        adopting = asyncio.create_task(asyncio.to_thread(adopt, tmp_path / "link"))
        if has_joined_the_dht:
            serving = asyncio.create_task(host.serve(accept))
            await host.refuse(error, wait=True)
            serving.cancel()
        else:
            await refuse(accept, error)
        with pytest.raises(PeersError, match=str(error)) as raised:
            await adopting
    assert type(raised.value) is (UserError if isinstance(error, UserError) else PeersError)
