"""Mathematical answers: extracts the boxed result, and compares expressions by math-verify."""

from __future__ import annotations

import logging
import threading

from diloco.errors import UserError
from diloco.rl.answers import number_of

_TIMEOUT_S = 5
_BOXES = ("\\boxed", "\\fbox")


def boxed(solution: str) -> str:
    """The content of the last \\boxed{...} of a solution; empty if there is none."""
    start = max(solution.rfind(box) for box in _BOXES)
    opening = solution.find("{", start) if start >= 0 else -1
    if opening < 0:
        return ""
    depth = 0
    for index in range(opening, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[index], 0)
        if depth == 0:
            return solution[opening + 1 : index].strip()
    return ""


def equivalent(answer: str, gold: str) -> bool:
    """Whether two answers are the same number or expression. An empty answer equals nothing."""
    if not answer.strip() or not gold.strip():
        return False
    left, right = number_of(answer), number_of(gold)
    if left is not None and right is not None:
        return left == right
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError(
            "answers of --dataset math are judged by math-verify: pip install 'diloco[grpo]'"
        ) from error
    # math-verify implements timeouts by SIGALRM, which works in the main thread only.
    timeout_s = _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    wanted = parse(f"${gold}$", parsing_timeout=timeout_s)
    given = parse(f"${_undelimited(answer)}$", parsing_timeout=timeout_s)
    return bool(wanted and given) and bool(verify(wanted, given, timeout_seconds=timeout_s))


def _undelimited(answer: str) -> str:
    """The LaTeX without surrounding dollars and \\boxed."""
    answer = answer.strip().strip("$").strip()
    return boxed(answer) if answer.startswith(_BOXES) else answer
