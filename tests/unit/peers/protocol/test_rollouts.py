"""Rollouts on the wire: whose they are, what may be in them, and who gets them."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from peers.errors import ProtocolError
from peers.net.identity import load_or_create
from peers.protocol.limits import MAX_COUNT
from peers.protocol.rollouts import (
    MAX_COMPLETION_TOKENS,
    MAX_SCORES,
    MAX_TOKEN,
    MAX_TURNS,
    Rollout,
    Signed,
    learner_for,
    most_bytes_of,
    prompt_of,
    signed,
    verified,
)
from peers.protocol.wire import encode
from tests.support.rollout_messages import completion, rollout

LEARNERS = [f"learner{index}" for index in range(4)]
PEERS = [f"peer{index}" for index in range(200)]


@pytest.fixture
def keys(tmp_path):
    return load_or_create(tmp_path / "own.key"), load_or_create(tmp_path / "other.key")


def test_a_rollout_comes_back_as_its_peer_has_signed_it(keys):
    own, _ = keys
    assert verified(own.peer_id, signed(rollout(), own)) == rollout()


def test_a_rollout_of_another_peer_is_refused(keys):
    own, other = keys
    with pytest.raises(ProtocolError, match="not signed by it"):
        verified(own.peer_id, signed(rollout(), other))


def test_a_signature_under_the_same_bytes_for_another_purpose_signs_no_rollout(keys):
    own, _ = keys
    payload = encode(rollout())
    with pytest.raises(ProtocolError, match="not signed by it"):
        verified(own.peer_id, Signed(payload=payload, signature=own.sign(payload)))


@pytest.mark.parametrize(
    "changes",
    [
        {"turns": (1, 1)},
        {"turns": (1,)},
        {"turns": (1, 0, 1)},
        {"logprobs": (-0.5, math.nan)},
        {"logprobs": (-0.5, -math.inf)},
        {"logprobs": (-0.5, 0.1)},
        {"logprobs": (-0.5,)},
        {"tokens": (), "logprobs": ()},
        {"tokens": (7, -1)},
        {"scores": (math.nan, 0.0)},
        {"scores": ()},
    ],
)
def test_numbers_that_no_sampler_or_judge_gives_are_refused(keys, changes):
    own, _ = keys
    with pytest.raises(ProtocolError):
        verified(own.peer_id, signed(rollout(completions=(completion(**changes),) * 2), own))


@pytest.mark.parametrize("field", ["tokens", "logprobs"])
def test_a_completion_of_more_tokens_than_any_model_generates_is_refused(keys, field):
    own, _ = keys
    long = completion(**{field: (0,) * (MAX_COMPLETION_TOKENS + 1)})
    with pytest.raises(ProtocolError, match=f"length <= {MAX_COMPLETION_TOKENS}"):
        verified(own.peer_id, signed(rollout(completions=(long,)), own))


@pytest.mark.parametrize(("num_completions", "num_tokens"), [(1, 257), (16, 300)])
def test_a_rollout_whose_numbers_take_the_most_bytes_is_within_the_limit(num_completions, num_tokens):
    turns = (1,) * (MAX_TURNS - 2) + (num_tokens - MAX_TURNS + 2,)
    longest = completion(
        tokens=(MAX_TOKEN - 1,) * num_tokens,
        logprobs=(-0.1,) * num_tokens,
        scores=(0.1,) * MAX_SCORES,
        turns=turns,
    )
    whole = Rollout(
        run_id="r" * 64,
        learner="l" * 128,
        policy="a" * 64,
        number=MAX_COUNT,
        completions=(longest,) * num_completions,
    )
    assert len(encode(whole)) <= most_bytes_of(num_completions, num_tokens) < 2 * len(encode(whole))


def test_a_rollout_of_more_bytes_than_the_terms_allow_is_refused_before_it_is_decoded(keys):
    own, _ = keys
    message = signed(rollout(), own)
    assert verified(own.peer_id, message, len(message.payload)) == rollout()
    with pytest.raises(ProtocolError, match=f"at most {len(message.payload) - 1} are allowed"):
        verified(own.peer_id, message, len(message.payload) - 1)


def test_rollout_peers_are_spread_over_the_learners():
    numbers = Counter(learner_for("run", peer, LEARNERS) for peer in PEERS)
    assert set(numbers) == set(LEARNERS) and min(numbers.values()) > 25
    assert learner_for("run", "peer0", []) is None


def test_when_a_learner_goes_only_its_own_rollout_peers_move():
    before = {peer: learner_for("run", peer, LEARNERS) for peer in PEERS}
    after = {peer: learner_for("run", peer, LEARNERS[1:]) for peer in PEERS}
    assert {before[peer] for peer in PEERS if before[peer] != after[peer]} == {LEARNERS[0]}


def test_both_ends_know_the_prompt_of_a_rollout_and_no_two_peers_get_the_same():
    drawn = [prompt_of("run", "a", peer, number, num_examples=10**6) for peer in "xy" for number in range(50)]
    assert drawn == [
        prompt_of("run", "a", peer, number, num_examples=10**6) for peer in "xy" for number in range(50)
    ]
    assert len(set(drawn)) > 98 and max(drawn) < 10**6
