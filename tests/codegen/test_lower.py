"""The emitted program: which collectives it holds, in which half, and that it reads as Python."""

from __future__ import annotations

import ast
import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.codegen import lower
from autopar.codegen.halves import COLLECTIVES
from autopar.letters import BadPlan
from autopar.runtime.collectives import BEGIN, PACK, STEPS
from autopar.testing import Equality, on_threads
from autopar.tracer import ColoTracer
from tests.models import LLAMA_MEGATRON, LLAMA_SEQUENCE, MLP, Llama, eager_links, mlp_case, mlp_pins
from tests.random_plans import random_plan_of, with_random_states
from tests.training import whole

TP = autopar.DeviceMesh((4,), ("tp",))


def lowered(kind, mesh=TP, coordinate=None, cluster=None, **case):
    model, batch = mlp_case(**case)
    plan = autopar.plan(model, batch, mesh=mesh, cluster=cluster or eager_links(), constraints=mlp_pins(kind, mesh))
    return lower(ColoTracer().trace(model, batch), plan, coordinate or (0,) * len(mesh.shape))


def collectives(graph):
    return Counter(n.target.__name__ for n in graph.nodes if n.target in COLLECTIVES)


def test_megatron_reduces_once_a_block_and_direction():
    joint = lowered("megatron", cluster="generic").joint  # links that cost something: nothing else is worth a message
    assert collectives(joint.forward) == {"all_reduce": 2}
    # nobody wants the gradient of x: of the first norm its two parameters' are summed, in one message
    assert collectives(joint.backward) == {"all_reduce": 1, "begin_all_reduce": 1}


def test_data_parallelism_reduces_the_loss_and_every_gradient_once():
    """In windows of a block, since messages cost nothing here."""
    joint = lowered("dp").joint
    assert collectives(joint.forward) == {"all_reduce": 1} and collectives(joint.backward) == {"begin_all_reduce": 3}
    assert [len(n.args[0]) for n in joint.backward.nodes if n.target in PACK.values()] == [2, 6, 6]


class Numbers(nn.Module):
    """Sums of one number that do and do not wait for one another, in forward and in backward.

    One is an output as it is.
    """

    def __init__(self):
        super().__init__()
        self.out, self.scale = nn.Linear(16, 12), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        y = self.out(x)
        y = y * self.scale / y.square().sum().sqrt()
        first, second = y.abs().sum(), y.sin().sum()  # both wait for the sum of squares
        return {"loss": first.sqrt() + second.exp(), "seen": x.sum()}


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_sums_of_one_number_travel_together_unless_one_waits_for_another(mesh):
    torch.manual_seed(0)
    model, batch = Numbers().double(), {"x": torch.randn(8, 16, dtype=torch.float64)}
    plan = autopar.plan(model, batch, mesh=mesh, cluster=eager_links(), parallel="dp")
    joint = lower(ColoTracer().trace(model, batch), plan, (0,) * len(mesh)).joint
    counted = collectives(joint.forward)
    assert counted["all_reduce_bucket"] == len(mesh) and counted["all_reduce"] == 2 * len(
        mesh
    )  # two together; the one before them, and what is handed out, by themselves
    expected = copy.deepcopy(model)
    of_one = expected(**batch)
    of_one["loss"].backward()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        outputs = mine(**batch)
        kept = outputs["loss"].clone()
        with torch.no_grad():
            (
                outputs["seen"].mul_(0),
                outputs["loss"].mul_(1),
            )  # whoever writes to an output touches nothing that backward reads
        outputs["loss"].backward()
        return kept.detach(), [whole(p.grad) for p in mine.parameters()]

    for loss, gradients in on_threads(4, body):
        torch.testing.assert_close(loss, of_one["loss"].detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients, [p.grad for p in expected.parameters()], rtol=1e-10, atol=1e-12)


def llama(pins, bias=False, tokens=(2, 16), width=32, device="cpu"):
    with torch.device(device):
        model, batch = (
            Llama(width=width, bias=bias).double(),
            {"x": torch.randn(*tokens, width).double().requires_grad_()},
        )  # as between other blocks
    constraints = {k: v for k, v in pins.items() if bias or "bias" not in k}
    plan = autopar.plan(model, batch, mesh=TP, cluster="generic", constraints=constraints)
    return plan, lower(ColoTracer().trace(model, batch), plan, (0,)).joint, model, batch


def test_a_megatron_block_emits_two_all_reduces_each_way():
    plan, joint, _, batch = llama(LLAMA_MEGATRON, tokens=(8, 1024), width=512, device="meta")
    assert collectives(joint.forward) == {"all_reduce": 2} and collectives(joint.backward) == {"all_reduce": 2}
    reductions = [c for c in plan.conversions if c.forward or c.backward]
    link, size = autopar.Cluster.of("generic").links[0], batch["x"].nbytes
    assert len(reductions) == 4
    for c in reductions:  # priced as one all-reduce of the activations over four devices
        assert c.seconds == pytest.approx(link.latency_s + 2 * 3 / 4 * size / link.bytes_per_s)


