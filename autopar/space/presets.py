"""Experts' plans as constraints: points of the same space, priced by the same model.

    dp            rows of the batch on every axis, parameters whole
    zero1         the same, parameters stored cut and gathered once a step; their gradients are scattered, at the end of
                  several micro-batches
    zero2         the same, in each of them
    zero3         the same, parameters gathered again in backward, and a block at a time
    megatron      on one axis: every linear layer cut by its output, the next by its input; embedding and head by
                  vocabulary; sums are made whole, or with sequence=True scattered along the sequence
    2d            on two axes: rows by the first, features by the second; a weight is stored cut by both and gathered
                  along the first (SUMMA, outputs stay)
    2.5d          on three: as 2d, and rows by the third too
    3d            on three (a, b, c): rows by a, a weight's inputs by c and its outputs by b, so that outputs are sums
                  over c, scattered over rows; b and c change roles at the next layer

Besides shardings, a preset has habits: what is made of the batch stays cut along the axes that cut its rows, and
Megatron's sums are made whole (or scattered along the sequence). A plan that would compute the first layers on every
device, to reduce fewer gradients, may be faster, but is not what the name says. Where a model does not allow a habit
(of each row beside every other, say), the plan says so.

`parallel="megatron"` puts Megatron on the last axis and dp on the others; the others want as many axes as they name.
`parallel=dict(tensor=dict(size=4, mode="2d"), data=dict(size=2, zero=3))` says it in full: data is on the first axes,
tensor on the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.letters import BadPreset
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import every_part_holds_something
from autopar.space.overlap import BLOCK, BUCKET

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.graph.graph import Graph, TensorType
    from autopar.solver.plan import Plan

DATA = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
TENSOR = {"megatron": 1, "2d": 2, "2.5d": 3, "3d": 3}  # and how many axes each takes


@dataclass(frozen=True, slots=True)
class Layout:
    """Which axes carry data, with which stage of ZeRO, and which carry a tensor mode."""

    data: tuple[int, ...]
    zero: int = 0
    mode: str = ""
    tensor: tuple[int, ...] = ()
    sequence: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """The axes that cut the rows of inputs."""
        return (
            *self.data,
            *{
                "2d": self.tensor[:1],
                "2.5d": (self.tensor[0], self.tensor[2]) if len(self.tensor) == 3 else (),
                "3d": self.tensor[:1],
            }.get(self.mode, ()),
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor mode cuts a parameter: in storage, in use, and whether what is gathered is gathered again."""

    stored: tuple[str, ...]  # "S(0)@tp", one an axis
    used: tuple[str, ...]
    regathered: bool = False

    def dims(self) -> set[int]:
        return _dims(self.stored)

    def shared(self) -> set[int]:
        """Dims that are gathered for use along an axis that cuts them in storage: axes of data may cut them too."""
        return _dims(text for text in self.stored if text not in self.used)


def _dims(texts: Iterable[str]) -> set[int]:
    return {int(text[2]) for text in texts}


def constraints_of(given: Any, graph: Graph, mesh: DeviceMesh) -> dict[str, str]:
    """The constraints that a preset stands for, on this graph and mesh."""
    layout = _read(given, mesh)
    found = _rows(graph, mesh, layout)
    cuts: dict[str, Cut] = {}
    if layout.mode:
        cuts = {"megatron": _megatron, "2d": _two_d, "2.5d": _two_d, "3d": _three_d}[layout.mode](
            graph, mesh, layout.tensor
        )
    for name in graph.parameters:
        cut = cuts.get(name, Cut((), ()))
        stored = [
            *(_stored(_type_of_parameter(graph, name), mesh, layout, cut) if layout.zero and layout.data else ()),
            *cut.stored,
        ]
        policy = {1: "; kept; end", 2: "; kept; each", 3: "; regathered; each"}.get(
            layout.zero, "; regathered" if cut.regathered else ""
        )
        found[name] = f"{', '.join(stored) or 'R'}; {', '.join(cut.used) or 'R'}{policy}"
    return found


