"""The strategies of a bound rule: the algebra of values and gradients on one axis, then crossed over the mesh.

On an axis that an op uses to cut a factor, an operand or output that has the factor is `S`, its gradient `S`; an
operand that lacks it is `R`, its gradient `P(sum)`; an output that lacks it is `P(sum)`, its gradient `R`. On an axis
that it does not use, all are `R` with gradients `R`; or all `R` with gradients `P(sum)`, since a backward is linear in
its cotangent; or, for operands in which the op is linear, those and the output are `P(sum)` and the others `R` with
gradients `P(sum)`.

Data parallelism, Megatron's conjugate operators, sequence parallelism and ZeRO are corollaries; none is special-cased.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.letters import BadSharding
from autopar.sharding.layout import CutDim
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import Binding, Cut, Dim
from autopar.sharding.placement import Flow, P, Placement, R, S, Sharding, flow, outside_brackets

KEPT = flow(R)  # R/R
PASSED = Flow(R, P())  # R/P(sum)
SUMMED = flow(P())  # P(sum)/R


@dataclass(frozen=True, slots=True)
class Strategy:
    """One legal way to run an op on one axis: `S(0), R/P(sum) -> S(0)`, and what the axis cuts, if anything."""

    operands: tuple[Flow, ...]
    outputs: tuple[Flow, ...]
    cut: Cut | None = None

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.operands))} -> {', '.join(map(repr, self.outputs))}".strip()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and (self.operands, self.outputs) == (other.operands, other.outputs)

    def __hash__(self) -> int:
        return hash((self.operands, self.outputs))

    @property
    def is_unused(self) -> bool:
        """Whether every device of the axis does all of the op, forward and backward."""
        return all(f == KEPT for f in (*self.operands, *self.outputs))

    @staticmethod
    def parse(text: str) -> Strategy:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise BadSharding(f"{text!r} is not a strategy", advice='"S(0), R/P(sum) -> S(0)"')
        return Strategy(_flows(left), _flows(right))


def _flows(text: str) -> tuple[Flow, ...]:
    return tuple(Flow.parse(piece) for piece in outside_brackets(text) if piece.strip())


@dataclass(frozen=True, slots=True)
class Choice:
    """How one op runs on the whole mesh: a strategy per axis."""

    strategies: tuple[Strategy, ...]

    def __repr__(self) -> str:
        return "; ".join(map(repr, self.strategies))

    def operand(self, i: int) -> tuple[Flow, ...]:
        """The flows of operand `i`, one per axis."""
        return tuple(s.operands[i] for s in self.strategies)

    def output(self, i: int = 0) -> tuple[Flow, ...]:
        return tuple(s.outputs[i] for s in self.strategies)


@functools.lru_cache(maxsize=1 << 14)
def values(flows: tuple[Flow, ...]) -> Sharding:
    return Sharding(tuple(f.value for f in flows))


@functools.lru_cache(maxsize=1 << 14)
def gradients(flows: tuple[Flow, ...]) -> Sharding:
    return Sharding(tuple(f.gradient for f in flows))


def strategies_on_one_axis(
    binding: Binding,
    wants_gradient: Sequence[bool],
    gives_gradient: Sequence[bool],
    blocks: Mapping[str, Collection[tuple[int, ...]]] | None = None,
) -> tuple[Strategy, ...]:
    """Every strategy of a bound rule on one axis; `blocks` are those by which a factor may also be cut.

    A tensor without a gradient is given, by convention, the gradient of its value written alone: strategies that differ
    in nothing else are one.
    """
    rows = {i: row for i, row in enumerate(binding.operands) if row is not None}
    found: dict[Strategy, None] = {}

    def add(operands: dict[int, Flow], outputs: list[Flow], cut: Cut | None = None) -> None:
        ins = tuple(operands[i] if wants_gradient[i] else flow(operands[i].value) for i in rows)
        outs = tuple(o if gives else flow(o.value) for o, gives in zip(outputs, gives_gradient, strict=True))
        found.setdefault(Strategy(ins, outs, cut))

    for unused in (KEPT, PASSED):
        add(dict.fromkeys(rows, unused), [unused] * len(binding.outputs))
    for group in binding.groups:
        add({i: SUMMED if i in group else PASSED for i in rows}, [SUMMED] * len(binding.outputs))
    for cut in binding.cuts(blocks):
        held = {i: place for i, row in rows.items() if (place := _place(row, cut, binding))}
        # Under a summed factor an operand that is added to the sum is P(sum), one that multiplies it is R.
        added = set[int]()
        if binding.is_summed(cut):
            added.update(*(group for group in binding.groups if not group.isdisjoint(held)))
        operands = {i: flow(held[i]) if i in held else SUMMED if i in added else PASSED for i in rows}
        leaves = [_place(row, cut, binding) for row in binding.outputs]
        add(operands, [flow(p) if p else KEPT if binding.is_inside(cut) else SUMMED for p in leaves], cut)
    return tuple(found)


def _place(row: Sequence[Dim], cut: Cut, binding: Binding) -> Placement | None:
    """The placement of an operand with these dims under a cut; None where none of its dims is cut."""
    for i, dim in enumerate(row):
        if dim.joined == "|" and dim.factors == cut.factors:
            return S(i, tuple(binding.sizes[f] for f in dim.factors))
        if set(dim.factors) & set(cut.factors):
            return S(i, binding.blocks_of(dim, cut.factors[0]) if dim.joined == "*" else cut.blocks)
    return None


def replicated(operands: int, wants_gradient: Sequence[bool], gives_gradient: Sequence[bool]) -> tuple[Strategy, ...]:
    """The strategies of an op without a rule: every device computes the whole."""
    nothing = Binding(((),) * operands, ((),) * len(gives_gradient), {}, frozenset(), ())
    return strategies_on_one_axis(nothing, wants_gradient, gives_gradient)


def cross(per_axis: Sequence[Strategy], sizes: dict[str, int], mesh: DeviceMesh) -> tuple[Choice, ...]:
    """Every choice: a strategy for each axis, under which no device gets an empty part.

    An axis of size 1 takes only strategies that do not use it.
    """
    unused = [s for s in per_axis if s.is_unused]
    menus = [per_axis if n > 1 else unused for n in mesh.shape]
    result = []
    for combination in itertools.product(*menus):
        cuts: dict[str, list[tuple[Cut, int, int]]] = {}  # A factor may be cut alone, and with another.
        for axis, (strategy, n) in enumerate(zip(combination, mesh.shape, strict=True)):
            if (cut := strategy.cut) is not None:
                for factor in cut.factors:
                    cuts.setdefault(factor, []).append((cut, axis, n))
        if all(_holds(sizes[factor], tuple(made)) for factor, made in cuts.items()):
            result.append(Choice(combination))
    return tuple(result)


@functools.lru_cache(maxsize=1 << 14)
def _holds(size: int, cuts: tuple[tuple[Cut, int, int], ...]) -> bool:
    """Whether nested axes can cut a factor of this size so that every part holds something."""
    if any(cut.even for cut, _, _ in cuts) and size % math.prod(n for _, _, n in cuts):
        return False
    row: CutDim | None = CutDim.whole(size)
    for cut, axis, n in cuts:
        row = row.cut(axis, n, cut.blocks) if row else None
    return row is not None


def storage_strategies(
    shape: Sequence[int], blocks: dict[int, set[tuple[int, ...]]] | None = None
) -> tuple[Strategy, ...]:
    """Ways to store a tensor, its gradient and optimizer states on one axis: whole, or cut by a dim."""
    cuts = [
        (d, Cut((f"dim{d}",), b, bool(b)))
        for d, n in enumerate(shape)
        if n > 1
        for b in [(), *sorted((blocks or {}).get(d, ()))]
    ]
    return (Strategy((), (KEPT,)), *(Strategy((), (flow(S(d, cut.blocks)),), cut) for d, cut in cuts))
