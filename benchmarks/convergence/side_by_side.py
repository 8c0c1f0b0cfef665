"""Runs many jobs at once on one device: all their peers' models in one batched product (stacked_llama).

The jobs share scale and configuration; arms, seeds and rates differ. Whatever follows the inner step (handing over,
codecs, reduction, outer step, merge) is the same code as for jobs that run one at a time (averaging.AveragedSwarm).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.convergence.averaging import AveragedSwarm, Replica
from benchmarks.convergence.run import curve_validation, outcome_of
from benchmarks.convergence.settings import Job, Scale
from benchmarks.convergence.stacked_llama import Compile, Forward, Shape, Stack
from benchmarks.convergence.stacked_optimizers import StackedAdamW, StackedMuon, clip
from benchmarks.convergence.store import Outcome, Store
from benchmarks.convergence.swarm import learning_rate_of, samples_of
from diloco.data.batches import SampleSource, open_data
from diloco.data.held_out import Validation
from diloco.data.tokenizer import load_tokenizer
from diloco.options.model_files import load_model_config
from diloco.outer.exchange import SharedWeights
from diloco.outer.layout import Piece, layout_of
from diloco.train.model import load_model, outline
from diloco.train.sharding import Precision
from peers.reduce.residuals import Residuals
from peers.state.layout import Layout

_READ_AHEAD = 4

Say = Callable[[str], None]


def run_jobs(jobs: Sequence[Job], directory: Path, say: Say = print) -> list[Outcome]:
    """Run all jobs from their beginnings to their ends, and store their outcomes.

    Raises ValueError if their model is not a plain Llama.
    """
    outcomes = _SideBySide(jobs, say).run_to_end()
    store = Store(directory)
    for outcome, job in outcomes:
        store.finish(job, outcome)
    return [outcome for outcome, _ in outcomes]


@dataclass
class _Run:
    """One job and its rows of the stack, one for each peer. In data parallel all rows hold the same weights."""

    job: Job
    rows: slice
    swarm: AveragedSwarm | None
    curve: list[tuple[int, float]]


class _SideBySide:
    def __init__(self, jobs: Sequence[Job], say: Say) -> None:
        self._say = say
        self._scale = jobs[0].scale
        self._device = torch.device(self._scale.device)
        self._config = load_model_config(self._scale.path_model)
        self._layouts: dict[int, Layout] = {}
        # Jobs that take the same path through a step have adjacent rows.
        ordered = sorted(jobs, key=lambda job: (job.arm.optimizer, job.arm.averages))
        self._stack = Stack(self._config, len(jobs) * self._scale.num_peers, self._device)
        self._gradients = torch.empty_like(self._stack.rows)
        self._evaluated = Stack(self._config, len(jobs), self._device)
        self._sources = {seed: _source(self._scale, seed) for seed in {job.seed for job in jobs}}
        self._fill_with_initial_weights(ordered)
        self._runs = [self._run(number, job) for number, job in enumerate(ordered)]
        on_gpu = self._device.type == "cuda"
        self._dtype = Precision.of("auto", self._device).compute
        shape = Shape.of(self._config)
        self._forward = Forward(shape, _compiled) if on_gpu else Forward(shape)
        self._scoring = Forward(shape)
        """Not compiled: it is called with other sizes than training."""
        self._optimizers = list(self._make_optimizers(_compiled_for_any_size if on_gpu else lambda f: f))
        self._num_steps = 0

    def run_to_end(self) -> list[tuple[Outcome, Job]]:
        scale, began_at = self._scale, time.process_time()
        told_at = time.monotonic()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for tokens in _batches(self._runs, self._sources):
                self._train(tokens.to(self._device))
                self._num_steps += 1
                swarms = [run.swarm for run in self._runs if run.swarm is not None]
                # `list` also raises their exceptions.
                list(pool.map(AveragedSwarm.end_step, swarms))
                if self._num_steps % scale.eval_interval == 0 and self._num_steps < scale.total_steps:
                    self._add_points()
                    took_s = time.monotonic() - told_at
                    self._say(f"{self._num_steps} of {scale.total_steps} steps, {took_s:.0f} s")
        final = self._evaluate(next(iter(self._sources.values())).validation())
        self._add_points()
        cpu_s = (time.process_time() - began_at) / len(self._runs)
        return [
            (outcome_of(run.job, run.swarm, loss, run.curve, cpu_s), run.job)
            for run, loss in zip(self._runs, final, strict=True)
        ]

    def _fill_with_initial_weights(self, jobs: Sequence[Job]) -> None:
        peers = self._scale.num_peers
        for seed in self._sources:
            model = dict(load_model(self._scale.path_model, seed=seed).named_parameters())
            first = next(number for number, job in enumerate(jobs) if job.seed == seed) * peers
            for name, values in self._stack.named_parameters(first):
                values.copy_(model[name].detach())
            for number, job in enumerate(jobs):
                if job.seed == seed:
                    self._stack.rows[number * peers : (number + 1) * peers] = self._stack.rows[first].clone()

    def _run(self, number: int, job: Job) -> _Run:
        peers = self._scale.num_peers
        rows = slice(number * peers, (number + 1) * peers)
        if not job.arm.averages:
            return _Run(job, rows, None, [])
        num_fragments = job.arm.schedule(self._scale).num_fragments
        members = [self._replica(row, num_fragments) for row in range(rows.start, rows.stop)]
        return _Run(job, rows, AveragedSwarm(job, members), [])

    def _replica(self, row: int, num_fragments: int) -> Replica:
        pinned, sizes = self._device.type == "cuda", self._layout(num_fragments).sizes
        out, inn = ([torch.zeros(size, pin_memory=pinned) for size in sizes] for _ in range(2))
        weights = SharedWeights(self._pieces(self._stack, row, num_fragments), out, inn)
        return Replica(weights, [0] * num_fragments, [Residuals(size) for size in sizes])

    def _pieces(self, stack: Stack, row: int, num_fragments: int) -> list[Piece]:
        parameters = dict(stack.named_parameters(row))
        return [
            Piece(index, slot.offset, parameters[slot.name], is_first=True, copies=None)
            for index, fragment in enumerate(self._layout(num_fragments).fragments)
            for slot in fragment
        ]

    def _layout(self, num_fragments: int) -> Layout:
        if num_fragments not in self._layouts:
            self._layouts[num_fragments] = layout_of(outline(self._config), num_fragments)
        return self._layouts[num_fragments]

    def _make_optimizers(self, compiled: Compile) -> Iterator[tuple[slice, StackedAdamW | StackedMuon]]:
        beta2 = self._scale.beta2
        for optimizer, same in groupby(self._runs, key=lambda run: run.job.arm.optimizer):
            these = list(same)
            rows = slice(these[0].rows.start, these[-1].rows.stop)
            decay = self._scale.train_config(0, optimizer).weight_decay
            if optimizer == "muon":
                yield rows, StackedMuon(self._stack, rows, beta2=beta2, decay=decay, compiled=compiled)
            else:
                yield (
                    rows,
                    StackedAdamW(self._stack, rows, first=0, beta2=beta2, decay=decay, compiled=compiled),
                )

    def _train(self, tokens: Tensor) -> None:
        """One inner step of all peers on `tokens`, int64 [rows, batch, length + 1]."""
        at_once = self._scale.models_at_once
        for start in range(0, len(tokens), at_once):
            part = slice(start, min(start + at_once, len(tokens)))
            views = self._stack.views(part.start, part.stop)
            weights = {name: values.detach().requires_grad_() for name, values in views.items()}
            _, found = self._forward.gradients(weights, tokens[part], dtype=self._dtype)
            targets = self._stack.views(part.start, part.stop, of=self._gradients)
            torch._foreach_copy_(list(targets.values()), list(found))
        with torch.no_grad():
            for averages, same in groupby(
                self._runs, key=lambda run: (run.job.arm.optimizer, run.swarm is not None)
            ):
                these = list(same)
                if not averages[1]:
                    self._mean_over_peers(slice(these[0].rows.start, these[-1].rows.stop))
            clip(self._gradients, self._scale.train_config(0).max_grad_norm)
            rates, active = self._rates()
            for rows, optimizer in self._optimizers:
                optimizer.step(self._gradients[rows], rates[rows], active[rows])

    def _mean_over_peers(self, rows: slice) -> None:
        """Data parallel: give every peer of these runs the mean of their gradients."""
        by_run = self._gradients[rows].unflatten(0, (-1, self._scale.num_peers))
        by_run.copy_(by_run.mean(dim=1, keepdim=True).expand_as(by_run))

    def _rates(self) -> tuple[Tensor, Tensor]:
        """Each row's learning rate in this step, and 1 if it trains, both [rows, 1]; both are 0 if it does not."""
        active = torch.tensor(
            [
                float(run.swarm is None or run.swarm.trains(rank))
                for run in self._runs
                for rank in range(self._scale.num_peers)
            ]
        )
        each = torch.tensor([learning_rate_of(run.job, self._num_steps) for run in self._runs])
        rates = each.repeat_interleave(self._scale.num_peers) * active
        rates, active = torch.stack((rates, active)).to(self._device)
        return rates[:, None], active[:, None]

    def _add_points(self) -> None:
        tokens = round(self._num_steps / self._scale.total_steps * self._scale.tokens)
        validation = next(iter(self._sources.values())).validation()
        found = self._evaluate(curve_validation(validation, self._scale.curve_tokens))
        for run, loss in zip(self._runs, found, strict=True):
            run.curve.append((tokens, loss))

    @torch.no_grad()
    def _evaluate(self, validation: Validation) -> list[float]:
        """The held-out loss of every run's anchor, in nats per token."""
        for number, run in enumerate(self._runs):
            if run.swarm is None:
                self._evaluated.rows[number] = self._stack.rows[run.rows.start]
            else:
                pieces = self._pieces(self._evaluated, number, run.job.arm.num_fragments)
                SharedWeights(pieces, (), run.swarm.state.anchor).take()
        windows = torch.from_numpy(validation.windows).to(self._device)
        found = []
        at_once = self._scale.models_at_once
        for start in range(0, len(self._runs), at_once):
            end = min(start + at_once, len(self._runs))
            weights, total = self._evaluated.views(start, end), torch.zeros(end - start, dtype=torch.float64)
            for batch in windows.split(self._scale.peer_batch_size):
                with torch.autocast(
                    self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32
                ):
                    means = self._scoring.losses(weights, batch.expand(end - start, *batch.shape))
                total = total.to(self._device) + means.double() * len(batch)
            found += (total / len(windows)).tolist()
        return found


def _batches(runs: Sequence[_Run], sources: dict[int, SampleSource]) -> Iterator[Tensor]:
    """The samples of all rows for each step, read ahead by a thread: int64 [rows, batch, length + 1]."""
    job = runs[0].job
    numbers = {seed: number for number, seed in enumerate(sources)}
    seed_of_run = [numbers[run.job.seed] for run in runs]
    total, ranks = job.scale.total_steps, range(job.scale.num_peers)

    def batch(step: int) -> Tensor:
        by_seed = [[samples_of(source, job, rank, step) for rank in ranks] for source in sources.values()]
        return torch.from_numpy(np.array(by_seed)[seed_of_run]).flatten(0, 1)

    with ThreadPoolExecutor(1) as pool:
        reading = deque(pool.submit(batch, step) for step in range(min(_READ_AHEAD, total)))
        for step in range(_READ_AHEAD, total + _READ_AHEAD):
            yield reading.popleft().result()
            if step < total:
                reading.append(pool.submit(batch, step))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


@cache
def _compiled_for_any_size(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _source(scale: Scale, seed: int) -> SampleSource:
    config = scale.train_config(seed)
    return open_data(config, load_tokenizer(config.path_model))
