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
from autopar.testing import Equality, on_processes
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


@pytest.mark.parametrize(
    "kind, mesh, cuts",
    [("behind", (4,), (T,)), ("behind", (4,), (E,)), ("behind", (4,), (M,)), ("behind", (2, 2), (T, M)),
     ("slope", (4,), (T,)), ("slope", (4,), (I,)), ("slope", (2, 2), (M, I)), ("slope", (2, 2), (E, M))],
    ids=str,
)  # fmt: skip
def test_every_cut_of_experts_that_read_parameters(kind, mesh, cuts, threads):
    """Their gradients are sums over what each device computed; rows of no expert are no part of them."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(threads, Routed(True, kind), {"x": x, "scores": scores("none last")}, DeviceMesh(mesh), cuts)


@pytest.mark.parametrize("kind", ["behind", "slope"])
def test_ids_of_no_expert_count_nothing(kind):
    """Parameters that experts read get no gradient from rows that go to none."""
    model = Routed(True, kind)
    ids = torch.tensor([[-1, 0, EXPERTS], [3, -1, 5], [EXPERTS, -1, -1]])
    weights = torch.rand(3, SLOTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def gradients(compute):
        read = [model.scale if kind == "behind" else model.slope, model.down_bias]
        return torch.autograd.grad(compute(rows, ids, weights).sin().sum(), read)

    for found, expected in zip(gradients(model.routed), gradients(model.one_by_one), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_what_stands_behind_experts_reads_whole_sums():
    graph = ColoTracer().trace(
        Routed(True, "behind"), {"x": torch.randn(ROWS, WIDTH).double(), "scores": scores("random")}
    )
    space = shardings(graph, Setting(DeviceMesh((2,)), eager_links()))
    (site,) = [site for site in space.sites if site.op == "experts"]
    assert {cut_of(choice.strategies[0]) for choice in site.choices} >= {T, E, M}
    assert I not in {cut_of(choice.strategies[0]) for choice in site.choices}


@pytest.mark.parametrize("kind", ["halves", "pairs", "plain"])
@pytest.mark.parametrize("mesh, cuts", [((4,), (M,)), ((4,), (I,)), ((2, 2), (M, I)), ((2, 2), (T, E))], ids=str)
def test_biases_and_layouts(mesh, cuts, kind, threads):
    """The bias of the last matrices counts once, whatever is cut."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(threads, Routed(bias=True, kind=kind), {"x": x, "scores": scores("random")}, DeviceMesh(mesh), cuts)


def test_uneven_rows_and_experts(threads):
    """Rows 17, 17, 17, 10 and experts 3, 3, 2; weights in single precision, of which a single row arrives somewhere."""
    x = torch.randn(61, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(threads, Routed(), {"x": x, "scores": scores("one first")[:61]}, DeviceMesh((4,)), (M,))
    check(threads, Routed(), {"x": x, "scores": scores("one device")[:61].float()}, DeviceMesh((3,)), (M,))


def steps(model, batch, optimizer, count):
    """Losses of some steps whose gradients are clipped by their norm."""
    losses = []
    for _ in range(count):
        loss = model(**batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss.detach()), float(whole(norm) if hasattr(norm, "full_tensor") else norm)]
    return losses


def trained(rank, batch, plans, back, folder):
    """Three clipped steps under each plan, then a checkpoint that another plan goes on from."""
    found = []
    for number, plan in enumerate(plans):
        model = autopar.autoparallelize(Routed(bias=True), batch, plan=plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = steps(model, batch, optimizer, 3)
        autopar.save(f"{folder}/{number}", model, optimizer, step=3)
        other = autopar.autoparallelize(Routed(bias=True), batch, plan=back)
        again = torch.optim.AdamW(other.parameters(), lr=0.01)
        autopar.load(f"{folder}/{number}", other, again)
        losses += steps(other, batch, again, 1)
        found.append((losses, {n: whole(p.detach()) for n, p in other.named_parameters()}))
    return found


@pytest.mark.machines
@pytest.mark.timeout(240)
def test_it_trains_with_clipping_and_goes_on_elsewhere(tmp_path):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch = {"x": x, "scores": scores("one first")}
    reference = Routed(bias=True)
    reference.forward = lambda x, scores: eager(reference, x, scores)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    losses = steps(reference, batch, optimizer, 4)
    model = Routed(bias=True)
    cuts = [((4,), (M,)), ((2, 2), (T, M)), ((2, 2), (M, I)), ((2, 2), (M, M))]
    plans = [planned(model, batch, DeviceMesh(mesh), cut) for mesh, cut in cuts]
    back = planned(model, batch, DeviceMesh((4,)), (T,))
    for of_rank in on_processes(4, trained, batch, plans, back, str(tmp_path), timeout_s=200.0):
        for said, parameters in of_rank:
            assert said == pytest.approx(losses, rel=1e-9)
            for name, value in reference.named_parameters():
                torch.testing.assert_close(parameters[name], value.detach(), rtol=0, atol=1e-9, msg=name)
