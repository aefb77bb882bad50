"""`Graph`: the model as one list of canonical ops, each with its arguments by name, types, module path and source line.

A Graph wraps a `torch.fx.Graph`. Its nodes are

    get_attr        a parameter or buffer, under its own name
    placeholder     a tensor leaf of the inputs
    call_function   a canonical op; target is an `Op`, arguments stand in kwargs
    output          the tensor leaves of the outputs

and every node has one typed entry, `node.meta["info"]`. The Graph knows nothing of meshes.
"""

from __future__ import annotations

import hashlib
import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.graph.archive import read_fields, write
from autopar.graph.blocks import Repeat, repeated_blocks
from autopar.graph.held import Registered, set_at, tensor_of, write_buffers
from autopar.graph.idle import IdleHook
from autopar.graph.kept import NotKept
from autopar.graph.nodes import SHORT, Info, Leaf, TensorType, call_of, fresh_key, info, op_name, run, type_of, typed
from autopar.letters import BadInput, NotServed

__all__ = [  # the value, the entries of its nodes, and runs of it on tensors
    "Graph",
    "Assume",
    "TensorType",
    "Info",
    "Leaf",
    "SHORT",
    "info",
    "type_of",
    "op_name",
    "typed",
    "call_of",
    "run",
    "fresh_key",
    "rows_of_batch",
    "Replay",
    "stops_gradients",
    "changing_buffers",
    "write_updates",
    "bind_inputs",
    "in_traced_order",
    "build_outputs",
]


