"""`diloco simulate`: what a run would take on given machines and links, before anybody rents them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.errors import UserError
from diloco.options.checks import at_least, duration_or_auto, finite, up_to, whole, whole_or_auto
from diloco.sim.command.given_peers import LEAST_CORES, LEAST_FLOPS
from diloco.sim.command.values import bits_per_s, count, long_seconds, one, seconds, several
from peers.protocol.codecs import CodecName
from peers.protocol.limits import MAX_PEERS
from provisioning.providers.registry import CLOUDS

if TYPE_CHECKING:
    from diloco.sim.command.given_peers import PeerSpec
    from diloco.sim.command.plot import Curve
    from diloco.sim.cost.figures import Figures
    from diloco.sim.cost.scenario import Scenario
    from diloco.sim.cost.swarm import Progress
    from peers.core.schedule import Schedule
    from provisioning.pods.pod import Offer

app = App(name="simulate")

_FROM_OFFERS = (
    f"Take the cheapest pods of a provider ({', '.join(CLOUDS)}), or of a file from "
    "`diloco provision --offers --json`."
)
_TOLD_EVERY_S = 2.0
_ENOUGH_LOSSES = 30
_LEAST_EPOCHS, _USUAL_EPOCHS, _MOST_EPOCHS = 4, 20, 300
_PEER_EPOCHS, _MOST_PEER_EPOCHS = 1000, 4500
"""Peers times epochs to simulate: usually, and at most, where failures have to be counted. For two hundred peers the
latter takes about a minute.
"""

Switch = Annotated[bool, Parameter(negative="")]
Positive = Parameter(validator=(finite, at_least(0)))
Bandwidth = Annotated[
    tuple[float, ...],
    Parameter(
        converter=several(bits_per_s),
        consume_multiple=1,
        negative="",
        metavar="RATE...",
        show_default=lambda values: ", ".join(f"{value / 1e6:g}mbit" for value in values) or "the upload",
    ),
]
Seconds = Parameter(
    converter=one(seconds),
    metavar="TIME",
    show_default=lambda value: f"{1e3 * value:g}ms" if value else "none",
)
Long = Parameter(
    converter=one(long_seconds), metavar="TIME", show_default=lambda value: f"{value:g}s" if value else "none"
)
Number = Parameter(converter=one(count), metavar="NUMBER")
Count = Annotated[int, Parameter(converter=whole, validator=at_least(1))]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how often it is averaged."""

    params: Annotated[float, Number, Parameter(validator=(at_least(1), up_to(1e15)))] = 1e9
    """Weights of the model: 10e9, 10B, 150m."""
    local_steps: Annotated[Count, Parameter(alias="--hv.local-steps")] = 500
    """Inner steps between two averagings of the same weights (H)."""
    local_time: Annotated[
        float | None,
        Parameter(converter=duration_or_auto, metavar="SECONDS|auto", alias="--hv.local-time"),
    ] = None
    """Time after which an epoch ends even if its local steps are not done; auto: whatever trains most tokens."""
    fragments: Annotated[Count, Parameter(alias="--hv.num-fragments")] = 1
    """Parts of the model, averaged in turn; local steps are rounded up to a multiple of them."""
    overlap: Annotated[
        int, Parameter(converter=whole_or_auto, metavar="NUMBER|auto", alias="--hv.overlap-steps")
    ] = 0
    """Inner steps trained while a round takes place (tau); auto: as many as the round takes, at most an epoch's."""
    codec: Annotated[CodecName, Parameter(alias="--hv.compression")] = "fp32"
    """Codec of pseudo-gradients on the wire."""
    batch_tokens: Annotated[float, Number, Parameter(validator=(at_least(1), up_to(1e12)))] = 524288
    """Tokens that one peer trains in a step."""


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The machines and their links."""

    peers: Annotated[int | None, Parameter(converter=whole, validator=(at_least(1), up_to(MAX_PEERS)))] = None
    """Number of peers; default 8, or those of --peers-file."""
    gpu: str = "H100"
    """GPU type of each peer: H100, A100, 4090 and the like."""
    gpus: Count = 8
    """Number of GPUs of each peer."""
    flops: Annotated[float | None, Number, Parameter(validator=at_least(LEAST_FLOPS))] = None
    """Instead of --gpu: peak FLOP/s of a peer, such as 989T."""
    mfu: Annotated[float, Parameter(validator=(at_least(0.001), up_to(1)))] = 0.4
    """Fraction of the peak that training achieves."""
    step_time: Annotated[float | None, Seconds] = None
    """Instead of --gpu, --flops and --mfu: the duration of an inner step."""
    cores: Annotated[float, Parameter(validator=(finite, at_least(LEAST_CORES)))] = 8.0
    """Processor cores that the daemon may use."""
    bandwidth: Bandwidth = (500e6,)
    """Upload of each peer, and its download where that is not given: one value, or one for each peer."""
    download: Bandwidth = ()
    """Download, where it differs."""
    rtt: Annotated[float, Seconds] = 0.08
    """Round trip between two peers."""
    window: Annotated[float | None, Number] = None
    """Maximum TCP window in bytes; default: as much as fills the link."""
    price: Annotated[float, Positive] = 0.0
    """Dollars per hour of one peer."""
    peers_file: Path | None = None
    """TOML file with [[peers]]: bandwidth, download, rtt, gpu, gpus, flops, cores, price, step_time, count."""
    from_offers: Annotated[str | None, Parameter(help=_FROM_OFFERS)] = None


@dataclass(frozen=True, kw_only=True)
class Chances:
    """What goes wrong."""

    mtbf: Annotated[float | None, Long] = None
    """Mean time between two failures of one peer, such as 6h; default: no failures."""
    restart: Annotated[float, Long] = 300.0
    """From a loss until the peer is back and asks for the state."""
    jitter: Annotated[float, Parameter(validator=(at_least(0), up_to(0.5)))] = 0.005
    """Variation of a peer's step time from epoch to epoch, as a fraction."""
    seed: Annotated[int, Parameter(converter=whole, validator=at_least(0))] = 0
    """The same seed gives the same run."""


