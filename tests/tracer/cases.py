"""A function as a model, its graph held against eager, and functions that several files trace."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import Graph, info, op_name
from autopar.tracer import ColoTracer
from tests.zoo.replay import compare, run


class Of(nn.Module):
    """A function as a model with parameters, buffers and a plain tensor attribute."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight, self.linear = function, nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4, 4))
        self.register_buffer("made", None, persistent=False)
        self.table = torch.arange(16.0).view(4, 4)

    def forward(self, x):
        return self.function(self, x)


def traced(function, x=None, **how) -> Graph:
    return ColoTracer().trace(Of(function), (torch.randn(4, 4) if x is None else x,), **how)


def check(function, assume=None) -> Graph:
    """Graph and eager agree in outputs, gradients, buffers, the input, and the generator."""
    model, x = Of(function).train(), torch.randn(4, 4)
    graph = ColoTracer().trace(model, (x,), assume=assume)
    start = {n: None if b is None else b.clone() for n, b in model._buffers.items()}
    seen = []

    def on_fresh(forward):
        def call(given):
            for n, b in start.items():
                model._buffers[n] = None if b is None else b.clone()
            seen.append(given.clone())
            return forward(seen[-1])

        return call

    expected = run(on_fresh(model), model, (x,), {})
    compare(run(on_fresh(graph.module(model)), model, (x,), {}), expected)
    torch.testing.assert_close(seen[1], seen[0])
    return graph


def ops(graph) -> list[str]:
    """The names of its ops, in order."""
    return [op_name(n) for n in graph.nodes if info(n).kind == "op"]


class Scale(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * k, x.cos()

    @staticmethod
    def backward(ctx, g, h):
        return g * ctx.k * 3 + h, None


def mixed(m, x):
    """Products, a norm and a loss, in part under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        h = m.linear(x @ m.weight)
        h = F.softmax(h, -1) + F.layer_norm(h, (4,))
        e = torch.einsum("ab,bc->ac", h, x)
        with torch.autocast("cpu", enabled=False):
            f = x @ m.weight
        return (
            F.mse_loss(h.float(), x)
            + torch.cat([h, x]).sum()
            + m.linear(h).sum()
            + e.sum()
            + f.sum()
            + F.scaled_dot_product_attention(h[None], h[None], x[None]).sum()
        )
