"""Trace a local program and its gradients into one graph of ATen code; blocks that a model repeats are traced once.

A trace is made in four stages:

    segments    runs of ops under one numbered module ("layers.3"), and what stands between them
    forward     on fake tensors, segment by segment: the memory layout of what each segment leaves
    backward    from the last segment to the first: make_fx over torch.autograd.grad; segments that are alike - ops,
                constants, layouts of inputs and of arriving gradients - share one trace
    compose     copies of the traces: forwards in order, backwards in reverse; gradients of values that several segments
                read are added up; each node is marked with the op of the local program that it belongs to
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.buffers import read_instead
from autopar.codegen.joint_graph import ADDS, BACK, CONVERTED, OP, JointGraph
from autopar.codegen.local import LocalProgram
from autopar.graph import walks
from autopar.graph.graph import info, run
from autopar.graph.layers import innermost_block
from autopar.graph.tensor_form import TensorForm
from autopar.runtime.forms import literal
from autopar.runtime.private import FakeTensor, FakeTensorMode, OpOverload, clean_room


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of ops, the values that it reads from outside, and those of its values that are read outside."""

    nodes: list[fx.Node]
    reads: list[fx.Node]
    leaves: list[fx.Node]
    likeness: tuple[Any, ...]  # equal for segments that compute the same


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """Trace of one segment: its outputs, and a gradient or None for each of its inputs."""

    inputs: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]  # one an input
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)


def trace(program: LocalProgram, differentiable: Sequence[int], device: str) -> JointGraph:
    """The joint graph of a local program and the gradients of its `differentiable` outputs."""
    placeholders = [n for n in program.fx.nodes if n.op == "placeholder"]
    ends: list[fx.Node] = list(program.fx.output_node().args[0])
    wanted = [i for i, n in enumerate(placeholders) if program.types[n.name].requires_grad] if differentiable else []
    segments = _segments(program, set(ends))
    # ops without operands make their results on this device
    there = torch.device(device) if device != "cpu" else contextlib.nullcontext()
    with FakeTensorMode(), torch.enable_grad(), there:
        lies: dict[fx.Node, TensorForm] = {}
        for i, node in enumerate(placeholders):
            of = program.types[node.name]
            whole = torch.empty(of.shape, dtype=of.torch_dtype, device=device, requires_grad=i in wanted)
            lies[node] = TensorForm.of(whole)
        _lay_out(segments, lies, device)
        tangents = {k: lies[ends[i]].of_gradient for k, i in enumerate(differentiable)}
        reached = [k for k, i in enumerate(differentiable) if lies[ends[i]].requires_grad]
        arriving = {ends[differentiable[k]]: tangents[k] for k in reached}
        traces = _traces(segments, lies, arriving, device)
        made = _Composition(device)
        primals = [made.placeholder(f"primals_{i + 1}", n, lies[n]) for i, n in enumerate(placeholders)]
        seeds = [made.placeholder(f"tangents_{k + 1}", None, like) for k, like in tangents.items()]
        made.forward(segments, traces)
        for k in reached:
            made.add(ends[differentiable[k]], seeds[k])
        made.backward(segments, traces)
    outputs = [made.env[n] for n in ends]
    gradients = [made.gradients.get(placeholders[i]) for i in wanted]
    made.graph.output((*outputs, *gradients))
    inputs = len(program.inputs)
    return JointGraph(made.graph, primals, seeds, outputs, gradients, wanted, tuple(differentiable), inputs)


def _lay_out(segments: Sequence[Segment], lies: dict[fx.Node, TensorForm], device: str) -> None:
    """Add the layout of every value that a segment leaves to `lies`; segments that are alike run once."""
    known: dict[Any, list[TensorForm]] = {}
    for segment in segments:
        key = (segment.likeness, tuple(lies[n] for n in segment.reads))
        if key not in known:
            env = {n: lies[n].empty(device) for n in segment.reads}
            known[key] = [TensorForm.of(v) for v in _run(segment, env)]
        lies.update(zip(segment.leaves, known[key], strict=True))


