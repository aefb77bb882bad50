"""Reach of ops that move elements, or make them of sizes: they are run on labels, which say what came from where.

    before   x[:, 1:] of f32[2, 4], and of f32[2, 6] in the longer program
    labels   1 2 3 4, of which 2 3 4 come out;     1 2 3 4 5 6, of which 2 3 4 5 6 come out: the first three are equal

Where both programs take an element from elsewhere, it depends on the length, and counts as padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import info, type_of
from autopar.module.reach.by_rule import bound, by_rule, factors_alone, learn_size, opened, rows_by_node
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import (
    MOST,
    Factors,
    Reach,
    Unclear,
    exact_shape,
    exactly,
    narrowed,
    need,
    reach_of,
    tidy,
)
from autopar.sharding.notation import Dim


def moved(pair: OpPair) -> list[Reach]:
    """The reach of an op that moves elements by known indices; by its rule where indices are not known."""
    indices = {n: pair.reaches[n] for n in pytree.tree_leaves(pair.kwargs.get("index")) if isinstance(n, fx.Node)}
    if not all(bool(r.known.all()) for r in indices.values()):
        return by_rule(pair)
    if any(r.is_reached for r in indices.values()):
        raise Unclear
    move = _Move.of(pair, indices)
    sources = move.sources
    pads = move.run({n: r.pad.double() for n, r in sources.items()})
    knowns = move.run({n: r.known.double() for n, r in sources.items()})
    values = move.run({n: r.value for n, r in sources.items()})
    labels = move.labels()
    origins = move.run(labels)
    mirrored = move.run({n: -t for n, t in labels.items()})
    here = move.run_exact(labels)
    here_mirrored = move.run_exact({n: -t for n, t in labels.items()})
    found = []
    for i, origin in enumerate(origins):
        # No operand has given this: it is a constant, or a number made of sizes.
        is_new = origin == mirrored[i]
        pad = pads[i].bool() & ~is_new
        known = knowns[i].bool() | is_new
        value = values[i].to(type_of_output(pair, i))
        # The unpadded program has a constant here, and the longer one a number known to be the same.
        is_equal = move.begins(i, known) & (move.begins(i, value) == here[i].to(value.dtype))
        is_constant = is_equal & (here[i] == here_mirrored[i])
        is_elsewhere = (move.begins(i, origin) != here[i]) & ~is_constant
        pad = (pad & ~move.among_longer(i, is_constant)) | move.among_longer(i, is_elsewhere)
        found.append(reach_of(move.dims(i), pad, known, value))
    return found


@dataclass(frozen=True, slots=True)
class _Move:
    """An op that moves elements, in both programs.

    Tensors keep size one in dims along which all is alike, where the op's rule says that it works place by place.
    """

    pair: OpPair
    sources: Mapping[fx.Node, Reach]  # the operands whose elements it moves
    indices: Mapping[fx.Node, Tensor]
    rows: Mapping[fx.Node, Sequence[Dim]]  # the factors of the sources' dims
    outputs: Sequence[Sequence[Dim]]
    sizes: Mapping[str, Factors]  # sizes of the factors on which it works place by place

    @staticmethod
    def of(pair: OpPair, indices: Mapping[fx.Node, Reach]) -> _Move:
        binding = bound(pair)
        sources = {n: pair.reaches[n] for n in pair.node.all_input_nodes if n not in indices}
        rows = rows_by_node(pair, binding)
        others = {d.factor for n in indices for d in rows.get(n, ())}
        alone = factors_alone(binding) - others
        sizes: dict[str, Factors] = {}
        for n, reach in sources.items():
            for dim, along in zip(rows.get(n, ()), reach.dims, strict=False):
                if dim.factor in alone:
                    learn_size(sizes, dim.factor, along)
        if not sources and math.prod(type_of(pair.node).shape) > MOST:
            raise Unclear
        given = {n: r.full(r.value) for n, r in indices.items()}
        return _Move(pair, sources, given, rows, binding.outputs if binding else (), sizes)

    def labels(self) -> dict[fx.Node, Tensor]:
        """A number for each element of each source."""
        blank = {n: torch.zeros((1,) * len(r.dims)) for n, r in self.sources.items()}
        found = {}
        first = 1
        for n, tensor in opened(blank, self.pair, self.rows, self.sizes).items():
            numbers = torch.arange(first, first + tensor.numel(), dtype=torch.float64)
            found[n] = numbers.reshape(tensor.shape)
            first += tensor.numel()
        return found

    def run(self, tensors: Mapping[fx.Node, Tensor]) -> list[Tensor]:
        """Run the op of the longer program on these in place of the sources."""
        given = opened(tensors, self.pair, self.rows, self.sizes)
        return list(map(narrowed, self.pair.run({**self.indices, **given})))

    def run_exact(self, tensors: Mapping[fx.Node, Tensor]) -> list[Tensor]:
        """Run the op of the unpadded program on the elements that it has."""
        given = {n: exactly(t, self.pair.reaches[n].dims) for n, t in {**self.indices, **tensors}.items()}
        return list(map(narrowed, self.pair.run_exact(given)))

    def begins(self, i: int, tensor: Tensor) -> Tensor:
        """The first elements of an output's tensor, as many as the unpadded program has."""
        for d, size, _ in self._moved_dims(i):
            tensor = tensor.narrow(d, 0, min(size, tensor.shape[d]))
        return tensor

    def among_longer(self, i: int, mask: Tensor) -> Tensor:
        """A mask of an output's first elements as one of all its elements."""
        for d, _, size in self._moved_dims(i):
            if mask.shape[d] != 1:
                mask = F.pad(mask, [0, 0] * (mask.dim() - 1 - d) + [0, size - mask.shape[d]])
        return mask

    def dims(self, i: int) -> tuple[Factors, ...]:
        """The dims of an output: those of the sources where it works place by place, else one factor each."""
        row = self.outputs[i] if self.outputs else ()
        found = list(self.pair.dims(i))
        for d, dim in enumerate(row):
            if found[d]:
                found[d] = self.sizes.get(dim.factor, found[d])
        return tuple(found)

    def _moved_dims(self, i: int) -> list[tuple[int, int, int]]:
        """An output's dims along which it moves, each with its size in both programs."""
        row = self.outputs[i] if self.outputs else ()
        here, longer = (info(n).outputs[i].shape for n in (self.pair.exact, self.pair.node))
        both = enumerate(zip(here, longer, strict=True))
        return [(d, a, b) for d, (a, b) in both if not row or row[d].factor not in self.sizes]


