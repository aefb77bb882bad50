"""Ops whose local form is another than the op: each made to run cut, under random costs of all else."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import autopar
from autopar.certificate import VARIABLE
from autopar.codegen import joint
from autopar.codegen.halves import COLLECTIVES
from autopar.codegen.joint_graph import BACK, OP
from autopar.codegen.lower import lower
from autopar.graph.graph import call_of, info, op_name
from autopar.ops.entry import FACTS, exchanges_of
from autopar.ops.exchange import BACKWARD, FORWARD, Along, messages_of
from autopar.ops.local import OpOnDevice
from autopar.runtime.wires import op_run_by, sent_by
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import Equality, Unequal
from autopar.tracer import ColoTracer
from tests.models import FunctionModel, eager_links
from tests.mutants import EXCHANGE_MUTANTS
from tests.random_plans import random_plan, random_plan_with
from tests.shares import one_in
from tests.training import whole


def labels():
    return torch.tensor([0, 5, -100, 3, 3, 11])


def weights(m):
    return m.var + torch.arange(12) / 7


def heads(m, x):
    return (x @ m.weight).view(1, 6, 2, 6).transpose(1, 2)


def loss(weighted=False, **how):
    return lambda m, x: F.cross_entropy(x @ m.weight, labels(), weight=weights(m) if weighted else None, **how)


def normed(m, x, *statistics, **how):
    return F.batch_norm((x @ m.weight).view(6, 3, 4), *statistics, weight=m.weight[0, :3], training=True, **how)


def beside(make):
    """A model of a product and a tensor that each device makes its own part of."""
    return lambda m, x: ((x @ m.weight) * make(x).to(x.dtype)).pow(3).sum()


CASES = {  # op, operand, its placement there, the model
    "loss": ("cross_entropy", 0, "S(1)", loss()),
    "smoothed loss": ("cross_entropy", 0, "S(1)", loss(label_smoothing=0.2)),
    "weighted loss": ("cross_entropy", 0, "S(1)", loss(weighted=True)),
    "smoothed and weighted": ("cross_entropy", 0, "S(1)", loss(weighted=True, label_smoothing=0.3)),
    "summed": ("cross_entropy", 0, "S(1)", loss(weighted=True, label_smoothing=0.3, reduction="sum")),
    "a loss of pictures": (
        "cross_entropy",
        0,
        "S(1)",
        lambda m, x: F.cross_entropy(
            (x @ m.weight).view(2, 12, 3), labels().view(2, 3), weight=weights(m), label_smoothing=0.1
        ),
    ),
    "causal attention": (
        "scaled_dot_product_attention",
        0,
        "S(2)",
        lambda m, x: (
            F.scaled_dot_product_attention(heads(m, x), heads(m, x).sin(), heads(m, x).cos(), is_causal=True).pow(2)
        ).sum(),
    ),
    "causal, fewer keys": (
        "scaled_dot_product_attention",
        0,
        "S(2)",
        lambda m, x: (
            F.scaled_dot_product_attention(
                heads(m, x), heads(m, x)[:, :, :4].sin(), heads(m, x)[:, :, :4].cos(), is_causal=True, scale=0.3
            ).pow(2)
        ).sum(),
    ),
    "largest": ("amax", 0, "S(1)", lambda m, x: (x @ m.weight).amax(1).pow(3).sum()),
    "largest of equals": (
        "amax",
        0,
        "S(1)",
        lambda m, x: (
            ((x @ m.weight).round() * (x @ m.weight).detach().sign() + x.repeat(1, 2)).clamp(-1, 1).amax((0, 1)).pow(3)
            * (x @ m.weight).clamp(-1, 1).amax(-1, keepdim=True).sum()
        ),
    ),
    "least": ("amin", 0, "S(0)", lambda m, x: (x @ m.weight).amin(0, keepdim=True).pow(3).sum()),
    "log sum exp": (
        "logsumexp",
        0,
        "S(1)",
        lambda m, x: (x @ m.weight).masked_fill(torch.arange(12) > 8, -torch.inf).logsumexp(1).pow(3).sum(),
    ),
    "running sum": ("cumsum", 0, "S(0)", lambda m, x: (x @ m.weight).cumsum(0).pow(3).sum()),
    "tokens": (
        "embedding",
        1,
        "S(0)",
        lambda m, x: F.embedding(labels().clamp(0, 5), m.weight, padding_idx=3).pow(3).sum() * x.sum(),
    ),
    "statistics of rows": ("batch_norm", 0, "S(0)", lambda m, x: (normed(m, x, None, None) * x[:, :4][:, None]).sum()),
    "and of places": ("batch_norm", 0, "S(2)", lambda m, x: normed(m, x, None, None).pow(3).sum()),
    "running statistics": (
        "batch_norm_updating",
        0,
        "S(0)",
        lambda m, x: (normed(m, x, m.mean[:3], m.var[:3]).pow(3) * m.var[:3, None]).sum(),
    ),
}
MADE = {  # op: a call of it, of which every device makes its part
    "arange": lambda x: torch.arange(12),
    "full": lambda x: torch.full((6, 12), 0.5),
    "zeros": lambda x: torch.zeros(6, 12) + 1,
    "ones": lambda x: torch.ones(6, 12),
    "empty": lambda x: torch.where(torch.ones(6, 12) > 0, 0.5, torch.empty(6, 12)),
    "rand": lambda x: torch.rand(6, 12),
    "randn": lambda x: torch.randn(6, 12),
    "normal_filled": lambda x: torch.normal(1.0, 2.0, (6, 12)),
    "randint": lambda x: torch.randint(0, 9, (6, 12)),
    "expand": lambda x: x[:, :1].expand(6, 12),
}
CASES |= {f"made: {op}": (op, None, "S(1)" if op != "arange" else "S(0)", beside(make)) for op, make in MADE.items()}
DRAWN = frozenset(op for op, facts in FACTS.items() if facts.draws and "*" in facts.serves)


# test_travelling.py and tests/codegen/test_attention.py; messages are counted in tests/runtime
ELSEWHERE = {"experts", "attention"}


def test_every_op_that_serves_a_mark_has_a_case():
    """What a form computes on a part is a claim of its own."""
    assert {op for op, facts in FACTS.items() if facts.serves} - ELSEWHERE == {op for op, *_ in CASES.values()}


# on two axes planning takes ten times as long: of these some other case has all that they have
SLOW = ("smoothed loss", "a loss of pictures", "summed", "smoothed and weighted")  # by day plain and weighted losses


@pytest.mark.parametrize(
    "name, mesh",
    [
        pytest.param(n, m, marks=[] if (i + k) % 2 == 0 and n not in SLOW else pytest.mark.nightly)
        for i, n in enumerate(CASES)
        for k, m in enumerate([(2,), (2, 2)])
    ],
    ids=str,
)
def test_it_computes_what_the_op_computes(name, mesh, threads):
    compare(name, autopar.DeviceMesh(mesh), threads)


def made(name):
    """The model of a case, and its batch."""
    torch.manual_seed(0)
    return FunctionModel(CASES[name][-1], 6, 12), {"x": torch.randn(6, 6).double()}


@functools.cache
def plan_with(name, mesh, seed):
    """A random plan that cuts the op of a case."""
    return random_plan_with(CASES[name][:-1], *made(name), mesh, seed)


def compare(name, mesh, threads):
    """Run a case under random plans that cut its op, and compare with one device."""
    op, (model, batch) = CASES[name][0], made(name)

    def body(rank, plan):
        torch.manual_seed(3)
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch).sum()
        loss.backward()
        return {"loss": loss.detach(), "weight": whole(mine.weight.grad)}, mine.code

    if op in DRAWN:  # tests/equality/test_draws.py holds draws against the published bits
        ((expected, _),) = threads(1, body, random_plan(model, batch, autopar.DeviceMesh((1,)), 0))
    else:
        reference = copy.deepcopy(model)
        expected_loss = reference(**batch).sum()
        expected_loss.backward()
        expected = {"loss": expected_loss.detach(), "weight": reference.weight.grad}
    for seed in range(2 if mesh.size == 2 else 1):  # on two axes planning takes ten times as long
        plan = plan_with(name, mesh, seed)
        for result, code in threads(mesh.size, body, plan):
            Equality.in_float64(f"{name} on {mesh}, plan {seed}", result, expected, 1e-9).check()
            assert any(form in code for form in ("_part(", "attend_plainly(")) or name.startswith("made")


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_its_entry_says_what_the_emitted_code_sends_and_plans_pay_for_it(name):
    """Kinds and numbers of collectives that carry the op's mark, forward and backward."""
    mesh = autopar.DeviceMesh((2,))
    graph, plan = ColoTracer().trace(*made(name)), plan_with(name, mesh, 0)
    halves = lower(graph, plan, (0,)).joint
    sites = {site.name: site for site in shardings(graph, Setting(mesh, eager_links())).sites}
    for node in graph.nodes:
        if op_name(node) == CASES[name][0]:
            emitted = {
                FORWARD: Counter(kind for kind, mark in sent_in(halves.forward) if mark == (node.name, None)),
                BACKWARD: Counter(kind for kind, mark in sent_in(halves.backward) if mark[1] == node.name),
            }
            site = sites[info(node).key]
            choice = site.choices.index(plan.decisions[site.name].choice)
            along = Along(OpOnDevice.fullest(mesh, site.choices[choice]), mesh.axes[0])
            exchanges = exchanges_of(call_of(node), along)
            assert emitted == messages_of(exchanges, 2)
            if any(exchange.hides(2) for exchange in exchanges):  # compute may hide all of it
                continue
            assert [bool(site.exchange and site.exchange[i][choice]) for i in (0, 1)] == [*map(bool, emitted.values())]


