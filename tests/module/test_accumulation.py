"""Micro-batches: gradients that wait are not reduced, and what they come to is what one device adds up."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh, Precision
from autopar.codegen.halves import COLLECTIVES
from autopar.codegen.lower import lower
from autopar.letters import NotServed
from autopar.request import Request
from autopar.runtime.collectives import PACK, STEPS
from autopar.search import plan_of
from autopar.testing import Equality, on_threads
from tests.models import batch_of, eager_links, mlp_case
from tests.shares import by_day
from tests.training import whole

MESHES = {
    "dp": DeviceMesh((2,), ("dp",)),
    "zero3": DeviceMesh((4,), ("dp",)),
    "megatron": DeviceMesh((2,), ("tp",)),
    None: DeviceMesh((2, 2), ("dp", "tp")),
}


def steps(model, rows, quietly):
    """Two optimizer steps of as many micro-batches as there are rows; the last of each is synchronised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        for k, n in enumerate(rows):
            with quietly(k < len(rows) - 1):
                (model(**batch_of(n, seed=10 * step + k)) / len(rows)).backward()
            if k < len(rows) - 1 and quietly is not always:
                assert all(p.grad is None for p in model.parameters())
        gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
    return gradients, {n: whole(p).detach().clone() for n, p in model.named_parameters()}


def always(waits):
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "parallel, rows",
    by_day(itertools.product(MESHES, ((8, 8, 8), (8, 3, 8, 5))), ("zero3", (8, 3, 8, 5))),
    ids=str,
)
def test_gradients_that_wait_come_to_what_one_device_adds_up(parallel, rows):
    model, batch = mlp_case()
    expected = steps(copy.deepcopy(model), rows, always)
    for accumulation in (1, len(rows)):

        def body(rank, accumulation=accumulation):
            mine = autopar.autoparallelize(
                copy.deepcopy(model),
                batch,
                mesh=MESHES[parallel],
                parallel=parallel,
                cluster=eager_links(),
                accumulation=accumulation,
            )
            return steps(mine, rows, lambda waits: mine.no_sync() if waits else contextlib.nullcontext())

        for gradients, parameters in on_threads(MESHES[parallel].size, body):
            Equality.in_float64(f"gradients under {parallel}", gradients, expected[0], 1e-9).check()
            Equality.in_float64(f"parameters under {parallel}", parameters, expected[1], 1e-8).check()


def test_nothing_is_reduced_while_gradients_wait():
    model, batch = mlp_case()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", cluster=eager_links())
        count = {
            half: sum(n.target in COLLECTIVES for n in getattr(mine.joint, half).nodes)
            for half in ("backward", "hold", "settle")
        }
        with mine.no_sync():
            loss = mine(**batch)
        loss.backward()  # the forward was inside
        assert all(p.grad is None for p in mine.parameters())
        return count

    for count in on_threads(2, body):
        assert count["hold"] == 0 and count["backward"] == count["settle"] > 0


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.stem(x))).mean((2, 3))).square().mean()


def test_what_waits_shares_no_message_with_what_each_micro_batch_reduces():
    """The gradients of a batch norm are reduced at once, for the statistics that they are made of are; others wait."""
    request = Request(mesh=DeviceMesh((2,), ("dp",)), memory_budget="inf", parallel="dp")
    graph = request.trace(Pictures().double(), {"x": torch.randn(8, 3, 6, 6).double()})
    joint = lower(graph, plan_of(graph, request), (1,)).joint
    assert len(joint.settle.find_nodes(op="placeholder")) == len(set(joint.settled_from))
    sending = (STEPS["all_reduce"], STEPS["all_reduce_bucket"], PACK["all_reduce"])
    reduced = [n.args[0] for n in joint.hold.nodes if n.target in sending]
    sums = [part for one in reduced for part in (one if isinstance(one, list) else [one])]
    assert sums and max(part.meta["val"].numel() for part in sums) < 10


