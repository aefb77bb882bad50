"""Programs with kernels compute what programs without them do: on a CPU bit for bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar import Assume, Precision
from autopar.codegen.joint import LOWERED
from autopar.kernels import NAMES
from tests.kernels.sites import SITES
from tests.language import bert, drawn, gpt2, llama
from tests.models import eager_links
from tests.shares import by_day

MODELS = {
    "gpt2": lambda: gpt2(1, dropout=0.0),
    "gpt2, dropout": lambda: gpt2(1, dropout=0.1),
    "llama": lambda: llama(1),
    "bert": lambda: bert(1, dropout=0.0),
    "qwen3": lambda: of("qwen3"),
    "gemma2": lambda: of("gemma2"),
    "t5 1.1": lambda: of("t5 1.1", dropout_rate=0.0),
    "gpt_neox": lambda: of("gpt_neox"),
}
HOW = {
    "zero3 on four": ((4,), {"parallel": "zero3"}),
    "two by two, recompute": ((2, 2), {"parallel": {"data": 2, "tensor": 2}, "recompute": "full"}),
    "two micro-batches": ((4,), {"parallel": "dp", "microbatches": 2}),
    "bfloat16, a head in chunks": (
        (2,),
        {"precision": Precision("bfloat16", "float32"), "chunks": 4, "parallel": "dp"},
    ),
}


def of(name, **how):
    """A model of the table of sites, in training."""
    build, config = SITES[name]
    return build(type(config)(**{**config.to_dict(), **how})).train()


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
    first, ranks = MODELS[model]().train(), torch.Size(mesh).numel()
    batch = drawn(16, 64, min(first.config.vocab_size, 256))
    models = [first, *(copy.deepcopy(first) for _ in range(ranks - 1))]
    return threads(ranks, step, models, batch, mesh, kernels, asked)[0]


@pytest.mark.parametrize(
    "model, how",
    by_day(
        itertools.product(MODELS, HOW),
        ("qwen3", "zero3 on four"),
        ("bert", "two by two, recompute"),
    ),
)
def test_kernels_change_no_bit_on_a_cpu(model, how, threads):
    _, plain, gradients = run(threads, model, how, False)
    count, loss, found = run(threads, model, how, NAMES)
    assert count > 0 and torch.equal(loss, plain)
    assert len(gradients) > 5
    if "recompute" in HOW[how][1]:  # The plan with kernels may recompute others, whose sums have another order.
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)
    else:
        assert [n for n in gradients if not torch.equal(found[n], gradients[n])] == []


@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param("llama", "zero3 on four", marks=pytest.mark.nightly),
        pytest.param("llama", "two by two, recompute", marks=pytest.mark.nightly),
        ("llama", "two micro-batches"),
        pytest.param("gpt2, dropout", "two by two, recompute", marks=pytest.mark.nightly),
        pytest.param("gemma2", "zero3 on four", marks=pytest.mark.nightly),
    ],
)
def test_custom_ops_in_a_program_give_the_same_step(model, how, as_ops, threads):
    """Their references run in one node each; sums of gradients have another order, and no more."""
    _, plain, gradients = run(threads, model, how, False)
    count, loss, found = run(threads, model, how, NAMES)
    assert count > 0
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


class Head(torch.nn.Module):
    """Logits of halves for a loss whose labels are smoothed."""

    def __init__(self, vocabulary):
        super().__init__()
        self.inner, self.head = torch.nn.Linear(24, 24), torch.nn.Linear(24, vocabulary, bias=False)

    def forward(self, x, labels):
        logits = self.head(self.inner(x)).float().view(-1, self.head.out_features)
        return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1, ignore_index=3)


def cut_head(rank, models, batch, asked):
    """Loss and gradients of a head whose vocabulary is cut."""
    pins = {"head.weight": "S(0)@0"}
    parallel = autopar.autoparallelize(
        models[rank],
        batch,
        mesh=(2,),
        cluster=eager_links(),
        memory_budget="inf",
        kernels=NAMES,
        constraints=pins,
        **asked,
    )
    loss = parallel(**batch)
    loss.backward()
    return parallel.code, loss.detach(), [p.grad.full_tensor() for p in parallel.parameters()]


@pytest.mark.nightly
@pytest.mark.parametrize("vocabulary, precision", list(itertools.product([64, 61], [None, "bfloat16"])))
def test_a_cut_vocabulary_is_read_once(vocabulary, precision, interpret, threads):
    torch.manual_seed(0)
    first = Head(vocabulary)
    models = [copy.deepcopy(first), copy.deepcopy(first)]
    labels = torch.randint(0, vocabulary, (12,))
    labels[2] = 3
    batch = {"x": torch.randn(12, 24), "labels": labels}
    asked = {"precision": Precision(precision, "float32")} if precision else {}
    code, loss, found = threads(2, cut_head, models, batch, asked)[0]
    assert "cross_entropy_part" in code and "one kernel" in code
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        plain = first(**batch)
    plain.backward()
    near = 2e-2 if precision else 1e-5
    torch.testing.assert_close(loss, plain.detach(), rtol=near, atol=0)
    for mine, parameter in zip(found, first.parameters(), strict=True):
        assert (mine - parameter.grad).norm() <= near * parameter.grad.norm()


def over_logits(rank, models, batch, asked):
    """Loss and gradients of a head in chunks, and how many gradients are written over logits."""
    parallel = autopar.autoparallelize(models[rank], batch, cluster=eager_links(), memory_budget="inf", **asked)
    loss = parallel(**batch)
    loss.backward()
    forward = str(next(iter(LOWERED.known.values())).forward)
    return forward.count("_backward_.default"), loss.detach(), [p.grad.full_tensor() for p in parallel.parameters()]


@pytest.mark.nightly
@pytest.mark.parametrize(("cut", "compiled"), [("S(0)@0", False), ("R", False), ("R", True)])
def test_gradients_are_written_over_the_logits_of_a_chunk(cut, compiled, interpret, threads):
    LOWERED.clear()
    torch.manual_seed(0)
    first, labels = Head(61), torch.randint(0, 61, (12,))
    labels[2] = 3
    batch = {"x": torch.randn(12, 24), "labels": labels}
    asked = {"mesh": (2,), "chunks": 3, "kernels": NAMES, "constraints": {"head.weight": cut}}
    asked |= {"compile": "aot_eager"} if compiled else {}
    models = [copy.deepcopy(first) for _ in range(2)]
    over, loss, found = threads(2, over_logits, models, batch, asked)[0]
    assert over == 3, str(next(iter(LOWERED.known.values())).forward)
    plain = first(**batch)
    plain.backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=0)
    for mine, parameter in zip(found, first.parameters(), strict=True):
        assert (mine - parameter.grad).norm() <= 1e-5 * parameter.grad.norm()


class Masked(Head):
    """Half of the words are masked: all of one device's part of them."""

    def forward(self, x, labels):
        logits = self.head(self.inner(x)).float().view(-1, self.head.out_features)
        masked = torch.arange(logits.shape[1]) >= logits.shape[1] // 2
        return torch.nn.functional.cross_entropy(logits.masked_fill(masked, -torch.inf), labels)


