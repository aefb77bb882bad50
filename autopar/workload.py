"""The workload of a request: what its graph computes in one optimizer step, and on which devices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch.fx as fx

from autopar.graph.graph import Graph, call_of, info, op_name, rows_of_batch, type_of
from autopar.graph.nodes import tensor_operands
from autopar.ops.entry import facts_of
from autopar.ops.local import OpOnDevice
from autopar.request import Request
from autopar.sharding.attention_ways import DESCRIBED
from autopar.sharding.notation import Binding
from autopar.solver.workload import StepWork
from autopar.space.bindings import Bindings
from autopar.space.product_roles import loops_of, multiplied


def workload_of(graph: Graph, request: Request) -> StepWork:
    """The workload of a graph of the whole batch of a call."""
    bindings = Bindings.of(graph, strict=False)
    by_dtype, causal = defaultdict[str, float](float), 0.0
    for node, binding in bindings.rules.items():
        if binding is not None and facts_of(op_name(node)).flops is not None:
            flops = _flops(node, binding, bindings.tensors[node])
            share = _share_seen(node)
            is_described = op_name(node) == DESCRIBED
            # Without windows and documents, a causal attention that counts every pair counts twice what is seen.
            by_dtype[info(node).outputs[0].dtype] += flops * min(1.0, 2 * share) if is_described else flops
            causal += flops * share
    dtype = max(by_dtype, key=by_dtype.__getitem__, default="float32")
    inputs = {name: type_of(node).shape for name, node in graph.inputs.items()}
    device = request.hardware.device
    return StepWork(
        graph.model,
        sum(math.prod(type_of(node).shape) for node in graph.parameters.values()),
        inputs,
        rows_of_batch(graph) * request.accumulation,
        _tokens(graph) * request.accumulation,
        sum(by_dtype.values()) * request.accumulation,
        causal * request.accumulation,
        dtype,
        device.name,
        device.rate(dtype),
        device.memory_bytes,
    )


def _share_seen(node: fx.Node) -> float:
    """The share of its pairs of a query and a key that an attention computes; 1 for other products."""
    scores = facts_of(op_name(node)).scores
    if scores is None:
        return 1.0
    if op_name(node) != DESCRIBED:
        return 0.5 if node.kwargs.get("is_causal") is True else 1.0
    return scores(call_of(node), OpOnDevice.alone(len(tensor_operands(node)), 1))


def _flops(node: fx.Node, binding: Binding, operands: Sequence[fx.Node]) -> float:
    """FLOPs of a product: forward, and a product of the same size for each factor that needs a gradient."""
    facts, loops = facts_of(op_name(node)), loops_of(op_name(node), binding)
    assert facts.flops is not None
    if facts.products is not None:
        alone = OpOnDevice.alone(len(operands), len(info(node).outputs))
        forward = sum(2 * math.prod(sizes) for sizes in facts.products(call_of(node), alone, "cpu").forward)
        matrices = operands[0], *(n for n in operands if len(type_of(n).shape) > 2)
        return forward * (1 + sum(type_of(n).requires_grad for n in matrices) / (len(matrices) - 1))
    forward = facts.flops[0] * math.prod(binding.sizes[factor] for factor in loops)
    if facts.scores is not None:  # two products in forward; four in backward, of scores, weights and operands
        return forward * (3 if any(type_of(n).requires_grad for n in operands) else 1)
    factors = multiplied(binding, loops) or range(len(operands))
    return forward * (1 + sum(type_of(operands[k]).requires_grad for k in factors))


def _tokens(graph: Graph) -> int:
    """The places of the first input of two dims by which a table is looked up; 0 where there is none."""
    looked_up = {
        _input_behind(node) for node in graph.nodes if info(node).kind == "op" and op_name(node) == "embedding"
    }
    for node in graph.inputs.values():
        shape = type_of(node).shape
        if node in looked_up and len(shape) == 2:
            return math.prod(shape)
    return 0


def _input_behind(lookup: fx.Node) -> fx.Node:
    """The value that a look-up takes its places from, behind views and casts."""
    value = tensor_operands(lookup)[0]
    while info(value).kind == "op" and (facts_of(op_name(value)).free or facts_of(op_name(value)).same):
        value = tensor_operands(value)[0]
    return value
