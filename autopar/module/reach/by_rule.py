"""Reach by an op's sharding rule: a dim of an output that may be cut depends on the same place of the operands."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import info, op_name, typed
from autopar.letters import BadRule
from autopar.module.reach.numbers import absorbed
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import MOST, Factors, Reach, Unclear, all_of, any_of, is_padded, reach_of
from autopar.ops.entry import facts_of, rule_of
from autopar.sharding.notation import Binding, Dim

Row = Sequence[Dim]


def by_rule(pair: OpPair) -> list[Reach]:
    """The reach of padding by the op's rule.

    Along a dim that may be cut, elements depend on their own place; along other dims they mix, except for those that
    are known to add nothing. An element is known where all are on which it depends.
    """
    binding = bound(pair)
    if binding is None:
        raise Unclear
    at = {f: i for i, f in enumerate(binding.sizes)}
    both = enumerate(zip(binding.operands, pair.operands, strict=True))
    rows = {i: (row, r) for i, (row, r) in both if row is not None and r is not None}
    sizes = _sizes_of(list(rows.values()))
    nothing = torch.zeros((1,) * len(at), dtype=torch.bool)
    pad = any_of([nothing, *(_on_factors(r.pad, row, at) for row, r in rows.values())])
    unknown = any_of([nothing, *(_on_factors(~r.known, row, at) for row, r in rows.values())])
    if gone := tuple(at[f] for f in _mixed_factors(binding)):
        neutral = _neutral(pair, binding, rows, sizes)
        shape = torch.broadcast_shapes(pad.shape, neutral.shape)
        pad = (pad & ~neutral).expand(shape).amax(gone, keepdim=True) | pad.expand(shape).amin(gone, keepdim=True)
        unknown = unknown.amax(gone, keepdim=True)
    values = _values(pair, binding) if rows and not bool(unknown.all()) else None
    found = []
    for i, row in enumerate(binding.outputs):
        known = ~_on_dims(unknown, row, at) if values else torch.zeros((1,) * len(row), dtype=torch.bool)
        value = values[i] if values else torch.zeros((1,) * len(row), dtype=type_of_output(pair, i))
        found.append(reach_of(_dims_by(pair, i, row, sizes), _on_dims(pad, row, at), known, value))
    return [absorbed(pair, found[0]), *found[1:]]


def bound(pair: OpPair) -> Binding | None:
    """The op's rule, fitted to the shapes of the longer program; None where the op has none."""
    outputs = info(pair.node).outputs
    rule = rule_of(pair.node.target.name, {**typed(pair.kwargs), "outputs": outputs})
    try:
        if rule is None:
            return None
        return rule.bind([None if r is None else r.shape for r in pair.operands], [t.shape for t in outputs])
    except BadRule as e:
        raise Unclear from e


def _mixed_factors(binding: Binding) -> list[str]:
    """The factors along which elements mix: whole ones, and those that no output keeps."""
    kept = {f for row in binding.outputs for d in row for f in d.factors}
    return [f for f in binding.sizes if f in binding.whole or f in binding.inside or f not in kept]


def _sizes_of(rows: Sequence[tuple[Row, Reach]]) -> dict[str, Factors]:
    """The sizes of the rule's factors; raises `Unclear` for padding within a dim of several factors."""
    sizes: dict[str, Factors] = {}
    for row, reach in rows:
        for d, (dim, along) in enumerate(zip(row, reach.dims, strict=True)):
            if len(dim.factors) == 1:
                learn_size(sizes, dim.factor, along)
            elif is_padded([along]) or (dim.factors and reach.pad.shape[d] > 1):
                raise Unclear
    return sizes


def learn_size(sizes: dict[str, Factors], factor: str, along: Factors) -> None:
    """Note the sizes of a factor of the rule; raises `Unclear` where operands differ in them."""
    if along and sizes.setdefault(factor, along) != along:
        raise Unclear


def _dims_by(pair: OpPair, i: int, row: Row, sizes: Mapping[str, Factors]) -> tuple[Factors, ...]:
    """The dims of an output: those of the operands' factors, and others as one factor each."""
    found = []
    for dim, along in zip(row, pair.dims(i), strict=True):
        known = sizes.get(dim.factor) if len(dim.factors) == 1 else None
        if len(dim.factors) > 1 and is_padded([along]):
            raise Unclear
        found.append(known if known is not None and along else along)
    return tuple(found)


