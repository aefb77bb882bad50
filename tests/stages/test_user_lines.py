"""Lines of users' loops around a model in stages, each on four processes against eager on one device in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from tests import language
from tests.stages.loops import Both, loss_of
from tests.stages.models import Block
from tests.stages.ranks import NONE, apart, made, outcome

pytestmark = pytest.mark.machines


def alike(both, bar=1e-11):
    """Gradients are equal, and there where they are on one device."""
    for name, mine, right in both.pairs(lambda p: p.grad):
        assert (mine is None) == (right is None), name
        assert mine is None or apart(mine, right) < bar, (name, apart(mine, right))


def fresh(both):
    for model in both.models:
        model.zero_grad()
    return both.models


def other(batch):
    return {name: rows.flip(0) for name, rows in batch.items()}


# -- one call after the other


def several_losses(both):
    for model in fresh(both):
        first, second = loss_of(model(**both.batch)), loss_of(model(**other(both.batch)))
        first.backward()
        (3 * second).backward()
    alike(both)
    for model in fresh(both):
        (2 * loss_of(model(**both.batch)) + loss_of(model(**other(both.batch)))).backward()
    alike(both)
    for model in fresh(both):
        loss_of(model(**both.batch))  # no backward of this one
        loss = loss_of(model(**both.batch))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    alike(both)


def gradients_by_name(both):
    names = "blocks.0.up.weight", "blocks.3.up.weight", "table.weight"
    for wanted in (names, [name for name, _ in both.spread.named_parameters()]):
        given = [torch.autograd.grad(loss_of(m(**both.batch)), list(map(m.get_parameter, wanted))) for m in fresh(both)]
        for name, mine, right in zip(wanted, *given, strict=True):
            assert apart(mine, right) < 1e-11, name
    assert all(p.grad is None for p in both.spread.parameters())
    with pytest.raises(autopar.NotServed, match="a gradient of gradients"):
        loss = loss_of(both.spread(**both.batch))
        torch.autograd.grad(loss, list(both.spread.parameters()), create_graph=True)


def hooks_of_parameters(both):
    said = []
    for model in fresh(both):
        norms = {}

        def halve(p, name, norms=norms):
            norms[name] = p.grad.norm().item()
            p.grad.mul_(0.5)

        handles = [p.register_hook(lambda g: g * 3) for p in model.parameters()]
        for name, p in model.named_parameters():
            handles.append(p.register_post_accumulate_grad_hook(lambda p, name=name, halve=halve: halve(p, name)))
        loss_of(model(**both.batch)).backward()
        for handle in handles:
            handle.remove()
        said.append(norms)
    assert said[0] == pytest.approx(said[1], rel=1e-9, abs=1e-13)
    alike(both)


def steps_in_backward(both):
    for model in copies(both):
        steps = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

        def step(p, steps=steps):
            steps[p].step()
            steps[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        loss_of(model(**both.batch)).backward()
        both.copies.append(model)
    both.assert_copies_alike(lambda p: p.detach())


def groups(both):
    for model in copies(both):
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[:3], lr=1e-2)
        for step in range(3):
            loss_of(model(**both.batch)).backward()
            optimizer.step()
            model.zero_grad(set_to_none=False)
            if step == 0:
                optimizer.add_param_group({"params": parameters[3:], "lr": 1e-3})
        both.copies.append(model)
    both.assert_copies_alike(lambda p: p.detach())


def names(both):
    mine = list(both.spread.state_dict()), {n: p.shape for n, p in both.spread.named_parameters()}
    assert mine == (list(both.alone.state_dict()), {n: p.shape for n, p in both.alone.named_parameters()})
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert all(each == mine for each in everyone)


def wrapped(both):
    for model in fresh(both):
        loss_of(torch.compile(model, backend="eager")(**both.batch)).backward()
        checkpoint(lambda m, **how: loss_of(m(**how)), model, use_reentrant=False, **both.batch).backward()
    alike(both)


def all_frozen(both):
    """A call in which nothing trains is one without gradients."""
    for model in fresh(both):
        model.requires_grad_(False)
    mine, right = (model(**both.batch) for model in both.models)
    assert apart(mine["logits"], right["logits"]) < 1e-12 and not mine["loss"].requires_grad
    for model in both.models:
        model.requires_grad_(True)


def another_batch_first(both):
    """Another batch has its stages where the first has them, on a V too, and as many."""
    assert both.spread.plan.pipeline.place == (0, 1, 1, 0)
    for model in fresh(both):
        few = {name: rows[:3] for name, rows in both.batch.items()}
        with model.no_sync() if model is both.spread else torch.enable_grad():
            loss_of(model(**few)).backward()
        loss_of(model(**both.batch)).backward()
    alike(both)


class Lines(Both):
    """Models of which copies are changed and compared."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.copies = []

    def assert_copies_alike(self, of):
        mine, right = self.copies
        self.copies = []
        there = dict(right.named_parameters())
        wrong = {n: e for n, p in mine.named_parameters() if not (e := apart(of(p), of(there[n]))) < 1e-10}
        assert not wrong, wrong


