"""A rule that a user says is tried at its first use: a false one is refused with the place, a true one is taken."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.codegen.lower import lower
from autopar.letters import BadRule, NotCertified, NotServed
from autopar.ops.declare import WHOLE
from autopar.ops.entry import FACTS, OPS, SPELLINGS, op
from autopar.ops.exchange import Exchange
from autopar.runtime import forms
from autopar.sharding.costs import collective_seconds
from autopar.solver.lanes import COMMUNICATION
from autopar.space import bindings, user_rules
from autopar.space.bindings import Bindings
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.trial import Devices
from autopar.tracer import ColoTracer

SPACE = "autopar_user_rules"


def like(x, *_):
    return torch.empty_like(x)


def declared(function, gives=like, backward=None):
    """A custom op whose backward is that of its function, unless it is given."""
    custom = torch.library.custom_op(f"{SPACE}::{function.__name__}", function, mutates_args=())
    custom.register_fake(gives)

    def remember(ctx, inputs, output):
        ctx.given = inputs

    def differentiated(ctx, *gradients):
        given = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in ctx.given]
        wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            results = function(*given)
        results = results if isinstance(results, tuple) else (results,)
        made = iter(torch.autograd.grad(results, wanted, gradients, allow_unused=True))
        return tuple(next(made) if isinstance(x, Tensor) and x.requires_grad else None for x in given)

    custom.register_autograd(backward or differentiated, setup_context=remember)
    return custom


def decayed_sum(x: Tensor, decay: float) -> Tensor:
    y = [x[:, 0]]
    for t in range(1, x.shape[1]):
        y.append(x[:, t] + decay * y[-1])
    return torch.stack(y, 1)


def running(x: Tensor) -> Tensor:
    return x.cumsum(1)


def nearly_itself(x: Tensor) -> Tensor:
    return x + 1e-3 * x.cumsum(1)


def ordered(x: Tensor) -> Tensor:
    return x.sort(1).values


def normed(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def curved(x: Tensor) -> Tensor:
    return F.gelu(x)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, -1e9).softmax(1)


def clipped_back(x: Tensor) -> Tensor:
    return x.clone()


def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).softmax(-1).flatten(-2)


def by_width(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).softmax(-1).flatten(-2)


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def zero_if_any_is_no_number(x: Tensor) -> Tensor:
    return torch.where(x.isfinite().all(), x, torch.zeros_like(x))


def itself_and_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.amax(-1)


def mean_loss(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).pow(2).mean()


def summed_loss(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).pow(2).sum()


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def in_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    return (x.bfloat16() @ weight.bfloat16()).to(x.dtype)


def of_power_of_two(x: Tensor) -> Tensor:
    assert x.shape[-1] >= 16 and not x.shape[-1] & (x.shape[-1] - 1)
    return x.flip(-1)


def ordered_by(x: Tensor) -> Tensor:
    return x.softmax(-1)


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def unwritten(x: Tensor) -> Tensor:
    return torch.empty(x.shape)


def only_on_a_gpu(x: Tensor) -> Tensor:
    raise NotImplementedError("no kernel for CPUs")


MADE = {
    function.__name__: declared(function, *how)
    for function, *how in (
        (decayed_sum,),
        (running,),
        (nearly_itself,),
        (ordered,),
        (normed,),
        (curved,),
        (masked,),
        (clipped_back, like, lambda ctx, g: g.clamp(-0.1, 0.1)),
        (by_heads,),
        (by_width,),
        (
            looked_up,
            lambda t, i: t.new_empty(*i.shape, t.shape[1]),
            lambda ctx, g: (torch.zeros_like(ctx.given[0]).index_add(0, ctx.given[1].flatten(), g.flatten(0, 1)), None),
        ),
        (zero_if_any_is_no_number,),
        (itself_and_largest, lambda x: (torch.empty_like(x), torch.empty_like(x[..., 0]))),
        (mean_loss, lambda x, y: x.new_empty(())),
        (summed_loss, lambda x, y: x.new_empty(())),
        (attended, lambda q, k, v: q.new_empty(*q.shape[:-1], v.shape[-1])),
        (in_bfloat16, lambda x, w: x.new_empty(*x.shape[:-1], w.shape[1])),
        (of_power_of_two,),
        (noisy,),
        (unwritten,),
        (only_on_a_gpu,),
    )
}
CALLS = {  # arguments behind the first, or all of them
    "decayed_sum": lambda h: (h, 0.9),
    "normed": lambda h: (h, h[0, 0]),
    "masked": lambda h: (h, h > 0),
    "by_heads": lambda h: (h, 8),
    "by_width": lambda h: (h, 8),
    "looked_up": lambda h: (h[0], torch.arange(24).view(8, 3) % 12),
    "mean_loss": lambda h: (h, h.sin()),
    "summed_loss": lambda h: (h, h.sin()),
    "attended": lambda h: (h, h.sin(), h.cos()),
    "in_bfloat16": lambda h: (h, h[0].mT),
}
FALSE = [  # op, line, linear, what the letter says of it
    ("decayed_sum", "b s d -> b s d", "", "cut along s, output 0"),
    ("running", "b s d -> b s d", "x", "cut along s, output 0"),
    ("nearly_itself", "b s d -> b s d", "", "cut along s, output 0"),
    ("ordered", "b s d -> b s d", "", "cut along s, output 0"),
    ("normed", "b s d, d -> b s d", "", "cut along d, output 0"),
    ("curved", "... -> ...", "x", "on sums in parts, output 0"),
    ("masked", "b s d, b s d -> b s d", "", "cut along s, output 0"),
    ("masked", "b s! d, b s! d -> b s! d", "x", "on sums in parts"),
    ("clipped_back", "b s d -> b s d", "", "with a gradient that arrives in parts, the gradient of operand x"),
    ("by_heads", "b s (h:8 d!) -> b s (h:8 d!)", "", "cut along h"),
    ("looked_up", "v d, b n -> b n d", "x", "cut along v, output 0"),
    ("zero_if_any_is_no_number", "b s d -> b s d", "x", "cut along b, output 0"),
    ("itself_and_largest", "b s d -> b s d, b s", "", "cut along d, output 1"),
    ("mean_loss", "b s d, b s d -> ", "", "cut along b, output 0"),
    ("summed_loss", "b s d, b s d -> ", "x", "on sums in parts, output 0"),
    ("attended", "b q d!, b k d!, b k e -> b q e", "z", "cut along k, output 0"),
    ("in_bfloat16", "b s k, k n -> b s n", "x+y", "on sums in parts, output 0"),
]
TRUE = [
    ("decayed_sum", "b s! d -> b s! d", "x"),
    ("running", "b s! d -> b s! d", "x"),
    ("nearly_itself", "... s! d -> ... s! d", "x"),
    ("ordered", "b s! d -> b s! d", ""),
    ("normed", "b s d!, d! -> b s d!", "y"),
    ("curved", "... -> ...", ""),
    ("masked", "b s! d, b s! d -> b s! d", ""),
    ("by_heads", "b s d! -> b s d!", ""),
    ("by_width", "b s (h d:8!) -> b s (h d:8!)", ""),
    ("looked_up", "v! d, b n -> b n d", "x"),
    ("itself_and_largest", "b s d! -> b s d!, b s", ""),
    ("summed_loss", "b s d, b s d -> ", ""),
    ("attended", "b q d!, b k! d!, b k! e -> b q e", "z"),
    ("in_bfloat16", "b s k, k n -> b s n", "x, y"),
    ("of_power_of_two", "b s d! -> b s d!", "x"),
]


class Product(nn.Module):
    """A linear layer, and an op on what it gives."""

    def __init__(self, name, call=None):
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.op, self.call = MADE.get(name, call), CALLS.get(name, lambda h: (h,))

    def forward(self, x):
        return self.op(*self.call(self.inner(x)))


@pytest.fixture(autouse=True)
def rules_are_forgotten():
    user_rules.tried.cache_clear()
    # A rule is written into the entry that is there, and others hold that entry: it stays the same object.
    rules = {name: known.rule for name, known in FACTS.items()}
    before = dict(FACTS), dict(WHOLE), dict(OPS), dict(SPELLINGS)
    yield
    for table, entries in zip((FACTS, WHOLE, OPS, SPELLINGS), before):
        table.clear()
        table.update(entries)
    for name, rule in rules.items():
        FACTS[name].rule = rule


def traced(name, call=None, rows=16):
    return ColoTracer().trace(Product(name, call), (torch.randn(rows, 12, 32),))


def bound(name, call=None):
    """The bindings of a graph with the op in it, made as planning makes them."""
    return Bindings.of(traced(name, call), strict=False)


@pytest.mark.parametrize("name, line, linear, said", FALSE, ids=lambda v: v if v in MADE else "")
def test_a_false_rule_is_refused(name, line, linear, said):
    autopar.rule(f"{SPACE}::{name}", line, linear)
    with pytest.raises(BadRule, match=f"{SPACE}::{name} is false: {said}") as letter:
        bound(name)
    assert f"autopar.rule('{SPACE}::{name}', '{line}'" in letter.value.at and "test_user_rules.py:" in letter.value.at
    assert "devices, on f64[" in letter.value.seen and ("differs by up to" in letter.value.seen)


def _no_gradients(patch):
    patch.setattr(Devices, "backward", lambda *_: None)


def _first_output_alone(patch):
    held = Devices._compared
    patch.setattr(
        Devices, "_compared", lambda self, what, *more: held(self, what, *more) if what == "output 0" else None
    )


def _no_sums(patch):
    tried_all = user_rules._strategies

    def of_cuts(small, devices):
        found, sizes = tried_all(small, devices)
        return [s for s in found if not user_rules._has_sums(s)], sizes

    patch.setattr(user_rules, "_strategies", of_cuts)


@pytest.mark.parametrize(
    "mutant, name",
    [(_no_gradients, "clipped_back"), (_first_output_alone, "itself_and_largest"), (_no_sums, "curved")],
)
def test_a_trial_that_looks_at_less_believes_a_false_rule(mutant, name, monkeypatch):
    line, linear = next(case[1:3] for case in FALSE if case[0] == name)
    autopar.rule(f"{SPACE}::{name}", line, linear)
    mutant(monkeypatch)
    assert not bound(name).believed


@pytest.mark.parametrize("name, line, linear", TRUE, ids=lambda v: v if v in MADE else "")
def test_a_true_rule_is_taken(name, line, linear):
    autopar.rule(f"{SPACE}::{name}", line, linear)
    before = time.process_time()
    assert not bound(name).believed
    assert time.process_time() - before < 2.0


@pytest.mark.parametrize(
    "name, why",
    [
        ("noisy", "it draws random numbers"),
        ("unwritten", "something else each time"),
        ("only_on_a_gpu", "NotImplementedError: no kernel for CPUs"),
    ],
)
def test_a_rule_that_cannot_be_tried_is_named_in_the_plan(name, why):
    autopar.rule(f"{SPACE}::{name}", "b s d -> b s d")
    graph, state = traced(name), torch.get_rng_state()
    (warning,) = Bindings.of(graph, strict=False).warnings()
    assert why in warning and f"{SPACE}::{name}" in warning and torch.equal(torch.get_rng_state(), state)
    if name == "only_on_a_gpu":
        plan = autopar.plan(Product(name), (torch.randn(16, 12, 32),), mesh=2, loss=lambda out, inputs: out.mean())
        assert plan.warnings == (warning,) and f"careful   {warning}" in plan.table()


def test_a_rule_of_an_op_of_the_table_is_tried_too():
    autopar.rule("softmax", "b s d -> b s d")
    with pytest.raises(BadRule, match="softmax is false: cut along d"):
        bound("softmax", lambda h: h.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_in_parts_are_no_larger_than_their_dtype(dtype):
    autopar.rule("add", "..., ... -> ...", "x+y")
    assert not bound("", lambda h: torch.arange(32).to(dtype) + h).believed


@pytest.mark.parametrize("line", ["b n, v~ d -> b n d", "b n, v! d -> b n d"])
def test_indices_of_the_table_are_tried_in_range(line):
    """The code of `F.embedding` has numbers that are no rows of a small table."""
    autopar.rule("embedding", line, "y")
    assert not bound("", lambda h: F.embedding(torch.arange(24).view(8, 3) % 12, h[0])).believed


def test_a_verdict_is_kept_for_batches_of_other_sizes(monkeypatch):
    autopar.rule(f"{SPACE}::running", "b s! d -> b s! d", "x")
    bound("running")
    monkeypatch.setattr(user_rules, "Devices", None)  # nothing runs again
    for rows in (8, 64):
        assert not Bindings.of(traced("running", rows=rows), strict=False).believed


def test_a_plan_without_rules_of_users_tries_nothing(monkeypatch):
    monkeypatch.setattr(user_rules, "Devices", None)
    monkeypatch.setattr(user_rules, "resized", None)
    assert not bound("", lambda h: h.softmax(-1)).believed


@pytest.mark.parametrize("inside", [False, True])
def test_a_certificate_that_refuses_a_rule_names_it(inside, monkeypatch):
    """As for an op that could not be tried: the rule is wrong, and not autopar."""
    monkeypatch.setattr(bindings, "untried", lambda *_: "")
    name, call = ("ordered_by", None) if inside else ("", lambda h: h.softmax(-1))
    if inside:
        MADE.setdefault(name, declared(ordered_by))
    autopar.rule(f"{SPACE}::{name}" if inside else "softmax", "b s d -> b s d")
    plan = autopar.plan(
        Product(name, call),
        (torch.randn(16, 12, 32),),
        mesh=2,
        loss=lambda out, inputs: out.square().mean(),
        constraints={"inner": "S(2)@devices"},
    )
    graph = ColoTracer().trace(
        Product(name, call), (torch.randn(16, 12, 32),), loss=lambda out, inputs: out.square().mean()
    )
    with pytest.raises(NotCertified, match="a rule does not hold") as letter:
        lower(graph, plan, (0,))
    assert "autopar.rule(" in letter.value.at and "error of autopar" not in str(letter.value)


@pytest.mark.parametrize("name, sums", [("clipped_back", False), ("running", True), ("only_on_a_gpu", False)])
def test_an_op_without_a_rule_hands_on_sums_of_gradients_where_its_backward_is_linear(name, sums):
    """It is computed whole; a backward of a user's own may clip the gradient that it gets."""
    space = shardings(traced(name), Setting(autopar.DeviceMesh((2,)), autopar.Cluster.of("generic")))
    (site,) = (site for site in space.sites if name in site.op)
    assert ("P(sum)" in " ".join(map(repr, site.choices))) == sums


