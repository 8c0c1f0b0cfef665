"""Jobs on a pod: programs that outlive the connection. At most one job of each name runs at a time.

A job's directory contains `run.sh`, `pid` (of the session's leader), `log` and, after the end, `code`: its exit code.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from provisioning.errors import CommandFailed, MachineError
from provisioning.machines.answers import number_in
from provisioning.machines.machine import Machine
from provisioning.machines.paths import CODE, JOBS, MARK, SECRETS, STATE, pod_directory

ENVIRONMENT = "environment"
"""The job that makes the Python environment (setup.py)."""
_STOP_S = 12
_START_TIMEOUT_S = 30.0
_POLL_S = 2.0
_MAX_FAILED_POLLS = 30
_NO_DIRECTORY = 9
"""The exit code of a script that finds no directory of the pod."""


@dataclass(frozen=True)
class JobState:
    """The state of a job."""

    is_running: bool
    code: int | None
    """Exit code as in a shell; None: the job runs, was never started, or was killed together with its shell."""


def run_script(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """The script of the job's shell: it reads the secrets, sets `env`, runs the program and writes its exit code."""
    lines = [
        # This shell survives signals to write the exit code. `trap ''` would make the program ignore them, too.
        "trap : TERM INT HUP",
        "job=$1",
        'echo $$ >"$job/pid.new" && mv "$job/pid.new" "$job/pid"',
        f'export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/{CODE}" XDG_STATE_HOME="$PWD/{STATE}"',
        f"if [ -f {SECRETS} ]; then set -a; . ./{SECRETS}; set +a; fi",
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        shlex.join(argv),
        'code=$?; echo "$code" >"$job/code.new" && mv "$job/code.new" "$job/code"',
    ]
    return "\n".join(lines) + "\n"


async def start(
    machine: Machine, label: str, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None
) -> bool:
    """Start a job in the pod's directory. Returns False if it runs already. Raises MachineError."""
    script = f"""
{_functions(label, name)}
mkdir -p "$job" || exit 9
if alive; then cat >/dev/null; echo runs; exit 0; fi
cat >"$job/run.sh" && rm -f "$job/pid" "$job/code" || exit 9
{MARK}={shlex.quote(label)} setsid -f sh "$job/run.sh" "$job" </dev/null >>"$job/log" 2>&1 || exit 9
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do [ -f "$job/pid" ] && break; sleep 0.1; done
echo started
"""
    stdin = run_script(argv, env or {}).encode()
    answer = await machine.run(script, stdin=stdin, timeout_s=_START_TIMEOUT_S)
    return answer.checked(f"starting {name}").strip() == "started"


async def state(machine: Machine, label: str, name: str) -> JobState:
    """Raises CommandFailed if the pod's directory is gone, MachineError if its state cannot be told."""
    script = f"""
{_functions(label, name)}
if alive; then echo runs; elif [ -f "$job/code" ]; then cat "$job/code"; else echo none; fi
"""
    answer = await machine.run(script)
    try:
        word = answer.checked(f"looking at {name}").strip() or "none"
    except CommandFailed as error:
        if answer.code == _NO_DIRECTORY:
            raise
        raise MachineError(str(error)) from error
    code = number_in(word)
    if code is None and word not in ("runs", "none"):
        raise MachineError(f"{word[:40]!r} is no state of a job")
    return JobState(word == "runs", code)


async def finished(
    machine: Machine, label: str, name: str, on_poll: Callable[[], Awaitable[None]] | None = None
) -> int | None:
    """Wait for the job's end, and return its exit code as in `JobState`. `on_poll` is called after each poll.

    Raises, after many failed polls in a row, CommandFailed if the pod's directory is gone, and with it the job, and
    MachineError if the job may go on nevertheless.
    """
    failed_polls = 0
    while True:
        try:
            seen = await state(machine, label, name)
            if on_poll is not None:
                await on_poll()
            failed_polls = 0
            if not seen.is_running:
                return seen.code
        except MachineError:
            failed_polls += 1
            if failed_polls > _MAX_FAILED_POLLS:
                raise
        await asyncio.sleep(_POLL_S)


async def any_runs(machine: Machine, label: str) -> bool:
    """Whether any job runs on the pod that needs its environment. Raises MachineError."""
    script = f"""
cd {shlex.quote(pod_directory(label))} || exit {_NO_DIRECTORY}
for file in {JOBS}/*/pid; do
  [ "$file" != {JOBS}/{ENVIRONMENT}/pid ] && [ -f "$file" ] && read -r pid <"$file" || continue
  grep -qzxF -e {shlex.quote(f"{MARK}={label}")} "/proc/$pid/environ" 2>/dev/null && echo runs
done
exit 0
"""
    return bool((await machine.run(script)).checked("looking at the jobs").strip())


def sweep_script(label: str) -> str:
    """A script that ends all processes with the pod's mark: SIGTERM for jobs, and after a while SIGKILL for all."""
    wanted = shlex.quote(f"{MARK}={label}")
    # -z: variables in /proc/<pid>/environ are separated by zero bytes. `cut` extracts the pid from the path.
    return f"""
marked() {{ grep -lzxF -e {wanted} /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }}
for pid in $(cat {shlex.quote(pod_directory(label))}/{JOBS}/*/pid 2>/dev/null); do
  case " $(marked | tr '\\n' ' ') " in *" $pid "*) kill -TERM "-$pid" 2>/dev/null;; esac
done
n=0; while [ -n "$(marked)" ] && [ $n -lt {_STOP_S * 5} ]; do
  # Without jobs nothing got SIGTERM.
  [ -d {shlex.quote(pod_directory(label))}/{JOBS} ] || break
  sleep 0.2; n=$((n+1))
done
n=0; while [ -n "$(marked)" ]; do
  kill -KILL $(marked) 2>/dev/null; sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 7
done
"""


def _functions(label: str, name: str) -> str:
    # The pid may have been reused by another process, which lacks the mark.
    return f"""
cd {shlex.quote(pod_directory(label))} || exit {_NO_DIRECTORY}
job={JOBS}/{shlex.quote(name)}
alive() {{ [ -f "$job/pid" ] && grep -qzxF -e {shlex.quote(f"{MARK}={label}")} \
"/proc/$(cat "$job/pid")/environ" 2>/dev/null; }}
"""