@dataclass(frozen=True, slots=True)
class Assume:
    """Assumptions about values that the caller declares, and the graph repeats.

    Attributes:
        no_padding: Attention masks are all ones, and a row is one sequence: Hugging Face models then use is_causal=True
            and no mask tensors.
        finite: No value is inf or nan.
        imbalance: What experts of the fullest device get over the mean, where a router divides rows among devices.
        documents: Mean length of the documents of a row, by which attention within documents is priced; without it, as
            if a row were one document, which is an upper bound. No value depends on it.
        branches: Conditions by the line of the user's code at which they stand: {"model.py:84": True}.
    """

    no_padding: bool = False
    finite: bool = False
    imbalance: float = 1.1
    documents: int | None = None
    branches: tuple[tuple[str, bool], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.branches, Mapping):
            object.__setattr__(self, "branches", tuple(self.branches.items()))
        if isinstance(self.imbalance, bool) or not isinstance(self.imbalance, (int, float)) or not self.imbalance >= 1:
            raise NotServed(
                f"Assume(imbalance={self.imbalance!r}) is not a load of the fullest device over the mean",
                advice="1.0, where a router loads all experts alike, or more",
            )
        is_length = isinstance(self.documents, int) and not isinstance(self.documents, bool) and self.documents > 0
        if self.documents is not None and not is_length:
            raise NotServed(
                f"Assume(documents={self.documents!r}) is not a length of documents",
                advice="their mean number of places, as 2048",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The forward of one training step, as canonical ops: the tracer makes it, and every later stage reads it."""

    fx: fx.Graph = field(repr=False)
    input_spec: pytree.TreeSpec = field(repr=False)  # structure of (args, kwargs)
    input_leaves: tuple[Any, ...]  # a leaf of the inputs: its placeholder's name, or the constant itself
    output_spec: pytree.TreeSpec = field(repr=False)
    output_leaves: tuple[Any, ...]  # a leaf of the outputs: its position in the output node, or the constant
    output_names: tuple[str, ...]  # names of the tensor leaves: "loss", "logits", "0"
    # ("buffer", name), ("attribute", name) or ("input", name): their new values are the last entries of the output node
    updates: tuple[tuple[str, str], ...] = ()
    sets: tuple[tuple[str, Any], ...] = ()  # attributes that a call sets, and to what; tensors are updates
    assumptions: tuple[str, ...] = ()
    training: bool = True
    model: str = ""  # name of the model's class
    # ("parameter name" or "buffer name", its type): tensors that the model holds and no op reads
    unread: tuple[tuple[str, TensorType], ...] = ()
    backward_from: tuple[str, ...] = ()  # outputs beside the loss that gradients arrive at
    turns: int = 1  # number of micro-batches in which a batch passes; the graph is of one
    in_turns: tuple[str, ...] = ()  # inputs of which the graph takes the rows of one micro-batch
    # outputs that hold the rows of one micro-batch, each with the dim of these rows
    rows_out: tuple[tuple[str, int], ...] = ()
    # outputs that are carried to the next call, each with the input that brought its old value, or ""
    carried: tuple[tuple[str, str], ...] = ()
    has_gradients: bool = True  # whether calls have gradients
    idle: tuple[IdleHook, ...] = field(default=(), repr=False)  # calls of hooks that do nothing to it; not written

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.fx.nodes)

    @property
    def sets_attributes(self) -> bool:
        """Whether a call changes attributes of modules."""
        return bool(self.sets) or any(kind == "attribute" for kind, _ in self.updates)

    @property
    def output(self) -> fx.Node:
        return self.fx.output_node()

    @property
    def parameters(self) -> dict[str, fx.Node]:
        return {info(n).key: n for n in self.nodes if info(n).kind == "parameter"}

    @property
    def inputs(self) -> dict[str, fx.Node]:
        return {info(n).key: n for n in self.nodes if info(n).kind == "input"}

    def copies_of_input(self, node: fx.Node) -> int:
        """The number of copies held of an input or buffer, in units of what its node takes.

        All micro-batches of an input are held while they pass in turns. Where the graph also reads the whole batch, it
        is counted at the node that does, and not here.
        """
        about = info(node)
        if about.key not in self.in_turns:
            return 1
        also_whole = any(n.target == node.target and info(n).key != about.key for n in self.inputs.values())
        return 0 if also_whole else self.turns

    @property
    def chunks(self) -> int:
        """The number of chunks in which the loss head runs."""
        return max((info(n).chunks for n in self.nodes), default=1)

    @property
    def passed(self) -> list[str]:
        """Names of the inputs that a caller passes; one read both by micro-batch and whole counts once."""
        first: dict[Any, str] = {}
        for name, node in self.inputs.items():
            first.setdefault(node.target, name)
        return list(first.values())

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of the values in the output node: the outputs, then buffers and inputs that change."""
        return (*self.output_names, *(f"{name}:new" for _, name in self.updates))

    @property
    def loss(self) -> int | None:
        """The index of the loss among the outputs: the scalar called "loss", or the only one with a gradient.

        None where there is no such output.
        """
        scalars = [
            i
            for i, t in enumerate(info(self.output).outputs[: len(self.output_names)])
            if t.shape == () and t.requires_grad
        ]
        named = [i for i in scalars if self.output_names[i] == "loss"]
        if named:
            return named[0]
        return scalars[0] if len(scalars) == 1 else None

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of outputs at which gradients arrive: the loss and `backward_from`, or all without a loss."""
        types = info(self.output).outputs
        loss = self.loss
        return tuple(
            i
            for i, name in enumerate(self.output_names)
            if self.has_gradients and types[i].requires_grad and (loss in (None, i) or name in self.backward_from)
        )

    @property
    def is_random(self) -> bool:
        """Whether any op draws random numbers."""
        return any(info(n).random >= 0 for n in self.nodes)

    def without_dropout(self) -> Graph:
        """Set the probability of every dropout to zero, in place, and return the graph.

            before    y = dropout(x, p=0.1)
            after     y = dropout(x, p=0.0)

        So is the `dropout_p` of attention.
        """
        for node in self.nodes:
            if info(node).kind == "op" and info(node).random >= 0:
                if "dropout" in op_name(node):  # the default of its p is a half
                    node.kwargs = {**node.kwargs, "p": 0.0}
                elif "dropout_p" in node.kwargs:
                    node.kwargs = {**node.kwargs, "dropout_p": 0.0}
        return self

    @property
    def digest(self) -> str:
        """A fingerprint of the ops, shapes, names and structures; a plan belongs to the graphs of one digest."""
        said = (
            str(self),
            str(self.training),
            repr(self.input_leaves),
            repr(self.output_leaves),
            repr(self.output_names),
            *self.backward_from,
            *map(repr, self.sets),
            *map(repr, self.carried),
            *([] if self.has_gradients else ["without gradients"]),
        )
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        results = list(self.output.args[0])
        changed = (
            f"{kind} {name} = {node}"
            for (kind, name), node in zip(self.updates, results[len(self.output_names) :], strict=True)
        )
        return "\n".join(
            (
                *(_line(n) for n in self.nodes if n.op != "output"),
                *changed,
                *(f"attribute {name} = {value!r}" for name, value in self.sets),
                f"return {', '.join(map(str, results[: len(self.output_names)]))}",
            )
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def blocks(self) -> tuple[Repeat, ...]:
        """Blocks that repeat, such as the layers of a transformer."""
        return repeated_blocks(self)

    def to_json(self) -> str:
        """The graph as text that `Graph.from_json` reads back."""
        return write(self)

    @staticmethod
    def from_json(text: str) -> Graph:
        """The graph that `to_json` wrote."""
        return Graph(**read_fields(Graph, text))

    def module(self, model: torch.nn.Module) -> Replay:
        """A module that runs the graph, node by node, on the parameters of `model`."""
        return Replay(self, model)


class Replay(torch.nn.Module):
    """A module that runs a graph, node by node, on the parameters of a model."""

    def __init__(self, graph: Graph, model: torch.nn.Module) -> None:
        super().__init__()
        self.graph = graph
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = bind_inputs(self.graph, args, kwargs)
        given = dict(leaves)
        for kind, name in self.graph.updates:  # outputs and autograd hold the old value of what is written afterwards
            if kind == "input":
                leaves[self.graph.inputs[name].target] = leaves[self.graph.inputs[name].target].clone()
        held = next(iter(self.model.parameters()), next(iter(leaves.values()), torch.empty(0)))
        with torch.device(held.device):  # tensors without operands are made where the model is
            values = self._run(leaves)
        count = len(self.graph.output_names)
        for (kind, name), value in zip(self.graph.updates, values[count:], strict=True):
            if kind == "input":
                with torch.no_grad():
                    given[self.graph.inputs[name].target].copy_(value)
        write_updates(self.graph, self.model, values[count:])
        return build_outputs(self.graph, values[:count])

    def _run(self, leaves: dict[str, torch.Tensor]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        changing = {name for kind, name in self.graph.updates if kind == "buffer"}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                env[node] = leaves[node.target]
            elif node.op == "get_attr":
                env[node] = tensor_of(self.model, str(node.target))
                if not changing.isdisjoint(info(node).names):
                    env[node] = env[node].clone()
            elif node.op == "call_function":
                env[node] = run(node, env)  # random ops draw from torch's own generator here
        return [env[n] for n in self.graph.output.args[0]]


def changing_buffers(graph: Graph) -> Registered:
    """The buffers that a call writes."""
    return Registered([name for kind, name in graph.updates if kind == "buffer"], "_buffers")


def write_updates(
    graph: Graph,
    model: torch.nn.Module,
    values: Sequence[torch.Tensor],
    buffers: Registered | None = None,
    with_stand_ins: bool = False,
) -> None:
    """Set on a model what forward would have set in a call; if asked for, stand-ins for the rest.

    `buffers` are the graph's `changing_buffers`, which many calls may share.
    """
    found = list(zip(graph.updates, values, strict=True))
    write_buffers(model, buffers or changing_buffers(graph), [value for (kind, _), value in found if kind == "buffer"])
    for (kind, name), value in found:
        if kind == "attribute":
            set_at(model, name, value.detach())
    for name, value in graph.sets:
        if with_stand_ins or not isinstance(value, NotKept):
            set_at(model, name, value)


def bind_inputs(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by placeholder name; a letter where structure or constants are not as traced."""
    leaves, spec = pytree.tree_flatten((args, in_traced_order(graph, kwargs)))
    if spec != graph.input_spec:
        raise BadInput(
            "the call does not have the structure that was traced",
            seen=str(spec),
            advice="the same arguments as meta_inputs, positional or by keyword as there",
        )
    tensors = {}
    traced = {node.target for node in graph.inputs.values()}
    for name, leaf in zip(graph.input_leaves, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(name, str) and name in traced:
            tensors[name] = leaf
        elif isinstance(leaf, torch.Tensor) or not (leaf is name or (type(leaf) is type(name) and leaf == name)):
            said = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise BadInput(
                f"a constant argument differs from the traced one: {said}, traced {name!r}",
                advice="trace with this value",
            )
    return tensors


def in_traced_order(graph: Graph, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments in the order of the traced call; as they are where the names differ."""
    order = graph.input_spec.child(1).context
    return {k: kwargs[k] for k in order} if set(order) == set(kwargs) else kwargs


def build_outputs(graph: Graph, tensors: list[Any]) -> Any:
    """The tensors in the structure of the model's own outputs."""
    return pytree.tree_unflatten(
        [tensors[leaf.position] if isinstance(leaf, Leaf) else leaf for leaf in graph.output_leaves], graph.output_spec
    )


def _line(node: fx.Node) -> str:
    """A node as one line of the printed graph."""
    about = info(node)
    types = ", ".join(map(str, about.outputs))
    if about.kind == "part":
        return f"{node.name}: {types} = {node.args[0]}[{node.args[1]}]"
    if node.op != "call_function":
        other_names = "".join(f" = {n}" for n in about.names[1:])
        wants = "  requires_grad" if about.outputs[0].requires_grad else ""
        return f"{node.name}: {types} = {about.kind} {about.key}{other_names}{wants}"
    arguments = ", ".join(f"{k}={v}" for k, v in node.kwargs.items())
    module = f"    # {about.module}" if about.module else ""
    region = f"  checkpoint {about.checkpoint[-1]}" if about.checkpoint else ""
    gradient = "  no gradient" if stops_gradients(node) else ""
    return f"{node.name}: {types} = {op_name(node)}({arguments}){module}{region}{gradient}"


def stops_gradients(node: fx.Node) -> bool:
    """Whether a node was recorded without a gradient, though its dtype and an operand have one."""
    outputs = info(node).outputs
    if op_name(node) == "detach" or any(t.requires_grad for t in outputs):
        return False
    may_have_one = any(t.may_have_gradient for t in outputs)
    return may_have_one and any(type_of(n).requires_grad for n in node.all_input_nodes)


def rows_of_batch(graph: Graph) -> int:
    """The rows of the batch: the commonest first dim of the inputs, the earliest on a tie; 1 without any."""
    first = Counter(type_of(n).shape[0] for n in graph.inputs.values() if type_of(n).shape)
    return first.most_common(1)[0][0] if first else 1