def opened(
    tensors: Mapping[fx.Node, Tensor], pair: OpPair, rows: Mapping[fx.Node, Row], alone: Collection[str]
) -> dict[fx.Node, Tensor]:
    """Operands' tensors in full, except along factors on which the op works place by place.

    Along those, all tensors have as many elements as the one that has most.
    """
    most: dict[str, int] = {}
    for n, tensor in tensors.items():
        for dim, size in zip(rows.get(n, ()), tensor.shape, strict=False):
            if dim.factor in alone:
                most[dim.factor] = max(most.get(dim.factor, 1), size)
    found = {}
    for n, tensor in tensors.items():
        sizes = list(pair.reaches[n].shape)
        for d, dim in enumerate(rows.get(n, ())):
            sizes[d] = most[dim.factor] if dim.factor in alone else sizes[d]
        if math.prod(sizes) > MOST:
            raise Unclear
        found[n] = tensor.expand(sizes)
    return found


def rows_by_node(pair: OpPair, binding: Binding | None) -> dict[fx.Node, Row]:
    """The dims of each operand by the rule; none for one that the op reads in two ways."""
    found: dict[fx.Node, Row] = {}
    for n, row in zip(pair.node.target.operands(pair.kwargs), binding.operands if binding else (), strict=False):
        if isinstance(n, fx.Node) and row is not None:
            found[n] = row if found.get(n, row) == row else ()
    return found


def factors_alone(binding: Binding | None) -> frozenset[str]:
    """The factors on which an op works place by place, which are whole dims of the tensors."""
    if binding is None:
        return frozenset()
    joined = {f for row in binding.rows for d in row if len(d.factors) > 1 for f in d.factors}
    return frozenset(binding.sizes) - joined - set(_mixed_factors(binding))


def _values(pair: OpPair, binding: Binding) -> list[Tensor] | None:
    """The outputs of the op on known values; None where it cannot be run before the program is."""
    if info(pair.node).random >= 0:
        return None
    known = {n: pair.reaches[n].value for n in pair.node.all_input_nodes}
    try:
        given = opened(known, pair, rows_by_node(pair, binding), factors_alone(binding))
        return pair.run(given)
    except (Unclear, RuntimeError):  # too large, or a division by what is not known
        return None


def _neutral(
    pair: OpPair, binding: Binding, rows: Mapping[int, tuple[Row, Reach]], sizes: Mapping[str, Factors]
) -> Tensor:
    """A mask over the rule's factors of what is known to add nothing to the result."""
    at = {f: i for i, f in enumerate(binding.sizes)}
    mixed = _mixed_factors(binding)
    found = torch.zeros((1,) * len(at), dtype=torch.bool)
    element = facts_of(op_name(pair.node)).neutral
    if element is not None:
        return any_of([found, *(~_on_factors(~r.is_(element), row, at) for row, r in rows.values())])
    if any(f in binding.whole or f in binding.inside for f in mixed if is_padded([sizes.get(f, ())])):
        return found
    for group in binding.groups:  # a product is 0, and adds nothing, where one of its factors is
        those = [rows[i] for i in group if i in rows and _has_factor(rows[i][0], mixed)]
        if those:
            found = found | all_of([~_on_factors(~r.is_(0), row, at) for row, r in those])
    return found


def _has_factor(row: Row, factors: Collection[str]) -> bool:
    return any(f in factors for d in row for f in d.factors)


def _on_factors(mask: Tensor, row: Row, at: Mapping[str, int]) -> Tensor:
    """An operand's mask with one dim for each factor of the rule; any along joined factors."""
    order = [(at[d.factor], k) for k, d in enumerate(row) if len(d.factors) == 1]
    rest = [k for k, d in enumerate(row) if len(d.factors) != 1]
    for k in rest:
        mask = mask.amax(k, keepdim=True)
    moved = mask.permute([k for _, k in sorted(order)] + rest)
    shape = [1] * len(at)
    for (place, _), n in zip(sorted(order), moved.shape, strict=False):
        shape[place] = n
    return moved.reshape(shape)


def _on_dims(mask: Tensor, row: Row, at: Mapping[str, int]) -> Tensor:
    """A mask over the factors of the rule, reduced and permuted to the dims of an output."""
    places = [at[d.factor] if len(d.factors) == 1 else None for d in row]
    used = [p for p in places if p is not None]
    rest = tuple(p for p in range(mask.dim()) if p not in used)
    flat = mask.amax(rest, keepdim=True) if rest else mask
    flat = flat.permute(used + list(rest)).reshape([flat.shape[p] for p in used])
    sizes = iter(flat.shape)
    return flat.reshape([1 if p is None else next(sizes) for p in places])
