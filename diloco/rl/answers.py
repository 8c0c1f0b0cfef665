"""Parses completions into answer and reasoning, and compares answers: texts, numbers, and, by math-verify, LaTeX."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from fractions import Fraction

_ANSWER = re.compile(r"<SOLUTION>(.*?)</SOLUTION>", re.DOTALL)
_REASONING = re.compile(
    r"<start_working_out>(.*?)(?:<end_working_out>|</start_working_out>)|<think>(.*?)</think>", re.DOTALL
)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_RATIO = re.compile(r"[-+]?\d+/\d+")
_CURRENCIES = "$€£"
# Longer texts are not parsed as numbers: a Fraction of extreme size would take minutes.
_LONGEST_NUMBER = 100
_MATH_TIMEOUT_S = 5
_BOXES = ("\\boxed", "\\fbox")


@dataclass(frozen=True)
class Completion:
    """The parts of a completion. A part that is missing or occurs twice is empty."""

    text: str
    answer: str
    reasoning: str
    trailing: str
    """The text after the answer."""
    is_strict: bool
    """Whether the completion is the reasoning, then the answer, and nothing else."""

    @property
    def has_answer(self) -> bool:
        return bool(self.answer)


def parsed(text: str) -> Completion:
    """Parse a completion: reasoning in <start_working_out> or <think>, the answer in <SOLUTION>."""
    answers = list(_ANSWER.finditer(text))
    one = answers[0] if len(answers) == 1 and text.count("<SOLUTION>") == 1 else None
    answer = one[1].strip() if one else ""
    reasonings = list(_REASONING.finditer(text))
    first = reasonings[0] if len(reasonings) == 1 else None
    reasoning = (first[1] or first[2] or "").strip() if first else ""
    outside = text.replace(one[0], "", 1).replace(first[0], "", 1) if one and first else text
    in_order = bool(one and first and first.end() <= one.start())
    return Completion(
        text=text,
        answer=answer,
        reasoning=reasoning,
        trailing=text[one.end() :].strip() if one else "",
        is_strict=bool(answer and reasoning) and in_order and not outside.strip(),
    )


def number_of(text: str) -> Fraction | None:
    """The exact value of a number such as 1,200 or 1200 or 1200.0 or $1,200; None for any other text."""
    text = text.strip().strip("".join(_CURRENCIES)).strip()
    text = re.sub(r"^([-+])\s*[$€£]?\s*", r"\1", text).removesuffix("%").rstrip().rstrip(".")
    if len(text) > _LONGEST_NUMBER:
        return None
    if _GROUPED.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if _RATIO.fullmatch(text) and not text.endswith("/0"):
        try:
            return Fraction(text)
        except ZeroDivisionError:
            return None
    return None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two answers are the same number, or the same text up to spaces and case. "" equals nothing."""
    if not answer.strip():
        return False
    left, right = number_of(answer), number_of(gold)
    if left is not None and right is not None:
        return left == right
    return " ".join(answer.split()).casefold() == " ".join(gold.split()).casefold()


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
    from math_verify import parse, verify

    # math-verify implements timeouts by SIGALRM, which works in the main thread only.
    timeout_s = _MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    wanted = parse(f"${gold}$", parsing_timeout=timeout_s)
    given = parse(f"${_undelimited(answer)}$", parsing_timeout=timeout_s)
    return bool(wanted and given) and bool(verify(wanted, given, timeout_seconds=timeout_s))


def _undelimited(answer: str) -> str:
    """The LaTeX without surrounding dollars and \\boxed."""
    answer = answer.strip().strip("$").strip()
    return boxed(answer) if answer.startswith(_BOXES) else answer
