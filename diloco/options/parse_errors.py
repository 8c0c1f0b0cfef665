"""Texts for command lines that do not parse, with suggestions for misspelt flags."""

from __future__ import annotations

from collections.abc import Callable

from cyclopts import (
    App,
    Argument,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from diloco.options.common_names import closest_name, suggested_name
from diloco.options.help import read_page


def parse_error_text(error: CycloptsError, command_with: Callable[[str], str] = lambda flag: "") -> str:
    """The message for arguments that do not parse. `command_with` returns another command that has this flag, or ""."""
    if isinstance(error, UnusedCliTokensError):
        return f'Unexpected argument "{(error.unused_tokens or [""])[0]}"; flags begin with two dashes.'
    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        return _unknown_flag(error, command_with)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _missing_value(error, error.argument)
    if isinstance(error, UnknownCommandError) and error.app is not None:
        return _unknown_command(error, error.app)
    return str(error)


def _unknown_command(error: UnknownCommandError, app: App) -> str:
    """The text of cyclopts without its list of commands, for which it would import all of them."""
    (typed, *_) = error.unused_tokens or [""]
    close = closest_name(typed, [name for name in app if not name.startswith("-")])
    hint = f' Did you mean "{close}"?' if close else ""
    return f'Unknown command "{typed}".{hint}'


def _missing_value(error: MissingArgumentError, argument: Argument) -> str:
    if flag := error.keyword or next((token.keyword for token in argument.tokens if token.keyword), None):
        return f"{flag} needs a value."
    if argument.index is None:
        return f"{argument.name} is missing."
    usage = read_page(error.command_chain or ()).partition("\n")[0]
    return f"{argument.name.lstrip('-').upper()} is missing.\n{usage}"


def _unknown_flag(error: UnknownOptionError, command_with: Callable[[str], str]) -> str:
    typed = (error.token.keyword or error.token.value).partition("=")[0]
    if command := command_with(typed):
        return f"{typed} is not a flag of this command, but of `diloco {command}`."
    flags = [name for argument in error.argument_collection if argument.show for name in argument.names]
    known = {flag.lstrip("-").replace("-", "_"): flag for flag in reversed(flags) if flag.startswith("--")}
    close = suggested_name(typed.lstrip("-").replace("-", "_"), known)
    hint = f" Did you mean {known[close]}?" if close else ""
    return f"There is no flag {typed}.{hint}"
