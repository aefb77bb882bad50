"""What the predicted seconds of a plan are made of, and how sure they are."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster
from autopar.codegen import lower
from autopar.codegen.joint_graph import BACK, OP
from autopar.ops.entry import FACTS
from autopar.ops.exchange import BACKWARD, KINDS, WAYS, Exchange
from autopar.runtime.collectives import STEPS
from autopar.sharding.certainty import MEASURED, PEAK, REACHED, SPREADS
from autopar.sharding.cluster import Measured, Timed
from autopar.sharding.cost_model import CostModel, Message
from autopar.solver.figures import time
from autopar.solver.lanes import COMMUNICATION
from autopar.tracer import ColoTracer
from tests.language import NO_PADDING, meta_gpt2, meta_llama_8b
from tests.models import peaks


def linear(bias, **how):
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=bias, dtype=torch.bfloat16), torch.empty(8192, 4096, dtype=torch.bfloat16)
    x.requires_grad_()
    return autopar.plan(model, (x,), mesh=1, cluster="h100-8x1", optimizer="sgd", memory_budget="inf", **how)


def seconds_of(plan, part):
    return sum(d.seconds for name, d in plan.decisions.items() if part in name and d.kind == "op")


def test_the_gradient_of_a_bias_is_a_sum_and_no_product():
    """It reads what a linear layer was given once: two thirds of a product more would show."""
    ratio = seconds_of(linear(True), "linear") / seconds_of(linear(False), "linear")
    assert 1.0 < ratio < 1.1


def test_zero3_reduces_no_gradient_whole_to_take_a_slice():
    """Communication that hides costs nothing, and yet no gradient takes the longer way."""
    model, batch = meta_gpt2(6, batch=32, n_embd=768, n_head=12)
    plan = autopar.plan(model, batch, mesh=8, cluster="h100-8x1", parallel="zero3", memory_budget="inf")
    cut = [
        c for c in plan.conversions if c.source in plan.parameters and c.gradient and "S(" in c.gradient[1].text(("0",))
    ]
    kinds = {s.kind for c in cut for s in c.backward}
    assert len(cut) > 50 and "reduce_scatter" in kinds and "all_reduce" not in kinds


def test_parameters_of_a_window_are_gathered_in_one_message():
    """A slow start of a gather is paid once a block, however many tensors the block has."""
    model, batch = meta_gpt2(4, batch=32, n_embd=512, n_head=8)
    cluster, start = replace(peaks("h100-8x1"), hidden=0.0), 1e-3
    curve = tuple((float(4**k), start + 4**k / 3e11) for k in range(2, 16))
    slow = replace(cluster, measured=(Measured("all_gather", 8, 1, start, 3e11, curve),))
    plans = [
        autopar.plan(model, batch, mesh=(8,), cluster=c, parallel="zero3", memory_budget="inf") for c in (cluster, slow)
    ]
    more = plans[1].step_time_s - plans[0].step_time_s
    tensors = sum(any(s.kind == "all_gather" for s in c.forward) for c in plans[1].conversions)
    assert tensors > 40 and 4 * start < more < 20 * start  # two gathers of four blocks, and what stands around them


def test_compiled_chains_read_and_write_their_ends_alone():
    model, batch = meta_llama_8b(2, rows=16, dtype=torch.bfloat16)
    plans = [
        autopar.plan(
            model,
            batch,
            mesh=8,
            cluster="h100-8x1",
            assume=NO_PADDING,
            parallel="dp",
            memory_budget="inf",
            compile=compile,
        )
        for compile in (False, True)
    ]
    eager, compiled = plans
    assert 0.75 < compiled.step_time_s / eager.step_time_s < 0.97
    assert seconds_of(compiled, "linear") == pytest.approx(seconds_of(eager, "linear"), rel=0.02)
    assert seconds_of(compiled, "layernorm/") < 0.6 * seconds_of(eager, "layernorm/")
    assert compiled.peak_bytes == eager.peak_bytes and "torch.compile" in str(compiled)
    assert autopar.Plan.from_dict(compiled.to_dict()).compiled


def test_chains_are_as_fast_on_a_measured_machine_as_the_bytes_of_their_ends():
    """An op's own curve is that of a kernel of its own: in a chain there is none."""
    curve = ((2.0**10, 2e-6), (2.0**20, 5e-6), (2.0**30, 5e-3))
    timed = tuple(
        Timed(op, dtype, curve, curve)
        for op in ("add", "mul", "silu", "pow", "pow 2", "mean", "rsqrt", "to", "linear")
        for dtype in ("float32", "bfloat16")
    )
    cluster = replace(Cluster.of("h100-8x1"), timed=timed)
    model, batch = meta_llama_8b(2, rows=16, dtype=torch.bfloat16)
    asked = {"mesh": 1, "cluster": cluster, "assume": NO_PADDING, "memory_budget": "inf"}
    eager, compiled = (autopar.plan(model, batch, compile=compile, **asked) for compile in (False, True))
    assert seconds_of(compiled, "layernorm/") < 0.6 * seconds_of(eager, "layernorm/")
    assert seconds_of(compiled, "linear") == pytest.approx(seconds_of(eager, "linear"), rel=0.02)


