"""Writes become values: which node stands for a tensor now.

A tensor object stands for a node. A write in place gives it a new one, and what shares its memory must follow:

    v = x[0];  v.add_(1)          w = x[1:]           as the model says it
    v' = add(x[0], 1)             x' = setitem(x, 0, v')          the write is carried to the base through each view's
    inverse w' = x'[1:]                                                   other views are read again, when they are next
    used

What is a view is known from storages, and only looked at once something is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import Info, TensorType
from autopar.ops.entry import OPS, Op

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


class Values:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.nodes: dict[int, fx.Node] = {}  # id(tensor) -> the node that stands for it
        self.alive: list[Tensor] = []  # ids stay unique while their tensors live
        self.recipes: dict[
            int, tuple[Op, dict[str, Any], int | None]
        ] = {}  # how a tensor was made: op, arguments, which output
        self.stale: set[int] = set()  # views of memory that has been written since
        self._sharing: dict[int, list[Tensor]] = {}  # storage -> its tensors
        self._indexed = 0
        self._held: set[int] | None = None  # the storages of the module's tensors

    def bind(self, tensor: Tensor, node: fx.Node, about: Info | None = None) -> None:
        if about is not None:
            node.meta["info"] = about
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def bind_all(self, result: Any, node: fx.Node, recipe: tuple[Op, dict[str, Any]]) -> None:
        """The outputs of an op: one tensor, or a tuple of them."""
        if isinstance(result, Tensor):
            self.bind(result, node)
            self.recipes[id(result)] = (*recipe, None)
            return
        if not isinstance(result, (list, tuple)) or not all(isinstance(leaf, Tensor) for leaf in result):
            raise self.recorder.letter(
                f"{recipe[0].name} gives a structure that is not captured", (), "tensors, or a flat tuple of them"
            )
        for i, (leaf, part) in enumerate(zip(result, self.recorder.split(node), strict=True)):
            if id(leaf) not in self.nodes:  # an operand handed through stays what it is
                self.bind(leaf, part)
                self.recipes[id(leaf)] = (*recipe, i)

    def node(self, tensor: Tensor) -> fx.Node | None:
        """The node that stands for a tensor now; views of memory that was written are read again."""
        if id(tensor) in self.stale:
            self.stale.discard(id(tensor))
            op, arguments, index = self.recipes[id(tensor)]
            blind = (
                not self.nodes[id(tensor)].meta["info"].outputs[0].requires_grad and tensor.grad_fn is None
            )  # it was taken under no_grad
            with torch.set_grad_enabled(torch.is_grad_enabled() and not blind):
                made = self.recorder.emit(
                    op,
                    arguments,
                    (TensorType.of(tensor),) if index is None else [TensorType.of(t) for t in self._siblings(tensor)],
                )
            self.nodes[id(tensor)] = made if index is None else self.recorder.split(made)[index]
        return self.nodes.get(id(tensor))

    def _siblings(self, part: Tensor) -> list[Tensor]:
        """All outputs of the op that made `part`."""
        arguments = self.recipes[id(part)][1]
        return [t for t in self.alive if id(t) in self.recipes and self.recipes[id(t)][1] is arguments]

    # -- memory

    def _family(self, tensor: Tensor) -> list[Tensor]:
        """Every known tensor on the memory of this one."""
        for other in self.alive[self._indexed :]:
            self._sharing.setdefault(_storage(other), []).append(other)
        self._indexed = len(self.alive)
        return self._sharing.get(_storage(tensor), [])

    def shares_storage(self, tensor: Tensor) -> bool:
        """Is this the memory of a tensor of the model, its inputs, or a result so far?"""
        if self._held is None:
            self._held = {_storage(held) for held in self.recorder.held}
        return _storage(tensor) in self._held or bool(self._family(tensor))

    def overlaps(self, other: Tensor, target: Tensor) -> bool:
        """Do two tensors lie on one memory, otherwise than as one and the same view?"""
        if _storage(other) != _storage(target):
            return False
        return (other.shape, other.stride(), other.storage_offset()) != (
            target.shape,
            target.stride(),
            target.storage_offset(),
        )

    def is_that_view(self, whole: Tensor, index: Any, value: Tensor) -> bool:
        """Is `value` the view of `whole` at this index?"""
        if _storage(value) != _storage(whole):
            return False
        self.recorder.inside = "index"  # a look, not the model's own call
        try:
            view = whole[index]
        finally:
            self.recorder.inside = None
        return _storage(view) == _storage(whole) and not self.overlaps(value, view)

    def is_shared(self, tensor: Tensor) -> bool:
        """Does another known tensor lie on this memory, or does it belong to the model or its inputs?"""
        node = self.recorder.node(tensor)
        return node.op != "call_function" or any(t is not tensor for t in self._family(tensor))

    def rename(self, tensor: Tensor, node: fx.Node) -> None:
        """The tensor stands for `node`, and its memory has no other name."""
        self.recorder.hooks.effects += 1
        self.nodes[id(tensor)] = node
        self.recipes.pop(id(tensor), None)

    def _parent(self, tensor: Tensor) -> Tensor | None:
        """The tensor that this one is a view of."""
        if id(tensor) not in self.recipes:
            return None
        from autopar.tracer.recorder import tensors_in

        return next(
            (
                t
                for t in tensors_in((), self.recipes[id(tensor)][1])
                if t is not tensor and _storage(t) == _storage(tensor)
            ),
            None,
        )

    # -- writes

    def refuse_write(self, target: Tensor, name: str) -> None:
        """Writes that a graph of values cannot hold."""
        recorder, base = self.recorder, target
        recorder.node(target)
        while (parent := self._parent(base)) is not None:
            base = parent
        if id(base) in recorder.sharing:
            raise recorder.letter(
                f"{name} writes to memory that another tensor of the model or its inputs shares",
                (target,),
                "tensors of their own: .clone()",
            )
        if recorder.kinds.get(id(base)) == "parameter":
            raise recorder.letter(
                f"{name} writes to the parameter {recorder.attributes[id(base)][0]} inside the model",
                (target,),
                "a buffer, or a new tensor",
            )
        if (
            target.requires_grad
            and not torch.is_grad_enabled()
            and not (target.is_leaf and (base is target or not base.requires_grad))
        ):  # a parameter made in forward has no history
            raise recorder.letter(
                f"{name} writes under no_grad to a value that carries a gradient: the gradient would not know",
                (target,),
                "the form that returns a new tensor",
            )

    def write(self, target: Tensor, value: fx.Node) -> None:
        """`target` stands for `value` from here on, and so does every view of its memory."""
        self.recorder.hooks.effects += 1
        family, path, at = self._family(target), {id(target)}, target
        self.nodes[id(target)] = value
        self.stale.discard(id(target))
        while (parent := self._parent(at)) is not None:
            value = self._put_back(parent, at, value)
            self.nodes[id(parent)] = value
            self.stale.discard(id(parent))
            path.add(id(parent))
            at = parent
        self.stale |= {id(t) for t in family if id(t) not in path}

    def _put_back(self, parent: Tensor, view: Tensor, value: fx.Node) -> fx.Node:
        """The parent with `value` where `view` reads it: the inverse of one view op."""
        op, arguments, index = self.recipes[id(view)]
        recorder, type_ = self.recorder, TensorType.of(parent)
        before = recorder.node(parent)

        def emit(name: str, **how: Any) -> fx.Node:
            return recorder.emit(OPS[name], how, (type_,))

        if op.name in ("identity", "contiguous", "clone"):
            return value
        if op.name == "detach":
            if parent.requires_grad:
                raise recorder.letter(
                    "a value that carries a gradient is written through a detached view: the gradient would not know",
                    (view,),
                    "the form that returns a new tensor",
                )
            return value
        if op.name == "view":
            return emit("view", input=value, size=tuple(parent.shape))
        if op.name == "t":
            return emit("t", input=value)
        if op.name == "transpose":
            return emit("transpose", input=value, dim0=arguments["dim0"], dim1=arguments["dim1"])
        if op.name == "permute":
            rank = parent.dim()
            turned = [d % rank for d in arguments["dims"]]
            return emit("permute", input=value, dims=tuple(turned.index(d) for d in range(rank)))
        if op.name == "narrow":
            return emit(
                "slice_scatter",
                input=before,
                src=value,
                dim=arguments["dim"],
                start=arguments["start"] % max(1, parent.shape[arguments["dim"]]),
                end=arguments["start"] % max(1, parent.shape[arguments["dim"]]) + arguments["length"],
            )
        if op.name == "select":
            return emit("select_scatter", input=before, src=value, dim=arguments["dim"], index=arguments["index"])
        if op.name == "index":
            return emit("setitem", input=before, index=arguments["index"], value=value)
        if op.name == "split" and index is not None:
            start = sum(arguments["sections"][:index])
            return emit(
                "slice_scatter",
                input=before,
                src=value,
                dim=arguments.get("dim", 0),
                start=start,
                end=start + arguments["sections"][index],
            )
        if op.name == "unbind" and index is not None:
            return emit("select_scatter", input=before, src=value, dim=arguments.get("dim", 0), index=index)
        if op.name == "diagonal":
            return emit(
                "diagonal_scatter", input=before, src=value, **{k: v for k, v in arguments.items() if k != "input"}
            )
        if op.name == "to":  # a cast to the dtype it has
            return value
        raise recorder.letter(f"a view by {op.name} is written in place", (view,), "the form that returns a new tensor")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
