"""What is read of a file that grows, and to which several runs may have appended."""

from __future__ import annotations

from diloco.train.file_tail import FileTail


def test_a_tail_yields_complete_lines_without_those_of_an_earlier_run(tmp_path):
    path = tmp_path / "peer.log"
    path.write_text("of an earlier run\n")
    tail = FileTail(path)
    assert tail.read_lines() == []
    with path.open("a") as log:
        log.write("first\nsecond, in ")
        log.flush()
        assert tail.read_lines() == ["first"]
        log.write("two parts\n")
    assert tail.read_lines() == ["second, in two parts"]
    assert FileTail(tmp_path / "missing.log").read_lines() == []


def test_a_last_line_that_is_cut_off_makes_nobody_read_the_file_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("first\nsec")
    tail = FileTail(path, start=0)
    assert tail.read_lines() == ["first"]
    path.write_text("first\n")
    assert tail.read_lines() == []
    with path.open("a") as file:
        file.write("second\n")
    assert tail.read_lines() == ["second"]


def test_the_last_words_are_not_those_of_an_earlier_run(tmp_path):
    path = tmp_path / "peer.log"
    path.write_text("╭─ diloco failed ─╮\n│ an old message  │\n╰─────────────────╯\n")
    tail = FileTail(path)
    assert tail.last_words() == ""
    with path.open("a") as log:
        log.write("Killed\n")
    assert tail.last_words() == "Killed"
