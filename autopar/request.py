"""`Request`: what a caller asks of a plan, read and checked once.

It traces a model, plans a graph, and plans again for another batch of a model that is stored already.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
import time
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
    check_fits,
    check_gap,
    check_kinds,
    check_number,
    check_outputs,
    check_recompute,
    check_time_limit,
    device_count,
    kernels_of,
    optimizer_of,
    precision_of,
)
from autopar.collector import without_collections
from autopar.graph.graph import Graph, info, rows_of_batch
from autopar.kernels.measured import taken
from autopar.letters import BadCluster, BadConstraint, BadPreset, Infeasible, NotServed
from autopar.planning import Planning
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import budget_for, size
from autopar.solver.meshes import best_mesh, meshes
from autopar.solver.plan import Beside, Plan
from autopar.solver.policies import POLICIES, Policy
from autopar.solver.rivals import PricedSpace
from autopar.tracer import Assume, ColoTracer
from autopar.tracer.precision import Precision
from autopar.turns import head_of, in_chunks, in_micro_batches, why_whole

log = logging.getLogger("autopar")
_BESIDE = ("dp", "zero3", "megatron")  # what a plan is held against
_AGAIN = 0.01  # the gap at which a plan for another batch is good enough: a training loop waits for it
_TURNS_TRIED = 3  # numbers of turns, before what the last two lack says whether more may fit


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `autopar.plan` but the model and its inputs."""

    mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | int | str | None = None
    cluster: Cluster | str | None = None
    memory_budget: int | str | float | None = None
    optimizer: Any = "adamw"  # read: a name, or bytes for each parameter
    precision: Any = None  # read: a Precision or None
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
    kernels: bool | str | Sequence[str] = True
    solver: str = "cbc"
    time_limit: float | None = None
    gap: float = 0.0
    outputs: str | Sequence[str] = "auto"  # how what is no loss leaves, or the names of what gradients arrive at
    hardware: Cluster = field(init=False)
    budget: float = field(init=False)  # bytes; infinite where there is none

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", kernels_of(self.kernels))
        object.__setattr__(self, "mesh", _count_or_mesh(self.mesh))
        check_recompute(self.recompute, POLICIES)
        check_gap(self.gap)
        check_kinds(self.solver, self.strict, self.loss, self.assume)
        object.__setattr__(self, "optimizer", optimizer_of(self.optimizer))
        check_outputs(self.outputs)
        check_accumulation(self.accumulation)
        check_number("microbatches", self.microbatches)
        check_number("chunks", self.chunks)
        check_time_limit(self.time_limit)
        object.__setattr__(self, "precision", precision_of(self.precision))
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
            kernels=plan.kernels,
            compile=plan.compiled,
            outputs=outputs,
        )

    @without_collections
    def trace(self, model: torch.nn.Module, meta_inputs: Any) -> Graph:
        """The graph of a model, with the loss and the outputs that were asked for."""
        started = time.monotonic()
        graph = ColoTracer().trace(model, meta_inputs, assume=self.assume, loss=self.loss, precision=self.precision)
        log.info("traced %d ops in %.1f s", sum(info(n).kind == "op" for n in graph.nodes), time.monotonic() - started)
        if (isinstance(self.outputs, str) and self.outputs != "local") or graph.loss is None:
            return graph
        wanted = graph.output_names if self.outputs == "local" else self.outputs  # a loss of one's own: of any of them
        named = (name for i, name in enumerate(graph.output_names) if name in wanted and i != graph.loss)
        return replace(graph, backward_from=tuple(named))

    def plan(self, graph: Graph, started: float = math.inf) -> Plan:
        """The fastest plan found for a graph, on the mesh that is asked for or on the best one.

        `started` is the time of the monotonic clock from which the time limit counts.
        """
        began = time.monotonic()
        found = self._plan(graph, started)
        log.info("planned on mesh %s in %.1f s, gap %.2f%%", found.mesh, time.monotonic() - began, 100 * found.gap)
        if isinstance(found.search, PricedSpace):
            found.search.others = functools.partial(self._beside, graph, found.mesh, found.microbatches)
        return found

    def _beside(self, graph: Graph, mesh: DeviceMesh, turns: int) -> tuple[Beside, ...]:
        """Step time and memory of plans by well-known presets on a mesh, without a budget or constraints."""
        freer: dict[str, Any] = {"mesh": mesh, "memory_budget": math.inf, "constraints": None, "microbatches": turns}
        found = []
        for name in _BESIDE:
            try:
                plan = replace(self, **freer, parallel=name, time_limit=None)._plan(graph)
                found.append(Beside(name, plan.step_time_s, plan.peak_bytes, plan.peak_bytes <= self.budget))
            except (BadConstraint, BadPreset, Infeasible):
                found.append(Beside(name, math.inf, 0, False, "does not go with this model or mesh"))
        return tuple(found)

    def _plan(self, graph: Graph, started: float = math.inf) -> Plan:
        """The fastest plan found for a graph; with "auto", in as few micro-batches as fit in the budget."""
        until = math.inf if self.time_limit is None else started + self.time_limit
        if self.microbatches != "auto":
            return self._on_meshes(Planning(self, self._in_turns(graph, int(self.microbatches)), until))
        letters: dict[int, Infeasible] = {}  # by micro-batches
        for turns in _numbers_of_turns(rows_of_batch(graph)):
            try:
                planning = Planning(self, self._in_turns(graph, turns), until, is_trial=turns > 1)
                return self._on_meshes(planning)
            except Infeasible as e:
                letters[turns] = e
                if not _may_fit(letters, self.budget):
                    break
            except (NotServed, BadConstraint, BadPreset):
                if not letters:
                    raise
                break  # the model looks at all rows, or devices cannot share so few
        raise _of_the_smallest(letters)

    def as_planned(self, graph: Graph, plan: Plan) -> Graph:
        """The graph that a plan is of: one of its micro-batches, with the loss head in its chunks."""
        return in_chunks(self._turned(graph, plan.microbatches), plan.chunks, self.keeps_outputs)

    @property
    def keeps_outputs(self) -> bool:
        """Whether outputs beside the loss are wanted, whatever it takes to keep them."""
        return self.outputs != "auto"

    def _in_turns(self, graph: Graph, turns: int) -> Graph:
        """The graph of one of `turns` micro-batches, with the loss head in as many chunks as are asked for."""
        made = self._turned(graph, turns)
        if self.chunks in ("auto", 1):
            return made
        chunked = in_chunks(made, int(self.chunks), self.keeps_outputs)
        if chunked.chunks == 1:
            why = why_whole(made, int(self.chunks), self.keeps_outputs)
            raise NotServed(f"chunks={self.chunks}, and the loss head runs whole: {why}", advice="chunks=1")
        return chunked

    def _turned(self, graph: Graph, turns: int) -> Graph:
        """The graph of one of `turns` micro-batches, with the outputs that are asked for."""
        if turns > 1 and self.outputs == "sharded":
            raise NotServed(
                "outputs='sharded' and micro-batches: rows of a turn lie otherwise than those of the batch",
                advice='outputs="full", or microbatches=1',
            )
        return in_micro_batches(graph, turns, keeps_outputs=self.outputs in ("full", "local"))

    def _on_meshes(self, planning: Planning) -> Plan:
        """The fastest plan found on the mesh that is asked for, or on the best one."""
        until = planning.until
        if self.mesh is None or (isinstance(self.mesh, numbers.Integral) and not isinstance(self.mesh, bool)):
            count = device_count(None if self.mesh is None else int(self.mesh), self.hardware)
            check_fits(count, self.hardware)
            return best_mesh(meshes(count), planning.on, until)
        mesh = DeviceMesh.of(self.mesh)
        check_fits(mesh.size, self.hardware)
        return planning.on(mesh)

    def plan_again(self, graph: Graph, first: Plan, has_gradients: bool = True) -> Plan:
        """A plan of another graph of the same model, with parameters stored as in the first plan.

        Where no plan is found, constraints and preset are dropped, then the budget.
        """
        before, axes, asked = first.parameters, first.mesh.axes, dict(self.constraints or {})
        stored = {escape(name): f"{before[name].text(axes) if name in before else 'R'}; *" for name in graph.parameters}
        reached = _matching(graph, asked)
        mine = {pattern: sharding for pattern, sharding in asked.items() if pattern in reached}
        turns, chunks = self._turns_again(graph) if has_gradients else (1, 1)
        again = replace(self, mesh=first.mesh, time_limit=None, gap=max(self.gap, _AGAIN))
        again = replace(again, microbatches=turns, chunks=chunks)
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

    def _turns_again(self, graph: Graph) -> tuple[int | str, int | str]:
        """Micro-batches and chunks for another batch: gcds of the numbers asked for and the batch's rows."""

        def shared(asked: int | str, rows: int) -> int | str:
            return asked if asked == "auto" else math.gcd(int(asked), rows)

        head = head_of(graph, self.keeps_outputs).head
        return shared(self.microbatches, rows_of_batch(graph)), shared(self.chunks, 1 if head is None else head.rows)

    def defaults(self, graph: Graph) -> list[tuple[str, str]]:
        """Lines of text about what each argument means that was left at its default, and about a time limit."""
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
        if self.kernels is True and self.hardware.device.kernels == "cuda":
            none = "none of autopar's was measured to be faster here: ops run as torch has them"
            said.append(("kernels", ", ".join(taken(True, "cuda", self.compile)) or none))
        if self.time_limit is not None:
            found = f"{self.time_limit:g} s: what was found by then; another run may give another plan"
            said.append(("time_limit", found))
        return said


