"""`Family`: the ops that one kernel stands for, and the call that takes their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels.patterns import Match, Pattern, matches

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A kernel with the patterns of ops that it replaces."""

    name: str
    patterns: tuple[Pattern, ...]  # patterns of local programs, larger ones first
    call: Callable[..., Any]  # replaces a group; returns a tuple where there are several results
    reference: Callable[..., Any]  # the ops of a group, of the same arguments
    arguments: Callable[[Match], Mapping[str, Any] | None]  # arguments of the call; None where it cannot serve a group
    # values that backward reads beside gradients, where these are not those that the ops keep
    keeps: Callable[[Match], Sequence[fx.Node]] | None = None
    # the product before a group that gives the gradient of the product's bias, and the change of that product
    product: Callable[[Match], fx.Node] | None = None
    prepare: Callable[[Match], None] | None = None
    over: str = ""  # the operand over which its gradient can be written, by its name in patterns
    of_graphs: tuple[Pattern, ...] = ()  # patterns of graphs, where local programs have a local form; () if equal
    forms: Mapping[str, str] = field(default_factory=dict)  # local forms that the kernel replaces, by op

    def find(self, node: fx.Node) -> tuple[Match, Mapping[str, Any]] | None:
        """The group of a program whose last result is this node, with the arguments of its call, or None."""
        found = _served(self, self.patterns, node)
        return next(found, None)

    def in_graph(self, node: fx.Node) -> Iterator[Match]:
        """The groups of a graph whose last result is this node, those of more ops first."""
        return (found for found, _ in _served(self, self.of_graphs or self.patterns, node))


def _served(family: Family, patterns: Sequence[Pattern], node: fx.Node) -> Iterator[tuple[Match, Mapping[str, Any]]]:
    """The groups that match patterns and that the kernel serves, with the arguments of its call."""
    for pattern in patterns:
        for found in matches(pattern, node):
            if (arguments := family.arguments(found)) is not None:
                yield found, arguments


def are_alike(nodes: Sequence[fx.Node]) -> bool:
    """Whether these tensors have one dtype, and one that kernels support."""
    dtypes = {type_of(n).dtype for n in nodes}
    return len(dtypes) == 1 and dtypes <= set(FLOATS)


def summed(found: Match, arguments: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Arguments of a call on a sum, from those of a call on `x`; None unless all shapes and dtypes agree."""
    if arguments is None:
        return None
    operands = {"first": found["first"], "second": found["second"]}
    types = [type_of(n) for n in (*operands.values(), found["x"])]
    is_served = len({(t.shape, t.dtype) for t in types}) == 1
    rest = {name: value for name, value in arguments.items() if name != "x"}
    return {**operands, **rest} if is_served else None


def through(reference: Callable[..., Any], gradient: Any, *operands: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the reference's operands by autograd, contiguous."""
    _, back = torch.func.vjp(reference, *operands)
    return tuple(g.clone(memory_format=torch.contiguous_format) for g in back(gradient))


def through_sum(
    reference: Callable[..., Tensor], beside: Tensor | None, gradient: Tensor, sum_: Tensor, *operands: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the reference's operands, the first a sum with gradient `beside` from other readers."""
    if beside is None:
        return through(reference, gradient, sum_, *operands)
    return through(lambda x, *rest: (x, reference(x, *rest)), (beside, gradient), sum_, *operands)
