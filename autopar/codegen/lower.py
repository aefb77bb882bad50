"""Lower a graph and a plan to the program of one device: local program, joint graph, two halves. No search is here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from autopar import certificate, kernels
from autopar.certificate import Certificate, Interface, certify
from autopar.certificate.handed_over import OnHost
from autopar.codegen import local_passes
from autopar.codegen.brought_up import coming_of
from autopar.codegen.exchanges import check_exchanges
from autopar.codegen.half import Read
from autopar.codegen.halves import Joint
from autopar.codegen.inner_shapes import InnerShapes
from autopar.codegen.joint import States, Turn, lower_jointly
from autopar.codegen.joint_graph import ADDS, BACK, OP
from autopar.codegen.local import LocalProgram, local_program
from autopar.codegen.local_inputs import NO_ROWS, OwnRows, sharding_of_rows
from autopar.codegen.offloaded import handed_over_of, offloaded_of
from autopar.codegen.recomputed import recomputed_of
from autopar.codegen.records import Records
from autopar.codegen.stage_programs import Crossing, Crossings, StagedProgram, StageProgram, in_stages
from autopar.codegen.turn_programs import Beginning, Ending, in_parts, lowered_ending
from autopar.collector import without_collections
from autopar.graph.carried import brought_by
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.kernels import backend
from autopar.letters import NotServed
from autopar.ops.declare import users_rule
from autopar.passes import run_passes
from autopar.progress import caution, detail
from autopar.runtime.collectives import convert
from autopar.sharding.strategies import values
from autopar.solver.plan import Plan
from autopar.space.schedule import schedule_of, travels_alone


@dataclass(frozen=True, slots=True, eq=False)
class LoweredStage:
    """A stage of a pipeline that this rank runs."""

    of: StageProgram
    joint: Joint
    ending: Ending | None = None  # the program that runs once behind the last stage


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """All that a rank needs to run one traced program: pure code, without process groups."""

    graph: Graph
    plan: Plan
    program: LocalProgram  # the program of all stages, where there are several
    joint: Joint  # the halves; those of the rank's first stage, where there are several
    rows: OwnRows
    ending: Ending | None = None  # the program that runs once after all turns, where there are turns
    beginning: Beginning | None = None  # the program that runs once before the first turn, or None
    stages: tuple[LoweredStage, ...] = ()  # this rank's stages of a pipeline
    staged: StagedProgram | None = None

    @property
    def own(self) -> LocalProgram:
        """The program whose halves are `joint`."""
        return self.stages[0].of.program if self.stages else self.program

    @property
    def joints(self) -> tuple[Joint, ...]:
        """The halves that run on this rank, but those of the ending."""
        return tuple(stage.joint for stage in self.stages) or (self.joint,)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Text of every collective in order: of a step, of micro-batches that accumulate, and of the ending."""
        ending = self.ending.joint.collectives if self.ending else ()
        ran = (text for joint in self.joints for text in joint.collectives + joint.collectives_of_waiting)
        return (*ran, *ending)

    def certified(self) -> Certificate:
        """Certificate that programs lead from stored shardings to those due for results, or a letter."""
        last = () if self.ending is None else (self.ending.program,)
        ending = None if self.ending is None else (self.ending.joint, self.ending.program.outputs)
        if not self.stages:
            return certify(self.joint, _interface(self.graph, self.plan, (self.program, *last), self.rows), ending)
        whole = Certificate()
        for stage in self.stages:
            programs = (stage.of.program, *last)
            interface = _interface(self.graph, self.plan, programs, self.rows, stage.of)
            found = certify(stage.joint, interface, ending if stage.ending is not None else None)
            for count in ("values", "open", "ends", "open_ends"):
                setattr(whole, count, getattr(whole, count) + getattr(found, count))
            whole.opened_by.update(found.opened_by)
        return whole

    @property
    def code(self) -> str:
        """The forward as Python."""
        if self.ending is None:
            return str(self.program)
        said = f"# {self.graph.turns} times, each time on other rows of the batch; then once what follows\n"
        if self.stages:
            ran = "\n".join(f"# stage {stage.of.stage}\n{stage.of.program}" for stage in self.stages)
            return f"{said}{ran}\n{self.ending.program}"
        if self.beginning is None:
            return f"{said}{self.program}\n{self.ending.program}"
        first = f"# once, before the first turn: every turn takes what it returns\n{self.beginning.program}"
        return f"{first}\n{said}{self.beginning.turn}\n{self.ending.program}"


