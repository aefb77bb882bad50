"""Attention of cut queries, whose keys are whole or go round.

Equal to torch's own, without a tensor of the size of the scores, and no larger than its plan says on the rank that
holds most.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autopar
from autopar import Cluster
from autopar.codegen.lower import lower
from autopar.letters import NotServed
from autopar.ops.attention import attend, attend_plainly
from autopar.runtime import attention, halos
from autopar.runtime.dealing import Cutting, Setup
from autopar.runtime.sees import Sees
from autopar.sharding.attention_ways import ATTENTIONS
from autopar.sharding.placement import S
from autopar.solver import solve
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import Equality, Unequal, on_processes
from autopar.tracer import ColoTracer
from benchmarks.memory import Live
from tests.training import whole

CALLS = {  # shapes of query, key and value, in how many parts, and how else it is called
    "uneven parts": ((2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 7, 4), 3, {}),
    "grouped heads": ((2, 4, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4), 4, {"enable_gqa": True}),
    "grouped heads without a batch": ((4, 6, 4), (2, 6, 4), (2, 6, 4), 3, {"enable_gqa": True}),
    "fewer keys than queries": ((2, 3, 8, 4), (2, 3, 3, 4), (2, 3, 3, 4), 4, {"scale": 0.3}),
    "keys that end inside a part": ((2, 3, 9, 4), (2, 3, 4, 4), (2, 3, 4, 4), 3, {}),
    "more keys than queries": ((2, 3, 6, 4), (2, 3, 11, 4), (2, 3, 11, 4), 3, {}),
    "wider values": ((3, 6, 4), (3, 6, 4), (3, 6, 7), 2, {}),
    "narrower values": ((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 3), 2, {}),
    "two dims": ((6, 4), (6, 4), (6, 4), 3, {}),
    "five dims, broadcast": ((2, 3, 2, 6, 4), (2, 1, 2, 6, 4), (1, 3, 2, 6, 4), 2, {}),
}


def whole_and_by_parts(shapes, parts, how, dtype):
    """Output and gradients of torch's own attention in float64, of its own in `dtype`, and of the parts in `dtype`.

    The gradients of keys and values are the sums of the parts'.
    """
    torch.manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]
    upon = torch.randn(F.scaled_dot_product_attention(*given, is_causal=True, **how).shape, dtype=torch.float64).to(
        dtype
    )
    found = []
    for of in (torch.float64, dtype):
        held = [t.to(of, copy=True).requires_grad_() for t in given]
        out = F.scaled_dot_product_attention(*held, is_causal=True, **how)
        out.backward(upon.to(of))
        found.append([out.detach(), *(t.grad for t in held)])
    held = [t.clone().requires_grad_() for t in given]
    rows, outs = shapes[0][-2], []
    sees = Sees(right=0, scale=how.get("scale")).text()
    for place, (query, gradient) in enumerate(
        zip(held[0].split(-(-rows // parts), -2), upon.split(-(-rows // parts), -2), strict=True)
    ):
        setup = Setup(sees, rows, shapes[1][-2], (Cutting("cut", parts, place),)).text()
        outs.append(attend_plainly(query, held[1], held[2], how.get("enable_gqa", False), setup))
        outs[-1].backward(gradient)
    return (*found, [torch.cat(outs, -2).detach(), *(t.grad for t in held)])


@pytest.mark.parametrize("kernel", ["the device's", "none"])
@pytest.mark.parametrize("call", CALLS)
def test_the_parts_are_the_whole(call, kernel, monkeypatch):
    if kernel == "none":  # the opened form
        monkeypatch.setattr(attention, "attention_kernel", lambda *_: "")
    *shapes, parts, how = CALLS[call]
    expected, _, found = whole_and_by_parts(shapes, parts, how, torch.float64)
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_a_lower_precision_they_are_as_good_as_torch(dtype):
    expected, eager, found = whole_and_by_parts(
        [(2, 4, 96, 16), (2, 2, 96, 16), (2, 2, 96, 16)], 4, {"enable_gqa": True}, dtype
    )
    for e, t, f in zip(expected, eager, found, strict=True):
        assert f.dtype == dtype
        assert (f.double() - e).norm() <= 2 * (t.double() - e).norm() + 1e-6 * e.norm()


class Attends(nn.Module):
    """Attention alone: what its loss needs is small beside it."""

    def __init__(self, width=32, heads=4, groups=4, causal=True, words=0, masked=False, sees=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, heads * 16, bias=False),
            nn.Linear(width, groups * 16, bias=False),
            nn.Linear(width, groups * 16, bias=False),
            nn.Linear(heads * 16, width, bias=False),
        )
        self.heads, self.groups, self.causal, self.words, self.masked, self.sees = (
            heads,
            groups,
            causal and not masked,
            words,
            masked,
            sees,
        )

    def forward(self, x, y):
        z = y[:, : self.words] if self.words else x
        q, k, v = (
            m(t).unflatten(-1, (n, 16)).transpose(1, 2)
            for m, n, t in ((self.q, self.heads, x), (self.k, self.groups, z), (self.v, self.groups, z))
        )
        places = torch.arange(x.shape[1])
        mask = (places.unsqueeze(1) - places).abs() < 5 if self.masked else None
        if self.sees is None:
            h = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.heads != self.groups
            )
        else:
            h = attend(q, k, v, sees=self.sees)
        return F.mse_loss(x + self.o(h.transpose(1, 2).flatten(2)), y)


def planned(model, batch, mesh, order="S(1)@0", rings=()):
    """The fastest plan on devices with the CPU's kernels under which every axis cuts the queries along the sequence,
    from the input on; along some axes keys go round.
    """
    generic, graph = Cluster.of("generic"), ColoTracer().trace(model, batch)
    space = shardings(
        graph,
        Setting(autopar.DeviceMesh(mesh), replace(generic, device=replace(generic.device, kernels="cpu"))),
        {"x": order, "y": order, "q": order, "k": order, "v": order, "o": order},
    )
    sites = []
    for site in space.sites:
        elsewhere = [
            site.op in ATTENTIONS
            and (
                any(f.value != S(2) for f in c.operand(0))
                or any((f.value == S(2)) != (axis in rings) for axis, f in enumerate(c.operand(1)))
            )
            for c in site.choices
        ]
        sites.append(replace(site, seconds=np.where(elsewhere, np.inf, site.seconds)))
    return solve(replace(space, sites=tuple(sites)))


def batch_of(length, dtype=torch.float32):
    return {k: torch.randn(1, length, 32, dtype=dtype) for k in "xy"}


def compare(model, batch, plan, threads):
    """Raises Unequal where a rank's loss or gradients are not eager's."""
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for result in threads(plan.mesh.size, body):
        Equality.in_float64("attention", result, expected, 1e-9).check()


@pytest.mark.parametrize(
    "length, mesh, order, rings, how",
    [
        pytest.param(22, (4,), "S(1)@0", (), {}, id="uneven"),
        pytest.param(21, (2, 2), "S(1)@0, S(1)@1", (), {"groups": 2}, id="two axes, uneven, grouped heads"),
        pytest.param(22, (3,), "S(1)@0", (), {"words": 9}, id="fewer keys"),
        pytest.param(22, (3,), "S(1)@0", (), {"causal": False, "words": 9, "groups": 2}, id="not causal"),
        pytest.param(22, (3,), "S(1)@0", (), {"masked": True}, id="a mask that is given"),
        pytest.param(22, (4,), "S(1)@0", (0,), {"groups": 2}, id="a ring, uneven"),
        pytest.param(22, (3,), "S(1)@0", (0,), {"causal": False}, id="a ring, not causal"),
        pytest.param(21, (2, 2), "S(1)@0, S(1)@1", (1,), {"groups": 2}, id="a ring on the minor axis"),
        pytest.param(21, (2, 2), "S(1)@0, S(1)@1", (0,), {}, id="a ring on the major axis"),
        pytest.param(21, (2, 2), "S(1)@0, S(1)@1", (0, 1), {}, id="two rings"),
        pytest.param(42, (4,), "S(1)@0", (0,), {"sees": "left=2 right=0", "groups": 2}, id="a window"),
        pytest.param(41, (2, 2), "S(1)@0, S(1)@1", (0, 1), {"sees": "left=2 right=0"}, id="a window on two axes"),
    ],
)
def test_a_cut_model_computes_what_it_computes(length, mesh, order, rings, how, threads):
    torch.manual_seed(0)
    model, batch = Attends(**how).double(), batch_of(length, torch.float64)
    compare(model, batch, planned(model, batch, mesh, order, rings), threads)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_heads_that_share_keys_are_cut_by_blocks(mesh, threads):
    """More devices than heads of keys: each has a block of the heads of every group, or of its own groups."""
    torch.manual_seed(0)
    model, batch = Attends(heads=8, groups=2).double(), batch_of(6, torch.float64)
    space = shardings(ColoTracer().trace(model, batch), Setting(autopar.DeviceMesh(mesh), Cluster.of("generic")))
    wanted = [("g",), ("r",)][-len(mesh) :]
    sites = []
    for site in space.sites:
        if site.op == "scaled_dot_product_attention":
            ways = [[s.cut and s.cut.factors for s in choice.strategies] for choice in site.choices]
            site = replace(site, seconds=np.where([way == wanted for way in ways], site.seconds, np.inf))
        sites.append(site)
    compare(model, batch, solve(replace(space, sites=tuple(sites))), threads)


def backward_of_its_own_sums(patch):
    """Each call goes backward from its own output and sums instead of the rows'."""

    def broken(call, gradient, query, key, value, out, log_sum):
        out, log_sum = attention.fused_attention(call, query, key, value)
        return attend_backward(call, gradient, query, key, value, out, log_sum)

    attend_backward = attention.fused_attention_backward
    patch.setattr(attention, "fused_attention_backward", broken)


