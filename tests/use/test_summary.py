"""A plan at one look, in full, one place of it, and beside another."""

from __future__ import annotations

import time

import pytest
import torch

import autopar
from autopar import Assume
from autopar.letters import BadPlan
from tests.kernels.sites import SITES
from tests.language import bert, drawn, gpt2, llama
from tests.shares import by_day

ASSUMED = Assume(no_padding=True)
MESHES = {
    "gpt2": {"mesh": (2, 2), "recompute": "full", "memory_budget": "64GiB"},
    "llama": {"mesh": (2, 2), "parallel": {"data": 2, "tensor": 2}},
    "qwen3": {"mesh": 4, "precision": "bf16"},
    "gemma2": {"mesh": (8,), "parallel": "fsdp"},
    "phi3": {"mesh": (2, 2, 2), "parallel": "3d"},
    "gpt_neox": {"mesh": (4,), "recompute": "full", "memory_budget": "64GiB"},
    "bert": {"mesh": (1,)},
    "t5 1.1": {"mesh": (2, 4), "cluster": "a100-8x1", "accumulation": 2},
}


def planned(model, **how):
    return autopar.plan(model, drawn(16, 16, 128), assume=ASSUMED, **{"memory_budget": "inf", **how})


@pytest.mark.parametrize("name", by_day(MESHES, "gpt2", "gemma2", "t5 1.1"))
def test_a_plan_is_seen_at_one_look(name):
    build, config = SITES[name]
    plan = planned(build(config).train(), **MESHES[name])
    lines = str(plan).splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 100 and "..." not in str(plan)
    labels = [line[:10].strip() for line in lines]
    assert all(line[9] == " " and line[10] != " " for line in lines)  # texts stand below each other
    assert [label for label in labels if label][:3] == ["model", "devices", "plan"] and labels[-1] == "more"
    assert {"speed", "memory", "proof", "against", "slowest"} <= set(labels)
    low, high = plan.step_interval_s
    assert low <= plan.expected_s <= high
    assert "\n" not in repr(plan) and len(repr(plan)) < 120
    if plan.recomputed:
        assert f"{len(plan.recomputed)} values" in str(plan)


def of_gpt2(**how):
    return planned(gpt2(layers=3, vocabulary=128), **how)


@pytest.mark.parametrize(
    ("parallel", "mesh", "says"),
    [
        ("dp", (4,), "data parallel over 4 devices"),
        ("zero3", (4,), "parameters, gradients and optimizer states sharded over 4 devices (ZeRO-3, FSDP)"),
        (
            "zero1",
            (2, 2),
            "data parallel over 4 (axes data, model); gradients and optimizer states sharded over 4 (axes data, "
            "model), and parameters between steps (ZeRO-2)",
        ),
        ("megatron", (4,), "tensor parallel over 4 devices: attn.c_attn"),
        ({"data": 2, "tensor": 2}, (2, 2), "data parallel over 2 (axis data); tensor parallel over 2 (axis model)"),
    ],
)
def test_the_verdict_says_what_a_preset_does(parallel, mesh, says):
    said = " ".join(str(of_gpt2(parallel=parallel, mesh=mesh)).split())
    assert says in said and ("ZeRO-3" in said) == (parallel == "zero3")
    if parallel == "megatron":
        assert "data parallel" not in said and "attn.c_attn, attn.c_proj, lm_head, mlp.c_fc, mlp.c_proj" in said


def test_one_device_has_nothing_cut():
    assert "everything runs on one device" in str(of_gpt2(mesh=(1,)))


def test_figures_are_those_of_the_plan():
    plan = of_gpt2(mesh=(2,), memory_budget="50MiB")
    said = str(plan)
    assert (
        f"gap {plan.gap:.2%}" in said
        and f"{plan.peak_bytes / 2**20:.2f} MiB of 50.00 MiB (a device has 80.00 GiB)" in said
    )
    assert f"{plan.step_time_s * 1e6:.1f} us" in said or f"{plan.step_time_s * 1e3:.2f} ms" in said
    assert said.partition("slowest")[2].split()[0] in plan.table()


def test_what_should_not_be_missed_is_said():
    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x).abs().sum()

    batch = {"x": torch.randn(8, 8, requires_grad=True)}
    plan = autopar.plan(Odd(), batch, mesh=(2,), memory_budget="inf")
    assert plan.without_rule and "warning   replicated for want of a rule" in str(plan)


def test_experts_plans_stand_beside_it_once_they_are_asked_for():
    plan = of_gpt2(mesh=(4,), memory_budget="64GiB")
    assert "plan.beside()" in str(plan)
    beside = plan.beside()
    assert [rival.name for rival in beside] == ["ddp", "fsdp", "megatron"]
    for rival in beside:
        alone = of_gpt2(mesh=(4,), parallel=rival.name)
        assert (rival.step_time_s, rival.peak_bytes) == (alone.step_time_s, alone.peak_bytes)
        assert rival.fits and rival.step_time_s >= plan.step_time_s and rival.name in str(plan)
    with pytest.raises(BadPlan, match="is gone"):
        autopar.Plan.from_dict(plan.to_dict()).beside()