def test_a_plan_says_what_rows_that_are_not_aligned_take():
    """Where that was measured, of a vocabulary that is no multiple of eight; and what a rounded one saves is that."""
    batch = {"x": torch.empty(16384, 768, dtype=torch.bfloat16, device="meta")}

    def plan(words, cluster="h200-1x8"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, words)).bfloat16()
        return autopar.plan(model, (batch["x"],), mesh=1, cluster=cluster, optimizer="sgd", memory_budget="inf")

    odd, even = plan(50257), plan(50264)
    assert [*odd.unaligned] == ["1/linear"] and not even.unaligned and not plan(50257, "h100-1x8").unaligned
    (lost,) = odd.unaligned.values()
    assert odd.step_time_s - even.step_time_s == pytest.approx(lost, rel=0.02)
    assert "linear would take" in str(odd) and autopar.Plan.from_dict(odd.to_dict()) == odd


def test_an_interval_is_that_of_the_sources_of_its_seconds():
    model, batch = meta_gpt2(2, batch=32, n_embd=1024, n_head=16)
    model = model.bfloat16()
    known, unknown = (
        autopar.plan(model, batch, mesh=8, cluster=c, parallel="dp", memory_budget="inf")
        for c in ("h100-8x1", peaks("h100-8x1"))
    )
    assert set(unknown.sources) == {PEAK} and set(known.sources) == {REACHED}
    for plan, source in ((known, REACHED), (unknown, PEAK)):
        assert sum(plan.sources.values()) == pytest.approx(plan.step_time_s, rel=1e-6)
        assert plan.step_interval_s == pytest.approx([plan.step_time_s * k for k in SPREADS[source]])
        assert "nine of ten" in str(plan)
    again = autopar.Plan.from_dict(copy.deepcopy(known.to_dict()))
    assert again.step_interval_s == known.step_interval_s


def test_two_plans_are_told_apart_only_where_their_steps_differ_enough():
    model, batch = meta_gpt2(2, batch=32, n_embd=1024, n_head=16)
    one, other = (
        autopar.plan(model, batch, mesh=8, cluster="h100-8x1", parallel=p, memory_budget="inf") for p in ("zero1", "dp")
    )
    near, far = (replace(other, step_time_s=one.step_time_s * times) for times in (1.02, 1.2))
    assert "can be told apart" in one.diff(near)
    assert f"step    {time(one.expected_s)} | {time(far.expected_s)}; " in one.diff(far)  # as print(plan) has them
    assert "told apart" not in one.diff(far)


def test_plans_of_other_meshes_differ_where_an_op_is_divided_otherwise():
    """Rows over (2, 2) devices and over four in a row are the same parts."""
    model, batch = meta_gpt2(1, batch=32)
    row = autopar.plan(model, batch, mesh=4, parallel="dp")
    square, tensor = (autopar.plan(model, batch, mesh=(2, 2), parallel=preset) for preset in ("dp", "megatron"))
    ops = {name for name, decision in row.decisions.items() if decision.kind == "op"}
    listed = [{line.partition(" ")[0] for line in row.diff(plan).splitlines()} & ops for plan in (square, tensor)]
    assert not listed[0] and any("mlp" in name for name in listed[1])


def test_measured_curves_are_a_source_of_their_own():
    assert SPREADS.keys() == {MEASURED, REACHED, PEAK}
    assert all(low < high for low, high in SPREADS.values())
    assert Cluster.of("generic").device.products is None


def test_explain_tells_the_formula_of_each_kernel_its_numbers_and_their_source():
    """What it prints is what is added up: the kernels of an op take as long as the op."""
    plan = linear(True)
    lines = plan.explain(next(name for name in plan.decisions if name.endswith("linear"))).splitlines()
    kernels = [line for line in lines if line.strip().startswith(("forward:", "backward"))]
    assert len(kernels) == 4 and all("measured to reach" in line for line in kernels)
    assert sum("ceiling" in line and "reached = 7.12e+14" in line for line in kernels) == 3
    seconds = sum(float(line.split(" us")[0].rpartition(" ")[2]) * 1e-6 for line in kernels)
    assert seconds == pytest.approx(seconds_of(plan, "linear"), rel=0.01)