def _traces(
    segments: Sequence[Segment], lies: Mapping[fx.Node, TensorForm], arriving: dict[fx.Node, TensorForm], device: str
) -> list[Traced]:
    """The trace of each segment, made last to first, as each depends on the gradients that arrive.

    `arriving` holds the layouts of the gradients of outputs, and is completed by those of all other values.
    """
    known: dict[Any, Traced] = {}
    sums: dict[tuple[TensorForm, TensorForm], TensorForm] = {}
    found: list[Traced] = []
    for segment in reversed(segments):
        tangents = tuple(arriving.get(n) for n in segment.leaves)
        reads = tuple(lies[n] for n in segment.reads)
        key = (segment.likeness, reads, tangents)
        if key not in known:
            known[key] = _traced(segment, reads, tangents, device)
        found.append(known[key])
        for read, gradient in zip(segment.reads, known[key].gradients, strict=True):
            if gradient is None:
                continue
            like = TensorForm.of(gradient.meta["val"].detach())
            if read in arriving:
                both = arriving[read], like
                if both not in sums:
                    sums[both] = TensorForm.of(torch.add(both[0].empty(device), both[1].empty(device)))
                like = sums[both]
            arriving[read] = like
    return found[::-1]


class _Composition:
    """One graph made of copies of the traces, one after the other."""

    def __init__(self, device: str) -> None:
        self.graph = fx.Graph()
        self.device = device
        self.env: dict[fx.Node, fx.Node] = {}  # value of the local program -> its node here
        self.gradients: dict[fx.Node, fx.Node] = {}  # value of the local program -> its gradient here
        self.places: list[dict[fx.Node, fx.Node]] = []  # copies of the nodes of each segment's trace

    def placeholder(self, name: str, of: fx.Node | None, like: TensorForm) -> fx.Node:
        """Add a placeholder of this layout; `of`, if given, is the local program's value that it stands for."""
        made = self.graph.placeholder(name)
        made.meta["val"] = like.empty(self.device).detach()
        if of is not None:
            self.env[of] = made
        return made

    def add(self, value: fx.Node, gradient: fx.Node) -> None:
        """Add `gradient` to the gradient of a value of the local program."""
        if value in self.gradients:
            before = self.gradients[value]
            both = self.graph.call_function(torch.ops.aten.add.Tensor, (before, gradient))
            both.meta[ADDS] = True
            both.meta["val"] = torch.add(before.meta["val"], gradient.meta["val"])
            gradient = both
        self.gradients[value] = gradient

    def forward(self, segments: Sequence[Segment], traces: Sequence[Traced]) -> None:
        """Copy the forwards, in order."""
        for segment, traced in zip(segments, traces, strict=True):
            at = {i: self.env[n] for i, n in zip(traced.inputs, segment.reads, strict=True)}
            self._copy(traced.forward, at, segment)
            for leaf, output in zip(segment.leaves, traced.outputs, strict=True):
                self.env[leaf] = at[output]
            self.places.append(at)

    def backward(self, segments: Sequence[Segment], traces: Sequence[Traced]) -> None:
        """Copy the backwards, in reverse; gradients of values that several segments read are added up."""
        for segment, traced, at in zip(reversed(segments), reversed(traces), reversed(self.places), strict=True):
            given = [self.gradients[n] for n in segment.leaves if n in self.gradients]
            at.update(zip(traced.tangents, given, strict=True))
            self._copy(traced.backward, at, segment)
            for read, gradient in zip(segment.reads, traced.gradients, strict=True):
                if gradient is not None:
                    self.add(read, at[gradient])

    def _copy(self, nodes: Sequence[fx.Node], at: dict[fx.Node, fx.Node], segment: Segment) -> None:
        for node in nodes:
            copy = at[node] = self.graph.node_copy(node, at.__getitem__)
            for key, place in node.meta.get("custom", {}).items():
                op = segment.nodes[place]
                copy.meta[key] = op.name
                copy.meta[CONVERTED] = info(op).kind == "conversion"


# -- one segment


def _segments(program: LocalProgram, ends: set[fx.Node]) -> list[Segment]:
    ops = [n for n in program.fx.nodes if n.op == "call_function"]
    found = []
    for _, run_of in itertools.groupby(ops, lambda n: innermost_block(info(n).module)):
        nodes = list(run_of)
        inside = set(nodes)
        reads = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        leaves = [n for n in nodes if n in ends or _is_read_outside(n, inside)]
        leaves = [n for n in leaves if not _is_several(n)]
        number: dict[fx.Node, Any] = {n: f"<{i}>" for i, n in enumerate((*reads, *nodes))}
        said = tuple(_said(n, number) for n in nodes)
        found.append(Segment(nodes, reads, leaves, (len(reads), said, tuple(number[n] for n in leaves))))
    return found


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user not in inside and user.op != "output" for user in node.users)


