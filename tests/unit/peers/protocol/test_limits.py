"""The types that hold the limits of what peers send."""

from __future__ import annotations

import sys
import unicodedata

import msgspec
import pytest

from peers.protocol.limits import Port, ShownText

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


@pytest.mark.parametrize("port", [0, -1, 65536, True, "22", 22.5, None])
def test_a_port_is_one(port):
    assert msgspec.convert(65535, Port) == 65535
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(port, Port)
