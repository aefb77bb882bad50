"""A plan as a person reads it: the table, one site explained, two plans compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.graph.layers import folded
from autopar.letters import BadPlan
from autopar.sharding.certainty import FROM, resolution
from autopar.sharding.convert import Step
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice
from autopar.solver.decision import Conversion

if TYPE_CHECKING:
    from autopar.solver.curve import Curve, CurvePoint
    from autopar.solver.plan import Plan

_Row = tuple[str, ...]
_AS_FAST = 1e-9  # seconds by which a rival is no slower


def table_of(plan: Plan) -> str:
    """The whole plan: its figures, then what it decides, alike layers in one row."""
    blocks = [
        _head(plan),
        _aligned(("parameter", "stored", "bytes a device"), _folded(_parameter_rows(plan))),
        _aligned(("op", "operands -> output", "us"), _folded(_op_rows(plan))),
        _aligned(("conversion", "value", "forward", "backward", "us"), _folded(_conversion_rows(plan))),
    ]
    if plan.recomputed:
        head = ("needed in backward", "state", "bytes a device", "us to make it")
        blocks.append(_aligned(head, _folded(_needed_rows(plan))))
    if plan.without_rule:
        blocks.append(_without_rule(plan))
    if plan.meshes:
        blocks.append(_aligned(("mesh", "step", "bound", "", "peak"), _mesh_rows(plan)))
    if plan.stopped:
        why = "after the work that it is given: the gap says what may be left"
        blocks.append([f"stopped   {search}, {why}" for search in plan.stopped])
    assumed = [f"assumed   {assumption}" for assumption in plan.assumptions]
    said = assumed + [f"default   {name}: {meaning}" for name, meaning in plan.defaults]
    if said:
        blocks.append(said)
    return "\n\n".join("\n".join(block) for block in blocks)


def explained(plan: Plan, pattern: str) -> str:
    """The sites whose name begins with a pattern: their choices, conversions and rivals."""
    below = (f"{pattern}/", f"{pattern}.", f"{pattern}:")
    names = [name for name in plan.decisions if name == pattern or name.startswith(below)]
    if not names:
        raise BadPlan(f"the plan has no site called {pattern!r}", seen=", ".join(list(plan.decisions)[:12]))
    knows_rivals = plan.search is not None and not plan.search.is_over
    lines = []
    for name in names:
        lines += _site_lines(plan, name)
        if knows_rivals and plan.decisions[name].kind in ("op", "parameter"):
            lines += _price_lines(plan, name)
            lines += _rival_lines(plan, name)
    if not knows_rivals:
        lines.append("(the rivals of a choice are known where it was planned: plan again to see them)")
    return "\n".join(lines)


def difference(one: Plan, other: Plan) -> str:
    """The sites that two plans decide otherwise, a line each."""
    lines = [] if one.mesh == other.mesh else [f"mesh: {one.mesh} | {other.mesh}"]
    for name in dict.fromkeys((*one.decisions, *other.decisions)):
        mine, theirs = one.decisions.get(name), other.decisions.get(name)
        if mine is None or theirs is None or mine.choice != theirs.choice:
            lines.append(f"{name}: {mine.choice if mine else 'absent'} | {theirs.choice if theirs else 'absent'}")
    for value in sorted(one.recomputed ^ other.recomputed):
        lines.append(f"{value}: {_state(one, value)} | {_state(other, value)}")
    if one.segments != other.segments:
        lines.append(f"segments: {_segments(one)} | {_segments(other)}")
    if not lines:
        return "the plans are the same"
    return "\n".join([*lines, *_told_apart(one, other)])


def _told_apart(one: Plan, other: Plan) -> list[str]:
    """A line on the step times of two plans: whether their difference is more than the model can tell."""
    if not one.step_time_s or not other.step_time_s:
        return []
    differ = abs(one.step_time_s - other.step_time_s) / max(one.step_time_s, other.step_time_s)
    least = max(resolution(plan.sources) for plan in (one, other))
    said = f"step: {_time(one.step_time_s)} | {_time(other.step_time_s)}, {differ:.1%} apart"
    return [said if differ > least else f"{said}: less than the {least:.0%} from which on steps can be told apart"]


def _segments(plan: Plan) -> str:
    return ", ".join(name for name, _ in plan.segments) or "one"


def curve_of(curve: Curve) -> str:
    """Budgets against step time, a row each."""
    head = ("budget", "step", "bound", "gap", "peak", "recompute", "values")
    return "\n".join(_aligned(head, map(_curve_row, curve)))


def _curve_row(point: CurvePoint) -> _Row:
    budget, bound = _size(point.budget), _time(point.lower_bound_s)
    if not math.isfinite(point.step_time_s):
        return budget, "none found", bound, "", "", "", ""
    gap = f"{1 - point.lower_bound_s / point.step_time_s:.2%}"
    again, count = _time(point.recompute_s), str(point.recomputed)
    return budget, _time(point.step_time_s), bound, gap, _size(point.peak_bytes), again, count


def _state(plan: Plan, value: str) -> str:
    return "recomputed" if value in plan.recomputed else "saved"


def why_recomputed(plan: Plan, value: str) -> str:
    """Why a value is not saved: the memory that it frees, and the seconds that it takes."""
    if value not in plan.needed:
        return "recomputed in backward"
    nbytes, seconds = plan.needed[value]
    return f"recomputed in backward: {_microseconds(seconds)} us for {_size(nbytes)}"


def public_name(op: str) -> str:
    """The name by which `autopar.rule` is told of an op.

    `mylib::scan` for what a graph calls `ops.mylib.scan.default`.
    """
    parts = op.split(".")
    if len(parts) < 3 or parts[0] != "ops":
        return op
    return f"{parts[1]}::{'.'.join(parts[2:])}".removesuffix(".default")


# -- the parts of the table


def _head(plan: Plan) -> list[str]:
    """Devices, step time, bound and memory."""
    compute = sum(d.seconds for d in plan.decisions.values())
    moved = sum(c.seconds for c in plan.conversions)
    exposed = _time(plan.beside_s - plan.hidden_s)
    dtypes = f", computes in {plan.precision[0]}, reduces in {plan.precision[1]}" if plan.precision else ""
    made = ", compiled" if plan.compiled else ""
    batches = f" ({plan.accumulation} micro-batches)" if plan.accumulation > 1 else ""
    if plan.microbatches > 1:
        calls = f"{plan.accumulation} calls, each " if plan.accumulation > 1 else ""
        batches = f" ({calls}in {plan.microbatches} micro-batches)"
    has_budget = math.isfinite(plan.budget)
    within, of_budget = (" within the budget", f", of {_size(plan.budget)}") if has_budget else ("", "")
    kinds = sorted(plan.memory.items(), key=lambda pair: -pair[1])
    held = ", ".join(f"{kind} {_size(n)}" for kind, n in kinds if n)
    return [
        f"plan for {plan.mesh.size} devices, mesh {plan.mesh}, cluster {plan.cluster}{dtypes}{made}",
        f"step      {_time(plan.step_time_s)} a step: {_time(compute)} compute and optimizer{batches}, "
        f"{_time(moved - plan.beside_s)} communication in line, {exposed} exposed of {_time(plan.beside_s)} beside "
        f"compute, {_recomputing(plan)}",
        *_certainty(plan),
        f"bound     {_time(plan.lower_bound_s)} at least for any plan of this model on this mesh{within}: gap "
        f"{plan.gap:.2%}",
        f"memory    {_size(plan.peak_bytes)} at the {plan.peak_at}{of_budget}: {held}",
    ]


def _certainty(plan: Plan) -> list[str]:
    """Between which seconds a measured step is expected, and why."""
    total = sum(plan.sources.values())
    if not total:
        return []
    low, high = plan.step_interval_s
    parts = [f"{s / total:.0%} {FROM[source]}" for source, s in plan.sources.items() if s >= 0.005 * total]
    return [f"expected  {_time(low)} to {_time(high)} in nine of ten: seconds are {', '.join(parts)}"]


def _recomputing(plan: Plan) -> str:
    if not plan.recomputed:
        return "no recompute"
    segments = f" in {len(plan.segments)} segments" if plan.segments else ""
    return f"{_time(plan.recompute_s)} recompute of {len(plan.recomputed)} values{segments}"


def _parameter_rows(plan: Plan) -> Iterator[_Row]:
    for name, sharding in plan.parameters.items():
        policy = " (regathered)" if name in plan.regathered else ""
        yield name, sharding.text(plan.mesh.axes) + policy, f"{_local_bytes(plan, name, sharding):,}"


def _op_rows(plan: Plan) -> Iterator[_Row]:
    for name, d in plan.decisions.items():
        if d.kind == "op" and d.seconds:
            yield name, _choice(d.choice, plan.mesh), _microseconds(d.seconds)


def _needed_rows(plan: Plan) -> Iterator[_Row]:
    """Values that backward needs and that could be dropped; those without figures are of a plan that was written."""
    for name in dict.fromkeys((*plan.needed, *sorted(plan.recomputed))):
        nbytes, seconds = plan.needed.get(name, (0, 0.0))
        figures = (_size(nbytes), _microseconds(seconds)) if name in plan.needed else ("", "")
        yield name, _state(plan, name), *figures


def _conversion_rows(plan: Plan) -> Iterator[_Row]:
    axes = plan.mesh.axes
    for c in plan.conversions:
        ends = dict.fromkeys(value.text(axes) for value in c.value)
        steps = _steps(c.forward, axes), _steps(c.backward, axes)
        yield f"{c.source} to {c.target}", " to ".join(ends), *steps, _microseconds(c.seconds)


def _mesh_rows(plan: Plan) -> Iterator[_Row]:
    for mesh, step, bound, peak, why in plan.meshes:
        times = [_time(seconds) if seconds else "-" for seconds in (step, bound)]
        yield mesh, *times, why, _size(peak) if step else "-"


def _without_rule(plan: Plan) -> list[str]:
    """The ops that are replicated, and the rules that they may follow."""
    cost = sum(plan.decisions[name].seconds for name in plan.without_rule)
    lines = [f"replicated for want of a rule: {', '.join(plan.without_rule)} ({_time(cost)} a step)"]
    for op, line in plan.suspected:
        lines.append(
            f"    {op} ran right on parts when it was tried, which proves nothing: if its owner confirms it, "
            f"autopar.rule({public_name(op)!r}, {line!r})"
        )
    return lines


def _local_bytes(plan: Plan, name: str, sharding: Sharding) -> int:
    """Bytes of a parameter on the fullest device."""
    parts = math.prod(plan.mesh.shape[axis] for axes in sharding.cuts.values() for axis in axes)
    return -(-plan.parameter_bytes[name] // parts)


# -- one site


def _site_lines(plan: Plan, name: str) -> list[str]:
    """A site's choice, axis by axis, and the conversions that enter and leave it."""
    d, axes = plan.decisions[name], plan.mesh.axes
    lines = [f"{name}: {d.op}, {_time(d.seconds)}" + (f"    {d.source}" if d.source else "")]
    lines += [f"    @{axis}  {s!r}" for s, axis in zip(d.choice.strategies, axes, strict=True)]
    if name in plan.recomputed:
        lines.append("    not saved: backward recomputes it")
    for c in plan.conversions:
        if name in (c.source, c.target):
            again = "; repeated in backward" if c.name in plan.recomputed and name == c.target else ""
            lines.append(f"    {_conversion(c, name, axes)}{again}")
    return lines


