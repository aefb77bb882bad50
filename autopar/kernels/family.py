"""`Family`: the ops that one kernel stands for, and the call that takes their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels.patterns import Match, Pattern, matches

FLOATS = ("float32", "bfloat16", "float16")
Written = tuple[str, Mapping[str, Any]]  # a pattern's text, and the properties of this spelling


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A kernel with the patterns of ops that it replaces."""

    name: str
    patterns: tuple[Pattern, ...]  # patterns of local programs, larger ones first
    call: Callable[..., Any]  # replaces a group; returns a tuple where there are several results
    reference: Callable[..., Any]  # the ops of a group, of the same arguments
    serves: Callable[[Match], bool]  # whether the kernel computes what this group computes
    # arguments of the call that are not those of its parameters' names in the match
    others: Callable[[Match], Mapping[str, Any]] = lambda found: {}
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
        found = next(self._served(self.patterns, node), None)
        return None if found is None else (found, self._arguments(found))

    def in_graph(self, node: fx.Node) -> Iterator[Match]:
        """The groups of a graph whose last result is this node, those of more ops first."""
        return self._served(self.of_graphs or self.patterns, node)

    def _served(self, patterns: Sequence[Pattern], node: fx.Node) -> Iterator[Match]:
        return (found for pattern in patterns for found in matches(pattern, node) if self.serves(found))

    def _arguments(self, found: Match) -> Mapping[str, Any]:
        """Arguments of the call, by the reference's parameters; None where this spelling has no such thing."""
        known = {**found.named, **self.others(found)}
        return {name: known.get(name) for name in inspect.signature(self.reference).parameters}


def are_alike(nodes: Sequence[fx.Node]) -> bool:
    """Whether these tensors have one dtype, and one that kernels support."""
    dtypes = {type_of(n).dtype for n in nodes}
    return len(dtypes) == 1 and dtypes <= set(FLOATS)


def are_of_one_shape(nodes: Sequence[fx.Node]) -> bool:
    return len({type_of(n).shape for n in nodes}) == 1


def is_sum_served(found: Match) -> bool:
    """Whether both operands of a sum have its shape and dtype, as kernels with a sum take them."""
    nodes = [found["first"], found["second"], found["x"]]
    return are_alike(nodes) and are_of_one_shape(nodes)


def with_sum(written: Sequence[Written], result: str) -> tuple[Pattern, ...]:
    """Patterns of ops on rows `x` that are themselves a sum; both the sum and `result` are results."""
    return tuple(
        Pattern.of(f"x = add(input=first, other=second)\n{text.strip()}\nx, {result}", **variant)
        for text, variant in written
    )


def through(reference: Callable[..., Any], gradient: Any, *operands: Tensor) -> Any:
    """The tuple of gradients of the reference's operands by autograd, contiguous."""
    _, back = torch.func.vjp(reference, *operands)
    return tuple(g.clone(memory_format=torch.contiguous_format) for g in back(gradient))


def through_sum(
    reference: Callable[..., Tensor], beside: Tensor | None, gradient: Tensor, sum_: Tensor, *operands: Tensor
) -> Any:
    """Gradients of the reference's operands, the first a sum with gradient `beside` from other readers."""
    if beside is None:
        return through(reference, gradient, sum_, *operands)
    return through(lambda x, *rest: (x, reference(x, *rest)), (beside, gradient), sum_, *operands)
