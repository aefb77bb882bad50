"""Loops over experts are captured with shapes that stay, and compute what eager computes, gradients too."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from autopar.graph.graph import op_name
from autopar.letters import NotCaptured
from autopar.testing import Equality
from autopar.tracer import ColoTracer, passes
from tests.shares import diagonal
from tests.tracer.loops_over_experts import (
    EXPERTS,
    HIDDEN,
    ROUTES,
    TOKENS,
    WAYS,
    Dividing,
    Overflowing,
    case,
    run,
    where_and_index_add,
    written_under_a_mask,
)


@pytest.mark.parametrize("folds, way", diagonal([True, False], WAYS), ids=lambda of: getattr(of, "__name__", str(of)))
def test_a_loop_computes_what_eager_does(way, folds, monkeypatch):
    model, x, direction = case(way)
    if not folds:
        others = tuple(one for one in passes.PASSES if one is not passes.loops_over_experts_are_folded)
        monkeypatch.setattr(passes, "PASSES", others)
    graph = ColoTracer().trace(model, {"x": x, "push": ROUTES["random"].double()})
    captured = graph.module(copy.deepcopy(model))
    for route, push in ROUTES.items():
        expected = run(model, x, push.double(), direction)
        Equality.in_float64(route, run(captured, x, push.double(), direction), expected, 1e-12).check()


TINY = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
IDS = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(0))
FAMILIES = {  # Hugging Face's own loops: configuration, and the class
    "Mixtral": (dict(TINY, intermediate_size=24, num_local_experts=4), "ForCausalLM"),
    "Dbrx": (
        dict(
            d_model=16,
            n_heads=2,
            n_layers=1,
            vocab_size=32,
            max_seq_len=32,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
            ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, moe_loss_weight=0.0),
        ),
        "ForCausalLM",
    ),
    "SwitchTransformers": (
        dict(
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=2,
            num_experts=4,
            expert_capacity=3,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            decoder_start_token_id=0,
        ),
        "ForConditionalGeneration",
    ),
    "NllbMoe": (
        dict(
            vocab_size=32,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            num_experts=4,
            encoder_sparse_step=1,
            decoder_sparse_step=1,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            moe_token_dropout=0.0,
            decoder_start_token_id=2,
        ),
        "ForConditionalGeneration",
    ),
    "LongcatFlash": (
        dict(
            TINY,
            num_layers=1,
            num_hidden_layers=2,
            ffn_hidden_size=24,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            head_dim=8,
            v_head_dim=8,
            moe_topk=2,
            n_routed_experts=3,
            zero_expert_num=1,
            expert_ffn_hidden_size=24,
        ),
        "ForCausalLM",
    ),
}


FOLDED = {"SwitchTransformers": 2, "NllbMoe": 0}  # NLLB's masks have a slot for each expert: nothing is saved


@pytest.mark.parametrize("family", FAMILIES)
def test_loops_of_hugging_face_compute_what_eager_does(family):
    torch.manual_seed(0)
    said, kind = FAMILIES[family]
    model = getattr(transformers, f"{family}{kind}")(getattr(transformers, f"{family}Config")(**said))
    model.config._experts_implementation = "eager"
    model.double().train()
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.dtype = torch.float64  # the type in which a router computes
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    batch = {"input_ids": IDS, "labels": IDS}
    graph = ColoTracer().trace(model, batch)
    assert sum(op_name(node) == "experts" for node in graph.nodes) == FOLDED.get(family, 1)
    found = [gradients(one(**batch).loss, model) for one in (graph.module(model), model)]
    Equality.in_float64(family, *found, 1e-6).check()  # LongCat's router computes in float32


def gradients(loss, model):
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    zeros = (torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values(), strict=True))
    return {"loss": loss.detach(), **dict(zip(parameters, zeros, strict=True))}


def test_what_jetmoe_splits_by_counts_is_a_letter():
    torch.manual_seed(0)
    said = dict(TINY, kv_channels=8, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    del said["num_attention_heads"]
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**said))
    with pytest.raises(NotCaptured, match="asks for the value of a tensor"):
        ColoTracer().trace(model, {"input_ids": IDS, "labels": IDS})


@pytest.mark.parametrize("way", [where_and_index_add, written_under_a_mask], ids=lambda way: way.__name__)
def test_rows_that_are_not_chosen_may_divide_by_zero_and_overflow(way):
    """A row of zeros goes to expert 3, where the others overflow; in the others its slope is infinite."""
    model, x, direction = case(way, Dividing)
    model.top = 1
    model.experts[3] = Overflowing().double()
    x = x.detach()
    x[::3] = 0
    with torch.no_grad():
        model.router.weight.mul_(0.1)
    push = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    push[::3, 3] = push[1::3, 0] = push[2::3, 1] = 50
    graph = ColoTracer().trace(model, {"x": x.clone().requires_grad_(), "push": push})
    expected = run(model, x, push, direction)
    assert all(t.isfinite().all() for t in expected.values())
    Equality.in_float64("rows of zeros", run(graph.module(model), x, push, direction), expected, 1e-12).check()


def chosen(m, x):
    return x[(x @ m.router.weight.T).argmax(-1) == 0]


def kept_numbers(m, x):
    hit = ((x > 0).sum(0) > 3).nonzero()
    for e in [int(e) for e in hit]:
        x = x + chosen(m, x).shape[1] + e
    return x


def a_value_behind_the_loop(m, x):
    total = x.sum()
    for e in ((x > 0).sum(0) > 3).nonzero():
        total = total + x[:, e].square().sum()
    return total


def over_two_masks(m, x):
    return x.index_add(0, (x[:, 0] > 0).nonzero()[:, 0], chosen(m, x))


def twice_written(m, x):
    out = x.clone()
    row, _ = torch.where(x > 0)
    out[row] = x[row] * 2
    return out


REFUSALS = {
    "a norm over rows": (lambda m, x: F.normalize(chosen(m, x), dim=0).sum(), "normalize does not treat each"),
    "their mean": (lambda m, x: chosen(m, x).mean(0), "mean does not treat each"),
    "sorted": (lambda m, x: x + chosen(m, x).sort(0).values[:1], "sort does not treat each"),
    "their number": (lambda m, x: x / chosen(m, x).shape[0], "computes with the number of rows"),
    "a mean by hand": (lambda m, x: chosen(m, x) / chosen(m, x).shape[0], "computes with the number of rows"),
    "a range of their number": (lambda m, x: x + len(range(chosen(m, x).size(0))), "computes with the number of rows"),
    "a value": (lambda m, x: x + chosen(m, x)[0, 0].item(), "getitem.* does not treat each|index does not treat each"),
    "returned": (lambda m, x: chosen(m, x), "the model returns the chosen rows"),
    "two masks": (over_two_masks, "rows that two masks choose"),
    "places that may come twice": (twice_written, "may choose twice"),
    "a list of places": (kept_numbers, "no rows are chosen by them"),
    "a value behind the loop": (a_value_behind_the_loop, "used outside of it"),
    "batch norm": (lambda m, x: F.batch_norm(chosen(m, x), None, None, training=True).sum(), "batch_norm does not"),
}


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_looks_at_several_rows_is_a_letter(name):
    function, what = REFUSALS[name]
    with pytest.raises(NotCaptured, match=what) as letter:
        ColoTracer().trace(Of(function), {"x": torch.randn(TOKENS, HIDDEN)})
    assert "test_loops_over_experts.py" in str(letter.value) and letter.value.advice
