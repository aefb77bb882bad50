"""Varlen attention of torch, flash_attn and transformers, against scaled_dot_product_attention of each document."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from autopar.graph.graph import info, op_name
from autopar.letters import NotServed
from autopar.runtime.sees import Sees
from autopar.tracer import ColoTracer

T, H, D = 19, 4, 6  # no other size is 19
BOUNDARIES = torch.tensor([0, 5, 6, 13, 13], dtype=torch.int32)  # the last is padding, and so are the last six places


def of_documents(query, key, value, boundaries, left=-1, right=-1, scale=None):
    """The attention of sequences that lie end to end, by one call and one mask for each."""
    out = torch.zeros_like(query)
    ends = boundaries.tolist()
    for first, last in itertools.pairwise(ends):
        i = torch.arange(last - first)
        distance = i[:, None] - i
        mask = ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        part = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        out = torch.cat([out[:first], part.transpose(0, 1), out[last:]])
    return out


class Packed(nn.Module):
    """Two calls of varlen attention; `attend(query, key, value, boundaries)` is one."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.inner = nn.Linear(8, (H + 2 * 2) * D).double()

    def forward(self, x, boundaries):
        total = 0
        for _ in range(2):
            query, key, value = self.inner(x).view(T, -1, D).split((H, 2, 2), 1)
            total = total + self.attend(query, key, value, boundaries)[:13].cos().sum((1, 2)).sin().sum()
        return total


def of_torch(**how):
    return lambda q, k, v, at: varlen_attn(q, k, v, at, at, 7, 7, enable_gqa=True, **how)


def inputs():
    return torch.randn(T, 8).double().requires_grad_(), BOUNDARIES


def gradients(run, model, x, boundaries):
    out = run(x, boundaries)
    return out, *torch.autograd.grad(out, [x, *model.parameters()])


def check(attend, **how):
    """The graph of `attend` computes what the oracle does, by two ops of attention that share their documents."""
    given, model = inputs(), Packed(attend)
    graph = ColoTracer().trace(model, given)
    mine = gradients(graph.module(model), model, *given)
    model.attend = lambda *operands: of_documents(*operands, **how)
    for one, other in zip(mine, gradients(model, model, *given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not [n for n in graph.nodes for t in info(n).outputs if t.shape.count(T) > 1]
    attends = [n for n in graph.nodes if op_name(n) == "attention"]
    assert len(attends) == 2 and attends[0].kwargs["documents"] is attends[1].kwargs["documents"]
    return Sees.of(attends[0].kwargs.get("sees", ""))


@pytest.mark.parametrize(
    ("how", "oracle", "sees"),
    [
        ({}, {}, Sees()),
        ({"window_size": (-1, 0)}, {"right": 0}, Sees(right=0)),
        ({"window_size": (3, 0), "scale": 0.3}, {"left": 3, "right": 0, "scale": 0.3}, Sees(3, 0, scale=0.3)),
        ({"window_size": (1, 2)}, {"left": 1, "right": 2}, Sees(1, 2)),
    ],
)
def test_varlen_attention_is_that_of_each_document(how, oracle, sees):
    assert check(of_torch(**how), **oracle) == sees


def test_what_the_op_does_not_have_is_a_letter():
    def other_keys(q, k, v, at):
        return varlen_attn(q, k, v, at, at + 1, 7, 7, enable_gqa=True)

    for attend, words in (
        (other_keys, "other boundaries of keys"),
        (of_torch(return_aux=AuxRequest(lse=True)), "return_aux="),
        (lambda q, k, v, at: varlen_attn(q, k, v, at, at, 7, 7), "of shapes"),
    ):
        with pytest.raises(NotServed, match=words) as e:
            ColoTracer().trace(Packed(attend), inputs())
        assert "test_varlen.py" in e.value.at and e.value.advice


@pytest.fixture
def flash_attn(monkeypatch):
    """A module with the functions of flash_attn, as far as their signatures."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        return of_documents(q, k, v, cu_seqlens_q, window_size[0], 0 if causal else window_size[1], softmax_scale)

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_func = flash_attn_varlen_func, flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


def test_functions_of_flash_attn_are_read(flash_attn):
    packed, padded = flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_func
    sees = check(lambda q, k, v, at: packed(q, k, v, at, at, 7, 7, causal=True, window_size=(2, 2)), left=2, right=0)
    assert sees == Sees(2, 0)
    assert packed(*torch.ones(3, 13, 1, 2), BOUNDARIES, BOUNDARIES, 7, 7).shape == (13, 1, 2)

    class Padded(nn.Module):
        def forward(self, x, y):
            return padded(x, y, y.sin(), causal=True).cos().sum()

    given = torch.randn(2, T, H, D), torch.randn(2, T, 2, D)
    graph = ColoTracer().trace(Padded(), given)
    torch.testing.assert_close(graph.module(Padded())(*given), Padded()(*given))
    assert "attention" in {op_name(n) for n in graph.nodes}
    with pytest.raises(NotServed, match="beside the last key"):
        ColoTracer().trace(Padded(), (given[0][:, :7], given[1]))
    with pytest.raises(NotServed, match=r"dropout_p=0.5"):
        ColoTracer().trace(Packed(lambda q, k, v, at: packed(q, k, v, at, at, 7, 7, 0.5)), inputs())


@pytest.mark.parametrize("by", ["places", "padding"])
def test_flash_attention_of_transformers_is_read(by, monkeypatch):
    """Without the package: a model's setting is all that its calls need while they are captured."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, attention_dropout=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).double()
    given = {"input_ids": torch.randint(0, 11, (1, T)), "use_cache": False}
    if by == "places":
        given["position_ids"] = torch.cat([torch.arange(8), torch.arange(T - 8)])[None]
    else:
        given["attention_mask"] = (torch.arange(T) >= 5).long()[None]
        # transformers asks whether the mask is all ones, a question of its own
        masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        monkeypatch.setitem(masks, "flash_attention_2", lambda *args, attention_mask, **how: attention_mask)
    first = 5 if by == "padding" else 0
    expected = model(**given).logits[:, first:]
    model.config._attn_implementation = "flash_attention_2"
    graph = ColoTracer().trace(model, given)
    found = graph.module(model)(**given).logits[:, first:]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # its norms compute in float32
    assert not [n for n in graph.nodes for t in info(n).outputs if t.shape.count(T) > 1]
    attends = [n for n in graph.nodes if op_name(n) == "attention"]
    assert [n.kwargs["sees"] for n in attends] == ["left=3 right=0 scale=0.5"] * 2
    ends = torch.tensor([0, 8, T], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    if by == "places":
        with pytest.raises(NotServed, match="other boundaries of keys"):  # two inputs may differ in the next call
            ColoTracer().trace(model, {**given, **lengths})
