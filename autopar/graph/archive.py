"""A Graph as JSON, and back: data only.

Functions are written by name, and a name is only read back as what a tracer could have met: a canonical op, a function
that torch lets one override, an op of torch.ops, an autograd.Function of a module that is already imported. Structures
of inputs and outputs are torch's pytree specs.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar import codec
from autopar.codec import Codec, Write
from autopar.graph.carried import Carried
from autopar.graph.kept import NotKept
from autopar.graph.nodes import Info, Leaf, TensorType, info
from autopar.letters import BadGraph
from autopar.ops.entry import OPS, Apply, OnACopy, Op
from autopar.ops.lookup import by_own_name, own_name, torch_functions
from autopar.runtime.private import ATEN_OPS

if TYPE_CHECKING:
    from autopar.graph.graph import Graph

VERSION = 2


def write(graph: Graph) -> str:
    """The graph as JSON text that `read_fields` reads."""
    data = {"autopar_graph": VERSION, "nodes": [_node(n) for n in graph.nodes]}
    return json.dumps(data | Codec({}, _WRITES).write(graph, _keys(type(graph))))


def read_fields(cls: type[Graph], text: str) -> dict[str, Any]:
    """The fields of the graph that `write` wrote as text; a letter where the text does not read as one."""
    try:
        data = json.loads(text)
        if data.get("autopar_graph") != VERSION:
            raise BadGraph(
                "this is not a graph that autopar has written",
                seen=str(data.get("autopar_graph", "no version")),
                advice=f"version {VERSION}",
            )
        made = fx.Graph()
        nodes = dict[str, fx.Node]()
        for entry in data["nodes"]:
            _read_node(made, nodes, entry)
        return {"fx": made, **_codec(nodes).read(cls, data, _LATER, _keys(cls))}
    except BadGraph:
        raise
    except Exception as e:  # whatever is wrong with the text, it is the text
        raise BadGraph(
            "this text does not read as a graph",
            seen=(codec.seen(e).splitlines() or [""])[0],
            advice="a file that Graph.to_json wrote, and the classes of its inputs and outputs imported",
        ) from e


def _keys(cls: type[Graph]) -> list[str]:
    """The fields of a graph in its text; nodes are apart, and calls of idle hooks are not written."""
    return [name for name in codec.fields_of(cls) if name not in ("fx", "idle")]


def _codec(nodes: Mapping[str, fx.Node]) -> Codec:
    """The codec of a graph's fields; `nodes` are those that values name when they are read."""
    any_value = functools.partial(value_of_json, nodes=nodes)
    return Codec({pytree.TreeSpec: _read_spec, "unread": _UNREAD, Any: any_value}, _WRITES)


