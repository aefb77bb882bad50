"""Local program -> its forward and backward in one graph of ATen code. What a model repeats is traced once.

pieces      runs of ops under one numbered module ("layers.3"), and what stands between them
forward     on fake tensors, piece by piece: how what a piece leaves lies in memory
backward    from the last piece to the first: make_fx over torch.autograd.grad; pieces that are alike - ops, constants,
            how
            their inputs and the gradients that arrive lie - share one trace
compose     copies of the traces: forwards in order, backwards in reverse; gradients of what several pieces read are
            added up
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.local import LocalProgram
from autopar.graph.graph import info, run
from autopar.graph.layers import innermost_block
from autopar.runtime.forms import literal
from autopar.runtime.private import clean_room


@dataclass(frozen=True, slots=True)
class Lies:
    """How a value lies in memory, and whether it has a gradient: all of it that a trace depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool = False

    @staticmethod
    def of(value: torch.Tensor) -> Lies:
        return Lies(value.shape, value.stride(), value.dtype, value.requires_grad)

    def made(self, device: str) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).requires_grad_(
            self.has_gradient
        )


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Ops that follow each other, what they read from before, and what is read of them after."""

    nodes: list[fx.Node]
    reads: list[fx.Node]
    leaves: list[fx.Node]
    likeness: tuple[Any, ...]  # equal for pieces that compute the same


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The graph of one piece: what it leaves, and a gradient for each of its inputs that has one."""

    inputs: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]  # one an input
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)


def trace(
    program: LocalProgram, differentiable: Sequence[int], device: str
) -> tuple[fx.Graph, list[fx.Node], list[fx.Node], list[fx.Node], list[fx.Node | None], list[int]]:
    """The graph, its primals, its tangents, its outputs, the gradients, and of which primals these are."""
    placeholders = [n for n in program.fx.nodes if n.op == "placeholder"]
    ends: list[fx.Node] = list(program.fx.output_node().args[0])
    wanted = [i for i, n in enumerate(placeholders) if program.types[n.name].requires_grad] if differentiable else []
    pieces, graph = _pieces(program, set(ends)), fx.Graph()
    here = (
        torch.device(device) if device != "cpu" else contextlib.nullcontext()
    )  # what comes from nothing is made there
    with FakeTensorMode(), torch.enable_grad(), here:
        lies = {
            n: Lies.of(torch.empty(t.shape, dtype=t.torch_dtype, device=device, requires_grad=i in wanted))
            for i, n in enumerate(placeholders)
            for t in (program.types[n.name],)
        }
        known: dict[Any, tuple[Lies, ...]] = {}
        key: Any
        for piece in pieces:  # how everything lies
            key = (piece.likeness, tuple(lies[n] for n in piece.reads))
            if key not in known:
                env = {n: lies[n].made(device) for n in piece.reads}
                known[key] = tuple(Lies.of(v) for v in _run(piece, env))
            lies.update(zip(piece.leaves, known[key], strict=True))

        arriving = {}  # of each value, how its gradient lies
        for i in differentiable:
            if lies[ends[i]].has_gradient:
                arriving[ends[i]] = _alone(lies[ends[i]])
        traces: dict[Any, Traced] = {}
        of: list[Traced] = []
        added: dict[Any, Lies] = {}
        for piece in reversed(pieces):
            tangents = tuple(arriving.get(n) for n in piece.leaves)
            key = (piece.likeness, tuple(lies[n] for n in piece.reads), tangents)
            if key not in traces:
                traces[key] = _traced(piece, key[1], tangents, device)
            of.append(traces[key])
            for read, gradient in zip(piece.reads, traces[key].gradients, strict=True):
                if gradient is not None:
                    found = Lies.of(gradient.meta["val"].detach())
                    if read in arriving:
                        both = arriving[read], found
                        if both not in added:
                            added[both] = Lies.of(torch.add(both[0].made(device), both[1].made(device)))
                        found = added[both]
                    arriving[read] = found
        return _composed(graph, program, placeholders, ends, differentiable, wanted, pieces, of[::-1], lies, device)


def _composed(
    graph: fx.Graph,
    program: LocalProgram,
    placeholders: list[fx.Node],
    ends: list[fx.Node],
    differentiable: Sequence[int],
    wanted: list[int],
    pieces: list[Piece],
    traces: list[Traced],
    lies: dict[fx.Node, Lies],
    device: str,
) -> Any:
    """Copies of the traces, one after the other."""
    env: dict[fx.Node, fx.Node] = {}
    seconds: dict[fx.Node, fx.Node] = {}  # of each value its gradient

    def placeholder(name: str, like: Lies) -> fx.Node:
        made = graph.placeholder(name)
        made.meta["val"] = like.made(device).detach()
        return made

    def copied(nodes: list[fx.Node], at: dict[fx.Node, fx.Node]) -> None:
        for node in nodes:
            at[node] = graph.node_copy(node, at.__getitem__)

    def add(to: fx.Node, gradient: fx.Node) -> None:
        if to in seconds:
            both = graph.call_function(torch.ops.aten.add.Tensor, (seconds[to], gradient))
            both.meta["val"] = torch.add(seconds[to].meta["val"], gradient.meta["val"])
            gradient = both
        seconds[to] = gradient

    primals = [placeholder(f"primals_{i + 1}", lies[n]) for i, n in enumerate(placeholders)]
    tangents = [placeholder(f"tangents_{k + 1}", _alone(lies[ends[i]])) for k, i in enumerate(differentiable)]
    env.update(zip(placeholders, primals, strict=True))
    places: list[dict[fx.Node, fx.Node]] = []
    for piece, traced in zip(pieces, traces, strict=True):
        at = {i: env[n] for i, n in zip(traced.inputs, piece.reads, strict=True)}
        copied(traced.forward, at)
        env.update((n, at[o]) for n, o in zip(piece.leaves, traced.outputs, strict=True))
        places.append(at)
    for i, tangent in zip(differentiable, tangents, strict=True):
        if lies[ends[i]].has_gradient:
            add(ends[i], tangent)
    for piece, traced, at in zip(reversed(pieces), reversed(traces), reversed(places), strict=True):
        given = [seconds[n] for n in piece.leaves if n in seconds]
        at.update(zip(traced.tangents, given, strict=True))
        copied(traced.backward, at)
        for read, gradient in zip(piece.reads, traced.gradients, strict=True):
            if gradient is not None:
                add(read, at[gradient])
    outputs, gradients = [env[n] for n in ends], [seconds.get(placeholders[i]) for i in wanted]
    graph.output((*outputs, *gradients))
    return graph, primals, tangents, outputs, gradients, wanted


