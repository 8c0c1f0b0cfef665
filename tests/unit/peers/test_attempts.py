import asyncio
import time
from types import SimpleNamespace

import pytest
from peers.round.attempts import ATTEMPT_SHARE, CHANNEL_S, Attempts

from peers.errors import RoundFailed
from peers.round import attempts as attempts_module
from peers.round.aggregation import Aggregation
from peers.round.leader import Timing
from tests.support.announcements import announced

ME, OTHER = 0, 3


def attempts_with(view):
    return Attempts(
        me=ME,
        codec="fp32",
        aggregation=Aggregation(),
        niceness=0,
        pool=None,
        optimizer_for=None,
        view=view,
        quiet=frozenset,
        forwarded_bytes=lambda: 0,
    )


def test_an_attempt_waits_for_a_channel_that_comes_back():
    looks = iter([{ME: announced("a")}] * 2)
    whole = {ME: announced("a"), OTHER: announced("d")}
    found = asyncio.run(attempts_with(lambda: next(looks, whole))._identities((ME, OTHER), 5.0))
    assert found == {OTHER: "d"}


def test_a_channel_that_does_not_come_back_is_named_in_time_and_soon_after_a_cancellation():
    attempts = attempts_with(lambda: {ME: announced("a")})
    for timeout_s in (0.1, 60.0):
        started = time.monotonic()
        with pytest.raises(RoundFailed, match=r"no channel to \[3\]") as failure:
            asyncio.run(attempts._identities((ME, OTHER), timeout_s))
        assert failure.value.suspects == {OTHER}
        assert time.monotonic() - started < 5
        attempts.cancel()


@pytest.mark.parametrize("num_members", [2, 8, 16, 50])
@pytest.mark.parametrize("usual_s", [0.0, 2.0])
def test_whoever_spoils_an_attempt_is_named_before_its_leader_gives_up(num_members, usual_s):
    timing = Timing(gather_s=10.0, attempt_s=20.0 + 4 * usual_s, stall_s=2.0 + usual_s, connect_s=4.0)
    plan = SimpleNamespace(members=tuple(range(num_members)))
    connect_s = attempts_module._connect_s(timing, plan)
    # Others wait for who waits for a channel.
    assert min(CHANNEL_S, timing.attempt_s / 4) < connect_s <= ATTEMPT_SHARE * timing.attempt_s
    left_s = attempts_module._left_s(timing, time.monotonic() - connect_s)
    stall_s = attempts_module._stall_s(timing, plan)
    most_s = ATTEMPT_SHARE * timing.attempt_s
    assert min(stall_s, most_s / 2) - 0.1 < left_s <= most_s - connect_s


def test_however_short_an_attempt_may_be_there_is_time_for_its_streams():
    timing = Timing(gather_s=10.0, attempt_s=2.0)
    assert attempts_module._connect_s(timing, SimpleNamespace(members=(0, 1))) == pytest.approx(0.75)
