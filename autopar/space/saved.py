"""What the backward of a graph keeps, by device and dtype: values of the graph, and what ops make besides.

Each op's entry says what it keeps (`keeps=`, `makes=`) and what it makes temporarily (`work=`). Operands and outputs
are values of the graph and are counted once, by the memory that holds them; extra bytes are a sympy expression in
named quantities. This is how a laptop knows what a GPU will keep. Sources of the lines: the derivative formulas and
kernels of torch 2.11 to 2.13. Ops that draw are emitted in forms of autopar's own (`runtime/forms.py`), on every
device: `emitted` says what those keep.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import sympy as sp
import torch
import torch.fx as fx

from autopar.graph import walks
from autopar.graph.blocks import calls
from autopar.graph.carried import written_in_place
from autopar.graph.graph import Graph, call_of, info, op_name, run, type_of
from autopar.graph.nodes import is_value, tensor_operands, wants_gradient
from autopar.ops.entry import Line, facts_of
from autopar.sharding.attention_ways import PLAIN
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import optimizer_figures
from autopar.space.backward_kernels import Backward, End, Held, is_opened, port_of


@dataclass(frozen=True, slots=True)
class Saved:
    """A row of the table of saved memory: a value of the graph that is kept, or what an op makes besides."""

    node: str
    what: str
    shape: tuple[int, ...] | None  # None for extra bytes
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.node:<48} {self.what:<24} {'' if self.shape is None else list(self.shape)!s:<24} {self.nbytes:>16,}"
        )


def work_of(node: fx.Node) -> tuple[int, int]:
    """Bytes of an op's workspace in forward, and in backward."""
    work = facts_of(op_name(node)).work if info(node).kind == "op" else None
    if work is None:
        return 0, 0
    forward, backward = work(call_of(node)) if callable(work) else work
    quantities = _quantities(node)
    return int(_bytes(forward)(**quantities)), int(_bytes(backward)(**quantities))


def saved(graph: Graph, cluster: Any = None, emitted: bool = False) -> tuple[Saved, ...]:
    """The table of what backward keeps of a whole graph, on one device that runs all of it.

    `emitted` asks for the emitted program rather than torch's own. Parameters, buffers and inputs do not count.
    """
    kind = Cluster.of(cluster).device.kernels
    found = Memories.of(graph, kind)
    memory = found.memory
    rows: list[Saved] = []
    counted: set[Any] = {memory[n] for n in graph.nodes if info(n).kind in ("parameter", "buffer", "input")}

    def count(node: fx.Node, why: str) -> None:
        type_ = info(node).outputs[0]
        if memory[node] not in counted:
            counted.add(memory[node])
            whole = found.owners[memory[node]]
            rows.append(
                Saved(
                    whole.name,
                    f"for {why}",
                    info(whole).outputs[0].shape,
                    info(whole).outputs[0].nbytes or type_.nbytes,
                )
            )

    for node in graph.nodes:
        values, besides = kept_by(node, kind, emitted)
        for value in values:
            count(value, op_name(node))
        if besides:
            rows.append(Saved(node.name, f"besides, {op_name(node)}", None, sum(held.nbytes for held in besides)))
    return tuple(rows)


def kept_by(
    node: fx.Node, kind: str, emitted: bool = False, backward: Backward | None = None
) -> tuple[list[fx.Node], tuple[Held, ...]]:
    """Values that one op keeps for its backward on a kind of device, and what it makes besides.

    If `emitted`, as the emitted program does: an op that runs once for each chunk reads its whole operands until the
    last chunk has come back. Its `backward`, where it is known, says what its entry leaves open.
    """
    about = info(node)
    if about.kind != "op" or not any(t.requires_grad for t in about.outputs):
        return [], ()
    line = facts_of(op_name(node)).keeps
    if emitted and about.random >= 0:
        kind = "emitted"
    if callable(line):
        line = line(call_of(node), kind)
    values: list[fx.Node] = []
    if backward is not None and (line is None or not line.extra or facts_of(op_name(node)).scores is not None):
        values += [n for k, n in enumerate(tensor_operands(node)) if k in backward.reads]
        values += [n for n in walks.results(node) if port_of(n) in backward.reads_out]
        besides = backward.besides
    else:
        if line is None:  # an op without an entry may keep everything
            line = Line(tuple((name, "") for name in (*node.kwargs, "out")))
        for name, gradient_of in line.values:
            if not gradient_of or wants_gradient(node.kwargs.get(gradient_of)):
                values += walks.results(node) if name == "out" else _nodes(node.kwargs.get(name))
        besides = tuple(_besides(node, line, kind))
    if emitted and about.chunks > 1:
        values += [n for n in node.all_input_nodes if info(n).chunks == 1 and n not in values]
    return values, besides


def _besides(node: fx.Node, line: Line, kind: str) -> Iterator[Held]:
    """The extra bytes that an op keeps on a kind of device, as its entry says.

    Each is cut as one of the operands is.
    """
    for of, formula, argument in line.extra:
        if of == kind:
            place = tensor_operands(node).index(node.kwargs[argument]) if argument else 0
            yield Held(int(_bytes(formula)(**_quantities(node))), End(True, place, False))


