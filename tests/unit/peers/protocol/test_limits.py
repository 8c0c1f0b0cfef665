"""The limits of what peers send: the types that enforce them, and that every message does."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
import sys
import unicodedata
from pathlib import Path

import msgpack
import msgspec
import pytest
from msgspec import inspect
from msgspec.msgpack import Decoder

from peers import protocol
from peers.errors import ProtocolError
from peers.protocol import relays, wire
from peers.protocol.limits import ShownText
from tests.unit.peers.protocol.test_decoders import CERTIFICATE, INTRODUCTIONS, SAID, STANDING, WORDS

BIDIRECTIONAL = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def is_shown(text: str) -> bool:
    try:
        return msgspec.convert(text, ShownText) == text
    except msgspec.ValidationError:
        return False


def test_a_text_that_is_shown_holds_nothing_that_a_terminal_obeys_and_everything_that_it_prints():
    for code in range(sys.maxunicode + 1):
        letter = chr(code)
        is_obeyed = unicodedata.category(letter) in ("Cc", "Zl", "Zp") or (
            unicodedata.bidirectional(letter) in BIDIRECTIONAL
        )
        if is_obeyed or letter.isprintable():
            assert is_shown(letter) != is_obeyed, hex(code)


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2J",
        "a\nb",
        "a\n",
        "\x7f",
        "\x9b",
        "\u2028",
        "a\u202eb",
        "\u2066",
        "a\u200bb",
        "\ufeff",
        "\u200f",
    ],
)
def test_a_text_with_a_character_that_is_not_seen_is_refused(text):
    assert not is_shown(text)


def test_texts_of_many_languages_are_shown():
    for text in ("", "2 × NVIDIA H100", "Größe: 5 µs", "機械学習", "שלום", "🦙 ok"):
        assert is_shown(text)


# All messages

GOLDEN = Path(__file__).with_name("limits.txt")
"""The limits of all message types. After a deliberate change, also increase records.PROTOCOL, unless versions with and
without it understand each other: python -m tests.unit.peers.protocol.test_limits"""
SAMPLES = [*itertools.chain.from_iterable(WORDS.values()), *SAID, *INTRODUCTIONS, *STANDING, CERTIFICATE]


def structs() -> list[type[wire.Struct]]:
    for module in pkgutil.iter_modules(protocol.__path__):
        importlib.import_module(f"{protocol.__name__}.{module.name}")
    found, to_see = set[type[wire.Struct]](), [wire.Struct]
    while to_see:
        below = to_see.pop().__subclasses__()
        found |= {kind for kind in below if kind.__module__.startswith(f"{protocol.__name__}.")}
        to_see += below
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


def in_words(told) -> str:
    """A type in words, with all its constraints."""
    match told:
        case inspect.StructType():
            return told.cls.__name__
        case inspect.UnionType():
            return " | ".join(map(in_words, told.types))
        case inspect.EnumType():
            return " ".join(repr(one.value) for one in told.cls)
        case inspect.LiteralType():
            return " ".join(map(repr, told.values))
    parts = []
    for name in told.__struct_fields__:
        match getattr(told, name):
            case None:
                continue
            case inspect.Type() as inner:
                parts.append(f"{name} ({in_words(inner)})")
            case tuple() as inner:
                parts.append(f"{name} ({', '.join(map(in_words, inner))})")
            case value:
                parts.append(f"{name} {value!r}")
    return " ".join([type(told).__name__.removesuffix("Type").lower(), *parts])


def limits() -> str:
    lines = []
    for kind in structs():
        told = inspect.type_info(kind)
        is_open = "" if told.forbid_unknown_fields or told.array_like else ", and takes unknown fields"
        lines.append(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__} {told.tag!r}{is_open}")
        for field in told.fields:
            lines.append(
                f"    {field.encode_name}: {in_words(field.type)}{'' if field.required else ', or left out'}"
            )
    return "\n".join(lines) + "\n"


def test_the_types_of_all_messages_take_what_they_are_meant_to():
    assert limits().splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def outside(told) -> list:
    """Values that a field of this type must refuse: of another type, or just beyond a limit."""
    match told:
        case inspect.IntType():
            return ["1", 1.5, True, None, *([told.le + 1] if told.le else []), told.ge - 1]
        case inspect.FloatType():
            return ["1", True, None, math.nan, math.inf, -math.inf, *((1.1 * told.le,) if told.le else ())]
        case inspect.StrType():
            long = [] if told.max_length is None else ["x" * (told.max_length + 1)]
            obeyed = ["\x1b[2J", "a\nb", "a\u202eb", "a\n"] if told.pattern else []
            return [7, None, b"x", *long, *obeyed, *([""] if told.min_length else [])]
        case inspect.BytesType():
            long = [] if told.max_length is None else [b"x" * (told.max_length + 1)]
            return [7, None, "x", [1], *long, *([b"x" * (told.min_length - 1)] if told.min_length else [])]
        case inspect.VarTupleType():
            return [7, None, {"a": 1}, *([[]] if told.min_length else [])]
        case inspect.DictType():
            return [7, None, [["a", 1.0]]]
        case inspect.LiteralType() | inspect.EnumType():
            return ["another", "", None, 7]
        case inspect.BoolType():
            return [1, "yes", None]
        case inspect.StructType():
            return [7, None, "x"]
        case inspect.UnionType():
            of_each = [outside(one) for one in told.types]
            return [value for value in of_each[0] if value is not None and value not in (1.5, "1")]
    return []


def places(told, at):
    """Every value within this message: its container, its key there, and its type."""
    if isinstance(told, inspect.UnionType):
        told = next(one for one in told.types if not isinstance(one, inspect.NoneType))
    if isinstance(told, inspect.StructType):
        names = told.cls.__struct_fields__
        for field in told.fields:
            key = names.index(field.name) if isinstance(at, list) else field.encode_name
            yield at, key, field.type
            if at[key] is not None:
                yield from places(field.type, at[key])
    elif isinstance(told, inspect.VarTupleType):
        if told.max_length is not None and at and len(at) * told.max_length < 10_000:
            yield at, None, told.max_length
        if at:
            yield at, 0, told.item_type
            yield from places(told.item_type, at[0])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_value_beyond_its_limit_a_missing_one_and_an_unknown_one_are_refused(sample):
    kind = inspect.type_info(type(sample))
    decoder = Decoder(type(sample))
    fields = msgpack.unpackb(wire.encode(sample))

    def is_refused() -> bool:
        try:
            wire.decode(decoder, msgpack.packb(fields), 1 << 30)
        except ProtocolError:
            return True
        return False

    assert not is_refused()
    for at, key, told in places(kind, fields):
        if key is None:
            before = list(at)
            at[:] = at[:1] * (told + 1)
            assert is_refused(), f"{told + 1} of {before[0]!r:.80}"
            at[:] = before
            continue
        before = at[key]
        for value in outside(told):
            at[key] = value
            assert is_refused(), f"{key}: {value!r:.80}"
        at[key] = before
    for field in kind.fields if isinstance(fields, dict) else ():
        without = {name: value for name, value in fields.items() if name != field.encode_name}
        if field.required:
            with pytest.raises(ProtocolError, match="missing"):
                wire.decode(decoder, msgpack.packb(without), 1 << 30)
    if isinstance(fields, dict) and kind.forbid_unknown_fields:
        fields["more"] = 1
        assert is_refused()


@pytest.mark.parametrize(
    "fields", [{"type": "\x1b[2J"}, {"type": "go", "\x1b[2J": 1}, {"type": "go", "a\u202eb": 1}]
)
def test_what_is_said_of_a_message_that_is_none_holds_nothing_that_a_terminal_obeys(fields):
    with pytest.raises(ProtocolError) as caught:
        wire.decode(Decoder(relays.Go | relays.Ready), wire.encode(fields), 1024)
    assert str(caught.value).isprintable()


if __name__ == "__main__":
    GOLDEN.write_text(limits(), encoding="utf-8")
