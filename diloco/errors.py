"""Errors of the training process and the command line, their exit codes, and the box in which users see them.

DilocoError
└── UserError   the user can fix it before training starts; the command line prints one box and exits with 2
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

USER_ERROR = 2
FAILED = 1
"""Exit codes for a UserError and for any other error."""
_MAX_BOX_COLUMNS = 100
_IS_FOR_TOML = re.compile(r'\w+ = ".*"')


class DilocoError(Exception):
    """Base class of the errors of this package."""


class UserError(DilocoError):
    """The message says what is wrong, with the value, and what the user can do, in one or two sentences."""


def print_note(text: str) -> None:
    """Print one line on stderr that does not report an error."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def print_box(title: str, message: str) -> None:
    """Print one box on stderr. Addresses and paths are not wrapped, so that they can be copied.

    Lines for a TOML file are printed below the box, without a frame, so that they can be pasted.
    """
    from provisioning.terminal import printable

    message = printable(message)
    to_paste = [line for line in message.splitlines() if _IS_FOR_TOML.fullmatch(line)]
    message = "\n".join(line for line in message.splitlines() if line not in to_paste)
    width = min(shutil.get_terminal_size().columns, _MAX_BOX_COLUMNS) - 4
    lines = [
        line
        for paragraph in message.splitlines() or [""]
        for line in textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]
    width = max(len(title) + 2, *map(len, lines))
    box = [f"╭─ {title} {'─' * (width - len(title) - 1)}╮"]
    box += [f"│ {line:<{width}} │" for line in lines]
    box += [f"╰{'─' * (width + 2)}╯"]
    # One write, so that the boxes of several processes do not mix.
    sys.stderr.write("\n".join([*box, *to_paste]) + "\n")
    sys.stderr.flush()
