"""`plan` and `autoparallelize`: the compiler in one sentence.

    graph = trace(model, meta_inputs)        # autopar/tracer      Module -> Graph
    space = shardings(graph, mesh)           # autopar/space       Graph  -> Space
    plan  = solve(space)                     # autopar/solver      Space  -> Plan
    model = lower(graph, plan)               # autopar/codegen     Plan   -> ParallelModule

`plan` goes up to the plan, in one process without devices; `autoparallelize` all the way, on every rank.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from autopar.arguments import backend_name, check_pad_to, check_timeout, refuse_unserved
from autopar.codegen import lower
from autopar.codegen.checked import check_plan
from autopar.codegen.local_inputs import NO_ROWS, OwnRows, rows_of
from autopar.compiling import write_program
from autopar.graph.calls import Call, as_call
from autopar.graph.carried import without_gradients
from autopar.graph.graph import Graph, type_of
from autopar.letters import BadPlan, Infeasible, NotServed
from autopar.module import How, Source, parallelise
from autopar.module.attributes import reads_of
from autopar.module.carried import carried_shardings, of_whole_tensors
from autopar.module.likeness import said_of
from autopar.module.local_outputs import outputs_of_rows
from autopar.module.parallelise import refuse_parallel
from autopar.module.reads import Reads
from autopar.module.stages_of_job import Ground
from autopar.module.start_time import StartTime
from autopar.module.together import captured_again, captured_at_start, lowered
from autopar.needs import with_remedies
from autopar.plan_cache import PlanCache
from autopar.program_cache import Programs
from autopar.program_file import Origin, made_of
from autopar.progress import shown
from autopar.report import html_of, write_report
from autopar.request import Request
from autopar.runtime.faults import limit, tell_launcher
from autopar.runtime.world import (
    as_long_as_a_start,
    digest_of,
    from_rank_0,
    once_all_have,
    start_world,
    world_size,
)
from autopar.search import plan_again, plan_of
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.plan import Plan
from autopar.space.distributed_config import as_preset
from autopar.tracer import Assume
from autopar.tracer.precision import Precision

M = TypeVar("M", bound=torch.nn.Module)


def plan(
    model: torch.nn.Module,
    meta_inputs: Any,
    mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | int | str | None = None,
    cluster: Cluster | str | None = None,
    memory_budget: int | float | str | None = None,
    host_budget: int | float | str = 0,
    optimizer: Any = "adamw",
    precision: Precision | str | torch.dtype | None = None,
    recompute: str = "auto",
    loss: Callable[..., Any] | None = None,
    parallel: str | Mapping[str, Any] | None = None,
    constraints: Mapping[str, Any] | None = None,
    assume: Assume | None = None,
    strict: bool = False,
    accumulation: int = 1,
    microbatches: int | str = "auto",
    pipeline: int | str | Mapping[str, Any] | None = None,
    chunks: int | str = "auto",
    kernels: bool | str | Sequence[str] = True,
    solver: str = "cbc",
    time_limit: float | None = None,
    gap: float = 0.0,
    outputs: str | Sequence[str] = "auto",
    compile: bool | str = False,
) -> Plan:
    """The fastest plan found for one training step of `model` on `mesh`, with a bound on any: `plan.gap`.

    Needs no device, no process group and no weights. The model is not modified.

    Args:
        model: The model as it runs on one device; its parameters may be on meta.
        meta_inputs: Example tensors of the global shapes (meta ones are enough), as a dict or a tuple.
        mesh: A mesh, its shape, {"dp": 2, "tp": 4}, "2x4", or a count of devices whose meshes are searched. None: the
            count of the job, or of the cluster.
        cluster: A cluster, its name, such as "h100-8x4", or the path of a profile. None: a generic machine.
        memory_budget: Bytes a device, or text such as "16GiB". None: the memory of a device, less a tenth.
        host_budget: Bytes of the host's memory that a device may use, or text such as "64GiB": saved activations wait
            for backward there where that is faster than to make them again; optimizer states of autopar.optim.AdamW
            may lie there. 0: nothing moves.
        optimizer: A name, the bytes of its states for each parameter, or a class or an instance of torch.optim.
        precision: A Precision, or the dtype of compute, such as "bf16". None: the model's own dtypes.
        recompute: "auto", as little as the budget asks for; or a policy, by name or as a function.
        loss: `loss(outputs, inputs)`, planned with the model.
        parallel: A preset that the plan keeps to, such as "zero3", or a dictionary of its parts `data` and `tensor`, or
            transformers' DistributedConfig.
        constraints: Shardings of what is pinned, by names and patterns.
        assume: What the model may take for granted about values.
        strict: Whether an op without a rule is an error.
        accumulation: Calls that make one optimizer step.
        microbatches: Parts in which the batch of a call passes, forward and backward of each together: the loss and the
            gradients are those of the whole batch, activations those of one part. "auto" takes more than one where the
            budget has no room otherwise.
        pipeline: Stages of the model that run on different devices: a number, "auto", or a dictionary of `size`,
            `schedule`, `stages_each` and `cuts`. An axis of the mesh called "pp" says the same. None: no stages.
        chunks: Parts of the rows in which the loss head runs; "auto" takes several under a budget. Logits are then not
            kept, unless `outputs` asks for them.
        kernels: Families of kernels that take the place of ops on a GPU. True: those measured to be faster.
        solver: The solver of integer programs.
        time_limit: Seconds after which a plan that was found is not improved.
        gap: The distance from the bound, as a share of the step time, at which a plan is good enough.
        outputs: Outputs beside the loss that gradients arrive at, as `autoparallelize` is told.
        compile: Whether seconds are those of code that torch.compile makes.
    """
    started = time.monotonic()
    refuse_parallel(model)
    request = Request(
        mesh=mesh,
        cluster=cluster,
        memory_budget=memory_budget,
        host_budget=host_budget,
        optimizer=optimizer,
        precision=precision,
        recompute=recompute,
        loss=loss,
        parallel=as_preset(parallel, model),
        constraints=constraints,
        assume=assume,
        strict=strict,
        accumulation=accumulation,
        microbatches=microbatches,
        pipeline=pipeline,
        chunks=chunks,
        kernels=kernels,
        solver=solver,
        time_limit=time_limit,
        gap=gap,
        outputs=outputs,
        compile=_is_fused(backend_name(compile, _backends)),
    )
    with reads_of(model) as reads:
        graph = request.trace(model, meta_inputs)
    _refuse_unknown_outputs(outputs, graph)
    decided = made_of(model, meta_inputs, request)
    origin = Origin(request, graph, reads, said_of(model, reads), decided)
    return replace(_planned(request, graph, started, lambda other: other.trace(model, meta_inputs)), origin=origin)


def _planned(request: Request, graph: Graph, started: float, traced: Callable[[Request], Graph]) -> Plan:
    """The plan of a request; where none fits, raises a letter with remedies.

    `traced` gives the graphs of the other requests that the remedies try.
    """
    try:
        return plan_of(graph, request, started)
    except Infeasible as e:
        raise with_remedies(e, request, graph, traced) from e


@shown()
def autoparallelize(
    model: M,
    meta_inputs: Any,
    *,
    plan: Plan | None = None,
    program: str | os.PathLike[str] | None = None,
    inputs: str = "global",
    outputs: str | Sequence[str] = "auto",
    compile: bool | str = False,
    sync: bool = True,
    pad_to: int | None = None,
    init: str = "module",
    weights: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    timeout_s: float = 600.0,
    start_timeout_s: float = 600.0,
    **planning: Any,
) -> M:
    """Turn `model` into its parallel self, in place, and return it.

    The model stays an instance of its own class, and is trained as before. The call runs on every rank (torchrun), or
    on one process. A model on meta is filled part by part: no rank ever holds it in full.

    Args:
        model: The model as it runs on one device.
        meta_inputs: Example tensors of the batch of all ranks, as a dict or a tuple.
        plan: The plan to follow. None: rank 0 makes one from `planning`, and the others receive it.
        program: The file of a program that `plan.compile` has written: rank 0 reads it, and nothing is traced, planned
            or lowered. One that was made of something else, or was edited, is an error.
        inputs: "global": all ranks pass the same batch. "local": each passes its own rows of it (`model.input_specs`,
            `model.sampler`); `meta_inputs` have the rows of all ranks either way.
        outputs: How outputs beside a loss leave. "auto": as DTensors where the plan cuts them; "full": whole;
            "sharded": all as DTensors; names: these come whole, and may be given gradients. "local", beside
            `inputs="local"`: each rank gets its own rows, and a loss that is a mean over these rows is trained as that
            of the whole batch.
        compile: True, or the backend of torch.compile that is given what stands between collectives.
        sync: Whether parameters and buffers are taken from rank 0.
        pad_to: Calls of other lengths than `meta_inputs` run as those of the next multiple of it: fewer programs.
        init: Where a model on meta gets its values: "module", from its own recipes; "counter", from the same ones drawn
            by position.
        weights: A file or directory of safetensors that holds the values instead.
        cache: A folder of plans and programs: rank 0 takes those that it kept there for the same model, batch and
            arguments, or makes and keeps them. None: the folder that AUTOPAR_CACHE names, or none.
        timeout_s: Seconds after which a collective that waits for another rank gives up.
        start_timeout_s: Seconds that ranks wait for each other to start and to lower, and for rank 0 to plan.
        **planning: Arguments of `autopar.plan`.
    """
    started = time.monotonic()
    laps = StartTime()
    own = {"inputs": inputs, "outputs": outputs, "compile": compile, "sync": sync, "pad_to": pad_to, "init": init}

    def read() -> tuple[_Read, dict[str, str]]:
        check_timeout("timeout_s", timeout_s)
        check_timeout("start_timeout_s", start_timeout_s)
        given = {"plan": plan, "program": program}
        done = _read(model, given, own, planning, start_timeout_s)
        return done, {f"{name}=": _in_words(value) for name, value in (own | planning | given).items()}

    asked = once_all_have(read)
    laps.lap("join")
    device = asked.device
    plans = PlanCache.of(cache)
    start = _Start(model, meta_inputs, asked, plans, Programs.of(program, plans, device), laps)
    reads, traced = start.captured()
    _refuse_unknown_outputs(outputs, traced)
    chosen = start.planned(traced, plan, started)
    request = asked.request if program is None else Request.of(chosen, **planning, outputs=outputs)
    ground = Ground.of(chosen, device)
    limit(ground.mesh, timeout_s)
    laps.lap("join")
    graph = request.as_planned(traced, chosen)
    if plan is not None:
        from_rank_0(lambda: check_plan(graph, plan))
        laps.of_all("plan")
    rows = _own_rows(graph, chosen) if inputs == "local" else NO_ROWS
    grows = start.rows_out(traced, rows) if outputs == "local" else None
    lowering = functools.partial(lower, graph, chosen, ground.coordinate, device, True, rows, ground.place)
    program_here = lowered(lowering, start.programs, laps)
    laps.of_all("lower")
    _let_search_go(chosen)

    call = Call(*as_call(meta_inputs))
    source = Source(sync, init, weights)
    replan = _Replan(request, plans, start.programs)
    how = asked.how if grows is None else replace(asked.how, gives_rows=grows)
    with as_long_as_a_start():  # Other ranks may still lower when this one asks for the first values.
        ground = ground.with_stages(program_here, device, timeout_s)
        made = parallelise(model, call, program_here, ground, replan, source, how, reads)
    laps.lap("values")
    laps.tell(torch.device(device))
    return made


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of a model on this rank: what is captured, planned and lowered, here or elsewhere."""

    model: torch.nn.Module
    meta_inputs: Any
    asked: _Read
    plans: PlanCache
    programs: Programs
    time: StartTime

    def captured(self) -> tuple[Reads, Graph]:
        """The attributes that a capture has read, and its graph, made here or elsewhere."""
        with reads_of(self.model) as reads:
            graph = captured_at_start(self.model, self.meta_inputs, reads, lambda: self._graph(reads), self.time)
        self.time.lap("tracing")
        return reads, graph

    def _graph(self, reads: Reads) -> Graph:
        what = self.model, self.meta_inputs, self.asked.request
        if self.asked.has_program:
            return self.programs.take(*what, "local" if self.asked.how.passes_rows else "global", reads)
        return self.programs.graph(*what, reads)

    def planned(self, graph: Graph, plan: Plan | None, started: float) -> Plan:
        """The plan to follow: the one given, that of the program that was taken, or the one that rank 0 makes."""
        request = self.asked.request

        def traced(other: Request) -> Graph:
            return other.trace(self.model, self.meta_inputs)

        def made() -> Plan:
            if self.programs.taken is not None:
                return self.programs.taken.its_plan()
            return self.plans.plan(graph, request, lambda: _planned(request, graph, started, traced))

        chosen = plan if plan is not None else from_rank_0(made)
        self.time.of_all("plan")
        return chosen

    def rows_out(self, graph: Graph, rows: OwnRows) -> Mapping[str, bool]:
        """Whether each output has rows of the batch, by its name."""

        def trace(batch: Any) -> Graph:
            return self.programs.graph(self.model, batch, self.asked.request, set())

        found = from_rank_0(lambda: outputs_of_rows(trace, graph, self.meta_inputs, rows.inputs))
        self.time.of_all("tracing")
        return found


