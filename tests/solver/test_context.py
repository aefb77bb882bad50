"""Presets that cut a sequence: they train as one device does, say what they do, and refuse what does not fit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.letters import BadPreset
from autopar.sharding.attention_ways import ways_of
from autopar.testing import Equality
from tests.training import whole

HEADS, VOCABULARY = 4, 40
AXES = ("dp", "cp", "tp")


class Reader(nn.Module):
    """A block with positions, four heads on two of keys, and a loss of the tokens that are not ignored."""

    def __init__(self, keys=2, mask=False, dropout=0.0):
        super().__init__()
        self.keys, self.mask, self.dropout = keys, mask, dropout
        self.words, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 2 * keys * 4), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, VOCABULARY)

    def forward(self, ids, labels):
        rows, length = ids.shape
        x = self.words(ids) + self.places(torch.arange(length))
        q, k, v = (
            y.view(rows, length, -1, 4).transpose(1, 2) for y in (self.q(x), *self.kv(x).split(self.keys * 4, -1))
        )
        how = dict(attn_mask=torch.ones(length, length, dtype=torch.bool).tril()) if self.mask else dict(is_causal=True)
        how |= dict(dropout_p=self.dropout, enable_gqa=self.keys != HEADS)
        seen = F.scaled_dot_product_attention(q, k, v, **how)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(rows, length):
    """Tokens and labels, of which most of the first positions are ignored and few of the last."""
    ids = torch.randint(0, VOCABULARY, (rows, length))
    is_ignored = torch.rand(rows, length) > torch.linspace(0.1, 1, length)
    return {"ids": ids, "labels": torch.where(is_ignored, -100, ids.flip(1))}


def planned(parallel, sizes, inputs=None, model=None, **how):
    """A plan on axes of data, context and tensor of these sizes, those of one device left out."""
    axes = [name for name, n in zip(AXES, sizes, strict=True) if n > 1]
    mesh = DeviceMesh(tuple(n for n in sizes if n > 1), tuple(axes))
    inputs = batch(2, 16) if inputs is None else inputs
    return autopar.plan(model or Reader(**how), inputs, mesh=mesh, parallel=parallel, memory_budget="inf")


TRAINED = {
    "gather and megatron": (dict(tensor=2, context=dict(size=2, how="gather")), (1, 2, 2), (2, 8)),
    "ulysses and zero3": (dict(data=dict(size=2, zero=3), context=dict(size=2, how="ulysses")), (2, 2, 1), (2, 12)),
    "ring and zero3, uneven": (dict(data=dict(size=1, zero=3), context=dict(size=3, how="ring")), (1, 3, 1), (1, 13)),
    "a ring, gathered inside": (dict(context=dict(size=4, how=("ring", "ring"))), (2, 2, 1), (1, 13)),
    "three axes": (dict(data=2, tensor=2, context=2), (2, 2, 2), (2, 8)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] if case == "three axes" else []) for case in TRAINED]
)
def test_a_cut_sequence_trains_as_one_device_does(case, threads):
    """Parts of a sequence of unequal lengths, whose labels are ignored unequally often, in float64."""
    parallel, sizes, shape = TRAINED[case]
    model, inputs = Reader().double(), batch(*shape)
    plan = planned(parallel, sizes, inputs, model)
    expected = copy.deepcopy(model)
    loss = expected(**inputs)
    loss.backward()
    right = {"loss": loss.detach(), **{name: p.grad for name, p in expected.named_parameters()}}

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), inputs, plan=plan)
        loss = mine(**inputs)
        loss.backward()
        return {"loss": loss.detach(), **{name: whole(p.grad) for name, p in mine.named_parameters()}}

    for found in threads(plan.mesh.size, body):
        Equality.in_float64(case, found, right, 1e-6).check()
    assert not [warning for warning in plan.warnings if "not kept to" in warning]
    products = [d for d in plan.decisions.values() if d.op == "linear"]
    assert all(d.choice.strategies[plan.mesh.axis("cp")].operands[0].value.is_shard for d in products)


@pytest.mark.parametrize("how, moved", [("ring", set()), ("gather", {"all_gather"}), ("ulysses", {"all_to_all"})])
def test_keys_move_as_a_preset_says(how, moved):
    """Around a ring inside the attention, gathered before it, or as heads; gradients are added up over the axis."""
    plan = planned(dict(context=dict(size=2, how=how)), (1, 2, 1))
    (name,) = (name for name, d in plan.decisions.items() if "attention" in d.op)
    of_values = [c for c in plan.conversions if c.source not in plan.parameters]
    moves = {step.kind for c in of_values for step in c.forward} - {"slice", "all_reduce"}
    assert moves == moved and ("send@cp" in plan.explain(name)) == (how == "ring")
    added = {c.source for c in plan.conversions if "all_reduce" in [step.kind for step in c.backward]}
    assert {"q.weight", "kv.weight", "up.weight", "head.weight"} <= added


def test_zero_cuts_parameters_over_data_and_context():
    """As Megatron's and torchtitan's do: copies along the replicas alone."""
    plan = planned(dict(data=dict(size=2, zero=3), context=2), (2, 2, 1))
    assert {"S(0)@dp, S(0)@cp", "S(1)@dp, S(1)@cp"} >= {s.text(plan.mesh.axes) for s in plan.parameters.values()}
    plan = planned(dict(data=dict(size=2, zero=3, replicas=2), context=2), (2, 2, 1))
    assert {"S(0)@cp", "S(1)@cp"} >= {s.text(plan.mesh.axes) for s in plan.parameters.values()}


WORDS = {
    "ring": "context parallel over 2 devices (keys in a ring)",
    "gather": "context parallel over 2 devices (keys gathered)",
    "ulysses": "sequence parallel over 2 devices (heads inside attention: Ulysses)",
}


@pytest.mark.parametrize("how", WORDS)
def test_the_plan_says_how_a_sequence_is_cut(how):
    assert str(planned(dict(context=dict(size=2, how=how)), (1, 2, 1))).splitlines()[2].split(None, 1)[1] == WORDS[how]


@pytest.mark.parametrize("keys, words", [(2, ("ring", "stepwise")), (8, ("ulysses", "ring"))])
def test_keys_of_few_heads_go_round_between_nodes_and_are_gathered_inside(keys, words):
    """Heads cannot be cut between nodes where few have keys of their own; else that is faster."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=keys, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.LlamaForCausalLM(config), torch.empty(4, 131072, dtype=torch.int64)
    plan = autopar.plan(
        model, {"input_ids": ids, "labels": ids}, mesh=(8, 8), cluster="h100-8x8", precision="bf16",
        memory_budget="inf", assume=autopar.Assume(no_padding=True),
    )  # fmt: skip
    (d,) = (d for d in plan.decisions.values() if "attention" in d.op)
    assert tuple(ways_of(d.choice.strategies, 4)) == words


