"""From what was recorded to the canonical vocabulary: passes with a before and an after."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from autopar.letters import NotCaptured
from autopar.tracer.graph import Graph, TensorType, info, op_name, run
from autopar.tracer.vocabulary import OPS


def emit(near: fx.Node, op: str, **arguments: Any) -> fx.Node:
    """A new op node before `near`, with its place in the source; its type comes from running it on the fakes."""
    graph = near.graph
    node = graph.create_node("call_function", OPS[op], (), arguments, name=f"{info(near).module}_{op}".replace(".", "_").strip("_"))
    fake = run(node, {n: n.meta["fake"] for n in node.all_input_nodes})
    about = info(near)
    node.meta["fake"] = fake
    node.meta["info"] = replace(about, key=f"{about.key}:{op}", kind="op", outputs=(TensorType.of(fake),))
    return node


@contextlib.contextmanager
def rewriting(graph: Graph, *ops: str) -> Iterator[list[fx.Node]]:
    """The nodes of these ops; those that lose their last user are gone afterwards."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and op_name(n) in ops]
    yield nodes
    for node in reversed(nodes):
        if not node.users:
            graph.fx.erase_node(node)


def losses_are_means(graph: Graph) -> None:
    """Take the reduction out of a pointwise loss.

    before    loss = mse_loss(x, y)
    after     e = mse_loss(x, y, reduction="none");  loss = mean(e)
    """
    with rewriting(graph, "mse_loss") as nodes:
        for node in nodes:
            reduction = node.kwargs.get("reduction", "mean")
            if node.kwargs.get("size_average") is not None or node.kwargs.get("reduce") is not None or node.kwargs.get("weight") is not None:
                raise NotCaptured("mse_loss with size_average, reduce or weight is not captured yet", at=info(node).source, advice="reduction=, and a product")
            if reduction == "none":
                continue
            with graph.fx.inserting_before(node):
                error = emit(node, "mse_loss", input=node.kwargs["input"], target=node.kwargs["target"], reduction="none")
                node.replace_all_uses_with(emit(node, reduction, input=error))     # type: ignore[arg-type]


def means_are_sums(graph: Graph) -> None:
    """A mean is a sum over the global count, so that a cut dim leaves a plain P(sum); half precision sums in float32.

    before    m = mean(x, dim=1)                        # x is f32[8, 64]
    after     s = sum(x, dim=1);  m = div(s, 64)
    """
    with rewriting(graph, "mean") as nodes:
        for node in nodes:
            given: Any = node.kwargs["input"]
            shape, dim = info(given).outputs[0].shape, node.kwargs.get("dim")
            dims = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
            count = math.prod(shape[d] for d in dims)          # type: ignore[union-attr, index]
            dtype = node.kwargs.get("dtype") or given.meta["fake"].dtype
            is_half = dtype in (torch.float16, torch.bfloat16)
            how = {k: v for k, v in node.kwargs.items() if k in ("dim", "keepdim")}
            if is_half or "dtype" in node.kwargs:
                how["dtype"] = torch.float32 if is_half else dtype
            with graph.fx.inserting_before(node):
                mean = emit(node, "div", input=emit(node, "sum", input=given, **how), other=count)
                node.replace_all_uses_with(emit(node, "to", input=mean, dtype=dtype) if is_half else mean)


def one_name_per_fan_out(graph: Graph) -> None:
    """A value with several consumers passes through one identity node: a shared conversion is priced and emitted once, and
    the gradients of its uses are added before one reduction. Every input gets one too: it says how the input is used.

    before    h = linear(x, w);  a = gelu(h);  y = add(h, a)
    after     h = linear(x, w);  i = identity(h);  a = gelu(i);  y = add(i, a)
    """
    for node in list(graph.nodes):
        uses = sum(operand is node for user in node.users for operand in _operands(user))
        if node.op != "output" and (uses > 1 or (info(node).kind == "input" and uses)):
            with graph.fx.inserting_after(_last_of_its_kind(node)):
                shared = emit(node, "identity", input=node)
            about = info(node)
            shared.meta["info"] = replace(info(shared), key=f"{about.key}:shared" if about.kind != "input" else f"{about.key}:used")
            node.replace_all_uses_with(shared, delete_user_cb=lambda user, shared=shared: user is not shared)  # type: ignore[misc]


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _last_of_its_kind(node: fx.Node) -> fx.Node:
    """Inputs and parameters stand together on top; what is computed from them follows."""
    if node.op == "call_function":
        return node
    return [n for n in node.graph.nodes if n.op in ("placeholder", "get_attr")][-1]


def drop_dead(graph: Graph) -> None:
    """Ops that nobody uses leave; inputs stay, used or not."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.fx.erase_node(node)


PASSES: tuple[Callable[[Graph], None], ...] = (drop_dead, losses_are_means, means_are_sums, one_name_per_fan_out)


def canonicalise(graph: Graph) -> Graph:
    """Run the passes; after each, the graph is legal."""
    for one in PASSES:
        one(graph)
        verify(graph, one.__name__)
    return graph


def verify(graph: Graph, after: str) -> None:
    """A legal graph: well-formed, every node with its info, every op canonical, every key once."""
    graph.fx.lint()
    keys = [info(n).key for n in graph.nodes]
    assert len(set(keys)) == len(keys), (after, [k for k in keys if keys.count(k) > 1])
    for node in graph.nodes:
        assert node.op != "call_function" or node.target in OPS.values(), (after, node)
