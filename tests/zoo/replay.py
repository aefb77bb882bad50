"""Eager and graph side by side, on the same seeds.

Outputs, every gradient, every buffer, and where the generator stands afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.graph.calls import without_caches
from autopar.graph.graph import Graph
from autopar.testing import Equality
from autopar.tracer import ColoTracer


@dataclass
class Run:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    generator: Tensor


def run(forward, model: nn.Module, args, kwargs, seed: int = 7) -> Run:
    """One forward and backward of a weighted sum of all outputs that carry a gradient."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs, _ = without_caches(forward(*args, **kwargs))
    named = {
        pytree.keystr(path): leaf
        for path, leaf in pytree.tree_flatten_with_path(outputs)[0]
        if isinstance(leaf, Tensor)
    }
    weights = torch.Generator().manual_seed(3)
    total = sum(
        (t.double() * torch.randn(t.shape, generator=weights, dtype=torch.double)).sum()
        for t in named.values()
        if t.is_floating_point() and t.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    return Run(
        {n: t.detach().clone() for n, t in named.items()},
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        {n: b.detach().clone() for n, b in model.named_buffers()},
        torch.get_rng_state(),
    )


def compare(actual: Run, expected: Run, what: str = "") -> None:
    """Raises where replay and eager differ.

    Outputs and buffers by 1e-6, gradients by 1e-5 of the scale of DESIGN's Equality.
    """
    Equality.in_float64(f"{what} outputs", actual.outputs, expected.outputs, 1e-6).check()
    Equality.in_float64(f"{what} gradients", actual.gradients, expected.gradients, 1e-5).check()
    Equality.in_float64(f"{what} buffers", actual.buffers, expected.buffers, 1e-6).check()
    assert torch.equal(actual.generator, expected.generator), f"{what}: the generator stands elsewhere"


def check(build, inputs, assume=None, what: str = "", training: bool = True) -> Graph:
    """Trace the model that `build` makes, and hold the graph against eager."""
    torch.manual_seed(0)
    model = build().train(training)
    args, kwargs = as_call(inputs())
    graph = ColoTracer().trace(model, kwargs or args, assume=assume)
    start = {n: b.detach().clone() for n, b in model.named_buffers()}
    expected = run(model, model, args, kwargs)
    for n, b in start.items():
        path, _, last = n.rpartition(".")
        model.get_submodule(path)._buffers[last] = b
    compare(run(graph.module(model), model, args, kwargs), expected, what)
    return graph


def as_call(inputs):
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})
