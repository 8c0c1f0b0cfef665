"""Judges completions in several processes, where one would take long: rewards may run tests or ask a service.
Environments reply in them, too.

Processes, not threads: time limits (rl/evaluated_answers.py) need a main thread, and the user's code may need it, too.
They see no GPU, and start without torch, which the processes of multiprocessing would import with the trainer.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from diloco.errors import DilocoError
from peers.system import num_cores, with_parent

if TYPE_CHECKING:
    from diloco.rl.tasks import Example, Task

T = TypeVar("T")
Question = Literal["reply", "scores", "is_solved"]
"""The task's method that is asked."""

PAYS_S = 2.0
"""Other processes judge what is left after so long, if it would take at least as long again."""
_MOST_PROCESSES = 16

log = logging.getLogger(__name__)


class RewardPool:
    """Starts its processes when they pay, and keeps them. The kernel ends them with the thread that starts them."""

    def __init__(
        self, opened: Callable[[], Task] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`opened`, which is pickled, opens the task in each process; None: there are no other processes."""
        self._opened, self._clock = opened, clock
        self._processes: list[_Process] = []

    def each(
        self,
        question: Question,
        here: Callable[[Example, Sequence[str]], T],
        asked: Sequence[tuple[Example, Sequence[str]]],
    ) -> list[T]:
        """What `here` returns for each example and what the model has said, in this order; `here` asks the question.

        What fails in another process is judged here again, so errors are those of `here`. Raises DilocoError if a
        process has ended.
        """
        began, found = self._clock(), list[T]()
        for number, one in enumerate(asked):
            spent_s = self._clock() - began
            if self._opened and spent_s >= PAYS_S and spent_s * (len(asked) - number) >= PAYS_S * number:
                return found + self._elsewhere(question, here, asked[number:])
            found.append(here(*one))
        return found

    def _elsewhere(
        self,
        question: Question,
        here: Callable[[Example, Sequence[str]], T],
        asked: Sequence[tuple[Example, Sequence[str]]],
    ) -> list[T]:
        while len(self._processes) < min(num_cores(), _MOST_PROCESSES, len(asked)):
            self._processes.append(_Process(pickle.dumps(self._opened)))
        idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._processes:
            idle.put(process)

        def answer(request: bytes) -> tuple[bool, Any]:
            process = idle.get()
            try:
                return process.answer(request)
            finally:
                idle.put(process)

        found, reasons = list[T](), list[str]()
        threads = ThreadPoolExecutor(len(self._processes))
        try:
            answers = threads.map(answer, [pickle.dumps((question, *one)) for one in asked])
            for one, (is_answered, value) in zip(asked, answers, strict=True):
                found.append(value if is_answered else here(*one))
                if not is_answered:
                    reasons.append(value)
        finally:
            threads.shutdown(cancel_futures=True)
        if reasons:
            log.warning(
                "%d rewards failed in processes of their own, and were computed one at a time instead: %s",
                len(reasons),
                reasons[0],
            )
        return found


class _Process:
    """A process that runs `work`."""

    def __init__(self, opened: bytes) -> None:
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"
        self.process = subprocess.Popen(
            with_parent([sys.executable, "-P", "-c", start]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One thread for each, as there is a process for each core.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            # Ctrl-C in the terminal is for the trainer, whose end is theirs.
            start_new_session=True,
        )
        self._opened = opened

    def answer(self, request: bytes) -> tuple[bool, Any]:
        """As `_outcome` of the question. Raises DilocoError if the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(self._opened + request)
            self.process.stdin.flush()
            self._opened = b""
            reply: tuple[bool, Any] = pickle.load(self.process.stdout)
            return reply
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise DilocoError(
                "a process that computes rewards has ended: the machine's memory is used up, or the reward or "
                "environment ends the process; the log may say more"
            ) from error


def work() -> None:
    """Open the task that standard input brings, then answer one question after the other until the input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The user's code may read and print.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    is_open, task = _outcome(pickle.load(requests))
    while True:
        try:
            question, *one = pickle.load(requests)
        except EOFError:
            return
        reply = _outcome(partial(getattr(task, question), *one)) if is_open else (False, task)
        pickle.dump(reply, replies)
        replies.flush()


def _outcome(action: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether it has succeeded, and what it has returned; if not, why."""
    try:
        return True, action()
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises; the trainer then judges by itself
        return False, f"{type(error).__name__}: {error}"
