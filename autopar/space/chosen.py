"""`Chosen`: a call of an op with its choices, and its sizes on the fullest device under each of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.graph.graph import TensorType, info, op_name, type_of
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import Binding
from autopar.sharding.placement import largest_local_shape, local_elements, part
from autopar.sharding.strategies import Choice, values
from autopar.space.product_roles import loops_of


@dataclass(frozen=True, eq=False)
class Chosen:
    """A call of an op, with its binding and its choices."""

    node: fx.Node
    binding: Binding | None
    choices: Sequence[Choice]
    given: Sequence[fx.Node]  # the operands

    @property
    def op(self) -> str:
        return op_name(self.node)

    @functools.cached_property
    def operands(self) -> tuple[TensorType, ...]:
        return tuple(type_of(n) for n in self.given)

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return info(self.node).outputs

    @property
    def trained(self) -> list[TensorType]:
        return [t for t in self.operands if t.requires_grad]

    @property
    def loops(self) -> list[str]:
        """The factors over which a product loops, a point of FLOPs each; all factors of other ops."""
        return loops_of(self.op, self.binding) if self.binding else []

    def is_broadcast(self, operand: TensorType) -> bool:
        """Whether an operand has fewer elements than the result of its op."""
        return math.prod(operand.shape) < math.prod(self.outputs[0].shape)

    def lengths(self, operand: int, dim: int, mesh: DeviceMesh) -> np.ndarray:
        """The local size of a dim of an operand on the fullest device, by choice."""
        shape = self.operands[operand].shape
        held = [largest_local_shape(shape, values(c.operand(operand)), mesh) for c in self.choices]
        return np.array([local[dim] for local in held], float)

    def elements(self, mesh: DeviceMesh) -> np.ndarray:
        """Elements of the first output on the fullest device, by choice."""
        return local_elements(self.outputs[0].shape, (values(c.output()) for c in self.choices), mesh)


def local_sizes(choice: Choice, sizes: Mapping[str, int], mesh: DeviceMesh) -> dict[str, int]:
    """The sizes of the factors on the fullest device, under one choice."""
    local = dict(sizes)
    for strategy, n in zip(choice.strategies, mesh.shape, strict=True):
        for factor in strategy.cut.factors if strategy.cut else ():
            local[factor] = part(local[factor], n, 0)[1]
    return local
