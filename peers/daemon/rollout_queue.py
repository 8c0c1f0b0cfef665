"""Which rollouts a learner keeps, in which order it trains on them, and which are too old.

Pure, but for which completion of a rollout of uniform reward is shown.
"""

from __future__ import annotations

import operator
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.errors import ProtocolError
from peers.protocol.limits import MAX_SHORT_TEXT
from peers.protocol.rollouts import STALE, Rollout, most_bytes_of, prompt_of
from peers.protocol.wire import encode

MAX_SENDERS = 256
"""Rollout peers whose numbers and figures are remembered."""
_SAME_REWARD = 1e-6
_RANDOM = random.SystemRandom()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What every rollout must be like, as the learner's trainer says."""

    vocab_size: int
    num_generations: int
    max_tokens: int
    reward_weights: Sequence[float]
    """Of a completion's scores; the weighted sum is its reward."""
    num_examples: int
    """Examples among which a rollout's prompt is chosen."""
    max_staleness: int
    """Optimizer steps that may lie between the policy of a rollout and the step that trains on it."""
    num_kept: int
    """The most rollouts that wait, and the most of uniform reward; the oldest make room."""

    @property
    def most_bytes(self) -> int:
        """Of a rollout's message."""
        return most_bytes_of(self.num_generations, self.max_tokens)


@dataclass
class Sender:
    """What one rollout peer has sent since this learner was started."""

    next_number: int
    num_received: int = 0
    num_taken: int = 0
    """Handed to the trainer."""
    dropped: Counter[str] = field(default_factory=Counter)
    """By the reason."""
    staleness_sum: int = 0
    staleness_max: int = 0
    first_at: float = 0.0

    def figures(self, now: float) -> dict[str, Any]:
        """For people; none of them decides anything."""
        return {
            "received": self.num_received,
            "taken": self.num_taken,
            "dropped": self.dropped.total(),
            "staleness_mean": self.staleness_sum / max(self.num_taken, 1),
            "staleness_max": self.staleness_max,
            # Several come at once: the first second says nothing.
            "rollouts_per_s": self.num_received / max(now - self.first_at, 1.0),
        }


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A rollout that has been taken, and how old it is by now."""

    peer_id: str
    number: int
    completions: bytes
    """An array of peers.protocol.rollouts.Completion."""
    staleness: int
    example: int


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A rollout that waits. Its completions are encoded: as values they would take six times the memory."""

    peer_id: str
    number: int
    policy: str
    completions: bytes
    sample: bytes
    """One of the completions, chosen at random, if their reward is uniform."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What the trainer gets at once."""

    rollouts: Sequence[Waiting] = ()
    """To train on."""
    uniform: Sequence[Waiting] = ()
    """Rollouts whose completions all earn the same. They teach nothing, but are checked as well, by one completion of
    each."""


