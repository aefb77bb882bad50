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

from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.verify import verify
from autopar.ops.entry import OPS, facts_of
from autopar.passes import run_passes
from autopar.sharding.placement import Placement, R, S
from autopar.sharding.strategies import Strategy
from autopar.tracer.passes import drop_dead, one_name_per_fan_out
from autopar.turns.time_axis import WHOLE, OnTime, early_gradient_in_float16, strategy_in_turns
from autopar.turns.writer import EVERYWHERE, Value, Writer

MOST = 16  # chunks: a region is written out once for each
FEW = 4  # chunks, beyond which less is gained than they take, as long as there is room (`benchmarks/turns.py`)
_LOSSES = ("cross_entropy", "nll_loss")


@dataclass(frozen=True, slots=True)
class Head:
    """The region of a graph from the product that gives the logits to the numbers that are made of them."""

    product: fx.Node
    ops: frozenset[fx.Node]
    dim: int  # of the logits: the rows that come one after the other
    rows: int

    @property
    def sums(self) -> int:
        """How many of its numbers have gradients."""
        return sum(type_of(n).requires_grad for n in self.ops if _is_number(n))


@dataclass(frozen=True, slots=True)
class HeadFound:
    """The head of a graph, or why none can run in chunks."""

    head: Head | None
    why: str = ""


def head_of(graph: Graph, keeps_outputs: bool) -> HeadFound:
    """The loss head of a graph, where its rows may be independent; else the reason."""
    losses = [n for n in graph.nodes if op_name(n) in _LOSSES and type_of(n).requires_grad]
    if early_gradient_in_float16(graph) is not None:
        return HeadFound(None, "gradients of float16 need the scale of the loss before they are made")
    if graph.loss is None or not losses:
        return HeadFound(None, "the model computes no loss of classes")
    product, *others = dict.fromkeys(map(_product_of, losses))
    if others:
        return HeadFound(None, "the model computes losses of classes from several products")
    if product.op != "call_function":
        return HeadFound(None, "no product gives the logits")
    ops = _made_of_rows(product)
    leaves = any(n.users.keys() & {graph.output} for n in ops if not _is_number(n))
    if leaves and (keeps_outputs or graph.backward_from):
        return HeadFound(None, "the logits leave the step, or gradients arrive at them")
    shape = type_of(product).shape
    if len(shape) < 2:
        return HeadFound(None, "the logits are of one row")
    dim = len(shape) - 2
    return HeadFound(Head(product, ops, dim, shape[dim]))


def _product_of(loss: fx.Node) -> fx.Node:
    """The product that gives the logits of a loss; another node where there is none."""
    logits = loss.kwargs["input"]
    assert isinstance(logits, fx.Node)
    return walks.origin(logits, lambda n: n.op == "call_function" and facts_of(op_name(n)).flops is None)


def _made_of_rows(product: fx.Node) -> frozenset[fx.Node]:
    """The product, and all ops behind it up to those that give a number."""
    found: set[fx.Node] = {product}
    for node in product.graph.nodes:
        if node.op == "call_function" and any(a in found and not _is_number(a) for a in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_number(node: fx.Node) -> bool:
    return not type_of(node).shape


def numbers_of_chunks(head: Head) -> tuple[int, ...]:
    """Numbers of chunks to choose from: 2, 4, ... up to `MOST`, as long as they divide the rows."""
    found, chunks = [], 2
    while chunks <= MOST and head.rows % chunks == 0:
        found.append(chunks)
        chunks *= 2
    return tuple(found)


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
    if found.head.rows % chunks:
        return graph, f"{chunks} chunks do not share its {found.head.rows} rows"
    try:
        made = _Chunked(graph, chunks, found.head).run()
    except _Whole as why:
        return graph, str(why)
    run_passes("graph", (drop_dead, one_name_per_fan_out), made, verify)
    made.fx.__dict__.pop("_autopar_keys", None)
    return made, ""


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
        if strategy is None or not (value.is_partial if _is_number(node) else value.is_shard):
            raise _Whole(f"{op_name(node)} looks at several rows of its logits, or draws")
        self._repeated(node, strategy)

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether an op adds numbers of the head to one, and is written as one more of the head."""
        given = [self.values[n] for n in node.all_input_nodes]
        if self.head.sums < 2 or not any(v.lies.is_added for v in given) or any(v.is_after for v in given):
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
        """The rows of one chunk of a whole value."""
        type_ = type_of(whole)
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
