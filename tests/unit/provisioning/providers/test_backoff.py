from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioning.errors import OutcomeUnknown, ProviderError, Unavailable
from provisioning.providers import backoff


@given(st.integers(1, 50), st.none() | st.floats(0, 1e6), st.floats(0, 1))
def test_delays_grow_have_an_end_and_respect_the_provider(attempt, retry_after_s, seed):
    delay = backoff.delay_s(attempt, retry_after_s, seed)
    assert 0 < delay <= max(backoff.MAX_DELAY_S, 60.0)
    assert delay >= min(retry_after_s or 0.0, 60.0)
    assert delay <= backoff.delay_s(attempt + 1, retry_after_s, seed)


async def test_it_asks_again_until_there_is_an_answer(monkeypatch):
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.001)
    answers = [Unavailable("busy"), Unavailable("broken"), 7]

    async def request():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await backoff.repeated(request) == 7


@pytest.mark.parametrize("error", [RecursionError("deep"), OverflowError("inf"), KeyError("id")])
async def test_whatever_an_answer_raises_is_an_error_of_its_provider_and_of_an_order_a_lost_answer(error):
    async def request():
        raise error

    with pytest.raises(ProviderError, match=type(error).__name__):
        await backoff.repeated(request)
    with pytest.raises(OutcomeUnknown):
        await backoff.repeated(request, unexpected=OutcomeUnknown)


async def test_it_gives_up_with_the_last_reason(monkeypatch):
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(backoff, "MAX_ATTEMPTS", 3)

    async def request():
        raise Unavailable("502 from the provider")

    with pytest.raises(Unavailable, match="502"):
        await backoff.repeated(request)
