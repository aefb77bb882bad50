"""Rewrite losses and means as sums over global counts, so that they can be cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.ops.entry import FACTS
from autopar.tracer.rewriting import emit, forward_past, rewriting


def losses_are_means(graph: Graph) -> None:
    """Separate the reduction from a pointwise loss.

    before    loss = mse_loss(x, y)
    after     e = mse_loss(x, y, reduction="none");  loss = mean(e)
    """
    with rewriting(graph, *(name for name, facts in FACTS.items() if facts.loss)) as nodes:
        for node in nodes:
            reduction = node.kwargs.get("reduction", "mean")
            if reduction == "none" or _is_old(node) or _is_mean_over_weights(node):
                continue
            with graph.fx.inserting_before(node):
                error = emit(node, op_name(node), **{**node.kwargs, "reduction": "none"})
                if reduction == "batchmean":
                    rows = type_of(node.kwargs["input"]).shape[0]
                    forward_past(node, emit(node, "div", input=emit(node, "sum", input=error), other=rows))
                else:
                    forward_past(node, emit(node, reduction, input=error))


def _is_old(node: fx.Node) -> bool:
    """Whether the call gives its reduction by the deprecated arguments."""
    return any(node.kwargs.get(k) is not None for k in ("size_average", "reduce"))


def _is_mean_over_weights(node: fx.Node) -> bool:
    return op_name(node) in ("mse_loss", "l1_loss", "huber_loss") and node.kwargs.get("weight") is not None


def means_are_sums(graph: Graph) -> None:
    """Replace a mean by a sum over the global count, so that a cut dim leaves a plain P(sum).

    Half precision sums in float32.

    before    m = mean(x, dim=1)                        # x is f32[8, 64]
    after     s = sum(x, dim=1);  m = div(s, 64)
    """
    with rewriting(graph, "mean") as nodes:
        for node in nodes:
            given: Any = node.kwargs["input"]
            shape = info(given).outputs[0].shape
            dim = node.kwargs.get("dim")
            dims = (dim,) if isinstance(dim, int) else range(len(shape)) if dim is None else dim
            count = math.prod(shape[d] for d in dims if shape)
            dtype = node.kwargs.get("dtype") or type_of(given).torch_dtype
            is_half = dtype in (torch.float16, torch.bfloat16)
            how = {k: v for k, v in node.kwargs.items() if k in ("dim", "keepdim")}
            if is_half or "dtype" in node.kwargs:
                how["dtype"] = torch.float32 if is_half else dtype
            with graph.fx.inserting_before(node):
                mean = emit(node, "div", input=emit(node, "sum", input=given, **how), other=count)
                forward_past(node, emit(node, "to", input=mean, dtype=dtype) if is_half else mean)


def cross_entropy_counts_its_targets(graph: Graph) -> None:
    """Replace a mean cross entropy by a sum over the global count of targets that are not ignored.

    With class weights, the sum is divided by the sum of the targets' weights.

    before    loss = cross_entropy(x, t)
    after     s = cross_entropy(x, t, reduction="sum");  n = sum(ne(t, -100));  loss = div(s, n)
    """
    with rewriting(graph, "cross_entropy", "nll_loss") as nodes:
        for node in nodes:
            is_of_classes = "int" in type_of(node.kwargs["target"]).dtype
            if node.kwargs.get("reduction", "mean") == "mean" and is_of_classes and not _is_old(node):
                with graph.fx.inserting_before(node):
                    forward_past(node, _mean_over_targets(node))


def _mean_over_targets(node: fx.Node) -> fx.Node:
    """Sum of losses over the targets' count or weights; half precision is summed in float32."""
    given: Any = node.kwargs["input"]
    target: Any = node.kwargs["target"]
    weight: Any = node.kwargs.get("weight")
    dtype = type_of(given).torch_dtype
    how = {k: v for k, v in node.kwargs.items() if k in ("weight", "ignore_index", "label_smoothing")}
    if dtype in (torch.float16, torch.bfloat16):
        given = emit(node, "to", input=given, dtype=torch.float32)
        if weight is not None:
            how["weight"] = weight = emit(node, "to", input=weight, dtype=torch.float32)
    total = emit(node, op_name(node), **{"input": given, "target": target, **how, "reduction": "sum"})
    is_counted = emit(node, "ne", input=target, other=node.kwargs.get("ignore_index", -100))
    if weight is None:
        count = emit(node, "sum", input=is_counted, dtype=type_of(given).torch_dtype)
    else:
        known = emit(node, "where", condition=is_counted, input=target, other=0)
        of_each = replace(type_of(weight), shape=type_of(known).shape)
        weights = emit(node, "index", of_each, input=weight, index=known)
        count = emit(node, "sum", input=emit(node, "mul", input=weights, other=is_counted))
    mean = emit(node, "div", input=total, other=count)
    return mean if type_of(mean).torch_dtype == dtype else emit(node, "to", input=mean, dtype=dtype)
