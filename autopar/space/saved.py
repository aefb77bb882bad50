"""What an op keeps for its backward, by device and dtype: which operands, which outputs, and what it makes besides.

    keeps("layer_norm", "input weight", cuda="4*2*rows", cpu="2*rows*itemsize")     # mean and reciprocal deviation of
    each row

Operands and outputs are values of the graph and are counted once, by the memory they lie on; what is made besides is in
bytes, a sympy expression in named quantities. Where the kernel depends on the call (attention), a function chooses the
line. This is how a laptop knows what a GPU will keep. Sources: the derivative formulas and kernels of torch 2.11 to
2.13.

    works("cross_entropy", backward="points*itemsize")                               # and what it makes for the while,
    beside operands, results and what it keeps

Ops that draw are emitted in forms of autopar's own (`runtime/forms.py`), on every device: `emitted=` says what those
keep.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy as sp

from autopar.sharding.cluster import Cluster

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.graph.graph import Graph, TensorType


@dataclass(frozen=True, slots=True)
class Line:
    """What one op keeps."""

    values: tuple[str, ...]  # names of arguments, and "out"
    extra: tuple[tuple[str, str], ...] = ()  # device kind -> bytes of what it makes besides


@dataclass(frozen=True, slots=True)
class Saved:
    """One entry of the table: a value of the graph that stays, or what an op makes besides."""

    node: str
    what: str
    shape: tuple[int, ...] | None  # None: made besides
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.node:<48} {self.what:<24} {'' if self.shape is None else list(self.shape)!s:<24} {self.nbytes:>16,}"
        )


WORKS: dict[str, tuple[str, str]] = {}  # bytes for the while, in forward and in backward
LINES: dict[str, Line | Callable[[fx.Node, str], Line]] = {}


def keeps(ops: str, values: str = "", **extra: str) -> None:
    """Add a line for some ops."""
    for op in ops.split():
        LINES[op] = Line(tuple(values.split()), tuple(extra.items()))


def works(ops: str, forward: str = "0", backward: str = "0") -> None:
    """Add what some ops make for the while."""
    for op in ops.split():
        WORKS[op] = forward, backward


keeps(
    "add sub rsub neg view transpose permute t expand narrow select split cat stack unbind identity detach to sum "
    "contiguous slice_scatter select_scatter diagonal "
    "repeat tile roll flip pad floor ceil round trunc sign eq ne lt le gt ge isfinite isnan bitwise_and "
    "bitwise_or bitwise_not logical_and logical_or logical_not arange full zeros ones tensor "
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full cumsum tril triu copy argmax argmin "
    "any all one_hot rand randn"
)
keeps("linear", "input weight")
keeps("matmul", "input other")
keeps("mm", "input mat2")
keeps("addmm", "mat1 mat2")
keeps("baddbmm", "batch1 batch2")
keeps("einsum", "operands")
keeps("grouped_mm", "mat_a mat_b offs")
keeps("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", "input weight")
keeps("mul", "input other")
keeps("div", "input other")
keeps("pow", "input exponent")
keeps("exp sqrt rsqrt tanh sigmoid relu softmax log_softmax reciprocal hardtanh", "out")
keeps(
    "abs log cos sin gelu silu elu leaky_relu hardswish hardsigmoid mish softplus relu6 square erf log1p clamp "
    "logsumexp",
    "input",
)
keeps("maximum minimum", "input other")
keeps("where", "condition")
keeps("masked_fill", "mask")
keeps(
    "dropout", "", cuda="points", cpu="points*itemsize", emitted="points"
)  # a mask of bytes; on a CPU the scaled noise itself
keeps("layer_norm", "input weight", cuda="8*rows", cpu="2*rows*itemsize")
keeps("rms_norm", "input weight", cuda="4*rows", cpu="rows*itemsize + points*itemsize")
keeps("group_norm", "input weight", cuda="8*groups", cpu="2*groups*itemsize")
keeps("batch_norm batch_norm_updating", "input weight", cuda="8*channels", cpu="8*channels")
keeps("cross_entropy", "target", cuda="points*itemsize", cpu="points*itemsize")  # the log-probabilities
keeps("mse_loss", "input target")
keeps("embedding", "input")
keeps("gather index_select", "index")
keeps("index", "index")
keeps("setitem", "index")
keeps("scatter_add scatter", "index")
keeps("topk sort", "out")
keeps("max_pool1d max_pool2d max_pool3d", "input", cuda="8*out_points", cpu="8*out_points")  # with the indices
keeps("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", "input")


works(
    "cross_entropy", backward="points*itemsize"
)  # the gradient of the log-probabilities; where classes are cut, a scattered one beside another
works(
    "dropout", forward="points*Max(0, 11 - itemsize)"
)  # bits: three of 32 at a time, before the mask and the result are there


def _attention(node: fx.Node, kind: str) -> Line:
    """Flash keeps one number a row; so does the memory-efficient kernel, and the mask that only it takes.

    Torch's plain form keeps the probabilities.
    """
    from autopar.graph.graph import type_of

    query: Any = node.kwargs["query"]
    masked, dropped = node.kwargs.get("attn_mask") is not None, node.kwargs.get("dropout_p", 0.0)
    if (
        dropped and kind == "emitted"
    ):  # opened: what the products read, laid out anew, the weights, those that are left, and the mask
        return Line((), ((kind, "3*points*itemsize + pairs*(2*itemsize + 1)"),))
    plain = bool(dropped) and kind == "cpu"
    wide = type_of(query).shape[-1] > 256 and kind == "cuda"
    if plain or (wide and type_of(query).dtype == "float32"):
        return Line(("query", "key", "value"), ((kind, "pairs*itemsize" + ("*2" if dropped else "")),))
    mask: Any = node.kwargs.get("attn_mask")
    boolean = masked and type_of(mask).dtype == "bool"  # turned into numbers of the query's dtype, anew in each call
    formula = ("4*rows" if kind == "cuda" else "rows*accumulate") + ("+ mask*itemsize" if boolean else "")
    return Line(
        ("query", "key", "value", "out", *(["attn_mask"] if masked and not boolean else [])), ((kind, formula),)
    )


LINES["scaled_dot_product_attention"] = _attention


def work_of(node: fx.Node) -> tuple[int, int]:
    """Bytes that an op makes for the while in forward and in backward."""
    from autopar.graph.graph import info, op_name

    name = op_name(node) if info(node).kind == "op" else ""
    opened = name == "scaled_dot_product_attention" and node.kwargs.get("dropout_p", 0.0)
    work = (
        ("pairs*(11 + itemsize)", "2*pairs*itemsize") if opened else WORKS.get(name)
    )  # bits beside the weights; two gradients of the weights
    forward, backward = (int(_bytes(formula)(**_quantities(node))) for formula in work) if work else (0, 0)
    return forward, backward


def _part_of_causal_attention(node: fx.Node, held: Sequence[tuple[int, ...]], kind: str) -> tuple[int, int]:
    """Two calls (runtime/attention.py), on the keys before the part and on its own.

    Forward weighs their outputs, in the dtype of accumulation. In backward each call gives a gradient of the
    queries; nothing has been scattered yet of the gradients of keys and values, which the table has beside what is
    scattered of them. A GPU has no fused kernel for float64: the scores of the larger call are there, twice in forward
    and three times in backward.
    """
    from autopar.graph.graph import info, type_of

    query, key, value = held[:3]
    whole = type_of(node.kwargs["query"])
    share = query[-2] / whole.shape[-2]
    if share == 1 or not node.kwargs.get("is_causal") or info(node).random >= 0:
        return 0, 0
    rows, width, itemsize = math.prod(query[:-1]), value[-1], whole.itemsize
    accumulate = max(4, itemsize)
    forward = rows * ((3 * width + 3) * accumulate - width * itemsize)
    backward = itemsize * (math.prod(query) - share * (math.prod(key) + math.prod(value)))
    opened = itemsize * rows * max(key[-2] - query[-2], query[-2]) if (kind, whole.dtype) == ("cuda", "float64") else 0
    return forward + 2 * opened, max(0, int(backward)) + 3 * opened


PART_WORKS: dict[str, Callable[[fx.Node, Sequence[tuple[int, ...]], str], tuple[int, int]]] = {
    "scaled_dot_product_attention": _part_of_causal_attention
}
"""Temporaries of local forms that make more than their op: bytes in forward and in backward on the device that makes
most, from the shapes of the operands that it holds and its kind."""


def saved(graph: Graph, cluster: Any = None) -> tuple[Saved, ...]:
    """The table: what the backward of the whole graph keeps on one device that runs all of it.

    Parameters, buffers and inputs are there anyway.
    """
    from autopar.graph.graph import info, op_name

    kind = Cluster.of(cluster).device.kernels
    memory = memories(graph)
    rows: list[Saved] = []
    counted: set[Any] = {memory[n] for n in graph.nodes if info(n).kind in ("parameter", "buffer", "input")}

    def count(node: fx.Node, why: str) -> None:
        type_ = info(node).outputs[0]
        if memory[node] not in counted:
            counted.add(memory[node])
            whole = owner[memory[node]]
            rows.append(
                Saved(
                    whole.name,
                    f"for {why}",
                    info(whole).outputs[0].shape,
                    info(whole).outputs[0].nbytes or type_.nbytes,
                )
            )

    owner = owners(graph, memory)
    for node in graph.nodes:
        values, besides = kept_by(node, kind)
        for value in values:
            count(value, op_name(node))
        if besides:
            rows.append(Saved(node.name, f"besides, {op_name(node)}", None, besides))
    return tuple(rows)


def kept_by(node: fx.Node, kind: str, emitted: bool = False) -> tuple[list[fx.Node], int]:
    """The values that one op keeps for its backward on a kind of device, and the bytes of what it makes besides.

    As torch runs it, or as it is emitted.
    """
    from autopar.graph.graph import info, op_name

    about = info(node)
    if about.kind != "op" or not any(t.requires_grad for t in about.outputs):
        return [], 0
    line = LINES.get(op_name(node))
    if emitted and about.random >= 0:
        kind = "emitted"
    if callable(line):
        line = line(node, kind)
    if line is None:  # no line: it may keep everything
        line = Line((*node.kwargs, "out"))
    values = [
        v
        for name in line.values
        for v in _nodes(
            (node if not any(info(u).kind == "part" for u in node.users) else list(node.users))
            if name == "out"
            else node.kwargs.get(name)
        )
        if _is_needed(node, name, v)
    ]
    formula = dict(line.extra).get(kind)
    return values, int(_bytes(formula)(**_quantities(node))) if formula else 0


def saved_bytes(graph: Graph, cluster: Any = None) -> int:
    """Bytes of the table."""
    return sum(row.nbytes for row in saved(graph, cluster))


_PRODUCTS = {
    "linear": ("input", "weight"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "mul": ("input", "other"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}  # no convolution: its backward is one op, which takes both


def _is_needed(node: fx.Node, name: str, value: fx.Node) -> bool:
    """An operand of a product is kept for the gradient of the other."""
    from autopar.graph.graph import op_name, type_of

    pair = _PRODUCTS.get(op_name(node))
    if pair and name in pair:
        other = node.kwargs[pair[1 - pair.index(name)]]
        return hasattr(other, "meta") and type_of(other).requires_grad
    if op_name(node) == "div":
        return (
            type_of(node.kwargs["other"]).requires_grad if hasattr(node.kwargs["other"], "meta") else False
        ) or name == "other"
    return True


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, (tuple, list)):
        return [n for v in value for n in _nodes(v)]
    return [value] if hasattr(value, "meta") else []


def memories(graph: Graph) -> dict[fx.Node, int]:
    """On which memory each value lies, as a number."""
    return layouts(graph)[0]


def layouts(graph: Graph) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """On which memory each value lies, as a number, and which do not lie in memory order.

    Found by running each kind of call once, on meta tensors of the strides that reach it, where a view is a view.
    """
    import torch

    from autopar.graph.blocks import calls
    from autopar.graph.graph import info, type_of

    kinds = calls(graph)
    shapes: dict[Any, torch.Tensor] = {}  # one meta tensor for each type and strides
    ran: dict[
        Any, list[tuple[torch.Tensor, int]]
    ] = {}  # of a kind of call on these: each result, and on which operand's memory it lies; -1: its own
    held: dict[fx.Node, list[tuple[torch.Tensor, int]]] = {}  # of each value: its like, and its memory

    def like(t: torch.Tensor) -> torch.Tensor:
        return shapes.setdefault((tuple(t.shape), t.dtype, t.stride()), t)

    count = itertools.count()
    with torch.no_grad(), torch.device("meta"):
        for node in graph.nodes:
            about = info(node)
            if about.kind in ("parameter", "buffer", "input"):
                held[node] = [(like(torch.empty(type_of(node).shape, dtype=type_of(node).torch_dtype)), next(count))]
            elif about.kind == "part":
                held[node] = [held[node.args[0]][node.args[1]]]
            elif about.kind == "op":
                operands = node._input_nodes  # each once, in order
                key = (kinds[node], *(id(held[n][0][0]) for n in operands))
                if key not in ran:
                    ran[key] = [(like(t), at) for t, at in _run_alone(node, {n: held[n][0][0] for n in operands})]
                before = [held[n][0][1] for n in operands]
                fresh: dict[int, int] = {}  # results may share a memory of their own
                held[node] = [(t, before[at] if at >= 0 else fresh.setdefault(at, next(count))) for t, at in ran[key]]
    single = {n for n in held if not any(info(u).kind == "part" for u in n.users)}
    return {n: held[n][0][1] if n in single else next(count) for n in graph.nodes}, {
        n for n in single if not held[n][0][0].is_contiguous()
    }  # what has parts lies nowhere itself


def _run_alone(node: fx.Node, given: dict[fx.Node, Any]) -> list[tuple[Any, int]]:
    """The results of one call on meta tensors.

    Of each, which operand's memory it lies on, or a negative number for one of its own.
    """
    import torch

    from autopar.graph.graph import info, op_name, run

    about = info(node)
    env = {
        n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for n, t in given.items()
    }  # apart, whatever was the same before
    where = {t.untyped_storage()._cdata: i for i, t in enumerate(env.values())}
    if op_name(node) == "scaled_dot_product_attention":
        query: Any = env[node.kwargs["query"]]
        result: Any = torch.empty_like(
            query[..., :1].expand(about.outputs[0].shape) if query.shape != about.outputs[0].shape else query
        )  # its kernels lay it out as the query
    else:
        try:
            result = run(node, env)
        except (RuntimeError, NotImplementedError):  # an op that meta tensors cannot run makes a new one
            result = [torch.empty(t.shape, dtype=t.torch_dtype) for t in about.outputs]
    results = [
        r if isinstance(r, torch.Tensor) else torch.empty(())
        for r in (result if isinstance(result, (tuple, list)) else [result])
    ]
    own: dict[Any, int] = {}
    return [
        (t, where[c] if (c := t.untyped_storage()._cdata) in where else own.setdefault(c, -1 - len(own)))
        for t in results
    ]


def owners(graph: Graph, memory: dict[fx.Node, int]) -> dict[int, fx.Node]:
    """The first value on each memory: the one whose size it has."""
    owner: dict[int, fx.Node] = {}
    for node in graph.nodes:
        owner.setdefault(memory[node], node)
    return owner


def _quantities(node: fx.Node) -> dict[str, Any]:
    """The numbers that formulas name."""
    from autopar.graph.graph import info

    operand: Any = next(iter(_nodes(tuple(node.kwargs.values()))))
    given: TensorType = info(operand).outputs[0]
    out = info(node).outputs[0]
    points, last = math.prod(given.shape), given.shape[-1] if given.shape else 1
    key: Any = node.kwargs.get("key")
    shape = node.kwargs.get("normalized_shape", (last,))
    width = math.prod(shape if isinstance(shape, (tuple, list)) else (shape,))
    return {
        "points": points,
        "out_points": math.prod(out.shape),
        "rows": points // max(1, width),
        "itemsize": given.itemsize,
        "channels": given.shape[1] if len(given.shape) > 1 else 1,
        "groups": given.shape[0] * node.kwargs.get("num_groups", 1) if given.shape else 1,
        "accumulate": max(4, given.itemsize),
        "mask": math.prod(info(mask).outputs[0].shape) if (mask := node.kwargs.get("attn_mask")) is not None else 0,
        "pairs": points // max(1, last) * (info(key).outputs[0].shape[-2] if key is not None else 1),
    }


@functools.cache
def _bytes(formula: str) -> Callable[..., Any]:
    names = ("points", "out_points", "rows", "itemsize", "channels", "groups", "accumulate", "mask", "pairs")
    return sp.lambdify(names, sp.sympify(formula, locals={n: sp.Symbol(n) for n in names}), "math")
