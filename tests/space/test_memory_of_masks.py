"""Bytes of a mask tensor beside heads that are cut: it is whole on every device, whatever cuts queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autopar
from benchmarks.memory import measure


class Masked(nn.Module):
    """Layers of attention whose window is a tensor of queries by keys."""

    def __init__(self, width=64, heads=8, layers=4):
        super().__init__()
        self.heads = heads
        self.given = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, y):
        places = torch.arange(x.shape[1])
        mask = (places[:, None] - places).abs() < 500
        for given, out in zip(self.given, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in given(x).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return transformers.utils.ModelOutput(loss=F.mse_loss(x, y))


def test_a_mask_is_whole_where_heads_are_cut(fake_world):
    batch = {name: torch.randn(1, 1024, 64) for name in "xy"}
    with fake_world(4):
        model = autopar.autoparallelize(Masked(), batch, mesh=(4,), parallel="megatron", memory_budget="inf")
        peak = max(measure(model, batch, "adamw").peaks.values())
    assert 0.98 <= model.plan.peak_bytes / peak <= 1.05
