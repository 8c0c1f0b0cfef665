"""docs/reference.md: every verb and flag, as the code has them. `python -m diloco.cli.reference [FILE]` writes it.

Only the command line is loaded for it, so that it can be made anywhere.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.cli.app import make_app
from diloco.options.flags import GRPO_DEFAULTS, TrainConfig
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
does not name one takes the swarm's. The others are each peer's own business.
"""
_GROUPS = (("Training", ""), ("Swarm", "hv."), ("Checkpoints", "ckpt."), ("Reinforcement", "grpo."))


def reference() -> str:
    """The whole page."""
    app = make_app()
    verbs = list(_verbs(app, ("diloco",)))
    training = _training_arguments(verbs)
    parts = [_HEAD, *(_section(words, verb, set(training)) for words, verb in verbs), _TRAINING_HEAD]
    parts += [_training_section(title, prefix, training) for title, prefix in _GROUPS]
    parts += [_grpo_defaults()]
    return "\n".join(parts)


def _verbs(app: App, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that can be run, with the words that call it."""
    if app.default_command is not None:
        yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from _verbs(app[name], (*words, name))


def _arguments(app: App) -> list[Argument]:
    return [argument for argument in app.assemble_argument_collection(parse_docstring=True) if argument.show]


def _training_arguments(verbs: Sequence[tuple[tuple[str, ...], App]]) -> dict[str, Argument]:
    """By their dotted names: the trainer's own, which several verbs take whole."""
    peer = next(app for words, app in verbs if words == ("diloco", "peer"))
    fields = flat_values(TrainConfig())
    return {name: argument for argument in _arguments(peer) if (name := ".".join(argument.keys)) in fields}


def _section(words: tuple[str, ...], app: App, training: set[str]) -> str:
    arguments = _arguments(app)
    names = {".".join(argument.keys) for argument in arguments}
    takes_training = training <= names
    own = [argument for argument in arguments if not (takes_training and ".".join(argument.keys) in training)]
    text = _paragraphs(app)
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
        lines.append(
            f"| {_names(argument)} | {_default(argument)} | {'*run*' if name in shared else ''} | {_help(argument)} |"
        )
    return "\n".join([*lines, ""])


def _grpo_defaults() -> str:
    named = (f"`--{name.replace('_', '-')} {value:g}`" for name, value in GRPO_DEFAULTS.items())
    return f"Under `--mode grpo` other defaults hold: {', '.join(named)}.\n"


def _table(arguments: Sequence[Argument]) -> list[str]:
    rows = [f"| {_names(one)} | {_default(one)} | {_help(one)} |" for one in arguments]
    return ["| flag | default | meaning |", "|---|---|---|", *rows]


def _names(argument: Argument) -> str:
    """All ways to say it but the negative ones."""
    names = [name for name in argument.names if name not in argument.negatives]
    flags = [name for name in names if name.startswith("-")] or [name.upper() for name in names[-1:]]
    return ", ".join(f"`{name}`" for name in flags)


def _default(argument: Argument) -> str:
    value: Any = argument.field_info.default
    if argument.required:
        return "required"
    show = argument.show_default
    if isinstance(show, str):
        return f"`{show}`"
    if callable(show):
        return _shown(show(value))
    if value is None or value is argument.field_info.empty or not show:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{text}`" if text not in ("", "none") else ""


def _help(argument: Argument) -> str:
    text = " ".join(str(argument.parameter.help or "").split())
    choices = argument.get_choices()
    if choices and not all(choice in text for choice in choices):
        text = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}."
    return _escaped(text)


def _escaped(text: str) -> str:
    """As Markdown has to have it for what is no table and no HTML."""
    return text.replace("|", r"\|").replace("<", r"\<")


def _paragraphs(app: App) -> str:
    """What the verb's docstring says before its parameters, without line breaks in a paragraph."""
    text = str(getattr(app.default_command, "__doc__", "") or "") or str(app.help or "")
    text = _escaped(re.split(r"\n\s*Parameters\n", text)[0])
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("file", nargs="?", type=Path, default=Path(__file__).parents[2] / "docs/reference.md")
    path = flags.parse_args().file
    path.write_text(reference(), encoding="utf-8")
    print(f"{path} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
