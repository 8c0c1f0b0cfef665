"""docs/reference.md: every verb and flag, as the code has them. `python -m diloco.cli.reference` writes it, and the
pages of `--help`.

Only the command line is loaded for it, so that it can be made anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.app import make_app
from diloco.cli.described import (
    arguments_of,
    default_of,
    field_of,
    help_of,
    names_of,
    paragraphs_of,
    verbs_of,
)
from diloco.cli.help_pages import write_pages
from diloco.options.flags import GRPO_DEFAULTS, MUON_DEFAULTS, TrainConfig
from diloco.options.trainer import flat_values, shared_fields

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

_HEAD = """# Flags

Made from the code by `make docs`; change nothing here by hand.

Every flag may be written in `--kebab-case` or `--snake_case`. Flags beat the file that `--config FILE.toml` names, and
that beats the defaults: a flag `--hv.local-steps` is `local_steps` in its section `[hv]`. A switch `--fake-data` is
turned off by `--no-fake-data`. List flags take `--flag A B`, `--flag A --flag B` and `--flag A,B`.
"""
_TRAINING_HEAD = """## Training flags

Of `diloco peer`, `diloco run`, `diloco doctor` and, under torchrun, of `diloco/train_fsdp.py` and
`diloco/train_grpo.py`. Flags marked *run* describe the run: they have to be the same on all its peers, and a peer that
does not set one takes the swarm's value. The other flags may differ from peer to peer.
"""
_GROUPS = (("Training", ""), ("Swarm", "hv."), ("Checkpoints", "ckpt."), ("Reinforcement", "grpo."))


def reference() -> str:
    """The whole page."""
    verbs = list(verbs_of(make_app(), ("diloco",)))
    training = _training_arguments(verbs)
    parts = [_HEAD, *(_section(words, verb, set(training)) for words, verb in verbs), _TRAINING_HEAD]
    parts += [_training_section(title, prefix, training) for title, prefix in _GROUPS]
    parts += [_other_defaults("mode grpo", GRPO_DEFAULTS), _other_defaults("optimizer muon", MUON_DEFAULTS)]
    return "\n".join(parts)


def _training_arguments(verbs: Sequence[tuple[tuple[str, ...], App]]) -> dict[str, Argument]:
    """By their dotted names: the trainer's own, which several verbs take whole."""
    peer = next(app for words, app in verbs if words == ("diloco", "peer"))
    fields = flat_values(TrainConfig())
    return {name: argument for argument in arguments_of(peer) if (name := field_of(argument)) in fields}


def _section(words: tuple[str, ...], app: App, training: set[str]) -> str:
    arguments = arguments_of(app)
    names = {field_of(argument) for argument in arguments}
    takes_training = training <= names
    own = [argument for argument in arguments if not (takes_training and field_of(argument) in training)]
    text = _escaped("\n\n".join(paragraphs_of(app)))
    lines = [f"## {' '.join(words)}", "", text, ""]
    if own:
        lines += [*_table(own), ""]
    if takes_training:
        lines += ["And all [training flags](#training-flags).", ""]
    return "\n".join(lines)


def _training_section(title: str, prefix: str, training: dict[str, Argument]) -> str:
    shared = shared_fields()
    rows = {
        name: argument
        for name, argument in training.items()
        if (name.startswith(prefix) if prefix else "." not in name)
    }
    lines = [f"### {title}", "", "| flag | default | | meaning |", "|---|---|---|---|"]
    for name, argument in rows.items():
        run = "*run*" if name in shared else ""
        lines.append(f"| {_names(argument)} | {_default(argument)} | {run} | {_escaped(help_of(argument))} |")
    return "\n".join([*lines, ""])


def _other_defaults(flag: str, defaults: Mapping[str, float]) -> str:
    named = (f"`--{name.replace('_', '-')} {value:g}`" for name, value in defaults.items())
    return f"Under `--{flag}` other defaults hold: {', '.join(named)}.\n"


def _table(arguments: Sequence[Argument]) -> list[str]:
    rows = [f"| {_names(one)} | {_default(one)} | {_escaped(help_of(one))} |" for one in arguments]
    return ["| flag | default | meaning |", "|---|---|---|", *rows]


def _names(argument: Argument) -> str:
    return ", ".join(f"`{name}`" for name in names_of(argument))


def _default(argument: Argument) -> str:
    text = default_of(argument)
    return text if text in ("", "required", "on", "off") else f"`{text}`"


def _escaped(text: str) -> str:
    """As Markdown has to have it for what is no table and no HTML."""
    return text.replace("|", r"\|").replace("<", r"\<")


def main() -> int:
    path = Path(__file__).parents[2] / "docs/reference.md"
    path.write_text(reference(), encoding="utf-8")
    write_pages()
    print(f"{path} and the pages of --help are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
