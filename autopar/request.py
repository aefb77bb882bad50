"""`Request`: what a caller asks of a plan, read and checked once.

It traces a model, plans a graph, and plans again for another batch of a model that is stored already.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch

from autopar.collector import without_collections
from autopar.graph.graph import Graph, info
from autopar.letters import BadBudget, BadCluster, BadConstraint, BadPreset, BadSharding, Infeasible, NotServed
from autopar.runtime.world import world_size
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import OPTIMIZERS
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.meshes import best_mesh, meshes
from autopar.solver.plan import Plan
from autopar.solver.program import peak_where_nothing_is_dear, solve
from autopar.space.constraints import Preset
from autopar.space.presets import preset_of, said_of, window_of
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.windows import BUCKET
from autopar.tracer import Assume, ColoTracer
from autopar.tracer.precision import Precision

_RESERVE = 0.1  # of a device's memory, for what no plan counts: the allocator's gaps, the libraries
_AGAIN = 0.01  # the gap at which a plan for another batch is good enough: a training loop waits for it
_MOST_TRIED = 4  # constraints that are left out one at a time to see which a budget breaks on
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{u}iB": 2 ** (10 * (i + 1)) for i, u in enumerate("KMGT")},
    **{f"{u}B": 10 ** (3 * (i + 1)) for i, u in enumerate("KMGT")},
}


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `autopar.plan` but the model and its inputs."""

    mesh: DeviceMesh | tuple[int, ...] | int | None = None
    cluster: Cluster | str | None = None
    memory_budget: int | str | float | None = None
    optimizer: str | float = "adamw"
    precision: Precision | None = None
    recompute: str = "auto"
    loss: Callable[..., Any] | None = None
    parallel: str | Mapping[str, Any] | None = None
    constraints: Mapping[str, Any] | None = None
    assume: Assume | None = None
    strict: bool = False
    accumulation: int = 1
    kernels: bool = True
    solver: str = "cbc"
    time_limit: float | None = None
    gap: float = 0.0
    outputs: str | Sequence[str] = "auto"  # how what is no loss leaves, or the names of what gradients arrive at
    hardware: Cluster = field(init=False)
    budget: float = field(init=False)  # bytes; infinite where there is none

    def __post_init__(self) -> None:
        refuse_unserved(recompute=(self.recompute, ("auto", "none")), kernels=(self.kernels, (True, False)))
        if not isinstance(self.gap, (int, float)) or not 0 <= self.gap < 1:
            raise NotServed(f"gap={self.gap!r} is no share of the step time", advice="gap=0.01")
        if (
            not isinstance(self.solver, str)
            or not isinstance(self.strict, bool)
            or not (self.loss is None or callable(self.loss))
            or not (self.assume is None or isinstance(self.assume, Assume))
        ):
            raise NotServed(
                "solver, strict, loss or assume is of another kind than it may be",
                seen=f"solver={self.solver!r}, strict={self.strict!r}, loss={self.loss!r}, assume={self.assume!r}",
                advice='solver="cbc", loss=callable, assume=autopar.Assume(...)',
            )
        if (
            self.optimizer not in OPTIMIZERS
            if isinstance(self.optimizer, str)
            else isinstance(self.optimizer, bool)
            or not isinstance(self.optimizer, (int, float))
            or not 0 <= self.optimizer < 1e6
        ):
            raise NotServed(
                f"optimizer={self.optimizer!r} is not known",
                seen=f"known: {', '.join(OPTIMIZERS)}",
                advice="one of these, or the bytes of its states for each parameter: 8 for AdamW in float32",
            )
        if (
            self.outputs not in ("auto", "full", "sharded")
            if isinstance(self.outputs, str)
            else not isinstance(self.outputs, (tuple, list)) or not all(isinstance(n, str) for n in self.outputs)
        ):
            raise NotServed(
                f"outputs={self.outputs!r} is not known",
                advice=(
                    '"auto", "full", "sharded", or the names of outputs that come whole and may be given gradients: '
                    'outputs=("logits",)'
                ),
            )
        if (
            isinstance(self.accumulation, bool)
            or not isinstance(self.accumulation, int)
            or not 1 <= self.accumulation < 2**20
        ):
            raise NotServed(
                f"accumulation={self.accumulation!r} is no number of micro-batches",
                advice="accumulation=4; meta_inputs are one micro-batch",
            )
        if self.time_limit is not None and (
            isinstance(self.time_limit, bool)
            or not isinstance(self.time_limit, (int, float))
            or not self.time_limit > 0
        ):
            raise NotServed(
                f"time_limit={self.time_limit!r} is no number of seconds",
                advice="time_limit=10.0; without one the same inputs give the same plan",
            )
        if self.precision is not None and not isinstance(self.precision, Precision):
            raise NotServed(
                f"precision={self.precision!r} is no Precision",
                advice='autopar.Precision(param="bfloat16", reduce="float32")',
            )
        object.__setattr__(self, "hardware", Cluster.of(self.cluster))
        object.__setattr__(self, "budget", _bytes(self.memory_budget, self.hardware))

    @staticmethod
    def of(
        plan: Plan,
        loss: Callable[..., Any] | None = None,
        assume: Assume | None = None,
        outputs: str | Sequence[str] = "auto",
    ) -> Request:
        """The request that a plan answers, as far as the plan tells."""
        cluster: str | None = plan.cluster.partition(" ")[0]
        try:
            Cluster.of(cluster)
        except BadCluster:  # from a file that is elsewhere
            cluster = None
        return Request(
            plan.mesh,
            cluster,
            plan.budget or math.inf,
            plan.optimizer,
            Precision(*plan.precision) if plan.precision else None,
            loss=loss,
            assume=assume,
            accumulation=plan.accumulation,
            outputs=outputs,
        )

    @without_collections
    def trace(self, model: torch.nn.Module, meta_inputs: Any) -> Graph:
        graph = ColoTracer().trace(model, meta_inputs, assume=self.assume, loss=self.loss, precision=self.precision)
        return (
            graph
            if isinstance(self.outputs, str) or graph.loss is None
            else replace(
                graph,
                backward_from=tuple(
                    n for i, n in enumerate(graph.output_names) if n in self.outputs and i != graph.loss
                ),
            )
        )

    def plan(self, graph: Graph, started: float = math.inf) -> Plan:
        """The fastest plan found for a graph, on the mesh that is asked for or on the best one.

        `started` a time of the monotonic clock, from which the time limit counts.
        """
        until = math.inf if self.time_limit is None else started + self.time_limit
        on = without_collections(lambda mesh, known=math.inf: self._on(graph, mesh, known, until))
        if self.mesh is None or (isinstance(self.mesh, numbers.Integral) and not isinstance(self.mesh, bool)):
            return best_mesh(meshes(_devices(None if self.mesh is None else int(self.mesh), self.hardware)), on, until)
        return on(DeviceMesh.of(self.mesh))

    def plan_again(self, graph: Graph, first: Plan) -> Plan:
        """A plan of another graph of the same model, whose parameters stay stored as the first plan stores them.

        What else was asked for holds where it can.
        """
        before = first.parameters
        stored = {
            escape(name): f"{before[name].text(first.mesh.axes) if name in before else 'R'}; *"
            for name in graph.parameters
        }
        mine = {
            pattern: what
            for pattern, what in (self.constraints or {}).items()
            if pattern in _matching(graph, self.constraints or {})
        }
        letter: Exception | None = None
        for constraints, parallel, budget in (
            (mine, self.parallel, self.memory_budget),
            ({}, None, self.memory_budget),
            ({}, None, math.inf),
        ):
            try:
                return replace(
                    self,
                    mesh=first.mesh,
                    constraints={**stored, **constraints},
                    parallel=parallel,
                    memory_budget=budget,
                    time_limit=None,
                    gap=max(self.gap, _AGAIN),
                ).plan(graph)
            except (BadConstraint, BadPreset, Infeasible) as e:
                letter = letter or e
        assert letter is not None
        raise letter

    def _on(self, graph: Graph, mesh: DeviceMesh, known: float, until: float) -> Plan:
        try:
            return self._planned(graph, mesh, known, until)
        except BadConstraint as e:
            if self.parallel is None or self.constraints:
                raise
            raise BadPreset(
                f"parallel={self.parallel!r} does not fit this model on mesh {mesh}: {e.what}",
                at=e.at,
                seen=e.seen,
                advice="another preset, or constraints beside it that free what is named",
            ) from e
        except Infeasible as e:
            if (self.parallel is None and not self.constraints) or math.isinf(self.budget):
                raise
            raise Infeasible(
                e.what, at=e.at, seen=f"{e.seen}; {self._in_the_way(graph, mesh, until)}", advice=e.advice
            ).of_bytes(e.needs, e.smallest) from e

    def _in_the_way(self, graph: Graph, mesh: DeviceMesh, until: float) -> str:
        """Which constraints a budget breaks on: without which of them there is a plan."""

        def fits(**freer: Any) -> bool:
            try:
                replace(self, **freer)._planned(graph, mesh, math.inf, until)
            except (Infeasible, BadConstraint, BadPreset):
                return False
            return True

        given = dict(self.constraints or {})
        parts: list[tuple[str, dict[str, Any]]] = (
            [(f"parallel={self.parallel!r}", {"parallel": None})] if self.parallel is not None else []
        )
        parts += [
            (f"the constraint {pattern!r}", {"constraints": {p: w for p, w in given.items() if p != pattern}})
            for pattern in list(given)[:_MOST_TRIED]
        ]
        if not fits(parallel=None, constraints=None):
            return "without the constraints there is none either"
        guilty = [what for what, freer in parts if fits(**freer)] if len(parts) > 1 else [parts[0][0]]
        return f"there is one without {' or without '.join(guilty) if guilty else 'all of the constraints together'}"

    def _planned(self, graph: Graph, mesh: DeviceMesh, known: float, until: float) -> Plan:
        if self.parallel is None:
            return self._solved(graph, mesh, known, until, self._defaults())
        expert = preset_of(self.parallel, graph, mesh)

        def solved(defaults: list[tuple[str, str]], preset: Preset) -> Plan:
            plan = self._solved(graph, mesh, known, until, defaults, preset)
            said = said_of(self.parallel, mesh, plan.parameters, plan.parameter_bytes)
            return replace(plan, defaults=(*said, *plan.defaults))

        try:
            return solved(self._defaults(), expert)
        except (BadConstraint, Infeasible):
            if not expert.habits:
                raise
            broken = (
                "parallel",
                f"{self.parallel!r} is not kept to everywhere: "
                f"{', '.join(f'{habit} along {mesh.axes[a]}' for a, habit in expert.habits)} leaves no plan",
            )
            return solved([broken, *self._defaults()], replace(expert, habits=()))

    def _solved(
        self,
        graph: Graph,
        mesh: DeviceMesh,
        known: float,
        until: float,
        defaults: list[tuple[str, str]],
        preset: Preset | None = None,
    ) -> Plan:
        setting = Setting(
            mesh,
            self.hardware,
            self.optimizer,
            self.accumulation,
            self.precision.reduce if self.precision else "",
            BUCKET if preset is None else window_of(self.parallel, mesh),
            strict=self.strict,
        )
        space_in = functools.partial(shardings, graph, constraints=self.constraints, preset=preset, known=known)
        solved = functools.partial(
            solve,
            precision=(self.precision.param, self.precision.reduce) if self.precision else None,
            solver=self.solver,
            gap=self.gap,
            until=until,
            assumptions=graph.assumptions,
            defaults=defaults,
        )
        space = space_in(setting)
        if (
            math.isinf(self.budget) or peak_where_nothing_is_dear(space) <= self.budget
        ):  # else it hardly fits with every copy kept
            fastest = solved(space)
            if fastest.peak_bytes <= self.budget:
                return (
                    fastest
                    if self.memory_budget is None or math.isinf(self.budget)
                    else replace(fastest, budget=int(self.budget))
                )
        return solved(space_in(replace(setting, regather=True)), budget=self.budget)

    def _defaults(self) -> list[tuple[str, str]]:
        """What arguments left at their default meant, and what is priced that is not run so yet."""
        said = [("recompute", "none: no stage drops activations yet")] if self.recompute == "auto" else []
        if self.time_limit is not None:
            said.append(
                ("time_limit", f"{self.time_limit:g} s: what was found by then; another run may give another plan")
            )
        if self.precision is None:
            said.insert(0, ("precision", "the model's own dtypes"))
        if self.memory_budget is None:
            said.insert(
                0,
                (
                    "memory_budget",
                    f"{1 - _RESERVE:.0%} of the {self.hardware.device.memory_bytes / 2**30:.0f} GiB of a device",
                ),
            )
        if self.cluster is None:
            said.insert(0, ("cluster", "generic: a documented stand-in, no machine was measured"))
        return said


