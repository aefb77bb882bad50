"""A summary of a plan: what it does in words, what it takes, and how far from the best it may be.

At most `LINES` lines of `WIDTH` columns. The whole of it is `plan.table()`.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.graph.layers import folded
from autopar.sharding.certainty import FROM
from autopar.sharding.placement import Placement
from autopar.solver.decision import Decision, Regathered
from autopar.solver.figures import size, time
from autopar.solver.limits import LIMITS

if TYPE_CHECKING:
    from autopar.solver.plan import Beside, Plan

_LIMITS = LIMITS.words

LINES = 15
WIDTH = 100
_LABEL = 10
ITSELF = "of a step itself"  # seconds beside its ops and communication, which a measured machine has
_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")  # names of products, where no op surely uses a weight


def summary_of(plan: Plan) -> str:
    """The summary of a plan as text."""
    rows = [*_what(plan), *_takes(plan), *_warnings(plan)]
    lines = [line for label, text, most in rows for line in _wrapped(label, text, most)]
    left = LINES - 1 - len(lines)
    said = [line for label, text, most in _said(plan) for line in _wrapped(label, text, most)]
    if len(said) > left > 0:
        said[left - 1] = _cut_short(said[left - 1])
    return "\n".join([*lines, *said[:left], "whole     plan.table(); one place of it: plan.explain(name)"])


_Line = tuple[str, str, int]  # label, text, and the lines that it may take


def _wrapped(label: str, text: str, most: int) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - _LABEL, max_lines=most, placeholder=" ...", break_long_words=True)
    return [f"{head:<{_LABEL}}{line}" for head, line in zip([label, *[""] * most], lines, strict=False)]


def _cut_short(line: str) -> str:
    """A line that ends in "...", as more follows that is not printed."""
    room = WIDTH - len(" ...")
    kept = line if len(line) <= room else line[:room].rpartition(" ")[0]
    return f"{kept.rstrip('; ')} ..."


def _what(plan: Plan) -> Iterator[_Line]:
    """Lines about what the plan does."""
    made = ", compiled" if plan.compiled else ""
    dtypes = f", computes in {plan.precision[0]}" if plan.precision else ""
    count = f"{plan.mesh.size} device{'s' if plan.mesh.size > 1 else ''}"
    yield "plan", f"for {count}, mesh {plan.mesh}{dtypes}{made}, cluster {plan.cluster}", 1
    yield "does", verdict(plan), 3
    if plan.recomputed:
        passing = f", {len(plan.passing)} of them in passing too" if plan.passing else ""
        values = (name.rpartition(":")[0] if name[-1:].isdigit() and ":" in name else name for name in plan.recomputed)
        yield "recompute", f"{len(plan.recomputed)} values{passing}: {_named(Counter(map(_short, values)))}", 2


def _takes(plan: Plan) -> Iterator[_Line]:
    """Lines about the plan's seconds and bytes."""
    said = ", ".join(f"{time(s)} {what}" for what, s in parts_of_step(plan).items() if s >= 0.0005 * plan.step_time_s)
    yield "step", f"{time(plan.step_time_s)}: {said}{_expected(plan)}", 3
    kinds = sorted(plan.memory.items(), key=lambda pair: -pair[1])
    large = [(kind, n) for kind, n in kinds if n >= _LIMITS.large * plan.peak_bytes]
    rest = sum(plan.memory.values()) - sum(n for _, n in large)
    held = ", ".join(f"{kind} {size(n)}" for kind, n in [*large, ("others", rest)] if n)
    of_budget = f" of {size(plan.budget)}" if math.isfinite(plan.budget) else ""
    yield "memory", f"{size(plan.peak_bytes)}{of_budget} at the {plan.peak_at}: {held}", 3
    within = " within the budget" if math.isfinite(plan.budget) else ""
    of = f" {plan.bound_of}" if plan.bound_of else ""
    on = f" on mesh {plan.mesh}" if plan.meshes else ""  # others were searched, too
    yield "bound", f"no plan{on}{within}{of} takes less than {time(plan.lower_bound_s)}: gap {plan.gap:.2%}", 3
    if beside := _beside(plan):
        yield "beside", beside, 2
    yield "dearest", _dearest(plan), 2


def parts_of_step(plan: Plan) -> dict[str, float]:
    """The seconds of a step by what they are spent on, in words; they add up to the step's."""
    of_kind = defaultdict[str, float](float)
    for d in plan.decisions.values():
        of_kind[d.kind] += d.seconds
    optimizer = of_kind.pop("parameter", 0.0)
    of_step = of_kind.pop("output", 0.0)
    return {
        "compute": sum(of_kind.values()),
        "optimizer": optimizer,
        ITSELF: of_step,
        "communication in line": sum(c.seconds for c in plan.conversions) - plan.beside_s,
        "exposed communication": plan.beside_s - plan.hidden_s,
        "recompute": plan.recompute_s,
    }


