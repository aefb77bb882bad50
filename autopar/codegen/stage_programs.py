"""Cut the program of one micro-batch into the programs of its stages.

What a stage makes and later ones read leaves it and arrives there, as it lies on the mesh: the last value of a block,
a skip connection, an encoder's output. Its gradient comes back the same way. Results of the whole program leave the
last stage, wherever they are made.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.codegen.local import LocalProgram
from autopar.codegen.turn_programs import InParts
from autopar.graph.graph import Info, TensorType, info
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Flow, Sharding, local_shape
from autopar.sharding.strategies import gradients, values
from autopar.solver.decision import conversion_name
from autopar.solver.plan import Plan
from autopar.stages.cuts import Labels, labels_of
from autopar.stages.pipeline import Pipeline


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """A value that one stage makes and later ones read, as one device has it."""

    name: str
    source: int
    readers: tuple[int, ...]
    type: TensorType  # local
    value: Sharding
    gradient: Sharding


@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """The program of one stage: arrivals are its last inputs, and what leaves it are its first results."""

    stage: int
    program: LocalProgram
    arrives: tuple[Crossing, ...]
    leaves: tuple[Crossing, ...]
    seed: int | None = None  # index of the result from which backward starts, of the last stage

    @property
    def is_last(self) -> bool:
        return self.seed is not None

    @property
    def ends(self) -> list[int]:
        """Indices of the results at which gradients arrive."""
        back = [i for i, crossing in enumerate(self.leaves) if crossing.type.requires_grad]
        return back if self.seed is None else [*back, self.seed]


class Crossings:
    """How values of a local program lie between ops, by its plan."""

    def __init__(self, plan: Plan, mesh: DeviceMesh, coordinate: Sequence[int]) -> None:
        self.plan = plan
        self.mesh = mesh
        self.coordinate = coordinate
        self.conversions = {conversion_name(c.target, c.operand): c for c in plan.conversions}

    def between(self, node: fx.Node, source: int, readers: Sequence[int]) -> Crossing:
        """The crossing of a node's value."""
        value, gradient = self._lies(node)
        whole = info(node).outputs[0]
        local = replace(whole, shape=local_shape(whole.shape, value, self.mesh, self.coordinate))
        return Crossing(node.name, source, tuple(readers), local, value, gradient)

    def local_type(self, node: fx.Node) -> TensorType:
        """The type of a node's value as this device has it."""
        return self.between(node, 0, ()).type

    def _lies(self, node: fx.Node) -> tuple[Sharding, Sharding]:
        about = info(node)
        if about.kind == "conversion":
            conversion = self.conversions[about.names[0]]
            value = conversion.value[1]
            return value, conversion.gradient[0] if conversion.gradient else value
        made_by, place = (node.args[0], int(str(node.args[1]))) if node.target is operator.getitem else (node, 0)
        assert isinstance(made_by, fx.Node)
        decision = self.plan.decisions[info(made_by).key]
        flows: tuple[Flow, ...] = decision.choice.output(place) if decision.kind == "op" else decision.flows()
        return values(flows), gradients(flows)


@dataclass(frozen=True, slots=True, eq=False)
class StagedProgram:
    """A program in stages: those of one device, and what all devices have to know of all stages."""

    programs: tuple[StageProgram, ...]
    crossings: tuple[Crossing, ...]
    readers: Mapping[str, tuple[int, ...]]  # parameter -> the stages that read it
    trained: frozenset[str]  # the parameters that get a gradient, in whatever stage


def in_stages(parts: InParts, pipeline: Pipeline, crossings: Crossings, place: int) -> StagedProgram:
    """The program of a micro-batch in stages, of which those at one coordinate are written."""
    turn = parts.turn
    labels = labels_of(list(turn.fx.nodes), pipeline.firsts)
    ends: list[fx.Node] = list(turn.fx.output_node().args[0])
    last = labels.stages - 1
    nodes = [n for n in turn.fx.nodes if n.op == "call_function"]
    held = [_held(nodes, labels, stage, ends if stage == last else ()) for stage in range(labels.stages)]
    readers = _readers(nodes, held, ends)
    found = tuple(crossings.between(n, labels.stage[n], readers[n]) for n in nodes if n in readers)
    made = []
    for stage in pipeline.at(place):
        arrives = tuple(c for c in found if stage in c.readers)
        leaves = tuple(c for c in found if c.source == stage)
        is_last = stage == last
        program = _program(turn, held[stage], arrives, leaves, ends if is_last else ())
        made.append(StageProgram(stage, program, arrives, leaves, len(leaves) + parts.seed if is_last else None))
    return StagedProgram(tuple(made), found, _readers_of_parameters(turn, held), _trained(ends))