def _count_or_mesh(given: Any) -> Any:
    """A mesh as given, or the integer in a text: a count of devices whose meshes are searched."""
    return int(given) if isinstance(given, str) and given.strip().isdecimal() else given


def _may_fit(letters: Mapping[int, Infeasible], budget: float) -> bool:
    """Whether more turns may fit in the budget, after these did not.

    At best a part of what they need is proportional to the rows of a turn: the last two numbers of turns say how large
    that part is, and what is left without it. The first few smallest plans are not known well enough to say.
    """
    *_, last = letters
    if letters[last].is_of_states:
        return False
    if len(letters) < _TURNS_TRIED:
        return True
    *_, before, last = letters
    saved = (letters[before].smallest - letters[last].smallest) * before / (last - before)
    return letters[last].smallest - saved <= budget


def _of_the_smallest(letters: Mapping[int, Infeasible]) -> Infeasible:
    """The letter about the whole batch; it names a plan in micro-batches if a smaller one was found."""
    whole, turns = letters[1], min(letters, key=lambda turns: letters[turns].smallest)
    smallest = letters[turns].smallest
    if not smallest < whole.smallest:
        return whole
    return whole.but(
        seen=f"{size(smallest)} in the smallest plan that was found, in {turns} micro-batches; "
        f"{size(whole.smallest)} in the smallest that was met of the whole batch at once",
        advice=f"{budget_for(smallest)}, or more devices",
        smallest=smallest,
    )


def _numbers_of_turns(rows: int) -> Iterator[int]:
    """Divisors of the rows of a batch, from 1 on, each at least a third more than the one before."""
    before = 0
    for turns in range(1, max(rows, 1) + 1):
        if rows % turns == 0 and 3 * turns >= 4 * before:
            yield turns
            before = turns


def _matching(graph: Graph, patterns: Mapping[str, Any]) -> set[str]:
    """The patterns that match a name in this graph: another batch may not reach all that the first did."""
    names = {"out"}
    for node in graph.nodes:
        about = info(node)
        names.update(name for name in (about.key, about.module, *about.names) if name)
    return {pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)}
