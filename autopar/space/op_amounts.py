"""`Amounts`: the work and traffic of an op's kernel on the fullest device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.ops.entry import facts_of
from autopar.sharding.cost_model import Matrices
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Flow, largest_local_shape
from autopar.sharding.strategies import values
from autopar.space.chosen import Chosen, local_sizes
from autopar.space.product_roles import groups_of_rows, roles_of
from autopar.space.traffic import Traffic


class Amounts(NamedTuple):
    """The work and traffic of a kernel, as arrays by choice."""

    work: np.ndarray  # FLOPs of a product, elements of the largest tensor of any other
    moved: np.ndarray  # bytes, in forward
    moved_back: np.ndarray  # bytes moved by one kernel of the backward
    starts: tuple[bool, bool]  # does a kernel start, in forward and in backward?
    matrices: Matrices | None  # sizes of a product of two matrices, None for any other op


def amounts_of(chosen: Chosen, traffic: Traffic, mesh: DeviceMesh) -> Amounts:
    """The work and traffic of the op's kernel, by choice."""
    sizes = chosen.binding.sizes if chosen.binding else {}
    product, loops = facts_of(chosen.op).flops, chosen.loops
    per_point = product[0] if product else 1.0
    is_product = product is not None and chosen.binding is not None
    roles, groups = None, list[str]()
    if is_product and chosen.binding is not None and facts_of(chosen.op).scores is None:
        roles = roles_of(chosen.binding, loops)
        groups = groups_of_rows(chosen.binding, loops) if roles is not None else groups
    count = len(chosen.choices)
    points, moved, back, matrices = np.empty(count), np.empty(count), np.empty(count), np.empty((4, count))
    elements = _Elements(mesh)
    for i, choice in enumerate(chosen.choices):
        ends = [(t, choice.operand(k)) for k, t in enumerate(chosen.operands)]
        ends += [(t, choice.output(k)) for k, t in enumerate(chosen.outputs)]
        held = [elements[t.shape, flows] for t, flows in ends]
        nbytes = [n * t.itemsize for n, (t, _) in zip(held, ends, strict=True)]
        moved[i] = sum(share * nbytes[k] for k, share in traffic.forward)
        back[i] = sum(share * nbytes[k] for k, share in traffic.backward) / traffic.gradients
        if is_product:
            local = local_sizes(choice, sizes, mesh)
            points[i] = math.prod(local[f] for f in loops)
            back[i] = moved[i]
            if roles is not None:
                matrices[:, i] = [_product(local, factors) for factors in roles]
                count_of = _product(local, groups)  # Each group is a product of its own with its share of rows.
                matrices[:2, i] *= count_of, 1 / count_of
        else:
            points[i] = max(held, default=0)
    starts = traffic.starts, traffic.starts_back
    return Amounts(per_point * points, moved, back, starts, None if roles is None else Matrices(*matrices))


class _Elements(dict[tuple[tuple[int, ...], tuple[Flow, ...]], int]):
    """Elements that the fullest device holds, by global shape and flows: many choices have the same."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __missing__(self, key: tuple[tuple[int, ...], tuple[Flow, ...]]) -> int:
        shape, flows = key
        found = self[key] = math.prod(largest_local_shape(shape, values(flows), self.mesh))
        return found


def _product(sizes: Mapping[str, int], factors: Sequence[str]) -> int:
    return math.prod(sizes[f] for f in factors)