def sources_of(plan: Plan, least: float) -> str:
    """The sources of a step's seconds in words: of those that give `least` of them, each with its share."""
    total = sum(plan.sources.values())
    shares = sorted(((s / total, FROM[name]) for name, s in plan.sources.items() if s >= least * total), reverse=True)
    return shares[0][1] if len(shares) == 1 else ", ".join(f"{share:.0%} {name}" for share, name in shares)


def _expected(plan: Plan) -> str:
    """Text about the seconds between which a measured step is expected; "" without sources."""
    if not sum(plan.sources.values()):
        return ""
    low, high = plan.step_interval_s
    rates = ", whose rates no step reaches" if plan.step_time_s < low else ""
    return f"; expect {time(low)} to {time(high)} in nine of ten, {sources_of(plan, _LIMITS.some)}{rates}"


def _warnings(plan: Plan) -> Iterator[_Line]:
    """Lines of warnings."""
    if plan.without_rule:
        cost = sum(plan.decisions[name].seconds for name in plan.without_rule)
        names = _named(Counter(map(_short, plan.without_rule)))
        yield "careful", f"replicated for want of a rule ({time(cost)} a step): {names}", 1
    if plan.unaligned:
        lost = sum(plan.unaligned.values())
        names = _named(Counter(map(_short, plan.unaligned)))
        more = f"{names} would take {time(lost)} less with sizes that are multiples of 8"
        yield "careful", f"{more} (in transformers: model.resize_token_embeddings(None, pad_to_multiple_of=8))", 2
    for warning in plan.warnings:
        yield "careful", warning, 1
    if plan.untyped:
        yield "untyped", plan.untyped, 2
    if plan.stopped:
        yield "stopped", f"{', '.join(plan.stopped)}, after the work that it is given", 1


def _said(plan: Plan) -> Iterator[_Line]:
    """Lines about assumptions, and about the meaning of defaults."""
    if plan.assumptions:
        yield "assumed", "; ".join(plan.assumptions), 1
    said = [f"{name}: {meaning.partition(':')[0]}" for name, meaning in plan.defaults]
    if said:
        yield "defaults", "; ".join(said), 2


def _beside(plan: Plan) -> str:
    """Text about the plans of presets on the mesh, or how to ask for them; "" without the space."""
    known = plan.search.known_beside if plan.search is not None else None
    if known is None and not plan.has_space:
        return ""
    if known is None:
        return "plan.beside(), or --beside, plans the same model under dp, zero3 and megatron"
    return "; ".join(map(_of_rival, known))


def _of_rival(rival: Beside) -> str:
    if rival.why:
        return f"{rival.name} {rival.why}"
    fits = "" if rival.fits else ", over the budget before recompute"
    return f"{rival.name} {time(rival.step_time_s)} ({size(rival.peak_bytes)}{fits})"


def _dearest(plan: Plan) -> str:
    """The places that take most of the step, with those of all layers added up."""
    seconds: dict[str, float] = defaultdict(float)
    for name, d in plan.decisions.items():
        seconds[ITSELF if d.kind == "output" else _short(name)] += d.seconds
    for c in plan.conversions:
        seconds[f"{_short(c.source)} -> {_short(c.target)}"] += c.seconds
    dearest = sorted(seconds.items(), key=lambda pair: -pair[1])[: _LIMITS.dearest]
    return ", ".join(f"{name} {s / plan.step_time_s:.0%}" for name, s in dearest if s) if plan.step_time_s else ""


# -- the plan in words


def verdict(plan: Plan) -> str:
    """The plan in words: what each axis of the mesh cuts, axes of one role together."""
    roles: dict[tuple[_Role, int], list[int]] = defaultdict(list)
    for axis, n in enumerate(plan.mesh.shape):
        if n > 1:
            role = _role(plan, axis)
            alone = axis if 0 < role.stored < 10 else -1  # another axis may cut other parameters
            roles[role, alone].append(axis)
    said = [role.text(plan, axes) for (role, _), axes in roles.items()]
    turns = [f"the batch passes in {plan.microbatches} micro-batches"] if plan.microbatches > 1 else []
    calls = [f"a step is {plan.accumulation} calls"] if plan.accumulation > 1 else []
    head = [f"the loss head runs in {plan.chunks} chunks of rows"] if plan.chunks > 1 else []
    return "; ".join([*said, *calls, *turns, *head]) or "everything runs on one device"


