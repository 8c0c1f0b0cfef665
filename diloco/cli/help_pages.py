"""Generates the pages of `--help` and docs/reference.md from the code; `python -m diloco.cli.reference` writes them.

A command with many flags has two pages: `--help` shows the main flags, and `--help-all` shows all of them. The pages
are files in diloco/help/, which options/help.py prints, so that no `--help` has to load a command.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cyclopts.annotations import resolve_optional

from diloco.cli.app import COMMANDS, make_app
from diloco.cli.machine_recipes import RECIPES
from diloco.options.help import page_path
from diloco.options.sources import ValueSource
from diloco.options.trainer import trainer_app

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

_COLUMNS = 80
_INDENT = 30
_SHARED_GROUPS = ("Swarm", "Training", "Checkpoints", "GRPO")
"""Groups of flags that several commands share, in the order in which pages show them."""

_PEER_FLAGS = ("--initial-peers", "--run-id", "--host-maddrs")
_RUN_FLAGS = ("--path-model", "--dataset-name-or-path", "--lr", "--total-batch-size", "--total-steps")
_AVERAGING_FLAGS = ("--hv.local-steps", "--hv.compression")
MAIN_FLAGS = {
    "peer": (*_PEER_FLAGS, *_AVERAGING_FLAGS, *_RUN_FLAGS, "--ckpt.path", "--ckpt.interval", "--ckpt.resume"),
    "run": (
        "--peers",
        *_AVERAGING_FLAGS,
        *_RUN_FLAGS,
        "--seq-length",
        "--ckpt.interval",
        "--config",
        "--run-dir",
    ),
    "doctor": (*_PEER_FLAGS, "--path-model", "--dataset-name-or-path", "--run-dir", "--json"),
    "grpo-sweep": ("--instances", "--seeds", "--path-model", "--dataset", "--rollout", "--lr"),
    "simulate": (
        *("--params", "--peers", "--gpu", "--bandwidth", "--rtt", "--local-steps", "--codec", "--fragments"),
        *("--overlap", "--price", "--plot", "--assumptions"),
    ),
    "provision": (
        *("--pods", "--provider", "--gpu-type", "--gpu-count", "--country", "--ttl-hours", "--max-price"),
        *("--offers", "--plan", "--yes", "--run-id"),
    ),
    "experiments run": ("--name", "--provider", "--trainer", "--total-steps", "--max-price", "--ttl-hours"),
    "launch": (
        "--config",
        "--num-nodes",
        "--node-rank",
        "--master-addr",
        "--engine",
        "--program",
        "--dry-run",
    ),
}
"""The main flags of the commands that have many, in the order in which `--help` shows them."""

RECIPE_FIELDS = {name for recipe in RECIPES for name in ("optimizer", *recipe.values, *recipe.rates["muon"])}
"""Fields that `run`, `peer` and `provision` choose for the machine, so that the help shows no default."""

_MADDR = "--initial-peers <maddr>"
EXAMPLES = {
    "trainer": "torchrun --nproc-per-node 2 diloco/train_fsdp.py --path-model 15m",
    "run": "diloco run --peers 3 --path-model 2m --hv.local-steps 50",
    "peer": f"diloco peer {_MADDR}",
    "dht start": "diloco dht start --host-maddrs /ip4/0.0.0.0/tcp/30001",
    "launch": "diloco launch train.toml 2 0 10.0.0.1",
    "grpo-sweep": "diloco grpo-sweep --path-model tiny-grpo --rollout hf --instances 2",
    "status": f"diloco status {_MADDR} --watch",
    "dashboard": f"diloco dashboard {_MADDR}",
    "doctor": f"diloco doctor {_MADDR} --path-model 150m",
    "export": "diloco export checkpoints model",
    "ckpt rebuild": "diloco ckpt rebuild deltas model --step 40",
    "simulate": "diloco simulate --params 1e9 --peers 8 --gpu H100 --bandwidth 500mbit",
    "provision": "diloco provision --pods 3 --provider lium --gpu-type H100 --max-price 2",
    "pods status": "diloco pods status",
    "pods logs": "diloco pods logs --follow",
    "pods ssh": "diloco pods ssh pod-0",
    "pods cost": "diloco pods cost",
    "pods extend": "diloco pods extend pod-0 --hours 2",
    "pods fetch": "diloco pods fetch pod-0",
    "pods down": "diloco pods down",
    "pods forget": "diloco pods forget pod-0",
    "pods reconcile": "diloco pods reconcile --watch",
    "experiments run": "diloco experiments run --name lr_sweep --provider lium",
    "experiments list": "diloco experiments list",
    "experiments destroy": "diloco experiments destroy --name lr_sweep",
    "peers ban": f"diloco peers ban 6N1QwMW {_MADDR}",
    "peers unban": f"diloco peers unban 6N1QwMW {_MADDR}",
    "peers list": f"diloco peers list {_MADDR}",
    "peers new-secret": "diloco peers new-secret",
}


def pages() -> dict[str, str]:
    """The text of every page by file name."""
    app = make_app()
    commands = dict(commands_of(app))
    texts = {page_path([]).name: _overview_page()}
    for group in {words.partition(" ")[0] for words in commands if " " in words}:
        texts[page_path([group]).name] = _group_page(group, app[group])
    for words, command in commands.items():
        main_flags = MAIN_FLAGS.get(words, ())
        texts[page_path(words.split()).name] = _page(words, command, main_flags)
        if main_flags:
            texts[page_path(words.split(), everything=True).name] = _page(words, command, ())
    texts[page_path(["trainer"]).name] = _page("trainer", trainer_app(ValueSource()), ())
    return texts


def commands_of(app: App, words: str = "") -> Iterator[tuple[str, App]]:
    """Every command, with the words that call it; groups of commands are left out."""
    if app.default_command is not None:
        yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from commands_of(app[name], f"{words} {name}".lstrip())


def arguments_of(app: App) -> list[Argument]:
    return [argument for argument in app.assemble_argument_collection(parse_docstring=True) if argument.show]


def field_of(argument: Argument) -> str:
    """The dotted name of the field that the argument sets."""
    return ".".join(argument.keys)


def paragraphs_of(app: App) -> list[str]:
    """The paragraphs of the command's docstring before its parameters, without line breaks."""
    text = str(getattr(app.default_command, "__doc__", "") or "") or str(app.help or "")
    text = re.split(r"\n\s*Parameters\n", text)[0]
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]


