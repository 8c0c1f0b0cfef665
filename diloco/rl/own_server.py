"""A vLLM server that belongs to this trainer: starts it, checks it with a real request, restarts and stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diloco
from diloco.errors import UserError
from diloco.rl.server_client import NotListening, ServerClient, ServerLost
from diloco.train.run_dir import last_words
from peers.net.socket_directory import SocketDirectory

EXTENSION = "diloco.rl.server_extension.WeightsExtension"
_PROBE_TIMEOUT_S = 60.0
_POLL_S = 0.25
_STOP_TIMEOUT_S = 10.0
_MOST_TIMEOUTS = 12
"""A server that has not started after so many times `timeout_s` may log the same line for ever."""
# Arguments on CPU. Compiling takes minutes there; and with chunked prefill, a request with a seed kills the engine of
# vLLM 0.32 ("CPU Generator does not use offset").
_CPU_ARGS = ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "16384"]


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """How to start a server."""

    argv: Sequence[str]
    """Without the socket, which is added."""
    env: Mapping[str, str]
    log_path: Path
    timeout_s: float
    """Limit of the time in which the log of a starting server does not grow, and of the answer to a first request. The
    start may take `_MOST_TIMEOUTS` times as long."""


class OwnServer:
    """A context manager. No process of the server is left when it exits, or when this process dies.

    The server listens on a Unix socket in a directory that only this user can enter: its endpoints, which run what they
    are told, have no authentication.
    """

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self._directory = SocketDirectory()
        self.socket = self._directory.path / "vllm"
        self.num_restarts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it has answered a request. Raises UserError with the end of its log."""
        self._spawn()
        try:
            self._wait_until_it_serves()
        except ServerLost as error:
            self.stop()
            raise UserError(
                f"the vLLM server did not start: {error}. The end of {self.command.log_path}:\n"
                f"{last_words(self.command.log_path)}"
            ) from error

    def restart(self, *, delay_s: float) -> None:
        """Stop the server, and start it after a delay. Raises ServerLost if it does not serve."""
        self.end()
        time.sleep(delay_s)
        self._spawn()
        self.num_restarts += 1
        self._wait_until_it_serves()

    def stop(self) -> None:
        """Stop the server for good, by SIGKILL after a deadline. Repeating it is safe."""
        self.end()
        self._directory.remove()

    def end(self) -> None:
        """Stop the server until it is restarted. Requests to it then fail. Repeating it is safe."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self) -> None:
        self.command.log_path.parent.mkdir(parents=True, exist_ok=True)
        # A server that was killed has left it, and the next one could not listen there.
        self.socket.unlink(missing_ok=True)
        guardian = Path(__file__).with_name("guardian.py")
        with self.command.log_path.open("ab") as log:
            # In a session of its own, so that a signal to this process group does not kill the guardian, which has to
            # kill the server.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(guardian), *self.command.argv, "--uds", str(self.socket)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.command.env,
                start_new_session=True,
            )

    def _wait_until_it_serves(self) -> None:
        """Wait for a real answer, since a server may report healthy and die of its first request. Raises ServerLost.

        Loading and compiling a large model takes long: a server that says nothing is given up much earlier than others.
        """
        client, timeout_s = ServerClient(self.socket), self.command.timeout_s
        log_bytes = self._log_bytes()
        began_at = grew_at = time.monotonic()
        while True:
            # Another thread may call `stop` meanwhile.
            process = self._process
            if process is None:
                raise ServerLost("it was stopped")
            if (code := process.poll()) is not None:
                raise ServerLost(in_words(code))
            try:
                client.check_health(timeout_s=_PROBE_TIMEOUT_S)
                break
            except ServerLost as error:
                # Once it listens, it may log these very requests.
                if isinstance(error, NotListening) and log_bytes != (log_bytes := self._log_bytes()):
                    grew_at = time.monotonic()
                if time.monotonic() - grew_at > timeout_s:
                    raise ServerLost(
                        f"it was not healthy, and its log did not grow for {timeout_s:g} s (--grpo.vllm-timeout)"
                    ) from error
                if time.monotonic() - began_at > (most_s := _MOST_TIMEOUTS * timeout_s):
                    raise ServerLost(
                        f"it was not healthy within {most_s:g} s ({_MOST_TIMEOUTS} times --grpo.vllm-timeout)"
                    ) from error
            time.sleep(_POLL_S)
        client.try_out(timeout_s=max(timeout_s, 1.0))

    def _log_bytes(self) -> int:
        return self.command.log_path.stat().st_size


def in_words(exit_code: int) -> str:
    """Describe an exit code of the guardian, which reports signal n as 128 + n."""
    if exit_code == 128 + signal.SIGKILL:
        return "it was killed (SIGKILL), most likely because the machine's memory was used up"
    return f"it ended with {exit_code}"


def vllm_command(
    *,
    python: str | None,
    model: Path,
    dtype: str,
    gpu: str | None,
    more: Sequence[str],
    log_path: Path,
    timeout_s: float,
    environment: Mapping[str, str],
) -> ServerCommand:
    """The command line of a vLLM server. Raises UserError if that Python has no vLLM."""
    program = python or sys.executable
    check_has_vllm(program, environment)
    argv = [program, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", dtype]
    argv += ["--worker-extension-cls", EXTENSION]
    # By default vLLM insists on a KV cache for the model's whole context, which no completion here may ever need.
    argv += ["--max-model-len", "auto"]
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    argv += _CPU_ARGS if gpu is None else []
    return ServerCommand(
        argv=[*argv, *more],
        env=server_environment(environment, gpu, _only_diloco(log_path.parent / "server-path")),
        log_path=log_path,
        timeout_s=timeout_s,
    )


def server_environment(environment: Mapping[str, str], gpu: str | None, packages: Path) -> dict[str, str]:
    """The environment of the server: ours without the variables of diloco and torchrun, with its GPU, and with
    `packages` as PYTHONPATH, from where it imports our extension."""
    ours = (
        "DILOCO_",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_",
        "OMP_",
    )
    kept = {name: value for name, value in environment.items() if not name.startswith(ours)}
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **kept,
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(packages),
        **({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {}),
    }


def check_has_vllm(python: str, environment: Mapping[str, str]) -> None:
    """Raise UserError unless that Python can import vLLM."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run(
            [python, "-c", code],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"--grpo.vllm-python {python} has not answered within {_PROBE_TIMEOUT_S:g} s; name a Python interpreter"
        ) from error
    except OSError as error:
        raise UserError(f"--grpo.vllm-python {python} cannot be started: {error}") from error
    if found.returncode:
        raise UserError(
            f"{python} has no vLLM: pip install 'diloco[vllm]', name an environment that has it with "
            "--grpo.vllm-python, or do without it by --rollout hf"
        )


def _only_diloco(directory: Path) -> Path:
    """Make the directory with a link to this package only: other packages beside it would shadow the server's own."""
    directory.mkdir(parents=True, exist_ok=True)
    # Replaced atomically, since an old link may point to where this package used to be.
    new = directory / f"diloco.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(Path(diloco.__file__).resolve().parent)
    new.replace(directory / "diloco")
    return directory
