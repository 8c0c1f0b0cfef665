import asyncio
import logging

import pytest

from peers.tasks import Tasks, cancelled, first_of, is_set_within


def test_the_tasks_of_an_object_end_with_it_and_errors_of_theirs_are_logged(caplog):
    async def scenario():
        tasks = Tasks()
        waits = tasks.spawn(asyncio.sleep(60))

        async def fails():
            raise ValueError("odd")

        failing = tasks.spawn(fails())
        await asyncio.wait([failing])
        await tasks.close()
        assert waits.cancelled()
        await tasks.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "a background task failed" in caplog.text and "odd" in caplog.text


def test_what_came_of_those_that_had_ended_before_they_were_cancelled_is_returned():
    async def scenario():
        async def seven():
            return 7

        done, waits = asyncio.create_task(seven()), asyncio.create_task(asyncio.sleep(60))
        await asyncio.wait([done])
        found = await cancelled([done, waits])
        assert found[0] == 7 and isinstance(found[1], asyncio.CancelledError)

    asyncio.run(scenario())


def test_of_several_that_run_beside_each_other_the_first_to_end_ends_all_and_of_two_the_one_that_failed_decides():
    async def scenario():
        ended = []

        async def waits():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("waits")

        async def seven():
            await asyncio.sleep(0)
            return 7

        async def fails():
            await asyncio.sleep(0)
            raise ValueError("odd")

        assert await first_of(waits(), seven()) == 7
        with pytest.raises(ValueError, match="odd"):
            await first_of(waits(), seven(), fails())
        assert ended == ["waits", "waits"]

    asyncio.run(scenario())


def test_an_event_is_waited_for_so_long_at_the_most():
    async def scenario():
        event = asyncio.Event()
        assert not await is_set_within(event, 0.01)
        event.set()
        assert await is_set_within(event, 0.01)

    asyncio.run(scenario())