# -- ops with a local form


def length(input: Tensor) -> Tensor:
    return input.pow(2).sum(1)


def entry(form, **how):
    """An entry of a user's op that is reduced inside, with this local form."""
    function = MADE.get("length") or declared(length, lambda x: x.new_empty(x.shape[0], x.shape[2]))
    MADE["length"] = function
    called = getattr(torch.ops, SPACE).length

    def local(here, call, kwargs):
        axes = [here.mesh.axes[a] for a in here.lies(0).cuts.get(1, ())]
        more = {"size": call.arguments["input"].shape[1]} if form is gathered else {}
        return (form, {**kwargs, "axes": axes, **more}) if axes else None

    op("length", called, "input:T", called.default, rule="b s^ d -> b d", serves="^", form=local, **how)


def summed(input, axes):
    return forms.reduced(length(input), "all_reduce", axes)


def summed_in_two(input, axes):
    return forms.reduced(length(input[:, :1]), "all_reduce", axes) + forms.reduced(
        length(input[:, 1:]), "all_reduce", axes
    )


def not_summed(input, axes):
    return length(input)


def gathered(input, axes, size):
    """The op on the whole, whose parts are gathered; a device keeps the part of the gradient that is its own."""
    axis, shape = axes[0], [input.shape[0], size, input.shape[2]]
    return length(torch.ops.autopar.convert(input, f"all_gather(1:{size})@{axis}", f"slice(1:{size})@{axis}", shape))


