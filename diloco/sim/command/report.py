"""Formats the results of a simulation as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

from diloco.sim.cost.figures import Figures
from diloco.sim.cost.scenario import Scenario
from diloco.train.metrics_file import figure, size


def text_of(scenario: Scenario, figures: Figures, notes: Sequence[str]) -> str:
    lines = [
        _what(scenario),
        "",
        f"utilisation       {figures.utilisation:.1%} of all peers' time is training that the model keeps",
        f"epoch             {_epoch(scenario, figures)}",
        f"round             {_round(figures)}",
        f"stood still       {_time(figures.parts.blocked_s)} in an epoch, the peer that waited longest",
        f"bytes             {size(round(figures.sent_bytes))} sent by a peer in an epoch, "
        f"{size(round(figures.sent_bytes_in_all))} by all in {_time(figures.elapsed_s)}",
        f"speed             {figure(round(figures.tokens_per_s))} tokens/s, all peers together",
    ]
    if figures.cost:
        lines.append(
            f"cost              ${figures.cost:.2f} for {figures.num_epochs} epochs, "
            f"${figures.cost_per_billion_tokens:.2f} per billion tokens"
        )
    if figures.losses.peers_lost:
        lines += _failures(scenario, figures)
    lines += ["", *(f"note: {note}" for note in notes)] if notes else []
    return "\n".join(lines)


def _what(scenario: Scenario) -> str:
    schedule = scenario.schedule
    said = f"{len(scenario.peers)} peers, {figure(scenario.num_params)} weights, {schedule.local_steps} local steps"
    said += f" of {_time(median_high(peer.step_s for peer in scenario.peers))}, {scenario.codec}"
    if schedule.num_fragments > 1:
        said += f", {schedule.num_fragments} fragments"
    if schedule.never_waits:
        said += ", overlapped rounds"
    elif schedule.overlap_steps:
        said += f", {schedule.overlap_steps} steps of overlap"
    return said


def _epoch(scenario: Scenario, figures: Figures) -> str:
    said = f"{_time(figures.epoch_s)}, of which {_time(figures.train_s)} are training"
    steps, parts = scenario.schedule.steps_per_epoch, scenario.schedule.num_fragments
    return f"{said}: {steps} steps, after which one of {parts} fragments is averaged" if parts > 1 else said


def _round(figures: Figures) -> str:
    parts = figures.parts
    named = {
        "connect": parts.connect_s,
        "reduce": parts.reduce_s,
        "digests": parts.preview_s,
        "vote": parts.vote_s,
        "outer step": parts.apply_s,
    }
    listed = ", ".join(f"{name} {_time(seconds)}" for name, seconds in named.items())
    return f"{_time(parts.round_s)} ({listed}), after {_time(parts.wait_s)} of waiting for the last peer"


def _failures(scenario: Scenario, figures: Figures) -> list[str]:
    losses = figures.losses
    whole_s = figures.num_peers * figures.elapsed_s
    epoch_s = scenario.schedule.steps_per_epoch * median_high(peer.step_s for peer in scenario.peers)
    lines = [
        f"failures          {losses.peers_lost} peers lost in {figures.num_epochs} epochs, {losses.returns} came back; "
        f"{losses.failed_attempts} attempts failed, {losses.caught_up} times a peer caught up",
        f"lost              {losses.lost_train_s / epoch_s:.1f} epochs of one peer's training "
        f"({losses.lost_train_s / whole_s:.2%} of all time)",
    ]
    if figures.join_s:
        lines.append(f"return            {_time(figures.join_s)} from asking for the state to training")
    return lines


def _time(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.3g} s"
