"""Graph + Plan -> the program of one device: local program, joint graph, two halves. Nothing is searched here."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen.joint import Joint, lower_jointly
from autopar.codegen.local import LocalProgram, local_program
from autopar.codegen.parts import WHOLE, Rows
from autopar.codegen.schedule import Read
from autopar.collector import without_collections
from autopar.graph.graph import Graph, info, type_of
from autopar.letters import NotServed
from autopar.solver.plan import Plan
from autopar.space.schedule import schedule_of


class Lowered:
    """What a rank needs to run one traced program: pure code, no process group."""

    __slots__ = ("graph", "joint", "plan", "program", "rows")

    def __init__(self, graph: Graph, plan: Plan, program: LocalProgram, joint: Joint, rows: Rows) -> None:
        self.graph, self.plan, self.program, self.joint, self.rows = graph, plan, program, joint, rows


@without_collections
def lower(
    graph: Graph, plan: Plan, coordinate: Sequence[int], device: str = "cpu", gradients: bool = True, rows: Rows = WHOLE
) -> Lowered:
    """The program of the device at `coordinate` of the plan's mesh; without `gradients` its forward alone.

    `rows` say what ranks pass their own rows of.
    """
    program, reads = local_program(graph, plan, coordinate, rows), reads_of_parameters(graph, plan.window_bytes)
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
    differentiable = graph.differentiable if gradients else ()
    return Lowered(
        graph,
        plan,
        program,
        lower_jointly(
            program,
            differentiable,
            [n for n in plan.regathered if n in reads and not reads[n].stays],
            plan.scattered,
            reads,
            device,
        ),
        rows,
    )


def reads_of_parameters(graph: Graph, window_bytes: int) -> dict[str, Read]:
    """Of each parameter that is read, where the forward first reads it."""
    ops, parameters = [n for n in graph.nodes if info(n).kind == "op"], graph.parameters
    schedule, at = schedule_of(ops, window_bytes), {op: i for i, op in enumerate(ops)}
    first = {
        name: min(at[u] for u in node.users if u in at)
        for name, node in parameters.items()
        if any(u in at for u in node.users)
    }
    return {
        name: Read(schedule.of[i], schedule.buckets[node][0], type_of(node).nbytes, node in schedule.stays)
        for name, i in first.items()
        for node in (parameters[name],)
    }