@dataclass(frozen=True, slots=True)
class _Role:
    """What an axis is used for: tenths of the seconds of products, by cut, and of stored parameters."""

    rows: int
    positions: int
    weights: int
    stored: int
    is_regathered: bool
    modules: tuple[str, ...]  # modules whose weights are used in parts

    def text(self, plan: Plan, axes: Sequence[int]) -> str:
        n = math.prod(plan.mesh.shape[a] for a in axes)
        names = [plan.mesh.axes[a] for a in axes]
        word = "axis " if len(axes) == 1 else "axes "
        along = f"{n} devices" if len(plan.mesh.shape) == 1 else f"{n} ({word}{', '.join(names)})"
        said = []
        for tenths, what in ((self.rows, "batch over"), (self.positions, "positions over")):
            if tenths:
                said.append(f"{what} {along}{_share(tenths)}")
        if self.weights:
            where = f": {_named(Counter(self.modules))}" if self.modules else ""
            said.append(f"weights over {along}{_share(self.weights)}{where}")
        elif self.stored:
            share = "" if self.stored == 10 else f" ({self.stored}0% of their bytes)"
            again = ", and again in backward" if self.is_regathered else ""
            said.append(f"parameters stored in {n} parts{share}, gathered where they are used{again}")
        return ", ".join(said) or f"the same on all {along}"


def _role(plan: Plan, axis: int) -> _Role:
    """The role of an axis in a plan."""
    seconds = defaultdict[str, float](float)
    modules = set[str]()
    is_batch = _cuts_batch(plan, axis)
    for name, d in _products(plan):
        cut = cut_of(d, axis)
        # Positions are rows where the batch is in another dim.
        cut = "rows" if cut == "positions" and is_batch else cut
        seconds[cut] += d.seconds or 1e-12
        if cut == "weights":
            modules.add(_module(name))
    total = sum(seconds.values()) or 1.0
    tenths = {cut: _tenths(s / total) for cut, s in seconds.items()}
    stored, is_regathered = _stored_along(plan, axis)
    return _Role(
        tenths.get("rows", 0),
        tenths.get("positions", 0),
        tenths.get("weights", 0),
        stored,
        is_regathered,
        tuple(sorted(modules)) if tenths.get("weights", 0) else (),
    )


def _products(plan: Plan) -> list[tuple[str, Decision]]:
    """The products with weights; without any, all products; without these, all ops that take time."""
    ops = [(name, d) for name, d in plan.decisions.items() if d.kind == "op"]
    of_weights = [(name, d) for name, d in ops if d.op == "linear" or d.op.startswith("conv")]
    return of_weights or [(name, d) for name, d in ops if d.op in _PRODUCTS] or [p for p in ops if p[1].seconds]


def _stored_along(plan: Plan, axis: int) -> tuple[int, bool]:
    """Tenths of parameter bytes that an axis cuts in storage, and whether backward gathers most of these."""
    placed = [(plan.parameter_bytes[n], s.placements[axis].is_shard, n) for n, s in plan.parameters.items()]
    cut_bytes = sum(nbytes for nbytes, is_cut, _ in placed if is_cut)
    again = sum(nbytes for nbytes, is_cut, n in placed if is_cut and isinstance(plan.states.get(n), Regathered))
    whole = sum(plan.parameter_bytes.values()) or 1
    return _tenths(cut_bytes / whole), again > cut_bytes / 2


def _cuts_batch(plan: Plan, axis: int) -> bool:
    """Whether an axis cuts some input along its first dim."""
    inputs = {name.partition(":")[0] for name, d in plan.decisions.items() if d.kind == "input"}
    return any(
        step.kind == "slice" and step.axis == axis and step.dim == 0
        for c in plan.conversions
        if c.source.partition(":")[0] in inputs
        for step in c.forward
    )


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


def _share(tenths: int) -> str:
    return "" if tenths == 10 else f" for {tenths}0% of the products"


def _short(name: str) -> str:
    """A name without the layers around it: `mlp.c_fc/linear` for `transformer.h.0.mlp.c_fc/linear`."""
    return folded(name).rpartition("*.")[2]


def _module(name: str) -> str:
    module, _, op = _short(name).partition("/")
    return op if module in ("", "*") else module


def _named(counted: Counter[str]) -> str:
    """The most frequent names, and how many more there are."""
    names = [name if n == 1 else f"{name} (x{n})" for name, n in sorted(counted.items(), key=lambda p: (-p[1], p[0]))]
    return ", ".join(_cut_off(names))


def _cut_off(names: Iterable[str]) -> list[str]:
    names = list(names)
    more = [f"{len(names) - _LIMITS.names} more"] if len(names) > _LIMITS.names else []
    return [*names[: _LIMITS.names], *more]
