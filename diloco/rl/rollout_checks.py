"""Whether the rollouts of a peer are what they claim to be: by the policy, judged truly, and its own. Pure.

Three checks, each cheap for a learner, which trains on these completions anyway:

- *Weights.* Its own log-probabilities of each completion lie near the sampler's. A policy that is some steps old, or
  computed in another type or by other kernels, differs a little; other weights, or another model, differ much.
- *Rewards.* It judges one completion of each prompt again, chosen at random.
- *Copies.* A completion too improbable to be sampled twice has not come before.

Not found: who forges the log-probabilities of the learner's own policy for completions of another model; who has a
policy that is only a little older than it says; and rewards forged for few of many completions.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

_LOGP_LIMIT = 0.5
"""Nats per token. Further apart, most tokens whose probability has risen are clipped, and teach nothing."""
_LOGP_FACTOR = 3.0
"""Times the median of the other rollout peers: where weights change fast, honest peers' old policies differ too."""
_REWARD_TOLERANCE = 1e-3
_FALSE_SHARE = 0.2
"""Of rewards judged again: judging code by its time may give another verdict now and then."""
_COPY_NATS = 30.0
"""A completion with less than e^-30 of probability is not sampled twice."""
_NUM_COPIES = 2
_NUM_REMEMBERED = 4096
_ENOUGH = 8
"""Findings before anybody is left out."""
_RECENT = 64


@dataclass
class _Record:
    """Of one rollout peer's last completions."""

    differences: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Mean absolute difference of log-probabilities of each, in nats per token."""
    falsely_judged: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    num_copies: int = 0


class RolloutChecks:
    """What a learner has found out about each rollout peer."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def generated(self, peer_id: str, difference: float) -> None:
        """A completion whose log-probabilities differ by so much from the learner's."""
        self._record(peer_id).differences.append(difference)

    def judged_again(self, peer_id: str, claimed: Sequence[float], found: Sequence[float]) -> None:
        """A completion's scores."""
        is_false = any(abs(a - b) > _REWARD_TOLERANCE for a, b in zip(claimed, found, strict=False))
        self._record(peer_id).falsely_judged.append(is_false)

    def came(self, peer_id: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """A completion."""
        if sum(logprobs) > -_COPY_NATS:
            return
        name = hashlib.sha256(struct.pack(f"{len(tokens)}I", *tokens)).digest()
        self._record(peer_id).num_copies += name in self._seen
        self._seen[name] = None
        self._seen.move_to_end(name)
        if len(self._seen) > _NUM_REMEMBERED:
            self._seen.popitem(last=False)

    def cheats(self) -> Mapping[str, str]:
        """The rollout peers that are to be left out, and why, in words."""
        found = {peer_id: self._fault(peer_id, record) for peer_id, record in self._records.items()}
        return {peer_id: fault for peer_id, fault in found.items() if fault}

    def forget(self, peer_id: str) -> None:
        self._records.pop(peer_id, None)

    def _record(self, peer_id: str) -> _Record:
        return self._records.setdefault(peer_id, _Record())

    def _fault(self, peer_id: str, record: _Record) -> str:
        if record.num_copies >= _NUM_COPIES:
            return f"{record.num_copies} of its completions are copies of earlier ones"
        if len(record.falsely_judged) >= _ENOUGH and fmean(record.falsely_judged) > _FALSE_SHARE:
            return f"{sum(record.falsely_judged)} of {len(record.falsely_judged)} rewards judged again were false"
        if len(record.differences) >= _ENOUGH and (difference := fmean(record.differences)) > self._limit(
            peer_id
        ):
            return f"its log-probabilities are {difference:.2g} nats per token from those of the policy"
        return ""

    def _limit(self, peer_id: str) -> float:
        others = [
            fmean(record.differences)
            for other, record in self._records.items()
            if other != peer_id and len(record.differences) >= _ENOUGH
        ]
        return max(_LOGP_LIMIT, _LOGP_FACTOR * median(others) if others else 0.0)
