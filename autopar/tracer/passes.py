"""Rewrite a recorded graph into the canonical vocabulary, by passes with a before and an after.

Passes about one subject stand in `composites.py`, `indexing.py` and `losses.py`; their order is the tuple below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.verify import verify
from autopar.passes import run_passes
from autopar.tracer.composites import composites_are_opened
from autopar.tracer.fold_experts import loops_over_experts_are_folded, without_folded
from autopar.tracer.indexing import assignments_are_spelled_out, indexing_is_spelled_out
from autopar.tracer.losses import cross_entropy_counts_its_targets, losses_are_means, means_are_sums
from autopar.tracer.rewriting import emit, forward_past, rewriting

_IDLE = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "view",
    "expand",
    "to",
    "cat",
    "contiguous",
    "clone",
    "add",
)


def no_ops_leave(graph: Graph) -> None:
    """Remove ops that change nothing.

    These are dropout that drops nothing, a view to the same shape, a cast to the same dtype, a full slice, and adding
    0, as Python's sum begins with.

    before    y = dropout(x, p=0.0);  z = view(y, [4, 16])         # y is f32[4, 16]
    after     z = x
    """
    with rewriting(graph, *_IDLE) as nodes:
        for node in nodes:
            with graph.fx.inserting_before(node):
                given = _unchanged(node)
            if given is not None:
                forward_past(node, given)


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The value that a node repeats if their types agree; None where it does something."""
    name = op_name(node)
    given = node.kwargs.get("input")
    if name == "cat":
        given = _only_part(node)
    elif name == "add":
        given = _added_to_nothing(node)
    elif name == "clone" and any(u.op == "output" for u in node.users):  # a snapshot is not the thing itself
        return None
    elif "dropout" in name and _drops_all(node):  # nothing is drawn, and nothing is left
        return emit(node, "mul", type_of(node), input=given, other=0.0)
    return given if isinstance(given, fx.Node) and info(node).random < 0 else None


def _added_to_nothing(node: fx.Node) -> Any:
    """The operand to which an addition adds the number 0; None where there is none."""
    one, other = node.kwargs["input"], node.kwargs["other"]
    if not isinstance(one, fx.Node):
        one, other = other, one
    is_nothing = isinstance(other, (int, float)) and other == 0 and node.kwargs.get("alpha", 1) == 1
    return one if is_nothing else None


def _only_part(node: fx.Node) -> Any:
    """The one operand of a cat that is not empty; None for several, after the empty ones are dropped.

    A model may put an empty cache in front of its first keys, or an empty rest behind rotated dims. The dtype of the
    result is also that of the empty ones: the others are cast to it.
    """
    dim: Any = node.kwargs.get("dim", 0)
    tensors: Any = node.kwargs["tensors"]
    filled = [t for t in tensors if type_of(t).shape != (0,) and type_of(t).shape[dim] != 0] or list(tensors)[:1]
    dtype = type_of(node).torch_dtype
    if len(filled) < len(tensors):
        filled = [t if type_of(t).torch_dtype == dtype else emit(node, "to", input=t, dtype=dtype) for t in filled]
    node.kwargs = {**node.kwargs, "tensors": filled}
    return filled[0] if len(filled) == 1 else None


def _drops_all(node: fx.Node) -> bool:
    """Whether this dropout drops every element."""
    is_training = node.kwargs.get("training", "alpha" not in op_name(node))
    return bool(node.kwargs.get("p", 0.5) >= 1 and is_training)


def addmm_is_linear(graph: Graph) -> None:
    """Replace addmm by a linear with the weight transposed.

    before    y = addmm(bias, x, w)
    after     wt = t(w);  y = linear(x, wt, bias)
    """
    with rewriting(graph, "addmm") as nodes:
        for node in nodes:
            bias: Any = node.kwargs["input"]
            if len(type_of(bias).shape) != 1 or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
                continue
            with graph.fx.inserting_before(node):
                given: Any = node.kwargs["mat2"]
                turned = emit(node, "t", replace(type_of(given), shape=type_of(given).shape[::-1]), input=given)
                made = emit(node, "linear", type_of(node), input=node.kwargs["mat1"], weight=turned, bias=bias)
                forward_past(node, made)