WHOLE_BYTES = 4096 * 512 * 32 * 4


def planned(mesh=2, cut="S(1)@devices"):
    return autopar.plan(
        Product("length"),
        {"x": torch.empty(4096, 512, 32, device="meta")},
        mesh=mesh,
        cluster="h100-8x1",
        loss=lambda out, inputs: out.mean(),
        constraints={"inner": cut},
    )


def certified(plan):
    x = torch.empty(4096, 512, 32, device="meta")
    graph = ColoTracer().trace(Product("length"), {"x": x}, loss=lambda out, inputs: out.mean())
    return lower(graph, plan, (0,) * len(plan.mesh.shape)).certified()


def test_a_local_form_is_tried_with_its_messages():
    entry(summed, exchanges=(1, 0))
    assert not bound("length").believed
    assert f"forward, inside it: 1 all_reduce@devices of {4096 * 32 * 4} bytes, " in planned().explain("/length")


def test_a_local_form_may_send_messages_of_any_kind():
    """They are priced as what they are, shown, and typed by the axis that they name."""
    entry(gathered, exchanges=(Exchange("all_gather", nbytes=lambda parts, n: n * 4 * math.prod(parts[0])),))
    assert not bound("length").believed
    plan = planned()
    assert f"forward, inside it: 1 all_gather@devices of {WHOLE_BYTES} bytes, " in plan.explain("/length")
    sent = [e for e in plan.timeline().events if e.place == "/length" and e.lane == COMMUNICATION]
    link = autopar.Cluster.of("h100-8x1").links[0]
    seconds = collective_seconds("all_gather", ((2, link),), WHOLE_BYTES)
    assert [(e.part, e.seconds) for e in sent] == [("forward", pytest.approx(seconds))]
    assert not certified(plan).open


