"""Sends code, environment and secrets to a pod. Every step may be repeated, and does nothing if nothing changed."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from provisioning.errors import MachineError, UserError
from provisioning.machines import jobs
from provisioning.machines.answers import number_in
from provisioning.machines.machine import Machine
from provisioning.machines.paths import (
    CODE,
    JOBS,
    PODS_RECORD,
    SECRETS,
    STATE,
    SWARM_SECRET,
    VENV,
    pod_directory,
)

# Of an installer, on the pod itself, so that a later attempt finds none that hangs. 8 GB at 5 MB/s take 1600 s.
_INSTALL_TIMEOUT_S = 3600.0
_TIMED_OUT = 124
_SHOWN_BYTES = 1500
_MIN_FREE_MB = 2048
_UV = "'uv>=0.8,<1'"
_RESERVED = (CODE, JOBS, PODS_RECORD, SECRETS, STATE, SWARM_SECRET, VENV)
PASSED_ON = ("WANDB_API_KEY", "WANDB_PROJECT", "HF_TOKEN")
"""Environment variables of the operator that are passed on to pods."""


@dataclass(frozen=True)
class Mount:
    """A local file or directory, and its path on the pod, relative to the pod's directory."""

    source: Path
    place: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is sent to every pod."""

    source: Path
    """The directory of the code, with a pyproject.toml."""
    python: str | None = None
    """A Python on the pods that has all packages; None: an environment is made from pyproject.toml."""
    extras: Sequence[str] = ()
    secrets: Mapping[str, str] | None = None
    mounts: Sequence[Mount] = ()
    min_free_mb: int = _MIN_FREE_MB

    @property
    def pod_python(self) -> str:
        """The path of Python for jobs, absolute or relative to the pod's directory."""
        return self.python or f"{VENV}/bin/python"


def source_directory(named: Path | None) -> Path:
    """`named`, or the source directory of this code; absolute. Raises UserError if it has no pyproject.toml."""
    source = named.absolute() if named else Path(__file__).resolve().parents[2]
    if not (source / "pyproject.toml").is_file():
        raise UserError(
            f"{source} has no pyproject.toml, so it is not the source of diloco; name a clone with --source."
        )
    return source


def secrets_of(environment: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str]:
    """The variables of PASSED_ON that are set, and those in `names`. Raises UserError if one of `names` is not set."""
    for name in names:
        if not environment.get(name):
            raise UserError(f"--secret {name}: there is no such variable in your environment; export it.")
    return {name: environment[name] for name in (*PASSED_ON, *names) if environment.get(name)}


def mount_of(words: str) -> Mount:
    """Parses PATH or PATH:PLACE. Raises UserError if PATH does not exist or PLACE is not allowed."""
    named, _, place = words.partition(":")
    path = Path(named).expanduser().absolute()
    place = PurePosixPath(place or path.name).as_posix()
    if not path.exists():
        raise UserError(f"--mount {named} is not there.")
    parts = PurePosixPath(place).parts
    if not parts or place.startswith("/") or ".." in parts or parts[0] in _RESERVED:
        raise UserError(f"--mount {words}: {place!r} is not a free path below the pod's directory.")
    return Mount(path, place)


async def send(machine: Machine, label: str, setup: Setup, *, num_gpus: int | None) -> None:
    """Check disk and GPUs, and send everything. Steps that fail fast come first.

    `num_gpus`: number of GPUs that the pod must have; None: it trains on its CPUs. Raises MachineError or UserError.
    """
    directory = pod_directory(label)
    answer = await machine.run(
        f"mkdir -p {shlex.quote(directory)} && df -Pm {shlex.quote(directory)} | tail -n 1"
    )
    words = answer.checked("looking for space").split()
    free_mb = number_in(words[3]) if len(words) > 3 else None
    if free_mb is not None and free_mb < setup.min_free_mb:
        raise MachineError(
            f"the disk is full: {free_mb} MB are free, {setup.min_free_mb} are needed; take a larger machine or volume"
        )
    if num_gpus:
        await _check_gpus(machine, num_gpus)
    await machine.sync(setup.source, f"{directory}/{CODE}")
    if setup.secrets:
        await put_private(machine, f"{directory}/{SECRETS}", env_file(setup.secrets))
    for mount in setup.mounts:
        # Keep what a peer has written there.
        await machine.sync(mount.source, f"{directory}/{mount.place}", excluded=(), mirrors=False)


