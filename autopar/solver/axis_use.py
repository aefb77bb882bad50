"""`AxisUse`: what each axis of a plan is for; axes that are alike are exchanged to fit their names."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.graph.layers import folded
from autopar.sharding.attention_ways import ATTENTIONS, GATHER, RING, STEPWISE, ULYSSES, ways_of
from autopar.sharding.placement import Placement
from autopar.sharding.strategies import Choice
from autopar.solver.decision import Decision, Regathered
from autopar.solver.limits import LIMITS
from autopar.solver.ties import settled

if TYPE_CHECKING:
    from autopar.solver.budget import Budgeted
    from autopar.solver.plan import Plan
    from autopar.solver.points import Point
    from autopar.space.space import Site

_LIMITS = LIMITS.words

_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")  # names of products, where no op surely uses a weight

# Weights of an axis's amounts of rows, positions, weights and storage that users expect by its name.
_EXPECTED = {
    **dict.fromkeys(("data", "dp", "ddp", "batch"), (1, 0, -1, 0)),
    **dict.fromkeys(("fsdp", "shard", "dp_shard", "zero"), (1, 0, -1, 1)),
    **dict.fromkeys(("replica", "replicate", "dp_replicate"), (1, 0, -1, -1)),
    **dict.fromkeys(("model", "tensor", "tp", "mp"), (-1, 0, 1, 0)),
    **dict.fromkeys(("sequence", "seq", "sp", "context", "cp"), (0, 1, 0, 0)),
}


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What an axis is used for: tenths of the seconds of products, by cut, and of stored parameters."""

    rows: int
    positions: int
    weights: int
    stored: int
    is_regathered: bool
    modules: tuple[str, ...]  # modules whose weights are used in parts
    experts: str = ""  # words for what the axis does to experts; "" where it does not divide them
    sequence: str = ""  # words for how it divides a sequence and its attentions; "" where it divides none

    @property
    def amounts(self) -> tuple[int, int, int, int]:
        """Tenths by use."""
        return self.rows, self.positions, self.weights, self.stored

    @property
    def is_idle(self) -> bool:
        """Whether nothing is cut along the axis."""
        return not any(self.amounts) and not self.experts and not self.sequence


def use_of(plan: Plan, axis: int) -> AxisUse:
    """The use of an axis in a plan."""
    seconds = defaultdict[str, float](float)
    modules = set[str]()
    dims = _cut_of_inputs(plan, axis)
    way = _way_along(plan, axis)
    # Positions are rows where the batch is in another dim; and rows are positions where a sequence was made flat.
    same = {"positions": "rows"} if 0 in dims else {"rows": "positions"} if way and dims else {}
    for name, d in _products(plan):
        cut = cut_of(d, axis)
        cut = same.get(cut, cut)
        seconds[cut] += d.seconds or 1e-12
        if cut == "weights":
            modules.add(_module(name))
    total = sum(seconds.values()) or 1.0
    tenths = {cut: _tenths(s / total) for cut, s in seconds.items()}
    experts, in_parts = _experts_along(plan, axis)
    stored, is_regathered = _stored_along(plan, axis, in_parts)
    is_sequence = tenths.get("positions", 0) > tenths.get("weights", 0) or way in (RING, GATHER, STEPWISE)
    return AxisUse(
        tenths.get("rows", 0),
        tenths.get("positions", 0),
        tenths.get("weights", 0),
        stored,
        is_regathered,
        tuple(sorted(modules)) if tenths.get("weights", 0) else (),
        experts,
        _OF_SEQUENCES[way] if way and is_sequence else "",
    )


_OF_SEQUENCES = {
    RING: "context parallel (keys in a ring)",
    STEPWISE: "context parallel (keys gathered in each step)",
    GATHER: "context parallel (keys gathered)",
    ULYSSES: "sequence parallel (heads inside attention: Ulysses)",
}


def _way_along(plan: Plan, axis: int) -> str:
    """The way in which an axis divides most attentions (`attention_ways`); "" where it is none of these."""
    seconds = defaultdict[str, float](float)
    for d in plan.decisions.values():
        if d.op in ATTENTIONS and d.outputs:
            dims = d.outputs[0].count(",") + 1
            seconds[ways_of(d.choice.strategies, dims)[axis]] += d.seconds or 1e-12
    return max(seconds, key=seconds.__getitem__, default="")


_OF_EXPERTS = {
    (True, True): "expert parallel (rows travel)",
    (False, True): "expert parallel (rows gathered)",
    (False, False): "tensor parallel inside experts",
}


def _experts_along(plan: Plan, axis: int) -> tuple[str, frozenset[str]]:
    """Words for how an axis divides most experts, and the parameters that they use in parts along it."""
    seconds = defaultdict[str, float](float)
    in_parts = set[str]()
    for d in plan.decisions.values():
        if d.op != "experts":
            continue
        of_rows, _, _, of_matrices, *_ = (flow.value for flow in d.choice.strategies[axis].operands)
        way = ""
        if of_matrices.is_shard:
            way = _OF_EXPERTS[of_rows.is_shard, of_matrices.dim == 0]
            in_parts.update(filter(None, (_parameter(plan, name) for name in d.reads)))
        seconds[way] += d.seconds or 1e-12
    return max(seconds, key=seconds.__getitem__, default=""), frozenset(in_parts)


