"""Time to average the same bytes with our reduction, Hivemind's averager, torch's gloo, and bare TCP.

One process per peer, on loopback. Every repetition is in a fresh group after a warm-up round, with the contenders
interleaved. A round's time is from when all peers are ready until the last one has the complete average. Ours includes
sending the attempt's name on the open streams, and all checks.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.plot import bars
from benchmarks.record import Result, parser, report
from benchmarks.reduction import seats
from benchmarks.reduction.ours import TRANSPORTS, Ours
from benchmarks.reduction.rivals import Gloo, Hivemind, RawTcp
from benchmarks.reduction.seats import Contender, Outcome, Round
from peers.protocol.codecs import CODEC_NAMES

_TIMEOUT_S = 600.0
_RATIOS = (
    ("hivemind none", "ours fp32 tcp"),
    ("hivemind none", "ours fp32 tls"),
    ("hivemind none", "ours fp32 libp2p"),
    ("hivemind 8-bit", "ours int8 tcp"),
    ("hivemind 8-bit", "ours int8 tls"),
    ("hivemind 8-bit", "ours int8 libp2p"),
    ("ours fp32 tcp", "raw TCP"),
)
_QUICK = ("raw TCP", "gloo", "hivemind none", "ours fp32 tcp", "ours int8 tcp", "ours fp32 tls")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--peers", type=int, default=4)
    flags.add_argument("--mb", type=int, default=None, help="MiB of fp32 values; default: 512, quick: 32")
    flags.add_argument("--runs", type=int, default=None, help="groups per contender; default: 5, quick: 2")
    flags.add_argument("--rounds", type=int, default=None, help="rounds per group; default: 1, quick: 2")
    flags.add_argument("--plot", type=Path, metavar="FILE", help="draw the times there")
    flags.add_argument("--only", action="append", metavar="NAME", help="only contenders whose name begins so")
    arguments = flags.parse_args()
    quick = arguments.quick
    numel = (arguments.mb or (32 if quick else 512)) << 18
    chosen = [
        contender
        for contender in contenders()
        if (contender.name.startswith(tuple(arguments.only)) if arguments.only else True)
        and (not quick or arguments.only or contender.name in _QUICK)
    ]
    present = [contender for contender in chosen if not contender.missing()]
    outcomes = measured(
        present,
        arguments.peers,
        numel,
        num_groups=arguments.runs or (2 if quick else 5),
        num_rounds=arguments.rounds or (2 if quick else 1),
    )
    results = rows(outcomes, arguments.peers, numel)
    for contender in chosen:
        if reason := contender.missing():
            case = f"{contender.name}: {reason}"
            results.append(Result(case=case, metric="skipped", unit="", median=0, min=0, max=0, runs=0))
    report("reduce", results, arguments.json)
    if arguments.plot is not None:
        plot(outcomes, arguments.plot, f"{arguments.peers} peers, {numel >> 18} MB of fp32, loopback")


def contenders() -> list[Contender]:
    ours = [Ours(codec, transport) for transport in TRANSPORTS for codec in CODEC_NAMES]
    hivemind = [Hivemind(compression) for compression in ("none", "fp16", "8-bit")]
    return [RawTcp(), Gloo(), *ours, *hivemind]


def measured(
    contenders: list[Contender], num_peers: int, numel: int, *, num_groups: int, num_rounds: int
) -> dict[str, list[Outcome]]:
    """Measure the contenders alternately, so that other load on the machine affects all of them."""
    seats.preload()
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in contenders}
    for repetition in range(num_groups):
        for contender in contenders if repetition % 2 else reversed(contenders):
            with tempfile.TemporaryDirectory() as directory:
                outcome = seats.run(contender, num_peers, numel, num_rounds, Path(directory), _TIMEOUT_S)
            outcomes[contender.name].append(outcome)
            print(
                f"{contender.name}: {', '.join(f'{slowest_s(r):.3f}' for r in outcome.rounds)} s", flush=True
            )
    return outcomes


def rows(outcomes: dict[str, list[Outcome]], num_peers: int, numel: int) -> list[Result]:
    size = f"{num_peers} x {numel >> 18} MB"
    results = []
    for name, groups in outcomes.items():
        case, rounds = f"{size} {name}", [round_ for group in groups for round_ in group.rounds]
        gigabytes = num_peers * numel * 4 / 1e9
        cpu_s = [sum(peer.cpu_s for peer in round_) / gigabytes for round_ in rounds]
        results.append(Result.of(case, "time", "s", [slowest_s(round_) for round_ in rounds]))
        results.append(Result.of(case, "CPU time", "s/GB", cpu_s))
        peaks = [max(0, group.peak_bytes) / 1e6 for group in groups]
        results.append(Result.of(case, "memory beyond tensors", "MB", peaks))
        if not all(math.isfinite(peer.error) for round_ in rounds for peer in round_):
            continue
        distinct = [float(len({peer.digest for peer in round_})) for round_ in rounds]
        results.append(Result.of(case, "distinct results", "", distinct))
        errors = [max(peer.error for peer in round_) for round_ in rounds]
        results.append(Result.of(case, "relative error", "", errors))
    results += ratios(outcomes, size)
    return results


def ratios(outcomes: dict[str, list[Outcome]], size: str) -> list[Result]:
    """Ratios of the contenders' median times within each repetition."""
    medians = {
        name: [statistics.median(map(slowest_s, group.rounds)) for group in groups]
        for name, groups in outcomes.items()
    }
    return [
        Result.of(
            f"{size} {slow} / {fast}",
            "time",
            "ratio",
            [a / b for a, b in zip(medians[slow], medians[fast], strict=True)],
        )
        for slow, fast in _RATIOS
        if slow in medians and fast in medians
    ]


def plot(outcomes: dict[str, list[Outcome]], path: Path, title: str) -> None:
    """Plot the time of every contender, the fastest on top."""
    times = {
        name: sorted(slowest_s(round_) for group in groups for round_ in group.rounds)
        for name, groups in outcomes.items()
    }
    values = {name: (statistics.median(run), run[0], run[-1]) for name, run in times.items()}
    ordered = dict(sorted(values.items(), key=lambda item: item[1][0]))
    bars(path, ordered, title=title, x_label="s, slowest peer", log_x=True)


def slowest_s(round_: list[Round]) -> float:
    return max(peer.ended_at for peer in round_) - min(peer.started_at for peer in round_)


if __name__ == "__main__":
    main()
