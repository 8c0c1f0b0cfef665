"""Decides which answers are safe for those scorers of reasoning-gym that evaluate answers as Python.

Answers may come from rollout peers, that is, from strangers, and some scorers pass them to eval, or to sympy's
parse_expr, which calls eval too. Such scorers get only lists of numbers and single characters, boards, and arithmetic
over the variables of the right answer, with functions only if the right answer has some: nothing that runs code, and no
exponents that take forever to compute. sympy may still take forever to simplify an answer, so time is limited, too.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify|lambdify)\(|\bpickle\b|\byaml\.")
_EVALUATE_THEIR_OWN = frozenset({"bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"})
"""Modules that match _EVALUATES but evaluate only texts of their own, or call a parser of their own by such a name."""
_BOARD = re.compile(r"[\dQ_\s]*", re.ASCII)
_SCIENTIFIC_OR_COMMENT = re.compile(r"[\d._]e|#", re.IGNORECASE)
"""sympy computes 1e999999999 exactly."""
_FUNCTIONS = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "sqrt", "log", "ln", "exp"})
_CONSTANTS = frozenset({"C", "E", "pi"})
_LONGEST_LIST, _LONGEST_EXPRESSION = 100_000, 1000
_LARGEST = 1e30
"""Limit of numbers and of degrees: a variable counts as 2, so x**99 is below the limit."""
_LARGEST_EXPONENT = 100.0
_AGAIN_S = 0.1


class _NotAllowed(ValueError):
    pass


def evaluates_answers(dataset: Any) -> bool:
    """Whether the scorer of a generator may evaluate answers as Python, judging by the source of its module."""
    module = sys.modules[type(dataset).score_answer.__module__]
    if module.__name__.rpartition(".")[2] in _EVALUATE_THEIR_OWN:
        return False
    try:
        return _EVALUATES.search(inspect.getsource(module)) is not None
    except (OSError, TypeError):
        return True


def may_be_evaluated(answer: str, gold: str) -> bool:
    """Whether evaluating the answer is harmless; `gold` is the right answer, whose variables are allowed."""
    if len(answer) > _LONGEST_LIST or _SCIENTIFIC_OR_COMMENT.search(answer):
        return False
    if _BOARD.fullmatch(answer):
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        if _is_literal(tree):
            return True
        if len(answer) > _LONGEST_EXPRESSION:
            return False
        words = frozenset(re.findall(r"[^\W\d]+", gold))
        # Functions are allowed only if the right answer has some: otherwise they only cost time.
        names = (words | _CONSTANTS) - _FUNCTIONS
        return _size(tree, names | _FUNCTIONS if words & _FUNCTIONS else names) <= _LARGEST
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer, and again if the block catches it. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise TimeoutError(f"it took over {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_literal(node: ast.expr) -> bool:
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return all(map(_is_literal, parts))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            return True
        case ast.Constant(value=str(text)):
            # sympy reads texts as expressions, and evaluates them.
            return len(text) <= 1
        case ast.Constant(value=int() | float() | None):
            return True
    return False


def _size(node: ast.expr, names: frozenset[str], *, in_exponent: bool = False) -> float:
    """A bound on the value and on the degree. Raises _NotAllowed for anything but plain arithmetic.

    In exponents, divisors and exponents must be constants: a difference could be tiny, and its inverse huge.
    """

    def size(part: ast.expr) -> float:
        return _size(part, names, in_exponent=in_exponent)

    match node:
        case ast.Constant(value=int() | float() as value):
            return max(2.0, abs(value), 1 / abs(value) if value else 0.0)
        case ast.Name(id=name) if name in names and name not in _FUNCTIONS:
            return 2.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return size(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return size(left) + size(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return size(left) * size(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if not in_exponent or isinstance(
            right, ast.Constant
        ):
            return size(left) * size(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if not in_exponent or isinstance(
            right, ast.Constant
        ):
            return size(left) ** _exponent(right, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
            name in names & _FUNCTIONS and not in_exponent
        ):
            return 3.0 ** _exponent(argument, names) if name == "exp" else size(argument)
    raise _NotAllowed


def _exponent(node: ast.expr, names: frozenset[str]) -> float:
    size = _size(node, names, in_exponent=True)
    if size > _LARGEST_EXPONENT:
        raise _NotAllowed
    return size