def _readers(
    nodes: Sequence[fx.Node], held: Sequence[set[fx.Node]], ends: Sequence[fx.Node]
) -> dict[fx.Node, list[int]]:
    """The stages that read each value which another one makes; the last reads all ends."""
    readers: dict[fx.Node, list[int]] = {}
    for stage, own in enumerate(held):
        reads = dict.fromkeys(a for n in nodes if n in own for a in n.all_input_nodes)
        reads |= dict.fromkeys(ends) if stage == len(held) - 1 else {}
        for node in reads:
            if node.op == "call_function" and node not in own:
                readers.setdefault(node, []).append(stage)
    return readers


def _readers_of_parameters(turn: LocalProgram, held: Sequence[set[fx.Node]]) -> dict[str, tuple[int, ...]]:
    parameters = _of_kind(turn.fx.find_nodes(op="placeholder"), "parameter")
    found: dict[str, tuple[int, ...]] = {info(n).key: () for n in parameters}
    for stage, own in enumerate(held):
        for node in parameters:
            if not own.isdisjoint(node.users):
                found[info(node).key] += (stage,)
    return found


def _trained(ends: Sequence[fx.Node]) -> frozenset[str]:
    """The parameters to which a gradient goes back from the ends."""
    pending = [*ends]
    seen = set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen and any(t.requires_grad for t in info(node).outputs):
            seen.add(node)
            pending += node.all_input_nodes
    return frozenset(info(n).key for n in seen if n.op == "placeholder" and info(n).kind == "parameter")


def _held(nodes: Sequence[fx.Node], labels: Labels, stage: int, ends: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that a stage computes: its own, and what these need of those that stand anywhere."""
    own = {n for n in nodes if labels.stage.get(n) == stage}
    pending = [*own, *(n for n in ends if n in labels.anywhere)]
    while pending:
        node = pending.pop()
        own.add(node)
        pending += [a for a in node.all_input_nodes if a in labels.anywhere and a not in own]
    return own


def _program(
    turn: LocalProgram,
    own: set[fx.Node],
    arrives: Sequence[Crossing],
    leaves: Sequence[Crossing],
    ends: Sequence[fx.Node],
) -> LocalProgram:
    """The program of a stage, with its placeholders in the order of every local program."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    types: dict[str, TensorType] = {}
    nodes = {n.name: n for n in turn.fx.nodes}
    read = {a for n in own for a in n.all_input_nodes}.union(ends)
    tops = [n for n in turn.fx.find_nodes(op="placeholder") if n in read]
    inputs = _of_kind(tops, "input")
    come = {nodes[crossing.name]: crossing.type for crossing in arrives}
    for node in (*inputs, *come, *(n for n in tops if n not in inputs)):
        env[node] = made.create_node("placeholder", node.name, name=node.name)  # `placeholder` changes capitals
        about = info(node)
        env[node].meta["info"] = Info(about.key, "input", about.outputs) if node in come else about
        types[env[node].name] = come[node] if node in come else turn.types[node.name]
    for node in turn.fx.nodes:
        if node in own:
            env[node] = made.node_copy(node, env.__getitem__)
    left = [nodes[crossing.name] for crossing in leaves]
    made.output(tuple(env[n] for n in (*left, *ends)))
    return replace(
        turn,
        fx=made,
        inputs=tuple(n.name for n in (*inputs, *come)),
        parameters=tuple(info(n).key for n in _of_kind(tops, "parameter")),
        buffers=tuple(info(n).key for n in _of_kind(tops, "buffer")),
        types=types,
        outputs=(*(c.value for c in leaves), *(turn.outputs if ends else ())),
        is_random=bool(_of_kind(tops, "random key")),
    )


def _of_kind(nodes: Sequence[fx.Node], kind: str) -> list[fx.Node]:
    return [n for n in nodes if info(n).kind == kind]
