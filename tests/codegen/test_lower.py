"""The emitted program: which collectives it holds, in which half, and that it reads as Python."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
import torch

import autopar
from autopar.codegen import lower
from autopar.codegen.joint import COLLECTIVES
from autopar.letters import BadPlan
from autopar.tracer import ColoTracer
from tests.models import MLP, eager_links, mlp_case, mlp_pins

TP = autopar.DeviceMesh((4,), ("tp",))


def lowered(kind, mesh=TP, coordinate=None, cluster=None, **case):
    model, batch = mlp_case(**case)
    plan = autopar.plan(model, batch, mesh=mesh, cluster=cluster or eager_links(), constraints=mlp_pins(kind, mesh))
    return lower(ColoTracer().trace(model, batch), plan, coordinate or (0,) * len(mesh.shape))


def collectives(graph):
    return Counter(n.target.__name__ for n in graph.nodes if n.target in COLLECTIVES)


def test_megatron_reduces_once_a_block_and_direction():
    joint = lowered("megatron", cluster="generic").joint      # links that cost something: nothing else is worth a message
    assert collectives(joint.forward) == {"all_reduce": 2} and collectives(joint.backward) == {"all_reduce": 2}


def test_data_parallelism_reduces_the_loss_and_every_gradient_once():
    joint = lowered("dp").joint
    assert collectives(joint.forward) == {"all_reduce": 1} and collectives(joint.backward) == {"all_reduce": 14}


def test_sharded_storage_gathers_again_in_backward():
    joint = lowered("sharded").joint
    assert collectives(joint.forward) == {"all_gather": 14, "all_reduce": 1}
    backward = collectives(joint.backward)
    assert backward["reduce_scatter"] == 14 and set(backward) == {"reduce_scatter", "all_gather"}
    saved = [n.meta["val"].shape for n in joint.forward.output_node().args[0][1:]]
    assert not any(tuple(s) in ((64, 16), (16, 64)) for s in saved), "a gathered weight was saved"


def test_kept_copies_are_gathered_once():
    model, batch = mlp_case()
    pins = {k: v.replace("regathered", "kept") for k, v in mlp_pins("sharded", TP).items()}
    plan = autopar.plan(model, batch, mesh=TP, cluster=eager_links(), constraints=pins)
    joint = lower(ColoTracer().trace(model, batch), plan, (0,)).joint
    assert collectives(joint.backward) == {"reduce_scatter": 14}


def test_the_program_is_the_same_on_every_device_where_parts_are_even():
    mesh = autopar.DeviceMesh((2, 2), ("dp", "tp"))
    programs = {str(lowered("sharded", mesh, mesh.coordinate(rank)).program) for rank in range(4)}
    assert len(programs) == 1


def test_uneven_ranks_agree_on_their_collectives():
    programs = [lowered("sharded", TP, (i,), width=11, batch=7) for i in range(4)]
    assert len({str(p.program) for p in programs}) > 1 and len({p.joint.collectives for p in programs}) == 1


def test_the_forward_reads_as_python():
    text = str(lowered("megatron", cluster="generic").program)
    ast.parse(text)
    assert "blocks_0_up_linear = linear(input=blocks_0_norm_layer_norm_as, weight=blocks_0_up_weight, bias=blocks_0_up_bias)" in text
    assert "convert(blocks_0_down_linear, 'all_reduce@tp', backward='')" in text
    assert "# blocks.0.down" in text and "backward='all_reduce@tp'" in text


def test_a_plan_for_another_graph_is_a_letter():
    model, batch = mlp_case()
    plan = autopar.plan(model, batch, mesh=TP)
    with pytest.raises(BadPlan, match="another graph"):
        lower(ColoTracer().trace(model, {"x": batch["x"]}), plan, (0,))


def test_lowering_for_many_devices_needs_none(fake_world):
    with torch.device("meta"):
        model = MLP(256)
    batch = {"x": torch.empty(1024, 256, device="meta"), "y": torch.empty(1024, 256, device="meta")}
    mesh = autopar.DeviceMesh((8, 8), ("dp", "tp"))
    plan = autopar.plan(model, batch, mesh=mesh, cluster="h100-8x8")
    with fake_world(64):
        assert mesh.to_torch("cpu").size() == 64
    assert lower(ColoTracer().trace(model, batch), plan, (7, 7)).joint.outputs == 1
