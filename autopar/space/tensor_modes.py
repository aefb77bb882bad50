"""Tensor modes of presets (`presets.py`): how Megatron, 2d, 2.5d and 3d cut the parameters of a graph, or styles do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.nodes import is_value
from autopar.letters import BadPreset
from autopar.runtime.bodies import HALVES, ONE, PAIRS
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import every_part_holds_something


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """How a tensor mode cuts a parameter in storage and in use, and whether it is gathered again for backward."""

    stored: tuple[str, ...]  # "S(0)@tp", one an axis
    used: tuple[str, ...]
    regathered: bool = False

    def beside(self, others: tuple[str, ...]) -> ParameterCut:
        """The same cut by others first, and only by them along their axes."""
        axes = {_axis(text) for text in others}
        stored = [text for text in self.stored if _axis(text) not in axes]
        used = [text for text in self.used if _axis(text) not in axes]
        return ParameterCut((*others, *stored), (*others, *used), self.regathered)

    def dims(self) -> set[int]:
        """Dims that are cut in storage."""
        return _dims(self.stored)

    def shared(self) -> set[int]:
        """Dims whose cut in storage is gathered for use; the axes of data may cut them too."""
        return _dims(text for text in self.stored if text not in self.used)


def _axis(text: str) -> str:
    """The axis of one placement's text, "model" of "S(0)@model"."""
    return text.rpartition("@")[2]


