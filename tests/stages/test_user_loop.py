"""The loop around a model in stages is that of the user: four processes, against eager on one device in float64."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

import autopar
import autopar.optim
from tests.stages.loops import Both, loss_of
from tests.stages.ranks import NONE, apart, outcome

pytestmark = pytest.mark.machines


def reads(both):
    both.backward()
    far = 0
    for name, g, right in both.pairs(lambda p: p.grad):
        far += g.device_mesh.get_coordinate() is None
        assert g.full_tensor().shape == right.shape
        top = right.abs().max().item()
        for what, read in READS.items():
            mine, wanted = read(g), read(right)
            assert torch.allclose(torch.as_tensor(mine), torch.as_tensor(wanted), rtol=1e-9, atol=1e-12 * top), (
                name, what, mine, wanted,
            )  # fmt: skip
        with torch.no_grad():
            assert apart(g[:1].clone(), right[:1]) < 1e-9 or top < 1e-12, name
    assert far  # every rank has read what it does not hold
    total = sum(p.grad.norm() ** 2 for p in both.spread.parameters())
    assert float(total) == pytest.approx(float(sum(p.grad.norm() ** 2 for p in both.alone.parameters())), rel=1e-12)


READS = {
    "norm": lambda g: g.norm().item(),
    "sum": lambda g: float(g.sum()),
    "numpy": lambda g: torch.from_numpy(g.detach().numpy().copy()),
    "index": lambda g: g.flatten()[1].item(),
    "largest": lambda g: g.abs().max().item(),
    "median": lambda g: float(g.median()),
    "finite": lambda g: bool(torch.isfinite(g).all()),
}


def writes(both):
    name, far = next((n, p) for n, p in both.spread.named_parameters() if n.endswith("0.down.weight"))
    right = dict(both.alone.named_parameters())[name]
    with torch.no_grad():
        for p in (far, right):
            p[1] = 0.5
            p[2].mul_(2.0)
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / 100)
            p.mul_(1.5)
    both.assert_alike(1e-15)
    for model in both.models:
        last = list(model.parameters())[-2:]
        first = list(model.parameters())[:2]
        model.zero_grad()
        (loss_of(model(**both.batch)) + 0.1 * sum(p.norm() for p in (*first, *last))).backward()
    both.assert_alike(1e-11, lambda p: p.grad)


def clipping(both):
    for norm_type in (2.0, float("inf"), 1.0):
        for foreach in (True, False):
            both.backward()
            found = [
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
                for model in both.models
            ]
            assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-12), norm_type
            both.assert_alike(1e-11, lambda p: p.grad)
            found = [torch.nn.utils.get_total_norm([p.grad for p in m.parameters()], norm_type) for m in both.models]
            assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-12)


def evaluation(both, more=False):
    few = {name: rows[:5] for name, rows in both.batch.items()}
    for batch in (both.batch, few, {"ids": few["ids"]}) if more else (both.batch, {"ids": few["ids"]}):
        with torch.no_grad():
            mine, right = (model.eval()(**batch) for model in both.models)
        assert mine.keys() == right.keys()
        for name in right:
            assert apart(mine[name], right[name]) < 1e-12, name
    for model in both.models:
        model.train()


def odd_batches(both, sizes):
    for rows in sizes:
        few = {name: values[:rows] for name, values in both.batch.items()}
        for model in both.models:
            model.zero_grad()
            loss_of(model(**both.batch)).backward()
            loss_of(model(**few)).backward()
        both.assert_alike(1e-11, lambda p: p.grad)


def steps(both, make, count=5, clip=None):
    optimizers = [make(model.parameters()) for model in both.models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    averaged = [copy.deepcopy(model) for model in both.models]
    for step in range(count):
        for model, optimizer, scheduler, average in zip(both.models, optimizers, schedulers, averaged, strict=True):
            with model.no_sync() if model is both.spread else contextlib.nullcontext():
                loss_of(model(**both.batch)).backward()
            loss_of(model(**both.batch)).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(p, 0.1)
    both.assert_alike(1e-10)
    there = dict(averaged[1].named_parameters())
    wrong = {n: e for n, p in averaged[0].named_parameters() if not (e := apart(p.detach(), there[n].detach())) < 1e-10}
    assert not wrong, wrong
    both.assert_copies_are_equal()


def adamw(foreach):
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=foreach)


def clipped_in_the_step(both):
    """autopar.optim.AdamW has states of single precision, on one device too."""
    for model in both.models:
        optimizer = autopar.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(**both.batch)).backward()
            optimizer.step()
    both.assert_alike(1e-5)


def scaled(both):
    """A step is left out on all ranks where one stage has found an infinite gradient."""
    scales = []
    for model in both.models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(**both.batch))).backward()
            if step == 1:
                model.get_parameter("blocks.0.up.weight").grad.fill_(float("inf"))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:3] == scales[3:] == [8.0, 4.0, 4.0]
    both.assert_alike(1e-10)


def refused(both):
    with pytest.raises(autopar.NotServed, match="LBFGS cannot step"):
        torch.optim.LBFGS(both.spread.parameters()).step(lambda: loss_of(both.spread(**both.batch)))
    with pytest.raises(autopar.NotServed, match="lie on several stages, with gradients"):
        torch.stack([p.norm() for p in both.spread.parameters()])


def watched(both):
    """A watch finds a copy that differs on one rank of a far stage, and nothing before that."""
    watch = autopar.watch(both.spread, every=1, rows=0)
    loss_of(both.spread(**both.batch)).backward()
    norm = both.spread.get_parameter("blocks.3.norm.weight")
    if dist.get_rank() == 3:
        norm.to_local().detach().add_(1.0)
    with pytest.raises(autopar.Letter, match=r"blocks\.3\.norm\.weight on rank"):
        both.spread(**both.batch)
    watch.remove()


def of_loops(folder):
    both = Both("speaker", outputs="full")
    yield "reads", lambda: reads(both)
    yield "writes", lambda: writes(both)
    yield "clipping", lambda: clipping(both)
    yield "evaluation", lambda: evaluation(both)
    yield "AdamW", lambda: steps(both, adamw(True), 5, clip=0.05)
    yield "evaluation after steps", lambda: evaluation(both)
    yield "an odd batch", lambda: odd_batches(both, [7])
    yield "GradScaler", lambda: scaled(both)
    yield "refused", lambda: refused(both)


def of_more_loops(folder):
    both = Both("speaker", outputs="full")
    yield "evaluation", lambda: evaluation(both, more=True)
    yield "odd batches", lambda: odd_batches(both, [6, 2, 3])
    yield "SGD", lambda: steps(both, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), 3)
    yield "max_norm=", lambda: clipped_in_the_step(both)
    yield "watch", lambda: watched(both)
    in_four = Both("encoder and decoder", (4,), parallel=None)  # three of the stages share one table
    yield "AdamW in four stages", lambda: steps(in_four, adamw(False), 20, clip=0.05)


@pytest.mark.parametrize("run", [of_loops, pytest.param(of_more_loops, marks=pytest.mark.nightly)])
def test_a_loop_of_the_user_is_unchanged(run, tmp_path):
    assert outcome(run, tmp_path) == NONE
