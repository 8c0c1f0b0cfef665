"""The loss that peers of different speed reach in equal time, with the convergence study's model and real daemons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.convergence.run import EVAL_BATCH, curve_validation
from benchmarks.convergence.swarm import new_replica
from benchmarks.lab import Lab
from benchmarks.record import Result
from benchmarks.swarm_harness import Job
from benchmarks.unlike import peers
from benchmarks.unlike.study_loop import MODEL, StudyLoop
from diloco.data.batches import open_data
from diloco.data.tokenizer import load_tokenizer
from diloco.outer.world import World
from diloco.train.evaluation import evaluate


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the peers of peers.py train, and for how long."""

    scale: str = "80k"
    num_peers: int = 6
    mbps: float = 15.0
    """At a tenth of this, a round takes longer than the local steps of the fast peers."""
    step_s: float = 0.1
    local_steps: int = 40
    seconds: float = 200.0
    lr: float = 4e-3
    seeds: Sequence[int] = (1, 2, 3)
    eval_tokens: int = 131_072


def measured(setting: Setting, arms: dict[str, tuple[str, ...]]) -> list[Result]:
    """All arms once for each seed, in turn."""
    losses: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    with Lab(peers.links(setting.num_peers, setting.mbps)) as lab:
        for seed in setting.seeds:
            for case, flags in arms.items():
                loss, steps = _trained(lab, setting, flags, seed)
                losses[case].append(loss)
                rates[case].append(steps / setting.seconds)
                print(f"{case}, seed {seed}: {loss:.4f} nats a byte, {steps} steps", flush=True)
    first = next(iter(arms))
    rows = []
    for case in arms:
        shown = f"trained, {case}"
        rows.append(Result.of(shown, "held-out loss", "nats/byte", losses[case]))
        rows.append(Result.of(shown, "all peers", "steps/s", rates[case]))
        if case != first:
            pairs = zip(losses[case], losses[first], strict=True)
            rows.append(Result.of(shown, f"loss against {first}", "%", [100 * (a / b - 1) for a, b in pairs]))
    return rows


def _trained(lab: Lab, setting: Setting, flags: tuple[str, ...], seed: int) -> tuple[float, int]:
    """Held-out loss after the last commit, of the peer whose commit had most contributors; the steps of all peers."""
    loop = StudyLoop(
        scale=setting.scale,
        seed=seed,
        lr=setting.lr,
        local_steps=setting.local_steps,
        wait_s=setting.step_s,
        seconds=setting.seconds,
    )
    job = Job(loop=loop, worker="benchmarks.unlike.study_loop", local_steps=setting.local_steps, flags=flags)
    with peers.started(lab, job, setting.num_peers) as swarm:
        swarm.wait_for_end()
        ends = [peer.records[-1] for peer in swarm.peers]
        # A peer that handed over one more epoch at the end may have averaged it with only a few others.
        with_most = max(range(setting.num_peers), key=lambda rank: ends[rank]["num_contributors"])
        model = torch.load(swarm.peers[with_most].directory / MODEL, weights_only=True)
    return _loss(loop, model, setting.eval_tokens), sum(end["step"] for end in ends)


def _loss(loop: StudyLoop, weights: dict[str, torch.Tensor], num_tokens: int) -> float:
    config = loop.job.scale.train_config(loop.seed)
    validation = open_data(config, load_tokenizer(config.path_model)).validation()
    inner = new_replica(loop.job, num_fragments=1).inner
    inner.model.load_state_dict(weights)
    windows = curve_validation(validation, num_tokens)
    return evaluate(inner, windows, world=World(), micro_batch_size=EVAL_BATCH).loss
