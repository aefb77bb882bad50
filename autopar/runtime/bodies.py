"""Bodies: functions from rows to rows as text, so that an op can have one among its arguments.

    {"steps": [["method", "chunk", [["v", 0], 2], {"dim": -1}], ...], "gives": ["v", 5]}

A text names functions of torch and methods of tensors, numbers and earlier values; `["v", 0]` are the rows, and after
them stand the parameters of modules that the function reads. It is equal for equal functions, can be hashed and saved,
and says nothing about sizes: it runs on any number of rows, and on a part of each row where `is_by_columns`.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import GraphAppendingTracer

from autopar.runtime.private import TRACING, settle_fake_modes

# layouts of the columns of rows, in the notation of rules: two halves, pairs, or all of one kind
HALVES = "gate|up"
PAIRS = "(i two:2!)"
ONE = "i"
WHOLE = "whole"  # each column of the result may follow from all of its row
_HOMES = {"torch": torch, "F": F, "operator": operator}
T = TypeVar("T")
OfRows = Callable[[Tensor], Tensor]


class NotABody(Exception):
    """What a function does cannot be said as a body."""


@dataclass(frozen=True, slots=True)
class Body:
    """A function from rows to rows, and what was found when it was tried."""

    text: str
    is_by_rows: bool  # each row of the result follows from one row
    is_by_columns: bool  # whether a part of a result follows from the same part of a row, or of its two halves
    given: tuple[Tensor, ...]  # tensors of modules that it reads, in the order in which its text names them


def read_body(
    function: OfRows, layout: str, around: Callable[[OfRows], OfRows] = lambda f: f, columns: int = 8
) -> Body:
    """The body that `around(function)` computes; raises `NotABody` where it cannot be told without values.

    Its rows have two halves end to end, of which its result has one, or pairs; or as many columns as its result. It is
    tried, with a result of so many columns, in a thread of its own, where no capture sees it. A function that is a
    module, or a method of one, may read the module's parameters and buffers.
    """
    held = tuple(_tensors_of(function))
    return _in_a_thread(lambda: _tried(function, held, layout, around, columns))


def _in_a_thread(make: Callable[[], T]) -> T:
    settle_fake_modes()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _module_of(function: Any) -> nn.Module | None:
    of = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return of if isinstance(of, nn.Module) else None


def _tensors_of(function: Any) -> Iterator[Tensor]:
    """The tensors that a function may read, each once."""
    module = _module_of(function)
    if module is not None:
        yield from module.parameters()
        yield from module.buffers()


def _with(function: Any, tensors: Mapping[int, Any]) -> Any:
    """The function with others in the places of its module's tensors, which are named by their ids."""
    module = _module_of(function)
    if module is None:
        return function
    other = _copied(module, tensors)
    return other if function is module else MethodType(function.__func__, other)


def _copied(module: nn.Module, tensors: Mapping[int, Any]) -> nn.Module:
    """A module with anything for its tensors, as plain attributes, as symbols are not tensors."""
    made: nn.Module = object.__new__(type(module))  # Modules with a parametrization refuse to be copied.
    held = vars(made)
    held.update(vars(module))
    for kind in ("_parameters", "_buffers"):
        held.update({name: tensors.get(id(tensor)) for name, tensor in held[kind].items()})
        held[kind] = {}
    held["_modules"] = {name: m and _copied(m, tensors) for name, m in held["_modules"].items()}
    return made


def _tried(
    function: OfRows, held: tuple[Tensor, ...], layout: str, around: Callable[[OfRows], OfRows], columns: int
) -> Body:
    text, read = _text_of(function, held, layout, around)
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(6, columns * (2 if layout in (HALVES, PAIRS) else 1), generator=generator).double()
    given = [1 + torch.rand(t.shape, generator=generator).double() for t in read]
    try:
        whole = run_body(text)(rows, *given)
        own = around(_with(function, {id(t): x for t, x in zip(read, given, strict=True)}))(rows)
    except Exception as e:  # whatever a user's function raises on rows of numbers
        raise NotABody(f"{type(e).__name__}: {e}") from e
    if whole.shape != (len(rows), columns) or not torch.equal(whole, own):
        raise NotABody(f"it makes {list(whole.shape)} of {list(rows.shape)}")
    parts = _parts_of_halves(rows) if layout == HALVES else rows.chunk(2, -1)
    is_by_rows = _is_in_parts(text, rows.chunk(2), given, 0, whole)
    is_by_columns = layout != WHOLE and _is_in_parts(text, parts, given, -1, whole)
    return Body(text, is_by_rows, is_by_columns, read)


def _is_in_parts(text: str, parts: Sequence[Tensor], given: Sequence[Tensor], dim: int, whole: Tensor) -> bool:
    """Whether a body makes of parts what it makes of the whole."""
    try:
        made = torch.cat([run_body(text)(part, *given) for part in parts], dim)
    except Exception:  # such as that of a parameter with the width of a whole row
        return False
    return made.shape == whole.shape and torch.allclose(made, whole, 1e-12, 1e-12)


def _parts_of_halves(rows: Tensor) -> Sequence[Tensor]:
    first, second = rows.chunk(2, -1)
    return [torch.cat(pair, -1) for pair in zip(first.chunk(2, -1), second.chunk(2, -1), strict=True)]