def _dims(texts: Iterable[str]) -> set[int]:
    return {int(text[2]) for text in texts}


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A product with a parameter: which dim of the weight is summed, and which holds the output features."""

    node: fx.Node
    given: Any
    weight: str
    bias: str | None
    summed: int
    features: int
    sizes: tuple[int, int]  # sizes of the summed dim and of the features

    def blocks(self, parts: int) -> tuple[str, str]:
        """A fused projection's blocks, as text of a placement in use and in storage.

        "" if `parts` does not divide one of them. Unequal ones are for use alone: torch's placements cannot state them.
        """
        found = _blocks(self.node, self.sizes[1])
        if any(size % parts for size in found):
            return "", ""
        text = f", blocks={found}" if found else ""
        return text, text if len(set(found)) == 1 else ""


def _linear(node: fx.Node) -> LinearLayer | None:
    """The product with a parameter that a node is, or None."""
    k = node.kwargs
    operands: Any = {
        "linear": (k.get("input"), k.get("weight"), k.get("bias"), 1, 0),
        "addmm": (k.get("mat1"), k.get("mat2"), k.get("input"), 0, 1),
    }.get(op_name(node))
    if operands is None or (held := _parameter(operands[1])) is None:
        return None
    given, weight, bias, rows, columns = operands
    shape = type_of(weight).shape
    turned = _origin(weight, ("identity", "t", "to"))[1]
    sizes = (shape[rows], shape[columns])
    return LinearLayer(node, given, held, _parameter(bias), rows ^ turned, columns ^ turned, sizes)


def _table(node: fx.Node) -> str | None:
    """The table of a node that embeds tokens; None for other nodes, and for tables of computed positions."""
    if op_name(node) != "embedding":
        return None
    words, _ = _origin(node.kwargs["input"], ("identity", "to", "view"))
    return _parameter(node.kwargs["weight"]) if info(words).kind == "input" else None


def _parameter(value: Any) -> str | None:
    value, _ = _origin(value, ("identity", "t", "to"))
    return info(value).key if is_value(value) and info(value).kind == "parameter" else None


def _origin(value: Any, through: tuple[str, ...]) -> tuple[Any, bool]:
    """The value before a chain of these ops, and whether the chain transposes it."""
    turned = False
    while is_value(value) and info(value).kind == "op" and op_name(value) in through:
        turned ^= op_name(value) == "t"
        value = value.kwargs["input"]
    return value, turned


def _blocks(node: fx.Node, features: int) -> tuple[int, ...]:
    """The sections into which the output of a fused projection is split; () where it is not."""
    waiting: list[Any] = [node]
    while waiting:
        value = waiting.pop()
        last = len(type_of(value).shape) - 1
        for user in value.users:
            if info(user).kind != "op":
                continue
            if op_name(user) == "split" and user.kwargs.get("dim", 0) % (last + 1) == last:
                sections = tuple(user.kwargs["sections"])
                if sum(sections) == features:
                    return sections
            if op_name(user) in ("identity", "view") and type_of(user).shape[-1:] == (features,):
                waiting.append(user)
    return ()


def _is_normed(linear: LinearLayer) -> bool:
    """Whether a product gives fewer features than it reads, and a norm looks at all of them.

    Or at a part that is split off. Where they are cut each device needs all of them for the norm, so that hardly
    anything is saved.
    """
    waiting: list[Any] = [linear.node] if linear.sizes[1] < linear.sizes[0] else []
    while waiting:
        value = waiting.pop()
        whole = type_of(value).shape
        for user in value.users:
            if info(user).kind == "part":
                waiting.append(user)
            elif info(user).kind == "op" and user.all_input_nodes[0] is value:
                made = info(user).outputs[0].shape
                if "normalized_shape" in user.kwargs or made in (whole[:-1], (*whole[:-1], 1)):
                    return True
                if len(user.all_input_nodes) == 1 and made[:-1] == whole[:-1]:
                    waiting.append(user)
    return False


def _megatron(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, ParameterCut]:
    """Cut linear layers in order: by output features if the input is whole, else by input features."""
    axis = mesh.axes[axes[0]]
    parts = mesh.shape[axes[0]]
    cut: set[fx.Node] = set()  # values whose features are cut
    found: dict[str, ParameterCut] = {}

    def put(name: str | None, text: str, stored: str = "") -> None:
        """Cut a parameter, in storage as in use unless it is said; parts of a sum are whole in storage."""
        if name is not None:
            lies = (f"{stored or text}@{axis}",) if text.startswith("S") else ()
            found.setdefault(name, ParameterCut(lies, (f"{text}@{axis}",)))

    for node in graph.nodes:
        if info(node).kind == "part" and node.args[0] in cut:
            cut.add(node)
        if info(node).kind != "op":
            continue
        linear = _linear(node)
        table = _table(node)
        if op_name(node) == "experts":
            for name, text in _hidden_of_experts(node, parts):
                put(name, text)
        elif linear is not None:
            known = found.get(linear.weight)  # tied to one that came before
            by_input = linear.summed in known.dims() if known else linear.given in cut
            if by_input and linear.sizes[0] % parts == 0:
                put(linear.weight, f"S({linear.summed})")
                put(linear.bias, "P(sum)")  # added to the sum, by one device
            elif not by_input and linear.sizes[1] % parts == 0 and not _is_normed(linear):
                by, lies = linear.blocks(parts)
                put(linear.weight, f"S({linear.features}{by})", f"S({linear.features}{lies})")
                put(linear.bias, f"S(0{by})", f"S(0{lies})")
                cut.add(node)
        elif table is not None and type_of(node.kwargs["weight"]).shape[0] % parts == 0:
            put(table, "S(0)")
        elif any(operand in cut for operand in node.all_input_nodes):
            cut.add(node)
    return found


def _hidden_of_experts(node: fx.Node, parts: int) -> Iterator[tuple[str | None, str]]:
    """The cuts of experts by their hidden rows, so that their results are parts of a sum."""
    k: Any = node.kwargs
    inner = 1 if k.get("transposed") else 2
    width = type_of(k["down"]).shape[inner]
    if k.get("layout", HALVES) not in (HALVES, PAIRS, ONE) or width % parts:
        return
    by = f", blocks=({width}, {width})" if k.get("layout", HALVES) == HALVES else ""
    yield _parameter(k["up"]), f"S({3 - inner}{by})"
    yield _parameter(k["down"]), f"S({inner})"
    yield _parameter(k.get("up_bias")), f"S(1{by})"
    yield _parameter(k.get("down_bias")), "P(sum)"  # added to the sum, by one device


def _parameters(value: Any) -> Iterator[str]:
    """The parameters of its own shape that a value is made of: a matrix, to which adapters add something."""
    if not is_value(value):
        return
    if info(value).kind == "op":
        for operand in value.all_input_nodes:
            if type_of(operand).shape == type_of(value).shape:
                yield from _parameters(operand)
    elif info(value).kind == "parameter":
        yield info(value).key


def by_experts(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """The cuts of parameters of experts if each device along these axes has experts of its own."""
    parts = math.prod(mesh.shape[a] for a in axes)
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if info(node).kind == "op" and op_name(node) == "experts":
            k: Any = node.kwargs
            experts = type_of(k["up"]).shape[0]
            if not every_part_holds_something(experts, [mesh.shape[a] for a in axes]):
                raise BadPreset(
                    f"{parts} devices cannot share {experts} experts",
                    at=info(node).source,
                    advice=f"experts={experts} or fewer: the others of the axes then have copies",
                )
            for value in (k["up"], k["down"], k.get("up_bias"), k.get("down_bias")):
                for name in _parameters(value):
                    found[name] = tuple(f"S(0)@{mesh.axes[a]}" for a in axes)
    if not found:
        raise BadPreset(f"parallel says experts={parts}, and the model has no experts that are parameters")
    return found


def _two_d(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, ParameterCut]:
    """Use every weight with features cut by the second axis; storage cuts inputs by the first axis too."""
    (first, rows), (second, parts) = ((mesh.axes[a], mesh.shape[a]) for a in axes[:2])
    found: dict[str, ParameterCut] = {}

    def put(weight: str, use: str, inputs: int, count: int, stored: str = "") -> None:
        inner = (f"S({inputs})@{first}",) if count % rows == 0 else ()
        found.setdefault(weight, ParameterCut((*inner, stored or use), (use,), bool(inner)))

    for node in graph.nodes:
        if info(node).kind != "op":
            continue
        linear = _linear(node)
        table = _table(node)
        if linear is not None and linear.sizes[1] % parts == 0:
            by, lies = linear.blocks(parts)
            use = f"S({linear.features}{by})@{second}"
            put(linear.weight, use, linear.summed, linear.sizes[0], f"S({linear.features}{lies})@{second}")
            if linear.bias is not None:
                bias = ParameterCut((f"S(0{lies})@{second}",), (f"S(0{by})@{second}",))
                found.setdefault(linear.bias, bias)
        elif table is not None:
            words, width = type_of(node.kwargs["weight"]).shape
            if words % parts == 0:
                put(table, f"S(0)@{second}", 1, width)
    return found


def _three_d(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, ParameterCut]:
    """Cut weights over three axes a, b and c.

    The inputs of a weight are cut by the axis that cuts the features which reach it, its outputs by the other of b and
    c. In storage, a cuts the inputs too.
    """
    a, b, c = axes
    by_axis: dict[fx.Node, int] = {}  # values whose features an axis cuts; the residual stream's are cut by c
    found: dict[str, ParameterCut] = {}
    for node in graph.nodes:
        if info(node).kind == "part" and node.args[0] in by_axis:
            by_axis[node] = by_axis[node.args[0]]
        if info(node).kind != "op":
            continue
        linear = _linear(node)
        table = _table(node)
        if linear is not None:
            known = found.get(linear.weight)  # tied to one that came before
            inner = by_axis.get(linear.given, c) if known is None else _inner(linear, known, mesh, (b, c))
            outer = b if inner == c else c
            for name, cut in _three_d_linear(linear, mesh, a, inner, outer):
                found.setdefault(name, cut)
            by_axis[node] = outer
        elif table is not None:
            words, width = type_of(node.kwargs["weight"]).shape
            if width % (mesh.shape[c] * mesh.shape[a]) == 0:
                vocabulary = (f"S(0)@{mesh.axes[b]}",) if words % mesh.shape[b] == 0 else ()
                use = (f"S(1)@{mesh.axes[c]}", *vocabulary)
                found.setdefault(table, ParameterCut((f"S(1)@{mesh.axes[a]}", *use), use, True))
            by_axis[node] = c
        elif carried := [by_axis[n] for n in node.all_input_nodes if n in by_axis]:
            by_axis[node] = carried[0]
    return found


def _inner(linear: LinearLayer, known: ParameterCut, mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """The axis that cuts the inputs of a weight whose cut is already known."""
    begins = f"S({linear.summed}"
    used = [text.rpartition("@")[2] for text in known.used if text.startswith(begins)]
    return next(axis for axis in axes if mesh.axes[axis] in used)


def _three_d_linear(
    linear: LinearLayer, mesh: DeviceMesh, first: int, inner: int, outer: int
) -> list[tuple[str, ParameterCut]]:
    """Cuts of a weight and its bias: inputs by the first and the inner axis, features by the outer axis."""
    parts = mesh.shape[inner] * mesh.shape[first]
    if linear.sizes[0] % parts:
        raise BadPreset(
            f"3d cannot cut the {linear.sizes[0]} inputs of {linear.weight} by {parts}", seen=f"mesh {mesh}"
        )
    divides = linear.sizes[1] % mesh.shape[outer] == 0  # a vocabulary that does not is whole

    def of_features(dim: int) -> list[tuple[str, ...]]:
        """The cuts of a dim of features in use and in storage."""
        return [(f"S({dim}{by})@{mesh.axes[outer]}",) if divides else () for by in linear.blocks(mesh.shape[outer])]

    features, lies = of_features(linear.features)
    inputs = f"S({linear.summed})@{mesh.axes[inner]}"
    stored = (f"S({linear.summed})@{mesh.axes[first]}", inputs, *lies)
    found = [(linear.weight, ParameterCut(stored, (inputs, *features), True))]
    if linear.bias is not None:  # added to the sum over the inner axis, by one device
        own, lies = of_features(0)
        found.append((linear.bias, ParameterCut(lies, (f"P(sum)@{mesh.axes[inner]}", *own))))
    return found


_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input")
_TABLES = {"embedding_rowwise": 0, "embedding_colwise": 1}  # the dim that each cuts
STYLES = (*_COLUMNS, *_ROWS, *_TABLES, "replicate")


def by_styles(
    graph: Graph, mesh: DeviceMesh, axes: Sequence[int], styles: Mapping[str, str]
) -> dict[str, ParameterCut]:
    """Cut the layers that patterns of module names match, each as its style says, along one axis.

    The names of styles are those of transformers: "colwise" cuts the output features of a linear layer, "rowwise" its
    inputs, and "embedding_rowwise" the vocabulary of a table.
    """
    axis = mesh.axes[axes[0]]
    parts = mesh.shape[axes[0]]
    found: dict[str, ParameterCut] = {}
    unmatched = set(styles)
    for node in graph.nodes:
        module = info(node).module if info(node).kind == "op" else ""
        pattern = next((pattern for pattern in styles if module and fnmatchcase(module, pattern)), None)
        cuts = None if pattern is None else _styled(node, styles[pattern], parts)
        if pattern is None or cuts is None:
            continue
        unmatched.discard(pattern)
        for name, size, stored, used in cuts:
            if size % parts:
                what = f"{name} cannot be cut {styles[pattern]} into {parts} equal parts"
                raise BadPreset(what, seen=f"a dim of {size}, mesh {mesh}")
            found.setdefault(name, ParameterCut(tuple(f"{text}@{axis}" for text in stored), (f"{used}@{axis}",)))
    left = [pattern for pattern in unmatched if styles[pattern] != "replicate"]
    if left:
        what = f"the style {styles[left[0]]!r} of {left[0]!r} cuts nothing: no such layer is in the model"
        raise BadPreset(
            what, seen=f"{graph.model}", advice="the names of its modules, with * for the number of a layer"
        )
    return found


def _styled(node: fx.Node, style: str, parts: int) -> list[tuple[str, int, tuple[str, ...], str]] | None:
    """Parameters of a node that a style cuts: name, size of the dim, placements in storage and in use.

    None where the style is not one for this op.
    """
    linear = _linear(node)
    if style in _TABLES and (table := _table(node)) is not None:
        text = f"S({_TABLES[style]})"
        return [(table, type_of(node.kwargs["weight"]).shape[_TABLES[style]], (text,), text)]
    if linear is None or style not in (*_COLUMNS, *_ROWS):
        return None
    if style in _ROWS:
        text = f"S({linear.summed})"
        weight = (linear.weight, linear.sizes[0], (text,), text)
        bias = [] if linear.bias is None else [(linear.bias, 0, (), "P(sum)")]  # added to the sum, by one device
        return [weight, *bias]
    by, lies = linear.blocks(parts)
    cut = [(linear.weight, linear.features), *([] if linear.bias is None else [(linear.bias, 0)])]
    return [(name, linear.sizes[1], (f"S({dim}{lies})",), f"S({dim}{by})") for name, dim in cut]


MODES: dict[str, Callable[[Graph, DeviceMesh, Sequence[int]], dict[str, ParameterCut]]] = {
    "megatron": _megatron,
    "2d": _two_d,
    "2.5d": _two_d,
    "3d": _three_d,
}