@pytest.mark.parametrize("bias", [False, True])
def test_sequence_parallelism_gathers_and_scatters_instead(bias):
    _, joint, *_ = llama(LLAMA_SEQUENCE, bias, (8, 1024), 512, "meta")
    assert collectives(joint.forward) == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}
    (loss,) = (n for n in joint.forward.nodes if n.target is STEPS["all_reduce"])
    assert loss.meta["val"].shape == ()  # the only all-reduce forward is of the loss, one number
    of_x = joint.backward.output_node().args[0][joint.gradients.index(0)]
    assert of_x.target is STEPS["all_gather"]  # an input's gradient leaves whole; between blocks it stays cut
    assert collectives(joint.backward) - Counter(all_gather=1) == {
        "all_gather": 2,
        "reduce_scatter": 2,
        "begin_all_reduce": 2,
    }
    sums = [n for n in joint.backward.nodes if n.target is BEGIN["all_reduce"]]
    # of the norms' weights, each in the window of its block; rows' biases are added to the sums, and need none
    assert [[tuple(v.shape) for v in n.meta["val"]] for n in sums] == [[(512,)], [(512,)]]


@pytest.mark.parametrize("pins", [LLAMA_MEGATRON, LLAMA_SEQUENCE], ids=["megatron", "sequence"])
def test_llama_blocks_compute_what_one_device_computes(pins, threads):
    plan, _, model, batch = llama(pins, bias=True)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    for result in threads(4, body):
        Equality.in_float64(
            "gradients", result, {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}, 1e-9
        ).check()


def test_sharded_storage_gathers_again_in_backward():
    """In windows of a block, of which all but the first begin ahead."""
    joint = lowered("sharded").joint
    assert collectives(joint.forward) == {"all_gather_bucket": 1, "begin_all_gather": 2, "all_reduce": 1}
    (first,) = (n for n in joint.forward.nodes if n.target is STEPS["all_gather_bucket"])
    ahead = [n for n in joint.forward.nodes if n.target is BEGIN["all_gather"]]
    assert [len(first.args[0]), *(len(n.args[0].args[0]) for n in ahead)] == [6, 6, 2]
    assert collectives(joint.backward) == {"begin_reduce_scatter": 3, "begin_all_gather": 2}
    reduced = [n for n in joint.backward.nodes if n.target is BEGIN["reduce_scatter"]]
    assert [len(n.args[0].args[0]) for n in reduced] == [2, 6, 6]
    saved = [n.meta["val"].shape for n in joint.forward.output_node().args[0][1:]]
    assert not any(tuple(s) in ((64, 16), (16, 64)) for s in saved), "a gathered weight was saved"


def test_kept_copies_are_gathered_once():
    model, batch = mlp_case()
    pins = {k: v.replace("regathered", "kept") for k, v in mlp_pins("sharded", TP).items()}
    plan = autopar.plan(model, batch, mesh=TP, cluster=eager_links(), constraints=pins)
    joint = lower(ColoTracer().trace(model, batch), plan, (0,)).joint
    assert collectives(joint.backward) == {"begin_reduce_scatter": 3}


def test_the_program_is_the_same_on_every_device_where_parts_are_even():
    mesh = autopar.DeviceMesh((2, 2), ("dp", "tp"))
    programs = {str(lowered("sharded", mesh, mesh.coordinate(rank)).program) for rank in range(4)}
    assert len(programs) == 1


def test_uneven_ranks_agree_on_their_collectives():
    programs = [lowered("sharded", TP, (i,), width=11, batch=7) for i in range(4)]
    assert len({str(p.program) for p in programs}) > 1 and len({p.joint.collectives for p in programs}) == 1


class Spread(nn.Module):
    """Parameters that are repeated along a dim of which one device has a single row: there, torch sums nothing."""

    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.randn(4, 1, 3)), nn.Parameter(torch.randn(4, 1, 3))
        self.up = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        h = (x @ self.up).tanh()
        return ((h + self.shift).cumsum(0) * self.scale).square().mean()


def test_ranks_agree_where_one_sums_what_another_has_one_row_of():
    """On messages, on what waits for its reduction, and on where backward repeats a gather."""
    graph, differ = ColoTracer().trace(Spread(), {"x": torch.randn(4, 3, 3)}), False
    for seed in (2, 3, 8, 16):
        rng = np.random.default_rng(seed)
        plan = with_random_states(random_plan_of(graph, autopar.DeviceMesh((2,)), rng), rng)
        first, second = (lower(graph, plan, (rank,)) for rank in range(2))
        differ |= len(first.joint.backward.nodes) != len(second.joint.backward.nodes)
        assert first.collectives == second.collectives and first.joint.waits == second.joint.waits
    assert differ


def test_the_forward_reads_as_python():
    text = str(lowered("megatron", cluster="generic").program)
    ast.parse(text)
    assert (
        "blocks_1_up_linear = linear(input=blocks_1_norm_layer_norm_as, weight=blocks_1_up_weight, "
        "bias=blocks_1_up_bias)" in text
    )
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


class SmallRows(nn.Module):
    """Rows that some ranks have none of, one by one, beside a row of their own."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, z):
        first = self.v.expand(z.shape[0], 1, 4)
        return torch.cat([first, torch.stack([z[:, i] * self.w[i] for i in range(5)], 1)], 1).pow(3).mean()


def test_ranks_agree_where_a_collective_runs_beside_others_on_some_of_them():
    """One rank has no work between its begin and its end, and emits it as one step; it travels as before."""
    torch.manual_seed(0)
    model, batch = SmallRows().double(), {"z": torch.randn(3, 5, 4, dtype=torch.float64)}
    graph, mesh = ColoTracer().trace(copy.deepcopy(model), batch), autopar.DeviceMesh((2, 2), ("dp", "tp"))
    plan = random_plan_of(graph, mesh, np.random.default_rng(102))

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return whole(mine.w.grad)

    expected = copy.deepcopy(model)
    expected(**batch).backward()
    for found in on_threads(4, body):
        torch.testing.assert_close(found, expected.w.grad, rtol=1e-9, atol=1e-12)
