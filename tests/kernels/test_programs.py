"""Programs with kernels compute what programs without them do: on a CPU bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar import Assume, Precision
from autopar.kernels import NAMES
from tests.language import bert, drawn, gpt2, llama

MODELS = {"gpt2": lambda: gpt2(dropout=0.0), "llama": llama, "bert": lambda: bert(dropout=0.0)}
HOW = {
    "zero3 on four": ((4,), {"parallel": "zero3"}),
    "two by two, recompute": ((2, 2), {"parallel": {"data": 2, "tensor": 2}, "recompute": "full"}),
    "two micro-batches": ((4,), {"parallel": "dp", "microbatches": 2}),
    "bfloat16, a head in chunks": ((2,), {"precision": Precision("bfloat16", "float32"), "chunks": 4}),
}


def step(rank, models, batch, mesh, kernels, how):
    """Loss and gradients of a step."""
    parallel = autopar.autoparallelize(
        models[rank], batch, mesh=mesh, memory_budget="inf", kernels=kernels, assume=Assume(no_padding=True), **how
    )
    loss = parallel(**batch).loss
    loss.backward()
    whole = {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in parallel.named_parameters()
    }
    return parallel.code.count("# one kernel"), loss.detach(), whole


def run(threads, model, how, kernels):
    """What the first rank gives."""
    mesh, asked = HOW[how]
    torch.manual_seed(0)
    first, batch, ranks = MODELS[model]().train(), drawn(16, 64, 256), torch.Size(mesh).numel()
    models = [first, *(copy.deepcopy(first) for _ in range(ranks - 1))]
    return threads(ranks, step, models, batch, mesh, kernels, asked)[0]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", MODELS)
def test_kernels_change_no_bit_on_a_cpu(model, how, threads):
    _, plain, gradients = run(threads, model, how, False)
    count, loss, found = run(threads, model, how, NAMES)
    assert count > 0 and torch.equal(loss, plain)
    assert [n for n in gradients if not torch.equal(found[n], gradients[n])] == []


@pytest.mark.parametrize("how", ["zero3 on four", "two by two, recompute", "two micro-batches"])
def test_custom_ops_in_a_program_give_the_same_step(how, as_ops, threads):
    """Their references run in one node each; sums of gradients have another order, and no more."""
    _, plain, gradients = run(threads, "llama", how, False)
    count, loss, found = run(threads, "llama", how, NAMES)
    assert count > 0
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 2e-6 * gradient.norm(), name
