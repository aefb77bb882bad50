"""Bodies: functions from rows to rows as text, so that an op can have one among its arguments.

    {"steps": [["method", "chunk", [["v", 0], 2], {"dim": -1}], ...], "gives": ["v", 5]}

A text names functions of torch and methods of tensors, numbers and earlier values; `["v", 0]` are the rows. It is equal
for equal functions, can be hashed and saved, and says nothing about sizes: it runs on any number of rows, and on a part
of each row where `is_by_columns`.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import GraphAppendingTracer

from autopar.runtime.private import TRACING

# layouts of the columns of rows, in the notation of rules: two halves, pairs, or all of one kind
HALVES = "gate|up"
PAIRS = "(i two:2!)"
ONE = "i"
_HOMES = {"torch": torch, "F": F, "operator": operator}
T = TypeVar("T")


class NotABody(Exception):
    """What a function does cannot be said as a body."""


@dataclass(frozen=True, slots=True)
class Body:
    """A function from rows to rows, and what was found when it was tried."""

    text: str
    is_by_rows: bool  # each row of the result follows from one row
    is_by_columns: bool  # whether a part of a result follows from the same part of a row, or of its two halves


def read_body(function: Callable[[Tensor], Tensor], layout: str) -> Body:
    """The body that a function computes; raises `NotABody` where it cannot be told without values.

    Its rows have two halves end to end, of which its result has one, or pairs; or as many columns as its result. It is
    tried in a thread of its own, where no capture sees it.
    """
    return _in_a_thread(lambda: _tried(function, layout))


def _in_a_thread(make: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _tried(function: Callable[[Tensor], Tensor], layout: str) -> Body:
    text = _text_of(function, layout)
    run = run_body(text)
    generator = torch.Generator().manual_seed(0)
    columns = 8
    rows = 3 * torch.randn(6, columns * (1 if layout == ONE else 2), generator=generator, dtype=torch.float64)
    try:
        whole = run(rows)
        own = function(rows)
    except Exception as e:
        raise NotABody(f"{type(e).__name__}: {e}") from e
    if whole.shape != (len(rows), columns) or not torch.equal(whole, own):
        raise NotABody(f"it makes {list(whole.shape)} of {list(rows.shape)}")
    is_by_rows = torch.allclose(torch.cat([run(part) for part in rows.chunk(2)]), whole, 1e-12, 1e-12)
    parts = _parts_of_halves(rows) if layout == HALVES else rows.chunk(2, -1)
    by_parts = torch.cat([run(part) for part in parts], -1)
    return Body(text, is_by_rows, torch.allclose(by_parts, whole, 1e-12, 1e-12))


def _parts_of_halves(rows: Tensor) -> Sequence[Tensor]:
    first, second = rows.chunk(2, -1)
    return [torch.cat(pair, -1) for pair in zip(first.chunk(2, -1), second.chunk(2, -1), strict=True)]


def _text_of(function: Callable[[Tensor], Tensor], layout: str) -> str:
    """The text of a function, found by running it on a symbol, which answers no question about values."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    places = {rows: 0}
    try:
        made = function(fx.Proxy(rows, GraphAppendingTracer(graph)))
    except Exception as e:  # whatever a symbol is not, such as an answer to a question
        raise NotABody(f"{type(e).__name__}: {e}") from e
    if not isinstance(made, fx.Proxy):
        raise NotABody("its result does not follow from its rows")
    steps = []
    for node in graph.nodes:
        if node is not rows:
            given = [_written(said, places) for said in (node.args, node.kwargs)]
            is_method = node.op == "call_method"
            name = node.target if is_method else _name_of(node.target)
            steps.append(["method" if is_method else "function", name, *given])
            places[node] = len(places)
    return json.dumps({"steps": steps, "gives": ["v", places[made.node]], "layout": layout}, sort_keys=True)


def layout_of(text: str) -> str:
    """The layout of a body's rows, in the notation of rules."""
    found: str = json.loads(text)["layout"]
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
def run_body(text: str) -> Callable[[Tensor], Tensor]:
    """The function that a text says."""
    said = json.loads(text)
    steps = [(_function(kind, name), args, kwargs) for kind, name, args, kwargs in said["steps"]]

    def run(rows: Tensor) -> Tensor:
        values: list[Any] = [rows]
        for function, args, kwargs in steps:
            given = _read(args, values)
            values.append(function(*given, **_read(kwargs, values)))
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


def gradient_of_body(text: str, rows: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a body's rows from that of its result; it also works where autograd is off."""
    with TRACING:  # one at a time, also where ranks are threads
        backward = _derived(text, rows.dtype, gradient.dtype, rows.device.type)
    made: Tensor = backward(rows, gradient)
    return made


@functools.cache
def _derived(text: str, dtype: torch.dtype, result: torch.dtype, device: str) -> Callable[..., Any]:
    """A body's backward as a graph of any number of rows and columns.

    It is derived in a thread of its own, as autograd and tracing do not work inside a kernel.
    """

    def backward(rows: Tensor, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            made: Tensor
            (made,) = torch.autograd.grad(run_body(text)(rows), rows, gradient)
        return made

    def derive() -> Callable[..., Any]:
        rows = torch.zeros(6, 16, dtype=dtype, device=device)
        like = run_body(text)(rows)
        return make_fx(backward, tracing_mode="symbolic")(rows, torch.zeros_like(like, dtype=result))

    return _in_a_thread(derive)
