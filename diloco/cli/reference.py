"""Generates docs/reference.md, which lists every command and flag. `python -m diloco.cli.reference` writes it, and the
pages of `--help`.

Loads only the command line, without optional packages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.app import make_app
from diloco.cli.command_info import (
    arguments_of,
    commands_of,
    default_of,
    field_of,
    help_of,
    names_of,
    paragraphs_of,
)
from diloco.cli.help_pages import write_pages
from diloco.options.flags import GRPO_DEFAULTS, MUON_DEFAULTS, TrainConfig
from diloco.options.trainer import flat_values, shared_fields

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

_HEAD = """# Flags

Generated from the code by `make docs`; do not edit.

Every flag can be written in `--kebab-case` or `--snake_case`. Flags override values of the file `--config FILE.toml`,
which override the defaults; the flag `--hv.local-steps` is `local_steps` in the section `[hv]` of that file. The
opposite of a switch `--fake-data` is `--no-fake-data`. Lists can be written as `--flag A B`, `--flag A --flag B` or
`--flag A,B`.
"""
_TRAINING_HEAD = """## Training flags

These are flags of `diloco peer`, `diloco run`, `diloco doctor`, `diloco grpo-sweep`, and of the trainers
`diloco/train_fsdp.py` and `diloco/train_grpo.py` under torchrun. Flags marked *run* describe the run: they must be the
same on all peers, and a peer that does not set one uses the swarm's value. The other flags can differ between peers.
"""
_GROUPS = (("Training", ""), ("Swarm", "hv."), ("Checkpoints", "ckpt."), ("Reinforcement", "grpo."))


def reference() -> str:
    """The text of docs/reference.md."""
    commands = list(commands_of(make_app(), ("diloco",)))
    training = _training_arguments(commands)
    parts = [_HEAD, *(_section(words, command, set(training)) for words, command in commands), _TRAINING_HEAD]
    parts += [_training_section(title, prefix, training) for title, prefix in _GROUPS]
    parts += [_other_defaults("mode grpo", GRPO_DEFAULTS), _other_defaults("optimizer muon", MUON_DEFAULTS)]
    return "\n".join(parts)


def _training_arguments(commands: Sequence[tuple[tuple[str, ...], App]]) -> dict[str, Argument]:
    """The flags of TrainConfig, which several commands have, by dotted name."""
    peer = next(app for words, app in commands if words == ("diloco", "peer"))
    fields = flat_values(TrainConfig())
    return {name: argument for argument in arguments_of(peer) if (name := field_of(argument)) in fields}


def _section(words: tuple[str, ...], app: App, training: set[str]) -> str:
    arguments = arguments_of(app)
    names = {field_of(argument) for argument in arguments}
    takes_training = training <= names
    own = [argument for argument in arguments if not (takes_training and field_of(argument) in training)]
    text = _escape("\n\n".join(paragraphs_of(app)))
    lines = [f"## {' '.join(words)}", "", text, ""]
    if own:
        lines += [*_table(own), ""]
    if takes_training:
        lines += ["In addition, all [training flags](#training-flags).", ""]
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
        lines.append(f"| {_names(argument)} | {_default(argument)} | {run} | {_escape(help_of(argument))} |")
    return "\n".join([*lines, ""])


def _other_defaults(flag: str, defaults: Mapping[str, float]) -> str:
    named = (f"`--{name.replace('_', '-')} {value:g}`" for name, value in defaults.items())
    return f"Other defaults with `--{flag}`: {', '.join(named)}.\n"


def _table(arguments: Sequence[Argument]) -> list[str]:
    rows = [f"| {_names(one)} | {_default(one)} | {_escape(help_of(one))} |" for one in arguments]
    return ["| flag | default | meaning |", "|---|---|---|", *rows]


def _names(argument: Argument) -> str:
    return ", ".join(f"`{name}`" for name in names_of(argument))


def _default(argument: Argument) -> str:
    text = default_of(argument)
    return text if text in ("", "required", "on", "off") else f"`{text}`"


def _escape(text: str) -> str:
    """Escapes characters that would begin a table cell or an HTML tag in Markdown."""
    return text.replace("|", r"\|").replace("<", r"\<")


def main() -> int:
    path = Path(__file__).parents[2] / "docs/reference.md"
    path.write_text(reference(), encoding="utf-8")
    write_pages()
    print(f"{path} and the pages of --help have been written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
