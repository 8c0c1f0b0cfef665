from __future__ import annotations

import pytest

from provisioning.errors import CommandFailed, MachineError
from provisioning.machines import jobs
from provisioning.machines.machine import Answer


class FlakyMachine:
    """A machine that gives these answers in turn; None stands for a lost connection."""

    def __init__(self, *answers: str | Answer | None) -> None:
        self.answers = list(answers)

    async def run(self, script: str) -> Answer:
        answer = self.answers.pop(0)
        if answer is None:
            raise MachineError("the connection broke")
        return answer if isinstance(answer, Answer) else Answer(0, answer, "")


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("none", None)])
async def test_a_lost_connection_is_not_the_end_of_a_job(monkeypatch, end, code):
    monkeypatch.setattr(jobs, "_POLL_S", 0.0)
    monkeypatch.setattr(jobs, "_MAX_FAILED_POLLS", 2)
    looks = list[int]()

    async def look() -> None:
        looks.append(len(machine.answers))
        if len(looks) == 1:
            raise MachineError("the connection broke")

    machine = FlakyMachine(None, "runs", "runs", None, None, end)
    assert await jobs.finished(machine, "label", "job", look) == code
    assert looks == [4, 3, 0]
    with pytest.raises(MachineError, match="broke"):
        await jobs.finished(FlakyMachine(None, None, None), "label", "job")


@pytest.mark.parametrize(("code", "is_certain"), [(9, True), (1, False)])
async def test_a_job_is_over_if_the_directory_of_its_pod_is_gone(monkeypatch, code, is_certain):
    """Not if a script fails for other reasons: there may be too many processes for the moment."""
    monkeypatch.setattr(jobs, "_POLL_S", 0.0)
    monkeypatch.setattr(jobs, "_MAX_FAILED_POLLS", 2)
    machine = FlakyMachine(*[Answer(code, "", "no such place")] * 3)
    with pytest.raises(MachineError, match="no such place") as raised:
        await jobs.finished(machine, "label", "job")
    assert isinstance(raised.value, CommandFailed) == is_certain