def flags_text(arguments: Sequence[Argument], labels: Sequence[str] = ()) -> str:
    """The flags by group, with their descriptions. `labels` are the names to show; default: all of them."""
    rows = list(zip(arguments, labels or map(_label, arguments), strict=True))
    lines: list[str] = []
    for group in _ordered_groups(arguments):
        lines += [f"{group}:"]
        for argument, label in rows:
            if _group_of(argument) == group:
                value = _value_placeholder(argument) if label.startswith("-") else ""
                lines += _flag_lines(f"{label} {value}".rstrip(), _help_text(argument))
        lines += [""]
    return "\n".join(lines).rstrip()


def _overview_page() -> str:
    lines = ["Usage: diloco COMMAND [FLAGS]", "", "Train one model on machines scattered over the world.", ""]
    for group, commands in COMMANDS.items():
        lines += [f"{group}:", *(f"  {command.words:<14}{command.help}" for command in commands), ""]
    lines += ["`diloco COMMAND --help` describes a command. To begin, try `diloco run`."]
    return "\n".join(lines) + "\n"


def _group_page(group: str, app: App) -> str:
    lines = [f"Usage: diloco {group} COMMAND [FLAGS]", ""]
    lines += [*textwrap.wrap(paragraphs_of(app)[0], _COLUMNS), "", "Commands:"]
    for words, command in commands_of(app):
        lines += _flag_lines(words, paragraphs_of(command)[0], indent=16)
    return "\n".join([*lines, "", f"`diloco {group} COMMAND --help` describes a command."]) + "\n"


