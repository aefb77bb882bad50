"""Masks of flex_attention are read: graphs against torch's flex_attention, and the letters about what no mask says."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

from autopar.graph.graph import info, op_name
from autopar.letters import NotCaptured, NotServed
from autopar.runtime.sees import Sees
from autopar.tracer import ColoTracer

B, H, S, D = 2, 4, 19, 6  # no other size is 19


@pytest.fixture(autouse=True)
def _torch_differentiates_flex_attention_on_a_cpu(monkeypatch):
    """Its formula is there, behind a check of the device."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", {"flex_attention_performance"}, raising=False)


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv, doc):
    return doc[b, q] == doc[b, kv]


class Attends(nn.Module):
    """Two calls of flex_attention whose mask is made by `masked(model, doc, lengths)`, with grouped heads."""

    def __init__(self, masked, score_mod=None, flex=flex_attention, scale=None):
        super().__init__()
        self.masked, self.score_mod, self.flex, self.scale = masked, score_mod, flex, scale
        self.inner = nn.Linear(8, (H + 2 * 2) * D).double()
        self.register_buffer("doc", (torch.arange(2 * S) // 7).expand(B, -1).clone())

    def forward(self, x, doc, lengths):
        mask = self.masked(self, doc, lengths)
        block = mask if mask is None or isinstance(mask, flex.BlockMask) else made(mask)
        total = 0
        for _ in range(2):
            query, key, value = self.inner(x).view(B, S, -1, D).transpose(1, 2).split((H, 2, 2), 1)
            change = self.score_mod
            out = self.flex(query, key, value, score_mod=change, block_mask=block, scale=self.scale, enable_gqa=True)
            total = total + out.cos().sum((1, 3)).sin().sum()
        return total


def made(mask_mod):
    return create_block_mask(mask_mod, B, None, S, S, device="cpu")


def inputs():
    doc = torch.tensor([[0] * 4 + [1] * 9 + [2] * 6, [5] * 10 + [3] * 9])
    return torch.randn(B, S, 8).double().requires_grad_(), doc, torch.tensor([S, 11])


def graph_of(model, given=None):
    return ColoTracer().trace(model, given or inputs())


def gradients(run, model, x, *rest):
    out = run(x, *rest)
    return out, *torch.autograd.grad(out, [x, *model.parameters()])


def check(model):
    """The graph computes what the model does, and is one op of attention a call, without a tensor of S x S."""
    given = inputs()
    graph = graph_of(model, given)
    expected = gradients(model, model, *given)
    for mine, other in zip(gradients(graph.module(model), model, *given), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    nodes = [n for n in graph.nodes if info(n).kind == "op"]
    assert not [n for n in graph.nodes for t in info(n).outputs if t.shape.count(S) > 1 or 2 * S in t.shape[2:]]
    attends = [n for n in nodes if op_name(n) == "attention"]
    assert len(attends) == 2
    assert attends[0].kwargs.get("documents") is attends[1].kwargs.get("documents")
    return Sees.of(attends[0].kwargs.get("sees", "")), {k for k in ("documents", "counts") if attends[0].kwargs.get(k)}


def with_documents(*others):
    return lambda m, doc, n: and_masks(functools.partial(documents, doc=doc), *others)


MASKS = {
    "none": (lambda m, doc, n: None, Sees(), set()),
    "causal": (lambda m, doc, n: causal, Sees(right=0), set()),
    "strictly before": (lambda m, doc, n: lambda b, h, q, kv: kv < q, Sees(right=-1), set()),
    "window": (lambda m, doc, n: lambda b, h, q, kv: (q - kv < 5) & (kv - q <= 2), Sees(4, 2), set()),
    "about": (lambda m, doc, n: lambda b, h, q, kv: abs(q - kv) <= 3, Sees(3, 3), set()),
    "slid": (lambda m, doc, n: lambda b, h, q, kv: torch.logical_and(kv > q - 4, ~(kv > q)), Sees(3, 0), set()),
    "chunks": (lambda m, doc, n: lambda b, h, q, kv: (q // 6 == kv // 6) & (q >= 0), Sees(chunk=6), set()),
    "documents": (with_documents(), Sees(), {"documents"}),
    "causal in documents": (with_documents(causal), Sees(right=0), {"documents"}),
    "window in documents": (
        with_documents(causal, lambda b, h, q, kv: q - kv < 4),
        Sees(left=3, right=0),
        {"documents"},
    ),
    "one row of documents": (
        lambda m, doc, n: lambda b, h, q, kv: (m.doc[0, q + 0] == m.doc[0, kv]).bool() & True,
        Sees(),
        {"documents"},
    ),
    "lengths": (lambda m, doc, n: lambda b, h, q, kv: kv < n[b], Sees(), {"counts"}),
    "lengths of queries too": (
        lambda m, doc, n: lambda b, h, q, kv: (kv < n[b]) & (q < n[b]) & (q >= kv),
        Sees(right=0),
        {"counts"},
    ),
    "what counts": (
        lambda m, doc, n: lambda b, h, q, kv: (doc != 0)[b][kv] & (m.doc[b, kv] != 1),
        Sees(),
        {"counts"},
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_read(name):
    masked, sees, operands = MASKS[name]
    assert check(Attends(masked)) == (sees, operands)


def test_a_block_mask_may_be_made_outside_forward():
    """Its function holds the module's buffer itself, or the module."""
    model = Attends(lambda m, doc, n: m.block)
    doc = model.doc
    model.block = made(lambda b, h, q, kv: (doc[b, q] == doc[b, kv]) & (q >= kv) & (model.doc[b, kv] < 2))
    assert check(model) == (Sees(right=0), {"documents", "counts"})
    assert torch.is_tensor(model.block.kv_indices) and "DescribedMask" not in str(type(model.block))


SCORES = {
    "softcap": (lambda s, b, h, q, kv: 0.7 * torch.tanh(s / 0.7), None, Sees(softcap=0.7)),
    "methods": (lambda s, b, h, q, kv: s.mul(1 / 0.7).tanh().mul(0.7), None, Sees(softcap=0.7)),
    "with a scale": (lambda s, b, h, q, kv: torch.tanh(s / 2.0) * 2, 0.3, Sees(softcap=2.0, scale=0.3)),
    "scaled": (lambda s, b, h, q, kv: s * 2, None, Sees(scale=2 / math.sqrt(D))),
    "the score": (lambda s, b, h, q, kv: s, None, Sees()),
    "masked": (lambda s, b, h, q, kv: torch.where(q - kv <= 2, s, -math.inf), None, Sees(left=2)),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_change_of_scores_is_read(name):
    change, scale, sees = SCORES[name]
    assert check(Attends(lambda m, doc, n: None, change, scale=scale))[0] == sees


REFUSED = {
    "a prefix": (lambda b, h, q, kv: (kv < 4) | (q >= kv), "(kv_idx < 4) | (q_idx >= kv_idx)"),
    "either mask": (or_masks(causal, lambda b, h, q, kv: kv < 4), "(False | (q_idx >= kv_idx)) | (kv_idx < 4)"),
    "by heads": (lambda b, h, q, kv: (q >= kv) & (h % 2 == 0), ": (h % 2) == 0"),
    "dilated": (lambda b, h, q, kv: (q >= kv) & ((q - kv) % 2 == 0), ": ((q_idx - kv_idx) % 2) == 0"),
    "random": (lambda b, h, q, kv: torch.rand_like(q * 1.0) < 0.5, "(rand_like(q_idx * 1.0)) < 0.5"),
    "a question": (lambda b, h, q, kv: q >= kv and q < 3, "asks for the value of q_idx >= kv_idx"),
    "a sum": (lambda b, h, q, kv: (q + kv < 9) & (q >= kv), ": (q_idx + kv_idx) < 9"),
    "nothing": (lambda b, h, q, kv: (q >= kv) & False, ": False"),
    "a row": (lambda b, h, q, kv: torch.arange(9)[None, q] == 1, "looks up arange[None, q_idx]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_term_is_named_in_a_letter_with_its_line(name):
    mask, words = REFUSED[name]
    with pytest.raises(NotServed) as e:
        graph_of(Attends(lambda m, doc, n: mask))
    assert words in e.value.what and e.value.advice
    assert "test_flex_attention.py" in e.value.at or name == "nothing"


def test_other_changes_of_scores_and_results_are_letters():
    slopes = torch.rand(H)
    alibi = Attends(lambda m, doc, n: None, lambda s, b, h, q, kv: s + (kv - q) * 0.5)
    with pytest.raises(NotServed, match=r"score \+ \(\(kv_idx - q_idx\) \* 0.5\)"):
        graph_of(alibi)
    with pytest.raises(NotCaptured, match="from outside the model"):
        graph_of(Attends(lambda m, doc, n: None, lambda s, b, h, q, kv: s + slopes[h] * (kv - q)))
    with pytest.raises(NotServed, match="return_lse=True"):
        graph_of(Attends(lambda m, doc, n: None, flex=functools.partial(flex_attention, return_lse=True)))


def test_a_block_mask_of_an_input_or_of_another_length_or_read_itself_is_a_letter():
    model, given = Attends(lambda m, doc, n: doc), inputs()
    with pytest.raises(NotServed, match="the input 1 is a block mask"):
        graph_of(model, (given[0], made(causal), given[2]))
    with pytest.raises(NotServed, match="for 19 queries"):
        graph_of(Attends(lambda m, doc, n: create_block_mask(causal, B, None, S + 1, S + 1, device="cpu")))
    with pytest.raises(NotServed, match="reads the blocks"):
        graph_of(Attends(lambda m, doc, n: [made(causal)][made(causal).kv_num_blocks.sum() * 0]))


def test_functions_of_torch_are_as_before_and_a_mask_that_is_kept_has_its_blocks():
    kept = []

    def masked(model, doc, n):
        kept.append(made(causal))
        return kept[-1]

    before = flex_attention.__code__, create_block_mask.__code__, flex_attention.__kwdefaults__
    graph_of(Attends(masked))
    assert before == (flex_attention.__code__, create_block_mask.__code__, flex_attention.__kwdefaults__)
    assert torch.equal(kept[0].to_dense(), made(causal).to_dense())


class Casts(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *given):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*given)


def test_a_compiled_function_is_captured_too_and_autocast_casts_its_operands():
    model = Casts(Attends(lambda m, doc, n: causal, flex=torch.compile(flex_attention)).float())
    x, *rest = inputs()
    graph = graph_of(model, (x.float(), *rest))
    dtypes = [info(n).outputs[0].dtype for n in graph.nodes if op_name(n) == "attention"]
    assert dtypes == ["bfloat16", "bfloat16"]
