"""Writes docs/reference.md, which lists every command and flag, and the pages of `--help`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from diloco.cli.app import make_app
from diloco.cli.help_pages import (
    RECIPE_FIELDS,
    arguments_of,
    commands_of,
    field_of,
    flags_text,
    pages,
    paragraphs_of,
)
from diloco.options.flags import GRPO_DEFAULTS, MUON_DEFAULTS, TrainConfig
from diloco.options.help import PAGES_DIR
from diloco.options.trainer import flag_of, flat_values, shared_fields

_HEAD = """# Flags

Generated from the code by `make docs`; do not edit.

Every flag can be written in `--kebab-case` or `--snake_case`. Flags override values of the file `--config FILE.toml`,
which override the defaults; the flag `--hv.local-steps` is `local_steps` in the section `[hv]` of that file. The
opposite of a switch `--fake-data` is `--no-fake-data`. Lists can be written as `--flag A B`, `--flag A --flag B` or
`--flag A,B`.
"""
_TRAINING_HEAD = """## Training flags

These are flags of `diloco peer`, `diloco run`, `diloco doctor`, `diloco grpo-sweep`, and of the trainers
`diloco/train_fsdp.py` and `diloco/train_grpo.py` under torchrun.
"""


def reference() -> str:
    """The text of docs/reference.md."""
    training = flat_values(TrainConfig()).keys()
    parts = [_HEAD]
    common = []
    for words, command in commands_of(make_app()):
        arguments = arguments_of(command)
        takes_training = training <= {field_of(argument) for argument in arguments}
        if takes_training:
            common = [argument for argument in arguments if field_of(argument) in training]
            arguments = [argument for argument in arguments if field_of(argument) not in training]
        # Without the backslash, Markdown would take a placeholder for an HTML tag.
        paragraphs = "\n\n".join(paragraphs_of(command)).replace("<", r"\<")
        parts.append(f"## diloco {words}\n\n{paragraphs}\n")
        if arguments:
            parts.append(_block(flags_text(arguments)))
        if takes_training:
            parts.append("In addition, all [training flags](#training-flags).\n")
    of_the_run = ", ".join(f"`{flag_of(name)}`" for name in sorted(shared_fields()))
    parts += [
        _TRAINING_HEAD,
        _block(flags_text(common)),
        "These describe the run. They must be the same on all peers, and a peer that does not set one uses the "
        f"swarm's value: {of_the_run}.\n",
    ]
    of_the_trainer = {
        name: value for name, value in flat_values(TrainConfig()).items() if name in RECIPE_FIELDS
    }
    parts.append(
        "`diloco run`, `peer` and `provision` choose some flags for the machine if no model is named, and for the "
        "model if it is a preset other than 1b and --total-batch-size is not given. Otherwise, and under torchrun, "
        f"their defaults are: {_named(of_the_trainer)}.\n"
    )
    for flag, defaults in (("mode grpo", GRPO_DEFAULTS), ("optimizer muon", MUON_DEFAULTS)):
        parts.append(f"Other defaults with `--{flag}`: {_named(defaults)}.\n")
    return "\n".join(parts)


def _named(defaults: Mapping[str, object]) -> str:
    """Flags with their values; a value that is computed is left out."""
    texts = {
        name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in defaults.items()
    }
    return ", ".join(f"`{flag_of(name)} {text}`" for name, text in texts.items() if text != "None")


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def main() -> int:
    path = Path(__file__).parents[2] / "docs/reference.md"
    path.write_text(reference(), encoding="utf-8")
    PAGES_DIR.mkdir(exist_ok=True)
    texts = pages()
    for page in PAGES_DIR.glob("*.txt"):
        if page.name not in texts:
            page.unlink()
    for name, text in texts.items():
        (PAGES_DIR / name).write_text(text, encoding="utf-8")
    print(f"{path} and the pages of --help have been written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
