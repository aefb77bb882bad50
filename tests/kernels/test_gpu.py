"""The kernels on a GPU: the numerics of the interpreter's tests on shapes of models too, and steps of programs."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.kernels import (
    NAMES,
    adamw,
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    cross_entropy,
    draws,
    dropout,
    gated,
    layer_norm,
    rms_norm,
    rotary_pair,
)
from autopar.runtime import random
from tests.kernels import over
from tests.kernels.cases import CASES, Case, drawn_whole, is_near
from tests.kernels.drawn import KEY, PARTS
from tests.language import NO_PADDING, drawn, gpt2, llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = {
    "rms_norm": Case(rms_norm, ((3000, 4096), (4096,)), (1e-6, True)),
    "rms_norm, all that is held": Case(rms_norm, ((1500, 8192), (8192,)), (1e-6, True)),
    "add_rms_norm, read again": Case(add_rms_norm, ((999, 12000), (999, 12000), (12000,)), (1e-6, True)),
    "add_rms_norm, wide": Case(add_rms_norm, ((499, 18000), (499, 18000), (18000,)), (1e-6, True)),
    "bias_gelu": Case(bias_gelu, ((4099, 3072), (3072,)), (1,)),
    "layer_norm": Case(layer_norm, ((4099, 768), (768,), (768,)), (1e-5,)),
    "add_layer_norm, wide": Case(add_layer_norm, ((700, 16384), (700, 16384), (16384,), (16384,)), (1e-5,)),
    "dropout, and a sum": Case(dropout, ((3000, 4096), (3000, 4096)), drawn_whole(shape=(3000, 4096))),
    "gated": Case(gated, ((2000, 14336), (2000, 14336)), (0,)),
    "rotary_pair": Case(
        rotary_pair, ((2, 32, 1000, 128), (2, 8, 1000, 128), (1, 1, 1000, 128), (1, 1, 1000, 128)), still=2
    ),
    "cross_entropy": Case(
        cross_entropy, ((501, 128256),), (-100, 0.1), places=tuple(range(0, 501 * 256, 256)), still=0
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*CASES, *(f"large {name}" for name in LARGE)])
def test_a_kernel_is_as_near_to_float64_as_eager(name, dtype):
    assert is_near({**CASES, **{f"large {n}": case for n, case in LARGE.items()}}[name], dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_over_logits_is_that_beside_them(dtype):
    over.check(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_step_of_adamw_is_that_of_its_ops(dtype, is_scaled):
    dice = torch.Generator().manual_seed(0)
    p, g, m, v = (torch.rand(70_001, generator=dice) for _ in range(4))
    scale, rates = torch.tensor(0.3), adamw.Rates(0.1, (0.9, 0.99), 1e-8, 0.1, 3)
    found = {}
    for device, kind in (("cuda", torch.float32), ("cpu", torch.float32), ("double", torch.float64)):
        where = "cpu" if device == "double" else device
        wide = [x.to(where, kind) for x in (p, m, v)]
        given, master = g.to(dtype).to(where, kind if device == "double" else dtype), None
        parameter = wide[0]
        if dtype != torch.float32 and device != "double":
            parameter, master = wide[0].to(dtype), wide[0]
        adamw.step(parameter, given, *wide[1:], master, scale.to(where, kind) if is_scaled else None, rates)
        found[device] = [x.cpu().double() for x in wide]
        assert device == "double" or torch.equal(parameter, wide[0].to(dtype))
    for kernel, plain, right in zip(*found.values(), strict=True):
        unit = torch.finfo(torch.float32).eps * right.abs().max()
        assert (kernel - right).abs().max() <= 2 * (plain - right).abs().max() + unit


@pytest.mark.parametrize("name", PARTS)
def test_draws_are_those_of_a_cpu(name):
    """Bits and masks that the ops of a GPU give."""
    shape, places = PARTS[name]
    places = [torch.tensor(list(at), dtype=torch.int64) for at in places]
    there = [at.cuda() for at in places]
    assert draws.kernel is not None
    for op in (0, 7):
        assert torch.equal(random.bits_at(KEY.cuda(), op, shape, there).cpu(), random._bits_at(KEY, op, shape, places))
        for p in (0.0, 0.1, 0.5):
            found = random.kept_at(KEY.cuda(), op, p, shape, there).cpu()
            assert torch.equal(found, random._kept_at(KEY, op, p, shape, places))


def step(model, batch, kernels, how):
    """The code of a program on one GPU, its loss, and the gradients of a step."""
    asked = {"mesh": (1,), "memory_budget": "inf", "assume": NO_PADDING, **how}
    torch.manual_seed(5)  # draws are those of a key that is taken here
    parallel = autopar.autoparallelize(model, batch, kernels=kernels, **asked)
    loss = parallel(**batch).loss
    loss.backward()
    return parallel.code, loss.detach(), {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}


@pytest.mark.parametrize("how", [{}, {"recompute": "full"}, {"chunks": 4}], ids=str)
@pytest.mark.parametrize("build", [llama, lambda: gpt2(dropout=0.0)], ids=["llama", "gpt2"])
def test_a_program_with_kernels_is_the_model(build, how):
    """On a GPU, in single precision: as near to the model as a program without kernels is."""
    model = build().cuda()
    batch = {k: v.cuda() for k, v in drawn(4, 64, 256).items()}
    eager = copy.deepcopy(model)
    loss = eager(**batch).loss
    loss.backward()
    right = {n: p.grad for n, p in eager.named_parameters()}
    for kernels in (False, NAMES):
        code, found, gradients = step(copy.deepcopy(model), batch, kernels, how)
        assert ("# one kernel" in code) == bool(kernels)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=0)
        for name, gradient in right.items():
            assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def test_kernels_draw_what_a_program_without_them_draws():
    model = gpt2(dropout=0.1).cuda()
    batch = {k: v.cuda() for k, v in drawn(4, 64, 256).items()}
    _, plain, of_plain = step(copy.deepcopy(model), batch, False, {})
    _, found, of_found = step(copy.deepcopy(model), batch, NAMES, {})
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=0)
    for name, gradient in of_plain.items():
        assert (of_found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