def _said(node: fx.Node, number: Mapping[fx.Node, str]) -> tuple[Any, ...]:
    """A key of an op: target, arguments and which outputs have gradients; operands by number, not by name."""
    words = repr(fx.map_arg((node.args, node.kwargs), lambda a: _Bare(number[a])))
    return node.target, words, tuple(t.requires_grad for t in info(node).outputs)


class _Bare(str):
    """Number of an operand in the text of a call; its repr has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def _is_several(node: fx.Node) -> bool:
    """Whether the node gives a tuple whose parts are nodes of their own."""
    return len(info(node).outputs) > 1 and any(info(u).kind == "part" for u in node.users)


def _run(segment: Segment, env: dict[fx.Node, Any]) -> list[torch.Tensor]:
    """Run a segment and return the values that it leaves.

    Nodes that are traced meanwhile, and those of their backward, are marked with the op that they belong to.
    """
    seen = {getattr(value, "grad_fn", None) for value in env.values()}
    for place, node in enumerate(segment.nodes):
        with traceback.annotate({OP: place}):
            result = env[node] = run(node, env)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            step = getattr(value, "grad_fn", None)
            # A step seen before belongs to the op that made the operand, which this op only hands on.
            if step is not None and step not in seen:
                seen.add(step)
                step.register_prehook(functools.partial(_say, place))
    return [env[n] for n in segment.leaves]


def _say(place: int, *_: Any) -> None:
    """Mark all nodes traced from here on as backward of the op at `place`, until the next call."""
    traceback.current_meta["custom"] = {BACK: place}


@contextlib.contextmanager
def _without_a_say() -> Iterator[None]:
    """Drop the mark that `_say` has left when the block ends."""
    try:
        yield
    finally:
        traceback.current_meta.pop("custom", None)


def _traced(
    segment: Segment, reads: Sequence[TensorForm], tangents: Sequence[TensorForm | None], device: str
) -> Traced:
    held = [i for i, like in enumerate(reads) if like.requires_grad]
    given = [t for t in tangents if t is not None]

    def step(inputs: list[torch.Tensor], arriving: list[torch.Tensor]) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_(like.requires_grad) for x, like in zip(inputs, reads, strict=True)]
        outputs = _run(segment, dict(zip(segment.reads, inputs, strict=True)))
        if not given or not held:
            return (*outputs,)
        reached = [o for o, t in zip(outputs, tangents, strict=True) if t is not None]
        wanted = [inputs[i] for i in held]
        with _without_a_say():
            return (*outputs, *torch.autograd.grad(reached, wanted, arriving, allow_unused=True))

    fake = [like.empty(device).detach() for like in reads], [like.empty(device) for like in given]
    with traceback.preserve_node_meta():
        made = make_fx(step)(*fake)
        if any(map(_writes, made.graph.nodes)):  # an op's body, or a backward, that writes to memory: as values
            values = torch.func.functionalize(fx.Interpreter(made).run, remove="mutations")
            made = make_fx(values)(*fake)
    assert not any(map(_writes, made.graph.nodes))
    for node in made.graph.find_nodes(op="get_attr"):  # torch.tensor([1, 2]) is written out where it stands
        _write_out(made, node, device)
    nodes = [n for n in made.graph.nodes if n.op == "placeholder"]
    flat = list(made.graph.output_node().args[0])
    found = dict(zip(held, flat[len(segment.leaves) :], strict=False))
    count = len(reads)
    traced = Traced(nodes[:count], nodes[count:], flat[: len(segment.leaves)], [found.get(i) for i in range(count)])
    needed = walks.ancestors(traced.outputs)
    for node in made.graph.nodes:
        if node.op == "call_function":
            # one result of a forward op: taken in backward, it would keep the op's other results in memory
            if node.target is operator.getitem and node.args[0] in needed:
                needed.add(node)
            (traced.forward if node in needed else traced.backward).append(node)
    return traced


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _write_out(made: fx.GraphModule, node: fx.Node, device: str) -> None:
    """Replace a constant tensor by the call that makes it."""
    held = getattr(made, str(node.target))
    value = held.constant if isinstance(held, FakeTensor) else held
    with clean_room():
        data = value.tolist()
    with made.graph.inserting_before(node):
        written = made.graph.call_function(literal, (data, value.dtype, device))
    written.meta.update(node.meta)
    written.meta.setdefault("val", held)
    read_instead(node, written)
    made.graph.erase_node(node)
