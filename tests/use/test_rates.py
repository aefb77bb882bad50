"""Tokens a second, FLOPs and MFU: against torch's counter of FLOPs, and against what others published."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.request import Request
from autopar.solver.workload import StepRates
from autopar.workload import workload_of
from tests.golden.cases import Pictures

EAGER = {"attn_implementation": "eager"}


class Experts(nn.Module):
    """Products by einsum of three operands' dims, one of a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("ebd,edf->ebf", x @ self.frozen, self.up).relu()
        return torch.einsum("ebf,efd->ebd", h, self.down).square().mean()


def _tokens(rows: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2():
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, use_cache=False, **EAGER)
    return hf.GPT2LMHeadModel(config), _tokens()


def lora():
    """A frozen model with a trained part: a product with a frozen weight has one product in backward."""
    model, batch = gpt2()
    model.requires_grad_(False)
    model.transformer.h[0].mlp.requires_grad_(True)
    return model, batch


def t5():
    shape = dict(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(hf.T5Config(**shape, use_cache=False)), _tokens()


CASES = {
    "gpt2": gpt2,
    "lora": lora,
    "t5": t5,
    "pictures": lambda: (Pictures(), {"x": torch.randn(8, 3, 8, 8), "y": torch.arange(8)}),
    "experts": lambda: (Experts(), {"x": torch.randn(4, 6, 8)}),
}


def _of(model: nn.Module, batch: dict[str, torch.Tensor], **how):
    request = Request(mesh=(1,), **how)
    return workload_of(request.trace(model, batch), request)


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_that_torch_counts(name):
    torch.manual_seed(0)
    model, batch = CASES[name]()
    work = _of(model.train(), batch)
    with FlopCounterMode(display=False) as counter:
        out = model(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
    assert work.flops == counter.get_total_flops()
    assert work.parameters == sum(p.numel() for p in model.parameters())
    assert work.rows == next(iter(batch.values())).shape[0]
    assert work.tokens == (64 if "input_ids" in batch else 0)


def test_causal_attention_counts_every_pair_and_half_of_them():
    class Attention(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()

    work = _of(Attention(), {"q": torch.randn(2, 4, 16, 8, requires_grad=True)})
    pairs = 2 * 4 * 16 * 16
    assert work.flops == 12 * pairs * 8 and work.causal_flops == work.flops / 2


def test_a_step_of_several_calls_counts_them_all():
    one, four = (_of(*gpt2(), accumulation=n) for n in (1, 4))
    assert (four.flops, four.tokens, four.rows) == (4 * one.flops, 4 * one.tokens, 4 * one.rows)
    plan = autopar.plan(*gpt2(), mesh=(2,), accumulation=4, microbatches=2, cluster="a100-8x1", precision="bf16")
    assert plan.workload.tokens == four.tokens and plan.workload.peak_flops_per_s == 312e12
    assert plan.rates.per_s_device == pytest.approx(four.tokens / plan.expected_s / 2)
    assert plan.rates_at(1.0).mfu == pytest.approx(four.flops / (2 * 312e12))
    assert autopar.Plan.from_dict(plan.to_dict()).rates == plan.rates


# llm-foundry's page of MPT models (scripts/train/benchmarking/README.md): width, layers, heads, sequence, tokens/s/GPU,
# and MFU in percent, of 989 TFLOP/s, whose attention counts every pair
MPT = {
    "1b": (2048, 24, 16, 2048, 45455, 41.82),
    "3b": (2560, 32, 20, 512, 27965, 46.32),
    "7b": (4096, 32, 32, 2048, 10643, 46.44),
    "7b, 65536": (4096, 32, 32, 65536, 1956, 28.59),
    "13b, 16384": (5120, 40, 40, 16384, 2985, 35.55),
    "30b": (7168, 48, 56, 2048, 2002, 38.11),
    "70b": (8192, 80, 64, 2048, 1039, 42.57),
}
# NeMo's Megatron-Bridge (docs/performance-summary.md, 25.09 and 26.02) with sequences of 8,192 tokens: width, inner,
# layers, heads, tokens/s/GPU, and TFLOP/s/GPU, where causal attention counts half of the pairs
LLAMA = {
    "8B": (4096, 14336, 32, 32, 14079, 725),
    "70B": (8192, 28672, 80, 64, 1639, 736),
    "405B": (16384, 53248, 126, 128, 302, 763),
}
QUICK = ("1b", "7b, 65536", "8B")


def _rows(published):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in published]


@pytest.mark.parametrize("name", _rows(MPT))
def test_mfu_is_that_of_a_published_page(name):
    width, layers, heads, length, tokens_per_s, mfu = MPT[name]
    shape = dict(n_embd=width, n_layer=layers, n_head=heads, n_positions=length, vocab_size=50368, use_cache=False)
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**shape))
        ids = torch.zeros(1, length, dtype=torch.long)
    work = _of(model, {"input_ids": ids, "labels": ids}, cluster="h100-8x1", precision="bf16")
    rates = StepRates(work, 1, length / tokens_per_s)
    assert rates.per_s_device == pytest.approx(tokens_per_s)
    # The page counts the table of positions among the products, 1 % of what 65,536 tokens take.
    assert 100 * rates.mfu == pytest.approx(mfu, rel=0.012)


@pytest.mark.parametrize("name", _rows(LLAMA))
def test_flops_of_causal_attention_are_those_of_a_published_page(name):
    width, inner, layers, heads, tokens_per_s, tflops = LLAMA[name]
    config = hf.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
        ids = torch.zeros(1, 8192, dtype=torch.long)
    assume = autopar.Assume(no_padding=True)
    work = _of(model, {"input_ids": ids, "labels": ids}, cluster="h100-8x1", precision="bf16", assume=assume)
    rates = StepRates(work, 1, 8192 / tokens_per_s)
    assert 1e-12 * rates.causal_mfu * work.peak_flops_per_s == pytest.approx(tflops, rel=0.01)
