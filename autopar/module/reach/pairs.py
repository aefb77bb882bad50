"""An op of the unpadded program with the same op of the longer program, and the reach of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import info
from autopar.module.reach.values import Factors, Reach, number, tidy


@dataclass(frozen=True, slots=True, eq=False)
class OpPair:
    """One op in both programs, and the reach of its operands."""

    node: fx.Node  # op of the longer program
    exact: fx.Node
    operands: list[Reach | None]  # reaches in the order in which rules name operands
    reaches: Mapping[fx.Node, Reach]  # reaches of all values so far

    def of(self, name: str) -> Reach | None:
        """The reach of an argument; a number is known everywhere."""
        value = self.node.kwargs.get(name)
        if isinstance(value, fx.Node):
            return self.reaches[value]
        return number(value) if isinstance(value, (int, float)) else None

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return self.node.kwargs

    def dims(self, i: int = 0) -> tuple[Factors, ...]:
        """The dims of an output, each as one factor, by its sizes in both programs."""
        here, longer = (info(n).outputs[i].shape for n in (self.exact, self.node))
        return tuple(tidy(((e, n),)) for e, n in zip(here, longer, strict=True))

    def run(self, values: Mapping[fx.Node, Tensor]) -> list[Tensor]:
        """The outputs of the op of the longer program on these values."""
        return _outputs(self.node, values)

    def run_exact(self, values: Mapping[fx.Node, Tensor]) -> list[Tensor]:
        """The outputs of the op of the unpadded program on these values for operands of the longer one."""
        mine = zip(self.exact.all_input_nodes, self.node.all_input_nodes, strict=True)
        return _outputs(self.exact, {n: values[other] for n, other in mine})


def _outputs(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> list[Tensor]:
    found = node.target.run(fx.map_arg(dict(node.kwargs), lambda n: values[n]))
    return [torch.as_tensor(t) for t in (found if isinstance(found, (tuple, list)) else (found,))]


def type_of_output(pair: OpPair, i: int) -> torch.dtype:
    return info(pair.node).outputs[i].torch_dtype


def same_words(one: fx.Node, other: fx.Node) -> bool:
    """Whether the arguments that are not tensors are equal."""

    def words(node: fx.Node) -> list[Any]:
        return [
            None if isinstance(leaf, fx.Node) else leaf
            for leaf in pytree.tree_leaves(fx.map_arg(dict(node.kwargs), lambda n: None))
        ]

    mine, theirs = words(one), words(other)
    if len(mine) != len(theirs):
        return False
    both = zip(mine, theirs, strict=True)
    return all(type(a) is type(b) and (a == b or a != a) for a, b in both)  # nan is itself
