"""No preset is faster than the free plan of the same call, nor than the bound that this prints.

Models, clusters, meshes and options are drawn: a few by day, five hundred nightly.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar import Precision, planning
from autopar.graph.graph import Graph
from autopar.letters import BadConstraint, BadPreset, Infeasible, NotServed
from autopar.request import Request
from autopar.search import plan_of
from autopar.solver.plan import Plan
from autopar.space.windows import BLOCK, BUCKET
from tests import language
from tests.fuzz.modules import Drawn
from tests.models import MLP, on_meta
from tests.shares import one_in

COUNT, BY_DAY, AT_ONCE = 500, 1, 20
MET = 1 + 1e-9
CLUSTERS = ("generic", "generic", "h100-8x1", "h100-4x2", "h200-8x1", "a100-8x1", "l4-4x2", "rtx4090-8x1")
MESHES = ((2,), (4,), (4,), (8,), (2, 2), (2, 2), (2, 4), (4, 2))
PRESETS = ("dp", "zero1", "zero2", "hsdp", "megatron", "2d")
SHARES = (math.inf, math.inf, math.inf, 0.9, 0.75)  # of the memory of the fastest plan


class Pictures(nn.Module):
    """Convolutions, with a residual where shapes agree."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels[1:])
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x, y):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            made = F.relu(norm(layer(x)))
            x = made + x if made.shape == x.shape else made
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Draw(NamedTuple):
    """A call that is drawn: its graph, its arguments, and the presets beside it."""

    what: str
    graph: Graph
    asked: dict[str, Any]
    share: float
    presets: list[Any]

    def plan(self, **more: Any) -> Plan | None:
        """The plan of the call with more arguments; None where it has none."""
        try:
            return plan_of(self.graph, Request(**self.asked | more))
        except (BadConstraint, BadPreset, Infeasible, NotServed):
            return None


def drawn(seed: int) -> Draw:
    """The call of a seed."""
    rng = random.Random(seed)
    name = rng.choice(("gpt2", "llama", "bert", "mlp", "pictures", "random"))
    model, batch = _model(name, rng)
    mesh, accumulation = rng.choice(MESHES), rng.choice((1, 1, 1, 2))
    precision = Precision("bfloat16", "float32") if name != "random" and rng.random() < 0.3 else None
    asked = dict(mesh=mesh, cluster=rng.choice(CLUSTERS), accumulation=accumulation, precision=precision)
    asked |= dict(optimizer=rng.choice(("adamw", "sgd")), memory_budget="inf")
    asked |= dict(assume=language.NO_PADDING if name in ("llama", "bert") else None)
    asked |= dict(microbatches=rng.choice((1, 1, 1, 2)) if name != "random" else 1)
    presets: list[Any] = ["zero3", *rng.sample(PRESETS, 3)]
    if len(mesh) > 1:
        presets.append(dict(tensor=mesh[1], data=dict(size=mesh[0], zero=rng.choice((0, 1, 3)))))
    what = f"{seed}: {name} {mesh} {asked['cluster']}, {accumulation} calls of {asked['microbatches']}"
    return Draw(what, Request(**asked).trace(model, batch), asked, rng.choice(SHARES), presets)


def _model(name: str, rng: random.Random) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model on meta and its batch."""
    rows = rng.choice((8, 16, 64))
    if name == "random":
        model = Drawn(rng.randrange(10_000))
        return model, model.batch
    if name == "mlp":
        width = rng.choice((16, 64, 256, 1024))
        x = torch.empty(rows, width, device="meta")
        return on_meta(lambda: MLP(width, rng.choice((1, 2, 4)))), {"x": x, "y": x}
    if name == "pictures":
        channels = [3, *(rng.choice((16, 64, 64, 256)) for _ in range(rng.randint(2, 5)))]
        size = rng.choice((8, 16, 32))
        batch = {
            "x": torch.empty(rows, 3, size, size, device="meta"),
            "y": torch.empty(rows, dtype=torch.long, device="meta"),
        }
        return on_meta(lambda: Pictures(channels)), batch
    length = rng.choice((16, 64, 128))
    how = dict(layers=rng.choice((1, 2, 2, 3)), width=rng.choice((64, 128, 256, 512)), length=length)
    build = getattr(language, name)
    return on_meta(lambda: build(vocabulary=rng.choice((100, 512, 5003, 32000)), **how)), language.zeros(rows, length)


def faster(draw: Draw) -> list[str]:
    """The presets that are faster than the free plan, or than its bound."""
    free = draw.plan()
    if free is not None and math.isfinite(draw.share):
        draw = draw._replace(asked=draw.asked | dict(memory_budget=int(draw.share * free.peak_bytes)))
        free = draw.plan()
    found = []
    for preset in draw.presets:
        theirs = draw.plan(parallel=preset)
        if theirs is None:
            continue
        if free is None:
            found.append(f"{draw.what} at {draw.share}: nothing fits, and {preset} does")
        elif theirs.step_time_s * MET < max(free.step_time_s, free.lower_bound_s):
            less = (f"{theirs.step_time_s / s - 1:+.3%}" for s in (free.step_time_s, free.lower_bound_s))
            found.append(f"{draw.what} at {draw.share}: {preset} is {' and '.join(less)} of the plan and of its bound")
    return found


def residual(width: int, rows: int) -> Draw:
    """Four small blocks on four devices, whose parameters take less than 25 MiB."""
    x = torch.empty(rows, width, device="meta")
    asked = dict(mesh=(4,), cluster="generic", memory_budget="inf")
    graph = Request(**asked).trace(on_meta(lambda: MLP(width, 4)), {"x": x, "y": x})
    return Draw("four blocks", graph, asked, math.inf, ["zero3", "zero1", "dp"])


def test_where_blocks_are_small_the_free_plan_has_windows_of_blocks(monkeypatch):
    draw = residual(256, 1024)
    assert draw.plan().window_bytes == BLOCK and not faster(draw)
    monkeypatch.setattr(planning, "windows_to_search", lambda graph: (BUCKET,))
    assert any("zero3" in line for line in faster(draw))  # nothing hides in one window


# seeds under which the search once missed a preset: no fast sharding comes near the budget, and the smallest fits;
# elimination splits variables, and zero3 converts less; a plan that recomputes stands beside one that need not
ONCE_MISSED = (282, 221, 71)


@pytest.mark.parametrize("seed", one_in(4, (*range(BY_DAY), *ONCE_MISSED)))
def test_no_preset_is_faster_than_the_free_plan_or_its_bound(seed):
    assert not faster(drawn(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(BY_DAY, COUNT, AT_ONCE))
def test_no_preset_is_faster_in_five_hundred_calls(first):
    assert not [line for seed in range(first, first + AT_ONCE) for line in faster(drawn(seed))]