def test_tensors_of_a_message_pay_its_start_alike_and_its_seconds_together():
    """A bias that travels apart from the others would start a message of its own."""
    start, wire, few = 5e-3, 1e9, 1e3
    curve = tuple((float(4**k), start + 4**k / wire) for k in range(2, 16))
    levels = ((4, Measured("all_reduce", 4, 1, start, wire, curve)),)
    costs, sizes = CostModel(peaks("h100-8x1")), [few] * 30 + [1e7, 2e6]
    message = Message(sum(sizes), len(sizes))
    paid = [costs.step("all_reduce", 0, levels, nbytes, message) for nbytes in sizes]
    assert sum(paid) == pytest.approx(start + sum(sizes) / wire, rel=0.05)
    assert paid[0] == pytest.approx(start / len(sizes), rel=0.05)
    assert costs.step("all_reduce", 0, levels, few) > 0.99 * start  # alone


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 32)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.norm(self.stem(x))), y)


@pytest.mark.parametrize(
    "op, how",
    [
        ("norm/batch_norm_updating", {"parallel": "dp"}),
        ("/cross_entropy.1", {"constraints": {"head.weight": "S(0)"}}),
    ],
    ids=["batch", "classes"],
)
def test_what_a_local_form_exchanges_is_priced_once_for_each_collective_that_it_emits(op, how):
    """Beside the emitted program: as many starts in the price as sums stand between the ops of the call."""
    model, start = Norms(), 1e-2
    batch = {"x": torch.randn(8, 16), "y": torch.arange(8)}
    starts = {"all_reduce": start, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
    measured = (Measured(kind, 2, 1, s, 1e18, ((4.0, s), (4.0**15, s))) for kind, s in starts.items())
    cluster = replace(peaks("h100-8x1"), hidden=0.0, measured=tuple(measured))
    plan = autopar.plan(model, batch, mesh=2, cluster=cluster, memory_budget="inf", **how)
    joint = lower(ColoTracer().trace(model, batch), plan, (0,)).joint
    sums = (STEPS["all_reduce"], STEPS["all_reduce_max"])
    emitted = [n for half in (joint.forward, joint.backward) for n in half.nodes if n.target in sums]
    local = op.strip("/").replace("/", "_").replace(".", "_")
    of_op = [n for n in emitted if local in (n.meta.get(OP), n.meta.get(BACK))]
    priced = round(plan.decisions[op].seconds / start)
    assert priced == len(of_op) > 1, (priced, [(n, n.meta.get(OP), n.meta.get(BACK)) for n in emitted])


def sent_by_a_norm(monkeypatch, exchanges, start=1e-2):
    """Seconds, lines and messages of a batch norm whose form sends this; a `send` takes `start`, other kinds more."""
    monkeypatch.setattr(FACTS["batch_norm_updating"], "exchanges", exchanges)
    starts = {kind: start * (1 + k) for k, kind in enumerate(reversed(KINDS))}
    measured = (Measured(kind, 2, 1, s, 1e18, ((4.0, s), (4.0**15, s))) for kind, s in starts.items())
    batch = {"x": torch.randn(8, 16), "y": torch.arange(8)}
    cluster = replace(peaks("h100-8x1"), measured=tuple(measured))
    plan = autopar.plan(Norms(), batch, mesh=2, cluster=cluster, memory_budget="inf", parallel="dp")
    name = "norm/batch_norm_updating"
    events = [e for e in plan.timeline().events if e.place == name and e.lane == COMMUNICATION]
    return plan.decisions[name].seconds, plan.explain(name), [(e.part, e.seconds, e.hidden_s) for e in events]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_messages_of_a_local_form_are_priced_by_their_kind_and_shown(kind, way, monkeypatch):
    exchanges = (Exchange(kind, way, lambda n: n + 1, lambda parts, n: n * 1000.0),)
    seconds, lines, events = sent_by_a_norm(monkeypatch, exchanges)
    sent = 3e-2 * (len(KINDS) - KINDS.index(kind))
    assert f"{way}, inside it: 3 {kind}@devices of 2000 bytes, {sent * 1e6:.1f} us\n" in lines
    assert events == [(way, pytest.approx(sent), None)] and seconds == pytest.approx(sent, rel=0.01)


def test_messages_beside_compute_cost_what_it_does_not_hide(monkeypatch):
    alone, _, none = sent_by_a_norm(monkeypatch, ())
    small, start = alone / 100, 1e-2
    hidden, lines, events = sent_by_a_norm(monkeypatch, (Exchange("send", beside=1.0),), small)
    assert none == [] and hidden == alone and ", beside 100% of its compute\n" in lines
    assert events == [("forward", pytest.approx(small), pytest.approx(small))]  # shown, and hidden
    exposed, _, events = sent_by_a_norm(monkeypatch, (Exchange("send", BACKWARD, beside=lambda n: 1 / n),), start)
    ((part, seconds, beside),) = events
    assert part == "backward" and seconds == pytest.approx(start) and exposed == pytest.approx(alone + start - beside)
    assert alone / 8 < beside < alone / 2  # half of its backward hides as much of the message


class Attends(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def seconds_on_curves(model, x, name, curves):
    """Seconds of an op on a machine on which nothing else was measured."""
    timed = tuple(Timed(name, "float32", curve, ((1.0, 1e-9), (1e18, 1e-9)), at) for at, curve in curves.items())
    cluster = replace(peaks("h100-8x1"), timed=timed)
    plan = autopar.plan(model, (x,), mesh=1, cluster=cluster, memory_budget="inf")
    return sum(d.seconds for n, d in plan.decisions.items() if name.split("_")[0] in n)


def test_a_batch_norm_takes_as_long_as_one_of_as_many_channels():
    curves = {64.0: ((1.0, 1.0), (1e18, 1.0)), 256.0: ((1.0, 16.0), (1e18, 16.0))}
    for channels, seconds in ((64, 1.0), (128, 4.0), (512, 16.0)):
        model, x = nn.Sequential(nn.BatchNorm2d(channels)), torch.randn(4, channels, 2, 2)
        assert seconds_on_curves(model, x, "batch_norm_updating", curves) == pytest.approx(seconds, rel=1e-6)


def test_a_gpu_computes_attention_in_whole_tiles():
    """What an attention takes grows by steps of its length."""
    curves = {0.0: ((1.0, 1e-9), (1e18, 1e9))}
    lengths = (64, 65, 100, 128, 197, 256)
    name = "scaled_dot_product_attention"
    by_length = [seconds_on_curves(Attends(), torch.randn(1, 2, n, 8), name, curves) for n in lengths]
    tiles = [one / by_length[0] for one in by_length]
    assert tiles == pytest.approx([1, 4, 4, 4, 16, 16], rel=1e-6)


def test_windows_of_a_convolution_that_lie_apart_have_a_time_of_their_own():
    calls = {"conv2d": dict(padding=1), "conv2d apart": dict(stride=3)}
    for name, how in calls.items():
        model = nn.Conv2d(3, 4, 3, **how)
        timed = (Timed(name, "float32", ((1.0, 7.0), (1e18, 7.0)), ((1.0, 1e-9), (1e18, 1e-9))),)
        cluster = replace(peaks("h100-8x1"), timed=timed)
        plan = autopar.plan(model, (torch.randn(2, 3, 9, 9),), mesh=1, cluster=cluster, memory_budget="inf")
        assert seconds_of(plan, "conv2d") == pytest.approx(7.0)


class _Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4096, 3584, dtype=torch.bfloat16))

    def forward(self, x, offs):
        return nn.functional.grouped_mm(x, self.weight, offs=offs)


