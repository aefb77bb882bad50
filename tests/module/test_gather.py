"""The plain model back: it computes, generates and saves as if it had never been parallel."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import NotServed
from autopar.module import ParallelModule
from tests.language import drawn, gpt2, llama
from tests.shares import one_in

HOW = {"zero3": {"mesh": (2,), "parallel": "zero3"}, "tp": {"mesh": (2,), "parallel": "tp"}}


def body(rank, models, batch, how, to):
    parallel = autopar.autoparallelize(models[rank], batch, memory_budget="inf", **how)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(2):
        parallel(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = autopar.gather(parallel, to)
    loss = parallel(**batch).loss.detach()  # the parallel model goes on
    if plain is None:
        return loss, None
    assert not isinstance(plain, ParallelModule) and type(plain).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM")
    assert all(type(p) is nn.Parameter and p.grad is None for p in plain.parameters())
    alone = plain(**batch).loss
    alone.backward()
    torch.testing.assert_close(alone.detach(), loss, rtol=1e-5, atol=0)
    generated = plain.eval().generate(batch["input_ids"][:2, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return loss, generated


@pytest.mark.parametrize(
    "model, how", one_in(4, itertools.product([lambda: gpt2(dropout=0.0, vocabulary=256), llama], HOW), 1)
)
def test_the_plain_model_comes_back(model, how, threads):
    first, batch = model(), drawn(4, 16, 256)
    tied = first.get_input_embeddings().weight is first.get_output_embeddings().weight
    models = [copy.deepcopy(first), copy.deepcopy(first)]
    found = threads(2, body, models, batch, HOW[how], None)
    assert torch.equal(found[0][1], found[1][1]) and found[0][1].shape == (2, 8)
    assert tied == (first.get_input_embeddings().weight is first.get_output_embeddings().weight)
    one, other = threads(2, body, [copy.deepcopy(first), copy.deepcopy(first)], batch, HOW[how], 1)
    assert one[1] is None and torch.equal(other[1], found[0][1])


def test_tied_parameters_stay_tied_and_buffers_come_along():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.outer.weight = self.inner.weight
            self.norm = nn.BatchNorm1d(8)
            self.names = ["a"]

        def forward(self, x):
            return self.norm(self.outer(torch.relu(self.inner(x)))).square().mean()

    model, batch = Counts(), {"x": torch.randn(4, 8)}
    parallel = autopar.autoparallelize(model, batch, mesh=1)
    parallel(**batch).backward()
    plain = autopar.gather(parallel)
    assert plain.outer.weight is plain.inner.weight and plain.names == ["a"] and plain.training
    assert plain.norm.num_batches_tracked == 1 and torch.equal(plain.norm.running_mean, parallel.norm.running_mean)
    plain.norm.running_mean.zero_()
    assert parallel.norm.running_mean.abs().sum() > 0
    assert torch.allclose(plain(batch["x"]), parallel(**batch))
    again = autopar.autoparallelize(copy.deepcopy(plain), batch, mesh=1)  # and may be made parallel once more
    assert torch.isfinite(again(**batch))


def test_what_cannot_be_gathered_is_a_letter():
    with pytest.raises(NotServed, match="is not parallel"):
        autopar.gather(nn.Linear(2, 2))
    parallel = autopar.autoparallelize(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, mesh=1)
    for wrong in (1, -1, "all", True):
        with pytest.raises(NotServed, match="is none of the 1 ranks"):
            autopar.gather(parallel, wrong)


def test_parameters_in_lists_are_not_given_back_as_they_were():
    """A list holds the parameter of before training: nobody puts the trained one there."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)
            self.tied = [self.inner.weight]

        def forward(self, x):
            return nn.functional.linear(torch.relu(self.inner(x)), self.tied[0]).square().mean()

    parallel = autopar.autoparallelize(Listed(), {"x": torch.ones(4, 8)}, mesh=1)
    with pytest.raises(NotServed, match="'tied' of the model holds a parameter in a list"):
        autopar.gather(parallel)


def test_a_model_is_gathered_where_nothing_is_trained_and_refused_where_it_cannot_be_copied():
    parallel = autopar.autoparallelize(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, mesh=1)
    with torch.inference_mode():
        plain = autopar.gather(parallel)
    plain(torch.ones(2, 4)).sum().backward()
    locked = nn.Linear(4, 4)
    locked.lock = threading.Lock()
    with pytest.raises(NotServed, match="cannot be copied"):
        autopar.gather(autopar.autoparallelize(locked, {"input": torch.ones(2, 4)}, mesh=1))
