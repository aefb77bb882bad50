"""Run the loss head in chunks: a region that runs on some rows at a time, forward and backward of a chunk together.

    before    logits = linear(x, w);  v = view(logits, [8192, 50257]);  s = cross_entropy(v, t)
    after     c = chunk(x, 1, 8);  logits = linear(c, w);  v = view(logits, [1024, 50257]);
              s = added_up(cross_entropy(v, chunk(t, 0, 8)))

From the product that gives the logits to the numbers that are made of them, rows are independent, so they may run one
after the other (Colossal-AI's AutoChunk cuts such regions). Only the logits of one chunk, and their gradients, are in
memory at a time: the gradients of a sum are known before backward begins, up to the factor that arrives there. Where
several sums have gradients, such as a cross-entropy and a penalty on logits, the region goes on through linear ops to
the one number that they are added to; counts without gradients, such as an accuracy, are sums of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, Info, TensorType, fresh_key, info, op_name, type_of
from autopar.graph.verify import verify
from autopar.ops.entry import OPS, SHAPE
from autopar.passes import run_passes
from autopar.sharding.placement import Placement, R, S
from autopar.sharding.strategies import Strategy
from autopar.tracer.passes import drop_dead, one_name_per_fan_out
from autopar.turns.head import Head, head_of, is_number, made_of_rows
from autopar.turns.time_axis import WHOLE, OnTime, strategy_in_turns
from autopar.turns.writer import EVERYWHERE, Value, Writer


def why_whole(graph: Graph, chunks: int, keeps_outputs: bool) -> str:
    """The reason why a loss head cannot run in so many chunks."""
    return _written(graph, chunks, keeps_outputs)[1]


def in_chunks(graph: Graph, chunks: int, keeps_outputs: bool) -> Graph:
    """The graph with its loss head in so many chunks; the same graph where it cannot."""
    return _written(graph, chunks, keeps_outputs)[0] if chunks > 1 else graph


def _written(graph: Graph, chunks: int, keeps_outputs: bool) -> tuple[Graph, str]:
    """The graph with its head in chunks, or the same graph and the reason."""
    found = head_of(graph, keeps_outputs)
    if found.head is None:
        return graph, found.why
    if found.head.rows < chunks:
        return graph, f"{chunks} chunks are more than its {found.head.rows} rows"
    whole, head = (graph, found.head) if not found.head.slices else _sliced_first(graph, found.head)
    try:
        if head.rows % chunks:
            whole, head = _Parted(whole, head, head.rows % chunks).parted()
        made = _Chunked(whole, chunks, head).run()
    except _Whole as why:
        return graph, str(why)
    run_passes("graph", (drop_dead, one_name_per_fan_out), made, verify)
    made.fx.__dict__.pop("_autopar_keys", None)
    return made, ""


def _sliced_first(graph: Graph, head: Head) -> tuple[Graph, Head]:
    """The graph whose head computes the rows of logits that are read.

    before    logits = linear(x, w);  s = narrow(logits, 1, 0, 127)
    after     n = narrow(x, 1, 0, 127);  s = linear(n, w)
    """
    made = fx.Graph()
    values = dict[fx.Node, fx.Node]()
    before = head.ops & walks.ancestors(head.slices) - set(head.slices)
    for node in graph.nodes:
        if node in head.slices:
            values[node] = values[node.all_input_nodes[0]]
            continue
        if node is head.product:
            taken = head.slices[0].kwargs
            whole = node.kwargs["input"]
            assert isinstance(whole, fx.Node)
            values[whole] = _rows_of(made, values[whole], head.dim, int(str(taken["start"])), head.rows, head.product)
            copy = made.node_copy(node, values.__getitem__)
            values[whole] = values[whole].all_input_nodes[0]
        else:
            copy = made.node_copy(node, values.__getitem__)
        if node in before:
            copy.meta["info"] = replace(info(node), outputs=(_with_rows(type_of(node), head.dim, head.rows),))
        values[node] = copy
    product = values[head.product]
    ops = made_of_rows(product)
    return replace(graph, fx=made), Head(product, ops, head.dim, head.rows)


def _rows_of(made: fx.Graph, value: fx.Node, dim: int, start: int, length: int, near: fx.Node) -> fx.Node:
    """Write the op that takes some rows of a value."""
    how = {"input": value, "dim": dim, "start": start, "length": length}
    return _written_near(made, "narrow", how, _with_rows(type_of(value), dim, length), near)


def _with_rows(type_: TensorType, dim: int, rows: int) -> TensorType:
    return replace(type_, shape=(*type_.shape[:dim], rows, *type_.shape[dim + 1 :]))


def _written_near(made: fx.Graph, op: str, how: dict[str, Any], type_: TensorType, near: fx.Node) -> fx.Node:
    about = info(near)
    node = made.create_node("call_function", OPS[op], (), how, name=f"{near.name}_{op}")
    node.meta["info"] = Info(fresh_key(made, f"{about.module}/{op}:head"), "op", (type_,), about.module, about.source)
    return node


class _Whole(Exception):
    """Raised with the reason why a head has to run whole."""


class _Chunked(Writer):
    """Writes a graph whose head runs in chunks."""

    total = "added_up"

    def __init__(self, graph: Graph, chunks: int, head: Head) -> None:
        super().__init__(graph, chunks)
        self.head = head

    def run(self) -> Graph:
        """The whole graph. Raises `_Whole` where an op of the head depends on several rows."""
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._whole(node, self.copy(node))
            elif node.op == "call_function":
                if op_name(node) == "identity":  # names are given anew
                    self.values[node] = self.values[node.all_input_nodes[0]]
                elif node in self.head.ops:
                    self._inside(node)
                elif not self._goes_on(node):
                    self._outside(node)
        return self._ended()

    def _whole(self, node: fx.Node, made: fx.Node) -> None:
        """Note a value that is whole during all chunks, or there when they are done."""
        wants = any(t.requires_grad for t in info(node).outputs)
        given = [self.values[n] for n in node.all_input_nodes] if node.op == "call_function" else []
        of_inputs = not wants and all(v.lies.of_inputs for v in given)
        is_after = any(v.is_after or v.lies.is_added for v in given)
        lies = OnTime(WHOLE if wants else EVERYWHERE, of_inputs, of_batch=True)
        self.values[node] = Value(lies, made, made, is_after)

    def _outside(self, node: fx.Node) -> None:
        """Write an op that runs once."""
        arguments = fx.map_arg((node.args, dict(node.kwargs)), self._added_up)
        made = self.fx.create_node("call_function", node.target, *arguments, name=node.name)
        made.meta["info"] = info(node)
        self._whole(node, made)

    def _added_up(self, node: fx.Node) -> fx.Node:
        """A value when all chunks are done."""
        value = self.values[node]
        if not value.lies.is_added:
            return value.turn
        if value.whole is None:
            value.whole = self.add_up(value.turn)
        return value.whole

    def _inside(self, node: fx.Node) -> None:
        """Write an op of the head, which keeps rows apart or adds them up to a number."""
        given = [self.values[n] for n in node.all_input_nodes]
        is_plain = info(node).kind != "part" and len(info(node).outputs) == 1 and info(node).random < 0
        strategy = self._strategy(node) if is_plain and not any(v.is_after for v in given) else None
        value = strategy.outputs[0].value if strategy is not None else R
        if strategy is None or not (value.is_partial if is_number(node) else value.is_shard):
            raise _Whole(f"{op_name(node)} looks at several rows of its logits, or draws")
        self._repeated(node, strategy)

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether an op adds numbers of the head to one, and is written as one more of the head."""
        given = [self.values[n] for n in node.all_input_nodes]
        if self.head.sums < 2 or not any(v.lies.is_added for v in given) or any(v.is_after for v in given):
            return False
        if op_name(node) == "total":  # micro-batches are added up, each of them after its chunks
            return False
        strategy = self._strategy(node)
        if strategy is None or not strategy.outputs[0].value.is_partial:
            return False
        self._repeated(node, strategy)
        return True

    def _strategy(self, node: fx.Node) -> Strategy | None:
        operands = self.bindings.tensors[node]
        lies = [self.values[n].lies for n in operands]
        cut = S(self.head.dim) if node is self.head.product else None
        return strategy_in_turns(node, self.bindings.rules[node], operands, lies, self.turns, cut=cut)

    def _repeated(self, node: fx.Node, strategy: Strategy) -> None:
        """Write an op that runs once for each chunk."""
        made = self.emit(node, self.bindings.tensors[node], strategy)
        made.meta["info"] = replace(info(made), chunks=self.turns)
        self.values[node] = Value(OnTime(strategy.outputs[0], False, of_batch=True), made)

    def share(self, whole: fx.Node, wanted: Placement) -> fx.Node:
        """The rows of one chunk of a whole value, or what each chunk adds of a number."""
        type_ = type_of(whole)
        if wanted.is_partial:
            return _written_near(self.fx, "div", {"input": whole, "other": self.turns}, type_, whole)
        size = wanted.blocks[0] if wanted.blocks else type_.shape[wanted.dim]
        shape = tuple(n // self.turns if d == wanted.dim else n for d, n in enumerate(type_.shape))
        about = info(self.head.product)
        made = self.emitted(
            "chunk", whole, about, replace(type_, shape=shape), dim=wanted.dim, chunks=self.turns, size=size
        )
        made.meta["info"] = replace(info(made), chunks=self.turns)
        return made

    def _ended(self) -> Graph:
        """The graph with its outputs, except for logits, which are not kept."""
        sources = self.graph.output.args[0]
        results = [None if self.values[n].lies.is_cut else self._added_up(n) for n in sources]
        behind = walks.ancestors(n for i in self.graph.differentiable if (n := results[i]) is not None)
        sums = [n for n in behind if n.target is OPS[self.total]]
        if len(sums) > 1:
            raise _Whole("its loss is computed from several sums over rows, whose gradients arrive apart")
        return self.ended(results)


class _Parted(_Chunked):
    """Writes a graph whose head runs on all rows but the last few, which chunks do not share, and apart on these.

    before    logits = linear(x, w);  s = loss(logits, t)
    after     m = narrow(x, 1, 0, 124);  logits = linear(m, w);  s = loss(logits, narrow(t, 1, 0, 124))
              r = narrow(x, 1, 124, 3);  ...  u = add(s, loss(linear(r, w), narrow(t, 1, 124, 3)))
    """

    def __init__(self, graph: Graph, head: Head, rest: int) -> None:
        super().__init__(graph, head.rows, head)
        self.parts = ((0, head.rows - rest), (head.rows - rest, rest))
        self.rests: dict[fx.Node, fx.Node] = {}  # node on the first rows -> the same op on the rest

    def parted(self) -> tuple[Graph, Head]:
        """The graph, and the head on the rows that chunks share."""
        made = self.run()
        product = self.values[self.head.product].turn
        return made, Head(product, made_of_rows(product), self.head.dim, self.parts[0][1])

    def _repeated(self, node: fx.Node, strategy: Strategy) -> None:
        first, rest = (self._part(node, strategy, place) for place in range(2))
        self.rests[first] = rest
        self.values[node] = Value(OnTime(strategy.outputs[0], False, of_batch=True), first)

    def _part(self, node: fx.Node, strategy: Strategy, place: int) -> fx.Node:
        """Write an op of the head on the rows of one part."""
        operands = self.bindings.tensors[node]
        taken = iter([self._on_part(n, f.value, place) for n, f in zip(operands, strategy.operands, strict=True)])
        about = info(node)
        out = strategy.outputs[0].value
        kwargs = dict(node.kwargs)
        type_ = type_of(node)
        if out.is_shard:
            type_ = _with_rows(type_, out.dim, type_.shape[out.dim] // self.head.rows * self.parts[place][1])
        if (name := node.target.local(SHAPE)) is not None:
            kwargs[name] = type_.shape
        made = self.fx.create_node(
            "call_function", node.target, (), dict(fx.map_arg(kwargs, lambda n: next(taken))), name=node.name
        )
        key = about.key if place == 0 else fresh_key(self.fx, f"{about.key}:rest")
        made.meta["info"] = replace(about, key=key, outputs=(type_,))
        return made

    def _on_part(self, node: fx.Node, wanted: Placement, place: int) -> fx.Node:
        """A value as an op on the rows of one part takes it."""
        value = self.values[node]
        if value.lies.flow.value != R:
            return self.rests[value.turn] if place else value.turn
        if wanted.is_partial and place:  # a number beside the head's, which the first part adds
            none = replace(type_of(value.turn), requires_grad=False)
            return _written_near(self.fx, "zeros_like", {"input": value.turn}, none, value.turn)
        return self._rows(value.turn, wanted, place) if wanted.is_shard else value.turn

    def _rows(self, whole: fx.Node, wanted: Placement, place: int) -> fx.Node:
        """The rows of one part of a whole value, out of each of its blocks."""
        type_ = type_of(whole)
        start, length = self.parts[place]
        dim = wanted.dim
        near = self.head.product
        blocks = type_.shape[dim] // self.head.rows
        if blocks == 1:
            return _rows_of(self.fx, whole, dim, start, length, near)
        apart = replace(type_, shape=(*type_.shape[:dim], blocks, self.head.rows, *type_.shape[dim + 1 :]))
        flat = _with_rows(type_, dim, blocks * length)
        turned = _written_near(self.fx, "view", {"input": whole, "size": apart.shape}, apart, near)
        rows = _rows_of(self.fx, turned, dim + 1, start, length, near)
        return _written_near(self.fx, "view", {"input": rows, "size": flat.shape}, flat, near)

    def _added_up(self, node: fx.Node) -> fx.Node:
        value = self.values[node]
        if value.lies.is_added and value.whole is None:
            how = {"input": value.turn, "other": self.rests[value.turn]}
            value.whole = _written_near(self.fx, "add", how, type_of(node), node)
        return value.whole if value.lies.is_added else value.turn

    def _ended(self) -> Graph:
        sources = self.graph.output.args[0]
        return self.ended([None if self.values[n].lies.is_cut else self._added_up(n) for n in sources])
