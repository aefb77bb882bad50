"""Find out whether a call goes by what the call before has left on its modules, and let the graph keep that.

    before   if not self.ready: ...; self.ready = True      if self.mean is None: ...; self.mean = x.mean(0)
    after    graph.sets   = (("ready", True),)              graph.updates = (("attribute", "mean"),)

The model is captured again in the state in which a call leaves it. What that capture does not go by is not kept, such
as a count of calls; a tensor that is an attribute gets a stand-in, which says so where it is read. What it goes by is
set on the modules after each call, where the next call looks at it: a flag that is set once gives two programs. Where
every call would be another program, it is a letter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autopar.graph.graph import Graph, info
from autopar.graph.kept import NotKept
from autopar.letters import NotCaptured
from autopar.tracer.changes import UNKNOWN, Left, states_of
from autopar.tracer.contents import dict_of
from autopar.tracer.place import defined
from autopar.tracer.watched import watched


class Captured(NamedTuple):
    """A graph, and what remains to be looked at after its capture."""

    graph: Graph
    made: list[weakref.ref[Tensor]]  # all tensors of the capture
    refuse_kept: Callable[[], None]  # raises a letter where a hook has kept one
    left: list[Left]  # attributes that forward has set


class Capture(Protocol):
    """Runs the model once on fake tensors; attributes that it `keeps` are updates."""

    def __call__(self, keeps: frozenset[str] = ...) -> Captured: ...


def steady(root: torch.nn.Module, first: Captured, capture: Capture) -> Captured:
    """The capture with what a call leaves for the next, where that goes by it; else the first one."""
    looked_at: set[str] = set()
    left = _merged([], first.left)
    second = _after(root, left, capture, looked_at)
    goes_on = _merged(left, second.left)
    tensors = _read_by(second.graph, left)
    is_alike = _text(second) == _text(first)
    if is_alike and not looked_at and not tensors:
        return _leaving(first, frozenset())
    third = _after(root, goes_on, capture, looked_at)
    tensors |= _read_by(third.graph, goes_on)
    if not is_alike and _text(third) not in (_text(first), _text(second)):
        raise _letter(first, "each call is another program")
    numbers = {one.name for one in goes_on if one.is_plain and (not is_alike or _is_kept(one, looked_at))}
    if not all(one.is_plain or one.is_tensor for one in left):
        servable = [one for one in left if one.name in numbers | tensors]
        if _text(_after(root, servable, capture, looked_at)) != _text(second):
            raise _letter(first, "what it sets there is not a number, flag, word or tensor")
    if gradients := [one for one in left if one.name in tensors and one.value.requires_grad]:
        raise _letter(first._replace(left=gradients), "it has a gradient of the call before", "x.detach()")
    kept = frozenset(numbers | tensors)
    return _leaving(capture(keeps=kept), kept)


def _leaving(captured: Captured, kept: frozenset[str]) -> Captured:
    """The capture whose graph sets the numbers that are kept, and a stand-in for each tensor that is not."""
    sets = []
    for one in captured.left:
        if one.is_plain and one.name in kept:
            sets.append((one.name, one.value))
        elif one.is_tensor and one.name not in kept and len(one.path) == 1:
            sets.append((one.name, NotKept(one.name, is_attribute=True)))
    return captured._replace(graph=replace(captured.graph, sets=tuple(sets)))


def _text(captured: Captured) -> str:
    return str(captured.graph)


def _letter(captured: Captured, why: str, advice: str = "") -> NotCaptured:
    names = dict.fromkeys(one.name for one in captured.left)
    return NotCaptured(
        f"forward changes {', '.join(names)} and goes by it: {why}",
        at=defined(type(captured.left[0].module).forward),
        advice=advice or "a buffer that forward writes (self.step.add_(1)), or an attribute that is set between calls",
    )


def _is_kept(one: Left, looked_at: set[str]) -> bool:
    """Whether a number was looked at, or is a flag or a word, of which nobody knows."""
    return one.name in looked_at or type(one.value) not in (int, float)


def _merged(before: Sequence[Left], later: Sequence[Left]) -> list[Left]:
    """All that two calls have left; the later one counts where both speak of one place."""
    return list({one.name: one for one in (*before, *later)}.values())


def _read_by(graph: Graph, left: Sequence[Left]) -> set[str]:
    """Names of tensors that were left, and that a graph reads."""
    read = {name for node in graph.nodes if info(node).kind == "buffer" for name in (info(node).key, *info(node).names)}
    return {one.name for one in left if one.is_tensor and one.name in read}


def _after(root: torch.nn.Module, left: Sequence[Left], capture: Capture, looked_at: set[str]) -> Captured:
    """Capture a call of modules that hold what was left; they are restored afterwards."""
    with _holding(root, left, looked_at):
        return capture()


@contextlib.contextmanager
def _holding(root: torch.nn.Module, left: Sequence[Left], looked_at: set[str]) -> Iterator[None]:
    before = states_of(root)
    try:
        for one in left:
            if one.value is not UNKNOWN:
                _put(vars(one.module), one.path, _stand_in(one, looked_at))
        yield
    finally:
        for state in before:
            state.restore()


def _put(holder: Any, path: Sequence[Any], value: Any) -> None:
    """Set what stands under a path; a list grows by one entry where it is short of it."""
    key, *rest = path
    if rest:
        inner = holder[key]
        _put(inner if isinstance(inner, (list, dict)) else dict_of(inner), rest, value)
    elif isinstance(holder, list):
        holder[key : key + 1] = [value]
    else:
        holder[key] = value


def _stand_in(one: Left, looked_at: set[str]) -> Any:
    if one.is_tensor:
        return torch.empty(one.value.shape, dtype=one.value.torch_dtype, device="meta")
    if type(one.value) in (int, float):
        return watched(one.value, one.name, looked_at)
    return one.value
