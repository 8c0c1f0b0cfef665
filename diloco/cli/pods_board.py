"""What becomes of each pod while a command works on them: a bar for each where a person looks, plain lines else."""

from __future__ import annotations

import functools
import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from diloco.cli.pods_flags import line_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from provisioning.ledger.row import State
    from provisioning.swarm.fleet import Fleet


class Board:
    """Lines on stderr at any time; bars below them inside `with`, if stderr is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def say(self, name: str, text: str) -> None:
        """One line of progress; stdout is for results."""
        if self._bars is None:
            print(line_of(name, text), file=self._stream, flush=True)
        else:
            self._bars.console.print(line_of(name, text), markup=False, highlight=False, soft_wrap=True)

    def attach(self, fleet: Fleet) -> None:
        """Show what becomes of these pods. Says nothing more where nobody would see it move."""
        if self._stream.isatty():
            fleet.renters.listen(self._on_state)
            fleet.progress_of = lambda name: functools.partial(self._show, name)

    def __enter__(self) -> Board:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.fields[pod]}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bars, self._bars = self._bars, None
        self._tasks.clear()
        if bars is not None:
            bars.stop()

    def _on_state(self, name: str, state: State) -> None:
        from provisioning.ledger.row import State

        if state == State.GONE and name in self._tasks and self._bars is not None:
            self._bars.remove_task(self._tasks.pop(name))
        elif state != State.GONE:
            self._show(name, str(state), 1.0 if state in (State.SYNCED, State.RUNNING) else None)

    def _show(self, name: str, what: str, share: float | None) -> None:
        """A share that nobody knows is a bar that moves to and fro."""
        if self._bars is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(what, total=None, pod=name)
        task = self._tasks[name]
        if share is None:
            self._bars.reset(task, start=True, total=None, description=what)
            # rich keeps the total that it has where it is given None.
            self._bars.tasks[self._bars.task_ids.index(task)].total = None
        else:
            self._bars.update(task, total=1.0, completed=share, description=what)
