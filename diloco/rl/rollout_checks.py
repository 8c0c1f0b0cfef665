"""Checks that the rollouts of a peer are sampled by the policy, judged correctly, and not copied. Pure.

Three checks, each cheap for a learner, which trains on these completions anyway:

- *Weights.* The learner's log-probabilities of each completion must be close to the sampler's. A policy that is some
  steps old, or computed in another type or by other kernels, differs a little; other weights or models differ much.
- *Rewards.* The learner judges some completions of each peer again, chosen at random.
- *Copies.* A completion that is too improbable to be sampled twice must not have come before.

Not detected: completions of another model with forged log-probabilities of the learner's policy; a policy that is only
a little older than claimed; rewards forged for few of many completions, or for those that end whoever judges them.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

_LOGP_LIMIT = 0.5
"""Nats per token. At a larger difference, most tokens whose probability has risen are clipped, and teach nothing."""
_LOGP_FACTOR = 3.0
"""The limit is at least this times the other peers' median: if weights change fast, honest peers' policies differ."""
_REWARD_TOLERANCE = 1e-3
_FALSE_SHARE = 0.2
"""Tolerated share of rewards that differ when judged again: tests of code have a time limit, so verdicts may vary."""
_COPY_NATS = 30.0
"""A completion with a probability below e^-30 is not sampled twice."""
_NUM_COPIES = 2
_LEAST_REMEMBERED = 4096
ENOUGH = 8
"""Least number of rewards or differences by which a peer is left out; so many rewards are judged again at once."""
_RECENT = 64


@dataclass
class _Record:
    """What was found out about one rollout peer's last completions."""

    differences: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Mean absolute difference of the log-probabilities of each completion, in nats per token."""
    falsely_judged: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    num_copies: int = 0


class RolloutChecks:
    """What a learner has found out about each rollout peer."""

    def __init__(self, num_remembered: int = _LEAST_REMEMBERED) -> None:
        """`num_remembered`: completions of which a copy is recognized; small runs remember more."""
        self._num_remembered = max(num_remembered, _LEAST_REMEMBERED)
        self._records: dict[str, _Record] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def generated(self, peer_id: str, difference: float) -> None:
        """Note by how much the log-probabilities of a completion differ from the learner's."""
        self._record(peer_id).differences.append(difference)

    def judged_again(self, peer_id: str, claimed: Sequence[float], found: Sequence[float]) -> None:
        """Note a completion's scores, as claimed and as the learner found them."""
        is_false = any(abs(a - b) > _REWARD_TOLERANCE for a, b in zip(claimed, found, strict=False))
        self._record(peer_id).falsely_judged.append(is_false)

    def came(self, peer_id: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Note a completion, to recognize copies."""
        if sum(logprobs) > -_COPY_NATS:
            return
        name = hashlib.sha256(struct.pack(f"{len(tokens)}I", *tokens)).digest()
        self._record(peer_id).num_copies += name in self._seen
        self._seen[name] = None
        self._seen.move_to_end(name)
        if len(self._seen) > self._num_remembered:
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
        if len(record.falsely_judged) >= ENOUGH and fmean(record.falsely_judged) > _FALSE_SHARE:
            return f"{sum(record.falsely_judged)} of {len(record.falsely_judged)} rewards judged again were false"
        if len(record.differences) >= ENOUGH and (difference := fmean(record.differences)) > self._limit(
            peer_id
        ):
            return f"its log-probabilities are {difference:.2g} nats per token from those of the policy"
        return ""

    def _limit(self, peer_id: str) -> float:
        others = [
            fmean(record.differences)
            for other, record in self._records.items()
            if other != peer_id and len(record.differences) >= ENOUGH
        ]
        return max(_LOGP_LIMIT, _LOGP_FACTOR * median(others) if others else 0.0)
