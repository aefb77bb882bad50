"""The roles of factors in a matrix product: batch, rows or columns of the result, or summed over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autopar.ops.entry import facts_of
from autopar.sharding.notation import Binding, Dim

BATCH, ROWS, COLUMNS, SUMS = range(4)


def loops_of(op: str, binding: Binding) -> list[str]:
    """The factors over which a product loops, a point of FLOPs each; all factors of other ops."""
    product = facts_of(op).flops
    unlooped = product[1] if product else ""
    return [factor for factor in binding.sizes if not re.fullmatch(unlooped, factor)]


def multiplied(binding: Binding, loops: Sequence[str]) -> tuple[int, ...]:
    """Indices of the operands that are multiplied: those that share a summed factor of the loops."""
    operands = _operands(binding)
    left = _made(binding)
    summed = set[str]()
    for factor in set(loops) - left:
        if sum(factor in operand for operand in operands) > 1:
            summed.add(factor)
    return tuple(k for k, operand in enumerate(operands) if operand & summed)


def roles_of(binding: Binding, loops: Sequence[str]) -> tuple[list[str], ...] | None:
    """The factors of a product of two matrices, by role; None for any other op."""
    two = multiplied(binding, loops)
    if len(two) != 2:
        return None
    operands = _operands(binding)
    made = _made(binding)
    left, right = (operands[k] for k in two)
    roles: tuple[list[str], ...] = [], [], [], []
    for factor in loops:
        if factor not in made:
            role = SUMS
        elif factor not in right:
            role = ROWS
        else:
            role = BATCH if factor in left else COLUMNS
        roles[role].append(factor)
    return roles


def groups_of_rows(binding: Binding, loops: Sequence[str]) -> list[str]:
    """The factors of a product's right matrix that group the rows of the left one.

    Each row is multiplied with one group of the right matrix.
    """
    _, right = multiplied(binding, loops)
    return sorted(_operands(binding)[right] - set(loops) - _made(binding))


def _operands(binding: Binding) -> list[set[str]]:
    """The factors of each tensor operand."""
    return [_factors(row) for row in binding.operands if row is not None]


def _made(binding: Binding) -> set[str]:
    """The factors of the outputs."""
    return set().union(*map(_factors, binding.outputs))


def _factors(row: Iterable[Dim]) -> set[str]:
    return {factor for dim in row for factor in dim.factors}
