"""pad_to: other lengths run as the next multiple and give what one device gives at the length as it is.

Where padding would be seen, nothing is computed.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.letters import Disagreement, NotServed
from autopar.module.reach import check_reach
from autopar.testing import on_threads
from autopar.tracer import ColoTracer
from tests import language
from tests.models import eager_links
from tests.oracle import InFloat64
from tests.shares import by_day
from tests.training import whole


def llama():
    return language.llama(1, 32, 48, 40, 64, initializer_range=0.3).double()


def bert(dropout=0.0):
    return language.bert(1, 32, 48, 40, 64, dropout, initializer_range=0.3).double()


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=40,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    ).double()


def text(length, rows=4, mask=True, labels=True):
    made = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 40, (rows, length), generator=made)
    seen = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=made)
    return {
        "input_ids": torch.where(seen, ids, 0),
        **({"attention_mask": seen.long()} if mask else {}),
        **({"labels": torch.where(seen, ids, -100)} if labels else {}),
    }


def two_texts(length, other, rows=4):
    return {**text(length, rows, labels=False), "labels": text(other, rows)["labels"]}


def on_one_device(model, batch, weigh=None):
    model.zero_grad()
    outputs = model(**batch)
    (outputs.loss if weigh is None else weigh(outputs.logits)).backward()
    return (
        outputs.logits.detach(),
        None if weigh else outputs.loss.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def same(model, mine, batch, weigh=None):
    logits, loss, gradients = on_one_device(copy.deepcopy(model), batch, weigh)
    mine.zero_grad()
    outputs = mine(**batch)
    (outputs.loss if weigh is None else weigh(outputs.logits)).backward()
    near = dict(rtol=1e-9, atol=1e-11)
    if weigh is None:
        torch.testing.assert_close(outputs.loss.detach(), loss, **near)
    torch.testing.assert_close(whole(outputs.logits.detach()), logits, **near)
    for name, gradient in gradients.items():
        torch.testing.assert_close(whole(mine.get_parameter(name).grad), gradient, **near)


@pytest.mark.parametrize(
    "build, parallel, mesh",
    by_day([(llama, None, (2,)), (llama, "zero3", (2, 2)), (bert, "megatron", (2,))], (bert, "megatron", (2,))),
    ids=["llama", "llama zero3", "bert megatron"],
)
def test_other_lengths_share_programs_and_compute_the_same(build, parallel, mesh):
    model = build()

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), text(16), mesh=mesh, parallel=parallel, cluster=eager_links(), pad_to=8
            )
            for length in (16, 13, 5):  # what was given; a bucket that is that; another
                same(model, mine, text(length))
            programs = list(mine._autopar.programs)
            for length in (9, 8, 3):
                same(model, mine, text(length))
            assert len(programs) == 2 and {id(p) for p in mine._autopar.programs} == {
                id(p) for p in programs
            }  # nothing was lowered again
        return True

    assert all(on_threads(math.prod(mesh), body))


@pytest.mark.nightly
@pytest.mark.parametrize("last", [(9, 14), (16, 3)])
def test_two_lengths_at_once(last):
    model = t5()
    with InFloat64():
        mine = autopar.autoparallelize(copy.deepcopy(model), two_texts(16, 16), mesh=1, pad_to=8)
        for lengths in ((11, 11), last):  # the first does not tell which of both an output follows
            same(model, mine, two_texts(*lengths))


def test_a_loss_outside_sees_outputs_of_the_length_as_it_is():
    model = llama()

    def weigh(logits):
        return (logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)).sum()

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), text(16, mask=False, labels=False), mesh=2, cluster=eager_links(), pad_to=8
            )
            for length in (12, 10):
                same(model, mine, text(length, mask=False, labels=False), weigh)
        return True

    assert all(on_threads(2, body))


def test_ranks_pass_rows_of_other_lengths():
    """Each rank's collator pads to its own longest row; together they are the batch padded to the longest of all."""
    model, calls = llama(), []
    for lengths in ((7, 12), (13, 16), (4, 4)):
        parts = [text(length, rows=2) for length in lengths]
        batch = {
            k: torch.cat(
                [F.pad(p[k], (0, max(lengths) - p[k].shape[1]), value=-100 if k == "labels" else 0) for p in parts]
            )
            for k in parts[0]
        }
        with InFloat64():
            calls.append((parts, *on_one_device(model, batch)[1:]))

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), text(16), mesh=2, parallel="dp", cluster=eager_links(), inputs="local", pad_to=8
            )
            for parts, loss, gradients in calls:
                mine.zero_grad()
                found = mine(**parts[rank]).loss
                found.backward()
                torch.testing.assert_close(found.detach(), loss, rtol=1e-9, atol=0)
                for name, gradient in gradients.items():
                    torch.testing.assert_close(whole(mine.get_parameter(name).grad), gradient, rtol=1e-9, atol=1e-11)
        return True

    assert all(on_threads(2, body))


