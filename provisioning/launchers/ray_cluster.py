"""A Ray cluster on pods, started over SSH: the head on the first pod, a node on each of the others.

Ray's dashboard and jobs API listen on the head's loopback only; jobs are submitted by a command that runs on the head.
All that Ray does for another process needs the cluster's token, which each pod has in a file.
Ray's processes are jobs of the pods and end with them.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from provisioning.errors import MachineError
from provisioning.launchers.job import default_interface
from provisioning.machines import jobs
from provisioning.machines.machine import Machine
from provisioning.machines.paths import CODE, JOBS, RAY_TOKEN, pod_directory, temporary_directory
from provisioning.machines.setup import put_private
from provisioning.pods.pod import Pod, Row
from provisioning.renting.renters import Renters
from provisioning.terminal import printable

RAY_JOB, SUBMIT_JOB = "ray", "ray-job"
PORT, DASHBOARD_PORT = 6379, 8265
_READY_TIMEOUT_S = 300.0
_POLL_S = 2.0
_MAX_SHOWN_BYTES = 1 << 20
# Turns off usage reports, import warnings, and the deduplication of lines that several ranks print.
ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_DEDUP_LOGS": "0"}


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A program that runs on all nodes of the cluster."""

    num_nodes: int
    program: Sequence[str]
    """Arguments of Python on each rank. It runs in the directory of the code."""
    ranks_per_node: int = 1
    storage: str
    """A directory that all nodes share."""
    use_gpu: bool


