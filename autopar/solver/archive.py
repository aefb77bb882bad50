"""A plan as JSON, of data only, where every field is checked as it is read.

A file is edited, or comes from somewhere else: what cannot be read, or contradicts itself, is a letter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autopar import __version__
from autopar.kernels import NAMES
from autopar.letters import BadPlan, Letter
from autopar.sharding.certainty import SPREADS
from autopar.sharding.convert import Step
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, Strategy, gradients, values
from autopar.solver import folding
from autopar.solver.decision import Conversion, Decision, State, states_of

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

VERSION = 4  # version of the data of `to_dict`; a file has that of `folding.py`
_READ = (3, VERSION)  # a plan of version 3 recomputes nothing
_MOST = 2**62  # whole numbers in a file must be smaller
_WINDOW_BYTES = 25 * 2**20  # default for files that do not have it
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
# Numbers of operands and outputs of the kinds of sites that have fixed ones.
_ARITIES = {"parameter": (0, 1), "buffer": (0, 1), "input": (0, 1), "output": (1, 0), "update": (1, 0)}
_T = TypeVar("_T")


def write(plan: Plan, path: str | Path) -> None:
    try:
        data = {"version": folding.VERSION, "autopar": __version__, **folding.fold(written(plan))}
        Path(path).write_text(folding.written(data), encoding="utf-8")
    except (OSError, TypeError) as e:
        raise BadPlan(f"the plan cannot be written to {path}", seen=f"{type(e).__name__}: {e}") from e


def read(path: str | Path) -> Any:
    """The JSON of a plan's file; a letter where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_each_once)
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise BadPlan(f"the plan {path} cannot be read", seen=f"{type(e).__name__}: {e}") from e


# -- writing


def written(plan: Plan) -> dict[str, Any]:
    """The plan as data that JSON can hold; `fields_of` reads it."""
    axes = plan.mesh.axes
    needed = {name: list(figures) for name, figures in plan.needed.items()}
    return {
        "version": VERSION,
        "mesh": {"shape": list(plan.mesh.shape), "axes": list(axes), "ranks": list(plan.mesh.ranks)},
        "cluster": plan.cluster,
        "digest": plan.digest,
        "optimizer": plan.optimizer,
        "step_time_s": plan.step_time_s,
        "lower_bound_s": plan.lower_bound_s,
        "decisions": {name: _decision_data(d) for name, d in plan.decisions.items()},
        "conversions": [_conversion_data(c, axes) for c in plan.conversions],
        "regathered": sorted(plan.regathered),
        "parameter_bytes": dict(plan.parameter_bytes),
        "without_rule": list(plan.without_rule),
        "assumptions": list(plan.assumptions),
        "defaults": [list(pair) for pair in plan.defaults],
        **({"warnings": list(plan.warnings)} if plan.warnings else {}),
        **({"bound_of": plan.bound_of} if plan.bound_of else {}),
        "memory": dict(plan.memory),
        "peak_at": plan.peak_at,
        "budget": int(plan.budget) if math.isfinite(plan.budget) else None,  # JSON has no infinity
        "meshes": [list(row) for row in plan.meshes],
        "beside_s": plan.beside_s,
        "hidden_s": plan.hidden_s,
        "accumulation": plan.accumulation,
        "precision": list(plan.precision) if plan.precision else None,
        "scattered": sorted(plan.scattered),
        "recomputed": sorted(plan.recomputed),
        "recompute_s": plan.recompute_s,
        "first_peak_bytes": plan.first_peak_bytes,
        "window_bytes": plan.window_bytes,
        "suspected": [list(pair) for pair in plan.suspected],
        "stopped": list(plan.stopped),
        "sources": dict(plan.sources),
        **({"compiled": True} if plan.compiled else {}),
        **({"chunks": plan.chunks} if plan.chunks > 1 else {}),
        **({"kernels": list(plan.kernels)} if plan.kernels else {}),
        **({"fused": dict(plan.fused)} if plan.kernels and plan.fused is not None else {}),
        **({"microbatches": plan.microbatches} if plan.microbatches > 1 else {}),
        **({"needed": needed} if needed else {}),
        **({"unaligned": dict(plan.unaligned)} if plan.unaligned else {}),
        **({"passing": [list(pair) for pair in sorted(plan.passing.items())]} if plan.passing else {}),
    }


def _decision_data(d: Decision) -> dict[str, Any]:
    choice = [repr(strategy) for strategy in d.choice.strategies]
    figures = {"op": d.op, "kind": d.kind, "choice": choice, "seconds": d.seconds, "source": d.source}
    return {**figures, "outputs": list(d.outputs), "reads": list(d.reads)}


