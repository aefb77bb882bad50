"""The parallel model in a user's hands.

It is the user's class, trains with the user's loop, and answers wrong uses with letters.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.letters import BadPlan, Consumed, Disagreement, NotServed
from autopar.ops import declare
from autopar.ops.entry import FACTS
from autopar.testing import Equality, on_threads
from tests.models import MLP, eager_links, mlp_case, mlp_pins
from tests.training import whole

MESH = autopar.DeviceMesh((2,), ("tp",))


def parallel(model, batch, constraints=None, mesh=MESH, **how):
    plan = autopar.plan(model, batch, mesh=mesh, cluster=eager_links(), constraints=constraints, **how)
    return autopar.autoparallelize(model, batch, plan=plan, **how)


def on_two(body):
    """Run `body(model, batch)` on two threads, each with its own copy of the model."""
    model, batch = mlp_case()
    return on_threads(2, lambda rank: body(copy.deepcopy(model), batch))


def test_it_is_an_instance_of_the_models_class():
    def body(model, batch):
        names = [n for n, _ in model.named_parameters()]
        mine = parallel(model, batch)
        assert isinstance(mine, MLP) and mine is model and type(mine).__name__ == "ParallelMLP"
        assert [n for n, _ in mine.named_parameters()] == names and all(
            isinstance(p, DTensor) for p in mine.parameters()
        )
        assert (
            mine.plan.mesh == MESH
            and "def forward(" in mine.code
            and mine.input_specs == {"x": "global", "y": "global"}
        )
        assert set(mine.state_dict()) == set(names)

    on_two(body)


def test_rank_0_plans_and_its_values_count():
    model, batch = mlp_case()

    def body(rank):
        mine = copy.deepcopy(model)
        with torch.no_grad():
            for p in mine.parameters():
                p.add_(rank)  # ranks start from different values
        mine = autopar.autoparallelize(mine, batch, mesh=MESH, cluster=eager_links())
        return mine(**batch).item()

    assert on_threads(2, body) == [pytest.approx(model(**batch).item(), rel=1e-12)] * 2


def test_clipping_and_momentum_work_as_they_are():
    model, batch = mlp_case()

    def run(mine):
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            mine(**batch).backward()
            norm = torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.05)
            optimizer.step()
        return {"norm": whole(norm), **{n: whole(p).detach() for n, p in mine.named_parameters()}}

    expected = run(copy.deepcopy(model))
    for kind in ("megatron", "sharded"):
        for result in on_threads(
            2, lambda rank, kind=kind: run(parallel(copy.deepcopy(model), batch, mlp_pins(kind, MESH)))
        ):
            Equality.in_float64(kind, result, expected, 1e-9).check()


def test_gradients_accumulate_and_old_ones_are_left_alone():
    model, batch = mlp_case()
    reference = copy.deepcopy(model)
    for _ in range(2):
        reference(**batch).backward()
    twice = {n: p.grad for n, p in reference.named_parameters()}

    def body(rank):
        mine = parallel(copy.deepcopy(model), batch, mlp_pins("dp", MESH))
        mine(**batch).backward()
        held = {n: p.grad for n, p in mine.named_parameters()}
        kept = {n: whole(g).clone() for n, g in held.items()}
        mine.zero_grad(set_to_none=True)
        mine(**batch).backward()
        Equality.in_float64("held gradients", {n: whole(g) for n, g in held.items()}, kept, 0.0).check()
        mine(**batch).backward()
        Equality.in_float64("accumulated", {n: whole(p.grad) for n, p in mine.named_parameters()}, twice, 1e-9).check()
        mine.zero_grad(set_to_none=False)
        mine(**batch).backward()
        Equality.in_float64(
            "after zeroing", {n: 2 * whole(p.grad) for n, p in mine.named_parameters()}, twice, 1e-9
        ).check()

    on_threads(2, body)


def test_frozen_and_unreached_parameters_have_no_gradient():
    def body(model, batch):
        model.head.weight.requires_grad_(False)
        model.spare = nn.Parameter(torch.ones(3))
        reference = copy.deepcopy(model)
        mine = parallel(model, batch)
        mine(**batch).backward()
        reference(**batch).backward()
        assert mine.head.weight.grad is None and mine.spare.grad is None
        Equality.in_float64(
            "others",
            {n: whole(p.grad) for n, p in mine.named_parameters() if p.grad is not None},
            {n: p.grad for n, p in reference.named_parameters() if p.grad is not None},
            1e-9,
        ).check()

    on_two(body)


def test_gradients_flow_to_inputs_that_ask():
    model, batch = mlp_case()

    def body(rank, kind):
        x = batch["x"].clone().requires_grad_()
        mine = parallel(copy.deepcopy(model), {"x": x, "y": batch["y"]}, mlp_pins(kind, MESH))
        mine(x=x, y=batch["y"]).backward()
        return x.grad

    x = batch["x"].clone().requires_grad_()
    model(x, batch["y"]).backward()
    for kind in ("dp", "megatron", "free"):
        for gradient in on_threads(2, body, kind):
            Equality.in_float64(kind, {"x": gradient}, {"x": x.grad}, 1e-9).check()


def test_tied_parameters_stay_tied():
    model, batch = mlp_case()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    reference = copy.deepcopy(model)
    reference(**batch).backward()

    def body(rank, pins):
        mine = parallel(copy.deepcopy(model), batch, pins)
        assert mine.blocks[1].up.weight is mine.blocks[0].up.weight
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for pins in ({}, mlp_pins("megatron", MESH), mlp_pins("sharded", MESH)):
        for result in on_threads(2, body, pins):
            Equality.in_float64(str(pins), result, {n: p.grad for n, p in reference.named_parameters()}, 1e-9).check()


def test_without_gradients_nothing_is_kept():
    def body(model, batch):
        expected = model(**batch)
        mine = parallel(model, batch)
        with torch.no_grad():
            value = mine(**batch)
        assert not value.requires_grad
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0.0)

    on_two(body)


class WithExtras(nn.Module):
    """A loss and what led to it, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", torch.linspace(1, 2, 16))

    def forward(self, x, y):
        logits = torch.sinc(self.inner(x) * self.scale)
        return {"loss": F.mse_loss(logits, y), "logits": logits, "note": "kept"}


