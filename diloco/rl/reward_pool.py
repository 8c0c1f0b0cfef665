"""Judges completions in several processes, where one would take long: rewards may run tests or ask a service.
Environments reply in them, too.

Processes, not threads: time limits (rl/evaluated_answers.py) need a main thread, and the user's code may need it, too.
They see no GPU, and start without torch, which the processes of multiprocessing would import with the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

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
_HAS_ENDED = "the process has ended: the machine's memory is used up, or the reward or environment ends it"

_Outcome = tuple[bool, Any]
"""Whether an action has succeeded, and what it has returned; if not, why."""

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
        *,
        no_verdict: T | None = None,
    ) -> list[T]:
        """What `here` returns for each example and what the model has said, in this order; `here` asks the question.

        What fails in another process is judged here again, so errors are those of `here`. What ends its process is
        judged once more alone, as it may not be to blame if the memory is used up, but never here, where it would end
        the trainer. If it fails again, `no_verdict` is returned for it. Raises DilocoError if there is none.
        """
        began, found = self._clock(), list[T]()
        for number, one in enumerate(asked):
            spent_s = self._clock() - began
            if self._opened and spent_s >= PAYS_S and spent_s * (len(asked) - number) >= PAYS_S * number:
                return found + self._elsewhere(question, here, asked[number:], no_verdict)
            found.append(here(*one))
        return found

    def _elsewhere(
        self,
        question: Question,
        here: Callable[[Example, Sequence[str]], T],
        asked: Sequence[tuple[Example, Sequence[str]]],
        no_verdict: T | None,
    ) -> list[T]:
        found, reasons = list[T](), list[str]()
        requests = [_outcome(partial(pickle.dumps, (question, *one))) for one in asked]
        for one, request, first in zip(asked, requests, self._answers(requests), strict=True):
            succeeded, result = first or self._alone(request[1])
            if succeeded:
                found.append(result)
            elif first:
                found.append(here(*one))
            elif no_verdict is not None:
                found.append(no_verdict)
            else:
                raise DilocoError(
                    f"A completion cannot be judged: it has ended its process, and failed again alone: {result}."
                )
            if not (first and succeeded):
                reasons.append(_HAS_ENDED if first is None else result)
        if reasons:
            log.warning(
                "%d rewards failed in processes of their own; the first: %s", len(reasons), reasons[0]
            )
        return found

    def _alone(self, request: bytes) -> _Outcome:
        """The outcome of a question in a new process, after all others have ended."""
        for process in list(self._processes):
            self._end(process)
        process = _Process(pickle.dumps(self._opened))
        try:
            outcome = process.answer()
            if outcome and outcome[0]:
                process.ask(0, request)
                outcome = process.answer()
        finally:
            process.end()
        code = process.process.returncode
        return outcome or (False, f"{_HAS_ENDED} ({f'signal {-code}' if code < 0 else f'exit code {code}'})")

    def _answers(self, requests: Sequence[_Outcome]) -> list[_Outcome | None]:
        """The outcome of each question; None if it has ended its process. Those not pickled are returned as they are.

        Questions fail that no process is left for, because none opens the task: then no more processes are started.
        """
        outcomes: dict[int, _Outcome | None] = {}
        left = deque((number, request) for number, (is_pickled, request) in enumerate(requests) if is_pickled)
        self._start(len(left))
        why = ""
        try:
            while self._processes and (left or any(one.asked is not None for one in self._processes)):
                for process in self._processes:
                    if left and process.is_idle:
                        process.ask(*left.popleft())
                busy: dict[Any, _Process] = {one.replies: one for one in self._processes if not one.is_idle}
                for replies in wait(list(busy)):
                    why = self._take(busy[replies], outcomes, len(left)) or why
        finally:
            # Their answers, if this one is interrupted, are not to be taken for those to later questions.
            for process in [one for one in self._processes if one.asked is not None]:
                self._end(process)
        if left and not outcomes:
            self._opened = None
        outcomes |= {number: (False, why) for number, _ in left}
        return [outcomes[number] if request[0] else request for number, request in enumerate(requests)]

    def _start(self, num_questions: int) -> None:
        for process in [one for one in self._processes if one.process.poll() is not None]:
            self._end(process)
        while len(self._processes) < min(_num_processes(), num_questions):
            self._processes.append(_Process(pickle.dumps(self._opened)))

    def _take(self, process: _Process, outcomes: dict[int, _Outcome | None], num_left: int) -> str:
        """Take what a process has sent. Ends it if it has not opened the task, and returns why."""
        number, outcome = process.asked, process.answer()
        if number is not None:
            outcomes[number] = outcome
            if outcome is None:
                self._end(process)
                # Otherwise few completions could end all processes, and nobody would judge the others.
                if num_left:
                    self._processes.append(_Process(pickle.dumps(self._opened)))
            return ""
        process.is_open, why = outcome or (False, _HAS_ENDED)
        if process.is_open:
            return ""
        self._end(process)
        return f"the task cannot be opened there: {why}"

    def _end(self, process: _Process) -> None:
        self._processes.remove(process)
        process.end()


def _num_processes() -> int:
    """At most so many for this trainer, which shares the machine's cores with other ranks and peers."""
    # The number of threads of one rank: its share of the cores, as `thread_settings` and the user set it.
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    share = max(int(threads), 1) if threads.isdecimal() else num_cores()
    return min(share, num_cores(), _MOST_PROCESSES)


class _Process:
    """A process that runs `work`. It sends one outcome of opening the task, then one for each question."""

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
        assert self.process.stdout is not None
        self.replies: IO[bytes] = self.process.stdout
        self.is_open = False
        self.asked: int | None = None
        """The number of the question that it has not answered yet."""
        self._send(opened)

    @property
    def is_idle(self) -> bool:
        return self.is_open and self.asked is None

    def ask(self, number: int, request: bytes) -> None:
        self.asked = number
        self._send(request)

    def _send(self, message: bytes) -> None:
        assert self.process.stdin is not None
        # If the process has ended, `answer` notices.
        with contextlib.suppress(OSError):
            self.process.stdin.write(message)
            self.process.stdin.flush()

    def answer(self) -> _Outcome | None:
        """The outcome of opening the task, or of the last question; None if the process has ended."""
        self.asked = None
        try:
            outcome: _Outcome = pickle.load(self.replies)
        except Exception:  # noqa: BLE001 - half a message may fail in any way
            return None
        return outcome

    def end(self) -> None:
        """End the process and what it has started, at once. Repeating it is safe."""
        # It leads a session of its own, which may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A question that it has not read cannot be sent any more.
        with contextlib.suppress(OSError), self.process:
            pass


def work() -> None:
    """Open the task that standard input brings, then answer one question after the other until the input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The user's code may read and print.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    # It may fork, too. If its children held the pipes, the trainer would not notice the end of this process.
    for pipe in (requests, replies):
        os.register_at_fork(after_in_child=partial(os.dup2, null, pipe.fileno(), inheritable=False))
    is_open, task = _outcome(lambda: pickle.load(requests)())
    pickle.dump((is_open, "" if is_open else task), replies)
    replies.flush()
    while is_open:
        try:
            question, *one = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_outcome(partial(getattr(task, question), *one)), replies)
        replies.flush()


def _outcome(action: Callable[[], Any]) -> _Outcome:
    try:
        return True, action()
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises; the trainer then judges by itself
        return False, f"{type(error).__name__}: {error}"