def bytes_that_stand(graph: Graph, optimizer: str | float, steps: bool = False) -> float:
    """Bytes of parameters, their gradients and optimizer states, over all devices together.

    With `steps`, also those that the optimizer's step makes temporarily.
    """
    types = [type_of(node) for node in graph.parameters.values()]

    def kept(itemsize: int) -> float:
        figures = optimizer_figures(optimizer, itemsize)
        return figures["kept"] + (figures["temporary"] if steps else 0)

    return float(sum(t.nbytes * (1 + t.requires_grad * (1 + kept(t.itemsize))) for t in types))


def saved_bytes(graph: Graph, cluster: Any = None, emitted: bool = False) -> int:
    """Total bytes of the table of saved memory."""
    return sum(row.nbytes for row in saved(graph, cluster, emitted))


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, (tuple, list)):
        return [n for v in value for n in _nodes(v)]
    return [value] if is_value(value) else []


def memories(graph: Graph, kind: str) -> Mapping[fx.Node, int]:
    """The memory of each value, as a number; values with equal numbers share theirs."""
    return Memories.of(graph, kind).memory


@dataclass(frozen=True, slots=True, eq=False)
class Memories:
    """Where the values of a graph lie on one kind of device, and how."""

    memory: Mapping[fx.Node, int]  # each value's memory, as a number
    owners: Mapping[int, fx.Node]  # the first value on each memory, which has its size
    is_view: Mapping[fx.Node, bool]  # whether each value lies in the memory of one before it
    turned: Set[fx.Node]  # values that are not contiguous
    lies: Mapping[fx.Node, torch.Tensor]  # a meta tensor of each value's strides

    @staticmethod
    def of(graph: Graph, kind: str) -> Memories:
        """The memories on a kind of device."""
        memory, turned, lies = _layout(graph, kind)
        owners: dict[int, fx.Node] = {}
        for node in graph.nodes:
            owners.setdefault(memory[node], node)
        return Memories(memory, owners, {n: owners[memory[n]] is not n for n in graph.nodes}, turned, lies)

    def bytes_of(self, memory: int, otherwise: int = 0) -> int:
        """Bytes of a memory, which are those of its first value, where that is a tensor."""
        owner = self.owners[memory]
        return type_of(owner).nbytes if info(owner).outputs else otherwise


def _layout(graph: Graph, kind: str) -> tuple[dict[fx.Node, int], set[fx.Node], dict[fx.Node, torch.Tensor]]:
    """Each value's memory as a number, the values that are not contiguous, and meta tensors.

    They are found by running each kind of call once, on meta tensors of the strides that reach it, where a view is a
    view.
    """
    kinds = calls(graph)
    over = written_in_place(graph)
    shapes: dict[Any, torch.Tensor] = {}  # one meta tensor for each type and strides
    # The results of a kind of call on such tensors, each with the index of the operand whose memory it shares; a
    # negative number stands for memory of its own.
    ran: dict[Any, list[tuple[torch.Tensor, int]]] = {}
    held: dict[fx.Node, list[tuple[torch.Tensor, int]]] = {}  # each value's meta tensors and their memories

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
                operands = node.all_input_nodes  # each once, in order
                key = (kinds[node], *(id(held[n][0][0]) for n in operands))
                if key not in ran:
                    given = {n: held[n][0][0] for n in operands}
                    ran[key] = [(like(t), at) for t, at in _run_alone(node, given, kind)]
                before = [held[n][0][1] for n in operands]
                fresh: dict[int, int] = {}  # results may share a memory of their own
                held[node] = [(t, before[at] if at >= 0 else fresh.setdefault(at, next(count))) for t, at in ran[key]]
                if node in over:
                    held[node] = [(held[node][0][0], held[over[node]][0][1])]
    single = {n for n in held if not walks.parts(n)}  # an op with several outputs has no memory itself
    memories = {n: held[n][0][1] if n in single else next(count) for n in graph.nodes}
    return memories, {n for n in single if not held[n][0][0].is_contiguous()}, {n: held[n][0][0] for n in single}


def _run_alone(node: fx.Node, given: dict[fx.Node, Any], kind: str) -> list[tuple[Any, int]]:
    """The results of one call on meta tensors, each with the index of the operand whose memory it shares.

    A negative number stands for memory of its own.
    """
    about = info(node)
    # Every operand gets memory of its own, so that a result's memory names one operand.
    env = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for n, t in given.items()}
    where = {t.untyped_storage()._cdata: i for i, t in enumerate(env.values())}
    if op_name(node) == PLAIN:
        query: Any = env[node.kwargs["query"]]
        whole = query if query.shape == about.outputs[0].shape else query[..., :1].expand(about.outputs[0].shape)
        # A fused kernel lays out its result as the query; separate products give a contiguous result.
        is_fused = kind != "cpu" or not (about.random >= 0 or is_opened(node, env))
        result: Any = torch.empty_like(whole) if is_fused else torch.empty(whole.shape, dtype=whole.dtype)
    else:
        try:
            result = run(node, env)
        except (RuntimeError, NotImplementedError):  # an op that cannot run on meta tensors is taken to make a new one
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


def _quantities(node: fx.Node) -> dict[str, Any]:
    """The quantities that formulas of bytes may name."""
    operand: Any = next(iter(_nodes(tuple(node.kwargs.values()))))
    given = info(operand).outputs[0]
    out = info(node).outputs[0]
    points = math.prod(given.shape)
    last = given.shape[-1] if given.shape else 1
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