def _alone(like: Lies) -> Lies:
    """As what torch.empty_like makes of it."""
    return Lies.of(torch.empty_like(like.made("cpu").detach()))


# -- one piece


def _pieces(program: LocalProgram, ends: set[fx.Node]) -> list[Piece]:
    ops = [n for n in program.fx.nodes if n.op == "call_function"]
    found = []
    for _, run_of in itertools.groupby(ops, lambda n: innermost_block(info(n).module)):
        nodes = list(run_of)
        inside = set(nodes)
        reads = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        leaves = [n for n in nodes if n in ends or any(u not in inside and u.op != "output" for u in n.users)]
        leaves = [n for n in leaves if not _is_several(n)]
        number: dict[fx.Node, Any] = {n: f"<{i}>" for i, n in enumerate((*reads, *nodes))}
        said = tuple(
            (
                n.target,
                repr(fx.map_arg((n.args, n.kwargs), lambda a: _Said(number[a]))),
                tuple(t.requires_grad for t in info(n).outputs),
            )
            for n in nodes
        )
        found.append(Piece(nodes, reads, leaves, (len(reads), said, tuple(number[n] for n in leaves))))
    return found


class _Said(str):
    """Where an operand comes from, in the text of a call."""

    def __repr__(self) -> str:
        return str(self)


def _is_several(node: fx.Node) -> bool:
    """Does it give a tuple, whose parts stand beside it?"""
    return len(info(node).outputs) > 1 and any(info(u).kind == "part" for u in node.users)


def _run(piece: Piece, env: dict[fx.Node, Any]) -> list[torch.Tensor]:
    for node in piece.nodes:
        env[node] = run(node, env)
    return [env[n] for n in piece.leaves]


def _traced(piece: Piece, reads: Sequence[Lies], tangents: Sequence[Lies | None], device: str) -> Traced:
    held = [i for i, like in enumerate(reads) if like.has_gradient]
    given = [t for t in tangents if t is not None]

    def step(inputs: list[torch.Tensor], arriving: list[torch.Tensor]) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_(like.has_gradient) for x, like in zip(inputs, reads, strict=True)]
        outputs = _run(piece, dict(zip(piece.reads, inputs, strict=True)))
        if not given or not held:
            return (*outputs,)
        return (
            *outputs,
            *torch.autograd.grad(
                [o for o, t in zip(outputs, tangents, strict=True) if t is not None],
                [inputs[i] for i in held],
                arriving,
                allow_unused=True,
            ),
        )

    fake = [like.made(device).detach() for like in reads], [like.made(device) for like in given]
    made = make_fx(step)(*fake)
    if any(map(_writes, made.graph.nodes)):  # an op's body, or a backward, that writes to memory: as values
        made = make_fx(torch.func.functionalize(made, remove="mutations"))(*fake)
    assert not any(map(_writes, made.graph.nodes))
    for node in made.graph.find_nodes(op="get_attr"):  # torch.tensor([1, 2]) is written out where it stands
        _write_out(made, node, device)
    nodes, flat = [n for n in made.graph.nodes if n.op == "placeholder"], list(made.graph.output_node().args[0])
    found, count = dict(zip(held, flat[len(piece.leaves) :], strict=False)), len(reads)
    traced = Traced(nodes[:count], nodes[count:], flat[: len(piece.leaves)], [found.get(i) for i in range(count)])
    needed, pending = set[fx.Node](), list(traced.outputs)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    for node in made.graph.nodes:
        if node.op == "call_function":
            if (
                node.target is operator.getitem and node.args[0] in needed
            ):  # a part of what forward makes: it would hold the others until backward
                needed.add(node)
            (traced.forward if node in needed else traced.backward).append(node)
    return traced


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _write_out(made: fx.GraphModule, node: fx.Node, device: str) -> None:
    """A constant as the call that makes it."""
    held = getattr(made, str(node.target))
    value = held.constant if isinstance(held, FakeTensor) else held
    with clean_room():
        data = value.tolist()
    with made.graph.inserting_before(node):
        written = made.graph.call_function(literal, (data, value.dtype, device))
    written.meta.update(node.meta)
    written.meta.setdefault("val", held)
    node.replace_all_uses_with(written)
    made.graph.erase_node(node)
