"""A summary of a plan: what it does in words, what a step takes, and how far from the best it may be.

At most `LINES` lines of `WIDTH` columns, none of which is cut: what finds no room is counted. The whole of it is
`plan.table()`.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.sharding.attention_ways import ATTENTIONS
from autopar.sharding.certainty import FROM
from autopar.solver import staged
from autopar.solver.axis_use import AxisUse, short_name, use_of
from autopar.solver.figures import between, count, several, size, sizes, time
from autopar.solver.limits import LIMITS
from autopar.solver.workload import StepRates

if TYPE_CHECKING:
    from autopar.solver.plan import Beside, Plan

_LIMITS = LIMITS.words

LINES = 16
WIDTH = 100
_LABEL = 10
ITSELF = "of a step itself"  # seconds beside its ops and communication, which a measured machine has
_KEPT = ("plan", "pipeline", "against")  # rows that give up lines last
_MORE = "plan.table(), plan.explain(name), plan.report(path)"


@dataclass(frozen=True, slots=True)
class _Row:
    """A label, parts of text that are joined, and the lines that they may take."""

    label: str
    parts: Sequence[str]
    most: int = 2
    between: str = ", "

    @property
    def least(self) -> int:
        """The lines of the first part, which is never left out."""
        return len(self._wrapped(1))

    def lines(self, most: int) -> list[str]:
        """The row in as many lines, or in those of its first part; parts that find no room are counted."""
        found = self._wrapped(1)
        for kept in range(len(self.parts), 1, -1):
            lines = self._wrapped(kept)
            if len(lines) <= most:
                found = lines
                break
        return [f"{head:<{_LABEL}}{line}" for head, line in zip([self.label, *[""] * len(found)], found, strict=False)]

    def _wrapped(self, kept: int) -> list[str]:
        left = len(self.parts) - kept
        said = [*self.parts[:kept], *([f"and {left} more"] if left else [])]
        return textwrap.wrap(self.between.join(said), WIDTH - _LABEL, break_on_hyphens=False)


def summary_of(plan: Plan) -> str:
    """The summary of a plan as text."""
    rows = [*_what(plan), *_takes(plan), *_warnings(plan), *_said(plan)]
    room = [len(row.lines(row.most)) for row in rows]
    while sum(room) > LINES - 1:  # The longest row gives up a line, and counts what stood on it.
        able = [k for k, row in enumerate(rows) if room[k] > row.least]
        if not able:
            break
        room[max(able, key=lambda k: (rows[k].label not in _KEPT, room[k], k))] -= 1
    lines = [line for row, most in zip(rows, room, strict=True) for line in row.lines(most)]
    return "\n".join([*lines, f"{'more':<{_LABEL}}{_MORE}"])


def title_of(plan: Plan) -> str:
    """The model and its devices in a few words."""
    work = plan.workload
    model = f"{work.model}, {count(work.parameters)} parameters" if work.model else "a plan"
    return f"{model}, on {plan.devices} x {_device(plan)}"


def _device(plan: Plan) -> str:
    return plan.workload.device or plan.cluster


def batch_of(plan: Plan) -> str:
    """The batch of a call in words, and the calls of a step."""
    work = plan.workload
    rows = work.rows // plan.accumulation
    shapes = [f"{name} {sizes(shape)}" for name, shape in work.inputs.items() if shape]
    if work.tokens:
        said = f"batch {rows} x {work.tokens // work.rows} tokens"
    else:
        said = f"batch {rows}" + (f" ({', '.join(shapes[:2])})" if shapes else "")
    return said + (f" a call, {plan.accumulation} calls a step" if plan.accumulation > 1 else "")


def compute_of(plan: Plan) -> list[str]:
    """The dtype of compute, the optimizer, and whether code is compiled, where these are known."""
    optimizer = plan.optimizer if isinstance(plan.optimizer, str) else f"{plan.optimizer:g} bytes of states a parameter"
    made = [f"{plan.precision[0]} compute" if plan.precision else plan.workload.dtype, optimizer]
    return [*filter(None, made), *(["torch.compile"] if plan.compiled else [])]


def cluster_of(plan: Plan) -> str:
    """The cluster by the name of its data."""
    return f"cluster {plan.cluster.partition(' ')[0]}"


def _what(plan: Plan) -> Iterator[_Row]:
    """Rows about the model, the devices, and what the plan does."""
    work = plan.workload
    if work.model:
        yield _Row("model", [f"{work.model}, {count(work.parameters)} parameters", batch_of(plan), *compute_of(plan)])
    apart = "" if work.model else f", {', '.join(compute_of(plan))}"
    yield _Row("devices", [f"{plan.devices} x {_device(plan)} ({cluster_of(plan)}), {staged.mesh_of(plan)}{apart}"])
    if plan.pipeline is not None:
        yield _Row("pipeline", staged.row_of(plan))
    yield _Row("plan", parts_of_verdict(plan), 4, "; ")
    if plan.recomputed:
        passing = f", {len(plan.passing)} of them in passing too" if plan.passing else ""
        places = _places_of(plan.recomputed)
        yield _Row("recompute", [f"{len(plan.recomputed)} values{passing}: {places[0]}", *places[1:]])


def _places_of(values: Iterable[str]) -> list[str]:
    """The places that make values, those of all layers counted together."""
    made = (name.rpartition(":")[0] if name[-1:].isdigit() and ":" in name else name for name in values)
    return _named(Counter(map(short_name, made)))


def host_of(plan: Plan) -> list[str]:
    """Texts about what lies on the host, and its bytes; none where nothing may."""
    of = f" of {size(plan.host_budget)}" if plan.host_budget else ""
    if not plan.offloaded and not plan.hosted:
        return [f"none{of} is used: no value has to wait there"] if of else []
    held = f"{size(plan.host_bytes)}{of}: " if plan.host_bytes else ""
    said = []
    if plan.hosted:
        stepped = sum(plan.decisions[name].seconds for name in plan.hosted)
        hidden = f", {time(plan.hidden_on_host_s)} of it beside compute" if plan.hidden_on_host_s else ""
        states = several(len(plan.hosted), "parameter")
        whole = f", {len(plan.wholly_hosted)} of them whole" if plan.wholly_hosted else ""
        copies = " with their copies" if plan.wholly_hosted else ""
        said.append(
            f"{held}optimizer states of {states}{whole}, which the CPUs step in {time(stepped)}{copies}{hidden}"
        )
        held = ""
    if plan.offloaded:
        first, *others = _places_of(plan.offloaded)
        count_of = several(len(plan.offloaded), "value")
        in_time = ", and no op waits for a copy" if plan.host_bytes else ""  # Travels that no search has found to be.
        said += [f"{held}{count_of} there{in_time}: {first}", *others]
    return said


def speed_of(plan: Plan) -> str:
    """The expected seconds of a step, the interval of measured ones, and what the devices reach."""
    rates = plan.rates
    said = f"{time(rates.step_s)} a step"
    if sum(plan.sources.values()):
        said += f" ({between(*plan.step_interval_s)} in nine of ten)"
    passes = passes_in_words(rates)
    return f"{said}, {passes}" if passes else said


def passes_in_words(rates: StepRates) -> str:
    """Tokens or rows a second and a device, and MFU; "" where the work is not known."""
    work = rates.workload
    if not work.rows or not rates.step_s:
        return ""
    said = f"{rates.per_s_device:,.{0 if rates.per_s_device >= 100 else 1}f} {rates.unit}/s a device"
    return f"{said}, MFU {rates.mfu:.1%}" if work.flops else said


def _takes(plan: Plan) -> Iterator[_Row]:
    """Rows about the plan's seconds and bytes."""
    yield _Row("speed", [speed_of(plan)])
    if shares := _shares_of_step(plan):
        source = f" {sources_of(plan, _LIMITS.some)}" if sum(plan.sources.values()) else ""
        yield _Row("", [f"{time(plan.step_time_s)} by formulas{source}: {shares[0]}", *shares[1:]])
    kinds = sorted(plan.memory.items(), key=lambda pair: -pair[1])
    large = [(kind, n) for kind, n in kinds if n >= _LIMITS.large * plan.peak_bytes]
    rest = sum(plan.memory.values()) - sum(n for _, n in large)
    held = [f"{kind} {size(n)}" for kind, n in [*large, ("others", rest)] if n]
    if held:
        held[0] = f"{_room(plan)}, fullest at the {plan.peak_at}: {held[0]}"
    yield _Row("memory", held or [size(plan.peak_bytes)], 3)
    if on_host := host_of(plan):
        yield _Row("host", on_host)
    within = " within the budget" if math.isfinite(plan.budget) else ""
    of = f" {plan.bound_of}" if plan.bound_of else ""
    on = f" on mesh {plan.mesh}" if plan.meshes else ""  # others were searched, too
    yield _Row("proof", [f"no plan{on}{within}{of} takes less than {time(plan.lower_bound_s)}: gap {plan.gap:.2%}"], 3)
    if beside := _beside(plan):
        yield _Row("against", beside)
    yield _Row("slowest", slowest(plan))


