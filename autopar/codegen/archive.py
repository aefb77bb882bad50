"""A `Joint` as data, and back: the graphs of a program as lists of nodes over a closed table of functions.

    {"targets": ["aten.mm.default", "all_reduce", ...],          functions, each once
     "forms": [[[8, 4], [4, 1], "float32", "cpu"], ...],         shape, strides, dtype and device, each once
     "graphs": {"forward": [node, ...], ...}, ...}               and the other fields of a `Joint`

A node is its kind, name, target, arguments, named arguments, form, and marks. A target is an overload of a registered
op, or a function of the table that stands here; nothing else is written, and nothing is imported or evaluated to read.
"""

from __future__ import annotations

import functools
import keyword
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar import codec
from autopar.codegen.exchanges import SentByOps
from autopar.codegen.halves import Joint, Parts
from autopar.codegen.joint_graph import ADDS, BACK, CONVERTED, OP, RECOMPUTED
from autopar.graph.archive import value_as_json, value_of_json
from autopar.graph.tensor_form import TensorForm
from autopar.letters import BadProgram
from autopar.runtime.backward_steps import hand_over
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish, part_start
from autopar.runtime.forms import literal
from autopar.runtime.host import begin_from_host, begin_to_host, begin_up, end_from_host, end_to_host
from autopar.runtime.private import FakeTensorMode, OpOverload
from autopar.runtime.wires import EXCHANGING

Data = dict[str, Any]

_MARKS = (OP, BACK, CONVERTED, RECOMPUTED, ADDS)  # The certificate and the runtime read these of a node.
_CALLED: tuple[Any, ...] = (
    *STEPS.values(),
    *PACK.values(),
    *BEGIN.values(),
    *(exchanging.run for exchanging in EXCHANGING.values()),
    *(begin_to_host, end_to_host, begin_from_host, begin_up, end_from_host),
    *(hand_over, finish, part_start, literal, operator.getitem),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in _CALLED}
_NAMES = {f: name for name, f in _FUNCTIONS.items()}
_GRAPHS = ("forward", "backward", "hold", "settle", "beginning")
_COUNTS = ("outputs", "differentiable", "gradients", "waits", "settled_from")


def write(joint: Joint) -> Data:
    """The data of the halves of a program; a letter where they hold what is not data."""
    tables = _Tables()
    parts = joint.parts
    graphs = {name: getattr(joint, name) for name in _GRAPHS}
    graphs |= {} if parts is None else {"inward": parts.inward, "weights": parts.weights}
    return {
        "graphs": {name: tables.graph(graph) for name, graph in graphs.items() if graph is not None},
        **{name: getattr(joint, name) for name in _COUNTS},
        "inputs of parts": None if parts is None else parts.inputs,
        "sent": joint.sent,
        "targets": list(tables.targets),
        "forms": [_form(*form) for form in tables.forms],
        "marks": list(tables.marks),
    }


def read(data: Data) -> Joint:
    """The halves that were written as data; a letter where it does not read as such."""
    try:
        return _joint(data)
    except BadProgram:
        raise
    except Exception as e:  # whatever is wrong with the data, it is the data
        raise BadProgram("this does not read as a program", seen=codec.seen(e).splitlines()[0]) from e


def _joint(data: Data) -> Joint:
    tables = _Known(data)
    graphs = {name: tables.graph(nodes) for name, nodes in data["graphs"].items()}
    inputs = data["inputs of parts"]
    parts = None if inputs is None else Parts(graphs.pop("inward"), graphs.pop("weights"), codec.whole(inputs))
    places = codec.each(codec.whole)
    counts = {name: places(data[name]) for name in _COUNTS if name != "outputs"}
    return Joint(**graphs, outputs=codec.whole(data["outputs"]), **counts, sent=_sent(data["sent"]), parts=parts)


def _sent(data: Any) -> SentByOps:
    """The messages inside ops, by op, axis and way."""
    counts = codec.by_name(codec.whole)
    by_op = codec.by_name(codec.by_name(codec.by_name(lambda ways: Counter(counts(ways)))))
    found: SentByOps = by_op(data)
    return found


def _form(form: TensorForm, device: str) -> list[Any]:
    return [list(form.shape), list(form.stride), str(form.dtype).removeprefix("torch."), device]