def copies(both):
    return [copy.deepcopy(model) for model in fresh(both)]


def of_lines(folder):
    both = Lines("speaker", outputs="full", pipeline={"schedule": "greedy", "stages_each": 2})
    for check in (
        names, another_batch_first, several_losses, gradients_by_name, hooks_of_parameters, steps_in_backward, groups,
        wrapped, all_frozen,
    ):  # fmt: skip
        yield check.__name__, lambda check=check: check(both)


class Detached(nn.Module):
    """A table that the first and the last stage read, of which `one` gives it no gradient; logits need one alone."""

    def __init__(self, one):
        super().__init__()
        self.one = one
        self.table = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, ids, labels=None):
        weight = self.table.weight
        x = nn.functional.embedding(ids, weight.detach() if self.one == "first" else weight)
        for block in self.blocks:
            x = block(x)
        if labels is None:
            return {"x": x}
        logits = nn.functional.linear(x, weight.detach() if self.one == "last" else weight)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def a_gradient_of_one_stage(one, shape, **how):
    """It arrives at all stages that store the parameter, which wait for one another in its sum."""
    torch.manual_seed(0)
    alone = Detached(one).double()
    batch = {"ids": torch.randint(24, (8, 12)), "labels": torch.randint(24, (8, 12))}
    spread = made(copy.deepcopy(alone), batch, shape, timeout_s=20.0, outputs="full", **how)
    for model in (spread, alone):
        with spread.no_sync() if model is spread else torch.enable_grad():
            model(**batch)["loss"].backward()
        model(**batch)["loss"].backward()
    there = dict(alone.named_parameters())
    assert all(apart(p.grad, there[name].grad) < 1e-12 for name, p in spread.named_parameters())
    with torch.no_grad():
        assert apart(spread(batch["ids"])["x"], alone(batch["ids"])["x"]) < 1e-12


class Supervised(nn.Module):
    """A loss that every block adds to, which is also an output by itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y):
        beside = 0.0
        for block in self.blocks:
            x = torch.tanh(block(x))
            beside = beside + x.square().mean()
        loss = ((x - y) ** 2).mean()
        return {"loss": loss + 0.3 * beside, "beside": beside, "last": loss.detach(), "x": x}


def losses_beside(turns):
    torch.manual_seed(0)
    alone = Supervised().double()
    x, y = torch.randn(2, 8, 8).double()
    spread = made(copy.deepcopy(alone), (x, y), (4,), parallel=None, outputs="full", microbatches=turns)
    mine, right = spread(x, y), alone(x, y)
    assert all(apart(mine[name], right[name]) < 1e-12 for name in right)
    mine["loss"].backward()
    right["loss"].backward()
    there = dict(alone.named_parameters())
    assert all(apart(p.grad, there[name].grad) < 1e-12 for name, p in spread.named_parameters())
    with pytest.raises(autopar.NotServed, match="output 'beside', and backward was lowered for the loss"):
        spread(x, y)["beside"].backward()


# -- calls of another kind


def frozen(both, *parts):
    for model in fresh(both):
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(parts))
        loss_of(model(**both.batch)).backward()
        model.requires_grad_(True)
    alike(both)


def rows(both, count):
    few = {name: values[:count] for name, values in both.batch.items()}
    for model in fresh(both):
        loss_of(model(**few)).backward()
    alike(both)


def eval_with_gradients(both):
    for model in fresh(both):
        loss_of(model.eval()(**both.batch)).backward()
        model.train()
    alike(both)


def autocast(both):
    said = []
    for model in fresh(both):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(**both.batch))
        loss.backward()
        said.append(loss.item())
    assert said[0] == pytest.approx(said[1], rel=1e-2)
    alike(both, 0.05)


def another_dtype(both):
    for model in fresh(both):
        loss_of(model.float()(**both.batch)).backward()
        assert model.blocks[0].up.weight.grad.dtype == torch.float32
    alike(both, 1e-3)
    for model in both.models:
        model.double()


def hooked_part(both):
    handles = [model.blocks[1].register_forward_hook(lambda module, given, out: 1.5 * out) for model in fresh(both)]
    for model in both.models:
        loss_of(model(**both.batch)).backward()
    for handle in handles:
        handle.remove()
    alike(both)


def given_parameters(both):
    for model in fresh(both):
        given = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        loss_of(torch.func.functional_call(model, given, (), both.batch)).backward()
        for name, p in model.named_parameters():
            p.grad = given[name].grad
    alike(both)


def letters(both):
    model, batch = both.spread, both.batch
    with pytest.raises(autopar.NotServed, match="was lowered for the loss"):
        model(**batch)["logits"].sum().backward()
    with pytest.raises(autopar.NotServed, match=r"(?s)there is none.*torch\.no_grad\(\) around"):
        model(ids=batch["ids"])
    bias = model.blocks[2].up.bias
    model.blocks[2].up.bias = nn.Parameter(torch.zeros(32).double())
    with pytest.raises(autopar.NotServed, match=r"blocks\.2\.up\.bias lies as"):
        model(**batch)
    model.blocks[2].up.bias = bias
    rows(both, 8)  # after letters all goes on
    moved = copy.deepcopy(model).to("meta")
    with pytest.raises(autopar.NotServed, match="was moved to meta, and its programs run on cpu"):
        moved(**batch)
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    with pytest.raises(autopar.NotServed, match="exchange them before"):
        model(**batch)


class Normed(nn.Module):
    """Batch norm in every stage, and a loss that is not a sum over rows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return ((x - y) ** 2).mean().sqrt()


