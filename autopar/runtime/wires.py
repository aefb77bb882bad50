"""`Wire`: what local forms send along an axis, whether its devices are processes or threads of a rehearsal.

`EXCHANGING` has the ops whose kernels send: in a program their axes become axes, and functions run instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import rehearsal
from autopar.runtime.agreement import wait_for
from autopar.runtime.collectives import Axis, gather_into


class Wire:
    """The devices of an axis: a process group, or in a rehearsal the threads that stand for them."""

    def __init__(self, axis: Axis | None) -> None:
        self.axis = axis
        self.index: int = rehearsal.index_here() if axis is None else axis.index

    def rows(self, x: Tensor, sends: Sequence[int], comes: Sequence[int]) -> Tensor:
        """Rows that come from each device, for rows sent to each."""
        if self.axis is None:
            return rehearsal.rows_of_all(x, sends)
        made = x.new_empty((sum(comes), *x.shape[1:]))
        given = x.contiguous(), list(comes), list(sends)
        wait_for(dist.all_to_all_single(made, *given, group=self.axis.group, async_op=True))
        return made

    def gathered(self, x: Tensor) -> list[list[int]]:
        """The numbers that each device has."""
        if self.axis is None:
            return [of.tolist() for of in rehearsal.held_by_all(x, "all_gather")]
        made = x.new_empty(self.axis.size * x.numel())
        wait_for(gather_into(made, x, group=self.axis.group, async_op=True))
        found: list[list[int]] = made.view(self.axis.size, -1).tolist()
        return found

    def most(self, n: int, device: torch.device) -> int:
        """The largest number that a device has."""
        if self.axis is None:
            return int(max(rehearsal.held_by_all(torch.tensor(n), "all_reduce")))
        number = torch.tensor([n], device=device)
        wait_for(dist.all_reduce(number, dist.ReduceOp.MAX, group=self.axis.group, async_op=True))
        return int(number)

    def passed_on(self, x: Tensor, by: int, shape: Sequence[int]) -> Callable[[], Tensor]:
        """Send a tensor so many places on and receive one of this shape; what is returned waits for it."""
        if self.axis is None:
            others = rehearsal.held_by_all(x, "send")
            return lambda: others[(self.index - by) % len(others)]
        made = x.new_empty(tuple(shape))
        sent = x.contiguous()  # It has to live until it is sent.
        sends = self._to((self.index + by) % self.axis.size, sent)
        comes = self._to((self.index - by) % self.axis.size, made)
        # Backends send nothing where nothing is to be sent: it costs what a send and a receive cost.
        flat = made.view(-1), sent.view(-1)
        work = self._exchange(*flat, comes, sends)

        def wait(_: Tensor = sent) -> Tensor:
            wait_for(work)
            return made

        return wait

    def collected(self, x: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to bring the rows of all devices, so many of each, one device after the other."""
        if self.axis is None:
            others = rehearsal.held_by_all(x, "all_gather")
            return lambda: torch.cat(others)
        most = max(counts)
        sent = x.contiguous() if len(x) == most else torch.cat([x, x.new_empty((most - len(x), *x.shape[1:]))])
        made = x.new_empty((len(counts) * most, *x.shape[1:]))
        work = self._gather(made, sent)

        def wait(_: Tensor = sent) -> Tensor:
            wait_for(work)
            parts = zip(made.split(most), counts, strict=True)
            return made if min(counts) == most else torch.cat([part[:n] for part, n in parts])

        return wait

    def shared_out(self, x: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to sum rows over all devices, of which each gets so many, one device after the other."""
        own = counts[self.index]
        if self.axis is None:
            parts = rehearsal.rows_of_all(x, counts).unflatten(0, (len(counts), own))
            return lambda: parts.sum(0)
        made = x.new_empty((len(counts), own, *x.shape[1:]))
        sent = x.contiguous()
        work = self._exchange(made.flatten(0, 1), sent, [own] * len(counts), list(counts))

        def wait(_: Tensor = sent) -> Tensor:
            wait_for(work)
            return made.sum(0)

        return wait

    def _exchange(self, made: Tensor, sent: Tensor, comes: list[int], sends: list[int]) -> Any:
        assert self.axis is not None
        return dist.all_to_all_single(made, sent, comes, sends, group=self.axis.group, async_op=True)

    def _gather(self, made: Tensor, sent: Tensor) -> Any:
        assert self.axis is not None
        return gather_into(made, sent, group=self.axis.group, async_op=True)

    def _to(self, other: int, x: Tensor) -> list[int]:
        assert self.axis is not None
        return [x.numel() if i == other else 0 for i in range(self.axis.size)]


class UnsentWire(Wire):
    """A wire that sends nothing, for tensors on meta: what would come has its shape."""

    def _exchange(self, made: Tensor, sent: Tensor, comes: list[int], sends: list[int]) -> Any:
        return None

    def _gather(self, made: Tensor, sent: Tensor) -> Any:
        return None


@dataclass(frozen=True, slots=True)
class Exchanging:
    """An op whose kernel sends along axes; both functions take the arguments of the op."""

    run: Callable[..., Any]  # the kernel; its second argument is the axes
    axes: Callable[..., tuple[str, ...]]  # the axes along which a call sends
    sent: Callable[..., Iterable[tuple[str, str, int]]]  # messages of a call: axis, kind and number


EXCHANGING: dict[Any, Exchanging] = {}


def wires_of(names: Iterable[str], axes: Sequence[Axis]) -> dict[str, Wire]:
    """The wires along some axes, which are threads of a rehearsal where no axes are given.

    An axis without a group is for tensors on meta.
    """
    by_name = {axis.name: axis for axis in axes}
    unsent = {axis.name for axis in axes if axis.group is None}
    return {name: (UnsentWire if name in unsent else Wire)(by_name.get(name)) for name in names}


def sent_by(op: Any, arguments: Sequence[Any]) -> Iterable[tuple[str, str, int]]:
    """The messages of a call of an exchanging op: axis, kind and number."""
    return EXCHANGING[op].sent(*arguments)


def on_axes(op: Any, arguments: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The function that runs an op on axes, and its arguments; None where it sends along none."""
    exchanging = EXCHANGING.get(op)
    axes = exchanging.axes(*arguments) if exchanging else ()
    return (exchanging.run, (arguments[0], axes, *arguments[1:])) if exchanging and axes else None


def op_run_by(function: Any) -> Any:
    """The op that a function runs on axes; None for any other function."""
    return next((op for op, exchanging in EXCHANGING.items() if exchanging.run is function), None)
