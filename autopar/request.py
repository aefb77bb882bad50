"""`Request`: what a caller asks of a plan, read and checked once.

It traces a model, plans a graph, and plans again for another batch of a model that is stored already.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch

from autopar.arguments import (
    RESERVE,
    budget_of,
    check_accumulation,
    check_gap,
    check_kinds,
    check_number,
    check_optimizer,
    check_outputs,
    check_precision,
    check_recompute,
    check_time_limit,
    device_count,
    refuse_unserved,
)
from autopar.collector import without_collections
from autopar.graph.graph import Graph, info, type_of
from autopar.letters import BadCluster, BadConstraint, BadPreset, Infeasible, NotServed
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import optimizer_figures
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.meshes import best_mesh, meshes
from autopar.solver.plan import Plan
from autopar.solver.policies import POLICIES, Policy
from autopar.solver.program import peak_where_nothing_is_dear, solve
from autopar.space.constraints import Preset
from autopar.space.presets import preset_of, said_of, window_of
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.shared import Shared
from autopar.space.space import Space
from autopar.space.windows import BUCKET
from autopar.tracer import Assume, ColoTracer
from autopar.tracer.precision import Precision
from autopar.turns import FEW, Head, head_of, in_chunks, in_micro_batches, numbers_of_chunks, rows_of_batch

_AGAIN = 0.01  # the gap at which a plan for another batch is good enough: a training loop waits for it
FREE = 0.02  # of a step: what chunks of the loss head may take before the whole head is also searched under a budget
_MOST_TRIED = 4  # constraints that are left out one at a time to see which a budget breaks on


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `autopar.plan` but the model and its inputs."""

    mesh: DeviceMesh | tuple[int, ...] | int | None = None
    cluster: Cluster | str | None = None
    memory_budget: int | str | float | None = None
    optimizer: str | float = "adamw"
    precision: Precision | None = None
    recompute: str | Policy = "auto"
    loss: Callable[..., Any] | None = None
    parallel: str | Mapping[str, Any] | None = None
    constraints: Mapping[str, Any] | None = None
    assume: Assume | None = None
    strict: bool = False
    accumulation: int = 1
    microbatches: int | str = "auto"
    chunks: int | str = "auto"  # in which the loss head runs
    compile: bool = False  # does torch.compile make the code?
    kernels: bool = True
    solver: str = "cbc"
    time_limit: float | None = None
    gap: float = 0.0
    outputs: str | Sequence[str] = "auto"  # how what is no loss leaves, or the names of what gradients arrive at
    hardware: Cluster = field(init=False)
    budget: float = field(init=False)  # bytes; infinite where there is none

    def __post_init__(self) -> None:
        refuse_unserved(kernels=(self.kernels, (True, False)))
        check_recompute(self.recompute, POLICIES)
        check_gap(self.gap)
        check_kinds(self.solver, self.strict, self.loss, self.assume)
        check_optimizer(self.optimizer)
        check_outputs(self.outputs)
        check_accumulation(self.accumulation)
        check_number("microbatches", self.microbatches)
        check_number("chunks", self.chunks)
        check_time_limit(self.time_limit)
        check_precision(self.precision)
        object.__setattr__(self, "hardware", Cluster.of(self.cluster))
        object.__setattr__(self, "budget", budget_of(self.memory_budget, self.hardware))

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
            mesh=plan.mesh,
            cluster=cluster,
            memory_budget=plan.budget,
            optimizer=plan.optimizer,
            precision=Precision(*plan.precision) if plan.precision else None,
            loss=loss,
            assume=assume,
            accumulation=plan.accumulation,
            microbatches=plan.microbatches,
            chunks=plan.chunks,
            compile=plan.compiled,
            outputs=outputs,
        )

    @without_collections
    def trace(self, model: torch.nn.Module, meta_inputs: Any) -> Graph:
        """The graph of a model, with the loss and the outputs that were asked for."""
        graph = ColoTracer().trace(model, meta_inputs, assume=self.assume, loss=self.loss, precision=self.precision)
        if isinstance(self.outputs, str) or graph.loss is None:
            return graph
        named = (name for i, name in enumerate(graph.output_names) if name in self.outputs and i != graph.loss)
        return replace(graph, backward_from=tuple(named))

    def plan(self, graph: Graph, started: float = math.inf) -> Plan:
        """The fastest plan found for a graph, on the mesh that is asked for or on the best one.

        `started` a time of the monotonic clock, from which the time limit counts.
        """
        until = math.inf if self.time_limit is None else started + self.time_limit
        if self.microbatches != "auto":
            return self._on_meshes(_Planning(self, self._in_turns(graph, int(self.microbatches)), until))
        letters: list[Infeasible] = []
        for turns in _numbers_of_turns(graph):
            try:
                planning = _Planning(self, self._in_turns(graph, turns), until, is_trial=turns > 1)
                return self._on_meshes(planning)
            except Infeasible as e:
                letters.append(e)
                if not _may_fit(letters, self.budget):
                    break
            except (NotServed, BadConstraint, BadPreset):
                if not letters:
                    raise
                break  # the model looks at all rows, or devices cannot share so few
        raise letters[0]

    def as_planned(self, graph: Graph, plan: Plan) -> Graph:
        """The graph that a plan is of: that of one of its micro-batches, with the head in its chunks."""
        return in_chunks(self._turned(graph, plan.microbatches), plan.chunks, self.keeps_outputs)

    @property
    def keeps_outputs(self) -> bool:
        """Are outputs beside a loss wanted, whatever it takes to keep them?"""
        return self.outputs != "auto"

    def _in_turns(self, graph: Graph, turns: int) -> Graph:
        """The graph of one of so many micro-batches, with its head in as many chunks as are asked for."""
        made = self._turned(graph, turns)
        if self.chunks in ("auto", 1):
            return made
        chunked = in_chunks(made, int(self.chunks), self.keeps_outputs)
        if chunked.chunks == 1:
            found = head_of(made, self.keeps_outputs)
            why = found.why or f"{self.chunks} chunks do not share its {found.head.rows if found.head else 0} rows"
            raise NotServed(f"chunks={self.chunks}, and the loss head runs whole: {why}", advice="chunks=1")
        return chunked

    def _turned(self, graph: Graph, turns: int) -> Graph:
        """The graph of one of so many micro-batches of a batch, with the outputs that were asked for."""
        if turns > 1 and self.outputs == "sharded":
            raise NotServed(
                "outputs='sharded' and micro-batches: rows of a turn lie otherwise than those of the batch",
                advice='outputs="full", or microbatches=1',
            )
        return in_micro_batches(graph, turns, keeps_outputs=self.outputs == "full")

    def _on_meshes(self, planning: _Planning) -> Plan:
        """The fastest plan found on the mesh that is asked for, or on the best one."""
        until = planning.until
        if self.mesh is None or (isinstance(self.mesh, numbers.Integral) and not isinstance(self.mesh, bool)):
            count = device_count(None if self.mesh is None else int(self.mesh), self.hardware)
            return best_mesh(meshes(count), planning.on, until)
        return planning.on(DeviceMesh.of(self.mesh))

    def plan_again(self, graph: Graph, first: Plan, has_gradients: bool = True) -> Plan:
        """A plan of another graph of the same model, with parameters stored as in the first.

        The rest of the request holds where it can.
        """
        before, axes, asked = first.parameters, first.mesh.axes, dict(self.constraints or {})
        turns = math.gcd(first.microbatches, rows_of_batch(graph)) if has_gradients else 1
        chunks: int | str = "auto" if has_gradients else 1  # what the budget asks for here
        stored = {escape(name): f"{before[name].text(axes) if name in before else 'R'}; *" for name in graph.parameters}
        reached = _matching(graph, asked)
        mine = {pattern: sharding for pattern, sharding in asked.items() if pattern in reached}
        again = replace(self, mesh=first.mesh, time_limit=None, gap=max(self.gap, _AGAIN), microbatches=turns)
        again = replace(again, chunks=chunks if self.chunks == "auto" or not has_gradients else self.chunks)
        letter: Exception | None = None
        for freer in (
            {"constraints": {**stored, **mine}},
            {"constraints": stored, "parallel": None},
            {"constraints": stored, "parallel": None, "memory_budget": math.inf},
        ):
            try:
                return replace(again, **freer).plan(graph)
            except (BadConstraint, BadPreset, Infeasible) as e:
                letter = letter or e
        assert letter is not None
        raise letter

    def defaults(self, graph: Graph) -> list[tuple[str, str]]:
        """The meaning of each argument that was left at its default, and of a time limit."""
        said = []
        if self.cluster is None:
            said.append(("cluster", "generic: a documented stand-in, no machine was measured"))
        if self.memory_budget is None:
            memory = self.hardware.device.memory_bytes / 2**30
            said.append(("memory_budget", f"{1 - RESERVE:.0%} of the {memory:.0f} GiB of a device"))
        if self.precision is None:
            said.append(("precision", "the model's own dtypes"))
        if self.recompute == "auto":
            regions = any(info(n).checkpoint for n in graph.nodes)
            instead = (
                ', not the model\'s own checkpoint regions: recompute="as written" keeps to those' if regions else ""
            )
            said.append(("recompute", f"as little as the budget asks for{instead}"))
        if self.time_limit is not None:
            found = f"{self.time_limit:g} s: what was found by then; another run may give another plan"
            said.append(("time_limit", found))
        return said


