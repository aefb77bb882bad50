"""Experts' plans as constraints: points of the same space, priced by the same model.

    dp            rows of the batch on every axis, parameters whole
    zero1         the same, parameters stored cut and gathered once a step; their gradients are scattered, at the end of several micro-batches
    zero2         the same, in each of them
    zero3         the same, parameters gathered again in backward
    megatron      on one axis: every linear layer cut by its output, the next by its input; embedding and head by vocabulary

`parallel="megatron"` puts Megatron on the last axis and dp on the others; `parallel=dict(tensor=dict(size=4, mode="megatron"), data=dict(size=2, zero=3))` says it in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.letters import BadPreset
from autopar.sharding.mesh import DeviceMesh

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.tracer.graph import Graph, TensorType

DATA = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
TENSOR = ("megatron",)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which axes carry data, with which stage of ZeRO, and which axis carries Megatron's cuts."""

    data: tuple[int, ...]
    zero: int = 0
    tensor: int | None = None


def constraints_of(given: Any, graph: Graph, mesh: DeviceMesh) -> dict[str, str]:
    """The constraints that a preset stands for, on this graph and mesh."""
    layout = _read(given, mesh)
    found = _rows(graph, mesh, layout)
    cut = _megatron(graph, mesh.shape[layout.tensor]) if layout.tensor is not None else {}
    for name in graph.parameters:
        type_ = _type_of_parameter(graph, name)
        use = [f"{cut[name]}@{mesh.axes[layout.tensor]}"] if name in cut and layout.tensor is not None else []
        stored = [text for text in use if text.startswith("S")]    # what is added to a sum is whole in storage
        if layout.zero and layout.data:
            stored += _stored(type_, mesh, layout, cut.get(name))
        found[name] = f"{', '.join(stored) or 'R'}; {', '.join(use) or 'R'}" + {1: "; kept; end", 2: "; kept; each", 3: "; regathered; each"}.get(layout.zero, "")
    return found


def _read(given: Any, mesh: DeviceMesh) -> Layout:
    real = [a for a, n in enumerate(mesh.shape) if n > 1]
    if isinstance(given, str):
        if given in DATA:
            return Layout(tuple(real), DATA[given])
        if given in TENSOR:
            return Layout(tuple(real[:-1]), 0, real[-1] if real else None)
        raise BadPreset(f"no preset is called {given!r}", seen=f"known: {', '.join((*DATA, *TENSOR))}")
    if not isinstance(given, Mapping) or not given or set(given) - {"data", "tensor"}:
        raise BadPreset(f"parallel={given!r} is neither a preset's name nor a dictionary of data and tensor", advice='parallel="zero3", or parallel=dict(tensor=dict(size=4, mode="megatron"), data=2)')
    sizes = {key: (value if isinstance(value, Mapping) else {"size": value}) for key, value in given.items()}
    for key, value in sizes.items():
        if set(value) - {"size", "mode" if key == "tensor" else "zero"} or any(isinstance(value.get(k, 1), bool) or not isinstance(value.get(k, 1), int) for k in ("size", "zero")) or not value.get("size", 0) > 0:
            raise BadPreset(f"parallel says {key}={given[key]!r}", advice="data=2, data=dict(size=2, zero=3), tensor=4 or tensor=dict(size=4, mode=\"megatron\")")
    data, tensor = sizes.get("data", {"size": 1}), sizes.get("tensor", {"size": 1})
    if tensor.get("mode", "megatron") not in TENSOR or data.get("zero", 0) not in (0, 1, 2, 3):
        raise BadPreset(f"parallel={given!r}", seen=f"modes of tensor: {', '.join(TENSOR)}; zero: 0 to 3")
    if data["size"] * tensor["size"] != mesh.size:
        raise BadPreset(f"parallel speaks of {data['size']} x {tensor['size']} devices, the mesh has {mesh.size}", seen=f"mesh {mesh}")
    rest = list(real)
    last = rest.pop() if tensor["size"] > 1 and rest else None
    if last is not None and mesh.shape[last] != tensor["size"]:
        raise BadPreset(f"tensor of size {tensor['size']} is not the last axis of mesh {mesh}", advice=f"mesh=({data['size']}, {tensor['size']})")
    return Layout(tuple(rest), data.get("zero", 0), last)


def _rows(graph: Graph, mesh: DeviceMesh, layout: Layout) -> dict[str, str]:
    """Inputs cut by rows; where the rows do not divide, the mesh cannot carry it."""
    from autopar.tracer.graph import info, type_of

    parts, found = 1, {}
    for a in layout.data:
        parts *= mesh.shape[a]
    for node in graph.nodes:
        if info(node).kind == "input" and parts > 1 and (shape := type_of(node).shape):
            if shape[0] % parts:
                raise BadPreset(f"{parts} devices cannot share the {shape[0]} rows of input {info(node).key}", seen=f"mesh {mesh}", advice="a batch that divides, or fewer devices for data")
            found[info(node).key] = ", ".join(f"S(0)@{mesh.axes[a]}" for a in layout.data)
    return found


