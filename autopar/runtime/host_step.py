"""Steps of parameters on the CPUs of the host: gradients go down a piece at a time, and stepped parameters come up.

A parameter that lies on the host with its gradient is stepped there, and nothing is copied. Of others:

    begin      copies of the next pieces go down while the CPUs step one
    step       the parameter in single precision, its gradient and its states, all on the host
    end        the stepped piece goes up while the CPUs step the next

Where the device is a CPU the host is a second memory, so that all of this runs there as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.host import HOST, Transfer, begin_onto, begin_to_host
from autopar.runtime.private import like_part, local_part

# Updates in place, on the host: the values of a piece in single precision, by its gradient, and its states.
PieceStep = Callable[[Tensor, Tensor, tuple[Tensor, ...]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of a parameter's local part that is stepped at once, with what belongs to it."""

    parameter: Tensor
    gradient: Tensor
    states: tuple[Tensor, ...]  # Optimizer states lie on the host.
    # Values in single precision, on the host as well, of a parameter that has fewer bits.
    master: Tensor | None
    step: PieceStep

    @property
    def lies_here(self) -> bool:
        """Whether the parameter lies on the host: then its gradient does, and it is stepped in place."""
        return HOST.holds(self.parameter)

    def in_place(self) -> None:
        """Step the parameter where it lies."""
        self.step(self.parameter if self.master is None else self.master, self.gradient, self.states)
        if self.master is not None:
            self.parameter.copy_(self.master)

    def cut(self, size: int) -> Iterator[Piece]:
        """The piece in pieces of at most `size` elements; whole where a tensor is not contiguous."""
        masters = () if self.master is None else (self.master,)
        tensors = self.parameter, self.gradient, *self.states, *masters
        count = self.parameter.numel()
        if count <= size or not all(t.is_contiguous() for t in tensors):
            yield self
            return
        flat = [t.view(-1) for t in tensors]
        for start in range(0, count, size):
            parameter, gradient, *others = (t[start : start + size] for t in flat)
            states = tuple(others[: len(self.states)])
            yield Piece(parameter, gradient, states, others[-1] if masters else None, self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """A piece on its way to the host."""

    piece: Piece
    gradient: Transfer
    exact: Transfer | None  # the values of the parameter, where the host has none

    @staticmethod
    def of(piece: Piece) -> Coming:
        """Begin to copy what the step of a piece reads."""
        exact = begin_to_host(piece.parameter) if piece.master is None else None
        return Coming(piece, begin_to_host(piece.gradient), exact)

    def step(self, is_unread: bool = False) -> Transfer:
        """Step the piece once it is there, and begin to send its values up; see `begin_onto`."""
        piece = self.piece
        gradient = self.gradient.end_on_host()
        exact = piece.master if self.exact is None else self.exact.end_on_host()
        assert exact is not None
        piece.step(exact, gradient, piece.states)
        if exact.dtype != piece.parameter.dtype:
            exact = HOST.lend(piece.parameter).copy_(exact)
        return begin_onto(piece.parameter, exact, is_unread)


@dataclass(slots=True, eq=False)
class HostSteps:
    """The steps of parameters on the host, one piece behind the other."""

    size: int = 2**24  # elements of a piece: 64 MiB in single precision, which a link carries at its full rate
    ahead: int = 2  # pieces on their way in each direction while one is stepped
    _coming: deque[Coming] = field(default_factory=deque)
    _going: deque[Transfer] = field(default_factory=deque)

    def run(self, parameters: Iterable[Piece]) -> None:
        """Step parameters in turn; their values on the device are new when it returns."""
        for whole in parameters:
            if whole.lies_here:
                whole.in_place()
                continue
            for piece in whole.cut(self.size):
                self._coming.append(Coming.of(piece))
                if len(self._coming) > self.ahead:
                    self._step()
        while self._coming:
            self._step()
        self._end(0)

    def _step(self) -> None:
        """Step the piece that comes first, and begin to send its values up."""
        self._going.append(self._coming.popleft().step())
        self._end(self.ahead)

    def _end(self, left: int) -> None:
        """End copies up until so many are left on their way."""
        while len(self._going) > left:
            self._going.popleft().end_on_host()


def let_host_step(parameter: Any, in_backward: bool = False) -> None:
    """Mark a parameter as one that the host steps, where its states lie; maybe while backward goes on."""
    parameter._autopar_on_host = True
    parameter._autopar_in_backward = in_backward


def is_stepped_on_host(parameter: Tensor) -> bool:
    """Whether the host steps a parameter."""
    return getattr(parameter, "_autopar_on_host", False)


def may_step_in_backward(parameter: Tensor) -> bool:
    """Whether the host may step a parameter while backward goes on."""
    return getattr(parameter, "_autopar_in_backward", False)


def lying_on_host(tensor: DTensor) -> DTensor:
    """A tensor whose part is copied to the host."""
    part = local_part(tensor)
    return like_part(HOST.lend(part).copy_(part), tensor)


def lent_like(tensor: Tensor) -> Tensor:
    """Zeros in single precision on the host, laid out as a tensor of the device is."""
    form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32, device="meta")
    return HOST.lend(form).zero_()