def _conversion(c: Conversion, name: str, axes: Sequence[str]) -> str:
    way = f"to {c.target}" if name == c.source else f"from {c.source}"
    return f"{way}: forward {_steps(c.forward, axes)}; backward {_steps(c.backward, axes)}; {_time(c.seconds)}"


def _price_lines(plan: Plan, name: str) -> list[str]:
    """A line for each kernel of an op: its seconds, and how they came to be."""
    assert plan.search is not None
    return [f"    {line}" for line in plan.search.told(name)]


def _rival_lines(plan: Plan, name: str) -> list[str]:
    """The best other choices of a site, and why they lost."""
    assert plan.search is not None
    under = " at the prices of the budget" if plan.search.is_priced else ""
    lines = []
    for choice, more, own in plan.search.rivals(name):
        why = "as fast" if more < _AS_FAST else f"the best plan with it takes {_time(more)} more{under}"
        parts = f"the op itself {_signed(own)}, the rest {_signed(more - own)}"
        lines.append(f"    rival {_choice(choice, plan.mesh)}: {why}; {parts}")
    return lines or ["    no rival: nothing else goes with its neighbours"]


# -- figures and columns


def _choice(choice: Choice, mesh: DeviceMesh) -> str:
    """A strategy for each axis that has devices."""
    if len(mesh.shape) == 1:
        return repr(choice.strategies[0])
    by_axis = zip(choice.strategies, mesh.axes, mesh.shape, strict=True)
    return "; ".join(f"{strategy!r} @{axis}" for strategy, axis, n in by_axis if n > 1)


def _steps(steps: Sequence[Step], axes: Sequence[str]) -> str:
    return ", ".join(step.text(axes) for step in steps) or "-"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{_microseconds(seconds)} us"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{_time(abs(seconds))}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _size(n: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def _folded(rows: Iterable[_Row]) -> list[_Row]:
    """Rows that say the same of numbered layers as one, with `*` for the number and their count."""
    groups: dict[_Row, list[_Row]] = {}
    for row in rows:
        groups.setdefault((folded(row[0]), *row[1:]), []).append(row)
    found = []
    for (name, *cells), alike in groups.items():
        found.append(alike[0] if len(alike) == 1 else (f"{name} (x{len(alike)})", *cells))
    return found


def _aligned(head: _Row, rows: Iterable[_Row]) -> list[str]:
    """Rows as aligned columns, the last one to the right. A table without rows says so."""
    table = [head, *rows]
    if len(table) == 1:
        return [f"{head[0]}: none"]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for *cells, last in table:
        left = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*left, last.rjust(widths[-1])]).rstrip())
    return lines
