"""`--help`: the page that each command shows, and that the pages match the code."""

from __future__ import annotations

import shlex

import pytest

from diloco.cli.app import exit_code, make_app
from diloco.cli.help_pages import EXAMPLES, arguments_of, commands_of, pages
from diloco.options.help import PAGES_DIR, requested_page
from diloco.options.trainer import parse_train_config
from provisioning.experiments.sets import BUILT_IN
from tests.support.documents import MADDR

RUN_ALONE = {"trainer"}


def page(name: str) -> str:
    return (PAGES_DIR / name).read_text(encoding="utf-8")


def test_the_pages_are_what_the_code_says():
    written = {path.name: path.read_text(encoding="utf-8") for path in PAGES_DIR.iterdir()}
    assert written == pages(), "type `make docs`"


def test_every_verb_has_an_example_that_the_parser_takes():
    app = make_app()
    assert EXAMPLES.keys() - RUN_ALONE == dict(commands_of(app)).keys()
    for command in EXAMPLES.keys() - RUN_ALONE:
        words = shlex.split(EXAMPLES[command].replace("<maddr>", MADDR))
        assert words[:1] == ["diloco"]
        function, _, unused = app.parse_args(words[1:], exit_on_error=False, print_error=False, verbose=False)
        assert function is not app.default_command and not unused
    example = shlex.split(EXAMPLES["trainer"])
    assert parse_train_config(example[example.index("diloco/train_fsdp.py") + 1 :])[1] == {"path_model"}


def test_the_examples_of_experiments_name_sets_that_there_are():
    words = [shlex.split(EXAMPLES[f"experiments {verb}"]) for verb in ("run", "destroy")]
    assert {one[one.index("--name") + 1] for one in words} <= set(BUILT_IN)


def test_doctor_takes_every_flag_of_the_peer_that_it_stands_in_for():
    commands = dict(commands_of(make_app()))
    peer, doctor = ({one.names for one in arguments_of(commands[name])} for name in ("peer", "doctor"))
    assert peer <= doctor


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], None),
        (["--help"], "diloco.txt"),
        (["peer", "--lr", "1", "--help"], "peer.txt"),
        (["peer", "-h"], "peer.txt"),
        (["peer", "--help-all"], "peer.all.txt"),
        # `status` has only one page.
        (["status", "--help-all"], "status.txt"),
        (["dht", "--help"], "dht.txt"),
        (["pods", "ssh", "pod-0", "--help"], "pods_ssh.txt"),
        # The flags behind `--` are the peers'.
        (["provision", "--", "--help"], None),
        # Unknown commands are left to the parser, which suggests one.
        (["pear", "--help"], None),
        (["dht", "stat", "--help"], None),
    ],
)
def test_the_page_is_that_of_the_verb_that_is_asked_about(argv, name):
    assert requested_page(argv) == (page(name) if name else None)


def test_without_a_verb_the_first_page_is_shown(capsys):
    assert exit_code([]) == 0
    assert capsys.readouterr().out == page("diloco.txt")