def _conversion_data(c: Conversion, axes: Sequence[str]) -> dict[str, Any]:
    return {
        "source": c.source,
        "target": c.target,
        "operand": c.operand,
        "value": [sharding.text(axes) for sharding in c.value],
        "gradient": [sharding.text(axes) for sharding in c.gradient] if c.gradient else None,
        "forward": [step.text(axes) for step in c.forward],
        "backward": [step.text(axes) for step in c.backward],
        "seconds": c.seconds,
    }


# -- reading


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plan that `written` wrote; raises a letter where the data is not a plan."""
    try:
        if data["version"] in folding.READ and not isinstance(data["version"], bool):
            return _fields(folding.unfold(data, VERSION))
        if data["version"] not in _READ:
            version = _shown(data["version"])
            raise BadPlan(f"the plan is of version {version}, this autopar reads {VERSION}", advice="plan again")
        return _fields(data)
    except Letter:
        raise
    except _UNREADABLE as e:
        raise _no_plan(e) from e


def _no_plan(why: Exception) -> BadPlan:
    return BadPlan("this is not a plan", seen=f"{type(why).__name__}: {why}")


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    shape = data["mesh"]["shape"]
    axes = data["mesh"]["axes"]
    mesh = DeviceMesh(_each(shape, _whole), _each(axes, _text), _each(data["mesh"].get("ranks", []), _whole))
    return {
        "mesh": mesh,
        "cluster": _text(data["cluster"]),
        "decisions": {name: _decision(name, d, mesh) for name, d in data["decisions"].items()},
        "conversions": _each(data["conversions"], lambda c: _conversion(c, mesh)),
        "step_time_s": _number(data["step_time_s"]),
        "lower_bound_s": _number(data["lower_bound_s"]),
        "parameter_bytes": _sizes(data["parameter_bytes"]),
        "digest": _text(data["digest"]),
        "window_bytes": _whole(data.get("window_bytes", _WINDOW_BYTES), least=1),
        "optimizer": _optimizer(data["optimizer"]),
        "without_rule": _each(data["without_rule"], _text),
        "assumptions": _each(data["assumptions"], _text),
        "defaults": _each(data["defaults"], lambda pair: _pair(pair, _text)),
        "warnings": _each(data.get("warnings", ()), _text),
        "bound_of": _text(data.get("bound_of", "")),
        "memory": _sizes(data["memory"]),
        "peak_at": _text(data["peak_at"]),
        "budget": math.inf if data["budget"] is None else float(_whole(data["budget"], least=1)),
        "meshes": _each(data["meshes"], _mesh_row),
        "beside_s": _number(data["beside_s"]),
        "hidden_s": _number(data["hidden_s"]),
        "accumulation": _whole(data["accumulation"], least=1),
        "chunks": _whole(data.get("chunks", 1), least=1),
        "kernels": _each(data.get("kernels", ()), _family),
        "fused": _fused(data),
        "microbatches": _whole(data.get("microbatches", 1), least=1),
        "sources": {_source(name): _number(seconds) for name, seconds in data.get("sources", {}).items()},
        "compiled": _truth(data.get("compiled", False)),
        "precision": None if data["precision"] is None else _pair(data["precision"], _text),
        "scattered": _names(data["scattered"]),
        "recompute_s": 0.0 if data["version"] < VERSION else _number(data["recompute_s"]),
        "states": _states(_without_segments(data)),
        "needed": {_text(name): _bytes_and_seconds(figures) for name, figures in data.get("needed", {}).items()},
        "unaligned": {_text(name): _number(seconds) for name, seconds in data.get("unaligned", {}).items()},
        "first_peak_bytes": _whole(data.get("first_peak_bytes", 0)),
        "suspected": _each(data.get("suspected", []), lambda pair: _pair(pair, _text)),
        "stopped": _each(data.get("stopped", []), _text),
    }


def _source(value: Any) -> str:
    if value not in SPREADS:
        raise ValueError(f"{_shown(value)} is not a source of seconds")
    return str(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _without_segments(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data of a plan; a letter where it recomputes in segments, as older plans did."""
    if "segments" in data:
        raise BadPlan("the plan recomputes in segments, as another autopar did", advice="plan again")
    return data


def _states(data: Mapping[str, Any]) -> dict[str, State]:
    """The states of values; they stand in three lists of the file."""
    recomputed = frozenset[str]() if data["version"] < VERSION else _names(data["recomputed"])
    passing = dict(_each(data.get("passing", []), lambda pair: _pair(pair, _text)))
    return states_of(recomputed, passing, _names(data["regathered"]))


def _bytes_and_seconds(figures: Any) -> tuple[int, float]:
    nbytes, seconds = figures
    return _whole(nbytes), _number(seconds)