def _shares_of_step(plan: Plan) -> list[str]:
    """The parts of a step, the largest first, as shares."""
    parts = sorted(parts_of_step(plan).items(), key=lambda part: -part[1])
    return [f"{s / plan.step_time_s:.1%} {what}" for what, s in parts if s and s >= 0.0005 * plan.step_time_s]


def _room(plan: Plan) -> str:
    """The bytes at the peak, of the budget, and those of a device."""
    said, device = size(plan.peak_bytes), plan.workload.memory_bytes
    if math.isinf(plan.budget):
        return f"{said} of a device's {size(device)}" if device else said
    kept = f" (a device has {size(device)})" if device > plan.budget else ""
    return f"{said} of {size(plan.budget)}{kept}"


def parts_of_step(plan: Plan) -> dict[str, float]:
    """The seconds of a step by what they are spent on, in words; they add up to the step's.

    Of a plan in stages they are the mean of all coordinates.
    """
    of_kind = defaultdict[str, float](float)
    for d in plan.decisions.values():
        of_kind[d.kind] += d.seconds
    optimizer = of_kind.pop("parameter", 0.0) - plan.hidden_on_host_s
    of_step = of_kind.pop("output", 0.0)
    parts = {
        "compute": sum(of_kind.values()),
        "optimizer": optimizer,
        ITSELF: of_step,
        "blocking communication": sum(c.seconds for c in plan.conversions) - plan.beside_s,
        "exposed communication": plan.beside_s - plan.hidden_s,
        "recompute": plan.recompute_s,
    }
    if plan.pipeline is None:
        return parts
    return {what: s / plan.pipeline.coordinates for what, s in parts.items()} | staged.waits_of(plan)


