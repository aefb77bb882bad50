"""Experts of Hugging Face as they are built: grouped products, of parts of any width."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.letters import NotCaptured
from autopar.ops.products import grouped_mm
from autopar.testing import Equality
from tests.random_plans import random_plan
from tests.training import whole

SIZE = dict(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
    head_dim=8,
    use_cache=False,
)
FEW = dict(num_experts=4, num_experts_per_tok=2)
FAMILIES = {
    "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": dict(moe_intermediate_size=16, **FEW),
    "Olmoe": FEW,
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "DeepseekV3": dict(
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=0,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_shared_experts=1,
    ),
}
IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def built(family: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE | FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)


def step(model):
    loss = model(**BATCH).loss
    loss.backward()
    found = {n: whole(p.grad).float() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **found}


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, torch.float32) for name in FAMILIES), ("Mixtral", torch.bfloat16)], ids=str
)
def test_a_family_runs_as_it_is_built(family, dtype):
    expected = step(built(family, dtype))
    found = step(autopar.autoparallelize(built(family, dtype), BATCH, mesh=1))
    for name, value in expected.items():
        bound = (1e-5 if dtype == torch.float32 else 2e-2) * max(value.abs().max().item(), 1e-2)
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=bound, msg=lambda said, name=name: f"{name}: {said}"
        )


class Experts(nn.Module):
    """Two grouped products, with 24 and 20 columns."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 24, 20, generator=generator) / 5)
        self.down = nn.Parameter(torch.randn(3, 20, 24, generator=generator) / 5)

    def forward(self, x, ends):
        h = F.silu(F.grouped_mm(x, self.up, offs=ends))
        return F.grouped_mm(h, self.down, offs=ends).square().sum()


@pytest.mark.parametrize("seed", range(4))
def test_experts_in_parts_of_any_width(seed, threads):
    """On four devices a row of a part has 6 or 5 numbers, which are no whole number of 16 bytes."""
    model = Experts()
    batch = {"x": torch.randn(8, 24).sin().requires_grad_(), "ends": torch.tensor([3, 3, 8], dtype=torch.int32)}
    reference = copy.deepcopy(model)
    reference(**batch).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    plan = random_plan(model, batch, DeviceMesh((4,)), seed)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for found in threads(4, body):
        Equality.in_float64("parts", found, expected, 1e-4).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inner", "width"), [(8, 16), (6, 17), (7, 24), (5, 3)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_grouped_product_of_any_width(inner, width, is_turned, dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, inner, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(4, width, inner, generator=generator).to(dtype).mT
    b = (b if is_turned else b.contiguous()).requires_grad_()
    ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    groups = torch.searchsorted(ends, torch.arange(16), right=True)
    right = torch.bmm(exact[0][:, None], exact[1][groups])[:, 0]
    found = grouped_mm(a, b, offs=ends)
    gradient = torch.randn(16, width, generator=generator).to(dtype)
    found.backward(gradient)
    right.backward(gradient.double())
    for one, other in ((found, right), (a.grad, exact[0].grad), (b.grad, exact[1].grad)):
        bound = 8 * torch.finfo(dtype).eps * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound)
    assert found.is_contiguous()


def test_in_float64_where_eager_fails_it_is_a_letter():
    model = built("Mixtral", torch.float64)
    with pytest.raises(RuntimeError, match=r"Expected .*Float32, BFloat16 or Float16"):
        model(**BATCH)
    with pytest.raises(NotCaptured, match="Expected Float32, BFloat16 or Float16"):
        autopar.autoparallelize(copy.deepcopy(model), BATCH, mesh=1)
