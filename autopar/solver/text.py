"""The text of a whole plan: its table, explanations of single sites, and differences of two plans.

A summary at one look is in `summary.py`.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.graph.layers import folded
from autopar.letters import BadPlan
from autopar.sharding.attention_ways import ATTENTIONS, GATHER, RING, STEPWISE, ULYSSES, ways_of
from autopar.sharding.certainty import resolution
from autopar.sharding.convert import Step
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import public_name
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, Strategy
from autopar.solver import staged
from autopar.solver.decision import Conversion, Decision
from autopar.solver.figures import Row, aligned, folded_rows, microseconds, several, signed, size, time
from autopar.solver.limits import LIMITS
from autopar.solver.summary import ITSELF, batch_of, host_of, parts_of_step, sources_of, speed_of, title_of, verdict
from autopar.solver.text_of_states import needed_rows, states_apart, unsaved, way_of_copies

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

_LIMITS = LIMITS.words

SAME = "the plans are the same"
# Fields that hold for a whole plan, not for one place: a difference lists those that differ.
_SETTINGS = (
    "cluster",
    "digest",
    "optimizer",
    "precision",
    "accumulation",
    "microbatches",
    "chunks",
    "kernels",
    "compiled",
    "window_bytes",
    "budget",
    "host_budget",
)
_SIZES = ("window_bytes", "budget", "host_budget")
_GLOSSARY = [
    "R          whole on every device of the axis",
    "S(d)       dim d cut over the axis; blocks=(n, m): each block of it by itself",
    "P(sum)     summands: the value is the sum of what devices hold",
    "V/G        a value as V and its gradient as G; V alone: the gradient as belongs to it",
    "...@axis   on that axis of the mesh; parts of one dim over several axes: the first is the major one",
    ":shared    a value that several ops read; its gradients are added up there",
    "lodge      one device of the axis counts the value, the others nothing",
    "h.* (xN)   N layers that are alike",
]


def table_of(plan: Plan) -> str:
    """The table of a whole plan: its figures, then what it decides, layers that are alike in one row."""
    blocks = [
        _head(plan),
        *([staged.table_of_stages(plan)] if plan.pipeline is not None and plan.pipeline.stages else []),
        aligned(("parameter", "stored", "bytes a device"), folded_rows(_parameter_rows(plan))),
        aligned(("op", "operands -> output", "us"), folded_rows(_op_rows(plan))),
        aligned(("conversion", "value", "forward", "backward", "us"), folded_rows(_conversion_rows(plan))),
    ]
    if plan.fused:
        blocks.append(aligned(("ops up to", "in one kernel"), folded_rows(plan.fused.items())))
    if plan.recomputed or plan.offloaded:
        head = ("needed in backward", "state", "bytes a device", "us to make it")
        blocks.append(aligned(head, folded_rows(needed_rows(plan))))
    if plan.without_rule:
        blocks.append(_without_rule(plan))
    if plan.meshes:
        blocks.append(aligned(("mesh", "step", "bound", "", "peak"), _mesh_rows(plan)))
    if plan.stopped:
        why = "after the work that it is given: the gap says what may be left"
        blocks.append([f"stopped   {search}, {why}" for search in plan.stopped])
    said = [f"careful   {warning}" for warning in plan.warnings]
    said += [f"untyped   {plan.untyped}"] if plan.untyped else []
    said += [f"assumed   {assumption}" for assumption in plan.assumptions]
    said += [f"default   {name}: {meaning}" for name, meaning in plan.defaults]
    if said:
        blocks.append(said)
    blocks.append(_GLOSSARY)
    return "\n\n".join("\n".join(block) for block in blocks)


def explained(plan: Plan, pattern: str) -> str:
    """Text about a pattern's sites: choices, conversions and rivals, with layers that are alike once.

    A pattern is a name as the table prints it, with `*` for layers, or what a name begins with.
    """
    if not isinstance(pattern, str) or not pattern:
        raise BadPlan(f"{pattern!r} is not the name of a place", advice="a name that plan.table() prints")
    if pattern == staged.PATTERN and plan.pipeline is not None:
        return staged.explained_stages(plan)
    names = _named(plan, pattern.partition(" (x")[0])
    blocks: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        blocks.setdefault(tuple(map(folded, _site_lines(plan, name))), []).append(name)
    lines = []
    stages = staged.stages_of(plan)
    for alike in blocks.values():
        name = alike[0]
        first, *others = _site_lines(plan, name)
        count = f"    and {len(alike) - 1} layers alike" if len(alike) > 1 else ""
        lines += [first + count, *others]
        if of := sorted({stage for one in alike for stage in stages.get(one, ())}):
            lines.append(f"    in stage{'s' * (len(of) > 1)} {', '.join(map(str, of))}")
        known = _reasons(plan, name)
        lines += known or [
            "    (rivals are known where it was planned: plan again; a file keeps those of its slowest places)"
        ]
    return "\n".join(lines)


def _reasons(plan: Plan, name: str) -> list[str]:
    """Lines about the seconds of a site and its best rivals."""
    if not plan.has_space:
        return list(plan.record.told.get(folded(name), ()))
    lines = _price_lines(plan, name)
    return lines + rival_lines(plan, name) if plan.decisions[name].kind in ("op", "parameter") else lines


def _named(plan: Plan, pattern: str) -> list[str]:
    """Names of the sites that a pattern matches; a letter where there are none."""

    def is_named(name: str) -> bool:
        return name == pattern or name.startswith((f"{pattern}/", f"{pattern}.", f"{pattern}:"))

    names = [name for name in plan.decisions if is_named(name) or ("*" in pattern and is_named(folded(name)))]
    if not names:
        known = {*plan.decisions, *map(folded, plan.decisions), *_modules(plan)}
        near = difflib.get_close_matches(pattern, known, n=6, cutoff=0.4)
        seen = ", ".join(near or list(plan.decisions)[:6])
        raise BadPlan(f"the plan has no site called {pattern!r}", seen=seen, advice="a name that plan.table() prints")
    return names


def _modules(plan: Plan) -> Iterator[str]:
    """Paths of the modules in the names of a plan's sites."""
    for name in plan.decisions:
        parts = re.split("[/:]", name)[0].split(".")
        yield from (".".join(parts[:k]) for k in range(1, len(parts) + 1))