def sent_in(half):
    """The kind of each collective of a half, and the ops for which forward and backward send it."""
    for node in half.nodes:
        mark = node.meta.get(OP), node.meta.get(BACK)
        if (op := op_run_by(node.target)) is not None:
            for _, kind, count in sent_by(op, (node.args[0], *node.args[2:])):
                yield from itertools.repeat((kind, mark), count)
        elif node.target in COLLECTIVES:
            yield node.target.__name__.removesuffix("_max"), mark


OF_FORM = {  # a form that sends messages: cases whose ops run it
    "amax_part": ("largest", "largest of equals"),
    "logsumexp_part": ("log sum exp",),
    "cross_entropy_part": ("smoothed and weighted",),
    "batch_norm_part": ("statistics of rows",),
    "cumsum_part": ("running sum",),
}


@pytest.mark.parametrize("mutant", EXCHANGE_MUTANTS)
def test_a_form_without_one_of_its_messages_is_noticed(mutant, threads, monkeypatch):
    form, *_ = EXCHANGE_MUTANTS[mutant]
    for name in OF_FORM[form]:
        for seed in range(2):
            plan_with(name, autopar.DeviceMesh((2,)), seed)  # of the sound compiler
    monkeypatch.setenv(VARIABLE, "off")  # by its values, not by its types
    EXCHANGE_MUTANTS[mutant][1](monkeypatch)
    joint.LOWERED.clear()
    with pytest.raises(Unequal):
        for name in OF_FORM[form]:
            compare(name, autopar.DeviceMesh((2,)), threads)
    joint.LOWERED.clear()


