"""Choices of values that one call leaves for the next, such as the keys and values of a cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import local_elements
from autopar.sharding.strategies import Choice, Strategy, cross, storage_strategies, values
from autopar.space.limits import LIMITS


def choices_of_carried(shape: Sequence[int], mesh: DeviceMesh, operands: int) -> tuple[Choice, ...]:
    """The choices of a carried value: of an input (no operand), or of an output, whose operands lie alike.

    The operands of an output are the new value and, where an input has brought it, the old one. Without an old one it
    is new: it will be there for many calls, and so is cut in as many parts as its rows and heads allow. Calls index the
    dims behind these by place.
    """
    stored = storage_strategies(shape[: LIMITS.carried_dims])
    per_axis = [Strategy(s.outputs * operands, () if operands else s.outputs, s.cut) for s in stored]
    choices = cross(tuple(per_axis), {f"dim{d}": n for d, n in enumerate(shape)}, mesh)
    if operands != 1:
        return choices
    local = local_elements(tuple(shape), [values(c.operand(0)) for c in choices], mesh)
    return tuple(itertools.compress(choices, local == local.min()))
