"""Converters and validators of flags. cyclopts turns their ValueErrors into messages for the user."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.options.common_names import closest_name
from peers.core.schedule import AS_LONG_AS_THE_ROUND
from peers.protocol.codecs import CODEC_NAMES

if TYPE_CHECKING:
    from cyclopts import Token

Check = Callable[[Any, Any], None]

_HIVEMIND_CODECS = {
    "none": "fp32",
    "scaled-fp16": "fp16",
    "uniform8bit": "int8",
    "quantile8bit": "int8",
    "blockwise8bit": "int8",
}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGEST_S = 1e9
_CODECS = {name: name for name in CODEC_NAMES} | _HIVEMIND_CODECS
_ATTENTION = (
    "sdpa",
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
_LOGGERS = ("wandb", "tensorboard", "dummy")


def at_least(low: float) -> Check:
    def check(_type: Any, value: float | None) -> None:
        # `not value >= low` instead of `value < low`, so that nan is rejected.
        if value is not None and not value >= low:
            raise ValueError(f"It must be {low:g} or more.")

    return check


def up_to(high: float) -> Check:
    def check(_type: Any, value: float | None) -> None:
        if value is not None and not value <= high:
            raise ValueError(f"It must be {high:g} or less.")

    return check


def finite(_type: Any, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError("It must be a finite number.")


def not_empty(_type: Any, value: str | None) -> None:
    if value is not None and not value.replace(",", "").strip():
        raise ValueError("It has no value; leave it out, or check the variable that it comes from.")


def safe_name(_type: Any, value: str) -> None:
    """Validates a name that is used in file names: no slash, no leading dot."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", value):
        raise ValueError("Use up to 100 letters, digits, dots, dashes and underscores.")


def attention(_type: Any, value: str) -> None:
    """Validates the name of an attention implementation of transformers, or of a kernel on the Hugging Face hub."""
    if value not in _ATTENTION and not {"/", "|"} & set(value):
        raise ValueError(f"It must be one of {', '.join(_ATTENTION)}, or a kernel's owner/name.")


def whole(_type: Any, tokens: Sequence[Token]) -> int:
    """Converts an integer, also one like 1e6, and rejects 1.5, which cyclopts itself would round to 2."""
    text = tokens[-1].value
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f'"{text}" is not a whole number.')
    return int(text) if text.lstrip("+-").isdigit() else int(number)


def rate_or_auto(maximum: float = math.inf) -> Callable[[Any, Sequence[Token]], float | None]:
    """Converts a number from 0 to `maximum`; `auto` becomes None."""
    limit = f"to {maximum:g}" if math.isfinite(maximum) else "on"

    def convert(_type: Any, tokens: Sequence[Token]) -> float | None:
        text = tokens[-1].value
        if text == "auto":
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 <= value <= maximum and math.isfinite(value)):
            raise ValueError(f'"{text}" is neither auto nor a number from 0 {limit}.')
        return value

    return convert


def quantity(text: str, units: Mapping[str, float], what: str) -> float:
    """The value of a number with one of these units, like 1.5h. Raises ValueError unless it is finite and above 0.

    `what` describes such a value in the message.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text)
    value = float(match[1]) * units[match[2]] if match and match[2] in units else math.nan
    if not (math.isfinite(value) and value > 0):
        too_small = ", or not above 0" if math.isfinite(value) else ""
        raise ValueError(f'"{text}" is not {what}{too_small}.')
    return value


def duration(_type: Any, tokens: Sequence[Token]) -> float:
    """Converts a number of seconds, or a number with a unit (90, 120s, 10m, 1.5h), to seconds."""
    seconds = quantity(tokens[-1].value, _SECONDS, "a time like 120s, 10m or 1.5h")
    if seconds > _LONGEST_S:
        raise ValueError(f"It must be {_LONGEST_S:g} seconds or less.")
    return seconds


def duration_or_auto(kind: Any, tokens: Sequence[Token]) -> float:
    """As `duration`; `auto` becomes 0, its value in the configuration."""
    return 0.0 if tokens[-1].value in ("auto", "0", "0.0") else duration(kind, tokens)


def whole_or_auto(kind: Any, tokens: Sequence[Token]) -> int:
    """As `whole`, from 0; `auto` becomes AS_LONG_AS_THE_ROUND, its value in the configuration."""
    number = AS_LONG_AS_THE_ROUND if tokens[-1].value == "auto" else whole(kind, tokens)
    if number < AS_LONG_AS_THE_ROUND:
        raise ValueError(f"It must be auto, or 0 or more, not {number}.")
    return number


def codec(_type: Any, tokens: Sequence[Token]) -> str:
    """Converts the name of one of our codecs, or of hivemind's, to the name of our codec."""
    name = tokens[-1].value
    if name not in _CODECS:
        close = closest_name(name, _CODECS)
        hint = f' Did you mean "{close}"?' if close else ""
        raise ValueError(f'"{name}" is not one of {", ".join(CODEC_NAMES)}.{hint}')
    return _CODECS[name]


def loggers(_type: Any, tokens: Sequence[Token]) -> str:
    """Converts names of metric loggers, separated by commas."""
    names = [name for token in tokens for name in re.split(r"[,\s]+", token.value) if name]
    if unknown := [name for name in names if name not in _LOGGERS]:
        raise ValueError(f'"{unknown[0]}" is not one of {", ".join(_LOGGERS)}.')
    return ",".join(dict.fromkeys(names)) or "dummy"


def addresses(*, of_peers: bool) -> Callable[[Any, Sequence[Token]], tuple[str, ...]]:
    """Converts a list flag; each value may hold several addresses separated by commas or spaces."""

    def convert(_type: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
        from peers.errors import UserError
        from peers.protocol.maddrs import validate_maddr

        found = [text for token in tokens for text in re.split(r"[,\s]+", token.value) if text]
        # An empty list is allowed in a file, but not on the command line.
        if not found and any(token.source == "cli" for token in tokens):
            raise ValueError("It has no value; leave it out, or check the variable that it comes from.")
        try:
            for text in found:
                validate_maddr(text, peer_id=of_peers)
        except UserError as error:
            raise ValueError(f"{error}.") from error
        return tuple(found)

    return convert