def _parameter(plan: Plan, name: str) -> str:
    """The parameter that a value is, but for its dtype; "" for another value."""
    d = plan.decisions.get(name)
    while d is not None and d.op in ("identity", "to") and d.reads:
        name = d.reads[0]
        d = plan.decisions.get(name)
    return name if d is not None and d.kind == "parameter" else ""


def _products(plan: Plan) -> list[tuple[str, Decision]]:
    """The products with weights; without any, all products; without these, all ops that take time."""
    ops = [(name, d) for name, d in plan.decisions.items() if d.kind == "op"]
    of_weights = [(name, d) for name, d in ops if d.op == "linear" or d.op.startswith("conv")]
    return of_weights or [(name, d) for name, d in ops if d.op in _PRODUCTS] or [p for p in ops if p[1].seconds]


def _stored_along(plan: Plan, axis: int, in_parts: Collection[str]) -> tuple[int, bool]:
    """Tenths of parameter bytes that an axis cuts in storage, and whether backward gathers most of these.

    Parameters that are used in the parts in which they are stored do not count.
    """
    placed = [
        (plan.parameter_bytes[n], s.placements[axis].is_shard, n)
        for n, s in plan.parameters.items()
        if n not in in_parts
    ]
    cut_bytes = sum(nbytes for nbytes, is_cut, _ in placed if is_cut)
    again = sum(nbytes for nbytes, is_cut, n in placed if is_cut and isinstance(plan.states.get(n), Regathered))
    whole = sum(nbytes for nbytes, _, _ in placed) or 1
    return _tenths(cut_bytes / whole), again > cut_bytes / 2


def _cut_of_inputs(plan: Plan, axis: int) -> set[int]:
    """The dims along which an axis cuts inputs."""
    inputs = {name.partition(":")[0] for name, d in plan.decisions.items() if d.kind == "input"}
    return {
        step.dim
        for c in plan.conversions
        if c.source.partition(":")[0] in inputs
        for step in c.forward
        if step.kind == "slice" and step.axis == axis
    }


def cut_of(d: Decision, axis: int) -> str:
    """The part of a product that an axis cuts: "rows", "positions", "weights" or "nothing"."""
    strategy = d.choice.strategies[axis]
    values: list[Placement] = [flow.value for flow in strategy.operands] or [flow.value for flow in strategy.outputs]
    if len(values) > 1 and values[1].is_shard:
        return "weights"
    if not values[0].is_shard:
        return "nothing"
    return "rows" if values[0].dim == 0 else "positions"


def _tenths(share: float) -> int:
    """A share in tenths: 10 from nine tenths on, 0 below one."""
    return 10 if share >= _LIMITS.all else 0 if share < _LIMITS.some else round(10 * share)


def short_name(name: str) -> str:
    """A name without the layers around it: `mlp.c_fc/linear` for `transformer.h.0.mlp.c_fc/linear`."""
    return folded(name).rpartition("*.")[2]


def _module(name: str) -> str:
    module, _, op = short_name(name).partition("/")
    return op if module in ("", "*") else module


def as_named(counted: Budgeted, point: Point, plan: Plan, budget: float) -> Point:
    """The plan's point with axes of one size exchanged, where they fit their names better so.

    A mesh of (dp=2, tp=2) inside a node has two axes of one speed. Each plan has a twin there that uses them the other
    way round; it takes as long, or a little longer where something is stored along both, which is a price worth paying.
    The point stays where backward recomputes, and where its twin is no plan of the space, as a pin names an axis.
    """
    sizes = plan.mesh.shape
    expected = [_expected_of(name) for name in plan.mesh.axes]
    if point.recomputed or len({what for what, n in zip(expected, sizes, strict=True) if n > 1}) < 2:
        return point
    same = tuple(range(len(sizes)))
    fits = np.array(expected) @ np.array([use_of(plan, axis).amounts for axis in same]).T  # [axis, axis of a use]
    orders = [order for order in itertools.permutations(same) if np.take(sizes, order).tolist() == list(sizes)]
    for order in sorted(orders, key=lambda order: -fits[same, order].sum()):
        if order == same:
            break
        picked = _exchanged(counted.space.sites, point.picked, order)
        if picked is not None:
            twin = settled(counted, counted.point(picked), budget)
            if twin.seconds <= point.seconds * (1 + LIMITS.meshes.named) and twin.peak <= budget:
                return twin
    return point


def _expected_of(name: str) -> tuple[int, ...]:
    """Weights of the amounts that users expect of an axis of this name; none of another name."""
    return _EXPECTED.get(name.lower().rstrip("0123456789_"), (0, 0, 0, 0))


def _exchanged(sites: Sequence[Site], picked: Sequence[int], order: Sequence[int]) -> list[int] | None:
    """The choices in which each axis takes the strategy of another; None where a site lacks one."""
    known: dict[tuple[int, int], int | None] = {}
    found = []
    for site, i in zip(sites, picked, strict=True):
        key = id(site.choices), i
        if key not in known:
            known[key] = _index_of_twin(site, i, order)
        twin = known[key]
        if twin is None:
            return None
        found.append(twin)
    return found


def _index_of_twin(site: Site, i: int, order: Sequence[int]) -> int | None:
    """The choice in which each axis takes the strategy of another, with the policies of choice `i`."""
    strategies = site.choices[i].strategies
    twin = Choice(tuple(strategies[a] for a in order))
    for k, choice in enumerate(site.choices):
        if choice == twin and (not site.policies or site.policies[k] == site.policies[i]):
            return k
    return None
