"""The fx graph that a capture writes: inputs and attributes first, then ops in the order of their calls.

Where this order may depend on a set, it is another one in the end (`loops.py`), and all names go by that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph import walks
from autopar.graph.graph import Info, TensorType, info
from autopar.ops.entry import Op
from autopar.runtime.private import Namespace
from autopar.tracer.loops import Order, Place, Stack
from autopar.tracer.place import Whereabouts, source


class Recording:
    """The nodes written so far, each with its `Info`."""

    def __init__(self, place: Whereabouts) -> None:
        self.graph = fx.Graph()
        self.place = place
        self.top: fx.Node | None = None  # the last input or attribute: they stand together on top
        self.counts: dict[str, int] = {}  # module and op -> number of the last such node
        self.own_names: dict[str, Callable[..., Any]] = {}  # names of ops without an entry, and the functions they name
        self.origins: dict[int, fx.Node] = {}  # id(tensor) -> the node that it entered as
        self.stack = Stack()
        self.places: dict[fx.Node, Place] = {}  # op -> its place in loops and calls

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
        node = self.graph.create_node("call_function", op, (), arguments, name=_name(self.place.module, op))
        self.places[node] = self.stack.place()
        types = tuple(o if isinstance(o, TensorType) else TensorType.of(o) for o in outputs)
        if not torch.is_grad_enabled():  # a view taken under no_grad says that it wants a gradient, and gives none
            types = tuple(replace(t, requires_grad=False) for t in types)
        node.meta["info"] = Info(
            self._key(self.place.module, op),
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
        about = info(node)
        parts = []
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
        taken = {info(node).key for node in self.graph.nodes if node.op in ("placeholder", "get_attr")}
        key = "out"
        while key in taken:  # a parameter, a buffer or an input may have the name
            key += "_"
        output = self.graph.output(tuple(nodes))
        output.meta["info"] = Info(key, "output", tuple(types))

    def inputs(self) -> list[fx.Node]:
        """The placeholders."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def arrange(self) -> None:
        """Put the ops in an order that does not go by that of a set."""
        order = Order(list(self.places), self.places, self.graph.output_node())
        if order.is_free:  # even if it is the recorded order: where a set has another one, all names are given anew
            self._rearrange(order.ops)

    def _rearrange(self, ops: Sequence[fx.Node]) -> None:
        """Put ops in this order, named and numbered as if they were recorded in it."""
        names = self.graph._graph_namespace = Namespace()
        self.counts.clear()
        self.own_names.clear()
        for node in self.inputs():
            node.name = names.create_name(str(node.target), node)
        attributes = self.graph.find_nodes(op="get_attr")
        regions: dict[int, int] = {}
        for node in ops:
            for operand in (n for n in walks.operands(node) if n in attributes):
                attributes.remove(operand)
                self._put_attribute(operand, ops[0])
            self._put_op(node, regions)
        for node in attributes:
            self._put_attribute(node, ops[0])

    def _put_attribute(self, node: fx.Node, before: fx.Node) -> None:
        before.prepend(node)
        node.name = self.graph._graph_namespace.create_name(identifier(str(node.target)), node)

    def _put_op(self, node: fx.Node, regions: dict[int, int]) -> None:
        """Put an op last, with its parts; `regions` are new numbers of checkpoint regions."""
        op = node.target
        about = info(node)
        end = self.graph.output_node()
        names = self.graph._graph_namespace
        if op.signature is None:
            node.target = op = self._apart(replace(op, name=op.name.rstrip("'")))
        end.prepend(node)
        node.name = names.create_name(_name(about.module, op), node)
        checkpoint = tuple(regions.setdefault(region, len(regions)) for region in about.checkpoint)
        about = node.meta["info"] = replace(about, key=self._key(about.module, op), checkpoint=checkpoint)
        for part in walks.parts(node):
            end.prepend(part)
            part.name = names.create_name(f"{node.name}_{part.args[1]}", part)
            part.meta["info"] = replace(info(part), key=f"{about.key}[{part.args[1]}]", checkpoint=checkpoint)

    def _apart(self, op: Op) -> Op:
        """An op without an entry, renamed where another function of the program has its name."""
        name = op.name
        while self.own_names.setdefault(name, op.call) != op.call:
            name += "'"
        return replace(op, name=name)

    def _key(self, module: str, op: Op) -> str:
        """A node's name in plans: module path and op, numbered where the op occurs there again."""
        base = f"{module}/{op.name}"
        count = self.counts[base] = self.counts.get(base, -1) + 1
        return f"{base}.{count}" if count else base


def _name(module: str, op: Op) -> str:
    return identifier(f"{module}.{op.name}")


def identifier(name: str) -> str:
    """A name turned into a Python identifier."""
    return "".join(c if c.isalnum() else "_" for c in name).strip("_") or "value"
