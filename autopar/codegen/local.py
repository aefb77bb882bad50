"""Write the local program of a graph and a plan: what one device computes, forward only, before it is differentiated.

Parameters and inputs become local shards, shape arguments become local (numbers derived from shapes stay global), and
every conversion of the plan becomes one `convert` node that names its steps forward and those of its gradient backward.
It prints as Python: a reader sees every collective, its axis, and why it is there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from autopar.codegen.forms import form_of
from autopar.codegen.local_inputs import NO_ROWS, OwnRows, from_rows, sharding_of_rows
from autopar.graph import walks
from autopar.graph.carried import written_in_place
from autopar.graph.graph import Graph, Info, TensorType, info, op_name, type_of
from autopar.letters import BadPlan
from autopar.ops.entry import Op
from autopar.ops.local import OpOnDevice
from autopar.runtime.collectives import convert
from autopar.sharding.convert import REDUCTIONS, Step, localise
from autopar.sharding.placement import Sharding, local_shape
from autopar.sharding.strategies import values
from autopar.solver import text
from autopar.solver.decision import Decision, conversion_name
from autopar.solver.plan import Plan
from autopar.solver.plan_of_choices import fused_of
from autopar.space.kernel_sites import KernelSites
from autopar.space.parameter_values import casts_of_parameters, reduced_in


@dataclass(frozen=True, slots=True, eq=False)
class LocalProgram:
    """The forward of one device as an fx graph.

    Its placeholders are `inputs`, then `parameters`, then `buffers`, then the random key where `is_random`.
    """

    fx: fx.Graph
    inputs: tuple[str, ...]  # placeholder names of the traced inputs, whole on every rank
    parameters: tuple[str, ...]  # names
    buffers: tuple[str, ...]
    types: dict[str, TensorType]  # local type of each placeholder, by its name
    outputs: tuple[Sharding, ...]  # how each output lies
    is_random: bool = False  # a last placeholder takes the random key of the step
    notes: dict[str, str] = field(default_factory=dict)  # remarks for who reads it, by the names of nodes
    fused: Mapping[str, str] = field(default_factory=dict)  # families of kernels by the results of their groups
    recomputed: frozenset[str] = frozenset()  # the values that the plan recomputes, by their names in the graph
    # inputs that are written to, by their places, each with the place of the output that is its new value
    written: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return print_program(self)

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """A key that is equal for programs that compute the same."""
        nodes = ((n.op, n.name, n.target, *about) for n, about in self.recorded)
        return (*nodes, *self.types.items(), self.inputs, self.parameters, self.buffers, *self.written.items())

    @property
    def recorded(self) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
        """Each node with its arguments as text, and what else its backward depends on."""
        return ((n, (repr(n.args), repr(n.kwargs), _recorded(n))) for n in self.fx.nodes)


def _recorded(node: fx.Node) -> tuple[Any, ...]:
    """A node's chunks, and which of its results have gradients: its backward depends on both.

    The backward also depends on the node's call, which is not among these properties.
    """
    if "info" not in node.meta:
        return ()
    about = info(node)
    return about.chunks, tuple(value.requires_grad for value in about.outputs)


def local_program(graph: Graph, plan: Plan, coordinate: Sequence[int], rows: OwnRows = NO_ROWS) -> LocalProgram:
    """The program of the device at `coordinate`; the same on every device where all parts are even.

    Inputs come whole, except for `rows`: those of which every rank passes its own rows.
    """
    if plan.digest != graph.digest:
        raise BadPlan(
            "the plan was made for another graph",
            seen=f"plan {plan.digest}, model {graph.digest}",
            advice=(
                "plan again: the model, its inputs' shapes, train and eval, or the outputs that are named have changed"
            ),
        )
    return Localiser(graph, plan, coordinate, rows).run()


def fused_in(graph: Graph, plan: Plan) -> Mapping[str, str]:
    """The kernels of a plan by results; for a plan of an older release, all that can stand."""
    return plan.fused if plan.fused is not None else fused_of(KernelSites.of(graph, plan.kernels), plan)


_TOPS = ("input", "parameter", "buffer")  # kinds of placeholders, in their order


class Localiser:
    """Writes the program of one device, node by node in the order of the graph."""

    def __init__(self, graph: Graph, plan: Plan, coordinate: Sequence[int], rows: OwnRows) -> None:
        self.graph = graph
        self.plan = plan
        self.mesh = plan.mesh
        self.coordinate = coordinate
        self.rows = rows
        self.conversions = {(c.target, c.operand): c for c in plan.conversions}
        self.recomputed = plan.recomputed
        self.offloaded = plan.offloaded
        self.fx = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.types: dict[str, TensorType] = {}
        self.key: fx.Node | None = None  # the placeholder of this step's random key
        self.written: dict[Any, fx.Node] = {}  # a conversion already there, by what it is
        # each cast of a parameter whose gradient is reduced in the dtype before it -> the value that it casts
        self.before: dict[fx.Node, fx.Node] = {}
        self.reduced_in = reduced_in(casts_of_parameters(graph), plan.precision[1]) if plan.precision else {}

    def run(self) -> LocalProgram:
        """The whole program: placeholders, ops, outputs."""
        tops = {kind: self._of_kind(kind) for kind in _TOPS}
        for nodes in tops.values():
            for node in nodes:
                self._placeholder(node)
        if self.graph.is_random:
            self.key = self.fx.placeholder("random_key")
            self.types["random_key"] = TensorType((), "int64")
            self.key.meta["info"] = Info("random_key", "random key", (self.types["random_key"],))
        for node in self.graph.nodes:
            if info(node).kind == "op":
                self._op(node)
        outputs: list[fx.Node] = []
        shardings: list[Sharding] = []
        for source, name in zip(self.graph.output.args[0], self.graph.result_names, strict=True):
            outputs.append(self._converted(source, f"out.{name}", 0, ""))
            shardings.append(values(self._decision(f"out.{name}").flows(0)))
        self.fx.output(tuple(outputs))
        return LocalProgram(
            self.fx,
            tuple(str(n.target) for n in tops["input"]),
            tuple(info(n).key for n in tops["parameter"]),
            tuple(info(n).key for n in tops["buffer"]),
            self.types,
            tuple(shardings),
            self.graph.is_random,
            {node.name: note for node in self.fx.nodes if (note := self._note(node))},
            fused_in(self.graph, self.plan),
            self.recomputed,
            self._written(tops["input"], outputs),
        )

    def _written(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[int, int]:
        """Places of the inputs that are written to, each with the place of the output that is its new value.

        Where a conversion stands between them, the op writes to a copy.
        """
        made = {old: self.env[op] for op, old in written_in_place(self.graph).items()}
        found = {}
        for place, node in enumerate(inputs):
            op = made.get(node)
            if op is not None and op in outputs and op.kwargs["input"] is self.env[node]:
                found[place] = outputs.index(op)
        return found

    def _note(self, node: fx.Node) -> str:
        """A remark why the value is recomputed, or where it waits on the host; empty where it is saved."""
        about = info(node) if node.op == "call_function" else None
        names = (about.key, *about.names) if about else ()
        if again := self.recomputed.intersection(names):
            return text.why_recomputed(self.plan, min(again))
        if moved := [name for name in names if name in self.offloaded]:
            gone, comes = self.offloaded[moved[0]]
            return f"on the host from behind {gone} until before the backward of {comes}"
        return ""

    def _of_kind(self, kind: str) -> list[fx.Node]:
        return [n for n in self.graph.nodes if info(n).kind == kind]

    def _decision(self, name: str) -> Decision:
        return self.plan.decisions[name]

    def _placeholder(self, node: fx.Node) -> None:
        made = self.env[node] = self.fx.placeholder(node.name)
        sharding = values(self._decision(info(node).key).flows())
        whole = type_of(node)
        if self._has_rows(node):
            sharding = sharding_of_rows(self.rows.axes, self.mesh)
        self.types[made.name] = TensorType(
            local_shape(whole.shape, sharding, self.mesh, self.coordinate), whole.dtype, whole.requires_grad
        )
        made.meta["info"] = info(node)

    def _op(self, node: fx.Node) -> None:
        about = info(node)
        operands = [n for n in node.target.operands(node.kwargs) if isinstance(n, fx.Node)]
        arrived = [self._converted(n, about.key, i, about.module) for i, n in enumerate(operands)]
        if op_name(node) == "identity":
            self.env[node] = arrived[0]
            return
        if node in self.reduced_in:
            self.before[node] = arrived[0]
        turn = iter(arrived)  # operands stand in the order of the arguments
        function, kwargs = form_of(self, node, dict(fx.map_arg(node.kwargs, lambda n: next(turn))))
        made = self.env[node] = self.fx.create_node("call_function", function, (), kwargs, name=node.name)
        made.meta["info"] = about
        for part in walks.parts(node):
            taken = (made, part.args[1])
            self.env[part] = self.fx.create_node("call_function", operator.getitem, taken, name=part.name)
            self.env[part].meta["info"] = info(part)

    def place(self, node: fx.Node) -> OpOnDevice:
        """This device with the choice by which it runs the op."""
        return OpOnDevice(self.mesh, tuple(self.coordinate), self.key, self._decision(info(node).key).choice)

    def _converted(self, source: fx.Node, target: str, operand: int, module: str) -> fx.Node:
        """`source` in the sharding that its consumer takes; conversions that are equal are written once."""
        here = self.env[source]
        conversion = self.conversions.get((target, operand))
        whole = type_of(source)
        steps, lies = (conversion.forward, conversion.value[0]) if conversion else ((), None)
        if self._has_rows(source):
            steps = from_rows(self.rows.axes, steps)
            lies = sharding_of_rows(self.rows.axes, self.mesh)
        if lies is None or (conversion is None and not steps):
            return here
        forward, shape = self._steps(steps, whole, lies)
        backward = ""
        if conversion is not None and conversion.gradient:
            backward, _ = self._steps(conversion.backward, whole, conversion.gradient[0])
        reduces = conversion is not None and any(step.kind in REDUCTIONS for step in conversion.backward)
        dtype: tuple[str, ...] = ()
        if source in self.before and reduces:  # the cast is a part of the conversion
            here = self.before[source]
            dtype = (whole.dtype,)
        key = (here, forward, backward, dtype)
        if key not in self.written:
            given = (here, forward, backward, list(shape), *dtype)
            made = self.written[key] = self.fx.create_node("call_function", convert, given, name=f"{here.name}_as")
            made.meta["info"] = Info(f"{info(source).key} to {target}", "conversion", (whole,), module)
        made = self.written[key]
        name = conversion_name(target, operand)
        made.meta["info"] = replace(info(made), names=(*info(made).names, name))
        return made

    def _has_rows(self, node: fx.Node) -> bool:
        return info(node).kind == "input" and info(node).key in self.rows.inputs

    def _steps(self, steps: Sequence[Step], whole: TensorType, source: Sharding) -> tuple[str, tuple[int, ...]]:
        here, shape = localise(steps, whole.shape, source, self.mesh, self.coordinate)
        return "; ".join(map(repr, here)), shape


def print_program(program: LocalProgram) -> str:
    """The local program as readable Python."""
    nodes = list(program.fx.nodes)
    lines = [
        "def forward(",
        *(f"    {n.name},    # {program.types[n.name]}, {info(n).kind}" for n in nodes if n.op == "placeholder"),
        "):",
    ]
    module = None
    for node in nodes:
        if node.op == "output":
            lines.append(f"    return {', '.join(n.name for n in node.args[0])}")
        elif node.op == "call_function":
            if info(node).module != module:
                module = info(node).module
                lines += ["", f"    # {module or 'the model itself'}"]
            note = f"    # {program.notes[node.name]}" if node.name in program.notes else ""
            lines.append(f"    {node.name} = {_call(node)}{note}")
    return "\n".join(lines) + "\n"


def _call(node: fx.Node) -> str:
    if node.target is convert:
        x, forward, backward, _, *dtype = node.args
        cast = f", dtype={dtype[0]!r}" if dtype else ""
        return f"convert({x}, {forward!r}, backward={backward!r}{cast})    # {info(node).key}"
    if info(node).kind == "part":
        return f"{node.args[0]}[{node.args[1]}]"
    target: Any = node.target
    name = op_name(node) if isinstance(target, Op) else getattr(target, "__name__", "") or target._name
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in node.kwargs.items())})"