def places_from(first):
    """Every device takes its queries for those from its first place on plus `first`."""

    def patched(patch):
        found = attention.ranges_of
        patch.setattr(attention, "ranges_of", lambda rows: [(a + first, z + first) for a, z in found(rows)])

    return patched


def gradients_of_a_halo_stay(patch):
    """Gradients of keys that lie on another device are not sent."""
    returned = halos.returned
    patch.setattr(halos, "returned", lambda gradients, how, _: returned(gradients, how, {}))


def halos_of_other_keys(patch):
    """A device sends its first keys in the place of its last ones."""
    in_message = halos._in_message

    def first(message, tensors, blocks):
        return [(x, block._replace(before=0), rows) for x, block, rows in in_message(message, tensors, blocks)]

    patch.setattr(halos, "_in_message", first)


WINDOW = {"sees": "left=2 right=0"}
BROKEN = {  # what is wrong, the model, and the axes along which keys are cut
    "queries stand one place early": (places_from(-1), {}, ()),
    "calls go backward from their own sums": (backward_of_its_own_sums, {}, ()),
    "gradients of a halo stay": (gradients_of_a_halo_stay, WINDOW, (0,)),
    "a halo of other keys": (halos_of_other_keys, WINDOW, (0,)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_form_is_noticed(broken, threads, monkeypatch):
    torch.manual_seed(0)
    breaks, how, rings = BROKEN[broken]
    model, batch = Attends(**how).double(), batch_of(32, torch.float64)
    plan = planned(model, batch, (2,), rings=rings)
    compare(model, batch, plan, threads)
    breaks(monkeypatch)
    with pytest.raises(Unequal):
        compare(model, batch, plan, threads)


def largest(graph, plan, rank) -> int:
    """Elements of the largest tensor of a rank's program."""
    joint = lower(graph, plan, plan.mesh.coordinate(rank)).joint
    values = []
    for node in (*joint.forward.nodes, *joint.backward.nodes):
        made = node.meta.get("val")
        values += made if isinstance(made, (tuple, list)) else [made]
    return max(v.numel() for v in values if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_no_tensor_is_as_large_as_the_scores(causal):
    length = 2048
    model, batch = Attends(causal=causal), batch_of(length)
    plan, graph = planned(model, batch, (4,)), ColoTracer().trace(model, batch)
    assert max(largest(graph, plan, rank) for rank in range(4)) < length * length // 4


LONG = {
    "documents": ("Llama", {}, ("position_ids",)),
    "padding": ("Llama", {}, ("attention_mask",)),
    "windows": ("Mistral", dict(sliding_window=4096), ()),
    "sinks": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=128), ()),
}


BY_DAY = {("documents", "ring", 32768), ("windows", "gather", 32768), ("sinks", "ulysses", 32768)}


@pytest.mark.parametrize(
    "kind, how, length",
    [
        pytest.param(*case, marks=[] if case in BY_DAY else pytest.mark.nightly)
        for case in itertools.product(LONG, ("ring", "gather", "ulysses"), (8192, 32768))
    ],
)
def test_no_tensor_of_a_long_sequence_is_a_square(kind, how, length):
    family, sizes, more = LONG[kind]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=length, use_cache=False, **sizes,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.zeros(1, length, dtype=torch.int64)
    batch = dict.fromkeys(("input_ids", "labels", *more), ids)
    plan = autopar.plan(model, batch, mesh=4, parallel=dict(context=dict(size=4, how=how)), cluster="generic")
    graph = ColoTracer().trace(model, batch)
    assert largest(graph, plan, 3) <= 64 * length  # logits, whole; a square has 128 or 512 times as many


KEPT = [  # models, dtypes and rings; what is merged in single precision counts most in half precision
    ({}, torch.float32, (0, 1)),
    ({"heads": 8, "groups": 2}, torch.bfloat16, (0, 1)),
    ({}, torch.float32, ()),
    ({"heads": 8, "groups": 2}, torch.bfloat16, ()),
    ({}, torch.float32, (0,)),
    ({"heads": 8, "groups": 2}, torch.bfloat16, (0,)),
    ({"sees": "left=700 right=0"}, torch.float32, (0,)),
    ({"sees": "left=255 right=0", "heads": 8, "groups": 2}, torch.bfloat16, (0,)),
]


def held_by(rank, cases):
    """The most bytes that a rank holds in its third step, by case."""
    peaks = []
    for model, batch, plan in cases:
        parallel = autopar.autoparallelize(model, batch, plan=plan)
        optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
        live = Live([*parallel.parameters(), *parallel.buffers(), *batch.values()])
        with live:
            for _ in range(3):
                live.restart()
                parallel(**batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(live.peak)
    return peaks


@pytest.mark.machines
@pytest.mark.timeout(120)
def test_no_rank_holds_more_than_the_plan_says():
    """Attention is nearly all of these models, so that what is counted of it shows."""
    torch.manual_seed(0)
    cases = []
    for how, dtype, rings in KEPT:
        model, batch = Attends(**how).to(dtype), batch_of(4096 if "sees" in how else 1024, dtype)
        on_two = ((2, 2), "S(1)@0, S(1)@1") if len(rings) > 1 else ((4,), "S(1)@0")
        cases.append((model, batch, planned(model, batch, *on_two, rings=rings)))
    by_rank = on_processes(4, held_by, cases)
    for (*_, plan), *peaks in zip(cases, *by_rank, strict=True):
        assert 0.99 <= plan.peak_bytes / max(peaks) <= 1.01


def test_one_program_for_all_ranks_is_refused(local_tensor):
    model, batch = Attends(), batch_of(16)
    plan = planned(model, batch, (2,))
    with pytest.raises(NotServed, match=r"LocalTensors.*\n.*test_attention\.py"):
        local_tensor(2, lambda _, m, b: autopar.autoparallelize(m, b, plan=plan)(**b), model, batch)
