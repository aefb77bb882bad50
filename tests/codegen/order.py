"""Holds emitted halves to the order that a plan is priced by: forward as the local program, backward in reverse.

What moves parameters or their gradients stands where the schedule puts it, and what is recomputed before what reads it;
copies for chunks carry no mark of their op. `step_of` is the step of a plan that was read from a file.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch.fx as fx

from autopar.codegen.buffers import hands_on
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED
from autopar.codegen.lower import Lowered
from autopar.graph.graph import Graph
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish
from autopar.sharding.cluster import Cluster
from autopar.solver.plan import Plan
from autopar.solver.points import Point, Points
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.timeline import Timeline

_MOVES = frozenset((*STEPS.values(), *PACK.values(), *BEGIN.values(), finish, operator.getitem))


def check_order(lowered: Lowered) -> None:
    """Raise unless the ops of all halves begin in their order, by their places in the local program."""
    places = {node.name: place for place, node in enumerate(lowered.program.fx.nodes)}
    inputs, count = len(lowered.program.inputs), len(lowered.program.parameters)
    parameters = {f"primals_{i + 1}" for i in range(inputs, inputs + count)}
    for half, mark in ((lowered.joint.forward, OP), (lowered.joint.backward, BACK), (lowered.joint.hold, BACK)):
        names = dict.fromkeys(_ops(half, mark, parameters))  # each where it begins
        order = [name for name in names if name in places]
        said = sorted(order, key=places.__getitem__, reverse=mark == BACK)
        for name, right in zip(order, said, strict=True):
            assert name == right, f"{name} runs where the plan has {right}"


def step_of(graph: Graph, plan: Plan, cluster: Cluster) -> tuple[Point, Timeline]:
    """The step of a plan and its graph alone: its seconds and bytes where all is saved, and its timeline."""
    setting = Setting(
        plan.mesh,
        cluster,
        plan.optimizer,
        plan.accumulation,
        plan.precision[1] if plan.precision else "",
        plan.window_bytes,
        bool(plan.regathered),
        plan.compiled,
        plan.kernels,
        turns=plan.microbatches,
    )
    space = shardings(graph, setting, plan.constraints())
    picked = []
    for site in space.sites:
        (choice,) = (i for i, choice in enumerate(site.choices) if choice == plan.decisions[site.name].choice)
        picked.append(choice)
    saved = Points(space).of(picked)
    return saved, Timeline.of(space, picked, saved.held, saved.momentary)


def _ops(half: fx.Graph, mark: str, parameters: Collection[str]) -> Iterator[str]:
    """The ops of a half's nodes in order, without what stands by another rule."""
    moving = {*_of_parameters(half, parameters), *(_of_leaving_gradients(half) if mark == BACK else ())}
    for node in half.nodes:
        if mark in node.meta and node not in moving and not node.meta.get(RECOMPUTED):
            yield node.meta[mark]


def _of_parameters(half: fx.Graph, parameters: Collection[str]) -> set[fx.Node]:
    """The nodes made of parameters alone, whole messages of them included."""
    found = set[fx.Node]()
    for node in half.nodes:
        operands = node.all_input_nodes
        is_made = _moves(node) and bool(operands) and found.issuperset(operands)
        if is_made or (node.op == "placeholder" and node.name in parameters):
            found.add(node)
    return found


def _of_leaving_gradients(half: fx.Graph) -> set[fx.Node]:
    """The nodes through which gradients leave backward, whole messages of them included."""
    found = {half.output_node()}
    for node in reversed(half.nodes):
        if _moves(node) and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def _moves(node: fx.Node) -> bool:
    return node.op == "call_function" and (hands_on(node) or node.target in _MOVES)