def test_a_local_form_without_its_reduction_is_refused():
    entry(not_summed, exchanges=(1, 0))
    with pytest.raises(BadRule, match="length is false: cut along s, output 0") as letter:
        bound("length")
    assert letter.value.advice.startswith("the local form")


def test_a_local_form_that_leaves_out_an_axis_is_refused():
    """A trial has one axis: a form that gathers along the first of two is right there, and wrong on both."""
    entry(gathered, exchanges=(Exchange("all_gather"),))
    plan = planned(autopar.DeviceMesh((2, 2), ("outer", "inner")), "S(1)@outer, S(1)@inner")
    with pytest.raises(BadRule, match="sends other messages than its entry says") as letter:
        certified(plan)
    assert "/length on 2 devices of inner: it sends nothing in forward" in letter.value.seen
    assert "every axis" in letter.value.advice


SAYS_OTHERWISE = [  # a form, what its entry says, and what it should say
    (summed_in_two, (1, 0), "exchanges=(2, 0)"),
    (summed, (2, 0), "exchanges=(1, 0)"),
    (summed, (1, 1), "exchanges=(1, 0)"),
    (gathered, (1, 0), "exchanges=(Exchange('all_gather', 'forward', 1),)"),
]


@pytest.mark.parametrize("form, says, advice", SAYS_OTHERWISE)
def test_a_local_form_that_sends_other_messages_than_its_entry_says_is_refused(form, says, advice):
    entry(form, exchanges=says)
    with pytest.raises(BadRule, match="form of length sends other messages") as letter:
        bound("length")
    assert letter.value.advice == advice


@pytest.mark.parametrize("form, says, advice", SAYS_OTHERWISE)
def test_it_is_refused_where_it_is_lowered_if_it_could_not_be_tried(form, says, advice, monkeypatch):
    monkeypatch.setattr(bindings, "untried", lambda *_: "")
    entry(form, exchanges=says)
    plan = planned()
    with pytest.raises(BadRule, match="sends other messages than its entry says") as letter:
        certified(plan)
    assert letter.value.advice == advice and "/length on 2 devices of devices" in letter.value.seen


class Halved(torch.autograd.Function):
    """Half of a tensor, with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def test_a_function_with_its_own_backward_is_named_by_its_class():
    how = {"mesh": 2, "loss": lambda out, inputs: out.mean(), "microbatches": 2}
    batch = (torch.randn(16, 12, 32),)
    with pytest.raises(NotServed, match=r"autopar.rule\('function tests.ops.test_user_rules.Halved', LINE\)"):
        autopar.plan(Product("halved", Halved.apply), batch, **how)
    autopar.rule(Halved, "... -> ...", "x")
    plan = autopar.plan(Product("halved", Halved.apply), batch, **how)
    assert plan.microbatches == 2 and not plan.without_rule
