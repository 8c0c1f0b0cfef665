"""`diloco simulate` as it is typed: quantities, peers from files, what it prints, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from diloco.cli.app import exit_code
from diloco.cli.simulate import _default_num_epochs
from diloco.cli.simulate_flags import Pods
from diloco.cli.simulate_peers import from_toml, peak_flops
from diloco.errors import UserError
from diloco.sim.command.values import bits_per_s, count, seconds
from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import IDEAL
from diloco.sim.cost.scenario import Scenario, SimulatedPeer
from peers.core.schedule import Schedule
from provisioning.errors import UserError as ProvisioningUserError

USUAL = Pods(peers=3)
LINE = "simulate --params 10m --peers 3 --local-steps 20 --step-time 100ms --epochs 3"
SMALL = LINE.split()


@pytest.fixture(autouse=True)
def buffers(monkeypatch):
    """Sets what this machine's TCP allows; nothing is known of it at first."""

    def known(num_bytes: int | None) -> None:
        monkeypatch.setattr("diloco.cli.simulate.tcp_buffer_bytes", lambda: num_bytes)

    known(None)
    return known


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (bits_per_s, "500mbit", 500e6),
        (bits_per_s, "2.5Gbit/s", 2.5e9),
        (bits_per_s, "100Mbps", 100e6),
        (seconds, "80ms", 0.08),
        (seconds, "1.5s", 1.5),
        (count, "10e9", 10e9),
        (count, "10B", 10e9),
        (count, "150m", 150e6),
        (count, "989T", 989e12),
    ],
)
def test_quantities_are_read_as_people_write_them(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(bits_per_s, "500"), (bits_per_s, "500MB"), (seconds, "80"), (count, "-1"), (count, "ten")],
)
def test_a_quantity_without_its_unit_is_refused(parse, text):
    with pytest.raises(ValueError, match="is not a"):
        parse(text)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-PCIe", "H100 PCIe"),
        ("nvidia-a100-sxm4-80gb", "A100"),
        ("A10", "A10"),
        ("RTX4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_known_by_any_spelling_of_its_name(name, like):
    assert peak_flops(name) == peak_flops(like) is not None


def test_a_processor_is_no_gpu():
    assert peak_flops("cpu-2") is None


def test_a_file_lists_unlike_peers(tmp_path):
    path = tmp_path / "peers.toml"
    path.write_text(
        '[[peers]]\nbandwidth = "1gbit"\ncount = 2\n[[peers]]\ndownload = "50mbit"\ngpus = 1\nprice = 2.5\n'
    )
    first, second, third = from_toml(path, replace(USUAL, download=100e6))
    assert first == second and (first.bandwidth, first.download, first.gpus) == (1e9, None, 8)
    assert (third.bandwidth, third.download, third.gpus, third.price) == (500e6, 50e6, 1, 2.5)
    path.write_text('[[peers]]\nbandwith = "1gbit"\n')
    with pytest.raises(
        UserError, match=r'peer 0: Unknown key "bandwith" in the table\. Did you mean "bandwidth"\?'
    ):
        from_toml(path, USUAL)
    path.write_text('[[peers]]\nbandwidth = "fast"\n')
    with pytest.raises(
        UserError, match=r'peer 0: Invalid value for \[bandwidth\]: "fast" is not a bandwidth'
    ):
        from_toml(path, USUAL)


@pytest.mark.parametrize(
    "line", ["gpus = 0", "gpus = -2", "cores = 0", "cores = nan", "price = -1", "price = inf"]
)
def test_a_peer_of_a_file_has_what_a_machine_can_have(line, tmp_path):
    path = tmp_path / "peers.toml"
    path.write_text(f"[[peers]]\n{line}\n")
    with pytest.raises(
        UserError, match=rf'peer 0: Invalid value "[^"]*" for \[{line.split()[0]}\].* It must be'
    ):
        from_toml(path, USUAL)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("peers = 3", "peers applies to all peers"),
        ("window = 3", "window applies to all peers"),
        ("count = 0", "count is a number from 1 to 1024, not 0"),
    ],
)
def test_what_is_not_of_one_peer_is_refused_in_its_table(line, said, tmp_path):
    path = tmp_path / "peers.toml"
    path.write_text(f"[[peers]]\n{line}\n")
    with pytest.raises(UserError, match=f"peer 0: {said}"):
        from_toml(path, USUAL)


def test_the_command_says_what_a_run_would_take(capsys):
    assert exit_code([*SMALL, "--price", "2", "--assumptions"]) == 0
    said = capsys.readouterr().out
    for word in ("utilisation", "epoch", "round", "bytes", "cost", "assumptions"):
        assert word in said


