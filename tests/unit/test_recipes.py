"""The configurations in recipes/: their commands parse, and they need the resources that they state."""

from __future__ import annotations

import re
import shlex

import pytest

from diloco.cli.app import make_app
from diloco.cli.machine_recipes import RECIPES
from diloco.options.flags import MUON_DEFAULTS
from diloco.options.model_files import load_model_config
from diloco.options.sources import read_toml
from diloco.options.trainer import parse_train_config
from diloco.train.memory import memory_needed_bytes
from diloco.train.model import num_parameters
from peers.core.schedule import Schedule
from tests.support.commands import ROOT
from tests.support.documents import MADDR, README

FILES = sorted((ROOT / "recipes").glob("*.toml"))
NAMES = [path.stem for path in FILES]
BITS = {"fp32": 32, "int8": 8, "int4": 4}


def config_of(name):
    mode = "grpo" if name == "grpo" else "pretrain"
    return parse_train_config(["--config", str(ROOT / "recipes" / f"{name}.toml")], mode)[0]


def head_of(name):
    """The comment at the top of a recipe, without the number signs."""
    text = (ROOT / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    return "\n".join(line[1:].strip() for line in re.match(r"(#.*\n)+", text)[0].splitlines())


def test_there_is_one_for_each_who_asks_and_the_readme_names_them_all():
    assert NAMES == ["four-pods", "grpo", "laptop", "one-gpu", "slow-links", "two-machines"]
    assert all(f"recipes/{name}.toml" in README for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_at_its_top_are_ones_that_the_parser_takes(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [line for line in head_of(name).splitlines() if line.startswith("diloco ")]
    # Pods find the recipe in their copy of the code.
    place = "code/recipes" if name == "four-pods" else "recipes"
    assert any(f"--config {place}/{name}.toml" in command for command in commands)
    for command in commands:
        words = shlex.split(command.replace("<maddr>", MADDR))
        app = make_app()
        _, bound, unused = app.parse_args(words[1:], exit_on_error=False, print_error=False, verbose=False)
        assert bound.signature and not unused


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_takes(name):
    assert "\nTakes: " in head_of(name)
    config, head = config_of(name), " ".join(head_of(name).split())
    Schedule.of({"hv.local_steps": config.hv.local_steps, "hv.num_fragments": config.hv.num_fragments})
    if name == "grpo":
        return
    num = num_parameters(model := load_model_config(config.path_model))
    on_gpu = "GPU of 20 GiB" in head
    tokens = config.per_device_train_batch_size * config.seq_length
    need = memory_needed_bytes(
        num,
        activation_tokens=tokens,
        config=model,
        optimizer=config.optimizer,
        on_gpu=on_gpu,
        copies_state=config.copies_state,
    )
    said = float(re.search(r"([\d.]+) GiB of (?:the machine's own )?memory", head)[1])
    assert said == pytest.approx(need.host_bytes / 2**30, rel=0.1)
    assert need.device_bytes < 20 * 2**30
    if sent := re.search(r"(\d+) MB in each direction", head):
        # To each other member, its share of my contribution and my share of the sum: less than twice the model.
        peers = config.hv.galaxy_size or 10**6
        share = 2 * (peers - 1) / peers / config.hv.num_fragments
        assert int(sent[1]) == pytest.approx(num * BITS[config.hv.compression] / 8e6 * share, rel=0.05)


@pytest.mark.parametrize(("name", "index"), [("laptop", 0), ("one-gpu", -1)])
def test_what_a_machine_is_given_by_itself_is_the_recipe_for_it(name, index):
    written = read_toml(ROOT / "recipes" / f"{name}.toml")
    chosen = {"optimizer": "muon", **RECIPES[index].values}
    assert {field: written[field] for field in chosen} == chosen
    config = config_of(name)
    assert {rate: getattr(config, rate) for rate in MUON_DEFAULTS} == RECIPES[index].rates["muon"]