def test_every_form_that_sends_messages_has_its_mutants():
    """One for every message of every form, of the call that sends most."""
    sending = {op for op, facts in FACTS.items() if facts.exchanges != (0, 0)}
    tried = {CASES[name][0] for names in OF_FORM.values() for name in names}
    assert sending - ELSEWHERE - {"scaled_dot_product_attention"} == tried | {"amin", "batch_norm_updating"}
    most = {form: max(map(most_sent_by, names)) for form, names in OF_FORM.items()}
    assert Counter(form for form, _ in EXCHANGE_MUTANTS.values()) == most


def most_sent_by(name):
    """Messages of a case's op on two devices, forward and backward."""
    op, *_, function = CASES[name]
    graph = ColoTracer().trace(FunctionModel(function, 6, 12), {"x": torch.randn(6, 6).double()})
    calls = [call_of(node) for node in graph.nodes if op_name(node) == op]
    return max(sum(of_way.total() for of_way in messages_of(exchanges_of(call), 2).values()) for call in calls)


def test_the_largest_is_exact_though_several_are_it(threads):
    """A value that is compared with the largest finds itself."""

    def equals(m, x):
        values = x @ m.weight
        return (values == values.amax(1, keepdim=True)).double().sum(1) + 0 * m.weight.sum()

    model, batch = FunctionModel(equals, 6, 12), {"x": torch.ones(6, 6).double() / 3}
    model.weight.data.fill_(0.1)
    plan = random_plan_with(("amax", 0, "S(1)"), model, batch, autopar.DeviceMesh(3), seed=0)
    for result in threads(
        3, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)(**batch).detach()
    ):
        assert torch.equal(result, torch.full((6,), 12.0).double())