def sources_of(plan: Plan, least: float) -> str:
    """The sources of a step's seconds in words: of those that give `least` of them, each with its share."""
    total = sum(plan.sources.values())
    shares = sorted(((s / total, FROM[name]) for name, s in plan.sources.items() if s >= least * total), reverse=True)
    return shares[0][1] if len(shares) == 1 else ", ".join(f"{share:.0%} {name}" for share, name in shares)


def _warnings(plan: Plan) -> Iterator[_Row]:
    """Rows of warnings."""
    if plan.without_rule:
        cost = sum(plan.decisions[name].seconds for name in plan.without_rule)
        names = _named(Counter(map(short_name, plan.without_rule)))
        yield _Row("warning", [f"replicated for want of a rule ({time(cost)} a step): {names[0]}", *names[1:]])
    if plan.unaligned:
        lost = sum(plan.unaligned.values())
        names = _named(Counter(map(short_name, plan.unaligned)))
        more = f"{', '.join(names)} would take {time(lost)} less with sizes that are multiples of 8"
        yield _Row("warning", [more, "in transformers: model.resize_token_embeddings(None, pad_to_multiple_of=8)"])
    if plan.warnings:
        yield _Row("warning", plan.warnings, 3, "; ")
    if plan.untyped:
        yield _Row("untyped", [plan.untyped])
    if plan.stopped:
        yield _Row("stopped", [*plan.stopped[:-1], f"{plan.stopped[-1]}: after the work that it is given"], 1)


