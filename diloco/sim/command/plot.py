"""Plots the utilisation of a run over the bandwidth of its links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high

from diloco.options.plot_file import write_plot
from diloco.sim.cost.scenario import Scenario
from diloco.sim.cost.swarm import simulate
from peers.core.schedule import Schedule
from peers.protocol.codecs import CodecName

FACTORS = tuple(2.0 ** (exponent / 2) for exponent in range(-10, 11))
"""Factors by which the given bandwidths are multiplied."""
_CODECS: tuple[CodecName, ...] = ("fp32", "int8", "int4")
_EPOCHS = 4
_PLOT_INCHES = (8.0, 4.5)
_PLOT_DPI = 120

Curve = Sequence[tuple[float, float]]
"""(median uplink in Mbit/s, utilisation)"""


def curves_of(
    scenario: Scenario, with_codec: Callable[[CodecName], Scenario], tell: Callable[[str], object]
) -> dict[str, Curve]:
    """One curve per codec, and one without overlap. `with_codec` returns the scenario with another codec."""
    variants = {scenario.codec: scenario}
    variants |= {codec: with_codec(codec) for codec in _CODECS if codec != scenario.codec}
    schedule = scenario.schedule
    if schedule.overlap_steps or schedule.num_fragments > 1:
        plain = Schedule(local_steps=schedule.local_steps)
        variants[f"{scenario.codec}, one fragment, blocking"] = replace(scenario, schedule=plain)
    curves: dict[str, Curve] = {}
    for name, variant in variants.items():
        tell(name)
        points = []
        for factor in FACTORS:
            faster = on_links(variant, factor)
            points.append((here_mbps(faster), simulate(faster).utilisation))
        curves[name] = points
    return curves


def on_links(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with links `factor` times as fast, for a few epochs and without failures, which add noise."""
    peers = tuple(
        replace(
            peer,
            link=replace(
                peer.link,
                up_bits_per_s=factor * peer.link.up_bits_per_s,
                down_bits_per_s=factor * peer.link.down_bits_per_s,
            ),
        )
        for peer in scenario.peers
    )
    return replace(scenario, peers=peers, num_epochs=_EPOCHS, mtbf_s=float("inf"))


def draw(curves: Mapping[str, Curve], here_mbps: float, title: str, path: Path) -> None:
    """Write the plot in the format of the path's suffix. Raises UserError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    picture = Figure(figsize=_PLOT_INCHES, dpi=_PLOT_DPI, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for name, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker=".", linewidth=1.2)
    axes.axvline(here_mbps, color="gray", linestyle=":", linewidth=1.2, label="as given")
    axes.set(title=title, xlabel="bandwidth of a peer (Mbit/s)", ylabel="utilisation")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    write_plot(picture, path)


def here_mbps(scenario: Scenario) -> float:
    """The median uplink in Mbit/s."""
    return median_high(peer.link.up_bits_per_s for peer in scenario.peers) / 1e6