def test_the_commands_json_holds_figures_and_what_they_are_of(capsys):
    assert exit_code([*SMALL, "--codec", "int8", "--bandwidth", "10mbit", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scenario"]["codec"] == "int8"
    links = [(peer["up_bits_per_s"], peer["down_bits_per_s"]) for peer in told["scenario"]["peers"]]
    assert links == [(10e6, 10e6)] * 3
    assert 0 < told["figures"]["utilisation"] < 1
    assert told["figures"]["num_epochs"] == 3
    assert told["figures"]["parts"]["reduce_s"] > 0


def test_the_window_is_that_of_this_machine_unless_it_is_given(buffers, capsys):
    def told(*flags: str) -> tuple[float, list[str]]:
        assert exit_code([*SMALL, "--bandwidth", "1gbit", "--rtt", "90ms", *flags, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["figures"]["parts"]["reduce_s"], found["notes"]

    unlimited_s, notes = told()
    assert notes == []
    buffers(1 << 20)
    limited_s, (note,) = told()
    assert limited_s > 2 * unlimited_s
    assert "carries 12 MB/s at most on a connection (--window 1048576)" in note
    assert told("--window", "64M") == (unlimited_s, [])
    # Two connections fill a link that is twice as fast as one.
    assert told("--bandwidth", "180mbit")[1] == []
    assert told("--window", "1048576") == (limited_s, [])


@pytest.mark.parametrize(("given", "shown"), [("auto", "auto"), ("2", 2)])
def test_the_commands_json_names_the_overlap_as_it_was_given(given, shown, capsys):
    assert exit_code([*SMALL, "--overlap", given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"]["overlap_steps"] == shown


def test_local_steps_are_rounded_up_to_a_multiple_of_the_fragments(capsys):
    assert exit_code([*SMALL, "--fragments", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scenario"]["local_steps"] == 21
    assert told["notes"] == ["--local-steps 20 is rounded up to 21, a multiple of --fragments 3"]


def test_what_is_assumed_is_told_to_programs_too(capsys):
    assert exit_code([*SMALL, "--json", "--assumptions"]) == 0
    assert len(json.loads(capsys.readouterr().out)["assumptions"]) > 3


def test_a_file_of_peers_that_is_not_there_or_wrong_is_named(tmp_path):
    with pytest.raises(ProvisioningUserError, match=r"none\.toml cannot be read: No such file"):
        from_toml(tmp_path / "none.toml", USUAL)
    (tmp_path / "peers.toml").write_text('[[peers]]\ngpus = "two"\n')
    with pytest.raises(UserError, match=r'peer 0: Invalid value for \[gpus\]: "two" is not a whole number'):
        from_toml(tmp_path / "peers.toml", USUAL)


def test_hundreds_of_peers_that_seldom_fail_are_simulated_for_a_few_epochs_only():
    link = Link(up_bits_per_s=1e9, down_bits_per_s=1e9, delay_s=0.01)
    peers = (SimulatedPeer(link=link, machine=IDEAL, step_s=1.0),) * 300
    scenario = Scenario(
        peers=peers,
        num_params=10**9,
        codec="int8",
        schedule=Schedule(local_steps=100),
        num_epochs=1,
        mtbf_s=720 * 3600.0,
    )
    assert _default_num_epochs(scenario) == 15
    assert _default_num_epochs(replace(scenario, peers=peers[:14])) == 300
    often = replace(scenario, peers=peers[:10], mtbf_s=1000.0)
    assert _default_num_epochs(often) == 30
    # Epochs of half the length have half as many failures.
    shorter = replace(often, schedule=Schedule(local_steps=100, local_time_s=50.0))
    assert _default_num_epochs(shorter) == 60


def test_failures_are_counted_over_enough_epochs(capsys):
    assert exit_code([*SMALL[:-2], "--mtbf", "60s", "--restart", "10s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["figures"]["losses"]["peers_lost"] > 5
    assert told["figures"]["losses"]["lost_train_s"] > 0


def test_a_plot_is_drawn_over_bandwidth(tmp_path, capsys):
    path = tmp_path / "plot.svg"
    assert exit_code([*SMALL, "--fragments", "2", "--overlap", "2", "--plot", str(path), "--json"]) == 0
    assert path.read_text().startswith("<?xml")
    curves = json.loads(capsys.readouterr().out)["utilisation_over_mbps"]
    assert set(curves) == {"fp32", "int8", "int4", "fp32, one fragment, blocking"}
    for points in curves.values():
        values = [utilisation for _, utilisation in points]
        assert values == sorted(values), "faster links never make it worse"
    assert curves["int4"][5][1] > curves["fp32"][5][1] > curves["fp32, one fragment, blocking"][5][1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bandwidth", "500"], "is not a bandwidth"),
        (["--gpu", "Abacus"], "Abacus"),
        (["--overlap", "20"], "--hv.overlap-steps 20"),
        (["--bandwidth", "1gbit,2gbit"], "is not a bandwidth"),
        (["--mfu", "nan"], "0.001 or more"),
        (["--bandwidth", ""], "is not a bandwidth"),
        (["--bandwidth"], "--bandwidth"),
        (["--mtbf", "6 weeks"], "is not a time like 120s, 10m or 1.5h"),
        (["--mtbf", "20000d"], "1e+09 seconds or less"),
        (["--batch-tokens", "0.1"], "1 or more"),
        (["--flops", "1e-300"], "1e+06 or more"),
        (["--fragments", "10000001"], "is more than the"),
        (["--cores", "inf"], "finite"),
        (["--plot", "plan.xyz"], "xyz is not a supported format"),
        (["--plot", "nowhere/plan.png"], "is there a directory nowhere?"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_box(flags, says, capsys):
    argv = [arg for arg in SMALL if arg not in ("--step-time", "100ms")]
    assert exit_code([*argv, *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_ends_it_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as unread:
        ended = subprocess.run(
            [sys.executable, "-m", "diloco", *SMALL], stdout=unread, stderr=subprocess.PIPE, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")
