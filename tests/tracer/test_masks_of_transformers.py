"""Masks of transformers as descriptions: the values of eager torch, and no tensor of queries by keys in the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from autopar.graph.graph import Assume, info, type_of
from autopar.graph.nodes import op_name
from autopar.letters import NotServed
from autopar.testing import Equality
from autopar.tracer import ColoTracer
from tests.zoo.masks import LENGTH, MODELS, SIZES, build, positions

KINDS = ("plain", "right", "left", "packed")
EAGER_ALONE = ("Gemma 2", "gpt-oss")
DAILY = {
    ("LLaMA", "sdpa", "left"),
    ("LLaMA", "eager", "plain"),
    ("Mistral", "sdpa", "packed"),
    ("Gemma 3", "sdpa", "right"),
    ("Gemma 3", "eager", "packed"),
    ("Gemma 2", "eager", "packed"),
    ("gpt-oss", "eager", "left"),
    ("ModernBERT", "sdpa", "left"),
    ("LLaMA 4", "sdpa", "left"),
}
CASES = [
    pytest.param(*case, marks=() if case in DAILY else pytest.mark.nightly, id=", ".join(case))
    for case in ((m, a, k) for m in MODELS for a in ("sdpa", "eager") for k in KINDS)
    if (case[1] == "eager" or case[0] not in EAGER_ALONE)
    and (case[1] == "sdpa" or case[2] in ("plain", "packed") or case[0] == "gpt-oss")
]


def batch(kind, model=None):
    ids = torch.randint(3, 32, (2, LENGTH))
    given = dict(input_ids=ids, labels=ids.clone())
    if not isinstance(model, transformers.ModernBertForMaskedLM):
        given["use_cache"] = False
    if kind in ("right", "left"):
        places = torch.arange(LENGTH).expand(2, LENGTH)
        padding = torch.tensor([[9], [20]])
        counts = places < LENGTH - padding if kind == "right" else places >= padding
        given["attention_mask"] = counts.long()
    if kind == "packed":
        given["position_ids"] = positions((10, 20, 7), (30, 7))
    return given


def step(forward, model, given):
    """The loss and all gradients."""
    model.zero_grad()
    loss = forward(**given)["loss"]
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.fixture
def in_double(monkeypatch):
    """Let eager functions of transformers take their softmax in double precision, where they ask for single."""
    plain = F.softmax

    def switch(is_on):
        wide = (lambda x, dim=None, dtype=None: plain(x, dim)) if is_on else plain
        monkeypatch.setattr(F, "softmax", wide)

    return switch


def of_pairs(graph):
    """Names of values that have a number for each query and key."""
    values = (n for n in graph.nodes if n.op != "output")
    return [n.name for n in values if sum(size == LENGTH for size in getattr(type_of(n), "shape", ())) > 1]


def attentions(graph):
    return [n for n in graph.nodes if op_name(n) in ("attention", "scaled_dot_product_attention")]


@pytest.mark.parametrize(("name", "attention", "kind"), CASES)
def test_no_tensor_of_queries_by_keys(name, attention, kind, in_double):
    model = build(name, attention)
    given = batch(kind, model)
    in_double(True)
    expected = step(model, model, given)
    in_double(False)
    graph = ColoTracer().trace(model, given)
    assert of_pairs(graph) == []
    assert len(attentions(graph)) == 2
    found = step(graph.module(model), model, given)
    Equality.in_float64(name, found, expected, 1e-9).check()


def test_one_graph_serves_all_positions():
    """Restarts, jumps, rows that begin elsewhere, and no document at all: chunks follow what transformers does."""
    model = build("LLaMA 4", "sdpa")
    given = batch("packed", model)
    forward = ColoTracer().trace(model, given).module(model)
    places = torch.arange(LENGTH)
    for name, rows in {
        "restarted": positions((3, 30, 4), (LENGTH,)),
        "plain": places.expand(2, LENGTH),
        "begun elsewhere": places.expand(2, LENGTH) + 5,
        "one begun elsewhere, one restarted": torch.stack([places + 3, positions((20, 17))[0]]),
        "with a jump": torch.where(places < 11, places, places + 6).expand(2, LENGTH),
    }.items():
        given["position_ids"] = rows
        Equality.in_float64(name, step(forward, model, given), step(model, model, given), 1e-9).check()


def test_rows_are_one_sequence_where_that_is_declared():
    model = build("LLaMA", "sdpa")
    given = batch("packed") | {"attention_mask": None}
    graph = ColoTracer().trace(model, given, assume=Assume(no_padding=True))
    assert all(n.kwargs["is_causal"] for n in attentions(graph))
    assert any("positions do not restart in a row: no padding (declared)" in line for line in graph.assumptions)


def test_causal_attention_needs_no_declaration():
    """Positions that the model makes itself are known, so that rows are not divided."""
    model = build("LLaMA", "sdpa")
    given = batch("plain")
    graph = ColoTracer().trace(model, given)
    declared = ColoTracer().trace(model, given, assume=Assume(no_padding=True))
    assert graph.digest == declared.digest
    assert all(n.kwargs["is_causal"] and n.kwargs.get("attn_mask") is None for n in attentions(graph))


def test_the_length_of_documents_is_declared():
    model = build("Mistral", "sdpa")
    graph = ColoTracer().trace(model, batch("packed"), assume=Assume(documents=5))
    assert [n.kwargs["sees"].split()[-1] for n in attentions(graph)] == ["length=5"] * 2
    assert "documents are priced as 5 places each (declared)" in graph.assumptions
    graph = ColoTracer().trace(model, batch("packed"))
    assert "documents are priced as one a row, an upper bound of their work" in graph.assumptions
    for wrong in (0, 2.5, True):
        with pytest.raises(NotServed, match="not a length of documents"):
            Assume(documents=wrong)


def test_single_precision_under_autocast():
    """As attention of torch, whose operands are cast."""
    model = build("Mistral", "sdpa").float()
    given = batch("left")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**given).loss
        graph = ColoTracer().trace(model, given)
    assert {type_of(n.kwargs[x]).dtype for n in attentions(graph) for x in ("query", "key", "value")} == {"bfloat16"}
    torch.testing.assert_close(graph.module(model)(**given)["loss"], expected, rtol=1e-2, atol=1e-2)


# -- what stays a tensor of queries by keys is said, and computes what it did


class Attention(nn.Module):
    """One attention of transformers, with a mask and a function to choose."""

    def __init__(self, mask, function, attention="eager", dropout=0.0):
        super().__init__()
        config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
        self.config, self.mask, self.function, self.dropout = config, mask, function, dropout
        self.num_key_value_groups = 1
        self.linear = nn.Linear(8, 8).double()
        self.register_buffer("bias", torch.randn(LENGTH, LENGTH, dtype=torch.float64))

    def forward(self, x, attention_mask=None):
        mask = self.mask(self.config, x, attention_mask)
        heads = self.linear(x).view(2, LENGTH, 2, 4).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.function)
        out, _ = attend(self, heads, heads, heads, mask, scaling=0.5, dropout=self.dropout)
        return out.sin().sum()


def causal(config, x, attention_mask, **how):
    return create_causal_mask(config, x, attention_mask, None, **how)


def written(config, x, attention_mask):
    mask = causal(config, x, attention_mask)
    mask[:, :, :, 0] = 0.0
    return mask


def hot(module, query, key, value, mask, scaling, **how):
    return eager_attention_forward(module, query, key, value, mask, scaling * 1.1)


def biased(module, query, key, value, mask, scaling, **how):
    return eager_attention_forward(module, query, key, value, mask + module.bias, scaling)


def every_third(batch, head, q, kv):
    return (q - kv) % 3 == 0


PLAIN = eager_attention_forward
TOLD = {
    "own term": (
        lambda *a: causal(*a, or_mask_function=every_third),
        PLAIN,
        "by any one of causal_mask_function, every_third",
    ),
    "another term": (
        lambda *a: causal(*a, and_mask_function=every_third),
        PLAIN,
        "every_third of test_masks_of_transformers adds a term",
    ),
    "written": (written, PLAIN, ""),
    "other values": (causal, hot, "hot is not softmax"),
    "a tensor beside": (causal, biased, "biased is not softmax"),
    "padding": (causal, PLAIN, "a query that sees only padding gets the mean of all values"),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_rest_is_told(name):
    mask, function, words = TOLD[name]
    model = Attention(mask, function)
    given = {"x": torch.randn(2, LENGTH, 8, dtype=torch.float64)}
    if name == "padding":
        given["attention_mask"] = torch.arange(LENGTH).expand(2, LENGTH) < 30
    graph = ColoTracer().trace(model, given)
    assert not attentions(graph) and of_pairs(graph)
    assert any(words in line for line in graph.assumptions) or not words
    torch.testing.assert_close(graph.module(model)(**given), model(**given))


def test_weights_that_are_dropped_are_told():
    graph = ColoTracer().trace(
        Attention(causal, PLAIN, dropout=0.5), {"x": torch.randn(2, LENGTH, 8, dtype=torch.float64)}
    )
    assert not attentions(graph) and "it drops weights of attention" in graph.assumptions[-1]


def test_terms_of_transformers_itself_are_read_wherever_they_stand():
    def narrow(config, x, attention_mask):
        return causal(config, x, attention_mask, and_mask_function=sliding_window_overlay(5))

    model = Attention(narrow, PLAIN)
    given = {"x": torch.randn(2, LENGTH, 8, dtype=torch.float64)}
    graph = ColoTracer().trace(model, given)
    assert [n.kwargs["sees"] for n in attentions(graph)] == ["left=4 right=0 scale=0.5"]
    assert [info(n).kind for n in graph.nodes].count("input") == 1 and not of_pairs(graph)
    torch.testing.assert_close(graph.module(model)(**given), model(**given))