def _text_of(
    function: OfRows, held: tuple[Tensor, ...], layout: str, around: Callable[[OfRows], OfRows]
) -> tuple[str, tuple[Tensor, ...]]:
    """The text of a function, and those of the tensors that it reads.

    It is found by running the function on symbols, which answer no question about values.
    """
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    tracer = GraphAppendingTracer(graph)
    symbols = {id(t): graph.placeholder(f"given_{i}") for i, t in enumerate(held)}
    try:
        of_symbols: Any = around(_with(function, {k: fx.Proxy(node, tracer) for k, node in symbols.items()}))
        made = of_symbols(fx.Proxy(rows, tracer))
    except Exception as e:  # whatever a symbol is not, such as an answer to a question
        raise NotABody(f"{type(e).__name__}: {e}") from e
    if not isinstance(made, fx.Proxy):
        raise NotABody("its result does not follow from its rows")
    read = tuple(t for t in held if symbols[id(t)].users)
    if other := [t for t in read if not t.is_floating_point()]:
        raise NotABody(f"it reads a tensor of {other[0].dtype}")
    operands = [rows, *(symbols[id(t)] for t in read)]
    places = {node: i for i, node in enumerate(operands)}
    steps = []
    for node in graph.nodes:
        if node.op != "placeholder":
            given = [_written(said, places) for said in (node.args, node.kwargs)]
            is_method = node.op == "call_method"
            name = node.target if is_method else _name_of(node.target)
            steps.append(["method" if is_method else "function", name, *given])
            places[node] = len(places)
    said = {"steps": steps, "gives": ["v", places[made.node]], "layout": layout, "reads": len(read)}
    return json.dumps(said, sort_keys=True), read


def layout_of(text: str) -> str:
    """The layout of a body's rows, in the notation of rules."""
    found: str = json.loads(text)["layout"]
    return found


@functools.cache
def reads_of(text: str) -> int:
    """The number of tensors that a body reads besides its rows."""
    found: int = json.loads(text)["reads"]
    return found


def _name_of(function: Any) -> str:
    if function is getattr:
        return "getattr"
    for home, module in _HOMES.items():
        name = getattr(function, "__name__", "")
        if getattr(module, name, None) is function:
            return f"{home}.{name}"
    raise NotABody(f"it calls {function}")


def _written(value: Any, places: dict[fx.Node, int]) -> Any:
    """An argument as JSON: everything but numbers, texts and None is a list that begins with its kind."""
    if isinstance(value, fx.Node):
        return ["v", places[value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return ["tuple", *(_written(v, places) for v in value)]
    if isinstance(value, dict):
        return {k: _written(v, places) for k, v in value.items()}
    if isinstance(value, slice):
        return ["slice", *(_written(v, places) for v in (value.start, value.stop, value.step))]
    if value is Ellipsis:
        return ["..."]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    raise NotABody(f"it takes {value!r}")


def _read(said: Any, values: Sequence[Any]) -> Any:
    """The argument that `_written` wrote, with values in their places."""
    if isinstance(said, dict):
        return {k: _read(v, values) for k, v in said.items()}
    if not isinstance(said, list):
        return said
    kind, *rest = said
    if kind == "v":
        return values[rest[0]]
    if kind == "...":
        return Ellipsis
    if kind == "dtype":
        return getattr(torch, rest[0])
    made = [_read(v, values) for v in rest]
    return slice(*made) if kind == "slice" else tuple(made)


@functools.cache
def run_body(text: str) -> Callable[..., Tensor]:
    """The function that a text says, of rows and of what it reads besides."""
    said = json.loads(text)
    steps = [(_function(kind, name), args, kwargs) for kind, name, args, kwargs in said["steps"]]

    def run(rows: Tensor, *given: Tensor) -> Tensor:
        values: list[Any] = [rows, *given]
        for function, args, kwargs in steps:
            values.append(function(*_read(args, values), **_read(kwargs, values)))
        result: Tensor = _read(said["gives"], values)
        return result

    return run


def _function(kind: str, name: str) -> Callable[..., Any]:
    if kind == "method":
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    if name == "getattr":
        return getattr
    home, _, name = name.partition(".")
    found: Callable[..., Any] = getattr(_HOMES[home], name)
    return found


def gradients_of_body(text: str, rows: Tensor, given: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """The gradients of a body's rows, and of what it reads besides, from that of its result.

    It also works where autograd is off.
    """
    with TRACING:  # one at a time, also where ranks are threads
        about = tuple((tuple(t.shape), t.dtype) for t in given)
        width = rows.shape[-1] if given else 16
        backward = _derived(text, width, rows.dtype, about, gradient.dtype, rows.device.type)
    found: list[Tensor] = backward(gradient, rows, *given)
    return found


_About = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@functools.cache
def _derived(
    text: str, width: int, dtype: torch.dtype, about: _About, result: torch.dtype, device: str
) -> Callable[..., Any]:
    """A body's backward as a graph of any number of rows, and of columns where it reads nothing besides.

    It is derived in a thread of its own, as autograd and tracing do not work inside a kernel.
    """

    def backward(gradient: Tensor, *tensors: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in tensors]
            return list(torch.autograd.grad(run_body(text)(*leaves), leaves, gradient))

    def derive() -> Callable[..., Any]:
        count = 2 + max(width, *(n for shape, _ in about for n in shape), 0)  # Equal sizes would be taken for one.
        rows = torch.zeros(count, width, dtype=dtype, device=device)
        given = [torch.ones(shape, dtype=own, device=device) for shape, own in about]
        like = run_body(text)(rows, *given)
        return make_fx(backward, tracing_mode="symbolic")(torch.zeros_like(like, dtype=result), rows, *given)

    return _in_a_thread(derive)