def test_zero_grad_forgets_what_waits():
    """`zero_grad` of the model, of an optimizer of all parameters, and of one that has some of them.

    Their gradients begin anew, those of the others go on.
    """
    model, batch = mlp_case()
    once = copy.deepcopy(model)
    once(**batch).backward()
    once = {n: p.grad for n, p in once.named_parameters()}
    some = [n for n in once if "weight" in n]
    assert 0 < len(some) < len(once)

    def body(rank):
        mine, found = (
            autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", cluster=eager_links()),
            [],
        )
        for forgets in (
            mine,
            torch.optim.SGD(mine.parameters(), 0.1),
            torch.optim.AdamW([mine.get_parameter(n) for n in some]),
        ):
            mine.zero_grad()
            with mine.no_sync():
                mine(**batch).backward()
            forgets.zero_grad()
            mine(**batch).backward()
            found.append({n: whole(p.grad) for n, p in mine.named_parameters()})
        return found

    for of_model, of_all, of_some in on_threads(2, body):
        Equality.in_float64("gradients", of_model, once, 1e-9).check()
        Equality.in_float64("gradients", of_all, once, 1e-9).check()
        Equality.in_float64("gradients", of_some, {n: g if n in some else 2 * g for n, g in once.items()}, 1e-9).check()


def test_what_only_an_earlier_micro_batch_reached_has_its_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x, first):
            return (self.a(x) if first else self.b(x)).square().mean()

    model, x = Two(), torch.randn(8, 4).double()
    own = copy.deepcopy(model)
    (own(x, True) + own(x, False)).backward()

    def forgetful(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), {"x": x, "first": True}, mesh=2, parallel="dp", cluster=eager_links()
        )
        with mine.no_sync():
            mine(x, True).backward()
        torch.optim.SGD([mine.a.weight], 0.1).zero_grad()
        mine(x, False).backward()
        return {n: None if p.grad is None else whole(p.grad) for n, p in mine.named_parameters()}

    for gradients in on_threads(2, forgetful):  # none, and not zero: a stepper with momentum or decay tells them apart
        assert gradients.pop("a.weight") is None
        Equality.in_float64(
            "gradients", gradients, {n: p.grad for n, p in own.named_parameters() if n != "a.weight"}, 1e-9
        ).check()

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), {"x": x, "first": True}, mesh=2, parallel="dp", cluster=eager_links()
        )
        with mine.no_sync():
            mine(x, True).backward()
        mine(x, False).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for gradients in on_threads(2, body):
        Equality.in_float64("gradients", gradients, {n: p.grad for n, p in own.named_parameters()}, 1e-9).check()


def test_waiting_gradients_keep_the_dtype_of_storage():
    """Eight bits would lose what many micro-batches add."""
    model, batch = mlp_case()
    model, batch = model.float(), {k: v.float() for k, v in batch.items()}

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model),
            batch,
            mesh=2,
            parallel="dp",
            cluster=eager_links(),
            precision=Precision("bfloat16", "bfloat16"),
        )
        with mine.no_sync():
            mine(**batch).backward()
        (waiting,) = mine._autopar.waiting.of.values()
        assert {t.dtype for t in waiting} == {torch.float32}
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    own = copy.deepcopy(model)
    (2 * own(**batch)).backward()
    for gradients in on_threads(2, body):
        assert all((gradients[n] - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-6 for n, p in own.named_parameters())


def test_a_step_while_gradients_wait_is_refused():
    model, batch = mlp_case()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="zero3")
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
        with mine.no_sync():
            mine(**batch).backward()
        with pytest.raises(NotServed, match="while gradients of micro-batches"):
            optimizer.step()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]).step()  # of nobody's parameters
        optimizer.zero_grad()
        mine(**batch).backward()
        optimizer.step()
        return whole(mine.head.weight).detach()

    for found in on_threads(2, body):
        expected = copy.deepcopy(model)
        expected(**batch).backward()
        torch.optim.SGD(expected.parameters(), lr=0.05).step()
        torch.testing.assert_close(found, expected.head.weight.detach())


def test_hooks_see_gradients_under_no_sync_and_none_forgets_what_waits():
    model, batch = mlp_case()

    def train(mine, quietly):
        seen = []
        with quietly():
            mine(**batch).backward()
        for p in mine.parameters():
            del p.grad  # a micro-batch is left out
        with quietly():
            mine(**batch).backward()
        for p in mine.parameters():
            p.grad = None
        hook = mine.head.weight.register_hook(lambda g: 2 * g)
        late = mine.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad).norm()))
        with quietly():
            mine(**batch).backward()
        mine(**batch).backward()
        hook.remove(), late.remove()
        return {"gradient": whole(mine.head.weight.grad), "seen": torch.stack(seen)}

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="zero3")
        return train(mine, mine.no_sync)

    expected = train(copy.deepcopy(model), contextlib.nullcontext)
    for found in on_threads(2, body):
        Equality.in_float64("hooks", found, expected, 1e-9).check()
