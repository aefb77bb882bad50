"""Experts under every way to cut them, and all that a router may do: gradients are those of one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import Equality, on_processes
from autopar.tracer import ColoTracer
from tests.random_plans import eager_links
from tests.routed import EXPERTS, ROUTINGS, ROWS, SLOTS, WIDTH, E, I, M, Routed, T, cut_of, eager, planned, scores
from tests.shares import diagonal, one_in
from tests.training import whole


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


CUTS = [((4,), (T,)), ((4,), (E,)), ((4,), (M,)), ((4,), (I,)), ((2, 2), (T, M)), ((2, 2), (M, I)), ((2, 2), (M, M)),
        ((2, 2), (T, E)), ((2, 2), (E, M)), ((2, 2), (M, E))]  # fmt: skip


@pytest.mark.parametrize("mesh, cuts, routing", diagonal(CUTS, ROUTINGS, 6), ids=str)
def test_every_cut_of_experts_under_every_routing(mesh, cuts, routing, threads):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    check(threads, Routed(), {"x": x.detach(), "scores": scores(routing)}, DeviceMesh(mesh), cuts)


@pytest.mark.parametrize(
    "kind, mesh, cuts",
    one_in(3, [("behind", (4,), (T,)), ("behind", (4,), (M,)), ("behind", (4,), (E,)), ("behind", (2, 2), (T, M)),
               ("slope", (4,), (T,)), ("slope", (4,), (I,)), ("slope", (2, 2), (E, M)), ("slope", (2, 2), (M, I))]),
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


@pytest.mark.parametrize(
    "mesh, cuts, kind", diagonal([CUTS[2], CUTS[3], CUTS[5], CUTS[7]], ["halves", "pairs", "plain"], 3), ids=str
)
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
@pytest.mark.nightly
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


def test_devices_that_meet_inside_take_part_in_rounds_of_others(threads, monkeypatch):
    """Rows of two devices all want the first half of experts, in two rounds; those that they meet inside need one."""
    monkeypatch.setattr("tests.routed.SLOTS", 1)
    wanted = scores("random")
    for device, rows in enumerate(wanted.split(ROWS // 4)):
        those = ROWS // 4 if device % 2 == 0 else ROWS // 8
        rows[:those, : EXPERTS // 2] += 2
        rows[those:, EXPERTS // 2 :] += 2
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(threads, Routed(), {"x": x, "scores": wanted}, DeviceMesh((2, 2)), (M, M))
