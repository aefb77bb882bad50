"""Ops that mark the ends of a region which runs on some rows at a time, for tracing.

    chunk       the rows of one chunk;  its backward, `unchunk`, puts the gradient of the rows back in their place
    added_up    the sum over chunks of a number that each has;  its backward, `seed`, passes the gradient on

Tracing sees one chunk. `codegen/chunks.py` then writes the region out once for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autopar::chunk", mutates_args=())
def chunk(x: Tensor, dim: int, chunks: int, size: int) -> Tensor:
    """The rows of one chunk along a dim, out of each block of `size` rows."""
    raise AssertionError("a region is written out before it runs")


@chunk.register_fake
def _(x: Tensor, dim: int, chunks: int, size: int) -> Tensor:
    return x.new_empty([n // chunks if d == dim else n for d, n in enumerate(x.shape)])


@torch.library.custom_op("autopar::unchunk", mutates_args=())
def unchunk(gradient: Tensor, dim: int, chunks: int, size: int) -> Tensor:
    """The gradient of a whole value, from those of the rows of its chunks."""
    raise AssertionError("a region is written out before it runs")


@unchunk.register_fake
def _(gradient: Tensor, dim: int, chunks: int, size: int) -> Tensor:
    return gradient.new_empty([n * chunks if d == dim else n for d, n in enumerate(gradient.shape)])


@torch.library.custom_op("autopar::added_up", mutates_args=())
def added_up(x: Tensor) -> Tensor:
    """The sum of a value over all chunks."""
    raise AssertionError("a region is written out before it runs")


@added_up.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopar::seed", mutates_args=())
def seed(gradient: Tensor) -> Tensor:
    """The gradient of each chunk's value, equal to that of the sum."""
    raise AssertionError("a region is written out before it runs")


@seed.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


def _remember(ctx: Any, inputs: tuple[Tensor, int, int, int], output: Tensor) -> None:
    ctx.how = inputs[1:]


def _unchunked(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return unchunk(gradient, *ctx.how), None, None, None


chunk.register_autograd(_unchunked, setup_context=_remember)
added_up.register_autograd(lambda ctx, gradient: seed(gradient))