class Flag(nn.Module):
    """Sees its padding where it is told to look ahead."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(40, 8), nn.Linear(8, 8)

    def forward(self, ids, causal=True):
        x = self.out(self.table(ids))
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=x.dtype)
        seen = seen.tril() if causal else seen
        return (seen / seen.sum(1, keepdim=True)) @ x


FLAG = Flag().double()


class Modes(nn.Module):
    """Gives in training a loss, else what it is made of; `kind` says how it sees its padding."""

    def __init__(self, kind=""):
        super().__init__()
        self.table, self.out, self.gate, self.kind = (
            nn.Embedding(40, 8),
            nn.Linear(8, 40),
            nn.Parameter(torch.zeros(())),
            kind,
        )
        if kind == "zero head":
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, ids, labels):
        x = self.table(ids)
        if self.kind == "zero head":
            return F.cross_entropy(self.out(x.mean(1)), labels[:, 0])
        x = self.out(x + self.gate * x.mean(1, keepdim=True) if self.kind == "zero gate" else x)
        if not self.training:
            return x
        loss = F.cross_entropy(x.flatten(0, 1), labels.flatten())
        return loss + x.square().mean() if self.kind == "in training alone" else loss


class Masked(nn.Module):
    """Sees its padding, and hides it behind infinities; or divides by what padding makes of it."""

    def __init__(self, kind):
        super().__init__()
        self.table, self.out, self.kind = nn.Embedding(40, 8, padding_idx=0), nn.Linear(8, 8, bias=False), kind

    def forward(self, ids, mask):
        x = self.out(self.table(ids))
        if self.kind == "nan":
            x = torch.where(mask[..., None] > 0, x / x.square().sum(-1, keepdim=True).sqrt(), 0.0)
            return (x.square() * mask[..., None]).sum() / mask.sum()
        return (x - x.mean(1, keepdim=True)).sum(-1).masked_fill(mask == 0, float("-inf"))


class Mean(nn.Module):
    """Sees how long the sequence is."""

    def __init__(self, norm=False, halve=False):
        super().__init__()
        self.table, self.out, self.halve = nn.Embedding(40, 8), nn.Linear(8, 8), halve
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, ids):
        x = self.out(self.table(ids))
        if self.halve:
            return x[:, ::2]
        return self.norm(x.transpose(1, 2)).mean(2)


@pytest.mark.parametrize(
    "model, batch, words",
    [
        (bert, lambda n: text(n, mask=False), "'loss' depends on the padding"),
        (Mean, lambda n: {"ids": text(n)["input_ids"]}, "'out' depends on the padding"),
        (lambda: Mean(halve=True), lambda n: {"ids": text(n)["input_ids"]}, "not the length of an input"),
        (lambda: Mean(norm=True), lambda n: {"ids": text(n)["input_ids"]}, "the buffer norm"),
    ],
    ids=["no mask", "a mean over the sequence", "every second", "batch norm"],
)
def test_a_model_that_sees_its_padding_is_a_letter(model, batch, words):
    with InFloat64():
        mine = autopar.autoparallelize(model().double(), batch(16), mesh=1, pad_to=8)
        mine(**batch(16))  # nothing to pad
        with pytest.raises(NotServed, match=words):
            mine(**batch(11))
        assert mine.training


def labelled(n):
    return {"ids": text(n)["input_ids"].clamp(min=1), "labels": text(n + 50)["input_ids"][:, :n].clamp(min=1)}


@pytest.mark.parametrize(
    "model, batch",
    [
        (lambda: Modes("in training alone"), labelled),
        (lambda: Modes("zero head"), labelled),
        (lambda: Modes("zero gate"), labelled),
        (lambda: Masked("-inf"), lambda n: {"ids": labelled(n)["ids"], "mask": torch.arange(n).expand(4, n) != 2}),
        (lambda: Masked("nan"), lambda n: {"ids": labelled(n)["ids"], "mask": torch.ones(4, n)}),
    ],
    ids=["a term of training", "a head of zeros", "a gate of zeros", "infinities", "nan in backward"],
)
def test_what_outputs_alone_or_eval_do_not_show_is_a_letter_too(model, batch):
    with InFloat64():
        mine = autopar.autoparallelize(model().double(), batch(16), mesh=1, pad_to=8)
        with pytest.raises(NotServed, match="depends on the padding"):
            mine(**batch(11))


def test_training_and_eval_may_give_different_things():
    model = Modes().double()

    def body(rank):
        with InFloat64():
            mine, theirs = (
                autopar.autoparallelize(
                    copy.deepcopy(model), labelled(16), mesh=2, parallel="dp", cluster=eager_links(), pad_to=8
                ),
                copy.deepcopy(model),
            )
            for train in (True, False, True):
                torch.testing.assert_close(
                    mine.train(train)(**labelled(11)), theirs.train(train)(**labelled(11)), rtol=1e-12, atol=1e-14
                )
        return True

    assert all(on_threads(2, body))


@pytest.mark.nightly
def test_dropout_is_left_out_where_both_ways_are_compared():
    model = bert(dropout=0.2)

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), text(16), mesh=2, parallel="dp", cluster=eager_links(), pad_to=8
            )
            losses = [mine(**text(11)).loss.item() for _ in range(3)]
            assert len(set(losses)) == 3  # it drops when it trains
            torch.testing.assert_close(
                mine.eval()(**text(11)).loss, copy.deepcopy(model).eval()(**text(11)).loss, rtol=1e-10, atol=0
            )
        return losses

    one, other = on_threads(2, body)
    assert one == other


@pytest.mark.nightly
def test_a_kind_of_call_is_tried_once_and_each_kind_by_itself():
    model = bert()

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), text(16), mesh=2, parallel="dp", cluster=eager_links(), pad_to=8
            )
            same(model, mine, text(11))
            known = dict(mine._autopar.padding.known)
            same(model, mine, text(6))
            assert mine._autopar.padding.known == known
            with pytest.raises(NotServed, match="depends on the padding"):  # the same model, without its mask
                mine(**text(11, mask=False))
            flag = autopar.autoparallelize(
                copy.deepcopy(FLAG),
                {"ids": text(16)["input_ids"], "causal": True},
                mesh=2,
                parallel="dp",
                cluster=eager_links(),
                pad_to=8,
            )
            torch.testing.assert_close(flag(text(11)["input_ids"]), FLAG(text(11)["input_ids"]))
            with pytest.raises(NotServed, match="depends on the padding"):  # a flag is another kind
                flag(text(11)["input_ids"], causal=False)
            more = copy.deepcopy(model)(**text(11), output_hidden_states=True)
            found = mine(**text(11), output_hidden_states=True)
            assert [whole(h).shape for h in found.hidden_states] == [h.shape for h in more.hidden_states]
        return True

    assert all(on_threads(2, body))


@pytest.mark.nightly
def test_ranks_that_pass_other_lengths_of_one_batch_are_a_letter():
    model = llama()

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(copy.deepcopy(model), text(16), mesh=2, cluster=eager_links(), pad_to=8)
            for _ in range(3):
                mine(**text(11))
            with pytest.raises(Disagreement, match="different lengths"):
                mine(**text(11 + rank))
        return True

    assert all(on_threads(2, body))


@pytest.mark.parametrize("wrong", [0, -8, 2.5, "8", True])
def test_what_is_no_length_is_a_letter(wrong):
    with pytest.raises(NotServed, match="not a length"):
        autopar.autoparallelize(nn.Linear(4, 4), {"input": torch.zeros(4, 4)}, mesh=DeviceMesh(1), pad_to=wrong)


# -- what padding can reach


class Snippet(nn.Module):
    """A few ops on [rows, length, 6] features, a mask [rows, length] and targets, beside a weight and a table."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.f, self.table, self.conv = (
            body,
            nn.Linear(6, 6),
            nn.Embedding(9, 6),
            nn.Conv1d(6, 6, 3, padding=1),
        )

    def forward(self, x, mask, y):
        return self.body(self, x, mask, y)