class RolloutQueue:
    """Bounded by the terms, which come with the first policy.

    Rollouts of uniform reward are trained on only where so many of them have come that no others can be expected.
    """

    def __init__(self, run_id: str, me: str, *, first_number: int) -> None:
        """`first_number`: of every sender; differs between lives of a learner, so that each gives other prompts."""
        self._run_id, self._me, self._first_number = run_id, me, first_number
        self.terms: Terms | None = None
        self.step = 0
        self.senders: dict[str, Sender] = {}
        self.left_out: dict[str, str] = {}
        """By peer id of each rollout peer that has cheated: how, as the learner's trainer found out."""
        self._steps: dict[str, int] = {}
        """By digest of each policy that rollouts may come from: its step."""
        self._waiting: deque[_Kept] = deque()
        self._uniform: deque[_Kept] = deque()
        """Rollouts of uniform reward that have come since the last `take`."""

    def __len__(self) -> int:
        return len(self._waiting)

    def published(self, digest: str, step: int, terms: Terms) -> None:
        """The trainer is at this step, with these weights. Policies of a fork that it has left are forgotten."""
        self.terms, self.step = terms, step
        known = {other: at for other, at in self._steps.items() if step - terms.max_staleness <= at < step}
        self._steps = {**known, digest: step}

    def sender(self, peer_id: str) -> Sender:
        found = self.senders.pop(peer_id, None) or Sender(self._first_number)
        # At the end: those that have been silent for longest are forgotten first.
        self.senders[peer_id] = found
        while len(self.senders) > MAX_SENDERS:
            del self.senders[next(iter(self.senders))]
        return found

    def offer(self, peer_id: str, rollout: Rollout, now: float) -> str:
        """Why the rollout was dropped; empty if it waits to be trained on. Raises ProtocolError for a false one."""
        if peer_id in self.left_out:
            raise ProtocolError(self.left_out[peer_id])
        sender = self.sender(peer_id)
        self._check(rollout, sender)
        sender.next_number += 1
        sender.first_at = sender.first_at if sender.num_received else now
        sender.num_received += 1
        if rollout.policy not in self._steps:
            return self._dropped(peer_id, STALE)
        assert self.terms is not None
        is_uniform = self._is_uniform(rollout)
        waiting = self._uniform if is_uniform else self._waiting
        waiting.append(
            _Kept(
                peer_id=peer_id,
                number=rollout.number,
                policy=rollout.policy,
                completions=encode(rollout.completions),
                sample=encode([_RANDOM.choice(rollout.completions)]) if is_uniform else b"",
            )
        )
        if len(waiting) > self.terms.num_kept:
            self._dropped(waiting.popleft().peer_id, "surplus")
        return ""

    def leave_out(self, peer_id: str, reason: str) -> None:
        """Take no more from this rollout peer, and forget what waits of it."""
        if len(self.left_out) < MAX_SENDERS:
            self.left_out[peer_id] = f"it was left out: {reason}"[:MAX_SHORT_TEXT]
        self._drop("left out", lambda kept: kept.peer_id == peer_id)

    def take(self, count: int) -> Taken | None:
        """The oldest `count` rollouts that are not too old; None if fewer wait.

        If `num_kept` rollouts of uniform reward wait, the newest of them make up what is missing.
        """
        self._drop(STALE, lambda kept: kept.policy not in self._steps)
        missing = max(count - len(self._waiting), 0)
        if missing and (self.terms is None or len(self._uniform) < self.terms.num_kept):
            return None
        chosen = [self._waiting.popleft() for _ in range(count - missing)]
        chosen += [self._uniform.pop() for _ in range(missing)]
        uniform, self._uniform = self._uniform, deque()
        return Taken(
            rollouts=[self._taken(kept) for kept in chosen],
            uniform=[self._shown(kept, kept.sample) for kept in uniform],
        )

    def _drop(self, why: str, is_dropped: Callable[[_Kept], bool]) -> None:
        for waiting in (self._waiting, self._uniform):
            for _ in range(len(waiting)):
                kept = waiting.popleft()
                if is_dropped(kept):
                    self._dropped(kept.peer_id, why)
                else:
                    waiting.append(kept)

    def _taken(self, kept: _Kept) -> Waiting:
        taken, sender = self._shown(kept, kept.completions), self.sender(kept.peer_id)
        sender.num_taken += 1
        sender.staleness_sum += taken.staleness
        sender.staleness_max = max(sender.staleness_max, taken.staleness)
        return taken

    def _shown(self, kept: _Kept, completions: bytes) -> Waiting:
        assert self.terms is not None
        num_examples = self.terms.num_examples
        return Waiting(
            peer_id=kept.peer_id,
            number=kept.number,
            completions=completions,
            staleness=self.step - self._steps[kept.policy],
            example=prompt_of(self._run_id, self._me, kept.peer_id, kept.number, num_examples=num_examples),
        )

    def _is_uniform(self, rollout: Rollout) -> bool:
        assert self.terms is not None
        weights = self.terms.reward_weights
        rewards = [sum(map(operator.mul, weights, one.scores)) for one in rollout.completions]
        return max(rewards) - min(rewards) <= _SAME_REWARD

    def _dropped(self, peer_id: str, why: str) -> str:
        self.sender(peer_id).dropped[why] += 1
        return why

    def _check(self, rollout: Rollout, sender: Sender) -> None:
        terms = self.terms
        if terms is None:
            raise ProtocolError("a rollout before there was a policy")
        if (rollout.run_id, rollout.learner) != (self._run_id, self._me):
            raise ProtocolError("a rollout for another learner")
        if rollout.number != sender.next_number:
            raise ProtocolError(f"rollout {rollout.number} in place of {sender.next_number}")
        if len(rollout.completions) != terms.num_generations:
            raise ProtocolError(f"{len(rollout.completions)} completions, not {terms.num_generations}")
        for completion in rollout.completions:
            if len(completion.tokens) > terms.max_tokens:
                raise ProtocolError(f"a completion of {len(completion.tokens)} tokens")
            if max(completion.tokens) >= terms.vocab_size:
                raise ProtocolError(f"token {max(completion.tokens)} is not in the vocabulary")
            if len(completion.scores) != len(terms.reward_weights):
                raise ProtocolError(f"{len(completion.scores)} scores, not {len(terms.reward_weights)}")
