"""The fx graph that a capture writes: inputs and attributes first, then ops in the order of their calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import Info, TensorType, info
from autopar.ops.entry import Op
from autopar.tracer.place import Whereabouts, source


class Recording:
    """The nodes written so far, each with its `Info`."""

    def __init__(self, place: Whereabouts) -> None:
        self.graph = fx.Graph()
        self.place = place
        self.top: fx.Node | None = None  # the last input or attribute: they stand together on top
        self.counts: dict[str, int] = {}  # of each op in each module, the number of the last one
        self.own_names: dict[str, Callable[..., Any]] = {}  # names of ops without an entry, and the functions they name
        self.origins: dict[int, fx.Node] = {}  # id(tensor) -> the node that it entered as

    def add_input(self, tensor: Tensor, name: str) -> fx.Node:
        """Add a placeholder for an input tensor."""
        node = self.top = self.origins[id(tensor)] = self.graph.placeholder(identifier(name))
        node.meta["info"] = Info(name, "input", (TensorType.of(tensor),))
        return node

    def add_attribute(self, tensor: Tensor, kind: str, names: tuple[str, ...]) -> fx.Node:
        """Add a parameter or buffer, under all its names."""
        after = self.graph.inserting_after(self.top) if self.top is not None else self.graph.inserting_before()
        with after:
            node = self.graph.create_node("get_attr", names[0], name=identifier(names[0]))
        self.top = self.origins[id(tensor)] = node
        node.meta["info"] = Info(names[0], kind, (TensorType.of(tensor),), names=names)
        return node

    def add_op(self, op: Op, arguments: Any, outputs: Sequence[TensorType | Tensor], draws: bool) -> fx.Node:
        """Add an op on nodes, with its place in the program and in the source."""
        if op.signature is None:
            op = self._apart(op)
        name = identifier(f"{self.place.module}.{op.name}")
        node = self.graph.create_node("call_function", op, (), arguments, name=name)
        types = tuple(o if isinstance(o, TensorType) else TensorType.of(o) for o in outputs)
        if not torch.is_grad_enabled():  # a view taken under no_grad says that it wants a gradient, and gives none
            types = tuple(replace(t, requires_grad=False) for t in types)
        node.meta["info"] = Info(
            self._key(op.name),
            "op",
            types,
            self.place.module,
            source(),
            random=0 if draws else -1,
            checkpoint=tuple(self.place.regions),
        )
        return node

    def split(self, node: fx.Node) -> list[fx.Node]:
        """Add the parts of an op with several outputs."""
        about, parts = info(node), []
        for i, type_ in enumerate(about.outputs):
            part = self.graph.create_node("call_function", operator.getitem, (node, i), name=f"{node.name}_{i}")
            part.meta["info"] = replace(about, key=f"{about.key}[{i}]", kind="part", outputs=(type_,), random=-1)
            parts.append(part)
        return parts

    def add_output(self, nodes: Sequence[fx.Node], tensors: Sequence[Tensor]) -> None:
        """Add the output node; outputs have gradients where both tensors and nodes have them."""
        types = []
        for tensor, node in zip(tensors, nodes, strict=True):
            wants = tensor.requires_grad and info(node).outputs[0].requires_grad
            types.append(replace(TensorType.of(tensor), requires_grad=wants))
        output = self.graph.output(tuple(nodes))
        output.meta["info"] = Info("out", "output", tuple(types))

    def inputs(self) -> list[fx.Node]:
        """The placeholders."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def _apart(self, op: Op) -> Op:
        """An op without an entry, renamed where another function of the program has its name."""
        name = op.name
        while self.own_names.setdefault(name, op.call) != op.call:
            name += "'"
        return replace(op, name=name)

    def _key(self, op: str) -> str:
        """A node's name in plans: module path and op, numbered where the op occurs there again."""
        base = f"{self.place.module}/{op}"
        count = self.counts[base] = self.counts.get(base, -1) + 1
        return f"{base}.{count}" if count else base


def identifier(name: str) -> str:
    """A name turned into a Python identifier."""
    return "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
