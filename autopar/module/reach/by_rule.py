"""Reach by an op's sharding rule: a dim of an output that may be cut depends on the same place of the operands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import info, typed
from autopar.letters import BadRule
from autopar.module.reach.numbers import pointwise
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import Factors, Reach, Unclear, all_of, any_of, is_padded, unknown
from autopar.ops.entry import rule_of
from autopar.sharding.notation import Binding, Rule


def by_rule(pair: OpPair) -> Reach | list[Reach]:
    """The reach of padding by the op's rule.

    Along a dim that may be cut, elements depend on their own place; along other dims they mix.
    """
    op = pair.node.target
    outputs = info(pair.node).outputs
    rule = rule_of(op.name, {**typed(pair.kwargs), "outputs": outputs})
    if rule is None:
        raise Unclear
    if _is_pointwise(rule):
        return pointwise(pair)
    shapes = [None if r is None else r.shape for r in pair.operands]
    try:
        binding = rule.bind(shapes, [t.shape for t in outputs])
    except BadRule as e:
        raise Unclear from e
    return _of_binding(pair, binding)


def _is_pointwise(rule: Rule) -> bool:
    """Whether a rule is "... -> ...", with any number of operands."""
    rows = (*rule.operands, *rule.outputs)
    return len(rule.outputs) == 1 and all(len(row) == 1 and row[0].factor == "..." for row in rows)


def _of_binding(pair: OpPair, binding: Binding) -> list[Reach]:
    """The reach of each output, from those of the operands by factor of the rule."""
    at = {f: i for i, f in enumerate(binding.sizes)}
    rows = {
        i: (row, reach)
        for i, (row, reach) in enumerate(zip(binding.operands, pair.operands, strict=True))
        if row is not None and reach is not None
    }
    sizes: dict[str, Factors] = {}
    for row, reach in rows.values():
        _learn_sizes(sizes, row, reach)
    mixed = _mixed(binding)
    pads = [_on_factors(reach.pad, row, at) for row, reach in rows.values()]
    nothing = torch.zeros((1,) * len(at), dtype=torch.bool)
    term = any_of([nothing, *pads])
    neutral = nothing
    if all(f not in binding.whole and f not in binding.inside for f in mixed if is_padded([sizes.get(f, ())])):
        for group in binding.groups:  # a product is 0, and adds nothing, where one of its factors is
            those = [rows[i] for i in group if i in rows and _has_factor(rows[i][0], mixed)]
            if those:
                neutral = neutral | all_of([_on_factors(_zeros(reach), row, at) for row, reach in those])
    gone = tuple(at[f] for f in mixed)
    shape = torch.broadcast_shapes(term.shape, neutral.shape)
    pad = (term & ~neutral).expand(shape)
    if gone:
        pad = pad.amax(gone, keepdim=True) | term.expand(shape).amin(gone, keepdim=True)
    return [
        unknown(_dims_by(pair, i, row, sizes), type_of_output(pair, i), _on_dims(pad, row, at))
        for i, row in enumerate(binding.outputs)
    ]


def _learn_sizes(sizes: dict[str, Factors], row: Sequence[Any], reach: Reach) -> None:
    """Note the sizes of the rule's factors; raise `Unclear` for padding within a dim of several factors."""
    for d, (dim, along) in enumerate(zip(row, reach.dims, strict=True)):
        if len(dim.factors) == 1:
            if along and sizes.setdefault(dim.factor, along) != along:
                raise Unclear
        elif is_padded([along]) or (dim.factors and reach.pad.shape[d] > 1):
            raise Unclear


def _mixed(binding: Binding) -> list[str]:
    """The factors along which elements mix: whole ones, and those that no output keeps."""
    kept = {f for row in binding.outputs for d in row for f in d.factors}
    return [f for f in binding.sizes if f in binding.whole or f in binding.inside or f not in kept]


def _has_factor(row: Sequence[Any], factors: Collection[str]) -> bool:
    return any(f in factors for d in row for f in d.factors)


def _zeros(reach: Reach) -> Tensor:
    """A mask of the elements known to be zero, broadcast over known elements and values."""
    return reach.is_(0).expand(torch.broadcast_shapes(reach.known.shape, reach.value.shape))


def _on_factors(tensor: Tensor, row: Sequence[Any], at: Mapping[str, int]) -> Tensor:
    """An operand's tensor permuted and reshaped to one dim for each factor of the rule."""
    order = [(at[d.factor], k) for k, d in enumerate(row) if len(d.factors) == 1]
    rest = [k for k, d in enumerate(row) if len(d.factors) != 1]
    for k in rest:
        tensor = tensor.amax(k, keepdim=True)
    moved = tensor.permute([k for _, k in sorted(order)] + rest)
    shape = [1] * len(at)
    for (place, _), n in zip(sorted(order), moved.shape, strict=False):
        shape[place] = n
    return moved.reshape(shape)


def _on_dims(tensor: Tensor, row: Sequence[Any], at: Mapping[str, int]) -> Tensor:
    """A mask over the factors of the rule, reduced and permuted to the dims of an output."""
    places = [at[d.factor] if len(d.factors) == 1 else None for d in row]
    used = [p for p in places if p is not None]
    rest = tuple(p for p in range(tensor.dim()) if p not in used)
    flat = tensor.amax(rest, keepdim=True) if rest else tensor
    flat = flat.permute(used + list(rest)).reshape([flat.shape[p] for p in used])
    sizes = iter(flat.shape)
    return flat.reshape([1 if p is None else next(sizes) for p in places])


def _dims_by(pair: OpPair, i: int, row: Sequence[Any], sizes: Mapping[str, Factors]) -> tuple[Factors, ...]:
    own = pair.dims(i)
    found = []
    for dim, along in zip(row, own, strict=True):
        known = sizes.get(dim.factor) if len(dim.factors) == 1 else None
        if len(dim.factors) > 1 and is_padded([along]):
            raise Unclear
        found.append(known if known is not None and along else along)
    return tuple(found)
