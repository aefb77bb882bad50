"""Find the loss head of a graph: the region whose rows may run one after the other (`chunked.py`).

It reaches from the product that gives the logits to the numbers that are made of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, call_of, op_name, type_of
from autopar.ops.entry import facts_of, rule_of
from autopar.turns.time_axis import early_gradient_in_float16

MOST = 16  # chunks: a region is written out once for each
FEW = 4  # chunks, beyond which less is gained than they take, as long as there is room (`benchmarks/turns.py`)
_LOSSES = ("cross_entropy", "nll_loss")


@dataclass(frozen=True, slots=True)
class Head:
    """The region of a graph from the product that gives the logits to the numbers that are made of them."""

    product: fx.Node
    ops: frozenset[fx.Node]
    dim: int  # the dim of the logits that holds their rows
    rows: int
    slices: tuple[fx.Node, ...] = ()  # ops that take the same rows of the logits, if nothing else reads these

    @property
    def sums(self) -> int:
        """The number of scalars of the region that have gradients."""
        return sum(type_of(n).requires_grad for n in self.ops if is_number(n))


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
    ops = made_of_rows(product)
    leaves = any(n.users.keys() & {graph.output} for n in ops if not is_number(n))
    if leaves and (keeps_outputs or graph.backward_from):
        return HeadFound(None, "the logits leave the step, or gradients arrive at them")
    shape = type_of(product).shape
    if len(shape) < 2:
        return HeadFound(None, "the logits are of one row")
    dim = len(shape) - 2
    slices = _slices(product, ops, dim)
    return HeadFound(Head(product, ops, dim, type_of(slices[0]).shape[dim] if slices else shape[dim], slices))


def _product_of(loss: fx.Node) -> fx.Node:
    """The product that gives the logits of a loss; another node where there is none."""
    logits = loss.kwargs["input"]
    assert isinstance(logits, fx.Node)
    return walks.origin(logits, lambda n: n.op == "call_function" and facts_of(op_name(n)).flops is None)


def made_of_rows(product: fx.Node) -> frozenset[fx.Node]:
    """The product, and all ops behind it up to those that give a number."""
    found: set[fx.Node] = {product}
    for node in product.graph.nodes:
        if node.op == "call_function" and any(a in found and not is_number(a) for a in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _slices(product: fx.Node, ops: frozenset[fx.Node], dim: int) -> tuple[fx.Node, ...]:
    """The ops that take the same rows of the logits, if only they and the outputs read these; else none."""
    found = []
    pending = [product]
    while pending:
        for user in pending.pop().users:
            if op_name(user) == "narrow" and user.kwargs["dim"] % len(type_of(product).shape) == dim:
                found.append(user)
            elif user.op != "output":
                if not _keeps_rows_apart(user, ops, dim):
                    return ()
                pending.append(user)
    rows = {(n.kwargs["start"], n.kwargs["length"]) for n in found}
    return tuple(dict.fromkeys(found)) if len(rows) == 1 else ()


def _keeps_rows_apart(node: fx.Node, ops: frozenset[fx.Node], dim: int) -> bool:
    """Whether an op is pointwise, and its operands beside the logits have no rows of their own."""
    call = call_of(node)
    rule = rule_of(call.op, {**call.arguments, "outputs": call.outputs})
    if re.fullmatch(r"[., ]+-> \.\.\.( +linear=.*)?", str(rule)) is None:
        return False
    place = len(type_of(node).shape) - dim
    others = [type_of(n).shape for n in node.all_input_nodes if n not in ops]
    return len(node.all_input_nodes) == len(others) + 1 and all(len(s) < place or s[-place] == 1 for s in others)


def is_number(node: fx.Node) -> bool:
    return not type_of(node).shape


def numbers_of_chunks(head: Head) -> tuple[int, ...]:
    """Numbers of chunks to choose from: 2, 4, ... up to `MOST`, as long as there are as many rows."""
    return tuple(n for n in (2, 4, 8, 16) if n <= min(MOST, head.rows))
