"""`Plan`: a strategy for every site, what it costs, and how far from the best it can be. Text, JSON, comparison; no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autopar.letters import BadPlan, Letter
from autopar.sharding.convert import Step
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.overlap import BUCKET
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, Strategy, values

if TYPE_CHECKING:
    import torch

    from autopar.solver.program import Search

VERSION = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one site."""

    op: str
    kind: str
    choice: Choice
    seconds: float                                             # of the op itself
    source: str = ""

    def flows(self, operand: int | None = None) -> tuple[Any, ...]:
        return self.choice.output() if operand is None else self.choice.operand(operand)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A value that changes its sharding between two sites."""

    source: str
    target: str
    operand: int
    value: tuple[Sharding, Sharding]                           # as it leaves, as it arrives
    gradient: tuple[Sharding, Sharding] | None                 # of its gradient: as it arrives back, as it leaves; None where it has none
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
    digest: str                                                # of the graph it was made for
    optimizer: str | float = "adamw"
    without_rule: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()                 # what an argument left at its default meant
    memory: Mapping[str, int] = field(default_factory=dict, repr=False)      # bytes a device at the peak, by kind
    peak_at: str = ""                                          # where in the step the peak stands
    budget: int | None = None                                  # bytes a device; None: not asked for
    meshes: tuple[tuple[str, float, float, int, str], ...] = ()    # what the search over meshes met: mesh, seconds, bound, peak bytes, why it was refused

    beside_s: float = 0.0                                      # communication that may move beside compute: of parameters and their gradients
    hidden_s: float = 0.0                                      # and what of it compute hides
    accumulation: int = 1                                      # micro-batches in a step
    precision: tuple[str, str] | None = None                   # dtypes of compute and of the reduction of gradients
    scattered: frozenset[str] = frozenset()                    # parameters whose gradients are reduced in each of them, not once at the end
    first_peak_bytes: int = 0                                  # of the first step, before the optimizer has states
    window_bytes: int = BUCKET                                 # of parameters that a window of gathers and reductions reads at least

    search: Search | None = field(default=None, repr=False, compare=False)      # what it was chosen from, in the process that planned

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", MappingProxyType(dict(self.decisions)))
        object.__setattr__(self, "parameter_bytes", MappingProxyType(dict(self.parameter_bytes)))
        object.__setattr__(self, "memory", MappingProxyType(dict(self.memory)))

    def __reduce__(self) -> Any:                               # a plan travels between ranks as data
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
        stored = [(name, sharding.text(axes) + (" (regathered)" if name in self.regathered else ""), f"{self._local_bytes(name, sharding):,}") for name, sharding in self.parameters.items()]
        ops = [(name, self._choice_text(d.choice), f"{d.seconds * 1e6:.1f}") for name, d in self.decisions.items() if d.kind == "op" and d.seconds]
        moves = [(f"{c.source} to {c.target}", " to ".join(dict.fromkeys(v.text(axes) for v in c.value)), _steps(c.forward, axes), _steps(c.backward, axes), f"{c.seconds * 1e6:.1f}")
                 for c in self.conversions]
        dtypes = f", computes in {self.precision[0]}, reduces in {self.precision[1]}" if self.precision else ""
        lines = [
            f"plan for {self.mesh.size} devices, mesh {self.mesh}, cluster {self.cluster}{dtypes}",
            f"step      {_time(self.step_time_s)} a step: {_time(compute)} compute and optimizer{f' ({self.accumulation} micro-batches)' if self.accumulation > 1 else ''}, {_time(moved - self.beside_s)} communication in line, {_time(self.beside_s - self.hidden_s)} exposed"
            f" of {_time(self.beside_s)} beside compute, no recompute",
            f"bound     {_time(self.lower_bound_s)} at least for any plan of this model on this mesh{' within the budget' if self.budget is not None else ''}: gap {self.gap:.2%}",
            f"memory    {_size(self.peak_bytes)} at the {self.peak_at}" + (f", of {_size(self.budget)}" if self.budget is not None else "")
            + ": " + ", ".join(f"{kind} {_size(n)}" for kind, n in sorted(self.memory.items(), key=lambda kn: -kn[1]) if n),
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
        if self.meshes:
            rows = [(mesh, _time(step) if step else "-", _time(bound) if bound else "-", why, _size(peak) if step else "-") for mesh, step, bound, peak, why in self.meshes]
            lines += ["", *_table([("mesh", "step", "bound", "", "peak"), *rows])]
        lines += ["", *(f"assumed   {a}" for a in self.assumptions), *(f"default   {name}: {meaning}" for name, meaning in self.defaults)]
        return "\n".join(lines)

    def _choice_text(self, choice: Choice) -> str:
        if len(self.mesh.shape) == 1:
            return repr(choice.strategies[0])
        return "; ".join(f"{s!r} @{axis}" for s, axis, n in zip(choice.strategies, self.mesh.axes, self.mesh.shape, strict=True) if n > 1)

    def _local_bytes(self, name: str, sharding: Sharding) -> int:
        parts = 1
        for axes in sharding.cuts.values():
            for axis in axes:
                parts *= self.mesh.shape[axis]
        return -(-self.parameter_bytes[name] // parts)

    def explain(self, pattern: str) -> str:
        """What was decided for the sites whose name begins with this, what enters and leaves them, and why: the best plans in which one of them does otherwise."""
        names = [n for n in self.decisions if n == pattern or n.startswith((f"{pattern}/", f"{pattern}.", f"{pattern}:"))]
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
                    lines.append(f"    {way}: forward {_steps(c.forward, self.mesh.axes)}; backward {_steps(c.backward, self.mesh.axes)}; {_time(c.seconds)}")
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
            lines.append(f"    rival {self._choice_text(choice)}: {why}; the op itself {'+' if own >= 0 else '-'}{_time(abs(own))}, the rest {'+' if more >= own else '-'}{_time(abs(more - own))}")
        return lines

    def constraints(self, *patterns: str) -> dict[str, str]:
        """What this plan decided for the parameters and inputs that a pattern names, as constraints for another: pin some, search the rest."""
        found = {}
        for name, d in self.decisions.items():
            if d.kind in ("parameter", "input") and any(fnmatchcase(name, pattern) for pattern in patterns or ("*",)):
                arrives = {c.value[1].text(self.mesh.axes) for c in self.conversions if c.source == name}
                stored = values(d.flows()).text(self.mesh.axes)
                if d.kind == "parameter" and (self.precision or any(c.source == f"{name}:shared" for c in self.conversions)):
                    arrives |= {"*", stored}                   # several uses may want several things; and what a cast hands on is not told by its name
                policy = ("; regathered" if name in self.regathered else "; kept") + ("; each" if name in self.scattered else "; end") if d.kind == "parameter" else ""
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
            "decisions": {name: {"op": d.op, "kind": d.kind, "choice": [repr(s) for s in d.choice.strategies], "seconds": d.seconds, "source": d.source} for name, d in self.decisions.items()},
            "conversions": [
                {"source": c.source, "target": c.target, "operand": c.operand, "value": [sharding(s) for s in c.value],
                 "gradient": [sharding(s) for s in c.gradient] if c.gradient else None,
                 "forward": [s.text(self.mesh.axes) for s in c.forward], "backward": [s.text(self.mesh.axes) for s in c.backward], "seconds": c.seconds}
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
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        try:
            if data["version"] != VERSION:
                raise BadPlan(f"the plan is of version {data['version']}, this autopar reads {VERSION}", advice="plan again")
            mesh = DeviceMesh(tuple(data["mesh"]["shape"]), tuple(data["mesh"]["axes"]), data["mesh"].get("ranks", ()))

            def pair(texts: Any) -> tuple[Sharding, Sharding]:
                first, second = texts
                return Sharding.parse(first, mesh), Sharding.parse(second, mesh)

            decisions = {}
            for name, d in data["decisions"].items():
                strategies = tuple(Strategy.parse(s) for s in d["choice"])
                if len(strategies) != len(mesh.shape):
                    raise BadPlan(f"the plan gives {name} {len(strategies)} strategies on a mesh of {len(mesh.shape)} axes")
                decisions[name] = Decision(str(d["op"]), str(d["kind"]), Choice(strategies), float(d["seconds"]), str(d["source"]))
            conversions = tuple(
                Conversion(str(c["source"]), str(c["target"]), int(c["operand"]), pair(c["value"]), pair(c["gradient"]) if c["gradient"] else None,
                           tuple(Step.parse(s, mesh) for s in c["forward"]), tuple(Step.parse(s, mesh) for s in c["backward"]), float(c["seconds"]))
                for c in data["conversions"]
            )
            made = Plan(
                mesh, str(data["cluster"]), decisions, conversions, frozenset(data["regathered"]), float(data["step_time_s"]), float(data["lower_bound_s"]),
                {str(k): int(v) for k, v in data["parameter_bytes"].items()}, str(data["digest"]), data["optimizer"] if isinstance(data["optimizer"], (int, float)) else str(data["optimizer"]),
                tuple(map(str, data["without_rule"])), tuple(map(str, data["assumptions"])), tuple((str(a), str(b)) for a, b in data["defaults"]),
                {str(k): int(v) for k, v in data["memory"].items()}, str(data["peak_at"]), None if data["budget"] is None else int(data["budget"]),
                tuple((str(m), float(s), float(b), int(p), str(w)) for m, s, b, p, w in data["meshes"]),
                float(data["beside_s"]), float(data["hidden_s"]), int(data["accumulation"]), (str(data["precision"][0]), str(data["precision"][1])) if data["precision"] else None, frozenset(data["scattered"]),
                int(data.get("first_peak_bytes", 0)), int(data.get("window_bytes", BUCKET)),
            )
            if not all(map(math.isfinite, (made.step_time_s, made.lower_bound_s, made.beside_s, made.hidden_s, *([made.optimizer] if isinstance(made.optimizer, (int, float)) else []), *(d.seconds for d in decisions.values()),
                                           *(c.seconds for c in conversions)))):
                raise ValueError("a number that is not finite")
            if made.window_bytes < 1:
                raise ValueError("windows of no bytes")
            if set(made.parameter_bytes) != {name for name, d in decisions.items() if d.kind == "parameter"}:
                raise ValueError("sizes of other parameters than are decided")
            return made
        except Letter:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
            raise BadPlan("this is not a plan", seen=f"{type(e).__name__}: {e}") from e

    def save(self, path: str | Path) -> None:
        """Write JSON: data only."""
        try:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except (OSError, TypeError) as e:
            raise BadPlan(f"the plan cannot be written to {path}", seen=f"{type(e).__name__}: {e}") from e

    @staticmethod
    def load(path: str | Path) -> Plan:
        try:
            return Plan.from_dict(json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse))
        except (OSError, ValueError, TypeError, RecursionError) as e:
            raise BadPlan(f"the plan {path} cannot be read", seen=f"{type(e).__name__}: {e}") from e

    def validate(self, model: torch.nn.Module) -> None:
        """Raise a letter unless the plan's parameters are the model's."""
        if not hasattr(model, "named_parameters"):
            raise BadPlan(f"{model!r} is no model")
        sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters(remove_duplicate=False)}
        for name, nbytes in self.parameter_bytes.items():
            if sizes.get(name) != nbytes:
                raise BadPlan(f"the plan was made for another model: parameter {name}", seen=f"{nbytes} bytes in the plan, {sizes.get(name, 'none')} in the model", advice="plan again")


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
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=[./:])", "*", row[0]), *row[1:]), []).append(row)
    return [rows[0] if len(rows) == 1 else (f"{head[0]} (x{len(rows)})", *head[1:]) for head, rows in groups.items()]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as aligned columns, the last one to the right. A table with only a head says nothing."""
    if len(rows) == 1:
        return [f"{rows[0][0]}: none"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(w) if i == len(row) - 1 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
