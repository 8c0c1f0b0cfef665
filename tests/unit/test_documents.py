"""What the documents say that can be compared with the code without running anything."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from diloco.cli.app import make_app
from diloco.cli.help_pages import arguments_of, commands_of
from diloco.cli.reference import reference
from diloco.options.model_files import load_model_config, preset_names
from diloco.options.trainer import parse_train_config
from diloco.sim.cost.links import TCP_FILL, TCP_PAYLOAD
from diloco.train.model import num_parameters
from peers.protocol.codecs import BITS_BY_CODEC
from tests.support.commands import ROOT
from tests.support.documents import MADDR, PAGES, README, blocks_of, features, parsed_commands

ALL = {"README.md": README, **PAGES}
PARSED = [
    (name, command)
    for name, text in ALL.items()
    for command in (*parsed_commands(text), *features(text).values())
    if not command.startswith("ray ")
]
QUOTED = re.findall(r"^- `(.*)`:$", PAGES["docs/troubleshooting.md"], re.MULTILINE)


def test_the_reference_is_what_the_code_says():
    assert PAGES["docs/reference.md"] == reference(), "type `make docs`"


@pytest.mark.parametrize("name", ALL)
def test_every_link_leads_to_a_file_or_heading_that_is_there(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", ALL[name]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in set(_anchors(target.read_text(encoding="utf-8"))), link


def _anchors(text: str) -> Iterator[str]:
    """The anchors that GitHub makes from headings."""
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    ("name", "command"), PARSED, ids=[f"{name}: {command:.60}" for name, command in PARSED]
)
def test_a_command_for_other_machines_is_one_that_the_parser_takes(name, command):
    words = shlex.split(command.replace("<maddr>", MADDR))
    if words[0] == "torchrun":
        parse_train_config(words[words.index("diloco/train_fsdp.py") + 1 :])
        return
    assert words[0] == "diloco"
    function, _, unused = make_app().parse_args(
        words[1:], exit_on_error=False, print_error=False, verbose=False
    )
    assert not unused and function is not make_app().default_command


def test_what_migration_says_of_flags_is_true():
    table = PAGES["docs/migration.md"].partition("## Flag by flag")[2].partition("##")[0]
    old = {
        flag for row in table.splitlines() if row.startswith("| `--") for flag in _flags(row.split("|")[1])
    }
    assert len(old) > 35
    taken = _flags_taken()
    older = {"--checkpoint-path", "--checkpoint-interval", "--resume-from-checkpoint"}
    assert {flag.replace("_", "-") for flag in old} - taken == older
    for codec in ("fp16", "scaled-fp16", "uniform8bit", "quantile8bit", "blockwise8bit"):
        assert codec in table
        config, _ = parse_train_config(["--hv.hivemind-compression", codec])
        assert config.hv.compression == ("fp16" if codec.endswith("fp16") else "int8")
    for strategy in ("WAIT_FOR_ALL", "NO_WAIT"):
        parse_train_config(["--hv.all_reduce_strategy", strategy])


def test_what_migration_says_of_flags_that_went_is_true():
    table = PAGES["docs/migration.md"].partition("# Coming from diloco before certificates")[2]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
    gone = {
        flag for row in rows if row[2].startswith(" removed") for flag in _flags(row[1].split("host:port")[0])
    }
    of_all = {name for _, app in commands_of(make_app()) for one in arguments_of(app) for name in one.names}
    # These two appear in the table's first column but still exist.
    gone -= {"--engine", "--initial-peers"}
    assert gone == {
        *(
            "--hv.audit",
            "--vllm-port",
            "--discover",
            "--ckpt.keep",
            "--push-to-hub",
            "--from-offers",
            "--as-peers",
        )
    }
    assert not gone & of_all
    assert _flags("".join(row[2] for row in rows)) <= of_all


def _flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w.-]*", text))


def _flags_taken() -> set[str]:
    arguments = make_app()["peer"].assemble_argument_collection(parse_docstring=True)
    return {name for argument in arguments for name in argument.names}


def test_troubleshooting_quotes_messages():
    assert len(QUOTED) > 10


@pytest.mark.parametrize("quoted", QUOTED)
def test_each_message_that_troubleshooting_quotes_is_one_of_ours(quoted):
    assert any(_flat(quoted) in text for text in _texts()), quoted


@cache
def _texts() -> frozenset[str]:
    """All string constants of the code, with an ellipsis in place of each inserted value."""
    found = set()
    for package in ("diloco", "peers", "provisioning"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(_flat(re.sub(r"\{[^{}]*\}", "…", node.value)))
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.add(_flat("".join(map(str, parts))))
    return frozenset(found)


def _flat(text: str) -> str:
    return re.sub(r"…+", "…", " ".join(text.split()))


def test_what_a_round_costs_is_computed_from_the_code():
    table = PAGES["docs/tutorials/start.md"].partition("<!-- test: costs -->\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == preset_names()
    for name, said, *costs, host, to_join in rows:
        num = num_parameters(load_model_config(name.strip("`")))
        assert float(said.split()[0]) * 1e6 == pytest.approx(num, rel=0.06)
        for codec, sent, seconds in (("fp32", *costs[:2]), ("int4", *costs[2:])):
            num_bytes = num * BITS_BY_CODEC[codec] / 8
            assert float(sent.split()[0]) * 1e6 == pytest.approx(num_bytes, rel=0.06)
            for second, rate in zip(seconds.split(" / "), (20e6, 1e8, 1e9), strict=True):
                exact = 8 * num_bytes / (TCP_FILL * TCP_PAYLOAD * rate)
                assert float(second) == pytest.approx(exact, rel=0.05, abs=0.05)
        assert float(host.split()[0]) * 1e9 == pytest.approx(16 * num, rel=0.05, abs=5e6)
        assert float(to_join.split()[0]) * 1e6 == pytest.approx(8 * num, rel=0.05)


def test_python_in_the_documents_compiles():
    for name, text in ALL.items():
        for block in blocks_of(text):
            if block.language == "python":
                compile(block.text, name, "exec")


def test_no_page_is_left_out_of_the_index():
    index = PAGES["docs/README.md"]
    pages = {Path(name).relative_to("docs").as_posix() for name in PAGES} - {"README.md"}
    assert all(f"]({page})" in index for page in pages)
