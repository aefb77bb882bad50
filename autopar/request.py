"""`Request`: what a caller asks of a plan, read and checked once.

It traces a model, and says which graph is to be planned: in how many micro-batches, with what loss head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.arguments import (
    RESERVE,
    budget_of,
    check_accumulation,
    check_gap,
    check_kinds,
    check_number,
    check_outputs,
    check_recompute,
    check_room,
    check_time_limit,
    kernels_of,
    optimizer_of,
    precision_of,
    room_of,
)
from autopar.collector import without_collections
from autopar.graph.graph import Graph, info
from autopar.kernels.measured import taken
from autopar.letters import NotServed
from autopar.progress import tell
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import STEPS_ON_HOST
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.offload import Room
from autopar.solver.plan import Plan
from autopar.solver.policies import POLICIES, Policy
from autopar.stages.asked import stages_asked
from autopar.stages.pipeline import FORWARD
from autopar.tracer import Assume, ColoTracer
from autopar.tracer.precision import Precision
from autopar.turns import in_chunks, in_micro_batches, why_whole


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `autopar.plan` but the model and its inputs."""

    mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | int | str | None = None
    cluster: Cluster | str | None = None  # read: a Cluster or None
    memory_budget: int | str | float | None = None
    host_budget: int | str | float = 0
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
    pipeline: Any = None  # read: an Asked or None
    chunks: int | str = "auto"  # number of chunks in which the loss head runs
    compile: bool = False  # does torch.compile make the code?
    kernels: Any = True  # read: families, or whether those measured to be faster
    solver: str = "cbc"
    time_limit: float | None = None
    gap: float = 0.0
    outputs: str | Sequence[str] = (
        "auto"  # how outputs other than the loss leave, or the names of those that get gradients
    )
    hardware: Cluster = field(init=False)
    budget: float = field(init=False)  # bytes; infinite where there is none
    room: Room | None = field(init=False)  # the host, where values may wait on it

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", kernels_of(self.kernels))
        object.__setattr__(self, "mesh", _count_or_mesh(self.mesh))
        mesh, pipeline, parallel = stages_asked(self.mesh, self.pipeline, self.parallel)
        for name, value in (("mesh", mesh), ("pipeline", pipeline), ("parallel", parallel)):
            object.__setattr__(self, name, value)
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
        if self.cluster is not None:  # a file is read once: another batch is planned for long after
            object.__setattr__(self, "cluster", self.hardware)
        object.__setattr__(self, "budget", budget_of(self.memory_budget, self.hardware))
        object.__setattr__(self, "room", room_of(self.host_budget, self.hardware))
        if self.room is not None:
            check_room(self.recompute)

    @staticmethod
    def of(
        plan: Plan,
        loss: Callable[..., Any] | None = None,
        assume: Assume | None = None,
        outputs: str | Sequence[str] = "auto",
    ) -> Request:
        """The request that a plan answers, as far as the plan tells."""
        cluster = Cluster.named_by(plan.cluster)
        return Request(
            mesh=plan.mesh,
            cluster=cluster and plan.cluster.partition(" ")[0],
            memory_budget=None if math.isinf(plan.budget) else plan.budget,
            host_budget=plan.host_budget if cluster and cluster.host else 0,
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
        tell("traced %d ops in %.1f s", sum(info(n).kind == "op" for n in graph.nodes), time.monotonic() - started)
        if (isinstance(self.outputs, str) and self.outputs != "local") or graph.loss is None:
            return graph
        wanted = graph.output_names if self.outputs == "local" else self.outputs  # a loss of one's own: of any of them
        named = (name for i, name in enumerate(graph.output_names) if name in wanted and i != graph.loss)
        return replace(graph, backward_from=tuple(named))

    def as_planned(self, graph: Graph, plan: Plan, pipeline: Any = None) -> Graph:
        """The graph that a plan is of: one of its micro-batches, with the loss head in its chunks."""
        turned = self._turned(graph, plan.microbatches, pipeline or plan.pipeline)
        return in_chunks(turned, plan.chunks, self.keeps_outputs)

    @property
    def states_on_host(self) -> float:
        """Bytes of the host that optimizer states of a device may take; 0 where all stay on devices."""
        may = self.room is not None and not self._why_states_stay
        return self.room.bytes if may and self.room is not None else 0.0

    @property
    def _why_states_stay(self) -> str:
        """Why no optimizer states may lie on the host; "" where they may."""
        if self.optimizer not in STEPS_ON_HOST:
            return f"{self.optimizer}'s stay on devices; those of autopar.optim.AdamW may lie there"
        if self.room is not None and not self.room.host.adamw_params_per_s:
            return "those of optimizers stay on devices: nobody measured AdamW on these CPUs, autopar calibrate does"
        return ""

    @property
    def keeps_outputs(self) -> bool:
        """Whether outputs beside the loss are wanted, whatever it takes to keep them."""
        return self.outputs != "auto"

    def in_turns(self, graph: Graph, turns: int) -> Graph:
        """The graph of one of `turns` micro-batches, with the loss head in as many chunks as are asked for."""
        made = self._turned(graph, turns, self.pipeline)
        if self.chunks in ("auto", 1):
            return made
        chunked = in_chunks(made, int(self.chunks), self.keeps_outputs)
        if chunked.chunks == 1:
            why = why_whole(made, int(self.chunks), self.keeps_outputs)
            raise NotServed(f"chunks={self.chunks}, and the loss head runs whole: {why}", advice="chunks=1")
        return chunked

    def _turned(self, graph: Graph, turns: int, pipeline: Any) -> Graph:
        """The graph of one of `turns` micro-batches, with the outputs that are asked for.

        A pipeline has gradients from turns alone, and so runs a batch of one turn as one.
        """
        even_one = pipeline is not None and pipeline.schedule != FORWARD
        if turns > 1 and self.outputs == "sharded":
            raise NotServed(
                "outputs='sharded' and micro-batches: rows of a turn lie otherwise than those of the batch",
                advice='outputs="full", or microbatches=1',
            )
        return in_micro_batches(graph, turns, keeps_outputs=self.outputs in ("full", "local"), even_one=even_one)

    def defaults(self, graph: Graph) -> list[tuple[str, str]]:
        """Lines of text about what arguments mean: those left at their default, a time limit, a large budget."""
        said = []
        if self.cluster is None:
            said.append(("cluster", "generic: a documented stand-in, no machine was measured"))
        memory = self.hardware.device.memory_bytes
        if self.memory_budget is None:
            said.append(("memory_budget", f"{1 - RESERVE:.0%} of the {memory / 2**30:.0f} GiB of a device"))
        elif memory < self.budget < math.inf:
            said.append(("memory_budget", f"more than the {memory / 2**30:.0f} GiB of a device"))
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
        if self.room is not None and self._why_states_stay:
            said.append(("states on the host", self._why_states_stay))
        if self.time_limit is not None:
            found = f"{self.time_limit:g} s: what was found by then; another run may give another plan"
            said.append(("time_limit", found))
        return said


def _count_or_mesh(given: Any) -> Any:
    """A mesh as given, or the integer in a text: a count of devices whose meshes are searched."""
    return int(given) if isinstance(given, str) and given.strip().isdecimal() else given
