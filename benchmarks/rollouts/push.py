"""How long a learner's newest policy takes to reach a rollout peer over a slow link, with 120 million parameters.

The layers are those of a model of half a billion, which two cores train too slowly for enough steps in ten minutes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab import Lab, Link
from benchmarks.record import Result
from benchmarks.rollouts.peers import Peer, ended
from benchmarks.swarm_harness import started
from benchmarks.weight_push import half_billion

MBPS = 100.0
NUM_PATCHES = 3
_LINK = Link(up_mbps=MBPS, down_mbps=MBPS, delay_ms=10)
_COORDINATOR = Link(up_mbps=1000, down_mbps=1000, delay_ms=1)
_TIMEOUT_S = 900.0
_LOOK_S = 0.02
_VOCABULARY, _LAYERS = 264, 8
"""A byte-level vocabulary, so that completions earn a reward, and fewer layers."""
_REWARD = '''
def low(completion, example):
    """The share of the text's bytes below 128."""
    said = completion.text.encode()
    return sum(byte < 128 for byte in said) / max(len(said), 1)
'''


@dataclass
class File:
    """The file of a policy at the rollout peer. All times are Unix times."""

    began: float
    """When the first part of the file was there."""
    arrived: float = 0.0
    """When its last byte was there; 0: not yet."""
    loaded: float = 0.0
    """When the generator had applied and removed it; 0: not yet."""


def measured(*, num_layers: int = _LAYERS, num_patches: int = NUM_PATCHES) -> list[Result]:
    """A learner trains in bf16 with a rate of 1e-6, and a rollout peer generates, each behind a link of MBPS."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = stack.enter_context(Lab([_LINK, _LINK, _COORDINATOR]))
        path_model = half_billion(directory / "model", vocab_size=_VOCABULARY, num_hidden_layers=num_layers)
        (directory / "reward.py").write_text(_REWARD, encoding="utf-8")
        reward = f"{directory / 'reward.py'}:low"

        def start(name: str, seat: int, *words: object) -> Peer:
            (directory / name).mkdir()
            process = started([*map(str, words)], directory / name, lab.prefix(seat))
            peer = Peer(process, directory / name)
            stack.callback(ended, peer)
            return peer

        coordinator = start("dht", 2, "dht", "start", "--host-maddrs", f"/ip4/{lab.address(2)}/tcp/0")
        _wait(lambda: "--initial-peers " in coordinator.output, coordinator)
        address = coordinator.output.partition("--initial-peers ")[2].split()[0]
        common = ("peer", "--initial-peers", address, "--device", "cpu", "--precision", "bf16-mixed")
        learner = start(
            "learner",
            0,
            *(*common, "--mode", "grpo", "--path-model", path_model, "--rollout", "peers"),
            *("--lr", 1e-6, "--warmup-steps", 0, "--total-steps", 10_000, "--hv.local-steps", 1000),
            *("--total-batch-size", 4, "--per-device-train-batch-size", 4, "--grpo.num-generations", 4),
            *("--grpo.max-completion-length", 4, "--grpo.eval-prompts", 0, "--grpo.reward", reward),
            *("--run-dir", directory / "learner" / "run"),
        )
        taker = start(
            "taker",
            1,
            *(*common, "--role", "rollout", "--rollout", "hf", "--grpo.reward", reward),
            *("--run-dir", directory / "taker" / "run"),
        )
        return _results(learner, taker, f"{num_layers} layers", num_patches)


def _results(learner: Peer, taker: Peer, model: str, num_patches: int) -> list[Result]:
    files: dict[str, File] = {}
    written: dict[str, tuple[float, int]] = {}
    """By file name: when the learner wrote the file, and its size."""

    def patches() -> list[str]:
        """The loaded files that were written after the first one, which has all weights, was loaded."""
        done = [name for name, file in files.items() if file.loaded]
        return [name for name in done[1:] if written[name][0] > files[done[0]].loaded]

    def look() -> bool:
        for path in (learner.directory / "run" / "policies").glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                written.setdefault(path.name, (path.stat().st_mtime, path.stat().st_size))
        there = dict(_sizes(taker.directory / "run" / "policies"))
        for name, size in there.items():
            file = files.setdefault(name, File(time.time()))
            if not file.arrived and name in written and size == written[name][1]:
                file.arrived = time.time()
        for name, file in files.items():
            if name not in there and file.arrived and not file.loaded:
                file.loaded = time.time()
        return len(patches()) >= num_patches

    _wait(look, learner, taker)
    steps = [record["time"] for record in learner.records("step")]
    first, names = next(iter(files)), patches()
    done = {name: max(step for step in steps if step <= written[name][0]) for name in names}
    case = f"{model} bf16 lr 1e-06 over {MBPS:g} Mbit/s"
    return [
        Result.of(case, "all weights", "B", [float(written[first][1])]),
        Result.of(case, "all weights, fetched and loaded", "s", [files[first].loaded - files[first].began]),
        Result.of(case, "patch", "B", [float(written[name][1]) for name in names]),
        Result.of(case, "patch, step to written", "s", [written[n][0] - done[n] for n in names]),
        Result.of(case, "patch, step to arrived", "s", [files[n].arrived - done[n] for n in names]),
        Result.of(case, "patch, step to loaded", "s", [files[n].loaded - done[n] for n in names]),
    ]


def _sizes(directory: Path) -> Iterator[tuple[str, int]]:
    for path in directory.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            yield path.name, path.stat().st_size


def _wait(condition: Callable[[], bool], *watched: Peer) -> None:
    """Poll until the condition holds. Raises SystemExit after _TIMEOUT_S, or if a peer has ended."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        for peer in watched:
            if peer.process.poll() is not None:
                raise SystemExit(f"a peer has ended:\n{peer.output[-3000:]}")
        if time.monotonic() > deadline:
            raise SystemExit("\n".join(peer.output[-1500:] for peer in watched))
        time.sleep(_LOOK_S)
