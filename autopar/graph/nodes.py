"""Nodes of a `Graph`: the typed entry of each in `node.meta["info"]`, and functions that read one node.

A node is an `fx.Node`; its entry says what it is, which tensors it gives, and where in the user's program it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.fx as fx

from autopar.ops.entry import Op
from autopar.ops.local import OpCall

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
    """Shape and dtype of a tensor that may not exist yet, and whether it wants a gradient."""

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
        """Whether torch differentiates values of this dtype: it does real and complex ones."""
        return self.torch_dtype.is_floating_point or self.torch_dtype.is_complex

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class Info:
    """What a graph knows about a node, written when the node is made."""

    key: str  # name in plans: `blocks.0.up/linear`, a parameter's or an input's name
    kind: str  # "parameter", "buffer", "input", "op", "part" (of an op with several outputs), "output"
    outputs: tuple[TensorType, ...]
    module: str = ""  # path of the module that ran it
    source: str = ""  # the user's line: `model.py:84, in forward`
    names: tuple[str, ...] = ()  # a parameter's names, all of them where it is tied
    random: int = -1  # index among the random ops of the graph, in order; -1: the op draws nothing
    checkpoint: tuple[int, ...] = ()  # the user's activation-checkpoint regions around it, outermost first
    # A random op of one micro-batch: its strategy on the axis of time, and the number of turns.
    in_time: tuple[str, int] = ("", 1)
    chunks: int = 1  # chunks of rows in which it runs, forward and backward of each together


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor among the results of a graph."""

    position: int


def fresh_key(graph: fx.Graph, base: str) -> str:
    """A key that no node has yet: `base`, or `base` with a number; it counts as taken from then on."""
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


def is_value(argument: Any) -> TypeGuard[fx.Node]:
    """Is an argument of an op a value of the graph, and no number or text?"""
    return isinstance(argument, fx.Node)


def wants_gradient(argument: Any) -> bool:
    """Is an argument of an op a value of which backward makes a gradient?"""
    return is_value(argument) and type_of(argument).requires_grad


def tensor_operands(op: fx.Node) -> list[fx.Node]:
    """The values that an op takes, in the order of its signature."""
    return [argument for argument in op.target.operands(op.kwargs) if is_value(argument)]


def typed(arguments: Any) -> Any:
    """Arguments with tensor types in the places of nodes."""
    if is_value(arguments):
        return type_of(arguments)
    if isinstance(arguments, Mapping):
        return {k: typed(v) for k, v in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(typed(v) for v in arguments)
    return arguments


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of an op with its text; calls that are written alike are equal."""

    op: Any
    arguments: dict[str, Any] = field(compare=False)  # types stand in the places of tensors
    written: str  # the same as text
    operands: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @property
    def types(self) -> tuple[TensorType, ...]:
        return (*self.operands, *self.outputs)

    @property
    def is_trained(self) -> bool:
        return any(t.requires_grad for t in self.outputs)


def call_of(node: fx.Node) -> OpCall:
    """The call of a node's op, with types in the places of tensors: what an op's entry is asked about."""
    about = info(node)
    return OpCall(op_name(node), typed(node.kwargs), about.outputs, about.random, about.source)


def op_name(node: fx.Node) -> str:
    return node.target.name if isinstance(node.target, Op) else info(node).kind


def run(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """The result of an op node on the values in `env`; without a gradient if recorded under no_grad."""
    kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
    if isinstance(node.target, Op):
        result = node.target.run(kwargs)
    else:
        result = node.target(*fx.map_arg(node.args, lambda n: env[n]), **kwargs)
    about = node.meta.get("info")
    is_blind = about is not None and not about.outputs[0].requires_grad
    if is_blind and isinstance(result, torch.Tensor) and result.requires_grad:
        return result.detach()
    return result
