"""A rollout peer whose generator cheats: `python -m tests.support.cheating_rollout_peer KIND peer --role rollout …`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

GENERATOR = "generator"


def as_peer(kind: str, words: Sequence[str]) -> None:
    """Run diloco's command line with the cheating generator of this module."""
    from diloco.cli.app import main
    from peers.daemon import rollout_peer

    honest = rollout_peer.Supervisor

    def supervisor(command: Any, *rest: Any) -> Any:
        argv = [word if word != "diloco.generate_rollouts" else __spec__.name for word in command.argv]
        place = argv.index(__spec__.name) + 1
        return honest(replace(command, argv=(*argv[:place], GENERATOR, kind, *argv[place:])), *rest)

    rollout_peer.Supervisor = supervisor  # type: ignore[assignment,misc]
    sys.argv = ["diloco", *words]
    main()


def as_generator(kind: str, words: Sequence[str]) -> None:
    from diloco import generate_rollouts
    from diloco.rl import generator

    CHEATS[kind](generator)
    sys.argv = ["generate_rollouts", *words]
    generate_rollouts.main()


def other_weights(generator: Any) -> None:
    """Generates with weights that are far from the policy's."""
    honest = generator.of_model

    def of_model(config: Any, task: Any, tokenizer: Any, model: Any, dtype: Any) -> Any:
        found = honest(config, task, tokenizer, model, dtype)
        use = found._use

        def used(state: dict[str, torch.Tensor]) -> None:
            use({name: tensor + 0.5 * torch.randn_like(tensor) for name, tensor in state.items()})

        found._use = used
        return found

    from diloco import generate_rollouts

    generate_rollouts.of_model = of_model


def forged_rewards(generator: Any) -> None:
    """Claims perfect scores for everything that it generates."""
    _change(generator, lambda group: [{**one, "scores": [1.0] * len(one["scores"])} for one in group])


def copied_answers(generator: Any) -> None:
    """Sends the same completions for every prompt, with the scores that they earned for the first."""
    first: list[Any] = []

    def copied(group: list[Any]) -> list[Any]:
        first[:] = first or group
        return first

    _change(generator, copied)


def _change(generator: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    honest = generator.Generator.generate

    def generate(self: Any, *arguments: Any) -> Any:
        return [change(group) for group in honest(self, *arguments)]

    generator.Generator.generate = generate


CHEATS = {"other weights": other_weights, "forged rewards": forged_rewards, "copied answers": copied_answers}

if __name__ == "__main__":
    if sys.argv[1] == GENERATOR:
        as_generator(sys.argv[2], sys.argv[3:])
    else:
        as_peer(sys.argv[1], sys.argv[2:])