def _said(plan: Plan) -> Iterator[_Row]:
    """A row about assumptions, and about the meaning of defaults."""
    said = [*plan.assumptions, *(f"{name}: {meaning.partition(':')[0]}" for name, meaning in plan.defaults)]
    if said:
        yield _Row("assumed", said, 2, "; ")


def _beside(plan: Plan) -> list[str]:
    """Texts about the plans of presets on the mesh, or how to ask for them; none without the space."""
    if plan.known_beside is not None:
        return [_of_rival(plan, rival) for rival in plan.known_beside]
    *others, last = rivals_of(plan)
    said = f"plan.beside(), or --beside, plans the same model under {', '.join(others)} and {last}"
    return [said] if plan.has_space else []


def rivals_of(plan: Plan) -> tuple[str, ...]:
    """Presets that a plan is compared with: devices that cannot share rows share a sequence."""
    has_sequence = any(d.op in ATTENTIONS for d in plan.decisions.values())
    rows = plan.workload.rows // (plan.accumulation * turns_of_rivals(plan))
    is_short = has_sequence and rows % plan.devices != 0
    return ("fsdp+cp", "megatron") if is_short else ("ddp", "fsdp", "megatron")


def turns_of_rivals(plan: Plan) -> int:
    """The micro-batches of plans beside this one; beside stages, those take the batch at once."""
    return plan.microbatches if plan.pipeline is None else 1


def _of_rival(plan: Plan, rival: Beside) -> str:
    """Text about a preset's plan beside this one."""
    if rival.why:
        return f"{rival.name} {rival.why}"
    if not rival.fits:
        return f"{rival.name} needs {size(rival.peak_bytes)} where nothing is recomputed"
    ratio = rival.step_time_s / plan.step_time_s if plan.step_time_s else 1.0
    takes = "as long" if abs(ratio - 1) < 0.005 else f"{ratio:.2f} times as long"
    return f"{rival.name} takes {takes} ({size(rival.peak_bytes)})"


def slowest(plan: Plan) -> list[str]:
    """The places that take most of the step, with those of all layers added up."""
    seconds: dict[str, float] = defaultdict(float)
    for name, d in plan.decisions.items():
        seconds[ITSELF if d.kind == "output" else short_name(name)] += d.seconds
    for c in plan.conversions:
        seconds[f"{short_name(c.source)} -> {short_name(c.target)}"] += c.seconds
    found = sorted(seconds.items(), key=lambda pair: -pair[1])[: _LIMITS.slowest]
    whole = plan.step_time_s * (plan.pipeline.coordinates if plan.pipeline is not None else 1)
    said = [f"{name} {s / whole:.0%}" for name, s in found if s] if whole else []
    return said or ["nothing takes time"]


# -- the plan in words


def verdict(plan: Plan) -> str:
    """The plan in words: what each axis of the mesh cuts, axes of one role together."""
    cut = [f"{staged.decided(plan.pipeline)}, {plan.microbatches} micro-batches"] if plan.pipeline is not None else []
    return "; ".join([*cut, *parts_of_verdict(plan)])


def parts_of_verdict(plan: Plan) -> list[str]:
    """The sentences of `verdict`."""
    whole = "everything runs" if plan.pipeline is None else "each stage runs"
    said = [f"{whole} on one device"] if plan.mesh.size == 1 else _roles_in_words(plan)
    if plan.microbatches > 1 and plan.pipeline is None:
        said.append(f"the batch passes in {plan.microbatches} micro-batches")
    if plan.chunks > 1:
        said.append(f"the loss head runs in {plan.chunks} chunks of rows")
    return said