@app.default
def simulate(
    *,
    training: Annotated[Training, Parameter(name="*", group="Training")] = Training(),
    pods: Annotated[Pods, Parameter(name="*", group="Peers")] = Pods(),
    chances: Annotated[Chances, Parameter(name="*", group="Failures")] = Chances(),
    epochs: Annotated[int | None, Parameter(converter=whole, validator=at_least(1))] = None,
    plot: Path | None = None,
    assumptions: Switch = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Estimate the utilisation, time, traffic and cost of a run without running it.

    It runs the real rounds on a simulated clock and simulated links. No process is started and no network used, except
    to read a provider's offers (--from-offers).

    Parameters
    ----------
    epochs: int
        Averagings to simulate; default 20, fewer of large swarms, more where failures are to be counted.
    plot: Path
        File for a plot of utilisation over bandwidth (png, svg, pdf).
    assumptions: bool
        Also list the assumptions.
    as_json: bool
        One JSON object on stdout.
    """
    if plot is not None:
        from diloco.options.plot_file import check_drawable

        check_drawable(plot)
    specs, notes = _specs(pods)
    scenario = _scenario(training, pods, chances, specs, epochs)
    if scenario.schedule.local_steps != training.local_steps:
        notes.append(
            f"{training.local_steps} local steps are {scenario.schedule.local_steps} here, the next multiple of "
            f"{training.fragments} fragments"
        )
    from diloco.sim.cost.swarm import simulate as run

    figures = run(scenario, _told(scenario.num_epochs))
    curves = _curves(scenario, specs, plot) if plot is not None else None
    from diloco.sim.command.report import text_of
    from diloco.sim.cost.figures import ASSUMPTIONS

    if as_json:
        plain = _plain(scenario, figures, notes, curves)
        print(json.dumps({**plain, "assumptions": ASSUMPTIONS} if assumptions else plain), flush=True)
        return 0
    print(text_of(scenario, figures, notes))
    if assumptions:
        print("\nassumed", *(f"- {assumption}" for assumption in ASSUMPTIONS), sep="\n")
    if plot is not None:
        print(f"\nplot              {plot}")
    return 0


def _specs(pods: Pods) -> tuple[list[PeerSpec], list[str]]:
    """Each peer's machine and link, and what had to be assumed."""
    from diloco.sim.command import given_peers as simulate_peers

    sources = {"--peers-file": pods.peers_file, "--from-offers": pods.from_offers}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError("--peers-file and --from-offers both say what peers there are; leave one out")
    for flag, values in (("--bandwidth", pods.bandwidth), ("--download", pods.download)):
        if given and len(values) > 1:
            raise UserError(
                f"{given[0]} lists the peers; {flag} is one value then, for those that have none of their own"
            )
    usual = simulate_peers.PeerSpec(
        up=pods.bandwidth[0],
        down=(pods.download or pods.bandwidth)[0],
        rtt_s=pods.rtt,
        gpu=pods.gpu,
        gpus=pods.gpus,
        flops=pods.flops,
        cores=pods.cores,
        price=pods.price,
        step_s=pods.step_time,
    )
    if pods.peers_file is not None:
        found = simulate_peers.from_toml(pods.peers_file, usual)
        if pods.peers not in (None, len(found)):
            raise UserError(f"{pods.peers_file} has {len(found)} peers; leave --peers {pods.peers} out")
        if len(found) > MAX_PEERS:
            raise UserError(f"{pods.peers_file} has {len(found)} peers; {MAX_PEERS} are the most")
        return found, []
    num_peers = pods.peers or 8
    if pods.from_offers is not None:
        return simulate_peers.from_offers(_offers(pods.from_offers), usual, num_peers)
    return simulate_peers.from_lists(usual, num_peers, pods.bandwidth, pods.download), []


def _offers(source: str) -> list[Offer]:
    """Of a file, or of the provider with this name."""
    from diloco.sim.command.given_peers import read_offers

    if Path(source).exists():
        return read_offers(Path(source))
    from diloco.cli.interrupts import run_interruptible
    from diloco.cli.pods_flags import access
    from provisioning.providers.backoff import repeated
    from provisioning.providers.registry import open_provider

    found: list[Offer] = []

    async def ask() -> int:
        provider = open_provider(source, access(None))
        try:
            await repeated(provider.check)
            found.extend(await repeated(provider.offers))
        finally:
            await provider.close()
        return 0

    run_interruptible(ask())
    return found


def _scenario(
    training: Training, pods: Pods, chances: Chances, specs: Sequence[PeerSpec], epochs: int | None
) -> Scenario:
    from diloco.sim.cost.links import Link
    from diloco.sim.cost.machine import machine_of
    from diloco.sim.cost.scenario import Scenario, SimulatedPeer, step_seconds
    from peers.core.schedule import Schedule

    if training.fragments > training.params:
        raise UserError(f"--fragments {training.fragments} of {training.params:g} weights would be empty")
    schedule = Schedule(
        local_steps=math.ceil(training.local_steps / training.fragments) * training.fragments,
        num_fragments=training.fragments,
        overlap_steps=training.overlap,
        local_time_s=training.local_time,
    )
    peers = tuple(
        SimulatedPeer(
            link=Link(up_bits_per_s=spec.up, down_bits_per_s=spec.down, delay_s=spec.rtt_s / 4),
            machine=machine_of(spec.cores, training.codec),
            step_s=spec.step_s or step_seconds(training.params, training.batch_tokens, spec.peak, pods.mfu),
            price_per_hour=spec.price,
        )
        for spec in specs
    )
    scenario = Scenario(
        peers=peers,
        num_params=round(training.params),
        codec=training.codec,
        schedule=schedule,
        tokens_per_step=round(training.batch_tokens),
        num_epochs=epochs or _USUAL_EPOCHS,
        jitter=chances.jitter,
        mtbf_s=chances.mtbf or float("inf"),
        restart_s=chances.restart,
        window_bytes=pods.window or float("inf"),
        seed=chances.seed,
    )
    return scenario if epochs else replace(scenario, num_epochs=_enough_epochs(scenario))


def _enough_epochs(scenario: Scenario) -> int:
    """Fewer of a swarm that takes long to compute; for failures to be counted, until enough are to be expected."""
    few = max(_LEAST_EPOCHS, min(_USUAL_EPOCHS, _PEER_EPOCHS // len(scenario.peers)))
    usual_s = scenario.schedule.steps_per_epoch * max(peer.step_s for peer in scenario.peers)
    losses = len(scenario.peers) * usual_s / scenario.mtbf_s
    most = max(few, min(_MOST_EPOCHS, _MOST_PEER_EPOCHS // len(scenario.peers)))
    return few if not losses else max(few, min(most, round(_ENOUGH_LOSSES / losses)))


def _told(num_epochs: int) -> Progress:
    """Says how far it is, where that takes long."""
    told_at = time.monotonic()

    def tell(epoch: int, at: float) -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at > _TOLD_EVERY_S:
            told_at = now
            print(f"simulated {epoch} of {num_epochs + 1} epochs", file=sys.stderr, flush=True)

    return tell


def _curves(scenario: Scenario, specs: Sequence[PeerSpec], path: Path) -> dict[str, Curve]:
    from diloco.sim.command.plot import curves_of, draw, here_mbps
    from diloco.sim.cost.machine import machine_of
    from diloco.train.metrics_file import figure

    def with_codec(codec: str) -> Scenario:
        peers = tuple(
            replace(peer, machine=machine_of(spec.cores, codec))
            for peer, spec in zip(scenario.peers, specs, strict=True)
        )
        return replace(scenario, codec=codec, peers=peers)

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
    """As --overlap takes it."""
    return "auto" if schedule.never_waits else schedule.overlap_steps


def _plain(
    scenario: Scenario, figures: Figures, notes: Sequence[str], curves: dict[str, Curve] | None
) -> dict[str, object]:
    from dataclasses import asdict

    schedule = scenario.schedule
    plain: dict[str, object] = {
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
        plain["utilisation_over_mbps"] = {name: list(map(list, points)) for name, points in curves.items()}
    return plain