def start_argv(python: str, head: Pod, pod: Pod, *, cpus: int | None) -> list[str]:
    """The command line that starts Ray on `pod`. `cpus` None: Ray counts them."""
    words = [python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={pod.host}", f"--temp-dir={temporary_directory(pod.label)}"]
    words += [f"--num-cpus={cpus}"] if cpus else []
    if pod != head:
        return [*words, f"--address={head.host}:{PORT}"]
    return [
        *words,
        "--head",
        f"--port={PORT}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={DASHBOARD_PORT}",
    ]


def submit_argv(client: str, python: str, job: RayJob) -> list[str]:
    """The command line that submits the job to Ray's jobs API, with the code as its working directory.

    `client`: the Python that submits; `python`: the absolute path of the Python that runs the job.
    """
    words = ["--num-nodes", str(job.num_nodes), "--ranks-per-node", str(job.ranks_per_node)]
    words += ["--storage", job.storage]
    words += ["--use-gpu"] if job.use_gpu else []
    runtime = json.dumps({"env_vars": ENV})
    return [
        *(client, "-m", "ray.scripts.scripts", "job", "submit"),
        *("--address", f"http://127.0.0.1:{DASHBOARD_PORT}"),
        *("--working-dir", CODE, "--runtime-env-json", runtime),
        *("--", python, "-m", "diloco.launch.ray_worker", *words, "--", *job.program),
    ]


def token_env(directory: str) -> dict[str, str]:
    """Makes Ray demand and use the token in this directory, whose path is absolute."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{directory}/{RAY_TOKEN}"}


async def _network_env(machine: Machine) -> dict[str, str]:
    """Gloo's network interface. By default Gloo takes the host name's, which often is the loopback."""
    interface = default_interface((await machine.run("cat /proc/net/route")).stdout)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


@dataclass(frozen=True)
class _Node:
    row: Row
    machine: Machine
    pod: Pod

    async def directory(self) -> str:
        """The absolute path of the pod's directory: Ray runs jobs in other directories."""
        answer = await self.machine.run(f"cd {shlex.quote(pod_directory(self.row.label))} && pwd")
        return answer.checked("looking for its directory").strip()


class RayCluster:
    """Starts processes that do not run yet. Starting again leaves running ones alone."""

    def __init__(self, renters: Renters, rows: Sequence[Row], python: str) -> None:
        """`python`: its path on the pods, absolute or relative to the pod's directory."""
        self._renters, self._rows, self._python = renters, rows, python

    async def start(self, *, cpus: int | None = None) -> None:
        """Start Ray and wait until all nodes are in the cluster. Raises MachineError if a node is late."""
        await self.send_token()
        nodes = [await self._node(row) for row in self._rows]
        for number, node in enumerate(nodes, 1):
            argv = start_argv(self._python, nodes[0].pod, node.pod, cpus=cpus)
            env = {**ENV, **await _network_env(node.machine), **token_env(await node.directory())}
            if await jobs.start(node.machine, node.row.label, RAY_JOB, argv, env):
                self._renters.say(node.row.name, "starting Ray" if number > 1 else "starting Ray's head")
            if number in (1, len(nodes)):
                await self._until_there(nodes[:number])
        self._renters.say(nodes[0].row.name, f"the Ray cluster has {len(nodes)} nodes")

    async def send_token(self) -> None:
        """Give all nodes the token that the head has, or a new one. Raises MachineError."""
        nodes = [await self._node(row) for row in self._rows]
        paths = [f"{pod_directory(node.row.label)}/{RAY_TOKEN}" for node in nodes]
        found = await nodes[0].machine.run(f"cat {shlex.quote(paths[0])} 2>/dev/null; exit 0")
        token = found.checked("reading the token of Ray").strip() or secrets.token_hex(32)
        for node, path in zip(nodes, paths, strict=True):
            await put_private(node.machine, path, token.encode())

    async def run(self, job: RayJob) -> int:
        """Submit the job, print its output until it ends, and return its exit code. Raises MachineError."""
        head = await self._node(self._rows[0])
        machine, label = head.machine, head.row.label
        log = f"{shlex.quote(pod_directory(label))}/{JOBS}/{SUBMIT_JOB}/log"
        if (await jobs.state(machine, label, SUBMIT_JOB)).is_running:
            self._renters.say(head.row.name, "the job submitted before still runs; its output follows")
        else:
            await machine.run(f"rm -f {log}")
            directory = await head.directory()
            argv = submit_argv(self._python, self._python_in(directory), job)
            await jobs.start(machine, label, SUBMIT_JOB, argv, {**ENV, **token_env(directory)})
        shown = 0

        async def show() -> None:
            nonlocal shown
            num_bytes = _MAX_SHOWN_BYTES
            while num_bytes > _MAX_SHOWN_BYTES // 2:
                script = f"tail -c +{shown + 1} {log} 2>/dev/null | head -c {_MAX_SHOWN_BYTES}; exit 0"
                # The last character may be there only in part.
                text = (await machine.run(script)).stdout.rstrip("\ufffd")
                num_bytes = len(text.encode())
                shown += num_bytes
                print(printable(text), end="", flush=True)

        code = await jobs.finished(machine, label, SUBMIT_JOB, show)
        return 1 if code is None else code

    async def _node(self, row: Row) -> _Node:
        return _Node(row, *await self._renters[row.provider].reached(row))

    def _python_in(self, directory: str) -> str:
        return self._python if self._python.startswith("/") else f"{directory}/{self._python}"

    async def _until_there(self, nodes: Sequence[_Node]) -> None:
        head = nodes[0]
        directory = await head.directory()
        argv = ["env", *(f"{name}={value}" for name, value in token_env(directory).items())]
        argv += [self._python_in(directory), "-m", "ray.scripts.scripts", "status"]
        ask = f"{shlex.join([*argv, '--address', f'{head.pod.host}:{PORT}'])} 2>&1"
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while True:
            answer = await head.machine.run(ask, timeout_s=120.0)
            active = answer.stdout.partition("Active:")[2].partition("Pending:")[0]
            if len(re.findall(r"^ *\d+ node_", active, re.MULTILINE)) >= len(nodes):
                return
            for node in nodes:
                state = await jobs.state(node.machine, node.row.label, RAY_JOB)
                if not state.is_running:
                    log = f"{shlex.quote(pod_directory(node.row.label))}/{JOBS}/{RAY_JOB}/log"
                    said = (await node.machine.run(f"tail -n 8 {log}")).stdout.strip()
                    raise MachineError(f"Ray ended on {node.row.name} ({state.code}): {said}")
            if time.monotonic() > deadline:
                raise MachineError(
                    f"Ray does not have {len(nodes)} nodes after {_READY_TIMEOUT_S:g} s: {answer.stdout[-400:]}"
                )
            await asyncio.sleep(_POLL_S)
