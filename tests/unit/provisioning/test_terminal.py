from __future__ import annotations

import pytest

from provisioning.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("epoch 3 – loss 2.5, 4 × A100\n\tat line 1\n", "epoch 3 – loss 2.5, 4 × A100\n\tat line 1\n"),
        ("\x1b[1;31mred\x1b[0m and \x1b[2Jcleared", "red and cleared"),
        # Sets the title, or the clipboard, of the terminal.
        ("\x1b]0;title\x07\x1b]52;c;eA==\x07", "?]0;title??]52;c;eA==?"),
        ("\x9b2J\x00\x08\u202e", "?2J???"),
        ("10 %\r20 %\r\nnext\r\n", "10 %\n20 %\nnext\n"),
    ],
    ids=["plain", "colors", "commands", "8 bits", "progress"],
)
def test_what_may_go_to_a_terminal(text, shown):
    assert printable(text) == shown
