"""A plan in stages as a reader sees it: in words, as a table, and as what each coordinate does at which time.

Times are those of the simulation (`stages/simulate.py`) at the seconds of the plan's stages, so a file tells as much
as the process that planned. A plan whose pipeline has no figures, as one that was written by hand, has words alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.solver.figures import aligned, microseconds, signed, size
from autopar.solver.lanes import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, Event
from autopar.solver.limits import LIMITS
from autopar.solver.trace import Told
from autopar.stages.actions import Order, Prices, StagePrices
from autopar.stages.pipeline import Pipeline, StageFigures
from autopar.stages.simulate import Run, simulated

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

PATTERN = "pipeline"  # `plan.explain` takes it for the stages.
_LIMITS = LIMITS.words
_SAVED = "saved activations"  # the kind of memory that grows with the micro-batches in flight
_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero-bubble": "zero bubble",
    "zb-v": "ZB-V",
    "dualpipe-v": "DualPipeV",
    "v-half": "V-half",
    "v-min": "V-min",
    "greedy": "an order of its own",
}
FORMS = "F forward, B backward, I backward to what came in, W backward of parameters, . waits"
_PARTS = {"F": FORWARD, "B": BACKWARD, "I": "backward to what came in", "W": "backward of parameters"}
_HEAD = (
    *("stage", "at", "blocks", "forward us", "inward us", "weights us", "transfer us"),
    *("in flight", "saved", "stands", "peak"),
)


def decided(pipeline: Pipeline | None) -> str:
    """The stages in words: how many, of how many blocks, in which order."""
    if pipeline is None:
        return "no stages"
    counts = [len(stage.blocks) for stage in pipeline.stages]
    some = ", ".join(map(str, counts)) if len(counts) <= _LIMITS.stages else _range(counts)
    of = f" of {some} blocks" if counts else ""
    on = "" if len(pipeline.place) == pipeline.coordinates else f" on {pipeline.coordinates} coordinates"
    return f"{len(pipeline.place)} stages{of}{on}, {_NAMES.get(pipeline.schedule, pipeline.schedule)}"


def _range(counts: Sequence[int]) -> str:
    """The least and the most of some numbers, which may be one."""
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def mesh_of(plan: Plan) -> str:
    """The mesh in words; of a plan in stages, the mesh of one and how many there are."""
    if plan.pipeline is None:
        return f"mesh {plan.mesh}"
    p = plan.pipeline.coordinates
    each = len(plan.pipeline.place) // p
    return f"{p} stages of mesh {plan.mesh}" if each == 1 else f"{p} coordinates of {each} stages on mesh {plan.mesh}"


def row_of(plan: Plan) -> list[str]:
    """The parts of the line about stages."""
    pipeline = plan.pipeline
    assert pipeline is not None
    said = [f"{decided(pipeline)}, {plan.microbatches} micro-batches: idle {pipeline.idle:.1%}"]
    if sent := [stage.sent_bytes for stage in pipeline.stages if stage.sent_bytes]:
        said.append(f"{size(max(sent))} a transfer")
    if there := max((stage.host_bytes for stage in pipeline.stages), default=0):
        said.append(f"{size(there)} of a micro-batch on the host")
    return said + ([f"most in flight {max(_ran(plan)[1].in_flight)}"] if pipeline.stages else [])


def waits_of(plan: Plan) -> dict[str, float]:
    """Seconds in which the mean coordinate waits, and how many of them would go with the transfers."""
    pipeline = plan.pipeline
    assert pipeline is not None
    waits = pipeline.idle * plan.step_time_s
    free = _run(pipeline, plan.microbatches, is_free=True)[1].seconds if pipeline.stages else math.inf
    moving = min(waits, max(0.0, _ran(plan)[1].seconds - free)) if pipeline.stages else 0.0
    return {"idle": waits - moving, "idle for transfers": moving}


def table_of_stages(plan: Plan) -> list[str]:
    """A row for each stage; seconds and saved bytes are those of one micro-batch, in microseconds."""
    pipeline = plan.pipeline
    assert pipeline is not None
    return aligned(_HEAD, (_row(pipeline, k, stage) for k, stage in enumerate(pipeline.stages)))


def _row(pipeline: Pipeline, k: int, stage: StageFigures) -> tuple[str, ...]:
    is_sent = k + 1 < len(pipeline.place) and pipeline.place[k] != pipeline.place[k + 1]
    first, *_, last = (*stage.blocks[:1], *stage.blocks[-1:]) or ("",) * 2
    return (
        *(str(k), str(pipeline.place[k]), first if first == last else f"{first} to {last} ({len(stage.blocks)})"),
        *map(microseconds, (stage.forward_s, stage.inward_s, stage.weights_s)),
        microseconds(stage.transfer_s) if is_sent else "",
        *(str(stage.in_flight), *map(size, (stage.saved_bytes, stage.standing_bytes, stage.peak_bytes))),
    )


def explained_stages(plan: Plan) -> str:
    """The table, the order of each coordinate, and what it would cost to move each cut by one block."""
    assert plan.pipeline is not None
    ends = f"{plan.pipeline.axis} %d  "
    orders = [ends % r + _shortened(order) for r, order in enumerate(plan.pipeline.orders)]
    moved = moved_lines(plan) if plan.has_space else plan.record.told.get(PATTERN, ())
    lines = [", ".join(row_of(plan)), "", *table_of_stages(plan), "", *orders, "", *strip_of(plan)]
    return "\n".join([*lines, *(["", *moved] if moved else [])])


def moved_lines(plan: Plan) -> list[str]:
    """Lines about each cut moved by one block, in the order that the plan has."""
    assert plan.search is not None
    lines = []
    for stage, by, seconds in plan.search.moved():
        more = "does not fit" if math.isinf(seconds) else f"{signed(seconds - plan.step_time_s)} a step"
        lines.append(f"stage {stage} one block {'later' if by > 0 else 'earlier'}: {more}")
    return lines


def strip_of(plan: Plan, width: int = 88) -> list[str]:
    """A line for each coordinate: the kind of its action at equal distances in time, `.` where it waits."""
    pipeline = plan.pipeline
    if pipeline is None or not pipeline.stages:
        return []
    order, run = _ran(plan)
    lines = []
    for r, actions in enumerate(order.actions):
        kinds = ["."] * width
        for action, start, end in zip(actions, run.starts[r], run.ends[r], strict=True):
            for at in range(math.ceil(start / run.seconds * width - 0.5), math.ceil(end / run.seconds * width - 0.5)):
                kinds[at] = action.kind
        lines.append(f"{pipeline.axis} {r}  {''.join(kinds)}")
    return lines


def stages_of(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """The stages of each place, by the rules of `stages/cuts.py`; several where each has its own."""
    pipeline = plan.pipeline
    if pipeline is None or not pipeline.stages:
        return {}
    last = len(pipeline.stages) - 1
    of_block = {block: k for k, stage in enumerate(pipeline.stages) for block in stage.blocks}
    alone: dict[str, set[str]] = {}  # "parameter" or "data", by which a place is made
    for name, d in plan.decisions.items():
        own = {"parameter" if d.kind == "parameter" else "data"} if not d.reads else set[str]()
        alone[name] = own.union(*(alone.get(read, own) for read in d.reads))
    readers: dict[str, set[int]] = {name: set() for name in plan.decisions}
    for name in reversed(list(plan.decisions)):
        d = plan.decisions[name]
        found = readers[name] or {last}
        if d.kind == "op" and len(alone[name]) > 1:
            path = name.partition("/")[0].split(":")[0].split(".")
            paths = (".".join(path[:k]) for k in range(len(path), 0, -1))
            found = {next((of_block[path] for path in paths if path in of_block), min(found))}
        readers[name] = found
        for read in d.reads:
            readers.get(read, found).update(found)
    return {name: tuple(sorted(of)) for name, of in readers.items()}


def line_of(plan: Plan) -> tuple[list[str], dict[str, list[int]]]:
    """The actions of the fullest coordinate by name, and its bytes at each, by kind."""
    pipeline = plan.pipeline
    assert pipeline is not None
    if not pipeline.stages:
        return [], {}
    order, _ = _ran(plan)
    r = pipeline.place[max(range(len(pipeline.stages)), key=lambda k: pipeline.stages[k].peak_bytes)]
    times = [f"{_PARTS[a.kind]} of stage {a.stage}, micro-batch {a.turn}" for a in order.at(r)]
    held = {kind: [nbytes] * len(times) for kind, nbytes in plan.memory.items() if kind != _SAVED}
    return times, {**held, _SAVED: _held(order, pipeline.stages, r)}


def devices_of(plan: Plan) -> Iterator[tuple[str, tuple[Event, ...], Told]]:
    """Each coordinate with its events on a lane of compute and one of sending, and the bytes saved."""
    pipeline = plan.pipeline
    assert pipeline is not None
    order, run = _ran(plan)
    for r, actions in enumerate(order.actions):
        events: list[Event] = []
        for a, start, end in zip(actions, run.starts[r], run.ends[r], strict=True):
            place = f"stage {a.stage}, micro-batch {a.turn}"
            events.append(Event(place, COMPUTE, _PARTS[a.kind], start, end - start))
            if a.kind != "W" and (sent := _sent(pipeline, a.stage, a.kind == "F")):
                to, seconds = sent
                events.append(Event(f"{place} to stage {to}", COMMUNICATION, _PARTS[a.kind], end, seconds))
        times = [f"{e.part} of {e.place}" for e in events if e.lane == COMPUTE]
        yield f"{pipeline.axis} {r}", tuple(events), Told({}, {}, times, {_SAVED: _held(order, pipeline.stages, r)})


def _sent(pipeline: Pipeline, stage: int, is_forward: bool) -> tuple[int, float] | None:
    """The stage on another coordinate to which a value or a gradient goes, and the seconds that it takes."""
    to = stage + 1 if is_forward else stage - 1
    if not 0 <= to < len(pipeline.place) or pipeline.place[to] == pipeline.place[stage]:
        return None
    return to, pipeline.stages[min(stage, to)].transfer_s


def _held(order: Order, stages: Sequence[StageFigures], r: int) -> list[int]:
    """The most bytes saved for backward while each action of a coordinate runs."""
    found = []
    now = 0
    for a in order.at(r):
        of = stages[a.stage]
        changes = {"F": of.saved_bytes, "B": -of.saved_bytes, "I": of.waiting_bytes - of.saved_bytes}
        change = changes.get(a.kind, -of.waiting_bytes)
        found.append(now + max(change, 0))
        now += change
    return found


def gantt_of(plan: Plan) -> dict[str, Any]:
    """The actions of each coordinate with their times, transfers and bytes in flight, for a page."""
    if plan.pipeline is None or not plan.pipeline.stages:
        return {}
    order, run = _ran(plan)
    stages = plan.pipeline.stages
    most = _LIMITS.actions // order.coordinates  # a page is a file that is sent around
    rows = []
    for r, actions in enumerate(order.actions):
        times = [[_short(start), _short(end)] for start, end in zip(run.starts[r], run.ends[r], strict=True)]
        named = [[a.kind, a.stage, a.turn] for a in actions[:most]]
        rows.append({"actions": named, "times": times[:most], "held": _held(order, stages, r)[:most]})
    hops = [_sent(plan.pipeline, k, True) for k in range(len(stages))]
    left = max(map(len, order.actions)) - most
    return {"axis": plan.pipeline.axis, "place": order.place, "rows": rows, "hops": hops, "left": max(0, left)}


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _shortened(order: str) -> str:
    actions = order.split()
    some = _LIMITS.shown
    return order if len(actions) <= 2 * some else " ".join([*actions[:some], "...", *actions[-some:]])


def _ran(plan: Plan) -> tuple[Order, Run]:
    assert plan.pipeline is not None
    return _run(plan.pipeline, plan.microbatches)


@functools.lru_cache(maxsize=4)
def _run(pipeline: Pipeline, turns: int, is_free: bool = False) -> tuple[Order, Run]:
    """The order, and its run at the seconds of the stages; if free, as if transfers took none."""
    hops = tuple(0.0 if is_free else stage.transfer_s for stage in pipeline.stages[:-1])
    prices = tuple(StagePrices(stage.forward_s, stage.inward_s, stage.weights_s) for stage in pipeline.stages)
    order = Order.of(pipeline.place, turns, pipeline.orders)
    return order, simulated(order, Prices(prices, hops))