def test_the_table_has_a_glossary_and_folds_layers():
    table = of_gpt2(mesh=(2, 2)).table()
    assert "transformer.h.*.mlp.c_fc/linear (x3)" in table and "P(sum)     summands" in table


def test_a_place_is_explained_by_what_the_table_prints():
    plan = of_gpt2(mesh=(4,), parallel="megatron")
    for row in plan.table().splitlines():
        name = row.split("  ")[0]
        if "/linear" in name and " to " not in name:
            assert plan.explain(name)
    said = plan.explain("transformer.h.*.mlp.c_fc/linear (x3)")
    assert said.count("linear, ") == 1 and "and 2 layers alike" in said and "rival" in said
    assert "transformer.h.1.mlp.c_fc/linear: linear" in plan.explain("transformer.h.1.mlp.c_fc")
    for wrong in ("", None, 3):
        with pytest.raises(BadPlan, match="not the name of a place"):
            plan.explain(wrong)
    with pytest.raises(BadPlan, match=r"with.* transformer.h.1[, ]"):  # a module, before the ops of other layers
        plan.explain("transformers.h.1")
    with pytest.raises(BadPlan, match="has no site"):
        plan.explain("transformer.h.*.mlp.fc")


def test_plans_are_held_against_each_other():
    one, other = of_gpt2(mesh=(4,), parallel="zero3"), of_gpt2(mesh=(4,), parallel="dp")
    started = time.process_time()
    said = one.diff(other)
    assert time.process_time() - started < 2.0
    head, _, rows = said.partition("\n\n")
    assert head.startswith("one     data parallel over 4 devices; parameters, gradients") and "memory  " in head
    assert "transformer.h.*.mlp.c_fc.weight (x3)" in rows and "transformer.h.1." not in rows
    assert one.diff(one) == "the plans are the same"


@pytest.mark.nightly
def test_plans_that_differ_in_what_was_asked_are_not_the_same():
    kept = of_gpt2(mesh=(2,), parallel="zero2")
    assert "regathered" in kept.diff(of_gpt2(mesh=(2,), parallel="zero3"))
    for how in ({"accumulation": 4}, {"optimizer": "sgd"}, {"cluster": "h100-8x1"}, {"precision": "bf16"}):
        (name,) = how
        assert name in kept.diff(of_gpt2(mesh=(2,), parallel="zero2", **how))


def test_a_bound_is_of_the_plans_that_keep_to_what_is_pinned():
    said = " ".join(str(of_gpt2(mesh=(2,), parallel="zero1")).split())
    assert "no plan that keeps to parallel='zero1' takes less than" in said
    assert "that keep" not in str(of_gpt2(mesh=(2,)))
    turned = of_gpt2(mesh=(2,), chunks=4, microbatches=2)
    for said in (" ".join(str(turned).split()), " ".join(turned.table().split())):
        assert "in 2 micro-batches with a loss head in 4 chunks" in said


class Product(torch.nn.Module):
    """A product with a weight that is no layer."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return (x @ self.w).square().mean()


class SequenceFirst(torch.nn.Module):
    """Layers that see positions before rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x.transpose(0, 1)))).square().mean()


@pytest.mark.parametrize(
    ("model", "shape", "how", "says"),
    [
        (Product, (64, 64), {"mesh": (2,), "constraints": {"w": "S(1)"}}, "tensor parallel over 2 devices: matmul"),
        (Product, (64, 64), {"mesh": (2, 2), "parallel": "dp"}, "data parallel over 4 (axes data, model)"),
        (SequenceFirst, (16, 8, 64), {"mesh": (2,), "parallel": "dp"}, "data parallel over 2 devices"),
        (
            SequenceFirst,
            (16, 8, 64),
            {"mesh": (2, 2), "constraints": {"a.weight": "S(0)@0; R", "b.weight": "S(0)@1; R"}},
            "gradients and optimizer states sharded over 2 (axis data) for 50% of parameter bytes",
        ),
    ],
)
def test_the_verdict_of_odd_models_is_true(model, shape, how, says):
    plan = autopar.plan(model(), {"x": torch.randn(shape)}, memory_budget="inf", **how)
    said = " ".join(str(plan).partition("speed  ")[0].split())
    assert says in said and "of the products" not in said, said


@pytest.mark.parametrize("model", [llama, bert])
def test_graphs_spaces_and_meshes_show_themselves_in_a_notebook(model):
    graph = autopar.tracer.ColoTracer().trace(model(), drawn(4, 16, 128), assume=ASSUMED)
    assert graph._repr_html_().startswith("<pre>") and "linear" in graph._repr_html_()
    assert autopar.DeviceMesh((2, 2))._repr_html_() == "<pre>(data=2, model=2)</pre>"