@pytest.mark.parametrize("kernels", ["", "ops", "interpret"])
def test_a_masked_part_of_a_vocabulary_and_a_target_that_is_none(kernels, request, threads):
    if kernels:
        request.getfixturevalue({"ops": "as_ops"}.get(kernels, kernels))
    torch.manual_seed(0)
    first, labels = Masked(32), torch.randint(0, 16, (12,))
    batch = {"x": torch.randn(12, 24), "labels": labels}
    models = [copy.deepcopy(first) for _ in range(4)]
    _, loss, found = threads(2, cut_head, models[:2], batch, {})[0]
    plain = first(**batch)
    plain.backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=0)
    for mine, parameter in zip(found, first.parameters(), strict=True):
        assert (mine - parameter.grad).norm() <= 1e-5 * parameter.grad.norm()
    wrong = {**batch, "labels": labels.where(torch.arange(12) != 3, 999)}
    assert threads(2, cut_head, models[2:], wrong, {})[0][1].isnan()


def counted_flops(rank, models, batch, kernels):
    """What torch's counter sees of a step, by op."""
    parallel = autopar.autoparallelize(
        models[rank], batch, mesh=(1,), memory_budget="inf", kernels=kernels, assume=Assume(no_padding=True)
    )
    with FlopCounterMode(display=False) as counter:
        parallel(**batch).loss.backward()
    return parallel.code.count("# one kernel"), counter.get_flop_counts()["Global"]


@pytest.mark.nightly
@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.nightly), "gpt2"])
def test_kernels_leave_the_count_of_flops_as_it_is(model, interpret, threads):
    """Torch counts products and attention: nothing that kernels stand for, and no kernel counts as anything."""
    first = MODELS[model]().train()
    batch, other = drawn(4, 16, 64), copy.deepcopy(first)
    none, plain = threads(1, counted_flops, [first], batch, False)[0]
    count, found = threads(1, counted_flops, [other], batch, NAMES)[0]
    assert none == 0 < count and sum(plain.values()) > 1e6 and found == plain
