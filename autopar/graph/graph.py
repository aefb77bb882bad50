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
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.letters import BadInput
from autopar.ops.entry import Op
from autopar.ops.local import Call

if TYPE_CHECKING:
    from autopar.graph.blocks import Repeat
    from autopar.tracer.hooks import IdleHook

SHORT = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """What is known of a tensor before it exists."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{SHORT.get(self.dtype, self.dtype)}{list(self.shape)}"

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def may_have_gradient(self) -> bool:
        """Does torch differentiate values of this dtype? Real and complex ones."""
        return self.torch_dtype.is_floating_point or self.torch_dtype.is_complex

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class Info:
    """What a node is, written when the node is made."""

    key: str  # its name in plans: `blocks.0.up/linear`, a parameter's or an input's name
    kind: str  # "parameter", "buffer", "input", "op", "part" (of an op with several outputs), "output"
    outputs: tuple[TensorType, ...]
    module: str = ""  # path of the module that ran it
    source: str = ""  # the user's line: `model.py:84, in forward`
    names: tuple[str, ...] = ()  # a parameter's names, all of them where it is tied
    random: int = -1  # which random op of the graph it is, in order; -1: none
    checkpoint: tuple[
        int, ...
    ] = ()  # the activation-checkpoint regions of the user's code that it stands in, outermost first


@dataclass(frozen=True, slots=True)
class Assume:
    """Assumptions that the caller declares, and the graph repeats.

    no_padding    attention masks are all ones, and a row is one sequence: Hugging Face models then use is_causal=True
                  and no mask tensors
    finite        no value is inf or nan
    branches      {"model.py:84": True}: the condition at that line of the user's code
    """

    no_padding: bool = False
    finite: bool = False
    branches: tuple[tuple[str, bool], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.branches, Mapping):
            object.__setattr__(self, "branches", tuple(self.branches.items()))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One training step's forward: what the tracer gives, and every later stage reads."""

    fx: fx.Graph = field(repr=False)
    input_spec: pytree.TreeSpec = field(repr=False)  # of (args, kwargs)
    input_leaves: tuple[Any, ...]  # a leaf of the inputs: its placeholder's name, or the constant itself
    output_spec: pytree.TreeSpec = field(repr=False)
    output_leaves: tuple[Any, ...]  # a leaf of the outputs: its position in the output node, or the constant
    output_names: tuple[str, ...]  # of the tensor leaves: "loss", "logits", "0"
    updates: tuple[
        tuple[str, str], ...
    ] = ()  # ("buffer", name) or ("input", name): their new values are the last entries of the output node
    assumptions: tuple[str, ...] = ()
    training: bool = True
    unread: tuple[
        tuple[str, TensorType], ...
    ] = ()  # ("parameter name" or "buffer name", its type): what the model holds and no op reads
    backward_from: tuple[str, ...] = ()  # outputs beside the loss that gradients arrive at
    idle: tuple[IdleHook, ...] = field(default=(), repr=False)  # calls of hooks that do nothing to it; not written

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.fx.nodes)

    @property
    def output(self) -> fx.Node:
        return self.fx.output_node()

    @property
    def parameters(self) -> dict[str, fx.Node]:
        return {info(n).key: n for n in self.nodes if info(n).kind == "parameter"}

    @property
    def inputs(self) -> dict[str, fx.Node]:
        return {info(n).key: n for n in self.nodes if info(n).kind == "input"}

    @property
    def result_names(self) -> tuple[str, ...]:
        """Of everything in the output node: the outputs, then what changes."""
        return (*self.output_names, *(f"{name}:new" for _, name in self.updates))

    @property
    def loss(self) -> int | None:
        """Which output is the scalar loss: the one called so, or the only scalar that wants a gradient."""
        scalars = [
            i
            for i, t in enumerate(info(self.output).outputs[: len(self.output_names)])
            if t.shape == () and t.requires_grad
        ]
        named = [i for i in scalars if self.output_names[i] == "loss"]
        return named[0] if named else scalars[0] if len(scalars) == 1 else None

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The outputs that gradients arrive at: the loss, and which are named; where there is no loss, all."""
        types, loss = info(self.output).outputs, self.loss
        return tuple(
            i
            for i, name in enumerate(self.output_names)
            if types[i].requires_grad and (loss in (None, i) or name in self.backward_from)
        )

    @property
    def is_random(self) -> bool:
        """Does it draw random numbers?"""
        return any(info(n).random >= 0 for n in self.nodes)

    def without_dropout(self) -> Graph:
        """The same, where dropout drops nothing.

        before    y = dropout(x, p=0.1)
        after     y = dropout(x, p=0.0)
        """
        for node in self.nodes:
            if info(node).kind == "op" and info(node).random >= 0:
                node.kwargs = {k: 0.0 if k in ("p", "dropout_p") else v for k, v in node.kwargs.items()}
                if "dropout" in op_name(node) and "p" not in node.kwargs:
                    node.kwargs = {**node.kwargs, "p": 0.0}  # its default is a half
        return self

    @property
    def digest(self) -> str:
        """A fingerprint of the ops, shapes, names and structures: a plan belongs to the graphs that have it."""
        said = (
            str(self),
            str(self.training),
            repr(self.input_leaves),
            repr(self.output_leaves),
            repr(self.output_names),
            *self.backward_from,
        )
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]

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
        from autopar.graph.blocks import repeated_blocks

        return repeated_blocks(self)

    def to_json(self) -> str:
        """The graph as text that `Graph.from_json` reads back."""
        from autopar.graph.archive import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Graph:
        """The graph that `to_json` wrote."""
        from autopar.graph.archive import from_json

        return from_json(text)

    def module(self, model: torch.nn.Module) -> Replay:
        """A module that re-executes the graph on the parameters of `model`."""
        return Replay(self, model)


class Replay(torch.nn.Module):
    """The graph, run node by node on a model's own parameters."""

    def __init__(self, graph: Graph, model: torch.nn.Module) -> None:
        super().__init__()
        self.graph, self.model = graph, model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = bind_inputs(self.graph, args, kwargs)
        given = dict(leaves)
        for kind, name in self.graph.updates:  # outputs and autograd hold the old value of what is written afterwards
            if kind == "input":
                leaves[self.graph.inputs[name].target] = leaves[self.graph.inputs[name].target].clone()
        held = next(iter(self.model.parameters()), next(iter(leaves.values()), torch.empty(0)))
        with torch.device(held.device):  # what comes from nothing is made where the model is
            values = self._run(leaves)
        count = len(self.graph.output_names)
        for (kind, name), value in zip(self.graph.updates, values[count:], strict=True):
            if kind == "input":
                with torch.no_grad():
                    given[self.graph.inputs[name].target].copy_(value)
            else:
                write_buffer(self.model, name, value)
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


