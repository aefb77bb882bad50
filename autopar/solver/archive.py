"""A plan as JSON, of data only, where every field is checked as it is read.

A file is edited, or comes from somewhere else: what cannot be read, or contradicts itself, is a letter.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar import __version__, codec
from autopar.codec import UNREADABLE, Codec, Read, Write
from autopar.kernels import NAMES
from autopar.letters import BadOrder, BadPlan, Letter
from autopar.sharding.certainty import SPREADS
from autopar.sharding.convert import Step
from autopar.sharding.costs import STEPS_ON_HOST
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, Strategy, gradients, values
from autopar.solver import folding
from autopar.solver.decision import Conversion, Decision, states_of
from autopar.solver.record import Record, record_of
from autopar.solver.workload import StepWork
from autopar.stages.orders import ORDERS, Order
from autopar.stages.pipeline import FORWARD, Pipeline, stage_mesh
from autopar.stages.proof import prove

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

VERSION = 4  # version of the data of `to_dict`; a file has that of `folding.py`
_READ = (3, VERSION)  # a plan of version 3 recomputes nothing
# Numbers of operands and outputs of the kinds of sites that have fixed ones.
_ARITIES = {
    "parameter": ((0, 1),),
    "buffer": ((0, 1),),
    "input": ((0, 1),),
    "output": ((1, 0), (2, 0)),  # the second operand of what calls carry on is its old value
    "update": ((1, 0),),
}
# The attributes of a plan that are in its file, in their order; _READS and _WRITES are of those whose types do not say
# how.
_KEYS = (
    *("mesh", "cluster", "digest", "optimizer", "step_time_s", "lower_bound_s", "decisions", "conversions"),
    *("regathered", "parameter_bytes", "without_rule", "assumptions", "defaults", "warnings", "bound_of", "memory"),
    *("peak_at", "budget", "meshes", "beside_s", "hidden_s", "accumulation", "precision", "scattered", "recomputed"),
    *("recompute_s", "first_peak_bytes", "window_bytes", "suspected", "stopped", "sources", "compiled", "chunks"),
    *("kernels", "fused", "microbatches", "needed", "unaligned", "passing"),
    *("workload", "pipeline", "offloaded", "host_budget", "host_bytes", "hosted", "wholly_hosted", "hidden_on_host_s"),
)
# Attributes that are left out of a file where they have these values.
_LEFT_OUT: dict[str, Any] = {
    "hidden_on_host_s": 0.0,
    "warnings": (),
    "bound_of": "",
    "compiled": False,
    "chunks": 1,
    "kernels": (),
    "microbatches": 1,
    "needed": {},
    "unaligned": {},
    "passing": {},
    "workload": StepWork(),
    "pipeline": None,
    "offloaded": {},
    "host_budget": 0.0,
    "host_bytes": 0,
    "hosted": frozenset(),
    "wholly_hosted": frozenset(),
}
# The values of attributes that files of older releases lack.
_LATER = {"window_bytes": 25 * 2**20, "first_peak_bytes": 0, "suspected": (), "stopped": (), "sources": {}}


def write(plan: Plan, path: str | Path) -> None:
    try:
        record = Codec({}, {}).plain(record_of(plan))
        data = {"version": folding.VERSION, "autopar": __version__, **folding.fold(written(plan)), "record": record}
        Path(path).write_text(folding.written(data), encoding="utf-8")
    except (OSError, TypeError) as e:
        raise BadPlan(f"the plan cannot be written to {path}", seen=f"{type(e).__name__}: {e}") from e


def read(path: str | Path) -> Any:
    """The JSON of a plan's file; a letter where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=codec.once)
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise BadPlan(f"the plan {path} cannot be read", seen=f"{type(e).__name__}: {e}") from e


# -- what types do not say


def _codec(mesh: DeviceMesh) -> Codec:
    """The codec of a plan on this mesh, whose axes shardings and steps name."""
    reads: dict[Any, Read] = {
        Sharding: lambda data: Sharding.parse(codec.text(data), mesh),
        Step: lambda data: Step.parse(codec.text(data), mesh),
    }
    in_text = dict.fromkeys((Sharding, Step), lambda value: value.text(mesh.axes))
    return Codec(_READS | reads, {**_WRITES, **in_text})


