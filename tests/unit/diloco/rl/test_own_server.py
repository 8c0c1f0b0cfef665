"""How a server is started and waited for, and the messages about one that cannot start or was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.errors import UserError
from diloco.rl import own_server
from diloco.rl.own_server import OwnServer, ServerCommand, check_has_vllm, in_words, vllm_command
from diloco.rl.server_client import NotListening, ServerClient, ServerLost


def test_a_python_that_hangs_is_named_by_its_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(own_server, "_PROBE_TIMEOUT_S", 0.5)
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    with pytest.raises(
        UserError, match=rf"--grpo\.vllm-python {hangs} has not answered within 0\.5 s; name a"
    ):
        check_has_vllm(str(hangs), {})


def test_a_server_that_was_killed_is_not_told_as_a_number():
    assert "SIGKILL" in in_words(137) and "memory" in in_words(137)
    assert in_words(3) == "it ended with 3"


TIMEOUT_S = 10.0


class Start:
    """A server that starts under a clock which only the wait for it moves."""

    def __init__(self, log_path: Path, *, until_s: float, logs: Callable[[float], bool]) -> None:
        """Healthy after `until_s`; `logs` says whether it writes a line at that time."""
        self.now = 0.0
        self._log_path, self._until_s, self._logs = log_path, until_s, logs
        log_path.touch()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 100 * TIMEOUT_S, "waits for ever"
        if self._logs(self.now):
            with self._log_path.open("a") as log:
                log.write("loading\n")

    def check_health(self, **_: object) -> None:
        if self.now < self._until_s:
            raise NotListening("connection refused")


@pytest.fixture
def wait_for(tmp_path, monkeypatch):
    log_path = tmp_path / "vllm.log"

    def wait_for(start: Start) -> None:
        monkeypatch.setattr(own_server, "time", start)
        monkeypatch.setattr(ServerClient, "check_health", lambda _, **named: start.check_health(**named))
        monkeypatch.setattr(ServerClient, "try_out", lambda *_, **__: None)
        command = ServerCommand(argv=[], env={}, log_path=log_path, timeout_s=TIMEOUT_S)
        with OwnServer(command) as server:
            monkeypatch.setattr(server, "_process", SimpleNamespace(poll=lambda: None))
            monkeypatch.setattr(server, "end", lambda: None)
            server._wait_until_it_serves()

    return lambda **told: wait_for(Start(log_path, **told))


def test_a_server_whose_log_grows_is_waited_for_longer(wait_for):
    wait_for(until_s=11 * TIMEOUT_S, logs=lambda now: now % 8 == 0)


def test_a_server_whose_log_has_stopped_is_given_up(wait_for):
    with pytest.raises(ServerLost, match=r"its log did not grow for 10 s \(--grpo\.vllm-timeout\)"):
        wait_for(until_s=50 * TIMEOUT_S, logs=lambda now: now < 30)


def test_a_server_that_logs_the_same_line_for_ever_is_given_up(wait_for):
    with pytest.raises(ServerLost, match=r"healthy within 120 s \(12 times --grpo\.vllm-timeout\)"):
        wait_for(until_s=50 * TIMEOUT_S, logs=lambda now: True)


def test_a_log_of_our_own_requests_is_no_progress(wait_for, monkeypatch):
    monkeypatch.setattr(Start, "check_health", lambda *_, **__: _raise(ServerLost("/health answered 503")))
    with pytest.raises(ServerLost, match="was not healthy"):
        wait_for(until_s=50 * TIMEOUT_S, logs=lambda now: True)


def _raise(error: Exception) -> None:
    raise error


def test_vllm_is_asked_for_no_longer_context_than_its_memory_holds_unless_the_user_does(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(own_server, "check_has_vllm", lambda *_: None)

    def contexts(*more: str) -> list[str]:
        command = vllm_command(
            python="python",
            model=tmp_path,
            dtype="bfloat16",
            gpu="0",
            more=more,
            log_path=tmp_path / "logs" / "vllm.log",
            timeout_s=1,
            environment={},
        )
        words = list(command.argv)
        return [words[at + 1] for at, word in enumerate(words) if word == "--max-model-len"]

    assert contexts() == ["auto"]
    # The last one counts.
    assert contexts("--max-model-len", "4096") == ["auto", "4096"]
