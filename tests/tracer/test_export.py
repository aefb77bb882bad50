"""torch.export as an oracle: another capture of the same model, by other means, computes the same outputs and
gradients.
"""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from autopar.tracer import ColoTracer
from tests.shares import one_in
from tests.zoo.families import without_dropout
from tests.zoo.replay import as_call, compare, run
from tests.zoo.tables import ZOO

MODELS = (
    "hf_gpt2",
    "hf_gpt2_eager",
    "hf_llama",
    "hf_mistral",
    "hf_qwen3",
    "hf_gemma3",
    "hf_phi3",
    "hf_falcon",
    "hf_opt",
    "hf_olmo2",
    "hf_mixtral_batched_mm",
    "hf_deepseekv3_batched_mm",
    "hf_bert",
    "hf_roberta",
    "hf_albert",
    "hf_distilbert",
    "hf_t5",
    "hf_bart",
    "hf_vit",
    "hf_swin",
    "hf_convnext",
    "hf_resnet",
    "hf_clip",
    "hf_whisper",
)


@pytest.mark.parametrize("name", one_in(2, sorted(MODELS, key=lambda name: "mixtral" in name)))
def test_export_computes_the_same(name):
    logging.getLogger("torch").setLevel(logging.ERROR)
    entry = ZOO[name]
    torch.manual_seed(0)
    model = without_dropout(entry.build)
    args, kwargs = as_call(entry.inputs())
    graph = ColoTracer().trace(model, kwargs or args, assume=entry.assume)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, args, kwargs, strict=False).module(check_guards=False)
    start = {n: b.detach().clone() for n, b in model.named_buffers()}
    expected = run(exported, exported, args, kwargs)
    for n, b in model.named_buffers():  # the two share them
        b.copy_(start[n])
    actual = run(graph.module(model), model, args, kwargs)
    names = set(actual.gradients)
    assert names <= {n for n, _ in exported.named_parameters(remove_duplicate=False)}
    grads = {n: p.grad for n, p in exported.named_parameters(remove_duplicate=False) if n in names}
    expected.gradients, expected.generator = grads, actual.generator
    expected.buffers = {n: b for n, b in expected.buffers.items() if n in actual.buffers}
    actual.buffers = {n: b for n, b in actual.buffers.items() if n in expected.buffers}
    compare(actual, expected, name)
