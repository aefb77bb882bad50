"""Outputs beside the loss: gradients arrive at those that are named, from any loss that is computed outside."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.letters import BadPlan, NotServed
from autopar.sharding.strategies import values
from autopar.testing import on_threads
from autopar.tracer import ColoTracer, Graph
from tests import language
from tests.models import eager_links
from tests.oracle import InFloat64
from tests.shares import by_day
from tests.training import whole

BATCH = {k: torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(3)) for k in ("input_ids", "labels")}
WEIGHTS = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
LOSSES = {
    "both": lambda outputs: outputs.loss + 0.1 * (outputs.logits * WEIGHTS).sum(),
    "logits alone": lambda outputs: (outputs.logits.softmax(-1) * WEIGHTS).sum(),
    "the loss alone": lambda outputs: outputs.loss,
    "one twice": lambda outputs: outputs.loss * outputs.logits.square().mean(),
}


def llama():
    torch.manual_seed(0)
    return language.llama(1, 32, 48, 40, 16, initializer_range=0.3).double()


@pytest.mark.parametrize(
    "parallel, mesh",
    by_day([(None, (4,)), ("megatron", (2, 2)), ("zero3", (4,)), ("2d", (2, 2))], ("2d", (2, 2))),
    ids=str,
)
def test_gradients_arrive_at_named_outputs(parallel, mesh):
    model = llama()
    with InFloat64():
        plan = autopar.plan(model, BATCH, mesh=mesh, parallel=parallel, cluster="generic", outputs=("logits",))
    assert all(
        p.is_replicated for p in values(plan.decisions["out.logits"].flows(0)).placements
    )  # gathered by the plan, which prices it

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(copy.deepcopy(model), BATCH, plan=plan, outputs=("logits",))
            for name, loss in LOSSES.items():
                theirs = copy.deepcopy(model)
                expected = loss(theirs(**BATCH))
                expected.backward()
                mine.zero_grad()
                with mine.no_sync():  # micro-batches wait with all that arrives
                    loss(mine(**BATCH)).backward()
                found = loss(mine(**BATCH))
                found.backward()
                torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
                for key, parameter in theirs.named_parameters():
                    torch.testing.assert_close(
                        whole(mine.get_parameter(key).grad),
                        2 * parameter.grad,
                        rtol=1e-9,
                        atol=1e-11,
                        msg=f"{name}: {key}",
                    )
        return True

    assert all(on_threads(4, body))


def test_what_is_not_named_is_a_letter_that_says_how():
    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(llama(), BATCH, mesh=2, parallel="dp", cluster="generic")
            with pytest.raises(NotServed, match="arrives at the output 'logits'") as letter:
                mine(**BATCH).logits.sum().backward()
            assert "outputs=('logits',)" in str(letter.value)
            with pytest.raises(BadPlan, match="another graph"):  # backward of another plan begins at the loss alone
                autopar.autoparallelize(
                    llama(), BATCH, plan=autopar.plan(llama(), BATCH, mesh=2, parallel="dp"), outputs=("logits",)
                )
        return True

    assert all(on_threads(2, body))


def test_a_graph_knows_where_backward_begins():
    with InFloat64():
        graph = ColoTracer().trace(llama(), BATCH)
        named = autopar.request.Request(outputs=("logits", "loss")).trace(llama(), BATCH)
    assert [graph.output_names[i] for i in graph.differentiable] == ["loss"] and [
        named.output_names[i] for i in named.differentiable
    ] == ["loss", "logits"]
    assert graph.digest != named.digest and Graph.from_json(named.to_json()).differentiable == named.differentiable


def test_a_detached_twin_of_the_loss_is_an_output_too(threads):
    class Twin(nn.Linear):
        def forward(self, x):
            loss = super().forward(x).pow(2).sum()
            return {"loss": loss, "log": loss.detach(), "again": loss}

    model, x = Twin(4, 4).double(), torch.randn(2, 4).double()
    reference = copy.deepcopy(model)
    reference(x)["loss"].backward()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), (x,), mesh=2, cluster=eager_links())
        result = mine(x)
        result["loss"].backward()
        assert (
            not result["log"].requires_grad and result["log"].item() == result["again"].item() == result["loss"].item()
        )
        return whole(mine.weight.grad)

    for gradient in threads(2, body):
        torch.testing.assert_close(gradient, reference.weight.grad)


class WithLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16).double(), nn.Linear(16, 4).double()

    def forward(self, x, y):
        out = self.b(self.a(x))
        return {"loss": F.mse_loss(out, y), "logits": out}


@pytest.mark.parametrize("preset", ["dp", "zero3"])
def test_a_gradient_at_another_output_than_the_loss_is_a_letter(preset):
    model, x = WithLogits(), torch.arange(32, dtype=torch.float64).view(8, 4) / 10

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), {"x": x, "y": x}, mesh=2, cluster=eager_links(), parallel=preset
        )
        out = mine(x, x)
        with pytest.raises(NotServed, match="backward was lowered for the loss"):
            (out["loss"] + out["logits"].full_tensor().square().mean()).backward()

    on_threads(2, body)