def features(length, seed, rows=3):
    made = torch.Generator().manual_seed(seed)
    seen = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=made)
    seen[0] = True
    y = torch.randint(0, 6, (rows, length), generator=made)
    return {
        "x": torch.randn(rows, length, 6, generator=made, dtype=torch.float64) * seed - seed % 3,
        "mask": seen.long(),
        "y": torch.where(seen, y, -100),
    }


def masked(x, mask):
    return x * mask[..., None]


def scores(s, x):
    return s.f(x) @ x.transpose(1, 2)


def causal(n):
    return torch.arange(n)[:, None] >= torch.arange(n)[None]


SERVED = {
    "each position": lambda s, x, mask, y: s.f(x).relu().softmax(-1),
    "a mean of what the mask shows": lambda s, x, mask, y: masked(s.f(x), mask).sum(1) / mask.sum(1, keepdim=True),
    "the same, by where": lambda s, x, mask, y: (
        torch.where(mask[..., None] > 0, s.f(x), 0.0).sum(1) / mask.sum(1)[:, None]
    ),
    "a maximum behind -inf": lambda s, x, mask, y: s.f(x).masked_fill(mask[..., None] == 0, float("-inf")).amax(1),
    "a least number behind inf": lambda s, x, mask, y: s.f(x).masked_fill(mask[..., None] == 0, float("inf")).amin(1),
    "a softmax behind -inf": lambda s, x, mask, y: (
        s.f(x)[..., 0].masked_fill(mask == 0, float("-inf")).softmax(1)[..., None] * x
    ).sum(1),
    "attention with a mask that is added": lambda s, x, mask, y: (
        (scores(s, x) + (1.0 - mask[:, None].double()) * torch.finfo(torch.float64).min).softmax(-1) @ x
    ),
    "attention in causal order": lambda s, x, mask, y: (
        scores(s, x).masked_fill(~causal(x.shape[1]), float("-inf")).softmax(-1) @ x
    ),
    "attention by tril": lambda s, x, mask, y: (
        (scores(s, x) * torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()) @ x
    ),
    "fused attention with a mask": lambda s, x, mask, y: F.scaled_dot_product_attention(
        x[:, None], s.f(x)[:, None], x[:, None], attn_mask=(mask > 0)[:, None, None]
    )[:, 0],
    "fused causal attention": lambda s, x, mask, y: F.scaled_dot_product_attention(x, s.f(x), x, is_causal=True),
    "a loss of shifted targets": lambda s, x, mask, y: F.cross_entropy(
        s.f(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten()
    ),
    "losses that are masked": lambda s, x, mask, y: (
        (F.cross_entropy(s.f(x).transpose(1, 2), y.clamp(min=0), reduction="none") * mask).sum() / mask.sum()
    ),
    "a sum that runs": lambda s, x, mask, y: s.f(x).cumsum(1),
    "the first": lambda s, x, mask, y: s.f(x)[:, 0],
    "all but the last, and position embeddings": lambda s, x, mask, y: (s.f(x) + s.table(torch.arange(x.shape[1]) % 9))[
        :, :-1
    ],
    "a token in front": lambda s, x, mask, y: torch.cat([s.table(torch.zeros(x.shape[0], 1, dtype=torch.long)), x], 1),
    "rows and positions in one dim": lambda s, x, mask, y: s.f(x.flatten(0, 1)).relu().view(x.shape),
    "the first rows of rows and positions in one dim": lambda s, x, mask, y: s.f(x.flatten(0, 1))[:2],
    "what is put behind the last, as padding is": lambda s, x, mask, y: F.pad(masked(x, mask)[:, 1:], (0, 0, 0, 1)),
    "more of the first position": lambda s, x, mask, y: F.pad(x.transpose(1, 2), (1, 0), mode="replicate"),
    "any that is hidden": lambda s, x, mask, y: s.f(x[:, 0]) * (mask * y.clamp(min=0)).sum(1, keepdim=True),
}
REFUSED = {
    "a maximum": (lambda s, x, mask, y: s.f(x).amax(1), "amax"),
    "a maximum of what is zero": (lambda s, x, mask, y: masked(-s.f(x).exp(), mask).amax(1), "amax"),
    "a mean of zeros": (lambda s, x, mask, y: masked(s.f(x), mask).mean(1), "div: it is given the length itself"),
    "a number that is the length": (lambda s, x, mask, y: s.f(x) / x.shape[1], "given the length itself"),
    "a softmax of zeros": (lambda s, x, mask, y: (masked(s.f(x), mask).softmax(1) * x).sum(1), "softmax"),
    "a softmax whose mask is too weak": (
        lambda s, x, mask, y: ((s.f(x)[..., 0] - 10.0 * (1 - mask)).softmax(1)[..., None] * x).sum(1),
        "softmax",
    ),
    "a log-sum-exp": (lambda s, x, mask, y: s.f(x).logsumexp(1), "logsumexp"),
    "attention to all": (
        lambda s, x, mask, y: F.scaled_dot_product_attention(x, s.f(x), x),
        "scaled_dot_product_attention",
    ),
    "attention to what comes later": (
        lambda s, x, mask, y: scores(s, x).masked_fill(causal(x.shape[1]), float("-inf")).nan_to_num().softmax(-1) @ x,
        "softmax",
    ),
    "a convolution": (lambda s, x, mask, y: s.conv(s.f(x).transpose(1, 2)), "conv1d"),
    "the last": (lambda s, x, mask, y: s.f(x)[:, -1], "select|narrow|index"),
    "the seventh from the end, by a known index": (lambda s, x, mask, y: s.f(x)[:, torch.tensor([-7])], "index"),
    "the length as a constant": (lambda s, x, mask, y: x * torch.full((1,), 1.0 * x.shape[1], dtype=x.dtype), "full"),
    "the wrong way round": (lambda s, x, mask, y: s.f(x).flip(1), "flip"),
    "a token behind": (
        lambda s, x, mask, y: torch.cat([s.f(x), s.table(torch.zeros(x.shape[0], 1, dtype=torch.long))], 1),
        "cat",
    ),
    "a product along": (lambda s, x, mask, y: masked(s.f(x), mask).cumprod(1).prod(1), "prod"),
    "a norm over positions": (lambda s, x, mask, y: F.layer_norm(s.f(x).transpose(1, 2), (x.shape[1],)), "layer_norm"),
    "sorted": (lambda s, x, mask, y: s.f(x).sort(1)[0][:, 0], "sort"),
    "positions that count from the end": (
        lambda s, x, mask, y: s.f(x) * torch.arange(x.shape[1], 0, -1)[:, None],
        "arange",
    ),
    "a sum of what rows and positions give": (lambda s, x, mask, y: s.f(x.flatten(0, 1)).square().sum(), "sum"),
    "a square of pairs": (lambda s, x, mask, y: (scores(s, s.f(x)) * mask[:, :, None]).sum((1, 2)), "sum"),
}


def both(body, here=7, longer=12):
    model = Snippet(body).double()
    return model, *(ColoTracer().trace(model, features(n, 1)) for n in (here, longer))


def agrees(model, here, longer, seeds=range(1, 9)):
    """Does eager compute the same of padded calls, whatever is in them?"""
    for seed in seeds:
        batch = features(here, seed)
        padded = {
            n: F.pad(t, [0, 0] * (t.dim() - 2) + [0, longer - here], value=-100 if n == "y" else 0)
            for n, t in batch.items()
        }
        mine, theirs = model(**padded), model(**batch)
        mine = mine[tuple(slice(0, n) for n in theirs.shape)]
        if not torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12, equal_nan=True):
            return False
    return True


