"""Run the loss head in chunks: a region that runs on some rows at a time, forward and backward of a chunk together.

    before    logits = linear(x, w);  v = view(logits, [8192, 50257]);  s = cross_entropy(v, t)
    after     c = chunk(x, 1, 8);  logits = linear(c, w);  v = view(logits, [1024, 50257]);
              s = added_up(cross_entropy(v, chunk(t, 0, 8)))

From the product that gives the logits to the sum of the losses, rows are independent, so they may run one after the
other (Colossal-AI's AutoChunk cuts such regions). Only the logits of one chunk, and their gradients, are in memory at a
time: the gradients of a sum are known before backward begins, up to the factor that arrives there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.verify import verify
from autopar.ops.entry import facts_of
from autopar.passes import run_passes
from autopar.sharding.placement import Placement, S
from autopar.sharding.strategies import Strategy
from autopar.tracer.passes import drop_dead, one_name_per_fan_out
from autopar.turns.time_axis import WHOLE, OnTime, early_gradient_in_float16, strategy_in_turns
from autopar.turns.writer import EVERYWHERE, Value, Writer

MOST = 16  # chunks: a region is written out once for each
FEW = 4  # chunks, beyond which less is gained than they take, as long as there is room (`benchmarks/turns.py`)
_LOSSES = ("cross_entropy", "nll_loss")


@dataclass(frozen=True, slots=True)
class Head:
    """The region of a graph from the product that gives the logits to the sum of the losses."""

    product: fx.Node
    loss: fx.Node
    ops: frozenset[fx.Node]
    dim: int  # of the logits: the rows that come one after the other
    rows: int


@dataclass(frozen=True, slots=True)
class HeadFound:
    """The head of a graph, or why none can run in chunks."""

    head: Head | None
    why: str = ""


def head_of(graph: Graph, keeps_outputs: bool) -> HeadFound:
    """The loss head of a graph, where its rows are independent; else the reason."""
    losses = [n for n in graph.nodes if op_name(n) in _LOSSES and type_of(n).requires_grad]
    if early_gradient_in_float16(graph) is not None:
        return HeadFound(None, "gradients of float16 need the scale of the loss before they are made")
    if graph.loss is None or len(losses) != 1:
        return HeadFound(None, "the model computes no loss of classes, or several")
    (loss,) = losses
    if loss.kwargs.get("reduction", "mean") != "sum" or type_of(loss).shape:
        return HeadFound(None, "the loss of classes is no sum over rows")
    logits = loss.kwargs["input"]
    assert isinstance(logits, fx.Node)
    product = walks.origin(logits, lambda n: n.op == "call_function" and facts_of(op_name(n)).flops is None)
    if product.op != "call_function":
        return HeadFound(None, "no product gives the logits")
    ops = _between(product, loss)
    outside = {u for n in ops - {loss} for u in n.users if u not in ops}
    if any(u.op != "output" for u in outside):
        readers = sorted(info(u).key for u in outside if u.op != "output")
        return HeadFound(None, f"the logits are also read by {', '.join(readers)}")
    if outside and (keeps_outputs or graph.backward_from):
        return HeadFound(None, "the logits leave the step, or gradients arrive at them")
    shape = type_of(product).shape
    if len(shape) < 2:
        return HeadFound(None, "the logits are of one row")
    dim = len(shape) - 2
    return HeadFound(Head(product, loss, frozenset(ops), dim, shape[dim]))


def _between(product: fx.Node, loss: fx.Node) -> set[fx.Node]:
    """The product, the loss, and all ops between them."""
    behind: set[fx.Node] = {product}
    for node in product.graph.nodes:
        if node.op == "call_function" and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return behind & walks.ancestors([loss])


def numbers_of_chunks(head: Head) -> tuple[int, ...]:
    """Numbers of chunks to choose from: 2, 4, ... up to `MOST`, as long as they divide the rows."""
    found, chunks = [], 2
    while chunks <= MOST and head.rows % chunks == 0:
        found.append(chunks)
        chunks *= 2
    return tuple(found)


def why_whole(graph: Graph, chunks: int, keeps_outputs: bool) -> str:
    """The reason why a loss head cannot run in so many chunks."""
    found = head_of(graph, keeps_outputs)
    if found.head is None:
        return found.why
    if found.head.rows % chunks:
        return f"{chunks} chunks do not share its {found.head.rows} rows"
    return "one of its ops looks at several rows, or draws"


def in_chunks(graph: Graph, chunks: int, keeps_outputs: bool) -> Graph:
    """The graph with its loss head in so many chunks; the same graph where it cannot."""
    found = head_of(graph, keeps_outputs) if chunks > 1 else HeadFound(None)
    if found.head is None or found.head.rows % chunks:
        return graph
    made = _Chunked(graph, chunks, found.head).run()
    if made is None:
        return graph
    run_passes("graph", (drop_dead, one_name_per_fan_out), made, verify)
    made.fx.__dict__.pop("_autopar_keys", None)
    return made


class _Chunked(Writer):
    """Writes a graph whose head runs in chunks."""

    total = "added_up"

    def __init__(self, graph: Graph, chunks: int, head: Head) -> None:
        super().__init__(graph, chunks)
        self.head = head

    def run(self) -> Graph | None:
        """The whole graph; None where an op of the head depends on several rows."""
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._whole(node, self.copy(node))
            elif node.op == "call_function" and node not in self.head.ops:
                self._outside(node)
            elif node.op == "call_function" and not self._inside(node):
                return None
        return self._ended()

    def _whole(self, node: fx.Node, made: fx.Node) -> None:
        """Note a value that is whole during all chunks."""
        wants = any(t.requires_grad for t in info(node).outputs)
        of_inputs = not wants and (
            node.op != "call_function" or all(self.values[n].lies.of_inputs for n in node.all_input_nodes)
        )
        self.values[node] = Value(OnTime(WHOLE if wants else EVERYWHERE, of_inputs, of_batch=True), made, made)

    def _outside(self, node: fx.Node) -> None:
        if op_name(node) == "identity":  # names are given anew
            self.values[node] = self.values[node.all_input_nodes[0]]
            return
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n].turn)
        made = self.fx.create_node("call_function", node.target, *arguments, name=node.name)
        made.meta["info"] = info(node)
        self._whole(node, made)

    def _inside(self, node: fx.Node) -> bool:
        """Write an op of the head; False where it cannot run on some of the rows."""
        operands = self.bindings.tensors[node]
        if op_name(node) == "identity":
            self.values[node] = self.values[operands[0]]
            return True
        if info(node).kind == "part" or len(info(node).outputs) > 1 or info(node).random >= 0:
            return False
        lies = [self.values[n].lies for n in operands]
        cut = S(self.head.dim) if node is self.head.product else None
        strategy = strategy_in_turns(node, self.bindings.rules[node], operands, lies, self.turns, cut=cut)
        if strategy is None or not self._is_by_rows(node, strategy):
            return False
        made = self.emit(node, operands, strategy)
        made.meta["info"] = replace(info(made), chunks=self.turns)
        self.values[node] = Value(OnTime(strategy.outputs[0], False, of_batch=True), made)
        if node is self.head.loss:
            self.values[node] = Value(OnTime(WHOLE, False, of_batch=True), self.add_up(made))
        return True

    def _is_by_rows(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether the strategy keeps rows apart, and for the loss adds them up."""
        value = strategy.outputs[0].value
        return value.is_partial if node is self.head.loss else value.is_shard

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
        dropped = self.head.ops - {self.head.loss}
        return self.ended([None if n in dropped else self.values[n].turn for n in self.graph.output.args[0]])