def view(pair: OpPair) -> Reach:
    """The reach of a view: the same factors, distributed over other dims."""
    given = need(pair.of("input"))
    if not math.prod(given.shape) or not math.prod(exact_shape(given)):
        raise Unclear
    left = [(d, factor) for d, factors in enumerate(given.dims) for factor in factors]
    before: list[list[int]] = [[] for _ in given.dims]  # sizes of the factors of both shapes in the longer program
    after: list[list[int]] = []
    dims = []
    for e, n in zip(type_of(pair.exact).shape, type_of(pair.node).shape, strict=True):
        mine: list[tuple[int, int]] = []
        while (e, n) != (1, 1):
            if not left:
                raise Unclear
            d, (a, b) = left.pop(0)
            if e % a == 0 and n % b == 0:
                part = a, b
            # the dim takes the major part of a factor, whose rest is not padded
            elif a % e == 0 and b % n == 0 and a // e == b // n:
                part = e, n
                left.insert(0, (d, (a // e, b // n)))
            else:
                raise Unclear
            mine.append(part)
            before[d].append(part[1])
            e, n = e // part[0], n // part[1]
        dims.append(tidy(tuple(mine)))
        after.append([size for _, size in mine])
    if left:
        raise Unclear
    return reach_of(tuple(dims), *(_reshaped(t, before, after) for t in (given.pad, given.known, given.value)))


def _reshaped(tensor: Tensor, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Tensor:
    """The tensor with its factors in other dims; dims along which all is alike stay of size one."""
    fine: list[int] = []
    for n, factors in zip(tensor.shape, before, strict=True):
        fine += [1] * len(factors) if n == 1 else factors
    full: list[int] = []
    shape = []
    for factors in after:
        is_alike = all(n == 1 for n in fine[len(full) : len(full) + len(factors)])
        full += [1] * len(factors) if is_alike else factors
        shape.append(1 if is_alike else math.prod(factors))
    if math.prod(full) > MOST:
        raise Unclear
    return tensor.reshape(fine).expand(full).reshape(shape)
