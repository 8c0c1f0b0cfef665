"""`diloco simulate`: estimates the duration, traffic and cost of a run on given machines and links."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.cli.simulate_flags import Failures, Pods, Training
from diloco.cli.simulate_peers import each_peer, peak_of
from diloco.errors import UserError
from diloco.options.flags import AsJson, Count, Switch
from peers.system import tcp_buffer_bytes

if TYPE_CHECKING:
    from diloco.sim.command.plot import Curve
    from diloco.sim.cost.figures import Figures
    from diloco.sim.cost.scenario import Scenario
    from diloco.sim.cost.swarm import Progress
    from peers.core.schedule import Schedule
    from peers.protocol.codecs import CodecName

app = App(name="simulate")

_PROGRESS_INTERVAL_S = 2.0
_EXPECTED_FAILURES = 30
"""With --mtbf, epochs are simulated until this many failures are expected."""
_MIN_EPOCHS, _DEFAULT_EPOCHS, _MAX_EPOCHS = 4, 20, 300
_PEER_EPOCHS, _MAX_PEER_EPOCHS = 1000, 4500
"""Limits of the number of peers times epochs, without and with failures. For two hundred peers the latter takes about a
minute.
"""


@app.default
def simulate(
    *,
    training: Annotated[Training, Parameter(name="*", group="Training")] = Training(),  # noqa: B008
    pods: Annotated[Pods, Parameter(name="*", group="Peers")] = Pods(),  # noqa: B008
    failures: Annotated[Failures, Parameter(name="*", group="Failures")] = Failures(),  # noqa: B008
    epochs: Count | None = None,
    plot: Path | None = None,
    assumptions: Switch = False,
    as_json: AsJson = False,
) -> int:
    """Estimate the utilisation, time, traffic and cost of a run without running it.

    Executes the protocol of real peers with a simulated clock and simulated links. Starts no processes, and uses no
    network.

    Parameters
    ----------
    epochs: int
        Epochs to simulate; default 20, fewer for large swarms, more with --mtbf.
    plot: Path
        File for a plot of utilisation over bandwidth (png, svg, pdf).
    assumptions: bool
        Also print the assumptions of the simulation.
    """
    if plot is not None:
        from diloco.options.plot_file import check_plot_path

        check_plot_path(plot)
    scenario = _scenario(training, pods, failures, epochs)
    notes = []
    if scenario.schedule.local_steps != training.local_steps:
        notes.append(
            f"--local-steps {training.local_steps} is rounded up to {scenario.schedule.local_steps}, a multiple of "
            f"--fragments {training.fragments}"
        )
    if pods.window is None and (said := _window_note(scenario)):
        notes.append(said)
    from diloco.sim.cost.swarm import simulate as run

    figures = run(scenario, _progress_printer(scenario.num_epochs))

    def with_codec(codec: CodecName) -> Scenario:
        return _scenario(replace(training, codec=codec), pods, failures, epochs)

    curves = _curves(scenario, with_codec, plot) if plot is not None else None
    from diloco.sim.command.report import text_of
    from diloco.sim.cost.figures import ASSUMPTIONS

    if as_json:
        result = _json_object(scenario, figures, notes, curves)
        print(json.dumps({**result, "assumptions": ASSUMPTIONS} if assumptions else result), flush=True)
        return 0
    print(text_of(scenario, figures, notes))
    if assumptions:
        print("\nassumptions", *(f"- {assumption}" for assumption in ASSUMPTIONS), sep="\n")
    if plot is not None:
        print(f"\nplot              {plot}")
    return 0


def _scenario(training: Training, pods: Pods, failures: Failures, epochs: int | None) -> Scenario:
    from diloco.sim.cost.links import Link
    from diloco.sim.cost.machine import machine_of
    from diloco.sim.cost.scenario import Scenario, SimulatedPeer, step_seconds
    from peers.core.schedule import Schedule

    if training.fragments > training.params:
        raise UserError(
            f"--fragments {training.fragments} is more than the {training.params:g} weights of --params"
        )
    schedule = Schedule(
        local_steps=math.ceil(training.local_steps / training.fragments) * training.fragments,
        num_fragments=training.fragments,
        overlap_steps=training.overlap,
        local_time_s=training.local_time,
    )
    peers = tuple(
        SimulatedPeer(
            link=Link(
                up_bits_per_s=peer.bandwidth,
                down_bits_per_s=peer.download or peer.bandwidth,
                delay_s=peer.rtt / 4,
            ),
            machine=machine_of(peer.cores, training.codec),
            step_s=peer.step_time
            or step_seconds(training.params, training.batch_tokens, peak_of(peer), peer.mfu),
            price_per_hour=peer.price,
        )
        for peer in each_peer(pods)
    )
    scenario = Scenario(
        peers=peers,
        num_params=round(training.params),
        codec=training.codec,
        schedule=schedule,
        tokens_per_step=round(training.batch_tokens),
        num_epochs=epochs or _DEFAULT_EPOCHS,
        jitter=failures.jitter,
        mtbf_s=failures.mtbf or float("inf"),
        restart_s=failures.restart,
        window_bytes=pods.window or tcp_buffer_bytes() or float("inf"),
        seed=failures.seed,
    )
    return scenario if epochs else replace(scenario, num_epochs=_default_num_epochs(scenario))


def _window_note(scenario: Scenario) -> str:
    """Says that TCP, as it is set on this machine, does not fill the links; empty if it does."""
    from peers.reduce.shares import GRID_FROM

    count = len(scenario.peers)
    num_streams = count - 1 if count < GRID_FROM else 2 * math.isqrt(count)
    fastest = max(min(peer.link.up_bytes_per_s, peer.link.down_bytes_per_s) for peer in scenario.peers)
    most = scenario.window_bytes / max(4 * max(peer.link.delay_s for peer in scenario.peers), 1e-9)
    if count == 1 or num_streams * most >= fastest:
        return ""
    return (
        f"links are not filled: TCP, as set on this machine, carries {most / 1e6:.0f} MB/s at most on a connection "
        f"(--window {scenario.window_bytes:.0f}); docs/tuning.md says how to raise that"
    )


def _default_num_epochs(scenario: Scenario) -> int:
    """Fewer for large swarms, which take long to simulate; with failures, enough epochs for _EXPECTED_FAILURES."""
    few = max(_MIN_EPOCHS, min(_DEFAULT_EPOCHS, _PEER_EPOCHS // len(scenario.peers)))
    epoch_s = scenario.schedule.steps_per_epoch * max(peer.step_s for peer in scenario.peers)
    if limit_s := scenario.schedule.seconds_per_epoch:
        epoch_s = min(epoch_s, limit_s)
    failures_per_epoch = len(scenario.peers) * epoch_s / scenario.mtbf_s
    most = max(few, min(_MAX_EPOCHS, _MAX_PEER_EPOCHS // len(scenario.peers)))
    if not failures_per_epoch:
        return few
    return max(few, min(most, round(_EXPECTED_FAILURES / failures_per_epoch)))


def _progress_printer(num_epochs: int) -> Progress:
    """Prints the progress of a long simulation every few seconds."""
    printed_at = time.monotonic()

    def print_progress(epoch: int, at: float) -> None:
        nonlocal printed_at
        if (now := time.monotonic()) - printed_at > _PROGRESS_INTERVAL_S:
            printed_at = now
            print(f"simulated {epoch} of {num_epochs + 1} epochs", file=sys.stderr, flush=True)

    return print_progress


def _curves(scenario: Scenario, with_codec: Callable[[CodecName], Scenario], path: Path) -> dict[str, Curve]:
    from diloco.sim.command.plot import curves_of, draw, here_mbps
    from diloco.train.metrics_file import figure

    curves = curves_of(
        scenario,
        with_codec,
        lambda name: print(f"simulating {name} over bandwidth", file=sys.stderr, flush=True),
    )
    schedule = scenario.schedule
    title = f"{len(scenario.peers)} peers, {figure(scenario.num_params)} weights, H = {schedule.local_steps}"
    if schedule.num_fragments > 1 or schedule.overlap_steps:
        title += f", {schedule.num_fragments} fragments, τ = {_overlap_of(schedule)}"
    draw(curves, here_mbps(scenario), title, path)
    return curves


def _overlap_of(schedule: Schedule) -> int | str:
    """The value of --overlap."""
    return "auto" if schedule.never_waits else schedule.overlap_steps


def _json_object(
    scenario: Scenario, figures: Figures, notes: Sequence[str], curves: dict[str, Curve] | None
) -> dict[str, object]:
    from dataclasses import asdict

    schedule = scenario.schedule
    result: dict[str, object] = {
        "scenario": {
            "num_params": scenario.num_params,
            "codec": scenario.codec,
            "local_steps": schedule.local_steps,
            "num_fragments": schedule.num_fragments,
            "overlap_steps": _overlap_of(schedule),
            "tokens_per_step": scenario.tokens_per_step,
            "mtbf_s": None if scenario.mtbf_s == float("inf") else scenario.mtbf_s,
            "restart_s": scenario.restart_s,
            "jitter": scenario.jitter,
            "seed": scenario.seed,
            "peers": [
                {**asdict(peer.link), "step_s": peer.step_s, "price_per_hour": peer.price_per_hour}
                for peer in scenario.peers
            ],
        },
        "figures": figures.plain(),
        "notes": list(notes),
    }
    if curves is not None:
        result["utilisation_over_mbps"] = {name: list(map(list, points)) for name, points in curves.items()}
    return result