@pytest.mark.parametrize("function", [torch.logsumexp, torch.amax, torch.amin, torch.sum, torch.softmax])
def test_of_one_number_nothing_is_cut(function, threads):
    """torch takes dim 0 of a tensor without dims."""
    model, batch = (
        FunctionModel(lambda m, x: function((x @ m.weight).mean(), 0), 6, 12),
        {"x": torch.randn(6, 6).double()},
    )
    expected = copy.deepcopy(model)(**batch).detach()
    loss = threads(2, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2)(**batch).detach())
    assert all(torch.allclose(of_rank, expected) for of_rank in loss)


def test_a_token_that_is_no_word_is_no_number(threads):
    """Where the vocabulary is cut nobody has it: eager raises an error, and zeros would pass for a row."""
    *cut, _ = CASES["tokens"]
    model = FunctionModel(lambda m, x: F.embedding(x, m.weight).pow(3).sum((0, 2)), 6, 12)
    plan = random_plan_with(cut, model, (torch.tensor([[0, 5, 3]]),), autopar.DeviceMesh((2,)), 0)

    def body(rank, plan):
        mine = autopar.autoparallelize(copy.deepcopy(model), (torch.tensor([[0, 5, 3]]),), plan=plan)
        return mine(torch.tensor([[-1, 5, 6]])).detach(), mine.code

    for result, code in threads(2, body, plan):
        assert result.isnan().tolist() == [True, False, True] and "embedding_part(" in code


def largest_of_rows(m, x):
    return (x * m.weight.sum()).amax(1)


def called_with(rank, model, batch, plan, x):
    torch.set_num_threads(1)
    return autopar.autoparallelize(model, batch, plan=plan)(x).detach()


def test_no_number_is_the_largest_wherever_it_lies(processes):
    """Torch says so on one device; gloo's maximum passes over what comes second."""
    model, batch = FunctionModel(largest_of_rows, 6, 12), {"x": torch.randn(6, 6).double()}
    plan = random_plan_with(["amax", 0, "S(1)"], model, batch, autopar.DeviceMesh((2,)), 0)
    x = batch["x"].clone()
    x[0, 0] = x[1, 3] = x[2, 5] = torch.nan
    eager = model(x).detach()
    for mine in processes(2, called_with, model, batch, plan, x):
        assert torch.equal(mine.isnan(), eager.isnan())
        torch.testing.assert_close(mine[3:], eager[3:])