def _optimizer(value: Any) -> str | float:
    """An optimizer's name, or the bytes of its states for each parameter, as int or float as given."""
    if not isinstance(value, str):
        codec.number(value)
    return value


def _family(value: Any) -> str:
    """The name of a family of kernels."""
    if value not in NAMES:
        raise ValueError(f"{codec.shown(value)} names no kernels")
    return str(value)


_COUNT = functools.partial(codec.whole, least=1)
_PAIRS = codec.each(codec.in_order(codec.text, codec.text))
_TRIPLES = codec.each(codec.in_order(codec.text, codec.text, codec.text))
_STRATEGIES = codec.each(lambda data: Strategy.parse(codec.text(data)))
_READS: dict[Any, Read] = {
    Choice: lambda data: Choice(_STRATEGIES(data)),
    "optimizer": _optimizer,
    "budget": lambda data: math.inf if data is None else float(_COUNT(data)),  # JSON has no infinity
    **dict.fromkeys(("accumulation", "chunks", "microbatches", "window_bytes"), _COUNT),
    "kernels": codec.each(_family),
    "fused": codec.by_name(_family),
    "sources": codec.by_name(codec.number),
    "passing": lambda data: dict(_PAIRS(data)),
    "offloaded": lambda data: {name: (gone, comes) for name, gone, comes in _TRIPLES(data)},
}
_WRITES: dict[Any, Write] = {
    Choice: lambda choice: [repr(strategy) for strategy in choice.strategies],
    "budget": lambda budget: int(budget) if math.isfinite(budget) else None,
    "passing": lambda passing: [list(pair) for pair in sorted(passing.items())],
    "offloaded": lambda offloaded: [[name, *ops] for name, ops in sorted(offloaded.items())],
}
_MESH = Codec({}, {})


# -- writing and reading


def written(plan: Plan) -> dict[str, Any]:
    """The plan as data that JSON can hold; `fields_of` reads it."""
    has_places = bool(plan.kernels) and plan.fused is not None  # a plan of an older release does not say where
    left_out = {key for key, value in _LEFT_OUT.items() if getattr(plan, key) == value}
    keys = [key for key in _KEYS if key not in left_out and (key != "fused" or has_places)]
    return {"version": VERSION, **_codec(plan.mesh).write(plan, keys)}