def in_one_turn(shape):
    """What looks at all rows of a batch runs in stages with microbatches=1, as the letter advises."""
    torch.manual_seed(0)
    alone = Normed().double()
    x, y = torch.randn(2, 8, 8).double()
    with pytest.raises(autopar.NotServed, match=r"(?s)looks at all rows.*try     microbatches=1"):
        made(copy.deepcopy(alone), (x, y), shape)
    spread = made(copy.deepcopy(alone), (x, y), shape, microbatches=1, parallel="dp" if shape[1] > 1 else None)
    for model in (spread, alone):
        for _ in range(2):
            model(x, y).backward()
        with torch.no_grad():
            model(x + 1, y)
    there = dict(alone.named_parameters()) | dict(alone.named_buffers())
    for name, p in spread.named_parameters():
        assert float((p.grad.full_tensor() - there[name].grad).abs().max()) < 1e-12, name
    for name, buffer in spread.named_buffers():
        assert apart(buffer.double(), there[name].double()) < 1e-12, name
    assert apart(spread.eval()(x[:1], y[:1]), alone.eval()(x[:1], y[:1])) < 1e-12
    z = x.clone().requires_grad_()
    with pytest.raises(autopar.NotServed, match="x wants a gradient"):
        spread(z, y)


def generates():
    """Without a cache the model in stages generates; with one the plain model does, as the letter says."""
    alone, batch = language.gpt2(layers=2, width=16, vocabulary=32, length=16).double(), language.drawn(4, 8, 32)
    spread = made(copy.deepcopy(alone), batch, microbatches=2)
    how = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    first = batch["input_ids"][:, :4]
    right = alone.eval().generate(first, use_cache=False, **how)
    assert torch.equal(spread.eval().generate(first, use_cache=False, **how), right)
    with pytest.raises(autopar.NotServed, match=r"use_cache=False\), or autopar\.gather"):
        spread.generate(first, **how)
    assert torch.equal(autopar.gather(spread).generate(first, **how), right)


def of_calls(folder):
    both = Both("speaker", outputs="full")
    yield "first half frozen", lambda: frozen(both, "table", "places", "blocks.0", "blocks.1")
    yield "last half frozen", lambda: frozen(both, "blocks.2", "blocks.3", "norm")
    yield "all but the end frozen", lambda: frozen(both, "table", "places", "blocks")
    yield "one row", lambda: rows(both, 1)
    yield "five rows", lambda: rows(both, 5)
    for check in (eval_with_gradients, autocast, another_dtype, hooked_part, given_parameters, letters):
        yield check.__name__, lambda check=check: check(both)
    yield "gradient of the last stage", lambda: a_gradient_of_one_stage("first", (4,), parallel=None)
    yield "in parts", lambda: a_gradient_of_one_stage("first", (2, 2), parallel="zero3", pipeline={"schedule": "1f1b"})
    yield "generate", generates
    yield "losses beside", lambda: losses_beside(4)
    yield "losses beside, in one turn", lambda: losses_beside(1)
    yield "batch norm", lambda: in_one_turn((2, 2))
    yield "batch norm in four stages", lambda: in_one_turn((4, 1))


@pytest.mark.nightly
@pytest.mark.parametrize("run", [of_lines, of_calls])
def test_a_line_does_what_it_does_on_one_device(run, tmp_path):
    assert outcome(run, tmp_path) == NONE