def tensor_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter, a buffer, or a tensor that a module holds as an attribute, in a list or in a dict."""
    at: Any = model
    for part in name.split("."):
        at = (
            at[int(part)]
            if isinstance(at, (list, tuple))
            else next(v for k, v in at.items() if str(k) == part)
            if isinstance(at, dict)
            else getattr(at, part)
        )
    return at


def write_buffer(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a buffer its new value; one that is made while running gets a new tensor."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    held = getattr(owner, last, None)
    if isinstance(held, torch.Tensor) and held.shape == value.shape and held.dtype == value.dtype:
        with torch.no_grad():
            held.copy_(value)
    elif hasattr(owner, last):
        setattr(owner, last, value.detach())
    else:
        owner.register_buffer(last, value.detach())


def run(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Compute one op node. What was recorded without a gradient (under no_grad, say) has none here either."""
    kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
    result = (
        node.target.run(kwargs)
        if isinstance(node.target, Op)
        else node.target(*fx.map_arg(node.args, lambda n: env[n]), **kwargs)
    )
    about = node.meta.get("info")
    if (
        isinstance(result, torch.Tensor)
        and result.requires_grad
        and about is not None
        and not about.outputs[0].requires_grad
    ):
        return result.detach()
    return result


def bind_inputs(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by placeholder name. The structure must be the traced one."""
    leaves, spec = pytree.tree_flatten((args, in_traced_order(graph, kwargs)))
    if spec != graph.input_spec:
        raise BadInput(
            "the call does not have the structure that was traced",
            seen=str(spec),
            advice="the same arguments as meta_inputs, positional or by keyword as there",
        )
    for name, leaf in zip(graph.input_leaves, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) and not (leaf is name or leaf == name):
            raise BadInput(
                f"a constant argument differs from the traced one: {leaf!r}, traced {name!r}",
                advice="trace with this value",
            )
    return {name: leaf for name, leaf in zip(graph.input_leaves, leaves, strict=True) if isinstance(leaf, torch.Tensor)}


def in_traced_order(graph: Graph, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords come in any order."""
    order = graph.input_spec.child(1).context
    return {k: kwargs[k] for k in order} if set(order) == set(kwargs) else kwargs


def build_outputs(graph: Graph, tensors: list[Any]) -> Any:
    """The model's own output structure around these tensors."""
    return pytree.tree_unflatten(
        [tensors[leaf.position] if isinstance(leaf, Leaf) else leaf for leaf in graph.output_leaves], graph.output_spec
    )


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor among the outputs."""

    position: int


def fresh_key(graph: fx.Graph, base: str) -> str:
    """`base`, numbered where a node has that key already."""
    taken = graph.__dict__.setdefault("_autopar_keys", None)
    if taken is None:
        taken = graph.__dict__["_autopar_keys"] = {info(n).key: 0 for n in graph.nodes if "info" in n.meta}
    key = base
    while key in taken:
        taken[base] = taken.get(base, 0) + 1
        key = f"{base}.{taken[base]}"
    taken[key] = 0
    return key


def info(node: fx.Node) -> Info:
    return node.meta["info"]


def type_of(node: fx.Node) -> TensorType:
    return info(node).outputs[0]


def typed(arguments: Any) -> Any:
    """Arguments with types in the places of nodes."""
    if hasattr(arguments, "meta"):
        return type_of(arguments)
    if isinstance(arguments, Mapping):
        return {k: typed(v) for k, v in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(typed(v) for v in arguments)
    return arguments


def call_of(node: fx.Node) -> Call:
    """The call of an op, as its entry is asked about it."""
    about = info(node)
    return Call(op_name(node), typed(node.kwargs), about.outputs, about.random, about.source)


def op_name(node: fx.Node) -> str:
    return node.target.name if isinstance(node.target, Op) else info(node).kind


def _line(node: fx.Node) -> str:
    about = info(node)
    types = ", ".join(map(str, about.outputs))
    if about.kind == "part":
        return f"{node.name}: {types} = {node.args[0]}[{node.args[1]}]"
    if node.op != "call_function":
        return (
            f"{node.name}: {types} = {about.kind} {about.key}"
            + "".join(f" = {n}" for n in about.names[1:])
            + ("  requires_grad" if about.outputs[0].requires_grad else "")
        )
    arguments = ", ".join(f"{k}={v}" for k, v in node.kwargs.items())
    stops = (
        not any(t.requires_grad for t in about.outputs)
        and op_name(node) != "detach"
        and any(t.may_have_gradient for t in about.outputs)
        and any(type_of(n).requires_grad for n in node.all_input_nodes)
    )
    return (
        f"{node.name}: {types} = {op_name(node)}({arguments})"
        + (f"    # {about.module}" if about.module else "")
        + "".join(f"  checkpoint {i}" for i in about.checkpoint[-1:])
        + ("  no gradient" if stops else "")
    )
