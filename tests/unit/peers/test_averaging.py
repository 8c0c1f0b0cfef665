"""The averager with nobody else around, and with a peer that never stops talking."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from peers.averaging import Averager, AveragingSettings
from peers.errors import StateUnavailable
from peers.handover import Memories
from peers.mesh import Mesh
from peers.network.streams import StreamPool
from peers.outer_optimizer import OuterOptimizer
from peers.outer_state import OuterState
from peers.records import Announcement
from peers.round.absences import TOLERATED
from peers.round.actions import CatchUp
from peers.round.deadlines import Deadlines
from peers.round.messages import Ask
from peers.rounds import Round
from peers.schedule import Schedule
from tests.support.round_world import status


class NoTransport:
    async def open(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("nobody is there")

    async def serve(self, *_args: Any) -> None:
        raise AssertionError("nobody is there")


def memories(*sizes: int, value: float = 1.0) -> Memories:
    sizes = sizes or (1000,)
    return Memories(
        tuple(torch.full((size,), value) for size in sizes), tuple(torch.zeros(size) for size in sizes)
    )


def after_a_commit(average: float) -> tuple[OuterState, OuterState]:
    """A state of four weights, and what others have made of it."""
    old = OuterState.initial([torch.zeros(4)])
    new = OuterState(old.header, [old.anchor[0].clone()], [old.momentum[0].clone()])
    OuterOptimizer(lr=1.0, momentum=0.0).commit(new, 0, torch.full((4,), average), tokens=1000, data_width=2)
    return old, new


def ahead(state: OuterState, *, local_step: int) -> Announcement:
    """Peer 0, who holds this state and is so far in its epoch, at ten steps a second."""
    told = status(0, lineage=state.lineage, epoch=state.epoch, tokens=state.committed_tokens)
    return dataclasses.replace(told, local_step=local_step, step_s=0.1)


def an_averager(
    others: dict[int, Announcement] | None = None,
    me: int = 0,
    *,
    state: OuterState | None = None,
    better: Sequence[OuterState] = (),
    num_fragments: int = 1,
    averaging_timeout_s: float | None = 0.5,
    local_steps: int = 2,
    step_s: float = 0.0,
    has_worker: bool = True,
    codec: str = "fp32",
) -> Averager:
    def view() -> dict[int, Announcement]:
        own = status(me, lineage=averager.state.lineage, epoch=averager.state.epoch)
        return {**({} if others is None else others), me: dataclasses.replace(own, step_s=step_s)}

    async def download(_donors: list[str], lineage: str) -> OuterState:
        for state in better:
            if state.lineage == lineage:
                return state
        raise StateUnavailable("nobody hands it over")

    mesh = Mesh(
        run_id="t", peer_id="me", transport=NoTransport(), status=bytes,
        on_change=lambda: None, on_message=lambda *_: None,
    )  # fmt: skip
    averager = Averager(
        me=me,
        incarnation=1,
        settings=AveragingSettings(
            schedule=Schedule(local_steps=local_steps * num_fragments, num_fragments=num_fragments),
            codec=codec,
            deadlines=Deadlines(
                strategy="NO_WAIT", matchmaking_s=0.2, averaging_timeout_s=averaging_timeout_s
            ),
        ),
        mesh=mesh,
        pool=StreamPool(NoTransport(), "t"),
        optimizer_for=lambda _num_members: OuterOptimizer(lr=0.7, momentum=0.9),
        view=view,
        download=download,
        changed=lambda: None,
        has_worker=lambda: has_worker,
    )
    averager.adopt(state or OuterState.initial([torch.zeros(1000)]))
    return averager


@contextlib.asynccontextmanager
async def running(averager: Averager) -> AsyncIterator[None]:
    task = asyncio.create_task(averager.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_no_worker_starts_between_anothers_readiness_and_its_commit():
    async def scenario() -> None:
        averager = an_averager()
        averaging = asyncio.create_task(averager.average(memories(), 0, tokens=1, step=2, last=False))
        await asyncio.sleep(0)
        # The worker has died, and its successor asks where to start: not before this work is in.
        idle = asyncio.create_task(averager.await_new_worker())
        async with running(averager), asyncio.timeout(20):
            await idle
            assert averager.state.epoch == 1
            await averaging

    asyncio.run(scenario())


def test_the_parts_of_a_round_add_up_to_it():
    async def scenario() -> None:
        averager = an_averager()
        async with running(averager), asyncio.timeout(20):
            outcome = await averager.average(memories(), 0, tokens=1, step=2, last=False)
        parts = (outcome.connect_s, outcome.reduce_s, outcome.preview_s, outcome.vote_s, outcome.apply_s)
        assert all(part > 0 for part in parts)
        assert 0 < outcome.propose_s <= outcome.wait_s
        assert sum(parts) <= outcome.round_s < sum(parts) + 1

    asyncio.run(scenario())


def test_deadlines_hold_however_much_a_peer_talks():
    async def scenario() -> None:
        # The talker has the lowest rank, so this peer waits for it to lead.
        lineage = an_averager().state.lineage
        averager = an_averager({0: status(0, lineage=lineage)}, me=1)

        async def talk() -> None:
            while True:
                averager.received(0, Ask(0, lineage))
                await asyncio.sleep(0.001)

        talking = asyncio.create_task(talk())
        async with running(averager), asyncio.timeout(20):
            outcome = await averager.average(memories(), 0, tokens=1, step=2, last=False)
        talking.cancel()
        assert outcome.contributors == [1]

    asyncio.run(scenario())


def test_what_a_peer_says_while_nobody_listens_takes_bounded_memory():
    averager = asyncio.run(_deafened())
    assert averager._events.qsize() < 1000


def test_who_has_missed_other_fragments_brings_its_work_to_their_new_anchors():
    async def scenario() -> None:
        old = OuterState.initial([torch.ones(4), torch.ones(3)])
        new = OuterState.initial([torch.ones(4), torch.ones(3)])
        optimizer = OuterOptimizer(lr=1.0, momentum=0.0)
        for fragment in range(2):
            average = torch.full((new.sizes[fragment],), 0.25 * (1 + fragment))
            optimizer.commit(new, fragment, average, tokens=5, data_width=2)
        optimizer.commit(new, 0, torch.full((4,), 0.125), tokens=5, data_width=2)
        ahead = dataclasses.replace(status(0, lineage=new.lineage, epoch=3, tokens=15), local_step=1)
        averager = an_averager({0: ahead}, me=1, state=old, better=[new], num_fragments=2)
        handed_over = memories(4, 3, value=1.5)
        async with running(averager), asyncio.timeout(20):
            outcome = await averager.average(handed_over, 0, tokens=1, step=2, last=False)
        # The others are at fragment 1 now, so this peer's half a unit of work on fragment 0 waits for the next time.
        assert (outcome.epoch, outcome.contributors, outcome.shifted, outcome.local_step) == (3, [], [1], 1)
        assert handed_over.inn[0].tolist() == [1 - 0.25 - 0.125 + 0.5] * 4
        assert handed_over.inn[1].tolist() == [-0.5] * 3
        assert handed_over.out[0].tolist() == [1.5] * 4

    asyncio.run(scenario())


def test_the_losing_side_of_a_fork_brings_what_it_has_committed_along():
    async def scenario() -> None:
        optimizer = OuterOptimizer(lr=1.0, momentum=0.0)
        start = OuterState.initial([torch.zeros(4)])
        optimizer.commit(start, 0, torch.full((4,), 0.5), tokens=20, data_width=2)
        new = OuterState(start.header, [start.anchor[0].clone()], [start.momentum[0].clone()])
        optimizer.commit(new, 0, torch.full((4,), 0.25), tokens=1000, data_width=2)
        others: dict[int, Announcement] = {}
        averager = an_averager(others, me=1, state=start, better=[new])
        averager.optimizer_for = averager._attempts._optimizer_for = lambda _num_members: optimizer
        # The group before had another member, of whom nothing is to be heard.
        averager._late.branch.committing([0, 1], "", 0, torch.zeros(4), tokens=0)
        handed_over = memories(4, value=-1.5)
        async with running(averager), asyncio.timeout(20):
            await averager.average(handed_over, 0, tokens=7, step=4, last=False)
            alone = averager.state.lineage
            assert alone != start.header.parent and handed_over.inn[0].tolist() == [-1.5] * 4
            # It trains on by one half of a unit, and then hears of the others.
            handed_over.out[0].sub_(0.5)
            others[0] = status(0, lineage=new.lineage, epoch=new.epoch, tokens=new.committed_tokens)
            averager.view_changed()
            averaging = asyncio.create_task(averager.average(handed_over, 0, tokens=3, step=6, last=False))
            while averager.state.lineage == alone:
                await asyncio.sleep(0.01)
            # They go again, and so the work is in what this peer commits by itself.
            del others[0]
            averager.view_changed()
            outcome = await averaging
        # One unit from the epoch on its own, and the half since.
        assert handed_over.inn[0].tolist() == [-0.5 - 0.25 - 1.0 - 0.5] * 4
        assert averager.state.committed_tokens == 20 + 1000 + 7 + 3
        assert (outcome.carried_tokens, outcome.contributors) == (7, [1])

    asyncio.run(scenario())


def test_who_comes_too_late_trains_on_once_and_then_waits_for_the_round():
    async def scenario() -> None:
        old, new = after_a_commit(0.25)
        others, better = {0: ahead(new, local_step=4)}, [new]
        averager = an_averager(others, me=1, state=old, better=better, local_steps=10, step_s=0.2)
        handed_over = memories(4, value=-0.5)
        async with running(averager), asyncio.timeout(20):
            outcome = await averager.average(handed_over, 0, tokens=7, step=10, last=False)
            # The others have six steps to go; this peer, at half their pace, does three of them.
            assert (outcome.epoch, outcome.local_step, outcome.contributors) == (1, 7, [])
            assert handed_over.inn[0].tolist() == [-0.25 - 0.5] * 4
            assert (outcome.carried_tokens, averager.state.committed_tokens) == (0, 1000)
            assert averager._num_left_out == 1
            # They have gone on again. For this time its work is brought to their round as it is.
            newer = OuterState(new.header, [new.anchor[0].clone()], [new.momentum[0].clone()])
            OuterOptimizer(lr=1.0, momentum=0.0).commit(
                newer, 0, torch.full((4,), 0.25), tokens=1000, data_width=2
            )

            better.append(newer)
            others[0] = ahead(newer, local_step=4)
            averager.view_changed()
            averaging = asyncio.create_task(averager.average(handed_over, 0, tokens=10, step=20, last=False))
            while averager.state.lineage != newer.lineage:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert not averaging.done()
            others.clear()
            averager.view_changed()
            assert averager._num_left_out == 2
            assert (await averaging).contributors == [1]
            assert averager.state.committed_tokens == 2010
            assert averager._num_left_out == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("is_led_by_first", [True, False])
def test_what_it_has_learned_of_leaders_is_kept_while_it_follows_another_than_the_first(
    monkeypatch, is_led_by_first
):
    monkeypatch.setattr(Round, "is_led_by_first", is_led_by_first)

    async def scenario() -> None:
        averager = an_averager()
        averager._num_left_out = 3
        async with running(averager), asyncio.timeout(20):
            await averager.average(memories(), 0, tokens=1, step=2, last=False)
        assert averager._num_left_out == (0 if is_led_by_first else 3)

    asyncio.run(scenario())


def test_what_a_worker_has_handed_over_that_is_no_more_waits_for_the_round():
    async def scenario() -> None:
        old, new = after_a_commit(0.25)
        others = {0: ahead(new, local_step=4)}
        averager = an_averager(
            others, me=1, state=old, better=[new], local_steps=10, step_s=0.1, has_worker=False
        )
        async with running(averager), asyncio.timeout(20):
            averaging = asyncio.create_task(averager.average(memories(4), 0, tokens=7, step=10, last=False))
            while averager.state.lineage != new.lineage:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert not averaging.done()
            others.clear()
            averager.view_changed()
            await averaging
            assert averager.state.committed_tokens == 1007

    asyncio.run(scenario())


def test_a_first_round_is_given_time_by_its_bytes_and_the_next_by_what_was_seen():
    async def scenario() -> None:
        small = an_averager(averaging_timeout_s=None)
        large = an_averager(averaging_timeout_s=None, state=OuterState.initial([torch.zeros(20_000_000)]))
        before = small._round.timing.attempt_s
        assert large._round.timing.attempt_s > 3 * before
        # Cut off by its own deadline: the next one is longer. Broken off sooner: it says nothing.
        small._learn_from_failure(0.1 * before, small._round)
        assert small._round.timing.attempt_s == before
        small._learn_from_failure(0.8 * before, small._round)
        assert small._round.timing.attempt_s > 2 * before

    asyncio.run(scenario())


def test_a_peer_that_was_away_for_several_commits_is_told_how_its_lineage_went_on():
    async def scenario() -> None:
        averager = an_averager()
        first = averager.state.lineage
        async with running(averager), asyncio.timeout(20):
            for step in (2, 4):
                await averager.average(memories(), 0, tokens=1, step=step, last=False)
        (answer,) = averager._route(3, Ask(0, first), 0.0)
        assert (answer.rank, answer.message.lineage) == (3, first)

    asyncio.run(scenario())


async def _deafened() -> Averager:
    averager = an_averager({1: status(1)})
    for _ in range(100_000):
        averager.received(1, Ask(0, "a"))
    return averager


def test_what_top_k_holds_back_is_forgotten_by_the_step():
    async def kept_after(local_steps: int) -> torch.Tensor:
        averager = an_averager(codec="topk", local_steps=local_steps)
        async with running(averager), asyncio.timeout(20):
            await averager.average(memories(value=1.0), 0, tokens=1, step=local_steps, last=False)
        kept = averager.residuals[0].contribution
        assert kept is not None
        return kept

    for local_steps, decay in ((6, 0.95 ** (6 / 30)), (500, 0.95)):
        kept = asyncio.run(kept_after(local_steps))
        # Of equal values the first ones are sent, as they are.
        assert float(kept[0]) == 0 and float(kept[-1]) == pytest.approx(-decay)


@pytest.mark.parametrize("is_whole", [True, False])
def test_who_sends_others_to_fetch_what_they_have_is_left_out_and_who_is_right_to_do_so_is_not(is_whole):
    async def scenario() -> bool:
        state = OuterState.initial([torch.zeros(1000)])
        better = OuterState(state.header, [torch.zeros(1000)], [torch.zeros(1000)])
        averager = an_averager({0: status(0, lineage=state.lineage)}, me=1, state=state, better=[better])
        for _ in range(3):
            if not is_whole:
                averager.state.anchor[0][7] = 1.0
            await averager._catch_up(CatchUp(0, "left out", resync=True))
        return averager._offences.is_barred("peer0", 0)

    assert asyncio.run(scenario()) == is_whole


def test_rounds_know_what_an_epoch_takes_this_peer_itself_and_whom_not_to_wait_for():
    async def scenario() -> None:
        others: dict[int, Announcement] = {}
        averager = an_averager(others, local_steps=3, step_s=5.0)
        deadlines = averager._settings.deadlines
        async with running(averager):
            await averager.average(memories(), 0, tokens=1, step=3, last=False)
        assert list(deadlines._own) == [15.0]
        others[1] = status(1)
        averager._absences._in_a_row = {"peer1": TOLERATED}
        averager._open_round()
        assert averager._round is not None and averager._round._lead.unawaited == {1}

    asyncio.run(scenario())