def _spec(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as e:
        raise BadGraph(
            "the structure of inputs or outputs cannot be written",
            seen=str(e),
            advice="serialized_type_name= in torch.utils._pytree.register_pytree_node",
        ) from e


def _read_spec(text: str) -> pytree.TreeSpec:
    """The pytree structure in a text: plain containers, dataclasses and caches that are registered.

    Torch's own reader would import the module that a defaultdict names.
    """

    def check(spec: Any) -> None:
        kind = spec["type"]
        cls = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(kind) if kind is not None else None
        if kind not in (
            None,
            "builtins.tuple",
            "builtins.list",
            "builtins.dict",
            "collections.OrderedDict",
        ) and not (hasattr(cls, "__dataclass_fields__") or (isinstance(cls, type) and issubclass(cls, Carried))):
            raise BadGraph(
                f"a structure of type {kind} is not read",
                advice="tuples, lists, dicts, and dataclasses whose module is imported",
            )
        for child in spec["children_spec"]:
            check(child)

    check(json.loads(text)[1])
    return pytree.treespec_loads(text)


# The values of fields that texts of older releases lack.
_LATER = {"model": "", "sets": (), "backward_from": (), "turns": 1, "in_turns": (), "rows_out": ()} | {
    "carried": (),
    "has_gradients": True,
}
_WRITES: dict[Any, Write] = {
    "input_spec": _spec,
    "output_spec": _spec,
    "input_leaves": lambda leaves: [value_as_json(v) for v in leaves],
    "output_leaves": lambda leaves: [value_as_json(v) for v in leaves],
    "sets": lambda sets: [(name, value_as_json(v)) for name, v in sets],
    "unread": lambda unread: [(name, t.shape, t.dtype, t.requires_grad) for name, t in unread],
}
_INFO = Codec({"random": functools.partial(codec.whole, least=-1)}, {})
_TYPE = codec.in_order(codec.text, codec.each(codec.whole), codec.text, codec.truth)
_UNREAD = codec.each(lambda data: (codec.text(data[0]), TensorType(*_TYPE(data)[1:])))


def _node(node: fx.Node) -> dict[str, Any]:
    target = node.target
    if isinstance(target, Op):
        target = {"op": target.name} if target.signature is not None else {"function": own_name(target.call)}
    elif target is operator.getitem:
        target = {"part": node.args[1]}
    return {
        "name": node.name,
        "kind": node.op,
        "target": target,
        "args": value_as_json(
            node.args
            if node.op == "output"
            else (node.args[0],)
            if isinstance(target, dict) and "part" in target
            else ()
        ),
        "kwargs": value_as_json(dict(node.kwargs)),
        "info": _INFO.plain(info(node)),
    }


def value_as_json(value: Any) -> Any:
    """A value as JSON; one of a kind that JSON lacks is an object with one key, the name of its kind."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and not hasattr(value, "name"):
        return value
    if isinstance(value, list):
        return [value_as_json(v) for v in value]
    for kind, is_one, content in _WRITTEN:
        if is_one(value):
            return content(value) if kind is None else {kind: content(value)}
    raise BadGraph(
        f"a {type(value).__name__} cannot be written",
        seen=repr(value)[:80],
        advice="numbers, strings, and lists of them",
    )


def _a(*types: type) -> Callable[[Any], bool]:
    """A predicate that is true for values of these types."""
    return lambda value: isinstance(value, types)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


# The key of a value's object (None: the value itself), which values it is for, and its content.
_WRITTEN: tuple[tuple[str | None, Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (None, _is_finite, float),
    ("float", _a(float), str),
    ("node", _a(fx.Node), lambda v: v.name),
    ("leaf", _a(Leaf), lambda v: v.position),
    ("attribute not kept", lambda v: isinstance(v, NotKept) and v.is_attribute, lambda v: v.name),
    ("not kept", _a(NotKept), lambda v: v.name),
    ("tuple", _a(tuple), lambda v: [value_as_json(x) for x in v]),
    ("dict", _a(dict), lambda v: [[value_as_json(k), value_as_json(x)] for k, x in v.items()]),
    ("slice", _a(slice), lambda v: [value_as_json(x) for x in (v.start, v.stop, v.step)]),
    ("ellipsis", lambda v: v is ..., lambda v: True),
    ("torch", _a(torch.dtype, torch.memory_format, torch.layout), lambda v: str(v).removeprefix("torch.")),
    ("device", _a(torch.device), str),
    ("complex", _a(complex), lambda v: [v.real, v.imag]),
    ("array", _a(np.ndarray, np.generic), lambda v: [v.tolist(), str(v.dtype)]),
)


def value_of_json(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """The value that `value_as_json` wrote; `nodes` are those that it names."""
    if isinstance(value, list):
        return [value_of_json(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "dict":
        return {value_of_json(k, nodes): value_of_json(v, nodes) for k, v in content}
    if kind in _OF_SEVERAL:
        return _OF_SEVERAL[kind](value_of_json(content, nodes))
    if kind in _READ:
        return _READ[kind](content)
    raise BadGraph("this text does not read as a graph", seen=f"{kind}: {content!r}"[:80])


def _named_in_torch(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        raise BadGraph("this text does not read as a graph", seen=f"torch: {name!r}"[:80])
    return found


_OF_SEVERAL: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "slice": lambda given: slice(*given)}
_READ: dict[str, Callable[[Any], Any]] = {
    "leaf": lambda content: Leaf(int(content)),
    "not kept": lambda content: NotKept(str(content)),
    "attribute not kept": lambda content: NotKept(str(content), is_attribute=True),
    "ellipsis": lambda content: ...,
    "float": float,
    "device": lambda content: torch.device(str(content)),
    "complex": lambda content: complex(*content),
    "array": lambda content: np.array(content[0], dtype=content[1])[()],
    "torch": _named_in_torch,
}


def _read_node(made: fx.Graph, nodes: dict[str, fx.Node], entry: dict[str, Any]) -> None:
    target = entry["target"]
    args = value_of_json(entry["args"], nodes)
    kwargs = value_of_json(entry["kwargs"], nodes)
    if entry["kind"] == "output":
        node = made.output(args[0])
    elif entry["kind"] in ("placeholder", "get_attr"):
        node = made.create_node(entry["kind"], str(target), name=entry["name"])
    elif "part" in target:
        node = made.create_node("call_function", operator.getitem, (*args, int(target["part"])), name=entry["name"])
    else:
        op = OPS[target["op"]] if "op" in target else _own(str(target["function"]))
        node = made.create_node("call_function", op, (), kwargs, name=entry["name"])
    node.meta["info"] = _INFO.reader(Info)(entry["info"])
    nodes[node.name] = node


def _own(name: str) -> Op:
    """The op of a function that is not in the vocabulary of canonical ops."""
    function = _function(name)
    return by_own_name(function, (), {})[0]


def _function(name: str) -> Any:
    if name.endswith(" on a copy"):
        return OnACopy(_function(name.removesuffix(" on a copy")))
    if name.startswith("function "):
        path = name.removeprefix("function ")
        home = max((m for m in list(sys.modules) if path.startswith(m + ".")), key=len, default="")
        cls = functools.reduce(getattr, path.removeprefix(home + ".").split("."), sys.modules[home]) if home else None
        if isinstance(cls, type) and issubclass(cls, torch.autograd.Function):
            return Apply(cls)
        raise BadGraph(f"the autograd.Function {path} is not to be found", advice="import its module first")
    if name.startswith("ops."):
        found = functools.reduce(getattr, name.split("."), torch)
        if isinstance(found, ATEN_OPS):
            return found
    if name in torch_functions():
        return torch_functions()[name]
    raise BadGraph(
        f"{name} is not a function that a tracer meets",
        advice="for a custom op, import the module that defines it first",
    )