async def make_environment(machine: Machine, label: str, setup: Setup, *, num_gpus: int | None) -> None:
    """Make the Python environment after `send`, or try the pod's own Python. Raises MachineError."""
    if setup.python is not None:
        probe = f"{shlex.quote(setup.python)} -c 'import sys; sys.exit(sys.version_info < (3, 11))'"
        (await machine.run(probe)).checked(f"trying {setup.python}, which has to be Python 3.11 or newer,")
        return
    script = environment_script(setup.extras, _fingerprint(setup), is_cpu=num_gpus is None)
    # A job, so that a lost connection does not leave an installer that a repeated one would disturb.
    # Without PYTHONPATH: names in the code must not hide modules of the installer.
    limit = ["timeout", "-k", "10", f"{_INSTALL_TIMEOUT_S:g}"]
    argv = ["env", "-u", "PYTHONPATH", *limit, "sh", "-c", script]
    wait_s = 2 * _INSTALL_TIMEOUT_S
    try:
        async with asyncio.timeout(wait_s):
            # One that runs already may be making another environment; this one then finds the same or replaces it.
            while not await jobs.start(machine, label, jobs.ENVIRONMENT, argv):
                await jobs.finished(machine, label, jobs.ENVIRONMENT)
            code = await jobs.finished(machine, label, jobs.ENVIRONMENT)
    except TimeoutError as error:
        raise MachineError(
            f"its Python environment is not made after {wait_s:g} s; the same command tries again"
        ) from error
    if code != 0:
        log = f"{pod_directory(label)}/{JOBS}/{jobs.ENVIRONMENT}/log"
        end = (await machine.run(f"tail -c {_SHOWN_BYTES} {shlex.quote(log)}")).stdout.strip()
        why = f"took over {_INSTALL_TIMEOUT_S:g} s" if code == _TIMED_OUT else f"failed ({code})"
        raise MachineError(f"making the Python environment {why}: {end or 'no output'}")


async def put_private(machine: Machine, path: str, content: bytes) -> None:
    """Write a file with mode 0600 atomically. Its content is sent through stdin, so that no command line shows it."""
    quoted = shlex.quote(path)
    script = f"umask 077; cat >{quoted}.new && mv {quoted}.new {quoted}"
    (await machine.run(script, stdin=content)).checked(f"writing {path}")


def env_file(values: Mapping[str, str]) -> bytes:
    """Shell assignments of these variables. Raises UserError if a name is invalid."""
    for name in values:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f'"{name}" is not a valid name for an environment variable.')
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()).encode()


async def _check_gpus(machine: Machine, num_gpus: int) -> None:
    answer = await machine.run("nvidia-smi --query-gpu=name,memory.total --format=csv,noheader")
    found = [line for line in answer.stdout.splitlines() if line.strip()] if answer.code == 0 else []
    if len(found) < num_gpus:
        said = (answer.stderr.strip() or answer.stdout.strip()) if answer.code else ""
        raise MachineError(
            f"nvidia-smi shows {len(found)} GPUs, {num_gpus} were rented{f': {said}' if said else ''}"
        )


def environment_script(extras: Sequence[str], fingerprint: str, *, is_cpu: bool) -> str:
    """A job's script that makes the pod's Python environment unless it exists.

    It uses uv, which is much faster than pip, but pip if uv is not available or fails (uv ignores pip's settings), or
    if the image has its own torch, which fits its driver and is kept: uv would not see that torch. Without GPUs, torch
    is installed from PyTorch's CPU index, to save 4 GB of CUDA libraries, unless that index cannot be reached.
    """
    alone = "by_uv --torch-backend cpu || by_uv" if is_cpu else "by_uv"
    what = shlex.quote(f"{CODE}[{','.join(extras)}]" if extras else CODE)
    return f"""
[ "$(cat {VENV}/fingerprint 2>/dev/null)" = {shlex.quote(fingerprint)} ] && [ -x {VENV}/bin/python ] && exit 0
rm -rf {VENV}
python=; site=
for one in python3.12 python3.11 python3.13 python3; do
  command -v $one >/dev/null 2>&1 || continue
  $one -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || continue
  python=$one; break
done
if [ -n "$python" ] && $python -c 'import importlib.metadata as m, sys
sys.exit(not (2, 10) <= tuple(map(int, m.version("torch").split(".")[:2])) < (2, 14))' 2>/dev/null
then site=--system-site-packages; fi
uv=$(command -v uv)
by_uv() {{
  # Use the system's certificates: a proxy may need its own. The second variable is for uv before 0.11.
  UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 "$uv" pip install --quiet --python {VENV}/bin/python \
    --constraint {CODE}/constraints.txt --editable {what} "$@"
}}
alone() {{ {alone}; }}
by_pip() {{
  [ -x {VENV}/bin/pip ] || {VENV}/bin/python -m ensurepip --default-pip >/dev/null || return 1
  {VENV}/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}}
if [ -n "$python" ]; then
  # Installing pip takes seconds, and uv needs none.
  $python -m venv ${{site:---without-pip}} {VENV} || exit 1
  if [ -z "$uv$site" ]; then
    if $python -m pip install --quiet --target {VENV}/uv {_UV} 2>/dev/null; then uv={VENV}/uv/bin/uv
    elif by_pip {_UV}; then uv={VENV}/bin/uv; fi
  fi
  if [ -n "$site" ]; then by_pip --editable {what} || exit 1
  elif [ -z "$uv" ] || ! alone; then by_pip --constraint {CODE}/constraints.txt --editable {what} || exit 1
  fi
elif [ -n "$uv" ]; then
  "$uv" venv --quiet --python 3.11 {VENV} && alone || exit 1
else
  echo "there is neither Python 3.11, 3.12 or 3.13 nor uv on this machine; take another image" >&2; exit 1
fi
printf %s {shlex.quote(fingerprint)} >{VENV}/fingerprint
"""


def _fingerprint(setup: Setup) -> str:
    """A hash that changes if the environment has to be made again."""
    digest = hashlib.sha256(",".join(setup.extras).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        path = setup.source / name
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()