@pytest.mark.parametrize("name", SERVED)
def test_what_padding_cannot_reach_is_served(name):
    model, exact, padded = both(SERVED[name])
    assert agrees(model, 7, 12)
    check_reach(exact, padded, {"y": -100})


@pytest.mark.parametrize("name", REFUSED)
def test_what_padding_can_reach_is_a_letter_that_names_the_op(name):
    body, op = REFUSED[name]
    model, exact, padded = both(body)
    assert not agrees(model, 7, 12)
    with pytest.raises(NotServed, match=f"(?s)depends on the padding.*test_padding.py.*({op})"):
        check_reach(exact, padded, {"y": -100})


def shifted(x, mask):
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


STEPS = {
    "linear": lambda s, x, mask: s.f(x),
    "relu": lambda s, x, mask: x.relu(),
    "exp": lambda s, x, mask: x.tanh().exp(),
    "hide": masked,
    "fill": lambda x, mask: x.masked_fill(mask[..., None] == 0, 0.5),
    "low": lambda x, mask: x.masked_fill(mask[..., None] == 0, float("-inf")).softmax(1),
    "add low": lambda x, mask: (x + (mask[..., None] - 1) * 1e30).softmax(1),
    "softmax": lambda x, mask: x.softmax(1),
    "channels": lambda x, mask: x.softmax(2),
    "sum": lambda x, mask: x.sum(1, keepdim=True) * x,
    "mean": lambda x, mask: x.mean(1, keepdim=True) + x,
    "masked mean": lambda x, mask: x + masked(x, mask).sum(1, keepdim=True) / mask.sum(1)[:, None, None],
    "max": lambda x, mask: x + x.amax(1, keepdim=True),
    "masked max": lambda x, mask: x + x.masked_fill(mask[..., None] == 0, -float("inf")).amax(1, keepdim=True),
    "running": lambda x, mask: x.cumsum(1) / 9,
    "shift": shifted,
    "first": lambda x, mask: x + x[:, :1],
    "last": lambda x, mask: x - x[:, -1:],
    "flat": lambda x, mask: x.flatten(0, 1).sin().view(x.shape),
    "flip": lambda x, mask: x.flip(1),
    "roll": lambda x, mask: x.roll(1, 1),
    "heads": lambda x, mask: x.view(*x.shape[:2], 2, 3).transpose(1, 2).transpose(1, 2).reshape(x.shape),
    "attend": lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=(mask > 0)[:, None]),
    "causal": lambda x, mask: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attend to all": lambda x, mask: F.scaled_dot_product_attention(x, x, x),
    "tril": lambda x, mask: (x @ x.transpose(1, 2) / 6).tril() @ x,
    "triu": lambda x, mask: (x @ x.transpose(1, 2) / 6).triu() @ x,
    "count": lambda x, mask: x * torch.arange(x.shape[1])[:, None],
    "length": lambda x, mask: x / x.shape[1],
    "put": lambda x, mask: torch.slice_scatter(x, x[:, :-1], 1, 1),
    "end": lambda x, mask: F.pad(x[:, 1:], (0, 0, 0, 1)),
    "pairs": lambda x, mask: (
        (mask[:, :, None] * mask[:, None, :] * (x @ x.transpose(1, 2))).sum(2, keepdim=True) * x / 50
    ),
    "every": lambda x, mask: x[:, torch.arange(x.shape[1])],
    "half": lambda x, mask: torch.cat(x.chunk(2, 2)[::-1], 2),
    "logs": lambda x, mask: x - x.logsumexp(1, keepdim=True),
    "norm": lambda x, mask: F.layer_norm(x, (6,)),
    "norm of all": lambda x, mask: F.layer_norm(x, x.shape[1:]),
}