def _own_rows(graph: Graph, plan: Plan) -> OwnRows:
    """The inputs of which every rank passes its own rows."""
    rows = rows_of(graph, plan)
    if rows.inputs and (wants := [name for name, node in graph.inputs.items() if type_of(node).requires_grad]):
        raise NotServed(f'inputs="local", and the input {wants[0]} wants a gradient', advice='inputs="global"')
    return rows


@dataclass(frozen=True, slots=True)
class _Replan:
    """Plans another call of a model as the first was asked for."""

    request: Request
    plans: PlanCache
    programs: Programs

    def __call__(
        self,
        model: torch.nn.Module,
        call: Call,
        first: Plan,
        reads: Reads,
        *,
        is_trial: bool,
        has_gradients: bool,
    ) -> tuple[Graph, Plan]:
        stored = carried_shardings(model, call, first.mesh.axes)
        whole = of_whole_tensors(call)
        graph = captured_again(model, whole, reads, lambda: self.programs.graph(model, whole, self.request, reads))
        graph = graph.without_dropout() if is_trial else graph
        graph = graph if has_gradients else without_gradients(graph)

        def planned() -> Plan:
            of = f"of values {stored} and of a model that is stored by {_in_words(first)}"
            again = f"{of}, {'with' if has_gradients else 'without'} gradients"
            in_turns = has_gradients and not is_trial
            return self.plans.plan(
                graph, self.request, lambda: plan_again(graph, self.request, first, in_turns, stored), again
            )

        plan = from_rank_0(planned)
        _let_search_go(plan)
        return self.request.as_planned(graph, plan), plan