def _stored(type_: TensorType, mesh: DeviceMesh, layout: Layout, cut: str | None) -> list[str]:
    """The dim along which a parameter is stored over the data axes: the first that all of them divide, and nothing else cuts; whole where there is none."""
    parts = 1
    for a in layout.data:
        parts *= mesh.shape[a]
    taken = int(cut[2]) if cut and cut.startswith("S") else -1
    dim = next((d for d, n in enumerate(type_.shape) if d != taken and n % parts == 0 and n > 1), None)
    return [] if dim is None else [f"S({dim})@{mesh.axes[a]}" for a in layout.data]


def _type_of_parameter(graph: Graph, name: str) -> TensorType:
    from autopar.tracer.graph import info, type_of

    return next(type_of(n) for n in graph.nodes if info(n).kind == "parameter" and name == info(n).key)


def _megatron(graph: Graph, parts: int) -> dict[str, str]:
    """Which dim of which parameter the axis cuts: walking the graph, a linear layer whose input is whole is cut by its output, one whose input is cut by its input."""
    from autopar.tracer.graph import info, op_name, type_of

    cut: set[fx.Node] = set()                                  # values whose features are cut
    found: dict[str, str] = {}

    def origin(value: Any, through: tuple[str, ...] = ("identity", "to")) -> tuple[Any, bool]:
        """What a value is, before these ops; and whether it is turned."""
        turned = False
        while hasattr(value, "meta") and info(value).kind == "op" and op_name(value) in through:
            turned ^= op_name(value) == "t"
            value = value.kwargs["input"]
        return value, turned

    def parameter(value: Any) -> str | None:
        value, _ = origin(value, ("identity", "t", "to"))
        return info(value).key if hasattr(value, "meta") and info(value).kind == "parameter" else None

    for node in graph.nodes:
        if info(node).kind == "part":
            cut |= {node} if node.args[0] in cut else set()
        if info(node).kind != "op":
            continue
        name, k = op_name(node), node.kwargs
        operands: Any = {"linear": (k.get("input"), k.get("weight"), k.get("bias"), 1, 0), "addmm": (k.get("mat1"), k.get("mat2"), k.get("input"), 0, 1)}.get(name, (None,) * 5)
        given, weight, bias, rows, columns = operands
        held = parameter(weight)
        if held is not None:
            shape = type_of(weight).shape
            turned = origin(weight, ("identity", "t", "to"))[1]
            stored = {rows: 1 - rows, columns: 1 - columns} if turned else {rows: rows, columns: columns}     # the dims of the parameter itself
            known = found.get(held, "")                        # tied to one that came before
            by_input = known.startswith(f"S({stored[rows]}") if known else given in cut
            if by_input and shape[rows] % parts == 0:
                found[held] = f"S({stored[rows]})"
                if (its := parameter(bias)) is not None:
                    found.setdefault(its, "P(sum)")            # added to the sum, by one device
            elif not by_input and shape[columns] % parts == 0:
                blocks = _blocks(node, shape[columns])
                by = f", blocks={blocks}" if blocks and all(b % parts == 0 for b in blocks) else ""
                found.setdefault(held, f"S({stored[columns]}{by})")
                if (its := parameter(bias)) is not None:
                    found.setdefault(its, f"S(0{by})")
                cut.add(node)
        elif name == "embedding" and (table := parameter(k["weight"])) is not None and type_of(k["weight"]).shape[0] % parts == 0:     # type: ignore[arg-type]
            if info(origin(k["input"], ("identity", "view"))[0]).kind == "input":      # of words; positions are computed
                found.setdefault(table, "S(0)")
        elif any(operand in cut for operand in node._input_nodes):
            cut.add(node)
    return found


def _blocks(node: fx.Node, features: int) -> tuple[int, ...]:
    """The parts into which a fused projection is split behind it."""
    from autopar.tracer.graph import op_name, type_of

    waiting: list[Any] = [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if "Op" in type(user.target).__name__ and op_name(user) == "split" and user.kwargs.get("dim", 0) % len(type_of(value).shape) == len(type_of(value).shape) - 1 and sum(user.kwargs["sections"]) == features:
                return tuple(user.kwargs["sections"])
            if "Op" in type(user.target).__name__ and op_name(user) in ("identity", "view") and type_of(user).shape[-1:] == (features,):
                waiting.append(user)
    return ()


def names() -> Sequence[str]:
    return (*DATA, *TENSOR)