class _Tables:
    """What the nodes of several graphs share, each with the number by which they name it."""

    def __init__(self) -> None:
        self.targets: dict[str, int] = {}
        self.forms: dict[tuple[TensorForm, str], int] = {}
        self.marks: dict[tuple[Any, ...], int] = {}

    def graph(self, graph: fx.Graph) -> list[Any]:
        """The nodes of a graph, as lists."""
        return [self._node(node) for node in graph.nodes]

    def _node(self, node: fx.Node) -> list[Any]:
        target = str(node.target)
        if node.op == "call_function":
            target = _name_of(node)
        marks = tuple(node.meta.get(mark) for mark in _MARKS)
        return [
            node.op,
            node.name,
            self.targets.setdefault(target, len(self.targets)),
            [value_as_json(a) for a in node.args],
            {name: value_as_json(a) for name, a in node.kwargs.items()},
            self._value(node.meta.get("val")),
            self.marks.setdefault(marks, len(self.marks)),
        ]

    def _value(self, value: Any) -> Any:
        """The numbers of the forms of a node's results; None where it gives no tensor."""
        if isinstance(value, (list, tuple)):
            return [self._value(v) for v in value]
        if not isinstance(value, Tensor):
            return None
        form = TensorForm(value.shape, value.stride(), value.dtype), value.device.type
        return self.forms.setdefault(form, len(self.forms))


class _Known:
    """The functions, forms and marks that nodes name by numbers, while graphs are read."""

    def __init__(self, data: Data) -> None:
        self.names = [codec.text(name) for name in data["targets"]]
        self.functions: list[Any] = [None] * len(self.names)
        self.marks = [dict(_marks(given)) for given in data["marks"]]
        with FakeTensorMode():
            self.values = [_empty(*form) for form in data["forms"]]

    def graph(self, nodes: Any) -> fx.Graph:
        """The graph of a list of nodes."""
        made = fx.Graph()
        at: dict[str, fx.Node] = {}
        for kind, name, target, args, kwargs, value, marks in nodes:
            if not all(map(_is_a_name, (name, *kwargs))):
                raise BadProgram(f"{name!r} does not name a node of a program")
            node = made.create_node(
                kind,
                self._target(kind, target),
                tuple([value_of_json(a, at) for a in args]),
                {key: value_of_json(a, at) for key, a in kwargs.items()},
                name,
            )
            if node.name != name:
                raise BadProgram(f"the name {name} stands twice in a program")
            node.meta.update(self.marks[marks])
            if value is not None:
                node.meta["val"] = self._value(value)
            at[name] = node
        made.lint()
        return made

    def _target(self, kind: str, number: int) -> Any:
        if kind in ("placeholder", "output") and _is_a_name(self.names[number]):
            return self.names[number]
        if kind != "call_function":
            raise BadProgram(f"{kind} is not a kind of a program's nodes")
        if self.functions[number] is None:
            self.functions[number] = _function(self.names[number])
        return self.functions[number]

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(v) for v in value]
        return None if value is None else self.values[value]


def _is_a_name(text: Any) -> bool:
    """Whether a text may stand in the code that is written of a graph."""
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def _marks(given: Any) -> Iterator[tuple[str, Any]]:
    """The marks that a node has, of all that one may have."""
    for key, mark in zip(_MARKS, given, strict=True):
        if not isinstance(mark, (str, bool, type(None))):
            raise BadProgram(f"{mark!r} is not a mark of a program's nodes")
        if mark is not None:
            yield key, mark


def _empty(shape: list[int], stride: list[int], dtype: str, device: str) -> Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise BadProgram(f"{dtype} is not a dtype")
    return TensorForm(torch.Size(shape), tuple(stride), kind).empty(device)


def _name_of(node: fx.Node) -> str:
    """The name by which a node's function is found again."""
    if isinstance(node.target, OpOverload):
        return str(node.target)
    if node.target not in _NAMES:
        raise BadProgram(f"the program calls {node.target!r}, which cannot be written", at=node.name)
    return _NAMES[node.target]


def _function(name: str) -> Any:
    """The function of a name: one of the table, or an overload of an op that is registered."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    found = functools.reduce(lambda home, part: getattr(home, part, None), name.split("."), torch.ops)
    if not isinstance(found, OpOverload):
        raise BadProgram(
            f"the program calls {name}, which is not an op here",
            advice="for a custom op, import the module that defines it first",
        )
    return found