def _decision(name: str, data: Mapping[str, Any], mesh: DeviceMesh) -> Decision:
    _text(name)
    strategies = _each(data["choice"], lambda strategy: Strategy.parse(_text(strategy)))
    kind = _text(data["kind"])
    if len(strategies) != len(mesh.shape):
        raise BadPlan(f"the plan gives {name} {len(strategies)} strategies on a mesh of {len(mesh.shape)} axes")
    if kind != "op" and kind not in _ARITIES:
        raise BadPlan(f"the plan decides for {name}, a {kind}", seen=f"known: op, {', '.join(_ARITIES)}")
    arities = {(len(s.operands), len(s.outputs)) for s in strategies}
    fits = arities == {_ARITIES[kind]} if kind in _ARITIES else all(outputs for _, outputs in arities)
    if len(arities) > 1 or not fits:
        raise BadPlan(
            f"the plan gives {name}, {'an op' if kind == 'op' else f'a {kind}'}, strategies of another number of "
            "operands or outputs than it has",
            seen="; ".join(map(repr, strategies)),
        )
    outputs, reads = (_each(data.get(key, ()), _text) for key in ("outputs", "reads"))
    return Decision(
        _text(data["op"]), kind, Choice(strategies), _number(data["seconds"]), _text(data["source"]), outputs, reads
    )


def _conversion(data: Mapping[str, Any], mesh: DeviceMesh) -> Conversion:
    def sharding(text: Any) -> Sharding:
        return Sharding.parse(_text(text), mesh)

    def step(text: Any) -> Step:
        return Step.parse(_text(text), mesh)

    forward, backward = _each(data["forward"], step), _each(data["backward"], step)
    return Conversion(
        _text(data["source"]),
        _text(data["target"]),
        _whole(data["operand"]),
        _pair(data["value"], sharding),
        None if data["gradient"] is None else _pair(data["gradient"], sharding),
        forward,
        backward,
        _number(data["seconds"]),
    )


def _mesh_row(data: Any) -> tuple[str, float, float, int, str]:
    mesh, step, bound, peak, why = _list(data)
    return _text(mesh), _number(step), _number(bound), _whole(peak), _text(why)


def _shown(value: Any) -> str:
    """A value of a file as short text."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:80]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not a string")
    return value


def _family(value: Any) -> str:
    """The name of a family of kernels; an error for any other value."""
    if value not in NAMES:
        raise ValueError(f"{_shown(value)} names no kernels")
    return str(value)


def _fused(data: Mapping[str, Any]) -> dict[str, str] | None:
    """Families of kernels by results; None in a file that does not say where kernels stand."""
    found = data.get("fused", None if data.get("kernels") else {})
    return None if found is None else {_text(name): _family(family) for name, family in found.items()}


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{_shown(value)} is not a list")
    return value


def _each(value: Any, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    return tuple(map(read, _list(value)))


def _pair(value: Any, read: Callable[[Any], _T]) -> tuple[_T, _T]:
    first, second = _list(value)
    return read(first), read(second)


def _names(value: Any) -> frozenset[str]:
    return frozenset(_each(value, _text))


def _sizes(value: Any) -> dict[str, int]:
    return {_text(name): _whole(nbytes) for name, nbytes in value.items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is not a finite number")
    return float(value)


def _optimizer(value: Any) -> str | float:
    """An optimizer's name, or the bytes of its states for each parameter, as int or float as given."""
    if isinstance(value, str):
        return value
    number = _number(value)
    return value if isinstance(value, int) else number


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
        raise ValueError(f"{_shown(value)} is not a whole number from {least} to {_MOST}")
    return value


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a name stands twice in it."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number that a plan may have")


# -- contradictions


def refuse_contradictions(plan: Plan) -> None:
    """Raise a letter if some part of the plan contradicts its decisions."""
    if set(plan.parameter_bytes) != {name for name, d in plan.decisions.items() if d.kind == "parameter"}:
        raise BadPlan("the plan has sizes of other parameters than it decides")
    if unknown := sorted(
        {*plan.without_rule, *plan.unaligned, *plan.regathered, *plan.scattered} - set(plan.decisions)
    ):
        raise BadPlan(f"the plan speaks of {unknown[0]}, for which it decides nothing")
    if len({(c.target, c.operand) for c in plan.conversions}) < len(plan.conversions):
        raise BadPlan("the plan converts a value twice")
    conversions = {c.name for c in plan.conversions}
    for value in sorted(plan.recomputed):
        if value not in conversions and (value not in plan.decisions or plan.decisions[value].kind != "op"):
            raise BadPlan(f"the plan recomputes {value}, which is neither an op nor a conversion of it")
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


def _refuse_conversion(plan: Plan, c: Conversion) -> None:
    """Raise a letter if a conversion starts or ends other than the decisions at its ends say."""
    if c.source not in plan.decisions or c.target not in plan.decisions:
        raise BadPlan(f"the plan converts a value from {c.source} to {c.target}, and decides nothing for one of them")
    try:
        fits = _arrives(c, plan.decisions[c.target]) and _leaves(c, plan.decisions[c.source])
    except _UNREADABLE as e:
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
