"""When which fragment is averaged, and how its result comes back: arithmetic on step numbers.

Streaming DiLoCo (arXiv 2501.18512) averages one fragment at a time: each fragment every `local_steps` inner steps, one
after the other at even distances. An epoch ends with one such outer step, so with P fragments an epoch has
local_steps / P inner steps, and epoch e averages fragment e mod P. One fragment is classic DiLoCo.

With overlap the weights of the fragment are handed over `overlap_steps` before the epoch's end, and their average is
merged at its end; the round takes place during those steps. At most one round runs at a time. An overlap of all but one
step of the epoch is the one-epoch delay of eager updates (arXiv 2502.12996): every peer continues from its own fresh
progress, and the other peers' progress reaches it one epoch late. With --hv.overlap-steps auto weights are handed over
at the epoch's end, training goes on at once for up to an epoch, and the average is merged when it arrives.

With a time budget (--hv.local-time) an epoch ends when its steps are done or its time is up, so that nobody waits for a
slow peer. A peer's position in the epoch is then its nominal local step: after each step one more or, if that is more,
the elapsed share of the time times the steps of the epoch. So it never stands still. Learning rates and overlap follow
that position. While the previous commit is still awaited, only steps count: no work can be handed over yet, so peers
with steps left train on. Each peer's core says how long the next epoch may last (epoch_time.py). In an epoch at
whose beginning no speeds were known, such as the run's first, the worker asks again after each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from peers.errors import UserError

DEFAULT_LOCAL_STEPS = 500
AS_LONG_AS_THE_ROUND = -1
"""`overlap_steps` where training waits only for rounds that take longer than an epoch (--hv.overlap-steps auto)."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The same on all peers of a run."""

    local_steps: int = DEFAULT_LOCAL_STEPS
    """Inner steps between two averagings of one fragment (H)."""
    num_fragments: int = 1
    overlap_steps: int = 0
    """Inner steps trained while a round takes place (tau); AS_LONG_AS_THE_ROUND: as many as fit."""
    mixing: float | None = None
    """Weight of the local weights when an overlapped average is merged (alpha); None: keep all local progress."""
    local_time_s: float | None = None
    """Seconds after which the local steps count as done, however many were done; 0: learned from the peers' speeds;
    None: no time budget."""
    samples_per_block: int | None = None
    """Samples that a peer trains in an epoch; in GRPO, prompts. None: the manifest does not say."""

    def __post_init__(self) -> None:
        if self.local_steps < 1 or self.num_fragments < 1 or self.local_steps % self.num_fragments:
            raise UserError(
                f"--hv.local-steps {self.local_steps} does not divide by --hv.num-fragments {self.num_fragments}; "
                f"{-(-self.local_steps // self.num_fragments) * self.num_fragments} steps would do"
            )
        if not AS_LONG_AS_THE_ROUND <= self.overlap_steps < self.steps_per_epoch:
            raise UserError(
                f"--hv.overlap-steps {self.overlap_steps} must be less than the {self.steps_per_epoch} steps between "
                "two rounds (--hv.local-steps divided by --hv.num-fragments)"
            )

    @classmethod
    def of(cls, manifest: Mapping[str, str | int | float | bool | None]) -> Schedule:
        """The schedule of a manifest. Raises UserError if its numbers do not fit each other."""
        schedule = cls(
            local_steps=int(manifest.get("hv.local_steps") or DEFAULT_LOCAL_STEPS),
            num_fragments=int(manifest.get("hv.num_fragments") or 1),
            overlap_steps=int(manifest.get("hv.overlap_steps") or 0),
            mixing=None if (mixing := manifest.get("hv.mixing")) is None else float(mixing),
            local_time_s=None if (seconds := manifest.get("hv.local_time")) is None else float(seconds),
        )
        samples = int(manifest.get("total_batch_size") or 0) * schedule.steps_per_epoch
        if manifest.get("mode") == "grpo":
            # All completions of a prompt count as samples, each time that they are trained on.
            for name in ("grpo.num_generations", "grpo.num_iterations"):
                samples //= int(manifest.get(name) or 1)
        return replace(schedule, samples_per_block=max(1, samples) if samples else None)

    @property
    def steps_per_epoch(self) -> int:
        return self.local_steps // self.num_fragments

    @property
    def never_waits(self) -> bool:
        """Whether training goes on at once, for up to an epoch, when weights have been handed over."""
        return self.overlap_steps == AS_LONG_AS_THE_ROUND

    @property
    def hidden_steps(self) -> int:
        """Inner steps that are trained at most while a round takes place."""
        return self.steps_per_epoch if self.never_waits else self.overlap_steps

    @property
    def seconds_per_epoch(self) -> float | None:
        """The time budget between two rounds; 0: learned; None: there is none."""
        return None if self.local_time_s is None else self.local_time_s / self.num_fragments

    @property
    def learns_epoch_s(self) -> bool:
        """Whether the time budget is learned from the peers' speeds (--hv.local-time auto)."""
        return self.local_time_s == 0

    def local_step_after(self, local_step: int, elapsed_s: float, epoch_s: float, *, step_s: float) -> int:
        """The nominal local step of a peer that its last step alone brought to `local_step`, `elapsed_s` after the
        epoch began. `epoch_s`: how long the epoch may last; 0: as long as its steps take.

        The epoch ends with the step that ends nearest to `epoch_s`, if steps take `step_s`. Must not be called while
        the previous commit is awaited.
        """
        if not epoch_s:
            return local_step
        is_over = elapsed_s + step_s / 2 >= epoch_s
        by_time = self.steps_per_epoch if is_over else int(self.steps_per_epoch * elapsed_s / epoch_s)
        return max(local_step, min(by_time, self.steps_per_epoch))

    def elapsed_at(self, local_step: int, epoch_s: float) -> float:
        """Seconds of the epoch that count as elapsed for a peer that enters it at this local step."""
        return epoch_s * local_step / self.steps_per_epoch

    def fragment_of(self, epoch: int) -> int:
        """The fragment that this epoch averages."""
        return epoch % self.num_fragments

    def leaves_at(self, epoch: int, end_step: int | None) -> int:
        """The local step of the epoch at which its fragment's weights are handed over.

        The run's last epoch has no overlap: no training is left during which its round could take place.
        """
        is_last = end_step is not None and (epoch + 1) * self.steps_per_epoch >= end_step
        return self.steps_per_epoch if is_last else self.steps_per_epoch - max(0, self.overlap_steps)

    def final_epoch(self, end_step: int) -> int:
        """Epochs in a run of `end_step` nominal steps: at its end every fragment is averaged once more."""
        return -(-end_step // self.steps_per_epoch) + self.num_fragments - 1

    def nominal_step(self, epoch: int, local_step: int, end_step: int | None) -> int:
        """Inner steps since the start of the run, the same for fast and slow peers; learning rates follow them."""
        step = epoch * self.steps_per_epoch + min(local_step, self.steps_per_epoch)
        return step if end_step is None else min(step, end_step)
