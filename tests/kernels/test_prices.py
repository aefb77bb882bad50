"""Bytes that groups of ops are priced by are those that their custom ops are given and give."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Assume, DeviceMesh
from autopar.graph.graph import info, type_of
from autopar.kernels import NAMES, families, groups, places
from autopar.sharding.cluster import Cluster
from autopar.space.bindings import Bindings
from autopar.space.kernel_sites import KernelSites
from autopar.space.op_seconds import OpSeconds
from autopar.space.setting import Setting
from autopar.tracer import ColoTracer
from tests.kernels.sites import SITES
from tests.language import drawn
from tests.shares import by_day

ASSUMED = Assume(no_padding=True)


class Counting(TorchDispatchMode):
    """Bytes of the tensors that autopar's custom ops read and write, by family, in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        family = name.removesuffix("_backward")
        if space == "autopar" and family in NAMES:
            tensors = [*args, *(found if isinstance(found, tuple) else (found,))]
            nbytes = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
            self.moved[family, name.endswith("_backward")] += nbytes
        return found


def counted(model, batch):
    """What one step moves."""
    asked = {"mesh": (1,), "memory_budget": "inf", "kernels": NAMES, "assume": ASSUMED}
    parallel = autopar.autoparallelize(model, batch, **asked)
    parallel(**batch)  # it is lowered here
    with Counting() as mode:
        parallel(**batch).loss.backward()
    return mode.moved


def predicted(graph):
    """What the space prices, of one device."""
    setting = Setting(DeviceMesh((1,)), Cluster.of("h100-1x8"), kernels=NAMES)
    prices, tensors, moved = (
        OpSeconds(graph, setting, KernelSites.of(graph, NAMES)),
        Bindings.of(graph, strict=True).tensors,
        Counter(),
    )
    for family, found in groups(places(graph.nodes, NAMES)):
        for op in found.nodes:
            traffic = prices.traffic(op, tensors[op])
            ends = [*map(type_of, tensors[op]), *info(op).outputs]
            for is_back, shares in enumerate((traffic.forward, traffic.backward)):
                moved[family.name, bool(is_back)] += sum(ends[k].nbytes * share for k, share in shares)
    return moved


@pytest.mark.parametrize(
    "name", by_day(["gpt2", "llama", "gemma2", "qwen3", "gpt_neox", "bert", "t5 1.1"], "gpt2", "qwen3")
)
def test_bytes_are_those_that_are_counted(name, as_ops, monkeypatch):
    for family in families(NAMES):  # no mode sees what autograd of functions does: bytes are those of any numbers
        module = sys.modules[family.call.__module__]
        for helper, count in (("through", 2), ("through_sum", 3)):  # these stand before the operands
            if hasattr(module, helper):
                monkeypatch.setattr(module, helper, lambda *given, n=count: tuple(map(torch.zeros_like, given[n:])))
    build, config = SITES[name]
    model, batch = build(config).train(), drawn(4, 64, 128)
    said = predicted(ColoTracer().trace(model, batch, assume=ASSUMED))
    found = counted(model, batch)
    assert {family for family, _ in found} == {family for family, _ in said}
    for key, nbytes in found.items():
        assert said[key] == pytest.approx(nbytes, rel=0.02), key


def test_a_plan_with_kernels_takes_less_time():
    """By what need not move: on data sheets, where nothing was measured of the ops one by one."""
    build, config = SITES["llama"]
    model, batch = build(config).train(), drawn(64, 64, 128)
    asked = {"mesh": (2,), "memory_budget": "inf", "cluster": "h100-1x8", "parallel": "dp", "assume": ASSUMED}
    without, with_ = (autopar.plan(model, batch, kernels=kernels, **asked) for kernels in (False, NAMES))
    assert with_.kernels == NAMES and with_.step_time_s < without.step_time_s
    named = autopar.plan(model, batch, kernels="gated", **asked)
    assert with_.step_time_s < named.step_time_s < without.step_time_s
    assert autopar.Plan.from_dict(with_.to_dict()) == with_
