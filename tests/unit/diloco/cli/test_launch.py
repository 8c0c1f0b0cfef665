"""What `diloco launch` refuses before it starts anything."""

from __future__ import annotations

from diloco.cli.app import exit_code


def test_a_program_whose_quotes_are_not_closed_is_refused(capsys):
    assert exit_code(["launch", "train.toml", "--program", 'train.py "a']) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert '--program train.py "a: No closing quotation.' in said
