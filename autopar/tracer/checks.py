"""Checks of values: `if bad: raise ...` and `assert good`, where one answer alone lets a model go on."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from autopar.tracer.place import is_ours

_HERE = str(Path(__file__).parent.parent)
_CAPTURE = str(Path(__file__).parent / "capture.py")  # the file that calls the model
_NO_ERRORS = {"StopIteration", "StopAsyncIteration", "GeneratorExit"}


class Check(NamedTuple):
    """A statement that ends in an error unless its condition has one value."""

    lines: range  # the statement up to the end of its condition
    answer: bool | None  # the value that each tensor in the condition needs; None where they differ


def answer_that_goes_on() -> bool | None:
    """Find the truth of a tensor, if any other answer to the line that asks for it ends in an error.

    None where that line is no such check, and where the model may catch the error.
    """
    frames = list(_frames_of_the_model())
    if not frames or any(map(_is_caught, frames)):
        return None
    asks = frames[0]
    here = [c for c in _checks_and_tries(asks.f_code.co_filename)[0] if asks.f_lineno in c.lines]
    return min(here, key=lambda check: len(check.lines)).answer if here else None


def _frames_of_the_model() -> Iterator[Any]:
    """The frames between the question and the call of the model, innermost first, without autopar's."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        if not frame.f_code.co_filename.startswith(_HERE):
            yield frame
        frame = frame.f_back


def _is_caught(frame: Any) -> bool:
    """Whether a line runs inside a `try` of the model's own, in which an error may end."""
    name = frame.f_code.co_filename
    return not is_ours(name) and any(frame.f_lineno in lines for lines in _checks_and_tries(name)[1])


@functools.cache
def _checks_and_tries(filename: str) -> tuple[list[Check], list[range]]:
    """The checks of a file, and the lines of it from which an error may not get out."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return [], []
    checks = list[Check]()
    tries = list[range]()
    for node in ast.walk(tree):
        if _may_catch(node):
            tries.append(range(node.body[0].lineno, _end(node.body[-1])))
        elif isinstance(node, (ast.If, ast.Assert)) and (answer := _that_goes_on(node)) is not None:
            wanted = set(_wanted(node.test, answer))
            checks.append(Check(range(node.lineno, _end(node.test)), wanted.pop() if len(wanted) == 1 else None))
    return checks, tries


def _that_goes_on(node: ast.If | ast.Assert) -> bool | None:
    """The value of a condition where the other one leads to an error; None where neither or both do."""
    if isinstance(node, ast.Assert):
        return True
    is_error = [bool(block) and _is_error(block[-1]) for block in (node.body, node.orelse)]
    return is_error[1] if sum(is_error) == 1 else None


def _is_error(statement: ast.stmt) -> bool:
    """Whether a statement raises, and not to end an iteration."""
    return isinstance(statement, ast.Raise) and not _NO_ERRORS & _names(statement)


def _may_catch(node: ast.AST) -> TypeGuard[ast.Try | ast.With]:
    """Whether an error in the body of a statement may end there."""
    if isinstance(node, ast.With):
        return any("suppress" in _names(item.context_expr) for item in node.items)
    return bool(getattr(node, "handlers", ()))


def _names(part: ast.AST) -> set[str]:
    """The names and attributes in a part of a program."""
    found = list(ast.walk(part))
    return {n.id for n in found if isinstance(n, ast.Name)} | {n.attr for n in found if isinstance(n, ast.Attribute)}


def _wanted(condition: ast.expr, value: bool) -> Iterator[bool]:
    """The value that each term of a condition needs, if the condition has to have this one."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _wanted(condition.operand, not value)
    elif isinstance(condition, ast.BoolOp):
        for term in condition.values:
            yield from _wanted(term, value)
    else:
        yield value


def _end(node: ast.stmt | ast.expr) -> int:
    """The line behind a statement or an expression."""
    return 1 + (node.end_lineno or node.lineno)
