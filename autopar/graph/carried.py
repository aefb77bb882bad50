"""Values that one call leaves for the next, as the keys and values of a cache.

A `Carried` object is a structure of pytree, so its tensors are inputs of a call and outputs of it. An output that has
the same place in the object as an input is the new value of that input: both have one sharding, and the new value is
written where the old one was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.graph import walks
from autopar.graph.blocks import is_fan_out
from autopar.graph.nodes import info, op_name

if TYPE_CHECKING:
    from autopar.graph.graph import Graph


class Carried(ABC):
    """An object whose tensors are carried from call to call; its class is registered with torch's pytree.

    Leaves that are called as one of `told` are inputs like any other: the object tells them to each call.
    """

    told: frozenset[str] = frozenset()

    @abstractmethod
    def take_over(self, left: Any) -> None:
        """Hold the tensors that a call has left in another object of this class."""


def is_carried(value: Any) -> bool:
    return isinstance(value, Carried)


def carried_in(tree: Any) -> list[Carried]:
    """The carried objects of a structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=is_carried) if is_carried(leaf)]


def places_in(tree: Any) -> list[str]:
    """For each leaf of a structure, its place among carried objects; "" for a leaf of none."""
    found: list[str] = []
    count = 0
    for leaf in pytree.tree_leaves(tree, is_leaf=is_carried):
        if not is_carried(leaf):
            found.append("")
            continue
        paths = [path for path, _ in pytree.tree_flatten_with_path(leaf)[0]]
        found += ["" if _last(path) in leaf.told else f"{count}{pytree.keystr(path)}" for path in paths]
        count += 1
    return found


def _last(path: Sequence[Any]) -> str:
    return str(getattr(path[-1], "key", ""))


def pairs_of(inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The outputs that are carried on, each with the input that brought its old value, or "".

    Both are given as names, each with its place among carried objects.
    """
    brought = {place: name for name, place in inputs if place}
    return tuple((name, brought.get(place, "")) for name, place in outputs if place)


def handed_back(outputs: Any, given: Any) -> Any:
    """The outputs, in which the carried objects of a call hold what it has left."""
    mine = iter(carried_in(given))
    own = next(mine, None)
    if own is None:
        return outputs
    leaves, structure = pytree.tree_flatten(outputs, is_leaf=is_carried)
    for i, leaf in enumerate(leaves):
        if own is not None and is_carried(leaf):
            own.take_over(leaf)
            leaves[i] = own
            own = next(mine, None)
    return pytree.tree_unflatten(leaves, structure)


def brought_by(graph: Graph) -> dict[str, str]:
    """Names of the inputs that bring what a call carries on, each with the output that is its new value."""
    return {given: name for name, given in graph.carried if given}


def written_in_place(graph: Graph) -> dict[fx.Node, fx.Node]:
    """Ops that make the new value of an input by writing to the old one, which nothing else reads."""
    results = dict(zip(graph.output_names, graph.output.args[0], strict=False))
    inputs = graph.inputs
    found = {}
    for given, name in brought_by(graph).items():
        made = walks.origin(results[name], _is_identity)
        if op_name(made) == "index_copy" and _is_only_reader(made, inputs[given]):
            found[made] = inputs[given]
    return found


def _is_identity(node: fx.Node) -> bool:
    return node.op == "call_function" and is_fan_out(node)


def _is_only_reader(op: fx.Node, value: fx.Node) -> bool:
    """Whether an op alone reads a value, as its first operand and through identities."""
    readers = list(value.users)
    while len(readers) == 1 and _is_identity(readers[0]):
        value = readers[0]
        readers = list(value.users)
    return readers == [op] and op.kwargs["input"] is value and list(op.kwargs.values()).count(value) == 1


def without_gradients(graph: Graph) -> Graph:
    """The graph of calls without gradients: values lose theirs, in place, and outputs tell the loss.

    before    up_weight: f32[8, 8] = parameter up.weight  requires_grad
    after     up_weight: f32[8, 8] = parameter up.weight
    """
    for node in graph.nodes:
        about = info(node)
        if node.op != "output":
            types = tuple([replace(type_, requires_grad=False) for type_ in about.outputs])
            node.meta["info"] = replace(about, outputs=types)
    return replace(graph, has_gradients=False, backward_from=())
