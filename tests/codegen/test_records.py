"""Halves as data: written and read again they are the same code, are certified, and are not lowered a second time."""

from __future__ import annotations

import json
import time

import pytest
import torch

from autopar import DeviceMesh
from autopar.codegen import lower
from autopar.codegen.halves import Joint
from autopar.codegen.joint import LOWERED
from autopar.codegen.lower import Lowered
from autopar.codegen.records import Records, packed, unpacked
from autopar.graph.graph import Graph
from autopar.letters import BadConstraint, BadPreset, NotServed
from autopar.request import Request
from autopar.search import plan_of
from autopar.solver.plan import Plan
from tests.models import eager_links
from tests.zoo.replay import as_call
from tests.zoo.tables import ZOO

HALVES = ("beginning", "forward", "backward", "hold", "settle")
MESHES = {1: DeviceMesh((4,), ("dp",)), 2: DeviceMesh((2, 2), ("dp", "tp"))}
WAYS = [
    ("hf_t5", "zero3", {"microbatches": 2}),
    ("hf_mixtral_batched_mm", None, {"recompute": "selective", "precision": "bf16"}),
]
FAMILIES = (
    *("hf_gpt2_eager", "hf_qwen3", "hf_gemma3", "hf_mistral", "hf_deepseekv3_batched_mm", "hf_mamba_eager"),
    *("hf_vit", "hf_whisper", "hf_resnet", "hf_llama", "hf_bert_cls"),
)
PRESETS = ("dp", "zero3", "megatron", None)
KERNELS = ("rms_norm", "layer_norm", "gelu_tanh", "gated", "masked_softmax", "cross_entropy")
SITUATIONS = ({}, {"microbatches": 2}, {"recompute": "full"}, {"kernels": KERNELS})


def code_of(joint: Joint) -> str:
    graphs = [getattr(joint, name) for name in HALVES]
    return "\n".join(str(graph.python_code("self").src) for graph in graphs if graph is not None)


def code(lowered: Lowered) -> str:
    ending = [lowered.ending.joint] if lowered.ending else []
    return "\n".join(map(code_of, (*lowered.joints, *ending)))


def planned(name: str, preset: str | None, how: dict):
    torch.manual_seed(0)
    model = ZOO[name].build()
    _, batch = as_call(ZOO[name].inputs())
    batch = {
        key: x.repeat(8, *(1 for _ in x.shape[1:])) if isinstance(x, torch.Tensor) else x for key, x in batch.items()
    }
    request = Request(
        mesh=MESHES[2 if preset in (None, "megatron") else 1], parallel=preset, cluster=eager_links(), **how
    )
    graph = request.trace(model, batch)
    plan = plan_of(graph, request, time.monotonic())
    return request.as_planned(graph, plan), plan


def read_again(graph: Graph, plan: Plan, coordinate, gradients=True) -> None:
    """What is read of records equals what was lowered, by text, and is certified; nothing is lowered."""
    made = Records()
    first = lower(graph, plan, coordinate, gradients=gradients, records=made)
    kept = packed(made.data())
    graph, plan = Graph.from_json(graph.to_json()), Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    LOWERED.clear()
    known = Records(unpacked(kept))
    again = lower(graph, plan, coordinate, gradients=gradients, records=known)
    assert code(again) == code(first) and not known.lowered and str(again.program) == str(first.program)
    assert again.collectives == first.collectives
    assert packed(known.data()) == kept
    LOWERED.clear()


@pytest.mark.parametrize(("name", "preset", "how"), WAYS, ids=str)
def test_halves_are_the_same_code_after_they_were_written_and_read(name, preset, how):
    graph, plan = planned(name, preset, how)
    read_again(graph, plan, plan.mesh.coordinate(0))


@pytest.mark.nightly
@pytest.mark.parametrize("how", SITUATIONS, ids=str)
@pytest.mark.parametrize("preset", PRESETS, ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, *(name for name, _, _ in WAYS)])
def test_families_under_presets_in_situations(name, preset, how):
    try:
        graph, plan = planned(name, preset, how)
    except (BadConstraint, BadPreset, NotServed) as e:  # The preset or the situation does not fit the model.
        pytest.skip(e.what)
    read_again(graph, plan, plan.mesh.coordinate(0))
    if plan.microbatches == 1:
        read_again(graph, plan, plan.mesh.coordinate(3), gradients=False)
