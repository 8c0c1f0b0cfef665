"""`--rollout peers`: takes the rollouts of rollout peers for a learner's trainer. Used on the main rank only.

The learner tells its daemon what the newest weights are, and takes rollouts from the daemon's queue. While no rollout
peer is there, it generates its own with the trainer's model, as `--rollout hf` does. It does not fail instead, because
the other learners of the run wait for its work at every epoch.
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from diloco.options.trainer import TrainConfig
from diloco.rl.dialogues import own_mask
from diloco.rl.push import PolicyFiles, Publisher
from diloco.rl.rollout_checks import ENOUGH, RolloutChecks
from diloco.rl.tasks import Task
from peers.daemon.link import WorkerLink

TURN_S = 60.0
"""After this long without enough rollouts, the main rank tells the other ranks that it still waits."""
Row = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Group:
    """All completions of one prompt, by a rollout peer or the learner itself."""

    example: int
    completions: Sequence[Mapping[str, Any]]
    """With the fields of peers.protocol.rollouts.Completion."""
    staleness: int = 0
    peer_id: str = ""
    """Empty if the learner generated the group itself."""


class PeerRollouts:
    """Replaces Rollouts (rl/rollouts.py) in the trainer, with the same `publisher` and `push`."""

    def __init__(
        self,
        link: WorkerLink,
        directory: Path,
        dtype: torch.dtype,
        terms: Mapping[str, Any],
        *,
        step_of: Callable[[], int],
        judge: Callable[[Sequence[tuple[int, Sequence[int], Sequence[int]]]], Sequence[Sequence[float]]],
        on_event: Callable[..., None] = lambda **_: None,
    ) -> None:
        """`judge` scores completions, each given by its example, tokens and turns."""
        self.publisher = Publisher(dtype)
        self.senders: dict[str, dict[str, Any]] = {}
        """What each rollout peer has sent so far."""
        self._link, self._files = link, PolicyFiles(directory)
        self._terms = dict(terms)
        self._step_of, self._judge, self._on_event = step_of, judge, on_event
        # All of the last two generations: one is half of `num_kept`, and `num_kept` of uniform reward may come with it.
        self._checks = RolloutChecks(3 * terms["num_kept"] * terms["num_generations"])
        self._random = random.SystemRandom()
        self._is_alone = False
        self._last: Sequence[Group] = ()
        self._differences: dict[int, float] = {}
        """Differences of log-probabilities, by the numbers of completions in the last generation."""
        self._uniform: Sequence[Group] = ()
        """Groups that came with the last ones and teach nothing: all completions of a group earn the same. Of each only
        one has come."""

    def push(self) -> None:
        """Tell the daemon of the publisher's newest version."""
        files = self._files.write(self.publisher)
        self._link.send(
            "policy", digest=self.publisher.digest, step=self._step_of(), files=files, terms=self._terms
        )

    def take(self, count: int) -> list[Group] | None:
        """`count` groups of rollout peers. None: so many have not come within TURN_S; ask again. An empty list: no
        rollout peer is there, so this learner has to generate its own, and say so (`generated`).

        Leaves out rollout peers whose earlier groups were not what they claimed to be.
        """
        self._leave_out_cheats()
        self._link.send("take", count=count, timeout_s=TURN_S)
        answer = self._link.receive("rollouts")
        groups, self._uniform = (
            [self._received() for _ in range(answer[name])] for name in ("num_rollouts", "num_uniform")
        )
        self.senders = answer["senders"]
        if not groups and not answer["is_alone"]:
            return None
        if not groups and not self._is_alone:
            log.warning(
                "no rollout peer works for this learner: it generates its own rollouts, which is slow, until one "
                "comes; start some with `diloco peer --role rollout`"
            )
        self._is_alone = not groups
        self._check([*groups, *self._uniform])
        self._last = groups
        return groups

    def _received(self) -> Group:
        fields = self._link.receive("rollout")
        return Group(**{name: fields[name] for name in ("peer_id", "example", "staleness", "completions")})

    def generated(self, groups: Sequence[Group]) -> None:
        """Note what this learner has generated and trains on next."""
        self._last = groups

    def compared(self, differences: Iterable[tuple[int, float]]) -> None:
        """Note differences between the learner's and the sampler's log-probabilities in nats per token, each with the
        completion's number in the last generation. Only the first of each counts: the learner then trains on it.
        """
        for number, difference in differences:
            self._differences.setdefault(number, difference)

    def _leave_out_cheats(self) -> None:
        senders = [group.peer_id for group in self._last for _ in group.completions]
        for number, difference in self._differences.items():
            if peer_id := senders[number]:
                self._checks.generated(peer_id, difference)
        self._differences.clear()
        for peer_id, reason in self._checks.cheats().items():
            log.warning("rollouts of peer %s are no longer used: %s", peer_id, reason)
            self._on_event(event="rollout_peer_left_out", peer_id=peer_id, reason=reason)
            self._link.send("leave out", peer_id=peer_id, reason=reason)
            self._checks.forget(peer_id)

    def _check(self, groups: Sequence[Group]) -> None:
        sent: dict[str, list[Group]] = {}
        for group in groups:
            sent.setdefault(group.peer_id, []).append(group)
            for one in group.completions:
                self._checks.came(group.peer_id, one["tokens"], one["logprobs"])
        chosen = [
            (group, self._random.choice(group.completions))
            for own in sent.values()
            for group in self._random.sample(own, min(ENOUGH, len(own)))
        ]
        found = self._judge([(group.example, one["tokens"], one["turns"]) for group, one in chosen])
        for (group, one), scores in zip(chosen, found, strict=True):
            if scores:
                self._checks.judged_again(group.peer_id, one["scores"], scores)

    def figures(self) -> dict[str, Any]:
        """Figures of the last generation, for the step's record."""
        ages = [group.staleness for group in self._last]
        return {
            "staleness_mean": sum(ages) / max(len(ages), 1),
            "staleness_max": max(ages, default=0),
            "uniform_groups": len(self._uniform),
            "reward_of_all": self._reward_of_all(),
            "rollout_peers": len({group.peer_id for group in self._last} - {""}),
            "rollouts_dropped": int(sum(one["dropped"] for one in self.senders.values())),
            "rollouts_per_s": sum(one["rollouts_per_s"] for one in self.senders.values()),
        }

    def _reward_of_all(self) -> float:
        """The mean reward before groups of uniform reward were left out."""
        weights = self._terms["reward_weights"]
        rewards = [
            fmean(sum(map(operator.mul, weights, one["scores"])) for one in group.completions)
            for group in (*self._last, *self._uniform)
        ]
        return fmean(rewards) if rewards else 0.0

    def close(self) -> None:
        self._link.close()
        self._files.close()


def terms_of(config: TrainConfig, task: Task, model: PreTrainedModel, per_generation: int) -> dict[str, Any]:
    """What the daemon checks each rollout against: the fields of peers.daemon.rollout_queue.Terms."""
    return {
        "vocab_size": int(model.config.vocab_size),
        "num_generations": config.grpo.num_generations,
        "max_tokens": config.grpo.max_completion_length,
        "reward_weights": [reward.weight for reward in task.rewards],
        "num_examples": task.num_examples,
        "max_staleness": config.grpo.max_staleness,
        # Enough for the next two generations: more rollouts would only grow old.
        "num_kept": 2 * per_generation,
    }


def rows_of(task: Task, groups: Sequence[Group]) -> list[Row]:
    """The rows that PeerTrainer trains on, with the completions of a prompt one after the other."""
    return [
        {
            "prompt": prompt,
            "tokens": one["tokens"],
            "logprobs": one["logprobs"],
            "mask": own_mask(one["turns"], len(one["tokens"])),
            "scores": one["scores"],
        }
        for group in groups
        for prompt in [task.example(group.example).prompt]
        for one in group.completions
    ]
