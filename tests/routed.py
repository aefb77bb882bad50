"""A mixture of experts whose routes are an input, its eager twin, and plans under which its experts are cut as said."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer
from tests.random_plans import cheapest_at_random, eager_links

ROWS, WIDTH, INNER, EXPERTS, SLOTS = 68, 6, 8, 8, 3


class Routed(nn.Module):
    """A mixture of experts between two layers; which experts a row wants is an input."""

    def __init__(self, bias: bool = False, kind: str = "halves"):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def made(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5)

        self.kind = kind
        width = INNER if kind == "plain" else 2 * INNER
        up, down = (EXPERTS, width, WIDTH), (EXPERTS, WIDTH, INNER)
        if kind == "pairs":
            up, down = (EXPERTS, WIDTH, width), (EXPERTS, INNER, WIDTH)
        self.into, self.up, self.down, self.out = made(WIDTH, WIDTH), made(*up), made(*down), made(WIDTH, WIDTH)
        self.up_bias = made(EXPERTS, width) if bias else None
        self.down_bias = made(EXPERTS, WIDTH) if bias else None
        self.slope = nn.Parameter(torch.tensor(0.7, dtype=torch.float64)) if kind == "slope" else None
        self.scale = made(WIDTH) if kind == "behind" else None

    def gate(self, rows):
        return torch.sigmoid(self.slope * rows)

    def normed(self, rows):
        return rows * self.scale * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x, scores):
        weights, ids = torch.topk(scores, SLOTS, dim=-1)
        rows = self.routed(F.linear(x, self.into), ids, F.softmax(weights, -1))
        return F.linear(rows, self.out).square().sum()

    def routed(self, rows, ids, weights):
        body = {"plain": F.gelu, "slope": self.gate}.get(self.kind, F.silu)
        gated = {"plain": False, "pairs": "interleaved"}.get(self.kind, True)
        return autopar.experts(rows, ids, weights, self.up, self.down, self.up_bias, self.down_bias,
                               body=body, gated=gated, transposed=self.kind == "pairs",
                               behind=self.normed if self.kind == "behind" else None)  # fmt: skip

    def one_by_one(self, rows, ids, weights):
        """The same, as a loop over experts."""
        out = torch.zeros_like(rows)
        for e in range(EXPERTS):
            row, slot = torch.where(ids == e)
            up, down = self.up[e], self.down[e]
            if self.kind == "pairs":
                up, down = up.T, down.T
            hidden = rows[row] @ up.T + (0 if self.up_bias is None else self.up_bias[e])
            if self.kind == "plain":
                hidden = F.gelu(hidden)
            else:
                gate, other = (hidden[:, ::2], hidden[:, 1::2]) if self.kind == "pairs" else hidden.chunk(2, -1)
                hidden = (self.gate(gate) if self.kind == "slope" else F.silu(gate)) * other
            made = hidden @ down.T + (0 if self.down_bias is None else self.down_bias[e])
            if self.kind == "behind":
                made = self.normed(made)
            out = out.index_add(0, row, made * weights[row, slot, None])
        return out


def eager(model: Routed, x, scores):
    weights, ids = torch.topk(scores, SLOTS, dim=-1)
    rows = model.one_by_one(x @ model.into.T, ids, F.softmax(weights, -1))
    return (rows @ model.out.T).square().sum()


def scores(routing: str) -> torch.Tensor:
    """Scores of a router for each row and expert."""
    made = torch.rand(ROWS, EXPERTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if routing == "one device":  # experts 0 to 2, which the first device has, are wanted by all
        made[:, :SLOTS] += 2
    elif routing == "one first":
        made[:, 5] += 4
    elif routing == "equal":
        made[:] = 1.0
    elif routing == "near":  # each row wants those of the device that holds it
        for device, rows in enumerate(made.split(ROWS // 4)):
            rows[:, [(2 * device + i) % EXPERTS for i in range(SLOTS)]] += 2
    elif routing == "none last":
        made[:, -2:] -= 4
    return made


ROUTINGS = ("random", "one device", "one first", "equal", "near", "none last")
T, E, M, I, R = "t", "e", "e&t", "i", ""  # what an axis cuts: rows, experts behind a mask, both together, hidden rows


def cut_of(strategy) -> str:
    cut = strategy.cut
    if cut is None:
        return R if strategy.is_unused else "sum"
    return M if cut.travels else I if cut.factors[0] in ("gate", "i") else cut.factors[0]


def planned(model, batch, mesh: DeviceMesh, cuts):
    """A random plan in which experts are cut as said, axis by axis."""

    def refused(site):
        if site.op != "experts":
            return [False] * len(site.choices)
        return [tuple(map(cut_of, choice.strategies)) != cuts for choice in site.choices]

    space = shardings(ColoTracer().trace(model, batch), Setting(mesh, eager_links()))
    return cheapest_at_random(space, np.random.default_rng(0), refused)
