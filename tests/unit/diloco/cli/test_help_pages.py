"""`--help`: what it shows of each command, and that it is what the code says."""

from __future__ import annotations

import shlex

import pytest

from diloco.cli.app import COMMANDS, exit_code, make_app
from diloco.cli.command_info import arguments_of, commands_of
from diloco.cli.help_pages import EXAMPLES, MAIN_FLAGS, pages
from diloco.options.help import PAGES_DIR, requested_page
from diloco.options.trainer import parse_train_config
from tests.support.documents import MADDR

RUN_ALONE = {"trainer"}


def page(name: str) -> str:
    return (PAGES_DIR / name).read_text(encoding="utf-8")


def test_the_pages_are_what_the_code_says():
    written = {path.name: path.read_text(encoding="utf-8") for path in PAGES_DIR.iterdir()}
    assert written == pages(), "type `make docs`"


def test_every_verb_has_an_example_that_the_parser_takes():
    app = make_app()
    assert EXAMPLES.keys() - RUN_ALONE == {" ".join(words) for words, _command in commands_of(app)}
    for command in EXAMPLES.keys() - RUN_ALONE:
        words = shlex.split(EXAMPLES[command].replace("<maddr>", MADDR))
        assert words[:1] == ["diloco"]
        function, _, unused = app.parse_args(words[1:], exit_on_error=False, print_error=False, verbose=False)
        assert function is not app.default_command and not unused
    example = shlex.split(EXAMPLES["trainer"])
    assert parse_train_config(example[example.index("diloco/train_fsdp.py") + 1 :])[1] == {"path_model"}


def test_doctor_takes_every_flag_of_the_peer_that_it_stands_in_for():
    commands = {" ".join(words): command for words, command in commands_of(make_app())}
    peer, doctor = ({one.names for one in arguments_of(commands[name])} for name in ("peer", "doctor"))
    assert peer <= doctor


def test_the_first_page_groups_the_verbs_by_what_they_are_for():
    text = page("diloco.txt")
    places = [text.index(f"{group}:") for group in COMMANDS]
    assert places == sorted(places)
    assert all(f"\n  {command.words} " in text for section in COMMANDS.values() for command in section)


@pytest.mark.parametrize("command", MAIN_FLAGS)
def test_a_page_with_the_flags_that_matter_fits_a_screen_and_names_the_other(command):
    text = page(f"{command.replace(' ', '_')}.txt")
    assert len(text.splitlines()) <= 50
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("Usage: "))
    assert len(MAIN_FLAGS[command]) <= 14
    assert f"`diloco {command} --help-all` lists all " in text


def test_all_flags_of_a_peer_begin_with_the_swarm_and_the_training():
    text = page("peer.all.txt")
    assert [line for line in text.splitlines() if line.endswith(":") and line[0] != " "] == [
        *("Example:", "Swarm:", "Training:", "Checkpoints:", "GRPO:")
    ]
    assert "--hv.averaging-timeout" in text and "--hv.averaging-timeout" not in page("peer.txt")


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], None),
        (["--help"], "diloco.txt"),
        (["peer", "--lr", "1", "--help"], "peer.txt"),
        (["peer", "-h"], "peer.txt"),
        (["peer", "--help-all"], "peer.all.txt"),
        # It has one page, with all.
        (["status", "--help-all"], "status.txt"),
        (["dht", "--help"], "dht.txt"),
        (["pods", "ssh", "pod-0", "--help"], "pods_ssh.txt"),
        # What follows is somebody else's.
        (["provision", "--", "--help"], None),
        # No command: the parser says what was meant.
        (["pear", "--help"], None),
        (["dht", "stat", "--help"], None),
    ],
)
def test_the_page_is_that_of_the_verb_that_is_asked_about(argv, name):
    assert requested_page(argv) == (page(name) if name else None)


def test_without_a_verb_the_first_page_is_shown(capsys):
    assert exit_code([]) == 0
    assert capsys.readouterr().out == page("diloco.txt")