def test_the_other_ways_are_rivals():
    plan = planned("ring", (1, 2, 1))
    free = planned(None, (1, 2, 1))
    (name,) = (name for name, d in plan.decisions.items() if "attention" in d.op)
    lines = [line for line in free.explain(name).splitlines() if "rival" in line]
    for words in ("(keys in a ring)", "(keys gathered)", "(heads cut, as Ulysses)"):
        assert any(words in line for line in lines), words


def test_a_batch_of_one_row_has_a_rival_that_cuts_its_sequence():
    one, two = (planned(None, (1, 2, 1), batch(rows, 16)) for rows in (1, 2))
    assert "under fsdp+cp and megatron" in str(one) and "under ddp, fsdp and megatron" in str(two)
    rival, *_ = one.beside()
    zero3 = planned(dict(data=dict(size=1, zero=3), context=2), (1, 2, 1), batch(1, 16))
    assert (rival.name, rival.step_time_s) == ("fsdp+cp", zero3.step_time_s)


@pytest.mark.parametrize(
    "parallel, sizes, how, said",
    [
        ("ulysses", (1, 4, 1), {}, "its 4 heads, of which 2 have keys.*how='gather', how='ring'"),
        ("ring", (1, 2, 1), {"mask": True}, "a mask tensor of queries by keys.*how='gather', how='ulysses'"),
        ("ring", (1, 2, 1), {"dropout": 0.1}, "drops weights of queries by keys"),
        ("cp", (1, 2, 1), {"inputs": batch(1, 1)}, "cannot share the 1 positions of input ids"),
        (dict(context=3), (1, 2, 1), {}, "speaks of 1 x 3 x 1 devices, the mesh has 2"),
        (dict(data=3, context=2), (2, 3, 1), {}, "divides the sequence into 2"),
        (dict(context=dict(size=2, how="striped")), (1, 2, 1), {}, "'how': 'striped'.*\"gather\" or \"ulysses\""),
        (dict(context=dict(size=2, how=("ring", "gather"))), (1, 2, 1), {}, "of 1 axes of context.*cp=2"),
        ("dp", (2, 1, 1), {"inputs": batch(1, 16)}, "cannot share the 1 rows.*data=1, context=2"),
        ("zero3", (2, 1, 1), {"inputs": batch(1, 16)}, "data=dict\\(size=1, zero=3\\), context=2"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_what_does_not_fit_is_a_letter(parallel, sizes, how, said):
    with pytest.raises(BadPreset, match=f"(?s){said}"):
        planned(parallel, sizes, **how)


def test_a_model_without_a_sequence_is_told_so():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(BadPreset, match="no input has the positions of an attention"):
        autopar.plan(model, (x,), mesh=2, parallel="context")


def test_a_described_attention_is_the_core_that_a_policy_repeats():
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.MistralForCausalLM(config), torch.empty(2, 16, dtype=torch.int64)
    how = dict(mesh=2, recompute="selective", memory_budget="inf")
    plan = autopar.plan(model, {"input_ids": ids, "labels": ids}, **how)
    assert plan.recomputed == {f"model.layers.{i}.self_attn/attention" for i in range(2)}