@without_collections
def lower(
    graph: Graph,
    plan: Plan,
    coordinate: Sequence[int],
    device: str = "cpu",
    gradients: bool = True,
    rows: OwnRows = NO_ROWS,
    place: int = 0,
    records: Records | None = None,
) -> Lowered:
    """The program of the device at `coordinate` of the plan's mesh; its forward alone without `gradients`.

    `place` is its coordinate on the axis of a pipeline.

    `rows` names the inputs of which every rank passes its own rows; `records` may have the halves. Unless certificates
    are switched off, the program is certified and its local forms are held to what they are priced by, or it is refused
    by a letter. What the certificate leaves untyped is said, and stands in the plan's text.
    """
    lowered = _lowered(graph, plan, coordinate, device, gradients, rows, place, records)
    if not certificate.is_wanted():
        return lowered
    if records is not None and records.are_certified:
        return replace(lowered, plan=replace(plan, untyped=records.left_open)) if records.left_open else lowered
    found = lowered.certified()
    for joint in (*lowered.joints, lowered.ending.joint) if lowered.ending else lowered.joints:
        check_exchanges(graph, plan, joint.sent)
    if not found.left_open:
        return lowered
    if not any(coordinate):
        (caution if found.open_ends else detail)("%s", found.left_open)
    return replace(lowered, plan=replace(plan, untyped=found.left_open))


def _lowered(
    graph: Graph,
    plan: Plan,
    coordinate: Sequence[int],
    device: str,
    gradients: bool,
    rows: OwnRows,
    place: int,
    records: Records | None = None,
) -> Lowered:
    """The program of one device, not yet certified."""
    if plan.kernels and device != "cpu" and not kernels.can_run():
        raise NotServed(
            f"kernels={plan.kernels}, and Triton is not installed, which runs them on a {device} device",
            advice="pip install triton, or kernels=False",
        )
    if graph.is_random and device != "cpu":
        importlib.import_module("autopar.kernels.draws")  # draws are one kernel from here on, where Triton is there
    if device != "cpu":
        importlib.import_module("autopar.kernels.slot_sums")  # so are the sums of experts' results
    program = local_program(graph, plan, coordinate, rows)
    if not backend.is_traced(device):
        ordered = kernels.of_one_result(set(program.fused.values()))
        fused = {result: family for result, family in program.fused.items() if family in ordered}
        program = replace(program, fused=fused)
    run_passes("local graph", local_passes.PASSES, program, local_passes.verify)
    reads = reads_of_parameters(graph, plan.window_bytes)
    _refuse_unserved(graph)
    differentiable = graph.differentiable if gradients else ()
    regathered = [name for name in plan.regathered if name in reads and not reads[name].stays]
    recomputed = recomputed_of(graph, plan, program, device)
    offloaded = offloaded_of(graph, plan, program, coming_of(graph, plan))
    states = States(frozenset(regathered), plan.scattered, reads, recomputed, offloaded)
    if graph.turns == 1 and plan.pipeline is None:
        return Lowered(graph, plan, program, lower_jointly(program, differentiable, states, device, records), rows)
    parts = in_parts(program, graph, plan.regathered)
    in_turn = Turn(parts.once)
    crossings = Crossings(plan, plan.mesh, coordinate)
    ending = lowered_ending(parts, crossings.local_type, device, gradients, records)
    if plan.pipeline is None:
        joint = lower_jointly(parts.turn, (parts.seed,), replace(states, turn=in_turn), device, records)
        return Lowered(graph, plan, parts.turn, joint, rows, ending, parts.beginning)
    staged = in_stages(parts, plan.pipeline, crossings, place)
    stages = []
    for of in staged.programs:
        of_stage = replace(in_turn, in_parts=plan.pipeline.is_parted(of.stage))
        joint = lower_jointly(of.program, of.ends if gradients else (), replace(states, turn=of_stage), device, records)
        stages.append(LoweredStage(of, joint, ending if of.is_last else None))
    return Lowered(graph, plan, parts.turn, stages[0].joint, rows, ending, None, tuple(stages), staged)