def difference(one: Plan, other: Plan) -> str:
    """Text about two plans in words, and a line per site that they decide differently.

    Equal layers share a line.
    """
    rows = list(_differences(one, other))
    cut = [staged.decided(plan.pipeline) for plan in (one, other)] if _are_cut_apart(one, other) else []
    if not rows and not cut:
        return SAME
    same = " (in another order, or at other blocks)" if len(set(cut)) == 1 else ""
    stages = [f"stages  {' | '.join(cut)}{same}"] if cut else []
    said = [f"{'one' if plan is one else 'other':<8}{verdict(plan)}" for plan in (one, other)]
    table = aligned(("place", "one", "other", ""), [(*row, "") for row in folded_rows(rows)])
    return "\n".join([*stages, *_asked_apart(one, other), *said, *_told_apart(one, other), "", *table])


def _are_cut_apart(one: Plan, other: Plan) -> bool:
    """Whether two plans have other stages, or run them in another order."""
    mine = one.pipeline
    theirs = other.pipeline
    if mine is None or theirs is None:
        return mine is not theirs
    return any(getattr(mine, name) != getattr(theirs, name) for name in ("mesh", "axis", "place", "firsts", "orders"))


def _asked_apart(one: Plan, other: Plan) -> list[str]:
    """A line that says that two plans are of other work or devices, so that their seconds do not compare."""
    for what, text_of in (("models", title_of), ("inputs", batch_of)):
        if text_of(one) != text_of(other):
            return [f"{what:<8}{text_of(one)} | {text_of(other)}"]
    return []


def _differences(one: Plan, other: Plan) -> Iterator[Row]:
    def are_alike(mine: Decision, theirs: Decision) -> bool:
        """Whether an op is divided into the same parts, by axes of other sizes."""
        return one.mesh.shape != other.mesh.shape and _parts_of(mine, one.mesh) == _parts_of(theirs, other.mesh)

    if one.mesh != other.mesh:
        yield "mesh", str(one.mesh), str(other.mesh)
    for name in dict.fromkeys((*one.decisions, *other.decisions)):
        mine, theirs = one.decisions.get(name), other.decisions.get(name)
        if mine is None or theirs is None or not (mine.choice == theirs.choice or are_alike(mine, theirs)):
            yield name, *(str(d.choice) if d else "absent" for d in (mine, theirs))
    yield from states_apart(one, other)
    yield from _kernels_apart(one, other)
    # Whether a parameter is gathered again for backward, how often its gradient is reduced, where its states lie.
    policies = (
        ("regathered", "kept", "regathered"),
        ("each", "end", "scattered"),
        ("states on the host", "states on the device", "hosted"),
        ("on the host", "on the device", "wholly_hosted"),
    )
    for said, none, names in policies:
        mine, theirs = getattr(one, names), getattr(other, names)
        for name in sorted(mine ^ theirs):
            yield name, *(said if name in held else none for held in (mine, theirs))
    for name in _SETTINGS:
        if getattr(one, name) != getattr(other, name):
            yield name, *(_setting(plan, name) for plan in (one, other))
    if one.passing != other.passing:
        yield "in passing", *(f"{len(plan.passing)} values" for plan in (one, other))