def test_outputs_beside_the_loss_are_dtensors():
    model, (_, batch) = WithExtras().double(), mlp_case()
    expected = model(**batch)

    def body(rank):
        mine = parallel(copy.deepcopy(model), batch, {"out.logits": "S(0)"})
        result = mine(**batch)
        assert (
            isinstance(result["logits"], DTensor)
            and result["logits"].to_local().shape == (4, 16)
            and result["note"] == "kept"
        )
        torch.testing.assert_close(whole(result["logits"]), expected["logits"].detach())
        torch.testing.assert_close(result["loss"], expected["loss"])

    on_threads(2, body)


@torch.library.custom_op("autopar_tests::waves", mutates_args=())
def waves(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


waves.register_fake(torch.empty_like)
waves.register_autograd(lambda ctx, gradient: gradient.flip(-1).cumsum(-1).flip(-1))


class Waves(torch.nn.Linear):
    """A model with an op that has no rule."""

    def forward(self, x):
        return waves(super().forward(x)).abs().sum()


def test_an_op_without_a_rule_is_named():
    plan = autopar.plan(Waves(8, 8), {"x": torch.randn(8, 8)}, mesh=2)
    assert any("waves" in name for name in plan.without_rule) and "replicated for want of a rule" in str(plan)


def test_an_op_without_a_rule_is_an_error_when_strict():
    with pytest.raises(autopar.NoRule, match="waves") as letter:
        autopar.plan(Waves(8, 8), {"x": torch.randn(8, 8)}, mesh=2, strict=True)
    assert "test_parallel_model.py" in letter.value.at


def test_a_users_own_rule_is_used():
    try:
        autopar.rule("autopar_tests::waves", "b s! -> b s!")
        assert not autopar.plan(Waves(8, 8), {"x": torch.randn(8, 8)}, mesh=2, strict=True).without_rule
    finally:
        del FACTS["ops.autopar_tests.waves.default"]


@pytest.mark.parametrize(
    "op, name",
    [
        ("mylib::scan", "ops.mylib.scan.default"),
        ("mylib::scan.out", "ops.mylib.scan.out"),
        ("sinc", "sinc"),
        (torch.sinc, "sinc"),
        (torch.Tensor.add, "add"),
        (torch.ops.aten.erfinv, "ops.aten.erfinv.default"),
        (torch.ops.aten.erfinv.default, "ops.aten.erfinv.default"),
    ],
)
def test_a_rule_is_of_an_op_by_any_of_its_names(op, name, monkeypatch):
    monkeypatch.setattr(declare, "FACTS", {})
    monkeypatch.setattr(declare, "WHOLE", {})
    autopar.rule(op, "b s -> b s")
    assert set(declare.FACTS) == {name}


@pytest.mark.parametrize("op", ["", 3, None])
def test_a_rule_of_nothing_is_a_letter(op):
    with pytest.raises(autopar.letters.BadRule, match="not the name"):
        autopar.rule(op, "b s -> b s")


def test_an_optimizer_from_before_is_refused():
    def body(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel(model, batch)(**batch).backward()
        with pytest.raises(Consumed, match="before autoparallelize"):
            optimizer.step()

    on_two(body)


def test_ranks_with_different_plans_are_told_so():
    model, batch = mlp_case()
    plans = [
        autopar.plan(model, batch, mesh=MESH, cluster=eager_links(), constraints=mlp_pins(kind, MESH))
        for kind in ("dp", "megatron")
    ]

    def body(rank):
        with pytest.raises(Disagreement, match="different plan="):
            autopar.autoparallelize(copy.deepcopy(model), batch, plan=plans[rank])

    on_threads(2, body)


def test_ranks_with_different_batches_are_told_so():
    model, batch = mlp_case()

    def body(rank):
        mine = parallel(copy.deepcopy(model), batch)
        with pytest.raises(Disagreement, match=r'(?s)different input values.*inputs="local"'):
            mine(x=batch["x"] + rank, y=batch["y"])

    on_threads(2, body)


def test_without_sync_the_ranks_must_hold_the_same_values():
    model, batch = mlp_case()
    plan = autopar.plan(model, batch, mesh=MESH)

    def body(rank, shift):
        mine = copy.deepcopy(model)
        with torch.no_grad():
            mine.head.bias += shift * rank
        return autopar.autoparallelize(mine, batch, plan=plan, sync=False)(**batch).item()

    assert on_threads(2, body, 0.0) == [pytest.approx(model(**batch).item())] * 2
    with pytest.raises(Disagreement, match="different parameter values"):
        on_threads(2, body, 1.0)


def test_a_mesh_of_another_size_is_a_letter():
    def body(model, batch):
        with pytest.raises(Disagreement, match="4 devices"):
            parallel(model, batch, mesh=autopar.DeviceMesh((2, 2)))

    on_two(body)


def test_a_plan_beside_planning_arguments_is_a_letter():
    model, batch = mlp_case()
    plan = autopar.plan(model, batch, mesh=1)
    with pytest.raises(BadPlan, match="is given"):
        autopar.autoparallelize(model, batch, plan=plan, mesh=1)


@pytest.mark.parametrize(
    "how",
    [
        dict(precision="bfloat17"),
        dict(recompute="everything"),
        dict(accumulation=0),
        dict(accumulation=True),
        dict(time_limit=0),
        dict(optimizer="adagrad"),
    ],
)
def test_an_argument_that_no_stage_serves_is_a_letter(how):
    model, batch = mlp_case()
    with pytest.raises(NotServed, match=next(iter(how))):
        autopar.plan(model, batch, **{"mesh": 2, **how})


@pytest.mark.parametrize(
    "constraints, match",
    [
        (["x"], "constraints is a list"),
        ({"no.such": "R"}, "matches nothing"),
        ({"x": "S(9)"}, "nothing satisfies"),
        ({"x": "S(0)@pp"}, "cannot be read"),
        ({"x": 3}, "cannot be read"),
        ({"blocks.0.up.weight": "S(0); R; sometimes"}, "cannot be read"),
        ({"blocks.0": "P(sum)", "out": "S(0)"}, "nothing satisfies"),
    ],
)
def test_a_wrong_constraint_is_a_letter(constraints, match):
    model, batch = mlp_case()
    with pytest.raises(autopar.letters.BadConstraint, match=match):
        autopar.plan(model, batch, mesh=2, constraints=constraints)


@pytest.mark.parametrize("cluster", ["abacus-2x2", 3, "missing.json"])
def test_an_unknown_cluster_is_a_letter(cluster):
    model, batch = mlp_case()
    with pytest.raises(autopar.letters.BadCluster):
        autopar.plan(model, batch, mesh=2, cluster=cluster)


def test_backward_lets_go_of_what_forward_saved_after_its_last_use():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().sum()

    def body(rank):
        batch = {"x": torch.ones(4096, 8)}
        mine = autopar.autoparallelize(Deep(), batch, mesh=1, cluster=eager_links())
        mine(**batch).backward()
        mine.zero_grad()
        with torch.profiler.profile(
            profile_memory=True
        ) as seen:  # forward too: what was handed out before is not seen to be freed
            mine(**batch).backward()
        events = sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns())
        return [e.nbytes() for e in events if e.name() == "[memory]" and abs(e.nbytes()) >= 4096 * 8 * 4]

    (changes,) = on_threads(1, body)
    last = max(i for i, n in enumerate(changes) if n > 0)
    assert (
        sum(n > 0 for n in changes) >= 12 and len(changes[last:]) <= 6
    )  # were all of it held to the end, a dozen would be freed there


def test_other_parameters_for_one_call():
    """Plain ones where they are whole, and what they are made of gets its gradient."""
    model, batch = mlp_case()
    factor = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def grown(model, factor):
        return torch.func.functional_call(
            model, {n: whole(p.detach()) * factor for n, p in model.named_parameters()}, (), batch
        )

    loss = grown(model, factor)
    (expected,) = torch.autograd.grad(loss, factor)

    def body(rank):
        mine, own = (
            autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", cluster=eager_links()),
            factor.detach().clone().requires_grad_(),
        )
        found = grown(mine, own)
        found.backward()
        torch.testing.assert_close((found.detach(), own.grad), (loss.detach(), expected), rtol=1e-10, atol=0)
        assert all(p.grad is None for p in mine.parameters())
        return True

    assert all(on_threads(2, body))


class CountedEntries(nn.Module):
    """torch gives a norm of order 0 no gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.counted = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.linear(x).sum() + torch.linalg.vector_norm(self.counted, ord=0)


def test_a_gradient_that_eager_does_not_have_is_none_behind_a_conversion(threads):
    batch, made = {"x": torch.randn(4, 4)}, [CountedEntries() for _ in range(2)]

    def body(rank):
        mine = autopar.autoparallelize(made[rank], batch, mesh=2, constraints={"counted": "S(0); R"})
        mine(**batch).backward()
        return mine.counted.grad is None, "convert(counted" in mine.code

    assert threads(2, body) == [(True, True)] * 2


class Unshuffled(torch.nn.Module):
    """Pictures no higher than the factor by which they are unshuffled: their rows are no dim that can be cut."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(12, 12)

    def forward(self, x):
        return torch.nn.functional.pixel_unshuffle(self.inner(x).view(-1, 1, 2, 6), 2).pow(2).mean()


class WithScript(torch.nn.Module):
    """A part of the model is of TorchScript, with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(12, 12)
        self.part = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.ReLU()))

    def forward(self, x):
        return self.part(self.inner(x)).pow(2).mean()


@pytest.mark.parametrize("of", [Unshuffled, WithScript])
def test_models_that_once_ended_in_an_error_of_torch_train(of, threads):
    torch.manual_seed(0)
    first, batch = of(), {"x": torch.randn(8, 12)}
    mine = [of(), of()]
    for model in mine:
        model.load_state_dict(first.state_dict())

    def step(rank):
        model = autopar.autoparallelize(mine[rank], batch, mesh=(2,), cluster=eager_links())
        loss = model(**batch)
        loss.backward()
        return loss.detach(), [whole(p.grad) for p in model.parameters()]

    loss, gradients = threads(2, step)[0]
    expected = first(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for one, p in zip(gradients, first.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


@pytest.mark.parametrize("preset", ["dp", "zero3"])
def test_a_penalty_on_parameters_is_added_to_the_loss(preset):
    """The sum is a DTensor, and so is the gradient that arrives at the loss."""
    model, batch = mlp_case()

    def penalised(model, batch):
        return model(**batch) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())

    def step(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=(2,), parallel=preset)
        loss = penalised(mine, batch)
        loss.backward()
        return loss.detach().full_tensor(), {n: whole(p.grad) for n, p in mine.named_parameters()}

    loss, gradients = on_threads(2, step)[0]
    expected = penalised(model, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, msg=name)