def fields_of(cls: type[Plan], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plan that `written` wrote; raises a letter where the data is not a plan."""
    try:
        if data["version"] in folding.READ and not isinstance(data["version"], bool):
            return _fields(cls, folding.unfold(data, VERSION))
        if data["version"] not in _READ:
            version = codec.shown(data["version"])
            raise BadPlan(f"the plan is of version {version}, this autopar reads {VERSION}", advice="plan again")
        return _fields(cls, data)
    except Letter:
        raise
    except UNREADABLE as e:
        raise _no_plan(e) from e


def _no_plan(why: Exception) -> BadPlan:
    return BadPlan("this is not a plan", seen=codec.seen(why))


def _fields(cls: type[Plan], data: Mapping[str, Any]) -> dict[str, Any]:
    if "segments" in data:
        raise BadPlan("the plan recomputes in segments, as another autopar did", advice="plan again")
    if data["version"] < VERSION:
        data = {**data, "recomputed": [], "recompute_s": 0.0}
    mesh = DeviceMesh(**_MESH.read(DeviceMesh, data["mesh"], {"ranks": ()}, codec.fields_of(DeviceMesh)))
    missing = {**_LEFT_OUT, **_LATER, "fused": {}, "record": Record()}
    if data.get("kernels"):
        missing["fused"] = None  # A file of an older release does not say where its kernels stand.
    found = _codec(mesh).read(cls, data, missing, (*_KEYS, "record"))
    states = states_of(*(found.pop(key) for key in ("recomputed", "passing", "regathered", "offloaded")))
    return {**found, "states": states}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number that a plan may have")


# -- contradictions


def refuse_contradictions(plan: Plan) -> None:
    """Raise a letter if some part of the plan contradicts its decisions, or names what nothing knows."""
    if unknown := sorted(plan.sources.keys() - SPREADS.keys()):
        raise BadPlan(f"the plan has seconds whose source is {unknown[0]}", seen=f"known: {', '.join(SPREADS)}")
    if plan.pipeline is not None:
        _refuse_stages(plan, plan.pipeline)
    for name, decision in plan.decisions.items():
        _refuse_decision(name, decision, plan.mesh)
    if set(plan.parameter_bytes) != {name for name, d in plan.decisions.items() if d.kind == "parameter"}:
        raise BadPlan("the plan has sizes of other parameters than it decides")
    if unknown := sorted(
        {*plan.without_rule, *plan.unaligned, *plan.regathered, *plan.scattered, *plan.hosted} - set(plan.decisions)
    ):
        raise BadPlan(f"the plan speaks of {unknown[0]}, for which it decides nothing")
    _refuse_hosted(plan)
    if len({(c.target, c.operand) for c in plan.conversions}) < len(plan.conversions):
        raise BadPlan("the plan converts a value twice")
    conversions = {c.name for c in plan.conversions}
    for value in sorted(plan.recomputed):
        if value not in conversions and (value not in plan.decisions or plan.decisions[value].kind != "op"):
            raise BadPlan(f"the plan recomputes {value}, which is neither an op nor a conversion of it")
    for value, ops in plan.offloaded.items():
        if value not in conversions and (value not in plan.decisions or plan.decisions[value].kind != "op"):
            raise BadPlan(f"the plan has {value} on the host, which is neither an op nor a conversion of it")
        if unknown := [op for op in ops if op not in plan.decisions or plan.decisions[op].kind != "op"]:
            raise BadPlan(f"the plan moves {value} beside {unknown[0]}, which is not one of its ops")
    for name, family in (plan.fused or {}).items():
        if name not in plan.decisions or plan.decisions[name].kind != "op":
            raise BadPlan(f"the plan has a kernel in the place of {name}, which is not one of its ops")
        if family not in plan.kernels:
            raise BadPlan(f"the plan has a kernel of {family} in the place of {name}, and uses no such kernels")
    for name, op in plan.passing.items():
        if op not in plan.decisions or plan.decisions[op].kind != "op":
            raise BadPlan(f"the plan makes {name} in passing for what is behind {op}, which is not one of its ops")
    for c in plan.conversions:
        _refuse_conversion(plan, c)


def _refuse_hosted(plan: Plan) -> None:
    """Raise a letter unless what the host steps are parameters, of an optimizer that steps there."""
    trained = {name for name in plan.hosted if plan.decisions[name].kind == "parameter"}
    if wrong := sorted(plan.hosted - trained):
        raise BadPlan(f"the plan has optimizer states of {wrong[0]} on the host, which is not a parameter of it")
    if wrong := sorted(plan.wholly_hosted - plan.hosted):
        raise BadPlan(f"the plan has {wrong[0]} on the host, and its optimizer states are not there")
    if plan.wholly_hosted and plan.pipeline is not None:
        raise BadPlan("the plan has parameters on the host, and a pipeline, which leaves them on devices")
    if plan.hosted and plan.optimizer not in STEPS_ON_HOST:
        raise BadPlan(f"the plan has optimizer states on the host, where {plan.optimizer} does not step")


def _refuse_stages(plan: Plan, pipeline: Pipeline) -> None:
    """Raise a letter unless stages stand on the mesh, begin at blocks, and have an order that ends."""
    stages = len(pipeline.place)
    mesh = pipeline.mesh
    if pipeline.axis not in mesh.axes or len(pipeline.orders) != pipeline.coordinates:
        raise BadPlan(f"the plan has orders for {len(pipeline.orders)} coordinates of {pipeline.axis!r} on mesh {mesh}")
    if str(stage_mesh(mesh, pipeline.axis)) != str(plan.mesh):
        raise BadPlan(f"the plan is for stages on mesh {plan.mesh}, and they stand on {mesh}")
    if pipeline.schedule not in (*ORDERS, FORWARD):
        raise BadPlan(
            f"the plan has an unknown order of stages, {pipeline.schedule!r}", seen=f"known: {', '.join(ORDERS)}"
        )
    begins = tuple(stage.blocks[:1] for stage in pipeline.stages[1:])
    said = tuple((name,) for name in pipeline.firsts)
    if len(said) != stages - 1 or (pipeline.stages and (begins != said or len(pipeline.stages) != stages)):
        raise BadPlan(f"the plan places {stages} stages, and says otherwise where they begin", advice="plan again")
    paths = {name.partition("/")[0] for name in plan.decisions}
    for first in pipeline.firsts:
        if not any(path == first or path.startswith(f"{first}.") for path in paths):
            raise BadPlan(f"the plan begins a stage at {first!r}, for which it decides nothing")
    try:
        prove(Order.of(pipeline.place, plan.microbatches, pipeline.orders))
    except BadOrder as e:
        raise BadPlan(f"the plan's order of stages does not run: {e.what}", seen=e.seen, advice="plan again") from e


def _refuse_decision(name: str, decision: Decision, mesh: DeviceMesh) -> None:
    """Raise a letter unless a decision has a strategy for each axis, with the arity of its kind."""
    strategies = decision.choice.strategies
    kind = decision.kind
    if len(strategies) != len(mesh.shape):
        raise BadPlan(f"the plan gives {name} {len(strategies)} strategies on a mesh of {len(mesh.shape)} axes")
    if kind != "op" and kind not in _ARITIES:
        raise BadPlan(f"the plan decides for {name}, a {kind}", seen=f"known: op, {', '.join(_ARITIES)}")
    arities = {(len(s.operands), len(s.outputs)) for s in strategies}
    fits = arities <= set(_ARITIES[kind]) if kind in _ARITIES else all(outputs for _, outputs in arities)
    if len(arities) > 1 or not fits:
        raise BadPlan(
            f"the plan gives {name}, {'an op' if kind == 'op' else f'a {kind}'}, strategies of another number of "
            "operands or outputs than it has",
            seen="; ".join(map(repr, strategies)),
        )


def _refuse_conversion(plan: Plan, c: Conversion) -> None:
    """Raise a letter if a conversion starts or ends other than the decisions at its ends say."""
    if c.source not in plan.decisions or c.target not in plan.decisions:
        raise BadPlan(f"the plan converts a value from {c.source} to {c.target}, and decides nothing for one of them")
    try:
        fits = _arrives(c, plan.decisions[c.target]) and _leaves(c, plan.decisions[c.source])
    except UNREADABLE as e:
        raise _no_plan(e) from e
    if not fits:
        raise BadPlan(
            f"the plan says of the value from {c.source} to operand {c.operand} of {c.target} something else than "
            "its decisions",
            seen=" to ".join(value.text(plan.mesh.axes) for value in c.value),
        )


def _leaves(c: Conversion, source: Decision) -> bool:
    """Whether an output of the source has the sharding from which the conversion starts."""
    for i in range(len(source.choice.strategies[0].outputs)):
        flows = source.choice.output(i)
        if c.value[0] == values(flows) and (not c.gradient or c.gradient[1] == gradients(flows)):
            return True
    return False


def _arrives(c: Conversion, target: Decision) -> bool:
    """Whether the target takes the operand in the sharding at which the conversion ends."""
    taken = target.choice.strategies[0].operands
    if c.operand >= len(taken):
        raise BadPlan(f"the plan converts operand {c.operand} of {c.target}, which takes {len(taken)}")
    flows = target.flows(c.operand)
    return c.value[1] == values(flows) and (not c.gradient or c.gradient[0] == gradients(flows))


def refuse_other_parameters(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raise a letter unless these parameters have the plan's sizes, and can be stored as it says."""
    sizes = {name: p.numel() * p.element_size() for name, p in given.items()}
    stored = plan.parameters
    for name, nbytes in plan.parameter_bytes.items():
        if sizes.get(name) != nbytes:
            raise BadPlan(
                f"the plan was made for another model: parameter {name}",
                seen=f"{nbytes} bytes in the plan, {sizes.get(name, 'none')} in the model",
                advice="plan again",
            )
        if Layout.of(tuple(given[name].shape), stored[name], plan.mesh) is None:
            raise BadPlan(
                f"the plan stores {name} as {stored[name].text(plan.mesh.axes)}, and it cannot lie so on mesh "
                f"{plan.mesh}",
                seen=f"a parameter of shape {list(given[name].shape)}",
                advice="plan again",
            )