def _parts_of(d: Decision, mesh: DeviceMesh) -> dict[Strategy, int]:
    """The parts into which each strategy divides an op: (2, 2) devices and 4 in a row make the same."""
    parts: dict[Strategy, int] = {}
    for strategy, n in zip(d.choice.strategies, mesh.shape, strict=True):
        if n > 1 and not strategy.is_unused:
            parts[strategy] = parts.get(strategy, 1) * n
    return parts


def _setting(plan: Plan, name: str) -> str:
    value = getattr(plan, name)
    return size(value) if name in _SIZES and math.isfinite(value) else str(value)


def _kernels_apart(one: Plan, other: Plan) -> Iterator[Row]:
    """Rows about results of different kernels; none where a plan does not say where kernels stand."""
    if one.fused is None or other.fused is None:
        return
    for name in sorted({name for name, _ in one.fused.items() ^ other.fused.items()}):
        yield (
            name,
            *(f"in a kernel of {fused[name]}" if name in fused else "op by op" for fused in (one.fused, other.fused)),
        )


def _told_apart(one: Plan, other: Plan) -> list[str]:
    """Lines about two plans' memory and step time, and whether the times can be told apart by the model."""
    if not one.step_time_s or not other.step_time_s:
        return []
    differ = abs(one.step_time_s - other.step_time_s) / max(one.step_time_s, other.step_time_s)
    least = max(resolution(plan.sources) for plan in (one, other))
    expected = f"{time(one.expected_s)} | {time(other.expected_s)}"
    formulas = f"{time(one.step_time_s)} | {time(other.step_time_s)}"
    said = f"step    {expected}; {formulas} by formulas, {differ:.1%} apart"
    peaks = f"memory  {size(one.peak_bytes)} | {size(other.peak_bytes)}"
    return [
        peaks,
        said if differ > least else f"{said}: less than the {least:.0%} from which on steps can be told apart",
    ]


def why_recomputed(plan: Plan, value: str) -> str:
    """Text about why a value is not saved: the memory that it frees, and the seconds that it takes."""
    if value not in plan.needed:
        return "recomputed in backward"
    nbytes, seconds = plan.needed[value]
    return f"recomputed in backward: {microseconds(seconds)} us for {size(nbytes)}"


# -- the parts of the table


def _head(plan: Plan) -> list[str]:
    """Lines about devices, step time, bound and memory."""
    parts = {what: time(s) for what, s in parts_of_step(plan).items()}
    itself = f"{parts[ITSELF]} {ITSELF}, " if plan.step_time_s and parts_of_step(plan)[ITSELF] else ""
    dtypes = f", computes in {plan.precision[0]}, reduces in {plan.precision[1]}" if plan.precision else ""
    made = ", compiled" if plan.compiled else ""
    batches = f" ({plan.accumulation} micro-batches)" if plan.accumulation > 1 else ""
    if plan.microbatches > 1:
        calls = f"{plan.accumulation} calls, each " if plan.accumulation > 1 else ""
        batches = f" ({calls}in {plan.microbatches} micro-batches)"
    has_budget = math.isfinite(plan.budget)
    pinned = f" {plan.bound_of}" if plan.bound_of else ""
    within, of_budget = (" within the budget", f", of {size(plan.budget)}") if has_budget else ("", "")
    kinds = sorted(plan.memory.items(), key=lambda pair: -pair[1])
    held = ", ".join(f"{kind} {size(n)}" for kind, n in kinds if n)
    step = (
        f"step      {time(plan.step_time_s)} by formulas: {parts['compute']} compute{batches}, {parts['optimizer']} "
        f"optimizer, {itself}{parts['blocking communication']} blocking communication, "
        f"{parts['exposed communication']} exposed of {time(plan.beside_s)} beside compute, "
        f"{_recomputing(plan)}"
    )
    if plan.pipeline is not None:
        each = ", ".join(f"{s} {what}" for what, s in parts.items() if float(s.split()[0]))
        step = f"step      {time(plan.step_time_s)} by formulas, of the mean coordinate{batches}: {each}"
    return [
        f"plan for {plan.devices} devices, {staged.mesh_of(plan)}, cluster {plan.cluster}{dtypes}{made}",
        *_expected(plan),
        step,
        f"bound     {time(plan.lower_bound_s)} at least for any plan of this model on this mesh{pinned}{within}: gap "
        f"{plan.gap:.2%}",
        f"memory    {size(plan.peak_bytes)} at the {plan.peak_at}{of_budget}: {held}",
        *([f"host      {', '.join(on_host)}"] if (on_host := host_of(plan)) else []),
        *_beginning(plan),
    ]


