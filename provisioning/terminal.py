"""What pods and providers write, made safe for the user's terminal. Pure."""

from __future__ import annotations

import re

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def printable(text: str) -> str:
    """`text` without control characters but tabs and ends of lines: they could move the cursor or type commands.

    Escape sequences, such as those of colors, are left out, a carriage return, as of progress bars, becomes the end of
    a line, and any other such character "?".
    """
    text = _ESCAPE_SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
