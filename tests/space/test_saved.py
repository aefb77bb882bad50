"""The table of saved bytes: on a CPU against what autograd really packs, on a GPU against what its kernels are known
not to keep.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from autopar import Cluster
from autopar.graph.graph import Assume, info, op_name
from autopar.space import backward_kernels
from autopar.space.saved import Memories, saved, saved_bytes
from autopar.tracer import ColoTracer
from tests.zoo.replay import as_call
from tests.zoo.tables import ZOO

CPU = replace(Cluster.of("generic"), device=replace(Cluster.of("generic").device, kernels="cpu"))
EXACT = (
    "hf_gpt2_eager",
    "hf_llama",
    "hf_llama_eager",
    "hf_mistral",
    "hf_qwen3",
    "hf_gemma2_eager",
    "hf_gemma3",
    "hf_phi3",
    "hf_gptneox",
    "hf_gptj_eager",
    "hf_bloom_eager",
    "hf_opt",
    "hf_olmo2",
    "hf_mixtral_batched_mm",
    "hf_bert_eager",
    "hf_albert",
    "hf_bart",
    "hf_vit",
    "hf_convnext",
    "hf_clip",
    "hf_whisper",
)
NEAR = (
    "hf_gpt2",
    "hf_bert",
    "hf_t5",
    "hf_swin",
    "hf_resnet",
    "hf_mamba_eager",
    "hf_detr",
    "hf_wav2vec2_nolabel",
)  # torch's plain attention with dropout on a CPU makes copies that are not in the table


def packed(graph, model, args, kwargs) -> int:
    """Bytes that autograd packs in one forward, each memory once, without what is there anyway."""
    there = {
        t.untyped_storage()._cdata
        for t in (
            *model.parameters(),
            *model.buffers(),
            *args,
            *(v for v in kwargs.values() if isinstance(v, torch.Tensor)),
        )
    }
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in there:
            held[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        graph.module(model)(*args, **kwargs)
    return sum(s.nbytes() for s in held.values())


@pytest.mark.parametrize(
    "name, tolerance",
    [
        pytest.param(n, t, marks=[pytest.mark.nightly] if "mixtral" in n else [])
        for names, t in ((EXACT, 0.001), (NEAR, 0.14))
        for n in names
    ],
)
def test_the_table_is_what_autograd_packs(name, tolerance):
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.build().train()
    args, kwargs = as_call(entry.inputs())
    graph = ColoTracer().trace(model, kwargs or args, assume=entry.assume)
    assert saved_bytes(graph, CPU) == pytest.approx(packed(graph, model, args, kwargs), rel=tolerance)


def test_a_plan_for_a_gpu_made_on_a_laptop_shows_no_square_of_the_sequence():
    length = 8192
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2)).to(torch.bfloat16).train()
        ids = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    graph = ColoTracer().trace(model, batch, assume=Assume(no_padding=True))
    attention = [n for n in graph.nodes if op_name(n) == "scaled_dot_product_attention"]
    assert len(attention) == 2 and all(n.kwargs["is_causal"] and "attn_mask" not in n.kwargs for n in attention)
    assert not [n for n in graph.nodes for t in info(n).outputs if t.shape.count(length) > 1]
    assert any("no padding (declared), at masking_utils.py:" in a for a in graph.assumptions)
    table = saved(graph, "h100")
    assert not [row for row in table if row.shape and row.shape.count(length) > 1]
    made = {
        row.node: row.nbytes for row in table if row.what.endswith("scaled_dot_product_attention") and row.shape is None
    }
    assert set(made.values()) == {4 * 32 * length}  # one float32 a row of each of 32 heads
    # What is not declared is not assumed: padding is an operand, and no square either.
    padded = ColoTracer().trace(model, batch)
    assert [n.kwargs["counts"] is not None for n in padded.nodes if op_name(n) == "attention"] == [True, True]
    assert not [n for n in padded.nodes for t in info(n).outputs if t.shape.count(length) > 1]


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "hf_qwen3", "hf_bert", "hf_bart", "hf_opt"])
def test_without_padding_the_declared_graph_computes_the_same(name):
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.build().eval()
    _, kwargs = as_call(entry.inputs())
    graph = ColoTracer().trace(model, kwargs, assume=Assume(no_padding=True))
    assert not any(
        n.kwargs.get("attn_mask") is not None for n in graph.nodes if op_name(n) == "scaled_dot_product_attention"
    )
    torch.testing.assert_close(graph.module(model)(**kwargs).logits, model(**kwargs).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("error", "is_told"), [(NotImplementedError("no kernel"), False), (TypeError("no arrays of meta tensors"), True)]
)
def test_a_backward_that_fails_on_meta_tensors_is_told_unless_torch_has_no_kernel_there(
    error, is_told, monkeypatch, caplog
):
    def fails(*_):
        raise error

    graph = ColoTracer().trace(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    monkeypatch.setattr(backward_kernels, "_gradient", fails)
    assert not backward_kernels.backwards(graph, Memories.of(graph, "cpu").lies, "cpu")
    assert ("the backward of linear fails on meta tensors" in caplog.text) is is_told