def refuse_unserved(**arguments: Any) -> None:
    """An argument that no stage serves yet is a letter, unless it has its default."""
    for name, value in arguments.items():
        given, served = (
            value if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple) else (value, (None,))
        )
        if given not in served:
            raise NotServed(f"{name}={given!r} is not served by any stage yet", advice=f"leave {name} at its default")


def _matching(graph: Graph, patterns: Mapping[str, Any]) -> set[str]:
    """Patterns that speak of something in this graph: another batch may not reach all that the first did."""
    names = {"out", *(n for node in graph.nodes for n in (info(node).key, info(node).module, *info(node).names))}
    return {p for p in patterns if any(fnmatchcase(n, p) for n in names if n)}


def _devices(mesh: int | None, cluster: Cluster) -> int:
    """How many devices there are to search meshes of."""
    if mesh is not None:
        return mesh
    if world_size() > 1 or "WORLD_SIZE" in os.environ:
        return max(world_size(), int(os.environ.get("WORLD_SIZE", "1")))
    if re.search(r"-\d+x\d+$", cluster.name):
        return cluster.devices_per_node * cluster.nodes
    raise BadSharding(
        "mesh=None, and nothing says how many devices there are", advice='mesh=8, cluster="h100-8x4", or torchrun'
    )


def _bytes(given: Any, cluster: Cluster) -> float:
    """A budget in bytes from what a caller may pass."""
    if given is None:
        return cluster.device.memory_bytes * (1 - _RESERVE)
    if (
        isinstance(given, str)
        and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?|inf)\s*([A-Za-z]*)\s*", given))
        and match[2] in _UNITS
    ):
        given = float(match[1]) * _UNITS[match[2]]
    if (
        isinstance(given, bool)
        or not isinstance(given, numbers.Real)
        or not float(given) >= 1
        or (isinstance(given, int) and given > 2**62)
    ):
        raise BadBudget(
            f"memory_budget={given!r} is no number of bytes",
            advice='bytes, or text such as "16GiB"; float("inf") for no limit',
        )
    return float(given)