@dataclass(frozen=True, slots=True)
class _Planning:
    """A request for a graph, on one mesh or another."""

    request: Request
    graph: Graph
    until: float  # a time of the monotonic clock, after which a plan that was found is not improved
    why_whole: str = ""  # why the loss head does not run in chunks under a budget
    is_trial: bool = False  # is there another way to ask, if nothing fits?
    is_tight: bool = False  # is it known that the fastest plan does not fit in the budget?

    @without_collections
    def on(self, mesh: DeviceMesh, known: float = math.inf) -> Plan:
        """The fastest plan on a mesh. `known` are the seconds of a plan on another mesh."""
        asked = self.request
        try:
            return self._planned(mesh, known)
        except BadConstraint as e:
            if asked.parallel is None or asked.constraints:
                raise
            raise BadPreset(
                f"parallel={asked.parallel!r} does not fit this model on mesh {mesh}: {e.what}",
                at=e.at,
                seen=e.seen,
                advice="another preset, or constraints beside it that free what is named",
            ) from e
        except Infeasible as e:
            if (asked.parallel is None and not asked.constraints) or math.isinf(asked.budget):
                raise
            seen = f"{e.seen}; {self._in_the_way(mesh)}"
            raise Infeasible(e.what, at=e.at, seen=seen, advice=e.advice).of_bytes(e.needs, e.smallest) from e

    def _in_the_way(self, mesh: DeviceMesh) -> str:
        """The constraints that a budget breaks on: there is a plan without them."""

        def fits(**freer: Any) -> bool:
            planning = replace(self, request=replace(self.request, **freer))
            try:
                planning._planned(mesh, math.inf)
            except (Infeasible, BadConstraint, BadPreset):
                return False
            return True

        given, preset = dict(self.request.constraints or {}), self.request.parallel
        parts: list[tuple[str, dict[str, Any]]] = []
        if preset is not None:
            parts.append((f"parallel={preset!r}", {"parallel": None}))
        for pattern in list(given)[:_MOST_TRIED]:
            others = {p: sharding for p, sharding in given.items() if p != pattern}
            parts.append((f"the constraint {pattern!r}", {"constraints": others}))
        if not fits(parallel=None, constraints=None):
            return "without the constraints there is none either"
        guilty = [what for what, freer in parts if fits(**freer)] if len(parts) > 1 else [parts[0][0]]
        return f"there is one without {' or without '.join(guilty) if guilty else 'all of the constraints together'}"

    def _planned(self, mesh: DeviceMesh, known: float) -> Plan:
        """The plan on a mesh; where the fastest one does not fit in the budget, one of those that do."""
        try:
            return self._by_preset(mesh, known)
        except _DoesNotFit as e:
            return self._under_budget(e.space, mesh, known)

    def _by_preset(self, mesh: DeviceMesh, known: float) -> Plan:
        """The plan on a mesh, by a preset or freely."""
        parallel, defaults = self.request.parallel, self.request.defaults(self.graph)
        if parallel is None:
            return self._solved(mesh, known, defaults)
        expert = preset_of(parallel, self.graph, mesh)
        try:
            plan = self._solved(mesh, known, defaults, expert)
        except (BadConstraint, Infeasible):
            if not expert.habits:
                raise
            kept = ", ".join(f"{habit} along {mesh.axes[a]}" for a, habit in expert.habits)
            broken = "parallel", f"{parallel!r} is not kept to everywhere: {kept} leaves no plan"
            plan = self._solved(mesh, known, [broken, *defaults], replace(expert, habits=()))
        said = said_of(parallel, mesh, plan.parameters, plan.parameter_bytes)
        return replace(plan, defaults=(*said, *plan.defaults))

    def _solved(
        self, mesh: DeviceMesh, known: float, defaults: Sequence[tuple[str, str]], preset: Preset | None = None
    ) -> Plan:
        """The fastest plan of the space on a mesh that fits in the budget."""
        asked = self.request
        setting = Setting(
            mesh,
            asked.hardware,
            asked.optimizer,
            asked.accumulation,
            asked.precision.reduce if asked.precision else "",
            BUCKET if preset is None else window_of(asked.parallel, mesh),
            compiled=asked.compile,
            strict=asked.strict,
            turns=self.graph.turns,
        )
        space_in = functools.partial(
            shardings,
            self.graph,
            constraints=asked.constraints,
            preset=preset,
            known=known,
            shared=Shared.of(self.graph, setting),
        )
        space = None if self.is_tight else space_in(setting)
        if space is not None and (math.isinf(asked.budget) or peak_where_nothing_is_dear(space) <= asked.budget):
            plan = self._fastest(space, math.inf, defaults, lambda: space_in(replace(setting, regather=True)))
            if plan.peak_bytes <= asked.budget:
                has_asked = asked.memory_budget is not None and math.isfinite(asked.budget)
                return replace(plan, budget=float(int(asked.budget))) if has_asked else plan
        if space is not None and asked.chunks == "auto":
            raise _DoesNotFit(space)
        # it hardly fits with every copy kept
        return self._fastest(space_in(replace(setting, regather=True)), asked.budget, defaults)

    def _under_budget(self, space: Space, mesh: DeviceMesh, known: float) -> Plan:
        """The plan where the fastest one does not fit: the loss head runs in chunks where that takes next to no time.

        Where it takes some, the fastest of fewer chunks and of the whole head, under one bound.
        """
        keeps = self.request.keeps_outputs
        found = head_of(self.graph, keeps)
        whole = replace(self, is_tight=True, why_whole=found.why)
        head = found.head
        numbers = () if head is None else numbers_of_chunks(head)
        if head is None or not numbers or _is_hopeless(self.request, self.graph, mesh):
            return whole._planned(mesh, known)
        few = [n for n in numbers if n <= FEW]
        trial = replace(whole, graph=in_chunks(self.graph, few.pop(), keeps), is_trial=True)
        try:
            plans = [trial._planned(mesh, known)]
        except Infeasible as e:
            if self.is_trial:
                raise
            try:
                return whole._planned(mesh, known)
            except Infeasible as letter:
                raise _of_the_smaller(letter, e.smallest, trial.graph.chunks) from e
        if _seconds_of_chunks(space, head, plans[0]) <= FREE * plans[0].step_time_s:
            return plans[0]
        for chunks in (*few, 1):
            with contextlib.suppress(Infeasible):
                other = replace(trial, graph=in_chunks(self.graph, chunks, keeps))
                plans.append(other._planned(mesh, known))
        fastest = min(reversed(plans), key=lambda p: p.step_time_s)
        return replace(fastest, lower_bound_s=min(p.lower_bound_s for p in plans))

    def _fastest(
        self,
        space: Space,
        budget: float,
        defaults: Sequence[tuple[str, str]],
        wide: Callable[[], Space] | None = None,
    ) -> Plan:
        asked = self.request
        plan = solve(
            space,
            asked.solver,
            budget=budget,
            gap=asked.gap,
            until=self.until,
            recompute=asked.recompute,
            wide=wide,
            is_trial=self.is_trial,
        )
        return replace(
            plan,
            precision=(asked.precision.param, asked.precision.reduce) if asked.precision else None,
            assumptions=tuple(self.graph.assumptions),
            defaults=(*defaults, *self._said_of_head()),
            chunks=self.graph.chunks,
        )

    def _said_of_head(self) -> list[tuple[str, str]]:
        """How the loss head runs under a budget, where that says something."""
        if self.graph.chunks > 1:
            return [("head", f"in {self.graph.chunks} chunks of rows, whose logits are not kept")]
        return [("head", f"whole: {self.why_whole}")] if self.why_whole else []