def chain(names):
    def body(s, x, mask, y):
        for name in names:
            x = STEPS[name](s, x, mask) if name in ("linear", "relu", "exp") else STEPS[name](x, mask)
        return x

    return body


def looked_at(seeds):
    """The number of chains of ops that are served; each of those computes the same of any padded batch."""
    served = 0
    for seed in seeds:
        rng = random.Random(seed)
        names = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 4))]
        model, exact, padded = both(chain(names), 5 + seed % 3, 8 + seed % 4)
        with contextlib.suppress(NotServed):
            check_reach(exact, padded, {"y": -100})
            served += 1
            assert agrees(model, 5 + seed % 3, 8 + seed % 4, range(1, 4)), names
    return served


def test_chains_of_ops_that_are_served_compute_the_same():
    assert looked_at(range(20)) > 5


@pytest.mark.nightly
def test_many_chains_of_ops_that_are_served_compute_the_same():
    assert looked_at(range(60, 2000)) > 400


def test_one_batch_in_which_padding_does_not_show_does_not_tell():
    """A maximum over positions is above 0 in a long batch, where zeros of padding do not show, and below in a short
    one.
    """

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.f(x).amax(1)

    torch.manual_seed(1)
    long, short = torch.randn(4, 31, 8, dtype=torch.float64), torch.randn(4, 2, 8, dtype=torch.float64)
    mine = autopar.autoparallelize(
        Pool().double(), {"x": torch.randn(4, 32, 8, dtype=torch.float64)}, mesh=1, pad_to=32
    )
    for x in (long, short):
        with pytest.raises(NotServed, match="depends on the padding"):
            mine(x=x)
