"""Models whose batches pass in turns, and what they give on one device."""

from __future__ import annotations

import copy
import functools
import threading

import torch
import transformers

import autopar
from autopar.testing import Equality
from tests import language
from tests.models import eager_links
from tests.oracle import ByPosition, InFloat64
from tests.training import whole

SEED = 97531
ROWS, LENGTH = 8, 16


def words(vocabulary):
    """Tokens, of which rows have targets in unequal numbers."""
    batch = language.drawn(ROWS, LENGTH, vocabulary)
    labels = batch["labels"].clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    return {"input_ids": batch["input_ids"], "labels": labels}


def pictures():
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS) % 4}


def t5():
    config = transformers.T5Config(
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()


def vit(dropout=0.1):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.ViTForImageClassification(config).train()


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=4)
    return transformers.ConvNextForImageClassification(config).train()


MODELS = {
    "gpt2": (functools.partial(language.gpt2, 1, vocabulary=128), lambda: words(128)),
    "llama": (functools.partial(language.llama, 1), lambda: words(256)),
    "bert": (functools.partial(language.bert, 1), lambda: words(256)),
    "t5": (t5, lambda: words(128)),
    "vit": (vit, pictures),
    "convnext": (convnext, pictures),
}


def case(name):
    """The model of that name and its batch: one for all threads, which are ranks."""
    with _ONE_AT_A_TIME:
        return _made(name)


_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _made(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return make().double(), {k: v.double() if v.is_floating_point() else v for k, v in batch().items()}


def values(model, batch, calls=2, next_step=lambda: None):
    """Losses of some calls and the gradients of the last, under which none is added to another."""
    found = {}
    for call in range(calls):
        model.zero_grad()
        next_step()
        loss = model(**batch).loss
        loss.backward()
        found[f"loss.{call}"] = loss.detach()
    parameters = model.named_parameters()
    # the gradient of a bias of keys is nothing but rounding
    return found | {n: whole(p.grad) for n, p in parameters if p.grad is not None and "k_proj.bias" not in n}


@functools.cache
def eager(name):
    model, batch = case(name)
    with InFloat64(), ByPosition(SEED) as numbers:
        return values(copy.deepcopy(model), batch, next_step=numbers.next_step)


def check(what, results, name):
    expected = {n: t for n, t in eager(name).items() if "attn.bias" not in n}
    for result in results:
        Equality.in_float64(what, {n: t for n, t in result.items() if n in expected}, expected, 1e-9).check()


def on_rank(rank, name, mesh, microbatches=1, chunks=1, **how):
    """What a parallel model whose batch passes in turns gives on this rank."""
    model, batch = case(name)
    turns = {"microbatches": microbatches, "chunks": chunks}
    with InFloat64():
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=mesh, cluster=eager_links(), **turns, **how)
        mine.random_state.seed = SEED
        assert (mine.plan.microbatches, mine.plan.chunks) == (microbatches, chunks)
        return values(mine, batch)
