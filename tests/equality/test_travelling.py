"""Experts under every way to cut them, and all that a router may do: gradients are those of one device."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import Equality
from autopar.tracer import ColoTracer
from tests.random_plans import cheapest_at_random, eager_links
from tests.training import whole

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

    def forward(self, x, scores):
        weights, ids = torch.topk(scores, SLOTS, dim=-1)
        rows = F.linear(x, self.into)
        body = F.gelu if self.kind == "plain" else F.silu
        gated = {"plain": False, "pairs": "interleaved", "halves": True}[self.kind]
        rows = autopar.experts(rows, ids, F.softmax(weights, -1), self.up, self.down, self.up_bias, self.down_bias,
                               body=body, gated=gated, transposed=self.kind == "pairs")  # fmt: skip
        return F.linear(rows, self.out).square().sum()


def eager(model: Routed, x, scores):
    """The same, as a loop over experts."""
    weights, ids = torch.topk(scores, SLOTS, dim=-1)
    weights = F.softmax(weights, -1)
    rows = x @ model.into.T
    out = torch.zeros_like(rows)
    for e in range(EXPERTS):
        row, slot = torch.where(ids == e)
        up, down = model.up[e], model.down[e]
        if model.kind == "pairs":
            up, down = up.T, down.T
        hidden = rows[row] @ up.T + (0 if model.up_bias is None else model.up_bias[e])
        if model.kind == "plain":
            hidden = F.gelu(hidden)
        else:
            gate, other = (hidden[:, ::2], hidden[:, 1::2]) if model.kind == "pairs" else hidden.chunk(2, -1)
            hidden = F.silu(gate) * other
        made = hidden @ down.T + (0 if model.down_bias is None else model.down_bias[e])
        out = out.index_add(0, row, made * weights[row, slot, None])
    return (out @ model.out.T).square().sum()


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


def check(threads, model, batch, mesh, cuts):
    reference = copy.deepcopy(model)
    eager(reference, **batch).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    plan = planned(model, batch, mesh, cuts)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for found in threads(mesh.size, body):
        Equality.in_float64("experts", found, expected, 1e-12).check()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "mesh, cuts",
    [((4,), (T,)), ((4,), (E,)), ((4,), (M,)), ((4,), (I,)), ((2, 2), (T, M)), ((2, 2), (M, I)), ((2, 2), (M, M)),
     ((2, 2), (T, E)), ((2, 2), (E, M)), ((2, 2), (M, E))],
    ids=str,
)  # fmt: skip
def test_every_cut_of_experts_under_every_routing(mesh, cuts, routing, threads):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    check(threads, Routed(), {"x": x.detach(), "scores": scores(routing)}, DeviceMesh(mesh), cuts)


def test_devices_that_meet_inside_take_part_in_rounds_of_others(threads, monkeypatch):
    """Rows of two devices all want the first half of experts, in two rounds; those that they meet inside need one."""
    monkeypatch.setattr(f"{__name__}.SLOTS", 1)
    wanted = scores("random")
    for device, rows in enumerate(wanted.split(ROWS // 4)):
        those = ROWS // 4 if device % 2 == 0 else ROWS // 8
        rows[:those, : EXPERTS // 2] += 2
        rows[those:, EXPERTS // 2 :] += 2
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(threads, Routed(), {"x": x, "scores": wanted}, DeviceMesh((2, 2)), (M, M))