def _beginning(plan: Plan) -> list[str]:
    """A line about the copies of parameters that micro-batches share, where a call has several."""
    if plan.microbatches == 1:
        return []
    again = len(plan.regathered)
    others = f"; those of {again} regathered parameters are made in each" if again else ""
    return [f"copies    of parameters are made once, before the first micro-batch, for all {plan.microbatches}{others}"]


def _expected(plan: Plan) -> list[str]:
    """A line about the seconds of a measured step and their sources; none without sources."""
    if not sum(plan.sources.values()):
        return []
    return [f"expected  {speed_of(plan)}; seconds are {sources_of(plan, 0.005)}"]


def _recomputing(plan: Plan) -> str:
    away = f", {several(len(plan.offloaded), 'value')} on the host" if plan.offloaded else ""
    if not plan.recomputed:
        return f"no recompute{away}"
    passing = f", {len(plan.passing)} of them in passing too" if plan.passing else ""
    return f"{time(plan.recompute_s)} recompute of {len(plan.recomputed)} values{passing}{away}"


def _parameter_rows(plan: Plan) -> Iterator[Row]:
    regathered = plan.regathered
    for name, sharding in plan.parameters.items():
        policy = " (regathered)" if name in regathered else ""
        policy += f" ({on_host})" if (on_host := host_of_parameter(plan, name)) else ""
        yield name, sharding.text(plan.mesh.axes) + policy, f"{_local_bytes(plan, name, sharding):,}"


def host_of_parameter(plan: Plan, name: str) -> str:
    """Words for what lies on the host of a parameter; "" where nothing does."""
    if name in plan.wholly_hosted:
        return "on the host"
    return "states on the host" if name in plan.hosted else ""


def _way_of_hosted(plan: Plan, name: str, seconds: float) -> str:
    """A line about a parameter that the CPUs of the host step."""
    if name not in plan.wholly_hosted:
        return f"optimizer states on the host, whose CPUs step it in {time(seconds)}"
    ways = "comes up before it is read, and its gradient goes down in backward"
    return f"on the host with its optimizer states: it {ways}; {time(seconds)} with the step of the CPUs"


def _op_rows(plan: Plan) -> Iterator[Row]:
    for name, d in plan.decisions.items():
        if d.kind == "op" and d.seconds:
            yield name, _choice(d.choice, plan.mesh), microseconds(d.seconds)


def _conversion_rows(plan: Plan) -> Iterator[Row]:
    axes = plan.mesh.axes
    for c in plan.conversions:
        ends = dict.fromkeys(value.text(axes) for value in c.value)
        steps = _steps(c.forward, axes), _steps(c.backward, axes)
        yield f"{c.source} to {c.target}", " to ".join(ends), *steps, microseconds(c.seconds)


def _mesh_rows(plan: Plan) -> Iterator[Row]:
    for mesh, step, bound, peak, why in plan.meshes:
        times = [time(seconds) if seconds else "-" for seconds in (step, bound)]
        yield mesh, *times, why, size(peak) if step else "-"