def _roles_in_words(plan: Plan) -> list[str]:
    """A sentence for each role that axes of the mesh have."""
    roles: dict[tuple[AxisUse, int], list[int]] = defaultdict(list)
    for axis, n in enumerate(plan.mesh.shape):
        if n > 1:
            role = use_of(plan, axis)
            alone = axis if 0 < role.stored < 10 else -1  # another axis may cut other parameters
            roles[role, alone].append(axis)
    if all(role.is_idle for role, _ in roles):
        why = "" if plan.bound_of else ", as any exchange would take longer than it saves"
        return [f"nothing is divided: {_each(plan)}{why}"]
    used = [text for (role, _), axes in roles.items() if (text := _cuts_in_words(role, plan, axes))]
    used = used or [_each(plan)]
    stored: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for (role, alone), axes in roles.items():
        if role.stored and not role.weights:  # Weights that are used in parts are stored so.
            stored[role.stored, role.is_regathered, alone] += axes
    kept = [_storage(plan, tenths, again, axes) for (tenths, again, _), axes in stored.items()]
    return [*used, *kept]


def _each(plan: Plan) -> str:
    of = "" if plan.pipeline is None else " of a stage"
    return f"each of the {plan.mesh.size} devices{of} computes all of it"


def _storage(plan: Plan, tenths: int, is_regathered: bool, axes: Sequence[int]) -> str:
    """Text about the parameters that are stored in parts along axes, in the field's words."""
    share = "" if tenths == 10 else f" for {tenths}0% of parameter bytes"
    along = f"sharded over {_along(plan, axes)}{share}"
    if is_regathered:
        return f"parameters, gradients and optimizer states {along} (ZeRO-3, FSDP)"
    if plan.accumulation * plan.microbatches > 1 and not plan.scattered:
        return f"optimizer states {along} (ZeRO-1)"
    return f"gradients and optimizer states {along}, and parameters between steps (ZeRO-2)"


def _along(plan: Plan, axes: Sequence[int]) -> str:
    """The devices along axes, and the names of these where the mesh has several."""
    n = math.prod(plan.mesh.shape[a] for a in axes)
    names = ", ".join(plan.mesh.axes[a] for a in axes)
    return f"{n} devices" if len(plan.mesh.shape) == 1 else f"{n} ({'axis' if len(axes) == 1 else 'axes'} {names})"


def _cuts_in_words(use: AxisUse, plan: Plan, axes: Sequence[int]) -> str:
    """Text about the cuts along axes of one use; "" where they only store parameters."""
    along = _along(plan, axes)
    said = []
    if use.experts:
        said.append(_over(use.experts, along))
    if use.rows:
        said.append(f"data parallel over {along}{_share(use.rows)}")
    if use.positions or use.sequence:
        said.append(_over(use.sequence or "sequence parallel", f"{along}{_share(use.positions or 10)}"))
    if use.weights:
        where = f": {', '.join(_named(Counter(use.modules)))}" if use.modules else ""
        said.append(f"tensor parallel over {along}{_share(use.weights)}{where}")
    return ", ".join(said) or ("" if use.stored else f"the same on all {along}")


def _over(words: str, along: str) -> str:
    """Words about a use with its devices before what stands in brackets."""
    kind, *how = words.split(" (")
    return " (".join([f"{kind} over {along}", *how])


def _share(tenths: int) -> str:
    return "" if tenths == 10 else f" for {tenths}0% of the products"


def _named(counted: Counter[str]) -> list[str]:
    """The most frequent names, and how many more there are."""
    names = [name if n == 1 else f"{name} (x{n})" for name, n in sorted(counted.items(), key=lambda p: (-p[1], p[0]))]
    more = [f"{len(names) - _LIMITS.names} more"] if len(names) > _LIMITS.names else []
    return [*names[: _LIMITS.names], *more]