@dataclass(frozen=True, slots=True)
class _Read:
    """A caller's arguments as this rank has read them."""

    device: str
    request: Request
    how: How
    has_program: bool


def _read(
    model: torch.nn.Module,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    planning: Mapping[str, Any],
    start_timeout_s: float,
) -> _Read:
    """Read the arguments of autoparallelize, its `own`, those of `plan`, and what is given instead."""
    check_pad_to(own["pad_to"])
    refuse_unserved(
        inputs=(own["inputs"], ("global", "local")),
        init=(own["init"], ("module", "counter")),
        sync=(own["sync"], (True, False)),
    )
    refuse_parallel(model)
    plan = given["plan"]
    program = given["program"]
    if plan is not None and program is not None:
        raise BadPlan("plan= is given, and so is program=", advice="one or the other: a program has its plan")
    if plan is not None and not isinstance(plan, Plan):
        raise BadPlan(f"plan={plan!r} is not a Plan", advice='autopar.Plan.load("plan.json")')
    backend = backend_name(own["compile"], _backends)
    _refuse_planning("plan" if plan is not None else "program" if program is not None else "", planning)
    outputs = own["outputs"]
    gives_rows = outputs == "local"
    if gives_rows and own["inputs"] != "local":
        what = 'outputs="local" gives each rank its own rows, and inputs are those of all'
        raise NotServed(what, advice='inputs="local"')
    tell_launcher()
    device = start_world(start_timeout_s)
    if program is not None:
        request = Request(**planning, outputs=outputs)
    elif plan is None:
        asked = {"mesh": world_size(), **planning, "outputs": outputs, "compile": _is_fused(backend)}
        request = Request(**{**asked, "parallel": as_preset(planning.get("parallel"), model)})
        if request.mesh is not None:
            mesh = DeviceMesh.of(request.mesh)
            whole = mesh if request.pipeline is None else request.pipeline.whole(mesh)
            whole.check_world(world_size())  # before a search that would take a while
    else:
        request = Request.of(plan, **planning, outputs=outputs)
    leave, whole = (outputs, ()) if isinstance(outputs, str) else ("auto", tuple(outputs))
    leave = "full" if gives_rows else leave
    how = How(backend, leave, whole, own["inputs"] == "local", pad_to=own["pad_to"], loss=request.loss)
    return _Read(device, request, how, program is not None)


