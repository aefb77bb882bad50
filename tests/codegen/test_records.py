"""Halves as data: written and read again they are the same code, are certified, and are not lowered a second time."""

from __future__ import annotations

import functools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

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


def read(graph: str, plan: str, kept: bytes, coordinate, gradients: bool) -> tuple:
    """A program that is read of records: what it is as text, what was lowered all the same, and the records again."""
    LOWERED.clear()
    known = Records(unpacked(kept))
    again = lower(
        Graph.from_json(graph), Plan.from_dict(json.loads(plan)), coordinate, gradients=gradients, records=known
    )
    LOWERED.clear()
    return code(again), str(again.program), again.collectives, known.lowered, packed(known.data())


def read_again(graph: Graph, plan: Plan, coordinate, gradients=True, run=lambda f, *given: f(*given)) -> None:
    """What is read of records equals what was lowered, by text, and is certified; nothing is lowered."""
    made = Records()
    first = lower(graph, plan, coordinate, gradients=gradients, records=made)
    kept = packed(made.data())
    told = graph.to_json(), json.dumps(plan.to_dict()), kept, coordinate, gradients
    *same, lowered, again = run(read, *told)
    assert same == [code(first), str(first.program), first.collectives] and not lowered
    assert again == kept
    LOWERED.clear()


def beside_the_model(name: str, function, *given):
    """The result of a function in a process that builds a model, as a script does, and neither traces nor plans it."""
    ZOO[name].build()
    return function(*given)


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function in another process, beside the model of this name."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield lambda *given: process.submit(beside_the_model, *given).result(timeout=300)


@pytest.mark.parametrize(("name", "preset", "how"), WAYS, ids=str)
def test_halves_are_the_same_code_after_they_were_written_and_read(name, preset, how):
    graph, plan = planned(name, preset, how)
    read_again(graph, plan, plan.mesh.coordinate(0))


@pytest.mark.nightly
@pytest.mark.parametrize("how", SITUATIONS, ids=str)
@pytest.mark.parametrize("preset", PRESETS, ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, *(name for name, _, _ in WAYS)])
def test_families_under_presets_in_situations(name, preset, how, elsewhere):
    run = functools.partial(elsewhere, name)
    try:
        graph, plan = planned(name, preset, how)
    except (BadConstraint, BadPreset, NotServed) as e:  # The preset or the situation does not fit the model.
        pytest.skip(e.what)
    read_again(graph, plan, plan.mesh.coordinate(0), run=run)
    if plan.microbatches == 1:
        read_again(graph, plan, plan.mesh.coordinate(3), gradients=False, run=run)
