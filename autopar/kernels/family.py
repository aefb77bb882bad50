"""`Family`: the ops that one kernel stands for, and the call that takes their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels.patterns import Found, Pattern, find

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A kernel by its name."""

    name: str
    patterns: tuple[Pattern, ...]  # one of more ops before what is a part of it
    call: Callable[..., Tensor]  # what stands in the place of a group
    reference: Callable[..., Tensor]  # the ops of a group, of the same arguments
    arguments: Callable[[Found], Mapping[str, Any] | None]  # of the call; None where the kernel does not serve a group

    def find(self, node: fx.Node) -> tuple[Found, Mapping[str, Any]] | None:
        """The group whose result is this node, and the arguments of the call in its place."""
        for pattern in self.patterns:
            found = find(pattern, node)
            if found is not None and (arguments := self.arguments(found)) is not None:
                return found, arguments
        return None


def are_alike(nodes: Sequence[fx.Node]) -> bool:
    """Are these tensors of one dtype, and one that kernels serve?"""
    dtypes = {type_of(n).dtype for n in nodes}
    return len(dtypes) == 1 and dtypes <= set(FLOATS)


def through(reference: Callable[..., Tensor], gradient: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the reference's operands: those that autograd gives for its ops, in memory order."""
    _, back = torch.func.vjp(reference, *operands)
    return tuple(g.clone(memory_format=torch.contiguous_format) for g in back(gradient))
