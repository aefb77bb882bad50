"""Reach of indexing by known indices."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.graph.graph import type_of
from autopar.module.reach.by_rule import by_rule
from autopar.module.reach.pairs import OpPair
from autopar.module.reach.values import Factors, Reach, Unclear, in_full, is_padded, is_plain, need, reach_of


def looked_up(pair: OpPair) -> Reach | list[Reach]:
    """The reach of x[index]: that of the elements which the indices name, where all indices are known."""
    given = need(pair.of("input"))
    leaves = pytree.tree_leaves(fx.map_arg(pair.kwargs["index"], lambda n: n))
    places = [n for n in leaves if isinstance(n, fx.Node)]
    indices = [pair.reaches[n] for n in places]
    for reach in (given, *indices):
        if not all(map(is_plain, reach.dims)):
            raise Unclear
    for entry, dims in _dims_looked_into(pair, given):
        if is_padded(dims) and _may_count_from_the_end(pair, entry):
            raise Unclear  # the end is elsewhere in a longer one
    if not all(bool(r.known.all()) for r in indices):
        return by_rule(pair)
    if any(r.is_reached for r in indices):
        raise Unclear
    index = {n: r.full(r.value) for n, r in zip(places, indices, strict=True)}
    pad, known, value = (pair.run({**index, pair.kwargs["input"]: t}) for t in in_full(given))
    return reach_of(pair.dims(), pad, known, value)


def _may_count_from_the_end(pair: OpPair, entry: Any) -> bool:
    """Whether an entry of an index may count from the end of a dim, or depend on its length."""
    if isinstance(entry, slice):
        return (entry.start or 0) < 0 or (entry.step or 1) < 0
    if isinstance(entry, fx.Node):
        return type_of(entry).dtype == "bool" or bool((pair.reaches[entry].value < 0).any())
    return isinstance(entry, int) and entry < 0


def _dims_looked_into(pair: OpPair, given: Reach) -> list[tuple[Any, tuple[Factors, ...]]]:
    """Pairs of each entry of an index and the dims that it indexes."""
    entries = pair.kwargs["index"] if isinstance(pair.kwargs["index"], (tuple, list)) else (pair.kwargs["index"],)
    widths = [*map(_width, entries)]
    found = []
    at = 0
    for entry, width in zip(entries, widths, strict=True):
        if entry is Ellipsis:
            at = len(given.dims) - sum(widths) + at
        found.append((entry, given.dims[at : at + width]))
        at += width
    return found


def _width(entry: Any) -> int:
    """Number of dims that an entry of an index consumes; 0 for an ellipsis, which takes the rest."""
    if entry is None or entry is Ellipsis:
        return 0
    is_mask = isinstance(entry, fx.Node) and type_of(entry).dtype == "bool"
    return len(type_of(entry).shape) if is_mask else 1
