"""`Rehearsal`: one axis whose devices are threads of this process, on which a local form runs without a process group.

`convert` and `start` have no kernel in a program: they are written out as collectives before it runs. In a thread of a
rehearsal they exchange tensors with the other threads, forward and backward, so that a form can be tried when its op is
planned. `messages` counts what was sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.sharding.convert import LocalStep
from autopar.sharding.placement import part

AXIS = "rehearsed"
_TIMEOUT_S = 30.0  # a device that computes longer between two messages is given up
_ENDED = object()  # a device that has run holds this out: nobody may wait for more of it
_OF_THREAD = threading.local()
T = TypeVar("T")


class Rehearsal:
    """Threads that stand for the devices of one axis."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages = Counter[str]()
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self._held: list[Any] = [None] * size

    def run(self, body: Callable[[int], T]) -> list[T]:
        """The results of `body(index)` by device; an error of one of them is raised here."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def of(index: int) -> None:
            _OF_THREAD.here = self, index
            try:
                results[index] = body(index)
                self._all_hold(index, _ENDED)
            except BaseException as e:
                if not isinstance(e, threading.BrokenBarrierError):
                    errors.append(e)
                self._barrier.abort()

        threads = [threading.Thread(target=of, args=(i,), daemon=True) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._barrier.broken:
            raise RuntimeError(f"a device waits for a message for more than {_TIMEOUT_S:g} seconds")
        return results

    def convert(self, index: int, x: Tensor, steps: str) -> Tensor:
        """The result of steps of a conversion on one device."""
        result = x
        for step in LocalStep.parse_all(steps):
            result = self._after(index, result, step)
        return result.clone()

    def _after(self, index: int, x: Tensor, step: LocalStep) -> Tensor:
        if step.kind == "lodge":
            return x if index == 0 else torch.zeros_like(x)
        if step.kind == "slice":
            return self._part(index, x, step.dims[0])
        parts = self.exchanged(index, x, step.kind)
        if step.kind == "all_reduce":
            return torch.stack(parts).sum(0, dtype=x.dtype)
        if step.kind == "all_reduce_max":
            return torch.stack(parts).amax(0)
        if step.kind == "all_gather":
            return torch.cat(parts, step.dims[0][0])
        if step.kind == "reduce_scatter":
            return self._part(index, torch.stack(parts).sum(0, dtype=x.dtype), step.dims[0])
        if step.kind == "all_to_all":
            return self._part(index, torch.cat(parts, step.dims[0][0]), step.dims[1])
        raise NotImplementedError(f"{step.kind} in a local form that is tried")

    def _part(self, index: int, x: Tensor, cut: tuple[int, int, tuple[int, ...]]) -> Tensor:
        """The part of a tensor that a device keeps; raises where blocks are cut one by one."""
        dim, size, blocks = cut
        if blocks:
            raise NotImplementedError("blocks in a local form that is tried")
        return x.narrow(dim, *part(size, self.size, index))

    def exchanged(self, index: int, x: Any, kind: str) -> list[Any]:
        """Send a tensor, or one for each device; returns what each of them has sent, in order."""
        if index == 0:
            self.messages[kind.removesuffix("_max")] += 1  # a maximum travels as a sum does
        return self._all_hold(index, x)

    def _all_hold(self, index: int, held: Any) -> list[Any]:
        """Return what all devices hold out; raises where some have run and others wait for a message."""
        self._held[index] = held
        self._barrier.wait()
        parts = list(self._held)
        self._barrier.wait()
        if len({part is _ENDED for part in parts}) > 1:
            raise RuntimeError("a device waits for a message that another does not send")
        return parts


def converted(x: Tensor, steps: str) -> Tensor:
    """The result of a conversion's steps in this thread of a rehearsal."""
    rehearsal, index = _here()
    return rehearsal.convert(index, x, steps)


def start_in(size: int) -> int:
    """The start of this thread's part of a dim of this size."""
    rehearsal, index = _here()
    return part(size, rehearsal.size, index)[0]


def index_here() -> int:
    """The device for which this thread stands."""
    return _here()[1]


def held_by_all(x: Tensor, kind: str) -> list[Tensor]:
    """The tensors of all devices, as a message of this kind brings them."""
    rehearsal, index = _here()
    return rehearsal.exchanged(index, x, kind)


def rows_of_all(x: Tensor, sends: Sequence[int]) -> Tensor:
    """The rows that all devices send to this thread's, as an all-to-all brings them."""
    rehearsal, index = _here()
    parts = rehearsal.exchanged(index, x.split(list(sends)), "all_to_all")
    return torch.cat([of[index] for of in parts])


def _here() -> tuple[Rehearsal, int]:
    here = getattr(_OF_THREAD, "here", None)
    assert here is not None, "a conversion is written out as collectives before it runs"
    return here