def habits_of(given: Any, mesh: DeviceMesh) -> tuple[tuple[int, str], ...]:
    """How the experts of a preset move values along each axis (`constraints.HABITS`)."""
    layout = _read(given, mesh)
    between = "sequence" if layout.sequence else "whole"
    return (
        *((axis, "rows") for axis in layout.rows),
        *((axis, between) for axis in layout.tensor if layout.mode == "megatron"),
    )


def window_of(given: Any, mesh: DeviceMesh) -> int:
    """So many bytes of parameters a window reads at least.

    Experts of ZeRO-3 gather each block by itself, however small it is.
    """
    return BLOCK if _read(given, mesh).zero == 3 else BUCKET


def _read(given: Any, mesh: DeviceMesh) -> Layout:
    real = [a for a, n in enumerate(mesh.shape) if n > 1]
    if isinstance(given, str):
        if given in DATA:
            return Layout(tuple(real), DATA[given])
        if given in TENSOR:
            count = TENSOR[given]
            if count > 1 and len(real) != count:
                raise BadPreset(
                    f"{given} is laid out on {count} axes, and mesh {mesh} has {len(real)} of more than one device",
                    advice=f"mesh={(2,) * count}",
                )
            return Layout(tuple(real[:-count]), 0, given if real else "", tuple(real[-count:]))
        raise BadPreset(f"no preset is called {given!r}", seen=f"known: {', '.join((*DATA, *TENSOR))}")
    if not isinstance(given, Mapping) or not given or set(given) - {"data", "tensor"}:
        raise BadPreset(
            f"parallel={given!r} is neither a preset's name nor a dictionary of data and tensor",
            advice='parallel="zero3", or parallel=dict(tensor=dict(size=4, mode="megatron"), data=2)',
        )
    sizes = {key: (value if isinstance(value, Mapping) else {"size": value}) for key, value in given.items()}
    for key, value in sizes.items():
        if (
            set(value) - ({"size", "mode", "sequence"} if key == "tensor" else {"size", "zero"})
            or any(isinstance(value.get(k, 1), bool) or not isinstance(value.get(k, 1), int) for k in ("size", "zero"))
            or not value.get("size", 0) > 0
        ):
            raise BadPreset(
                f"parallel says {key}={given[key]!r}",
                advice=(
                    'data=2, data=dict(size=2, zero=3), tensor=4 or tensor=dict(size=4, mode="megatron", sequence=True)'
                ),
            )
    data, tensor = sizes.get("data", {"size": 1}), sizes.get("tensor", {"size": 1})
    mode = tensor.get("mode", "megatron")
    if not isinstance(mode, str) or mode not in TENSOR or data.get("zero", 0) not in (0, 1, 2, 3):
        raise BadPreset(f"parallel={given!r}", seen=f"modes of tensor: {', '.join(TENSOR)}; zero: 0 to 3")
    if data["size"] * tensor["size"] != mesh.size:
        raise BadPreset(
            f"parallel speaks of {data['size']} x {tensor['size']} devices, the mesh has {mesh.size}",
            seen=f"mesh {mesh}",
        )
    sequence = tensor.get("sequence", False)
    if not isinstance(sequence, bool) or (sequence and mode != "megatron"):
        raise BadPreset(f"parallel={given!r}", seen="sequence is True or False, and a word about megatron")
    axes = tuple(real[-TENSOR[mode] :]) if tensor["size"] > 1 else ()
    if axes and (
        math.prod(mesh.shape[a] for a in axes) != tensor["size"] or (len(axes) != TENSOR[mode] and mode != "megatron")
    ):
        raise BadPreset(
            f"tensor of size {tensor['size']} in mode {mode} is not the last {TENSOR[mode]} axes of mesh {mesh}",
            advice=f"mesh=({data['size']}, {tensor['size']})" if mode == "megatron" else "",
        )
    return Layout(tuple(a for a in real if a not in axes), data.get("zero", 0), mode if axes else "", axes, sequence)