def _without_rule(plan: Plan) -> list[str]:
    """Lines about the ops that are replicated for want of a rule, and the rules that they may follow."""
    cost = sum(plan.decisions[name].seconds for name in plan.without_rule)
    lines = [f"replicated for want of a rule: {', '.join(plan.without_rule)} ({time(cost)} a step)"]
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
    """Lines about a site's choice, axis by axis, and the conversions that enter and leave it."""
    d = plan.decisions[name]
    axes = plan.mesh.axes
    lines = [f"{name}: {d.op}, {time(d.seconds)}" + (f"    {d.source}" if d.source else "")]
    lines += [f"    @{axis}  {s!r}" for s, axis in zip(d.choice.strategies, axes, strict=True)]
    if plan.fused and name in plan.fused:
        lines.append(f"    the last op of a kernel of {plan.fused[name]}")
    recomputed = plan.recomputed
    if name in recomputed:
        lines.append("    not saved: backward recomputes it")
    if name in plan.hosted:
        lines.append(f"    {_way_of_hosted(plan, name, d.seconds)}")
    if name in plan.offloaded:
        lines.append(f"    {way_of_copies(plan, name)}")
    for c in plan.conversions:
        if name in (c.source, c.target):
            again = "; repeated in backward" if c.name in recomputed and name == c.target else ""
            away = f"; {way_of_copies(plan, c.name)}" if c.name in plan.offloaded and name == c.target else ""
            lines.append(f"    {_conversion(c, name, axes)}{again}{away}")
    return lines


def _conversion(c: Conversion, name: str, axes: Sequence[str]) -> str:
    way = f"to {c.target}" if name == c.source else f"from {c.source}"
    return f"{way}: forward {_steps(c.forward, axes)}; backward {_steps(c.backward, axes)}; {time(c.seconds)}"


def _price_lines(plan: Plan, name: str) -> list[str]:
    """A line for each kernel of an op, with its seconds and their origin."""
    assert plan.search is not None
    return [f"    {line}" for line in plan.search.told(name)]


def rival_lines(plan: Plan, name: str) -> list[str]:
    """Lines about the best other choices of a site, and why they lost."""
    assert plan.search is not None
    free = ", were there no budget" if unsaved(plan) else ""  # states of values have no price here
    best = "the best plan with it" + (" that was found" if plan.gap > _LIMITS.open else "")
    under = " at the prices of the budget" if plan.search.is_priced else free
    under += ", before it is cut into stages" if plan.pipeline is not None else ""
    lines = []
    for choice, more, own in _rivals(plan, name):
        slower = f"{best} takes {time(abs(more))} {'more' if more > 0 else 'less'}{under}"
        why = "as fast" if abs(more) < _LIMITS.as_fast else slower
        parts = f"the op itself {signed(own)}, the rest {signed(more - own)}"
        said = f" ({', '.join(words)})" if (words := _ways_in_words(plan, name, choice)) else ""
        lines.append(f"    rival {_choice(choice, plan.mesh)}{said}: {why}; {parts}")
    return lines or ["    no rival: nothing else goes with its neighbours"]


def _rivals(plan: Plan, name: str) -> list[tuple[Choice, float, float]]:
    """The best rivals of a site; of an attention the best in each other way as well."""
    assert plan.search is not None
    d = plan.decisions[name]
    found = plan.search.rivals(name)
    if d.op not in ATTENTIONS:
        return found
    choices = [d.choice, *(rival[0] for rival in found)]
    seen = {tuple(_ways_in_words(plan, name, choice)) for choice in choices}
    for rival in plan.search.rivals(name, most=sys.maxsize):
        words = tuple(_ways_in_words(plan, name, rival[0]))
        if len(words) == 1 and words not in seen:
            seen.add(words)
            found.append(rival)
    return found


def _ways_in_words(plan: Plan, name: str, choice: Choice) -> list[str]:
    """Words for the ways in which axes divide an attention under a choice; none for another op."""
    d = plan.decisions[name]
    if d.op not in ATTENTIONS or not d.outputs:
        return []
    dims = d.outputs[0].count(",") + 1
    along = [""] * len(plan.mesh.shape) if len(plan.mesh.shape) == 1 else [f" over {axis}" for axis in plan.mesh.axes]
    ways = zip(ways_of(choice.strategies, dims), along, strict=True)
    return [f"{_IN_WORDS[way]}{where}" for way, where in ways if way]


_IN_WORDS = {
    RING: "keys in a ring",
    STEPWISE: "keys gathered in each step",
    GATHER: "keys gathered",
    ULYSSES: "heads cut, as Ulysses",
}


# -- figures and columns


def _choice(choice: Choice, mesh: DeviceMesh) -> str:
    """A strategy for each axis that has more than one device, as text."""
    if len(mesh.shape) == 1:
        return repr(choice.strategies[0])
    by_axis = zip(choice.strategies, mesh.axes, mesh.shape, strict=True)
    return "; ".join(f"{strategy!r} @{axis}" for strategy, axis, n in by_axis if n > 1)


def _steps(steps: Sequence[Step], axes: Sequence[str]) -> str:
    return ", ".join(step.text(axes) for step in steps) or "-"