def linears_keep_their_batch_dims(graph: Graph) -> None:
    """Remove a flattening before a linear, and its undoing behind it.

    before    f = view(x, [64, 32]);  l = linear(f, w, b);  y = view(l, [4, 16, 96])       # x is f32[4, 16, 32]
    after     y = linear(x, w, b)
    """
    with rewriting(graph, "view") as nodes:
        for node in nodes:
            inner: Any = node.kwargs["input"]
            if op_name(inner) != "linear" or op_name(inner.kwargs["input"]) != "view" or len(inner.users) > 1:
                continue
            flat = inner.kwargs["input"]
            before = flat.kwargs["input"]
            shape = type_of(before).shape
            if shape[:-1] != type_of(node).shape[:-1] or shape[-1] != type_of(flat).shape[-1]:
                continue
            if _stops_a_gradient(flat) or _stops_a_gradient(node):
                continue
            with graph.fx.inserting_before(node):
                whole = emit(inner, "linear", type_of(node), **{**inner.kwargs, "input": before})
                whole.meta["info"], inner.meta["info"] = inner.meta["info"], whole.meta["info"]
                whole.meta["info"] = replace(whole.meta["info"], outputs=inner.meta["info"].outputs)
                forward_past(node, whole)
    drop_dead(graph)


def _stops_a_gradient(node: fx.Node) -> bool:
    """Whether a view was taken under no_grad."""
    return not type_of(node).requires_grad and type_of(node.all_input_nodes[0]).requires_grad


def random_ops_are_numbered(graph: Graph) -> None:
    """Number the random ops in the order of the program: their draws depend on it.

    before    y = dropout(x, p=0.1)
    after     y = dropout(x, p=0.1)        # random op 0
    """
    count = 0
    for node in graph.nodes:
        if node.op == "call_function" and info(node).random >= 0:
            node.meta["info"] = replace(info(node), random=count)
            count += 1


def one_name_per_fan_out(graph: Graph) -> None:
    """Put one identity node behind each value with several consumers.

    A shared conversion is then priced and emitted once, and the gradients of its uses are added before one reduction.
    Every input gets one too: it says how the input is used.

    before    h = linear(x, w);  a = gelu(h);  y = add(h, a)
    after     h = linear(x, w);  i = identity(h);  a = gelu(i);  y = add(i, a)
    """
    top = next((n for n in reversed(graph.fx.nodes) if n.op in ("placeholder", "get_attr")), None)
    for node in list(graph.nodes):
        about = info(node)
        if not _is_fanned_out(node) or node.op == "output" or len(about.outputs) != 1 or walks.parts(node):
            continue
        place = node
        if node.op != "call_function":
            place = top
        elif about.kind == "part":  # the parts of an op stand together
            place = walks.parts(node.args[0])[-1]
        with graph.fx.inserting_after(place):
            shared = emit(node, "identity", type_of(node), input=node)
        use = "used" if about.kind == "input" else "shared"
        shared.meta["info"] = replace(info(shared), key=f"{about.key}:{use}")
        forward_past(node, shared, except_for=(shared,))


def _is_fanned_out(node: fx.Node) -> bool:
    """Whether a value is read several times, or is an input that is read at all."""
    if len(node.users) != 1 or info(node).kind == "input":
        return bool(node.users)
    (user,) = node.users
    return walks.operands(user).count(node) > 1


def drop_dead(graph: Graph) -> None:
    """Remove ops that nothing uses; inputs stay, used or not, and so do draws, which move the generator."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and info(node).random < 0:
            graph.fx.erase_node(node)


PASSES: tuple[Callable[[Graph], None], ...] = (
    drop_dead,
    composites_are_opened,
    drop_dead,
    indexing_is_spelled_out,
    assignments_are_spelled_out,
    no_ops_leave,
    addmm_is_linear,
    linears_keep_their_batch_dims,
    losses_are_means,
    cross_entropy_counts_its_targets,
    means_are_sums,
    loops_over_experts_are_folded,
    drop_dead,
    random_ops_are_numbered,
    one_name_per_fan_out,
)


def canonicalise(graph: Graph) -> Graph:
    """Run the passes; the graph is verified after each."""
    run_passes("graph", PASSES, graph, verify)
    graph.fx.__dict__.pop("_autopar_keys", None)
    return without_folded(graph)