def _rows(graph: Graph, mesh: DeviceMesh, layout: Layout) -> dict[str, str]:
    """Inputs cut by rows; where the rows do not divide, the mesh cannot carry it."""
    from autopar.graph.graph import info, type_of

    parts, found = 1, {}
    for a in layout.rows:
        parts *= mesh.shape[a]
    for node in graph.nodes:
        if info(node).kind == "input" and parts > 1 and (shape := type_of(node).shape):
            if shape[0] % parts:
                raise BadPreset(
                    f"{parts} devices cannot share the {shape[0]} rows of input {info(node).key}",
                    seen=f"mesh {mesh}",
                    advice="a batch that divides, or fewer devices for data",
                )
            found[info(node).key] = ", ".join(f"S(0)@{mesh.axes[a]}" for a in layout.rows)
    return found


def _stored(type_: TensorType, mesh: DeviceMesh, layout: Layout, cut: Cut) -> list[str]:
    """The dim along which a parameter is stored over the data axes, beside what a tensor mode cuts.

    The first that they divide, else the first of which every device gets a part; before dims that
    the mode cuts in storage too, and gathers. None where there is no such dim: what the mode cuts in use stays so."""

    def sizes(dim: int) -> list[int]:
        return [mesh.shape[a] for a in layout.data] + [
            mesh.shape[mesh.axis(text.rpartition("@")[2])] for text in cut.stored if int(text[2]) == dim
        ]

    def divides(dim: int) -> bool:
        return type_.shape[dim] % math.prod(sizes(dim)) == 0

    for dims in ([d for d in range(len(type_.shape)) if d not in cut.dims()], sorted(cut.shared())):
        able = [d for d in dims if every_part_holds_something(type_.shape[d], sizes(d))]
        if able:
            dim = next(filter(divides, able), able[0])
            return [f"S({dim})@{mesh.axes[a]}" for a in layout.data]
    return []


