"""How a command that works on pods speaks: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
from types import SimpleNamespace

from diloco.cli.pods_board import Board
from provisioning.ledger.row import State


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_fleet() -> SimpleNamespace:
    renters = SimpleNamespace(on_state=None)
    renters.listen = lambda on_state: setattr(renters, "on_state", on_state)
    return SimpleNamespace(renters=renters, progress_of=None)


def test_where_nobody_looks_there_are_plain_lines_and_nothing_to_redraw():
    stream, fleet = io.StringIO(), a_fleet()
    board = Board(stream)
    board.attach(fleet)
    with board:
        board.say("pod-0", "sending [code]")
    assert (fleet.renters.on_state, fleet.progress_of) == (None, None)
    assert stream.getvalue().endswith("pod-0      sending [code]\n")
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_each_pod_has_a_bar_below_the_lines():
    stream, fleet = Terminal(), a_fleet()
    board = Board(stream)
    board.attach(fleet)
    with board:
        fleet.renters.on_state("pod-0", State.BOOTING)
        board.say("pod-0", "sending [code]")
        fleet.progress_of("pod-0")("sending the code", 0.25)
        fleet.progress_of("pod-0")("making its environment", None)
        fleet.renters.on_state("pod-0", State.SYNCED)
        fleet.progress_of("pod-1")("sending the code", 0.5)
    last = stream.getvalue().rpartition("sending [code]")[2]
    lines = [line for line in last.splitlines() if "pod-" in line]
    assert "100%" in lines[-2] and "synced" in lines[-2]
    assert "50%" in lines[-1] and "sending the code" in lines[-1]


def test_a_pod_that_is_gone_has_no_bar_any_more():
    stream, fleet = Terminal(), a_fleet()
    board = Board(stream)
    board.attach(fleet)
    with board:
        fleet.renters.on_state("pod-0", State.DELETING)
        fleet.renters.on_state("pod-0", State.GONE)
    assert "pod-0" not in stream.getvalue().splitlines()[-1]