def _refuse_unserved(graph: Graph) -> None:
    """Raise where the model writes to an input, or a buffer wants a gradient."""
    if changed := [name for kind, name in graph.updates if kind == "input"]:
        raise NotServed(
            f"the model writes to its input {', '.join(changed)}, and a parallel model leaves its inputs as they are",
            advice="a copy: x = x.clone()",
        )
    if wants := [info(n).key for n in graph.nodes if info(n).kind == "buffer" and type_of(n).requires_grad]:
        raise NotServed(
            f"the buffer {wants[0]} wants a gradient, and only parameters and inputs receive one",
            advice="a parameter, or an input of forward",
        )


def _interface(
    graph: Graph, plan: Plan, programs: Sequence[LocalProgram], rows: OwnRows, stage: StageProgram | None = None
) -> Interface:
    """All that the certificate is told: shardings at the program's ends, and whole shapes around each op."""
    program = programs[0]
    of_rows = sharding_of_rows(rows.axes, plan.mesh) if rows.inputs else None
    arrives: dict[str, Crossing] = {} if stage is None else {crossing.name: crossing for crossing in stage.arrives}
    brought = {name: values(plan.decisions[name].flows()) for name in brought_by(graph)}
    given = [n for n in program.fx.find_nodes(op="placeholder") if info(n).kind == "input"]
    inputs = [
        arrives[n.name].value
        if n.name in arrives
        else of_rows
        if info(n).key in rows.inputs
        else brought.get(info(n).key)
        for n in given
    ]
    stored = [plan.parameters[name] for name in program.parameters]
    primals = (*inputs, *stored, *[None] * len(program.buffers))
    gradients = dict(enumerate(primals[: len(inputs) + len(stored)]))
    gradients |= {i: arrives[n.name].gradient for i, n in enumerate(given) if n.name in arrives}
    promised = getattr(torch, plan.precision[1]) if plan.precision else None
    reduced_in = {} if promised is None else {len(inputs) + i: promised for i in range(len(stored))}
    wholes = {name: shapes for made in programs for name, shapes in _whole_shapes(made)}
    said = {n.name: users_rule(op_name(n)) for n in graph.nodes if info(n).kind == "op"}
    return Interface(
        dict(zip(plan.mesh.axes, plan.mesh.shape, strict=True)),
        primals,
        program.outputs,
        gradients,
        reduced_in,
        lambda node: node.meta.get(BACK) or node.meta.get(OP, ""),
        wholes,
        InnerShapes(graph),
        users_rule=lambda name: said.get(name, ""),
        adds_gradients=lambda node: node.meta.get(ADDS, False),
        on_host=_on_host(plan, dict(enumerate(program.parameters, len(inputs)))),
        tangents={} if stage is None else {i: crossing.gradient for i, crossing in enumerate(stage.leaves)},
    )


def _on_host(plan: Plan, names: Mapping[int, str]) -> OnHost:
    """Those of the parameters with these names that the host holds or steps, by their places."""
    stepped = handed_over_of(plan)
    lying = frozenset(i for i, name in names.items() if name in plan.wholly_hosted)
    return OnHost(lying, {i: name for i, name in names.items() if name in stepped})


def _whole_shapes(program: LocalProgram) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Each op's name, with the whole shapes of its operands and results.

    Parameters are left out where the op also reads values.
    """
    stored: set[fx.Node] = set()  # parameters, and what conversions make of them
    for node in program.fx.nodes:
        if "info" not in node.meta:
            continue
        if info(node).kind == "parameter" or (node.target is convert and node.args[0] in stored):
            stored.add(node)
        else:
            read = [n for n in node.all_input_nodes if n not in stored] or node.all_input_nodes
            yield node.name, list(dict.fromkeys(t.shape for n in (*read, node) for t in info(n).outputs))


def reads_of_parameters(graph: Graph, window_bytes: int) -> dict[str, Read]:
    """The window and bucket in which forward first reads each parameter, for parameters that ops read."""
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    schedule = schedule_of(ops, window_bytes)
    place = {op: i for i, op in enumerate(ops)}
    found = {}
    for name, node in graph.parameters.items():
        readers = [place[u] for u in node.users if u in place]
        if readers:
            first = min(readers)
            bucket, *_ = schedule.buckets[node]
            found[name] = Read(
                schedule.of[first],
                bucket,
                type_of(node).nbytes,
                (schedule.gather(first).beside, schedule.gather_again(first).beside),
                node in schedule.stays,
                travels_alone(node),
            )
    return found
