"""`Plan`: a strategy for every site, what it costs, and how far from the best it can be.

Text, JSON, comparison; no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.graph.layers import folded
from autopar.letters import BadPlan, Letter
from autopar.sharding.convert import Step
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, Strategy, gradients, values
from autopar.space.windows import BUCKET

if TYPE_CHECKING:
    import torch

    from autopar.solver.program import Search

VERSION = 3
_MOST = 2**62  # whole numbers of a file are below
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one site."""

    op: str
    kind: str
    choice: Choice
    seconds: float  # of the op itself
    source: str = ""

    def flows(self, operand: int | None = None) -> tuple[Any, ...]:
        return self.choice.output() if operand is None else self.choice.operand(operand)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A value that changes its sharding between two sites."""

    source: str
    target: str
    operand: int
    value: tuple[Sharding, Sharding]  # as it leaves, as it arrives
    gradient: (
        tuple[Sharding, Sharding] | None
    )  # of its gradient: as it arrives back, as it leaves; None where it has none
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy per site. A plan changes only speed and memory: what the program computes is not in it."""

    mesh: DeviceMesh
    cluster: str
    decisions: Mapping[str, Decision] = field(repr=False)
    conversions: tuple[Conversion, ...] = field(repr=False)
    regathered: frozenset[str]
    step_time_s: float
    lower_bound_s: float
    parameter_bytes: Mapping[str, int] = field(repr=False)
    digest: str  # of the graph it was made for
    optimizer: str | float = "adamw"
    without_rule: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()  # what an argument left at its default meant
    memory: Mapping[str, int] = field(default_factory=dict, repr=False)  # bytes a device at the peak, by kind
    peak_at: str = ""  # where in the step the peak stands
    budget: int | None = None  # bytes a device; None: not asked for
    meshes: tuple[
        tuple[str, float, float, int, str], ...
    ] = ()  # what the search over meshes met: mesh, seconds, bound, peak bytes, why it was refused

    beside_s: float = 0.0  # communication that may move beside compute: of parameters and their gradients
    hidden_s: float = 0.0  # and what of it compute hides
    accumulation: int = 1  # micro-batches in a step
    precision: tuple[str, str] | None = None  # dtypes of compute and of the reduction of gradients
    scattered: frozenset[str] = (
        frozenset()
    )  # parameters whose gradients are reduced in each of them, not once at the end
    first_peak_bytes: int = 0  # of the first step, before the optimizer has states
    window_bytes: int = BUCKET  # of parameters that a window of gathers and reductions reads at least
    suspected: tuple[
        tuple[str, str], ...
    ] = ()  # ops without a rule, and the line under which each ran right when it was tried
    stopped: tuple[
        str, ...
    ] = ()  # searches that were stopped before their end, after work that was counted: the gap says what they left open

    search: Search | None = field(
        default=None, repr=False, compare=False
    )  # what it was chosen from, in the process that planned

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", MappingProxyType(dict(self.decisions)))
        object.__setattr__(self, "parameter_bytes", MappingProxyType(dict(self.parameter_bytes)))
        object.__setattr__(self, "memory", MappingProxyType(dict(self.memory)))

    def __reduce__(self) -> Any:  # a plan travels between ranks as data
        return Plan.from_dict, (self.to_dict(),)

    def __hash__(self) -> int:
        return hash((self.mesh, self.digest, self.step_time_s))

    @property
    def gap(self) -> float:
        """How far the step time may be above the best one, as a share of it."""
        return (self.step_time_s - self.lower_bound_s) / self.step_time_s if self.step_time_s else 0.0

    @property
    def parameters(self) -> dict[str, Sharding]:
        """How each parameter is stored."""
        return {name: values(d.flows()) for name, d in self.decisions.items() if d.kind == "parameter"}

    @property
    def peak_bytes(self) -> int:
        """What the fullest device holds at most during a step."""
        return sum(self.memory.values())

    # -- text

    def __str__(self) -> str:
        axes = self.mesh.axes
        compute = sum(d.seconds for d in self.decisions.values())
        moved = sum(c.seconds for c in self.conversions)
        stored = [
            (
                name,
                sharding.text(axes) + (" (regathered)" if name in self.regathered else ""),
                f"{self._local_bytes(name, sharding):,}",
            )
            for name, sharding in self.parameters.items()
        ]
        ops = [
            (name, self._choice_text(d.choice), f"{d.seconds * 1e6:.1f}")
            for name, d in self.decisions.items()
            if d.kind == "op" and d.seconds
        ]
        moves = [
            (
                f"{c.source} to {c.target}",
                " to ".join(dict.fromkeys(v.text(axes) for v in c.value)),
                _steps(c.forward, axes),
                _steps(c.backward, axes),
                f"{c.seconds * 1e6:.1f}",
            )
            for c in self.conversions
        ]
        dtypes = f", computes in {self.precision[0]}, reduces in {self.precision[1]}" if self.precision else ""
        lines = [
            f"plan for {self.mesh.size} devices, mesh {self.mesh}, cluster {self.cluster}{dtypes}",
            f"step      {_time(self.step_time_s)} a step: {_time(compute)} compute and "
            f"optimizer{f' ({self.accumulation} micro-batches)' if self.accumulation > 1 else ''}, "
            f"{_time(moved - self.beside_s)} communication in line, {_time(self.beside_s - self.hidden_s)} exposed"
            f" of {_time(self.beside_s)} beside compute, no recompute",
            f"bound     {_time(self.lower_bound_s)} at least for any plan of this model on this "
            f"mesh{' within the budget' if self.budget is not None else ''}: gap {self.gap:.2%}",
            f"memory    {_size(self.peak_bytes)} at the {self.peak_at}"
            + (f", of {_size(self.budget)}" if self.budget is not None else "")
            + ": "
            + ", ".join(f"{kind} {_size(n)}" for kind, n in sorted(self.memory.items(), key=lambda kn: -kn[1]) if n),
            "",
            *_table([("parameter", "stored", "bytes a device"), *_folded(stored)]),
            "",
            *_table([("op", "operands -> output", "us"), *_folded(ops)]),
            "",
            *_table([("conversion", "value", "forward", "backward", "us"), *_folded(moves)]),
        ]
        if self.without_rule:
            cost = sum(self.decisions[name].seconds for name in self.without_rule)
            lines += ["", f"replicated for want of a rule: {', '.join(self.without_rule)} ({_time(cost)} a step)"]
            for op, line in self.suspected:
                lines.append(
                    f"    {op} ran right on parts when it was tried, which proves nothing: if its owner confirms "
                    f"it, autopar.rule({public_name(op)!r}, {line!r})"
                )
        if self.meshes:
            rows = [
                (mesh, _time(step) if step else "-", _time(bound) if bound else "-", why, _size(peak) if step else "-")
                for mesh, step, bound, peak, why in self.meshes
            ]
            lines += ["", *_table([("mesh", "step", "bound", "", "peak"), *rows])]
        lines += (
            [
                "",
                *(
                    f"stopped   {what}, after the work that it is given: the gap says what may be left"
                    for what in self.stopped
                ),
            ]
            if self.stopped
            else []
        )
        lines += [
            "",
            *(f"assumed   {a}" for a in self.assumptions),
            *(f"default   {name}: {meaning}" for name, meaning in self.defaults),
        ]
        return "\n".join(lines)

    def _choice_text(self, choice: Choice) -> str:
        if len(self.mesh.shape) == 1:
            return repr(choice.strategies[0])
        return "; ".join(
            f"{s!r} @{axis}"
            for s, axis, n in zip(choice.strategies, self.mesh.axes, self.mesh.shape, strict=True)
            if n > 1
        )

    def _local_bytes(self, name: str, sharding: Sharding) -> int:
        parts = 1
        for axes in sharding.cuts.values():
            for axis in axes:
                parts *= self.mesh.shape[axis]
        return -(-self.parameter_bytes[name] // parts)

    def explain(self, pattern: str) -> str:
        """What was decided for the sites whose name begins with this, what enters and leaves them, and why.

        The best plans in which one of them does otherwise.
        """
        names = [
            n for n in self.decisions if n == pattern or n.startswith((f"{pattern}/", f"{pattern}.", f"{pattern}:"))
        ]
        if not names:
            raise BadPlan(f"the plan has no site called {pattern!r}", seen=", ".join(list(self.decisions)[:12]))
        lines = []
        for name in names:
            d = self.decisions[name]
            lines.append(f"{name}: {d.op}, {_time(d.seconds)}" + (f"    {d.source}" if d.source else ""))
            lines += [f"    @{axis}  {s!r}" for s, axis in zip(d.choice.strategies, self.mesh.axes, strict=True)]
            for c in self.conversions:
                if name in (c.source, c.target):
                    way = f"to {c.target}" if name == c.source else f"from {c.source}"
                    lines.append(
                        f"    {way}: forward {_steps(c.forward, self.mesh.axes)}; backward "
                        f"{_steps(c.backward, self.mesh.axes)}; {_time(c.seconds)}"
                    )
            lines += self._rivals(name) if d.kind in ("op", "parameter") and self.search is not None else []
        if self.search is None:
            lines.append("(the rivals of a choice are known where it was planned: plan again to see them)")
        return "\n".join(lines)

    def _rivals(self, name: str) -> list[str]:
        assert self.search is not None
        rivals = self.search.rivals(name)
        under = " at the prices of the budget" if any(self.search.prices.of_bytes.values()) else ""
        if not rivals:
            return ["    no rival: nothing else goes with its neighbours"]
        lines = []
        for choice, more, own in rivals:
            why = "as fast" if more < 1e-9 else f"the best plan with it takes {_time(more)} more{under}"
            lines.append(
                f"    rival {self._choice_text(choice)}: {why}; the op itself "
                f"{'+' if own >= 0 else '-'}{_time(abs(own))}, the rest "
                f"{'+' if more >= own else '-'}{_time(abs(more - own))}"
            )
        return lines

    def constraints(self, *patterns: str) -> dict[str, str]:
        """What this plan decided for the parameters and inputs that a pattern names, as constraints for another.

        Pin some, search the rest.
        """
        found = {}
        for name, d in self.decisions.items():
            if d.kind in ("parameter", "input") and any(fnmatchcase(name, pattern) for pattern in patterns or ("*",)):
                arrives = {c.value[1].text(self.mesh.axes) for c in self.conversions if c.source == name}
                stored = values(d.flows()).text(self.mesh.axes)
                if d.kind == "parameter" and (
                    self.precision or any(c.source == f"{name}:shared" for c in self.conversions)
                ):
                    arrives |= {
                        "*",
                        stored,
                    }  # several uses may want several things; and what a cast hands on is not told by its name
                policy = (
                    ("; regathered" if name in self.regathered else "; kept")
                    + ("; each" if name in self.scattered else "; end")
                    if d.kind == "parameter"
                    else ""
                )
                use = arrives.pop() if len(arrives) == 1 else "*" if arrives else stored
                found[escape(name)] = f"{stored}; {use}{policy}" if policy else use
        return found

    def diff(self, other: Plan) -> str:
        """The sites that differ, this plan first."""
        if not isinstance(other, Plan):
            raise BadPlan(f"{other!r} is no plan to compare with")
        lines = [] if self.mesh == other.mesh else [f"mesh: {self.mesh} | {other.mesh}"]
        for name in dict.fromkeys((*self.decisions, *other.decisions)):
            mine, theirs = self.decisions.get(name), other.decisions.get(name)
            if mine is None or theirs is None or mine.choice != theirs.choice:
                lines.append(f"{name}: {mine.choice if mine else 'absent'} | {theirs.choice if theirs else 'absent'}")
        return "\n".join(lines) or "the plans are the same"

    # -- files

    def to_dict(self) -> dict[str, Any]:
        def sharding(s: Sharding) -> str:
            return s.text(self.mesh.axes)

        return {
            "version": VERSION,
            "mesh": {"shape": list(self.mesh.shape), "axes": list(self.mesh.axes), "ranks": list(self.mesh.ranks)},
            "cluster": self.cluster,
            "digest": self.digest,
            "optimizer": self.optimizer,
            "step_time_s": self.step_time_s,
            "lower_bound_s": self.lower_bound_s,
            "decisions": {
                name: {
                    "op": d.op,
                    "kind": d.kind,
                    "choice": [repr(s) for s in d.choice.strategies],
                    "seconds": d.seconds,
                    "source": d.source,
                }
                for name, d in self.decisions.items()
            },
            "conversions": [
                {
                    "source": c.source,
                    "target": c.target,
                    "operand": c.operand,
                    "value": [sharding(s) for s in c.value],
                    "gradient": [sharding(s) for s in c.gradient] if c.gradient else None,
                    "forward": [s.text(self.mesh.axes) for s in c.forward],
                    "backward": [s.text(self.mesh.axes) for s in c.backward],
                    "seconds": c.seconds,
                }
                for c in self.conversions
            ],
            "regathered": sorted(self.regathered),
            "parameter_bytes": dict(self.parameter_bytes),
            "without_rule": list(self.without_rule),
            "assumptions": list(self.assumptions),
            "defaults": [list(pair) for pair in self.defaults],
            "memory": dict(self.memory),
            "peak_at": self.peak_at,
            "budget": self.budget,
            "meshes": [list(row) for row in self.meshes],
            "beside_s": self.beside_s,
            "hidden_s": self.hidden_s,
            "accumulation": self.accumulation,
            "precision": list(self.precision) if self.precision else None,
            "scattered": sorted(self.scattered),
            "first_peak_bytes": self.first_peak_bytes,
            "window_bytes": self.window_bytes,
            "suspected": [list(pair) for pair in self.suspected],
            "stopped": list(self.stopped),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote.

        What is none is a letter; whether it is a plan of some model is for `validate` to say.
        """
        try:
            if data["version"] != VERSION:
                raise BadPlan(
                    f"the plan is of version {_shown(data['version'])}, this autopar reads {VERSION}",
                    advice="plan again",
                )
            mesh = DeviceMesh(
                tuple(map(_whole, _list(data["mesh"]["shape"]))),
                tuple(map(_text, _list(data["mesh"]["axes"]))),
                tuple(map(_whole, _list(data["mesh"].get("ranks", [])))),
            )
            decisions = {name: _decision(name, d, mesh) for name, d in data["decisions"].items()}
            conversions = tuple(_conversion(c, mesh) for c in _list(data["conversions"]))
            made = Plan(
                mesh,
                _text(data["cluster"]),
                decisions,
                conversions,
                _names(data["regathered"]),
                _number(data["step_time_s"]),
                _number(data["lower_bound_s"]),
                {_text(k): _whole(v) for k, v in data["parameter_bytes"].items()},
                _text(data["digest"]),
                _optimizer(data["optimizer"]),
                tuple(map(_text, _list(data["without_rule"]))),
                tuple(map(_text, _list(data["assumptions"]))),
                tuple((_text(a), _text(b)) for a, b in map(_list, _list(data["defaults"]))),
                {_text(k): _whole(v) for k, v in data["memory"].items()},
                _text(data["peak_at"]),
                None if data["budget"] is None else _whole(data["budget"], least=1),
                tuple(
                    (_text(m), _number(s), _number(b), _whole(p), _text(w))
                    for m, s, b, p, w in map(_list, _list(data["meshes"]))
                ),
                _number(data["beside_s"]),
                _number(data["hidden_s"]),
                _whole(data["accumulation"], least=1),
                None if data["precision"] is None else _pair(data["precision"], _text),
                _names(data["scattered"]),
                _whole(data.get("first_peak_bytes", 0)),
                _whole(data.get("window_bytes", BUCKET), least=1),
                tuple((_text(op), _text(line)) for op, line in map(_list, _list(data.get("suspected", [])))),
                tuple(map(_text, _list(data.get("stopped", [])))),
            )
            made._agrees()
            return made
        except Letter:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
            raise BadPlan("this is not a plan", seen=f"{type(e).__name__}: {e}") from e

    def _agrees(self) -> None:
        """Raise a letter where parts of the plan speak of things that its decisions do not know, or otherwise than
        these.
        """
        if set(self.parameter_bytes) != {name for name, d in self.decisions.items() if d.kind == "parameter"}:
            raise BadPlan("the plan has sizes of other parameters than it decides")
        if unknown := sorted({*self.without_rule, *self.regathered, *self.scattered} - set(self.decisions)):
            raise BadPlan(f"the plan speaks of {unknown[0]}, for which it decides nothing")
        if len({(c.target, c.operand) for c in self.conversions}) < len(self.conversions):
            raise BadPlan("the plan converts a value twice")
        for c in self.conversions:
            if c.source not in self.decisions or c.target not in self.decisions:
                raise BadPlan(
                    f"the plan converts a value from {c.source} to {c.target}, and decides nothing for one of them"
                )
            given, taken = self.decisions[c.source].choice.strategies, self.decisions[c.target].choice.strategies
            ends = {
                (tuple(s.outputs[i].value for s in given), tuple(s.outputs[i].gradient for s in given))
                for i in range(len(given[0].outputs))
            }
            if c.operand >= len(taken[0].operands):
                raise BadPlan(
                    f"the plan converts operand {c.operand} of {c.target}, which takes {len(taken[0].operands)}"
                )
            arrives = self.decisions[c.target].flows(c.operand)
            leaves = [
                (v, g)
                for v, g in ends
                if (c.value[0], c.gradient and c.gradient[1]) == (Sharding(v), c.gradient and Sharding(g))
            ]
            if (
                not leaves
                or c.value[1] != values(arrives)
                or (c.gradient is not None and c.gradient[0] != gradients(arrives))
            ):
                raise BadPlan(
                    f"the plan says of the value from {c.source} to operand {c.operand} of {c.target} something "
                    "else than its decisions",
                    seen=" to ".join(v.text(self.mesh.axes) for v in c.value),
                )

    def save(self, path: str | Path) -> None:
        """Write JSON: data only."""
        try:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except (OSError, TypeError) as e:
            raise BadPlan(f"the plan cannot be written to {path}", seen=f"{type(e).__name__}: {e}") from e

    @staticmethod
    def load(path: str | Path) -> Plan:
        try:
            return Plan.from_dict(
                json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
            )
        except (OSError, ValueError, TypeError, RecursionError) as e:
            raise BadPlan(f"the plan {path} cannot be read", seen=f"{type(e).__name__}: {e}") from e

    def validate(
        self,
        model: torch.nn.Module,
        meta_inputs: Any = None,
        loss: Callable[..., Any] | None = None,
        assume: Any = None,
        outputs: str | Sequence[str] = "auto",
    ) -> None:
        """Raise a letter unless the plan's parameters are the model's.

        And, given the inputs it was made for, unless all of it is one of the plans of the model: what autoparallelize
        checks of a plan it is given.
        """
        if not hasattr(model, "named_parameters"):
            raise BadPlan(f"{model!r} is no model")
        self._agrees()
        given = dict(model.named_parameters(remove_duplicate=False))
        sizes = {name: p.numel() * p.element_size() for name, p in given.items()}
        for name, nbytes in self.parameter_bytes.items():
            if sizes.get(name) != nbytes:
                raise BadPlan(
                    f"the plan was made for another model: parameter {name}",
                    seen=f"{nbytes} bytes in the plan, {sizes.get(name, 'none')} in the model",
                    advice="plan again",
                )
            if Layout.of(tuple(given[name].shape), self.parameters[name], self.mesh) is None:
                raise BadPlan(
                    f"the plan stores {name} as {self.parameters[name].text(self.mesh.axes)}, and it cannot lie "
                    f"so on mesh {self.mesh}",
                    seen=f"a parameter of shape {list(given[name].shape)}",
                    advice="plan again",
                )
        if meta_inputs is not None:
            from autopar.codegen.checked import check_plan
            from autopar.request import Request

            check_plan(Request.of(self, loss=loss, assume=assume, outputs=outputs).trace(model, meta_inputs), self)


_KINDS = {
    "parameter": (0, 1),
    "buffer": (0, 1),
    "input": (0, 1),
    "output": (1, 0),
    "update": (1, 0),
}  # how many operands and outputs, where that is said


def _decision(name: str, data: Mapping[str, Any], mesh: DeviceMesh) -> Decision:
    """One entry of the decisions of a file."""
    _text(name)
    strategies = tuple(Strategy.parse(_text(s)) for s in _list(data["choice"]))
    kind, arities = _text(data["kind"]), {(len(s.operands), len(s.outputs)) for s in strategies}
    if len(strategies) != len(mesh.shape):
        raise BadPlan(f"the plan gives {name} {len(strategies)} strategies on a mesh of {len(mesh.shape)} axes")
    if kind != "op" and kind not in _KINDS:
        raise BadPlan(f"the plan decides for {name}, a {kind}", seen=f"known: op, {', '.join(_KINDS)}")
    if (
        len(arities) > 1
        or (kind in _KINDS and arities != {_KINDS[kind]})
        or (kind == "op" and not all(outputs for _, outputs in arities))
    ):
        raise BadPlan(
            f"the plan gives {name}, {'an op' if kind == 'op' else f'a {kind}'}, strategies of another number of "
            "operands or outputs than it has",
            seen="; ".join(map(repr, strategies)),
        )
    return Decision(_text(data["op"]), kind, Choice(strategies), _number(data["seconds"]), _text(data["source"]))


def _conversion(data: Mapping[str, Any], mesh: DeviceMesh) -> Conversion:
    """One entry of the conversions of a file."""

    def ends(pair: Any) -> tuple[Sharding, Sharding]:
        return _pair(pair, lambda text: Sharding.parse(_text(text), mesh))

    forward, backward = (tuple(Step.parse(_text(s), mesh) for s in _list(data[way])) for way in ("forward", "backward"))
    return Conversion(
        _text(data["source"]),
        _text(data["target"]),
        _whole(data["operand"]),
        ends(data["value"]),
        None if data["gradient"] is None else ends(data["gradient"]),
        forward,
        backward,
        _number(data["seconds"]),
    )


def _shown(value: Any) -> str:
    """What stands in a file, in a few words."""
    return (
        f"a whole number of {value.bit_length()} bits"
        if isinstance(value, int) and value.bit_length() > 64
        else repr(value)[:80]
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is no text")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{_shown(value)} is no list")
    return value


def _names(value: Any) -> frozenset[str]:
    return frozenset(map(_text, _list(value)))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is no finite number")
    return float(value)


def _optimizer(value: Any) -> str | float:
    """A name, or bytes for each parameter, in the kind of number in which they were given."""
    if isinstance(value, str):
        return value
    number = _number(value)
    return value if isinstance(value, int) else number


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
        raise ValueError(f"{_shown(value)} is no whole number from {least} to {_MOST}")
    return value


def _pair(value: Any, read: Callable[[Any], _T]) -> tuple[_T, _T]:
    first, second = _list(value)
    return read(first), read(second)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of a plan")


def _steps(steps: tuple[Step, ...], axes: tuple[str, ...]) -> str:
    return ", ".join(step.text(axes) for step in steps) or "-"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _size(n: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that say the same of numbered layers become one, with `*` for the number and how many there are."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault((folded(row[0]), *row[1:]), []).append(row)
    return [rows[0] if len(rows) == 1 else (f"{head[0]} (x{len(rows)})", *head[1:]) for head, rows in groups.items()]


def public_name(op: str) -> str:
    """The name by which `autopar.rule` is told of an op.

    `mylib::scan` for what a graph calls `ops.mylib.scan.default`.
    """
    parts = op.split(".")
    return f"{parts[1]}::{'.'.join(parts[2:])}".removesuffix(".default") if len(parts) > 2 and parts[0] == "ops" else op


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as aligned columns, the last one to the right. A table with only a head says nothing."""
    if len(rows) == 1:
        return [f"{rows[0][0]}: none"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(w) if i == len(row) - 1 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
