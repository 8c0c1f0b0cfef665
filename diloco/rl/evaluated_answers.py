"""Which answers may be scored by those generators of reasoning-gym that evaluate them as Python.

Answers may come from rollout peers, that is, from strangers, and some scorers pass them to eval, or to sympy's
parse_expr, which calls eval too. They are given only lists of numbers and single characters, boards, and arithmetic
over the variables of the right answer: nothing that runs code, or has exponents that take for ever.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection
from typing import Any

_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify|lambdify)\(|\bpickle\b|\byaml\.")
_EVALUATE_THEIR_OWN = frozenset({"bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"})
"""Modules that evaluate only what they have made themselves, or that have a parser of that name."""
_BOARD = re.compile(r"[\dQ_\s]*", re.ASCII)
_SCIENTIFIC_OR_COMMENT = re.compile(r"[\d._]e|#", re.IGNORECASE)
"""sympy computes 1e999999999 exactly."""
_FUNCTIONS = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "sqrt", "log", "ln"})
_CONSTANTS = frozenset({"C", "E", "pi"})
_LONGEST_LIST, _LONGEST_EXPRESSION = 100_000, 1000
_LARGEST = 1e30
"""Of numbers, and of degrees: a variable counts as 2, so that x**99 is below it."""
_LARGEST_EXPONENT = 100.0


class _NotAllowed(ValueError):
    pass


def evaluates_answers(dataset: Any) -> bool:
    """Whether the scorer of a generator may do so, going by the source of its module."""
    module = sys.modules[type(dataset).score_answer.__module__]
    if module.__name__.rpartition(".")[2] in _EVALUATE_THEIR_OWN:
        return False
    try:
        return _EVALUATES.search(inspect.getsource(module)) is not None
    except (OSError, TypeError):
        return True


def may_be_evaluated(answer: str, gold: str) -> bool:
    """Whether evaluating the answer can do no harm; `gold` is the right one, and names the variables."""
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
        return _size(tree, _CONSTANTS.union(re.findall(r"[^\W\d]+", gold)) - _FUNCTIONS) <= _LARGEST
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


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


def _size(node: ast.expr, names: Collection[str], *, in_exponent: bool = False) -> float:
    """A bound on how large the value is, and its degree. Raises _NotAllowed for what is no plain arithmetic.

    Exponents are polynomials over numbers. What is subtracted or divided there could be tiny, and its inverse huge.
    """

    def size(part: ast.expr) -> float:
        return _size(part, names, in_exponent=in_exponent)

    match node:
        case ast.Constant(value=int() | float() as value):
            return max(2.0, abs(value), 1 / abs(value) if value else 0.0)
        case ast.Name(id=name) if name in names:
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
        case ast.Call(func=ast.Name(id="exp"), args=[argument], keywords=[]) if not in_exponent:
            return 3.0 ** _exponent(argument, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
            name in _FUNCTIONS and not in_exponent
        ):
            return size(argument)
    raise _NotAllowed


def _exponent(node: ast.expr, names: Collection[str]) -> float:
    size = _size(node, names, in_exponent=True)
    if size > _LARGEST_EXPONENT:
        raise _NotAllowed
    return size