def _is_hopeless(request: Request, graph: Graph, mesh: DeviceMesh) -> bool:
    """Does what no turns make less exceed the budget: parameters, gradients and states, on all devices?"""
    types = [type_of(node) for node in graph.parameters.values()]
    kept = {t.itemsize: optimizer_figures(request.optimizer, t.itemsize)["kept"] for t in types}
    standing = sum(t.nbytes * (1 + t.requires_grad * (1 + kept[t.itemsize])) for t in types)
    return bool(standing / mesh.size > request.budget)


def _of_the_smaller(letter: Infeasible, smallest: float, chunks: int) -> Infeasible:
    """The letter about the whole head, or where a plan with a head in chunks is smaller, of that."""
    if not smallest < letter.smallest:
        return letter
    return Infeasible(
        letter.what,
        seen=f"{smallest:,.0f} bytes in the smallest plan that was found, whose loss head runs in {chunks} chunks; "
        f"{letter.smallest:,.0f} where it is whole",
        advice=f"memory_budget={math.ceil(smallest)}, or more devices",
    ).of_bytes(letter.needs, smallest)


class _DoesNotFit(Exception):
    """The fastest plan of a space needs more than the budget."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space


def _may_fit(letters: Sequence[Infeasible], budget: float) -> bool:
    """May twice as many turns fit, after these did not?

    Each halves at best what the last two differ by, so that all that follow take as much again.
    """
    smallest = [e.smallest for e in letters[-2:]]
    return len(smallest) < 2 or 2 * smallest[1] - smallest[0] <= budget


def _seconds_of_chunks(space: Space, head: Head, plan: Plan) -> float:
    """Seconds that the head of a plan takes in chunks over the fastest choices of its ops where it is whole."""
    ops = {info(node).key for node in head.ops}
    least = sum(float(site.seconds.min()) for site in space.sites if site.name in ops)
    takes = sum(d.seconds for name, d in plan.decisions.items() if name in ops or d.op in ("chunk", "added_up"))
    return takes - least


def _numbers_of_turns(graph: Graph) -> Iterator[int]:
    """One, then two, four, ... as far as they share the rows of a batch."""
    rows, turns = rows_of_batch(graph), 1
    while rows % turns == 0:
        yield turns
        turns *= 2


def _matching(graph: Graph, patterns: Mapping[str, Any]) -> set[str]:
    """Patterns that speak of something in this graph: another batch may not reach all that the first did."""
    names = {"out"}
    for node in graph.nodes:
        about = info(node)
        names.update(name for name in (about.key, about.module, *about.names) if name)
    return {pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)}
