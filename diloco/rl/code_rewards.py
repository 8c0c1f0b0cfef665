"""Rewards for code, by the share of tests that it passes in the sandbox."""

from __future__ import annotations

import ast
import re

from diloco.rl.answers import Completion
from diloco.rl.sandbox.run import Verdict, run_tests
from diloco.rl.tasks import Example, Reward, answered, reasoned

_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
# Verdicts are cached: completions of a group are often identical, and each is judged for its reward and as solved.
_MAX_CACHED = 512
_verdicts: dict[tuple[str, str, tuple[str, ...]], Verdict] = {}


def code_rewards() -> tuple[Reward, ...]:
    return (
        Reward("pass_rate", 0.7, pass_rate),
        Reward("syntax", 0.1, compiles),
        Reward("answer_tag", 0.1, answered),
        Reward("thinking", 0.1, reasoned),
    )


def code_of(completion: Completion) -> str:
    """The code of an answer, without its Markdown fence if it has one."""
    match = _FENCE.search(completion.answer)
    return match[1] if match else completion.answer


def compiles(completion: Completion, _example: Example) -> float:
    """1 if the answer parses as Python and is not empty, else 0."""
    try:
        tree = ast.parse(code_of(completion))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return float(bool(tree.body))


def pass_rate(completion: Completion, example: Example) -> float:
    verdict = judged(completion, example)
    return verdict.num_passed / verdict.num_tests if verdict.num_tests else 0.0


def passes_all(completion: Completion, example: Example) -> bool:
    verdict = judged(completion, example)
    return verdict.num_tests > 0 and verdict.num_passed == verdict.num_tests


def judged(completion: Completion, example: Example) -> Verdict:
    """Run the tests of an example on a completion's code. Code that does not parse is not run and fails all tests."""
    tests = tuple(example.data["tests"])
    if not compiles(completion, example):
        return Verdict(num_passed=0, num_tests=len(tests))
    key = (code_of(completion), str(example.data.get("setup") or ""), tests)
    if key not in _verdicts:
        while len(_verdicts) >= _MAX_CACHED:
            del _verdicts[next(iter(_verdicts))]
        _verdicts[key] = run_tests(key[0], tests, setup=key[1])
    return _verdicts[key]
