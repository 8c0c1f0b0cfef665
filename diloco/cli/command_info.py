"""Reads commands and flags, with their descriptions, from the code, for the `--help` pages and docs/reference.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument


def commands_of(app: App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command, with the words that call it; groups of commands are left out."""
    if app.default_command is not None:
        yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from commands_of(app[name], (*words, name))


def arguments_of(app: App) -> list[Argument]:
    return [argument for argument in app.assemble_argument_collection(parse_docstring=True) if argument.show]


def field_of(argument: Argument) -> str:
    """The dotted name of the field that the argument sets."""
    return ".".join(argument.keys)


def names_of(argument: Argument) -> list[str]:
    """The names of a flag without the negative ones; for a positional argument, its name in capitals."""
    names = [name for name in argument.names if name not in argument.negatives]
    return [name for name in names if name.startswith("-")] or [name.upper() for name in names[-1:]]


def default_of(argument: Argument) -> str:
    """The default as text; empty if there is none, or it is not shown."""
    value: Any = argument.field_info.default
    if argument.required:
        return "required"
    show = argument.show_default
    if isinstance(show, str):
        return show
    if callable(show):
        return _shown(show(value))
    if value is None or value is argument.field_info.empty or not show:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return _shown(value)


def help_of(argument: Argument) -> str:
    text = " ".join(str(argument.parameter.help or "").split())
    choices = argument.get_choices()
    if choices and not all(choice in text for choice in choices):
        text = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}."
    return text


def paragraphs_of(app: App) -> list[str]:
    """The paragraphs of the command's docstring before its parameters, without line breaks."""
    text = str(getattr(app.default_command, "__doc__", "") or "") or str(app.help or "")
    text = re.split(r"\n\s*Parameters\n", text)[0]
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "" if text == "none" else text
