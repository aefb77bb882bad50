"""Attention by parts on a GPU: each tile that flash computes, with windows and grouped heads, beside float64."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.attention import attend
from autopar.runtime.sees import Sees, all_pairs

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