def said_of(given: Any, mesh: DeviceMesh, plan: Plan) -> tuple[tuple[str, str], ...]:
    """What a preset's plan does not keep to: under ZeRO, which parameters are stored whole along the axes of data."""
    layout = _read(given, mesh)
    if not layout.zero or not layout.data:
        return ()
    whole = {
        name: plan.parameter_bytes[name]
        for name, sharding in plan.parameters.items()
        if not any(sharding.placements[a].is_shard for a in layout.data)
    }
    if not whole:
        return ()
    names = ", ".join(list(whole)[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
    share = sum(whole.values()) / max(1, sum(plan.parameter_bytes.values()))
    along = ", ".join(f"{mesh.axes[a]}={mesh.shape[a]}" for a in layout.data)
    return (
        (
            "parallel",
            f"{len(whole)} of {len(plan.parameters)} parameters ({share:.2%} of their bytes) are stored whole "
            f"along {along}, where no dim that is left has a part for every device, or a constraint says so: "
            f"{names}",
        ),
    )


def _type_of_parameter(graph: Graph, name: str) -> TensorType:
    from autopar.graph.graph import info, type_of

    return next(type_of(n) for n in graph.nodes if info(n).kind == "parameter" and name == info(n).key)


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with a parameter: which dims of the parameter are summed and which are features, and of how many."""

    node: fx.Node
    given: Any
    weight: str
    bias: str | None
    summed: int
    features: int
    sizes: tuple[int, int]  # of the two

    def blocks(self, parts: int) -> str:
        """The blocks of a fused projection, as text, where they can all be cut."""
        found = _blocks(self.node, self.sizes[1])
        return f", blocks={found}" if found and all(b % parts == 0 for b in found) else ""


def _origin(value: Any, through: tuple[str, ...] = ("identity", "to")) -> tuple[Any, bool]:
    """What a value is, before these ops; and whether it is turned."""
    from autopar.graph.graph import info, op_name

    turned = False
    while hasattr(value, "meta") and info(value).kind == "op" and op_name(value) in through:
        turned ^= op_name(value) == "t"
        value = value.kwargs["input"]
    return value, turned


def _parameter(value: Any) -> str | None:
    from autopar.graph.graph import info

    value, _ = _origin(value, ("identity", "t", "to"))
    return info(value).key if hasattr(value, "meta") and info(value).kind == "parameter" else None


def _linear(node: fx.Node) -> Linear | None:
    """What a node says if it is a product with a parameter."""
    from autopar.graph.graph import op_name, type_of

    k = node.kwargs
    operands: Any = {
        "linear": (k.get("input"), k.get("weight"), k.get("bias"), 1, 0),
        "addmm": (k.get("mat1"), k.get("mat2"), k.get("input"), 0, 1),
    }.get(op_name(node))
    if operands is None or (held := _parameter(operands[1])) is None:
        return None
    given, weight, bias, rows, columns = operands
    shape, turned = type_of(weight).shape, _origin(weight, ("identity", "t", "to"))[1]
    return Linear(node, given, held, _parameter(bias), rows ^ turned, columns ^ turned, (shape[rows], shape[columns]))


def _table(node: fx.Node) -> str | None:
    """The table of an embedding of words; positions are computed."""
    from autopar.graph.graph import info, op_name

    return (
        _parameter(node.kwargs["weight"])
        if op_name(node) == "embedding"
        and info(_origin(node.kwargs["input"], ("identity", "to", "view"))[0]).kind == "input"
        else None
    )


def _megatron(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, Cut]:
    """Cuts of linear layers in order: by its output where its input is whole, by its input where that is cut."""
    from autopar.graph.graph import info, type_of

    axis, parts = mesh.axes[axes[0]], mesh.shape[axes[0]]
    cut: set[fx.Node] = set()  # values whose features are cut
    found: dict[str, Cut] = {}

    def put(name: str | None, text: str) -> None:
        """What is added to a sum is whole in storage."""
        if name is not None:
            found.setdefault(name, Cut((f"{text}@{axis}",) if text.startswith("S") else (), (f"{text}@{axis}",)))

    for node in graph.nodes:
        if info(node).kind == "part":
            cut |= {node} if node.args[0] in cut else set()
        if info(node).kind != "op":
            continue
        linear = _linear(node)
        if linear is not None:
            known = found.get(linear.weight)  # tied to one that came before
            by_input = linear.summed in known.dims() if known else linear.given in cut
            if by_input and linear.sizes[0] % parts == 0:
                put(linear.weight, f"S({linear.summed})")
                put(linear.bias, "P(sum)")  # added to the sum, by one device
            elif not by_input and linear.sizes[1] % parts == 0:
                by = linear.blocks(parts)
                put(linear.weight, f"S({linear.features}{by})")
                put(linear.bias, f"S(0{by})")
                cut.add(node)
        elif (table := _table(node)) is not None and type_of(node.kwargs["weight"]).shape[0] % parts == 0:
            put(table, "S(0)")
        elif any(operand in cut for operand in node._input_nodes):
            cut.add(node)
    return found


def _two_d(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, Cut]:
    """Every weight is used whole in its inputs and cut in its features by the second axis.

    In storage the first axis cuts its inputs.
    """
    from autopar.graph.graph import info, type_of

    first, second = axes[0], axes[1]
    found: dict[str, Cut] = {}
    for node in graph.nodes:
        linear = _linear(node) if info(node).kind == "op" else None
        if linear is not None and linear.sizes[1] % mesh.shape[second] == 0:
            by = linear.blocks(mesh.shape[second])
            use = f"S({linear.features}{by})@{mesh.axes[second]}"
            inner = (f"S({linear.summed})@{mesh.axes[first]}",) if linear.sizes[0] % mesh.shape[first] == 0 else ()
            found.setdefault(linear.weight, Cut((*inner, use), (use,), bool(inner)))
            if linear.bias is not None:
                found.setdefault(
                    linear.bias, Cut((f"S(0{by})@{mesh.axes[second]}",), (f"S(0{by})@{mesh.axes[second]}",))
                )
        elif linear is None and info(node).kind == "op" and (table := _table(node)) is not None:
            words, width = type_of(node.kwargs["weight"]).shape
            if words % mesh.shape[second] == 0:
                use = f"S(0)@{mesh.axes[second]}"
                inner = (f"S(1)@{mesh.axes[first]}",) if width % mesh.shape[first] == 0 else ()
                found.setdefault(table, Cut((*inner, use), (use,), bool(inner)))
    return found


def _three_d(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, Cut]:
    """A weight's inputs are cut by the axis that cuts the features which reach it, its outputs by the other of b and c.

    In storage a cuts its inputs too.
    """
    from autopar.graph.graph import info, type_of

    a, b, c = axes
    by_axis: dict[fx.Node, int] = {}  # values whose features an axis cuts; the residual stream's are cut by c
    found: dict[str, Cut] = {}

    def name(axis: int) -> str:
        return mesh.axes[axis]

    for node in graph.nodes:
        if info(node).kind == "part" and node.args[0] in by_axis:
            by_axis[node] = by_axis[node.args[0]]
        if info(node).kind != "op":
            continue
        linear = _linear(node)
        if linear is not None:
            known = found.get(linear.weight)  # tied to one that came before
            inner = (
                by_axis.get(linear.given, c)
                if known is None
                else next(
                    axis
                    for axis in (b, c)
                    if any(
                        text.startswith(f"S({linear.summed}") and text.endswith(f"@{name(axis)}") for text in known.used
                    )
                )
            )
            outer = b if inner == c else c
            by = linear.blocks(mesh.shape[outer])
            features = (
                (f"S({{}}{by})@{name(outer)}",) if linear.sizes[1] % mesh.shape[outer] == 0 else ()
            )  # a vocabulary that does not divide is whole
            if linear.sizes[0] % (mesh.shape[inner] * mesh.shape[a]):
                raise BadPreset(
                    f"3d cannot cut the {linear.sizes[0]} inputs of {linear.weight} by "
                    f"{mesh.shape[inner] * mesh.shape[a]}",
                    seen=f"mesh {mesh}",
                )
            if known is None:
                use = (f"S({linear.summed})@{name(inner)}", *(text.format(linear.features) for text in features))
                found[linear.weight] = Cut((f"S({linear.summed})@{name(a)}", *use), use, True)
            if linear.bias is not None:  # added to the sum over the inner axis, by one device
                own = tuple(text.format(0) for text in features)
                found.setdefault(linear.bias, Cut(own, (f"P(sum)@{name(inner)}", *own)))
            by_axis[node] = outer
        elif (table := _table(node)) is not None:
            words, width = type_of(node.kwargs["weight"]).shape
            if width % (mesh.shape[c] * mesh.shape[a]) == 0:
                use = (f"S(1)@{name(c)}", *((f"S(0)@{name(b)}",) if words % mesh.shape[b] == 0 else ()))
                found.setdefault(table, Cut((f"S(1)@{name(a)}", *use), use, True))
            by_axis[node] = c
        else:
            carried = [by_axis[n] for n in node._input_nodes if n in by_axis]
            if carried:
                by_axis[node] = carried[0]
    return found


def _blocks(node: fx.Node, features: int) -> tuple[int, ...]:
    """The parts into which a fused projection is split behind it."""
    from autopar.graph.graph import op_name, type_of

    waiting: list[Any] = [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if (
                "Op" in type(user.target).__name__
                and op_name(user) == "split"
                and user.kwargs.get("dim", 0) % len(type_of(value).shape) == len(type_of(value).shape) - 1
                and sum(user.kwargs["sections"]) == features
            ):
                return tuple(user.kwargs["sections"])
            if (
                "Op" in type(user.target).__name__
                and op_name(user) in ("identity", "view")
                and type_of(user).shape[-1:] == (features,)
            ):
                waiting.append(user)
    return ()


def names() -> Sequence[str]:
    return (*DATA, *TENSOR)