def _backends() -> list[str]:
    """The backends of torch.compile."""
    return torch.compiler.list_backends(exclude_tags=())


def _is_fused(backend: str | None) -> bool:
    """Whether a backend of torch.compile fuses ops that only read and write."""
    return backend == "inductor"


def _refuse_planning(given: str, planning: Mapping[str, Any]) -> None:
    """Raise a letter where an argument of planning is unknown, or given beside a plan that decides it."""
    if given and (decided := sorted(set(planning) - {"loss", "assume"})):
        raise BadPlan(
            f"{given}= is given, and so is {', '.join(decided)}",
            advice=f"one or the other: a {given} already decides it",
        )
    if unknown := sorted(set(planning) - set(inspect.signature(Request).parameters)):
        raise NotServed(
            f"autoparallelize knows no argument {', '.join(unknown)}",
            advice="its own, or those of autopar.plan",
        )


def _let_search_go(plan: Plan) -> None:
    """Release the space that a plan was chosen from: training has no use for it."""
    if plan.search is not None:
        plan.search.let_go()


def _check_graph(
    plan: Plan,
    model: torch.nn.Module,
    meta_inputs: Any,
    loss: Callable[..., Any] | None,
    assume: Assume | None,
    outputs: str | Sequence[str],
) -> None:
    """Raise a letter unless the model, on these inputs, has the graph that a plan is of."""
    request = Request.of(plan, loss=loss, assume=assume, outputs=outputs)
    check_plan(request.as_planned(request.trace(model, meta_inputs), plan), plan)


Plan.check_graph = _check_graph
Plan.write_report = write_report
Plan.write_program = write_program
Plan.write_html = html_of


def _in_words(value: Any) -> str:
    """An argument as text that is equal for equal arguments in other processes."""
    if isinstance(value, Plan):
        whole = json.dumps(value.to_dict(), sort_keys=True, default=str)
        return f"a plan on mesh {value.mesh}, {digest_of(whole)[:16]}"
    if isinstance(value, Mapping):
        return ", ".join(sorted(f"{key}: {_in_words(of_one)}" for key, of_one in value.items()))
    text = repr(value)
    return getattr(value, "__qualname__", type(value).__name__) if " at 0x" in text else text


def _refuse_unknown_outputs(outputs: str | Sequence[str], graph: Graph) -> None:
    """Raise a letter where an output is named that the model does not have."""
    missing = [] if isinstance(outputs, str) else [n for n in outputs if n not in graph.output_names]
    if missing:
        raise NotServed(
            f"outputs={outputs!r}: the model has no output {missing[0]!r}",
            seen=f"outputs: {', '.join(graph.output_names)}",
            advice='outputs=("logits",)',
        )
