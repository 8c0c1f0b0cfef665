"""`diloco doctor`: checks whether a peer with these flags would work on this machine, and whether others reach it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from diloco.cli.machine_recipes import own_ranks, settled
from diloco.cli.peer import PeersHereFlag, RanksFlag, RoleFlag, WorkerFlag, parse_worker
from diloco.doctor.findings import Finding, as_json, crashed, failed, run_check
from diloco.errors import UserError
from diloco.options.extras import extras_of
from diloco.options.flags import AsJson, HvConfig, Seconds
from diloco.options.sources import ValueSource
from diloco.options.trainer import ConfigPath, TrainConfig, TrainFlags, as_rollout_peer
from diloco.train.devices import Machine, starts_server, this_machine

_SOURCE = ValueSource()
_NAME_COLUMNS = 18
_MAX_COLUMNS = 120
_COLORS = {"pass": "32", "warn": "33", "fail": "31"}

app = App(name="doctor", config=[_SOURCE])


@app.default
def doctor(
    train: TrainFlags = TrainConfig(),  # noqa: B008
    *,
    config: ConfigPath = None,
    nproc_per_node: RanksFlag = "auto",
    peers_here: PeersHereFlag = 1,
    role: RoleFlag = "train",
    worker: WorkerFlag = None,
    as_json_: Annotated[AsJson, Parameter(group="Doctor")] = False,
    timeout: Annotated[Seconds, Parameter(name="--timeout", group="Doctor")] = 20.0,
) -> int:
    """Check this machine and its connection to a swarm: use `doctor` instead of `peer`, with the same flags.

    Each line is a pass, a warning or a failure; warnings and failures come with a fix. With --initial-peers, members
    of the swarm connect back to this machine, compare clocks, and measure the bandwidth. The exit code is 1 if a check
    fails, else 0.

    Parameters
    ----------
    timeout: float
        Seconds to wait for the swarm's first answer.
    """
    machine = this_machine(os.environ, train.device, num_peers=peers_here)
    named, program, ranks = _SOURCE.named, parse_worker(worker), 1
    if machine.num_gpus or train.device != "cuda":
        ranks = own_ranks(train, () if program else named, nproc_per_node, machine.num_gpus)
    if role == "rollout":
        train, named = as_rollout_peer(train, named)
        # It generates in one process.
        ranks = 1
    train = settled(train, named, None if program else machine, num_ranks=1 if program else ranks).config
    found: list[Finding] = []

    def tell(finding: Finding) -> None:
        found.append(finding)
        if not as_json_:
            _print(finding)

    for finding in _check_machine(train, ranks, machine, has_own_worker=bool(program)):
        tell(finding)
    code = _run_network_checks(train.hv, timeout, found, tell)
    if as_json_:
        print(json.dumps(as_json(found)), flush=True)
    else:
        _print_summary(found, asked=bool(train.hv.initial_peers))
    return code or int(any(finding.verdict == "fail" for finding in found))


def _check_machine(
    train: TrainConfig, ranks: int, machine: Machine, *, has_own_worker: bool
) -> Iterator[Finding]:
    """The checks that need no network."""
    from diloco.doctor.resources import check_descriptors, check_disk
    from diloco.doctor.software import check_packages, check_python, check_torch, check_vllm
    from diloco.launch.swarm_config import state_dir

    yield from run_check("python", check_python)
    yield from run_check("packages", lambda: check_packages(extras_of(train)))
    loaded = list(run_check("torch", check_torch))
    yield from loaded
    if all(finding.verdict == "pass" for finding in loaded):
        yield from _check_with_torch(train, ranks, machine, has_own_worker=has_own_worker)
    if starts_server(train):
        yield from run_check("vllm", lambda: check_vllm(train.grpo))
    yield from run_check("descriptors", check_descriptors)
    yield from run_check("disk", lambda: check_disk(train, state_dir()))


def _check_with_torch(
    train: TrainConfig, ranks: int, machine: Machine, *, has_own_worker: bool
) -> Iterator[Finding]:
    """The checks that import torch."""
    from diloco.doctor.gpu import check_gpus, gpu_memory_bytes
    from diloco.doctor.resources import check_model_memory
    from diloco.doctor.speed import check_speed

    yield from run_check("gpu", lambda: check_gpus(train.device, compiles=train.torch_compile is not False))
    if has_own_worker:
        # The model of the user's program is not known.
        return
    memory = list(run_check("memory", lambda: check_model_memory(train, ranks, gpu_memory_bytes(ranks))))
    yield from memory
    if train.mode == "pretrain" and all(finding.verdict == "pass" for finding in memory):
        yield from run_check("speed", lambda: check_speed(train, ranks, num_peers=machine.num_peers))


def _run_network_checks(
    hv: HvConfig, timeout_s: float, found: list[Finding], tell: Callable[[Finding], None]
) -> int:
    """Returns 128 + n after signal n, else 0."""
    # These checks are preconditions of the others.
    if any(finding.name in ("descriptors", "python") and finding.verdict == "fail" for finding in found):
        return 0
    from diloco.doctor.software import INSTALL

    try:
        from peers.net.dht.node import load_hivemind

        load_hivemind()
    except (ImportError, OSError, AttributeError) as error:
        tell(failed("hivemind", f"cannot be imported: {error}", INSTALL))
        return 0
    from diloco.cli.interrupts import run_interruptible

    async def examine() -> int:
        try:
            async for finding in check_network(hv, timeout_s):
                tell(finding)
        except Exception as error:  # noqa: BLE001 - the earlier findings must still be summarised
            tell(crashed("swarm", error))
        return 0

    return run_interruptible(examine())


async def check_network(hv: HvConfig, timeout_s: float) -> AsyncIterator[Finding]:
    """The checks of ports, p2pd and, with initial peers, the swarm. Each requires that the one before has passed."""
    from diloco.doctor.p2pd import check_p2pd, check_ports, identity_of_peer
    from diloco.doctor.swarm import check_swarm
    from diloco.launch.swarm_config import state_dir
    from peers.errors import UserError as PeersUserError

    yield (ports := check_ports(hv))
    if ports.verdict == "fail":
        return
    with tempfile.TemporaryDirectory(prefix="diloco-") as spare:
        try:
            with identity_of_peer(hv, state_dir(), Path(spare)) as identity:
                yield (p2pd := await check_p2pd(hv, identity))
                if p2pd.verdict == "pass" and hv.initial_peers:
                    async for finding in check_swarm(hv, identity, timeout_s):
                        yield finding
        except (PeersUserError, UserError) as error:
            yield failed("identity", str(error), "--world-rank 1  # or any number that is free here")


def _print(finding: Finding) -> None:
    verdict = finding.verdict
    if sys.stdout.isatty():
        verdict = f"\x1b[{_COLORS[verdict]}m{verdict}\x1b[0m"  # type: ignore[assignment]
    indent = " " * (6 + _NAME_COLUMNS)
    columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
    lines = textwrap.wrap(
        finding.said, max(columns - len(indent), 40), break_long_words=False, break_on_hyphens=False
    )
    print(f"{verdict}  {finding.name:<{_NAME_COLUMNS}}{lines[0] if lines else ''}", flush=True)
    for line in lines[1:]:
        print(f"{indent}{line}", flush=True)
    if finding.fix:
        # Not wrapped, so that it can be copied.
        print(f"{indent}-> {finding.fix}", flush=True)


def _print_summary(found: list[Finding], *, asked: bool) -> None:
    number = {verdict: sum(finding.verdict == verdict for finding in found) for verdict in _COLORS}
    print(f"\n{number['pass']} pass, {number['warn']} warn, {number['fail']} fail", flush=True)
    if not asked:
        print("With --initial-peers, the connection to a swarm is checked too.", flush=True)
