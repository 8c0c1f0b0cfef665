"""Why a process ended, by its log."""

from __future__ import annotations

import pytest

from diloco.train.run_dir import last_words, reason_in

BOX = "step 1\n╭─ diloco failed ─╮\n│ too hot, so      │\n│ it ended         │\n╰──────────────────╯\n"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'
    "ValueError: too hot\n[W1124 17:53:44] a library says good-bye\n"
)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (BOX, "too hot, so it ended"),
        (TRACEBACK, "ValueError: too hot"),
        (f"{TRACEBACK}{TRACEBACK.replace('hot', 'cold')}", "ValueError: too cold"),
        ("step 1\nkilled by hand\n\n", "killed by hand"),
        ("", ""),
    ],
)
def test_a_reason_is_the_last_box_the_last_exception_or_the_last_line(log, reason):
    assert reason_in(log) == reason


def test_last_words_are_those_of_the_box_or_the_end_of_the_log(tmp_path):
    path = tmp_path / "log"
    assert last_words(path) == ""
    path.write_text("\n".join(map(str, range(20))))
    assert last_words(path, max_lines=2) == "18\n19"
    path.write_text(BOX)
    assert last_words(path) == "too hot, so\nit ended"
