"""Turn writes in place into values: track which node a tensor stands for.

A tensor object stands for a node. A write in place gives it a new one, and tensors that share its memory must follow:

    v = x[0];  w = x[1:];  v.add_(1)    as the model says it
    v' = add(x[0], 1)
    x' = setitem(x, 0, v')              the write is carried to the base through each view's inverse (inverses.py)
    w' = x'[1:]                         other views are read again, when they are next used

Views are recognised by their storage, once something is written.

The fake tensors have the history of autograd that the model's own would have, so they say where a gradient flows. A
node says it too, and both must agree: a copy under no_grad, through .data or through .detach() is a `detach`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph import walks
from autopar.graph.graph import TensorType, type_of
from autopar.ops.entry import OPS, Op, facts_of
from autopar.ops.inverses import WrittenView
from autopar.tracer.call import tensors_in
from autopar.tracer.chosen import ChosenRows
from autopar.tracer.hits import Rounds

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor was made: an op, its arguments, and which of its outputs the tensor is."""

    op: Op
    arguments: dict[str, Any]
    output: int | None = None  # None: the only one


class Values:
    """The nodes that tensors stand for."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.nodes: dict[int, fx.Node] = {}  # id(tensor) -> the node that stands for it
        self.alive: list[Tensor] = []  # ids stay unique while their tensors live
        self.recipes: dict[int, Recipe] = {}  # id(tensor) -> how it was made
        self.stale: set[int] = set()  # views of memory that has been written since
        # id(view) -> the index that says where it lies, and its dim: on fakes two such views look like one
        self.looked_up: dict[int, tuple[fx.Node, int]] = {}
        self.chosen = ChosenRows(recorder, Rounds(recorder))
        self._sharing: dict[int, list[Tensor]] = {}  # storage -> its tensors
        self._indexed = 0
        self._held: set[int] | None = None  # the storages of the module's tensors

    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """Let a tensor stand for a node from here on."""
        self._stand_for(tensor, node)
        self.alive.append(tensor)

    def _stand_for(self, tensor: Tensor, node: fx.Node) -> None:
        assert _alike(TensorType.of(tensor), type_of(node)), (tensor, node, type_of(node))
        self.nodes[id(tensor)] = node
        self.stale.discard(id(tensor))

    def bind_all(self, result: Any, node: fx.Node, recipe: tuple[Op, dict[str, Any]]) -> None:
        """Bind the outputs of an op: one tensor, or a tuple of tensors."""
        if isinstance(result, Tensor):
            self.bind(result, node)
            self.recipes[id(result)] = Recipe(*recipe)
            return
        if not isinstance(result, (list, tuple)) or not all(isinstance(leaf, Tensor) for leaf in result):
            raise self.recorder.letter(
                f"{recipe[0].name} gives a structure that is not captured", (), "tensors, or a flat tuple of them"
            )
        for i, (leaf, part) in enumerate(zip(result, self.recorder.program.split(node), strict=True)):
            if id(leaf) not in self.nodes:  # an operand handed through stays what it is
                self.bind(leaf, part)
                self.recipes[id(leaf)] = Recipe(*recipe, i)

    def node(self, tensor: Tensor) -> fx.Node | None:
        """The node that a tensor stands for now, or None; views of memory that was written are read again."""
        if id(tensor) in self.stale:
            self._stand_for(tensor, self._read_again(tensor))
        node = self.nodes.get(id(tensor))
        self.chosen.refuse([tensor], "the chosen rows are used where each of them is not by itself")
        if node is None or type_of(node).requires_grad == self.has_gradient(tensor):
            return node
        detached = self.recorder.detached_below
        if type_of(node).requires_grad:  # copied under no_grad, through .data or through .detach()
            type_ = replace(type_of(node), requires_grad=False)
            node = self.nodes[id(tensor)] = self.recorder.emit(OPS["detach"], {"input": node}, (type_,))
        elif _is_trained(tensor, self.recorder.program.origins) and walks.ancestors([node]).isdisjoint(detached):
            raise self.recorder.letter(
                "a value has a gradient in the model and none in the graph: its memory was written behind autograd",
                (tensor,),
                "the form that returns a new tensor, in the place of a write through .detach()",
            )
        return node

    def has_gradient(self, tensor: Tensor) -> bool:
        """Whether a gradient flows on through a tensor.

        A view taken under no_grad says that it wants one where its base does, and hands none on.
        """
        return tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in self.recorder.program.origins)

    def _read_again(self, tensor: Tensor) -> fx.Node:
        """Emit the op that made a view once more, on the memory as it is now."""
        recipe = self.recipes[id(tensor)]
        outputs = [tensor] if recipe.output is None else self._siblings(tensor)
        arguments = self.recorder.resolved(recipe.arguments)
        read = [n for n in pytree.tree_leaves(arguments) if isinstance(n, fx.Node)]
        flows = recipe.op.name != "detach" and any(type_of(n).requires_grad for n in read)
        types = [replace(TensorType.of(t), requires_grad=flows and self.has_gradient(t)) for t in outputs]
        with torch.enable_grad():  # the tensor says whether a gradient flows, and not where it is read
            made = self.recorder.program.add_op(recipe.op, arguments, types, draws=False)
        return made if recipe.output is None else self.recorder.program.split(made)[recipe.output]

    def _siblings(self, part: Tensor) -> list[Tensor]:
        """All outputs of the op that made `part`."""
        arguments = self.recipes[id(part)].arguments
        return [t for t in self.alive if id(t) in self.recipes and self.recipes[id(t)].arguments is arguments]

    # -- memory

    def _family(self, tensor: Tensor) -> list[Tensor]:
        """Every known tensor that shares memory with this one."""
        for other in self.alive[self._indexed :]:
            self._sharing.setdefault(storage_of(other), []).append(other)
        self._indexed = len(self.alive)
        return self._sharing.get(storage_of(tensor), [])

    def shares_storage(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with one of the model, its inputs, or a result so far."""
        if self._held is None:
            self._held = {storage_of(held) for held in self.recorder.names.fakes}
        return storage_of(tensor) in self._held or bool(self._family(tensor))

    def places_of(self, tensor: Tensor | None) -> list[tuple[fx.Node, int]]:
        """The looked-up indices that say where a tensor lies, from its views outward, with their dims."""
        found = []
        while tensor is not None:
            if id(tensor) in self.looked_up:
                found.append(self.looked_up[id(tensor)])
            tensor = self.parent(tensor)
        return found

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether another known tensor shares this memory, or the model or its inputs own it."""
        node = self.recorder.node(tensor)
        return node.op != "call_function" or any(t is not tensor for t in self._family(tensor))

    def rename(self, tensor: Tensor, node: fx.Node) -> None:
        """Let a tensor stand for `node`, where no other tensor shares its memory."""
        self.recorder.hooks.effects += 1
        self._stand_for(tensor, node)
        self.recipes.pop(id(tensor), None)

    def parent(self, tensor: Tensor) -> Tensor | None:
        """The tensor that this one is a view of, or None."""
        if id(tensor) not in self.recipes:
            return None
        for operand in tensors_in((), self.recipes[id(tensor)].arguments):
            if operand is not tensor and storage_of(operand) == storage_of(tensor):
                return operand
        return None

    # -- writes

    def write(self, target: Tensor, value: fx.Node) -> None:
        """Let `target` stand for `value` from here on, and update every view of its memory."""
        self.recorder.hooks.effects += 1
        family = self._family(target)
        path = {id(target)}
        at = target
        self._stand_for(target, value)
        while (parent := self.parent(at)) is not None:
            value = self._put_back(parent, at, value)
            self._stand_for(parent, value)
            path.add(id(parent))
            at = parent
        self.stale |= {id(t) for t in family if id(t) not in path}

    def _put_back(self, parent: Tensor, view: Tensor, value: fx.Node) -> fx.Node:
        """The parent with `value` where `view` reads it, by the inverse of one view op."""
        recipe = self.recipes[id(view)]
        recorder = self.recorder
        is_known = id(parent) in self.nodes and id(parent) not in self.stale
        before = self.nodes[id(parent)] if is_known else recorder.node(parent)
        type_ = replace(type_of(before), requires_grad=type_of(before).requires_grad or type_of(value).requires_grad)

        def emit(name: str, **how: Any) -> fx.Node:
            return recorder.emit(OPS[name], how, (type_,))

        if recipe.op.name == "detach" and parent.requires_grad:
            raise recorder.letter(
                "a value that carries a gradient is written through a detached view: the gradient would not know",
                (view,),
                "the form that returns a new tensor",
            )
        inverse = facts_of(recipe.op.name).inverse
        written = WrittenView(recipe.arguments, recipe.output, tuple(parent.shape), before, value, emit)
        whole = inverse(written) if inverse is not None else None
        if whole is None:
            raise recorder.letter(
                f"a view by {recipe.op.name} is written in place", (view,), "the form that returns a new tensor"
            )
        return whole

    def close(self) -> list[weakref.ref[Tensor]]:
        """Release all tensors; the returned references show which of them something else still holds."""
        made = [weakref.ref(t) for t in self.alive]
        self.alive.clear()
        self.recipes.clear()
        self.looked_up.clear()
        self.chosen.close()
        self._sharing.clear()
        return made


def overlaps(other: Tensor, target: Tensor) -> bool:
    """Whether two tensors may share elements, but are not the same view of them.

    They share none where one is empty, where one ends before the other begins, or where all steps between elements are
    multiples of a number and the beginnings lie another distance apart.
    """
    if storage_of(other) != storage_of(target) or is_same_view(other, target):
        return False
    if 0 in (other.numel(), target.numel()):
        return False
    if other.element_size() != target.element_size():
        return True
    (first, last), (begin, end) = _ends(other), _ends(target)
    if last < begin or end < first:
        return False
    moved = [step for t in (other, target) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]
    return (first - begin) % (math.gcd(*moved) or 1) == 0


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors show the same elements of one memory, in the same order."""
    return storage_of(one) == storage_of(other) and _extent(one) == _extent(other)


def _ends(tensor: Tensor) -> tuple[int, int]:
    """The places in memory, in elements, of the first and the last element of a tensor."""
    begin = tensor.storage_offset()
    return begin, begin + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _is_trained(tensor: Tensor, origins: Container[int]) -> bool:
    """Whether the gradient of a tensor reaches one of these: an input or a tensor of the module."""
    seen = set()
    pending = [tensor.grad_fn]
    while pending:
        step = pending.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if id(getattr(step, "variable", None)) in origins:
            return True
        pending += [before for before, _ in step.next_functions]
    return False


def _alike(one: TensorType, other: TensorType) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides and offset of a tensor: the part of its memory that it shows."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
