"""Attention by parts on a GPU: each tile that flash computes, with windows and grouped heads, beside float64."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.attention import attend
from autopar.runtime.attention import attention_backward, attention_forward
from autopar.runtime.dealing import HALVES, WORK, Cutting, Setup, deal_of, owners_of
from autopar.runtime.sees import Places, Sees, all_pairs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MASKS = {
    "causal": Sees(right=0),
    "full": Sees(),
    "window": Sees(99, 0),
    "both ways": Sees(64, 30),
    "before alone": Sees(None, -1),
    "chunks": Sees(right=0, chunk=100),
    "softcap": Sees(right=0, softcap=2.0),
}


def eager(query, key, value, documents, sinks, sees: Sees):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if sees.softcap is not None:
        scores = sees.softcap * torch.tanh(scores / sees.softcap)
    seen = all_pairs(sees, query.shape[2], key.shape[2], documents)
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("has_documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_it_is_as_near_to_float64_as_eager(name, dtype, has_documents):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 8, 333, 64), (2, 2, 333, 64), (2, 2, 333, 64), (8,), (2, 8, 333, 64))
    drawn = [torch.randn(s, device="cuda", dtype=torch.float64, generator=generator).to(dtype) for s in shapes]
    ends = torch.tensor([[40, 41, 200], [7, 150, 300]], device="cuda")
    places = torch.arange(333, device="cuda").expand(2, -1).contiguous()
    documents = torch.searchsorted(ends, places, right=True) if has_documents else None
    found = []
    for of, how in ((torch.float64, eager), (dtype, eager), (dtype, attend)):
        query, key, value, sinks = (x.to(of, copy=True).requires_grad_() for x in drawn[:4])
        more = (MASKS[name],) if how is eager else ()
        out = how(query, key, value, documents, *((sinks, *more) if more else (None, sinks, MASKS[name].text())))
        found.append([out, *torch.autograd.grad(out, (query, key, value, sinks), drawn[4].to(of))])
    for right, torchs, ours in zip(*found, strict=True):
        worse = 2 if right.dim() == 4 else 3  # gradients of sinks are made of results that were rounded
        assert (ours.double() - right).norm() <= worse * (torchs.double() - right).norm() + 1e-9 * right.norm()


@pytest.mark.parametrize("name, dealt", [("causal", HALVES), ("causal", WORK), ("window", ""), ("chunks", WORK)])
def test_rows_that_a_device_is_dealt_are_as_near(name, dealt):
    """Rows of three devices, which documents and pieces make segments of one call; gradients of keys add up."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 8, 334, 64), (2, 2, 334, 64), (2, 2, 334, 64), (2, 8, 334, 64))
    given = [torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes]
    ends = torch.tensor([[40, 41, 200], [7, 150, 300]], device="cuda")
    places = torch.arange(334, device="cuda").expand(2, -1).contiguous()
    documents = torch.searchsorted(ends, places, right=True) if dealt == WORK else None
    sees, none = MASKS[name], torch.full((8,), -torch.inf, device="cuda")
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        held = [x.to(dtype, copy=True).requires_grad_() for x in given[:3]]
        out = eager(*held, documents, none.to(dtype), sees)
        found.append([out, *torch.autograd.grad(out, held, given[3].to(dtype))])
    ours = [torch.zeros_like(x, dtype=torch.float32) for x in (given[3], *given[:3])]
    for place in range(3):
        has = documents is not None, False, False
        setup = Setup(sees.text(), 334, 334, (Cutting("a", 3, place),), (), dealt, has)
        owners = owners_of(setup, lambda: Places.of(sees, (334, 334), documents, None)) if dealt else None
        own = torch.from_numpy(deal_of(setup.text(), owners, False).here).cuda()
        tensors = [given[0][:, :, own], *given[1:3], *([documents] if has[0] else [])]
        made = attention_forward(tensors, (), setup.text())
        back = attention_backward(tensors, (), made, given[3][:, :, own].contiguous(), setup.text())
        ours[0][:, :, own] = made[0].float()
        ours[1][:, :, own] = back[0].float()
        for total, x in zip(ours[2:], back[1:], strict=True):
            total += x.float()
    for right, torchs, mine in zip(*found, ours, strict=True):
        assert (mine.double() - right).norm() <= 2 * (torchs.double() - right).norm()