def _page(words: str, command: App, main_flags: Sequence[str]) -> str:
    arguments = arguments_of(command)
    shown = [one for flag in main_flags for one in arguments if flag in one.names] or arguments
    program = "torchrun diloco/train_fsdp.py" if words == "trainer" else f"diloco {words}"
    lines = [str(command.usage or f"Usage: {program}{_positional_arguments(arguments)} [FLAGS]"), ""]
    for paragraph in paragraphs_of(command):
        lines += [*textwrap.wrap(paragraph, _COLUMNS), ""]
    lines += ["Example:", f"  {EXAMPLES[words]}", "", flags_text(shown, main_flags)]
    if main_flags:
        lines += ["", f"`diloco {words} --help-all` lists all {len(arguments)} flags."]
    return "\n".join(lines).rstrip() + "\n"


def _positional_arguments(arguments: Sequence[Argument]) -> str:
    """Positional arguments, for the usage line."""
    texts = []
    for one in arguments:
        if one.index is not None:
            text = _label(one) + ("..." if one.field_info.kind is one.field_info.VAR_POSITIONAL else "")
            texts.append(f" {text}" if one.required else f" [{text}]")
    return "".join(texts)


def _label(argument: Argument) -> str:
    if argument.index is not None:
        return argument.names[0].lstrip("-").upper()
    return ", ".join(name for name in argument.names if name not in argument.negatives)


def _ordered_groups(arguments: Sequence[Argument]) -> list[str]:
    """The groups of flags: the command's own, then the shared ones in their fixed order."""
    groups = dict.fromkeys(map(_group_of, arguments))
    return sorted(groups, key=lambda name: _SHARED_GROUPS.index(name) if name in _SHARED_GROUPS else -1)


def _group_of(argument: Argument) -> str:
    groups: Any = argument.parameter.group or ()
    name = str(getattr(next(iter(groups), None), "name", "") or "")
    return "Flags" if name in ("", "Parameters", "Arguments") else name


def _value_placeholder(argument: Argument) -> str:
    if argument.parameter.metavar:
        return str(argument.parameter.metavar)
    hint: Any = resolve_optional(argument.hint)
    if hint is bool:
        return ""
    if argument.get_choices():
        return "CHOICE"
    return {int: "INT", float: "NUMBER", str: "TEXT"}.get(hint, "PATH" if "Path" in str(hint) else "TEXT")


def _help_text(argument: Argument) -> str:
    text = " ".join(str(argument.parameter.help or "").split())
    choices = argument.get_choices()
    if choices and not all(choice in text for choice in choices):
        text = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}."
    if argument.required:
        return f"{text} [required]"
    default = _default_of(argument)
    if default in ("", "none") or "default" in text or field_of(argument) in RECIPE_FIELDS:
        return text
    return f"{text} [default: {default}]"


def _default_of(argument: Argument) -> str:
    """The default as text; empty if there is none, or it is not shown."""
    value: Any = argument.field_info.default
    show = argument.show_default
    if isinstance(show, str):
        return show
    if callable(show):
        value = show(value)
    elif value is None or value is False or value is argument.field_info.empty or not show:
        return ""
    if value is True:
        return "on"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flag_lines(name: str, text: str, *, indent: int = _INDENT) -> Iterator[str]:
    lines = textwrap.wrap(text, _COLUMNS - indent, break_long_words=False, break_on_hyphens=False) or [""]
    if len(name) + 3 > indent:
        yield f"  {name}"
    else:
        yield f"  {name:<{indent - 2}}{lines.pop(0)}".rstrip()
    yield from (f"{'':<{indent}}{line}" for line in lines)