def test_a_grouped_product_is_no_faster_than_the_products_of_its_groups():
    """131,072 rows of 8 experts: no rate that products of this part were measured to reach is passed."""
    with torch.device("meta"):
        model = _Grouped()
        x = torch.empty(131072, 4096, dtype=torch.bfloat16, requires_grad=True)
        offs = torch.empty(8, dtype=torch.int32)
    plan = autopar.plan(model, (x, offs), mesh=1, cluster="h100-8x1", optimizer="sgd", memory_budget="inf")
    reached = 3 * 2 * 131072 * 4096 * 3584 / seconds_of(plan, "grouped_mm")
    assert 0.9 * 712e12 < reached < 712e12


class _Attention(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _Attention()

    def forward(self, q, k, v):
        return self.inner(q, k, v).square().mean()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_cut_queries_take_as_long_as_their_share_of_all_pairs(devices):
    """Queries are dealt, so that each device has as many pairs; what deals and a ring take is small beside them."""
    length = 1 << 19  # the starts of kernels and messages hardly count
    with torch.device("meta"):
        given = tuple(torch.empty(1, 1, length, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    how = dict(cluster=peaks("h100-8x1"), optimizer="sgd", memory_budget="inf")
    one = seconds_of(autopar.plan(_Causal(), given, mesh=1, **how), "attention")
    plan = autopar.plan(_Causal(), given, mesh=devices, constraints={"q": "S(2)@0", "inner": "S(2)@0"}, **how)
    share = seconds_of(plan, "attention") / one * devices
    assert 1.0 <= share <= 1.05


@pytest.mark.parametrize("name", ["h100-8x2", "h200-8x2"])
def test_an_all_to_all_reaches_no_more_than_its_links_were_measured_to(name):
    for link, gathered in zip(Cluster.of(name).links, (365e9, 47e9), strict=True):
        assert link.wire("all_to_all") <= gathered < link.bytes_per_s
