"""Small random calls of an op: a call's sizes made small, and numbers that catch what is only nearly right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import TensorType
from autopar.graph.nodes import WrittenCall
from autopar.runtime.private import function_of


@dataclass(frozen=True, slots=True)
class Draw:
    """A way to draw numbers: floats from a normal distribution or a list, integers from a list."""

    scale: float = 0.0
    floats: tuple[float, ...] = ()
    whole: tuple[int, ...] = (0, 1)
    one: float | None = None  # a number that the last element is

    def tensor(self, type_: TensorType, own: Sequence[float], random: torch.Generator, keeps_dtype: bool) -> Tensor:
        """A random tensor of this type, floats in double precision unless it keeps its dtype.

        Constants of the op itself (`own`) join the numbers to draw.
        """
        dtype = type_.torch_dtype if keeps_dtype else torch.float64
        shape = type_.shape
        if "float" in type_.dtype and self.scale:
            numbers = torch.randn(shape, dtype=torch.float64, device="cpu", generator=random) * self.scale
            if self.one is not None and numbers.numel():
                numbers.view(-1)[-1] = self.one
            return numbers.to(dtype).requires_grad_(type_.requires_grad)
        pool = [*self.floats, *own]
        if "float" not in type_.dtype:
            pool = [*self.whole, *(n for n in own if isinstance(n, int))]
        numbers = torch.tensor(pool, dtype=torch.float64, device="cpu")
        picked = numbers[torch.randint(0, len(pool), shape, device="cpu", generator=random)]
        if "float" in type_.dtype:
            return picked.to(dtype).requires_grad_(type_.requires_grad)
        if type_.dtype != "bool":
            bounds = torch.iinfo(type_.torch_dtype)
            picked = picked.clamp(bounds.min, bounds.max)
        return picked.to(type_.torch_dtype)


DRAWS = (
    Draw(scale=1.0),
    Draw(scale=1e-3, whole=(0, 1, 2, 3, 4, 5)),
    Draw(scale=1e4, whole=(-100, -1, 0, 1, 2, 5)),
    Draw(floats=(0.0, 1.0, -1.0, 0.0, 2.0, 1.0, -100.0, 0.5), whole=(-(2**31), -100, -1, 0, 0, 1, 1, 7, 2**31 - 1)),
    Draw(floats=(0.0, 1.0, -1.0, 1e30, math.inf, -math.inf, math.nan), whole=(0, 0, 0, 1)),
)


def constants_of(op: Any) -> tuple[float, ...]:
    """The numbers in the code of an op written in Python, such as a bound or a token that it looks for."""
    call = op.call
    behind = function_of(call._schema.name) if hasattr(call, "_schema") else call
    code = getattr(behind, "__code__", None)
    numbers = [c for c in (code.co_consts if code else ()) if isinstance(c, (int, float)) and not isinstance(c, bool)]
    return tuple(dict.fromkeys(numbers))


def small_sizes(sizes: Sequence[int]) -> dict[int, int]:
    """A small size for each size: up to six it stays, larger ones become distinct odd multiples of six."""
    larger = sorted({n for n in sizes if n > 6})
    return {n: 6 * (2 * i + 1) for i, n in enumerate(larger)} | {n: n for n in sizes if n <= 6}


def shrunk(call: WrittenCall, sizes: Mapping[int, int]) -> WrittenCall:
    """The call with other sizes, which numbers above six among its arguments follow; outputs are unknown."""

    def shape_of(type_: TensorType) -> tuple[int, ...]:
        return tuple(sizes.get(n, n) for n in type_.shape)

    return resized(call, [shape_of(t) for t in call.operands], sizes)


def resized(call: WrittenCall, shapes: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> WrittenCall:
    """The call on operands of these shapes; numbers above six among its arguments that are sizes follow."""
    arguments = call.arguments
    if call.op.signature is not None:  # tensors are handed out in the order of the signature, as operands are
        arguments = {n: arguments[n] for n in call.op.signature.parameters if n in arguments}
    operands = [replace(t, shape=tuple(shape)) for t, shape in zip(call.operands, shapes, strict=True)]
    waiting = iter(operands)

    def with_sizes(value: Any) -> Any:
        if isinstance(value, TensorType):
            return next(waiting)
        if isinstance(value, (tuple, list)):
            return type(value)(with_sizes(v) for v in value)
        is_large = isinstance(value, int) and not isinstance(value, bool) and value > 6
        return sizes.get(value, value) if is_large else value

    small = {k: with_sizes(v) for k, v in arguments.items()}
    return WrittenCall(call.op, small, repr(small), tuple(operands), ())


def drawn(call: WrittenCall, draw: Draw, keeps_dtype: bool = False, with_constants: bool = True) -> tuple[Tensor, ...]:
    """Random operands of a call, the same in every process.

    If `with_constants`, constants in the op's own code are among the numbers.
    """
    random = torch.Generator().manual_seed(0)
    own = constants_of(call.op) if with_constants else ()
    return tuple(draw.tensor(t, own, random, keeps_dtype) for t in call.operands)


def filled(arguments: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Arguments with tensors in the places of types."""
    waiting = iter(tensors)
    return {k: _filled(v, waiting) for k, v in arguments.items()}


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, TensorType):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(v, tensors) for v in value)
    return value
