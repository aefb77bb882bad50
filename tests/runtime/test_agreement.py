"""What one rank does otherwise than the others: it makes no difference, or is a letter on every rank at once.

Real processes over gloo.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import autopar
from autopar.letters import Disagreement, Letter
from autopar.testing import Equality, on_processes, on_threads
from tests import language
from tests.models import eager_links, mlp_case
from tests.shares import diagonal
from tests.training import whole

CALLS = 3  # before, so that no values are compared any longer


class Scaled(nn.Module):
    """Reads a setting and an attribute, and has others that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = mlp_case()
        self.drop, self.scale, self.seen = nn.Dropout(0.0), 1.0, 0

    def forward(self, x, y):
        return self.inner(self.drop(x) * self.scale, y)


def evaluates(mine, batch):
    mine.eval()
    with torch.no_grad():
        mine(**batch)


def says_otherwise(mine, batch):
    mine.scale = 2.0


def hooks(mine, batch):
    mine.inner.head.register_forward_hook(lambda module, args, out: out * 2)


def passes_rows(mine, batch):
    mine(**{name: t[:4] for name, t in batch.items()}).backward()


def casts(mine, batch):
    with torch.autocast("cpu", torch.bfloat16):
        mine(**batch)


def freezes(mine, batch):
    mine.inner.head.requires_grad_(False)


def copies_alone(mine, batch):
    copy.deepcopy(mine).eval()(**batch)


ALONE = {
    "evaluates": (evaluates, r"train and eval than before \(the model is in eval"),
    "says otherwise": (says_otherwise, r"attributes or hooks.*\(scale is 2.0, and was 1.0\)"),
    "hooks": (hooks, r"attributes or hooks.*\(hooks of inner.head have changed\)"),
    "other rows": (passes_rows, r"float64\[4, 16\]"),
    "autocast": (casts, r"autocast.*\(bfloat16 on cpu\)"),
    "freezes": (freezes, r"parameters that train.*\(inner.head.weight is frozen, inner.head.bias is frozen\)"),
    "evaluates a copy": (copies_alone, "for the first time"),
}


@pytest.mark.parametrize("name", [name for name in ALONE if "copy" not in name])
def test_a_rank_that_differs_in_its_first_calls_is_told_as_what_it_does(name):
    """And not as different inputs: ranks meet where the one compares its inputs, and the other its new program."""

    def body(rank, model, batch):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", cluster=eager_links())
        mine(**batch).backward()
        mine.seen += rank  # which nobody reads
        with pytest.raises(Disagreement) as letter:
            if rank == 1:
                ALONE[name][0](mine, batch)
            mine(**batch)
        return str(letter.value)

    for said in on_threads(2, body, Scaled(), mlp_case()[1], timeout_s=60):
        assert re.search(rf"rank 0 calls Scaled as before; rank 1 calls Scaled.*{ALONE[name][1]}", said), said
        assert "seen" not in said


def test_ranks_that_set_other_values_are_told_with_them():
    def body(rank, model, batch):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", cluster=eager_links())
        mine.scale = 2.0 + rank
        mine.drop.eval()
        with pytest.raises(Disagreement) as letter:
            mine(**batch)
        return str(letter.value)

    for said in on_threads(2, body, Scaled(), mlp_case()[1], timeout_s=60):
        assert re.search(r"(?s)\[1\] differ from rank 0.*drop is in eval.*scale is 2.0.*rank 1.*scale is 3.0", said)


def one_alone(rank, model, batch, who, parallel, names):
    """Rank `who` does each alone, the others train on; what was said, and after how long.

    Ranks part ways for good: each in a world of its own.
    """
    mine = autopar.autoparallelize(
        copy.deepcopy(model), batch, mesh=2, parallel=parallel, cluster=eager_links(), timeout_s=30.0
    )
    for _ in range(CALLS):
        mine(**batch).backward()
    start, said = time.monotonic(), ["nothing"]
    with contextlib.suppress(Letter):
        try:
            if rank == who:
                ALONE[names][0](mine, batch)
            mine(**batch).backward()
        except Letter as letter:
            said = [f"{type(letter).__name__}: {letter}"]
            raise
    with contextlib.suppress(Letter):  # and it stays so
        mine(**batch).backward()
        said.append("went on")
    return said, time.monotonic() - start


CASES = [
    pytest.param(
        who,
        parallel,
        name,
        marks=[]
        if name in ("evaluates", "says otherwise", "other rows") and who == (name == "evaluates")
        else pytest.mark.nightly,
        id=f"{name}-{who}-{parallel}",
    )
    for name in ALONE
    for who, parallel in ((0, "dp"), (1, "zero3"))
]


@pytest.mark.parametrize("who, parallel, name", CASES)
def test_what_one_rank_does_alone_is_a_letter_on_all_at_once(who, parallel, name):
    batch = mlp_case()[1]
    for said, seconds in on_processes(2, one_alone, Scaled(), batch, who, parallel, name, timeout_s=60):
        assert (
            len(said) == 1
            and said[0].startswith("Disagreement")
            and re.search(rf"rank {who} calls Scaled.*{ALONE[name][1]}", said[0])
        ), said
        assert seconds < 25  # timeout_s is 30


def all_together(rank, model, batch, parallel):
    """Evaluation, other rows, another scale, all on both ranks; beside them what nobody reads, on one."""
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel=parallel, cluster=eager_links())
    return steps(mine, batch, rank), len(mine._autopar.programs)


def steps(model, batch, rank=0):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(5):
        model.seen += rank
        loss = model(**{name: t[:6] for name, t in batch.items()} if step == 2 else batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses[f"{step} in eval"] = model(**batch).detach()
        model.train()
        model.scale = 1.5 if step > 2 else 1.0
        losses[str(step)] = loss.detach()
    return {**losses, **{n: whole(p).detach().clone() for n, p in model.named_parameters()}}


def test_ranks_that_switch_together_go_on():
    model, batch = Scaled(), mlp_case()[1]
    expected = steps(copy.deepcopy(model), batch)
    for found, programs in on_processes(2, all_together, model, batch, "zero3"):
        Equality.in_float64("switched together", found, expected, 1e-8).check()
        assert programs == 5  # train, eval, and six rows; the first two with the other scale


def gpt2_case():
    torch.manual_seed(0)
    return language.gpt2(1, 16, 40, 16, dropout=0.0).double(), language.drawn(4, 8, 40)


def trains_and_saves(rank, model, batch, folder):
    """Saved in mid-training: by all, then by rank 0 alone, of what all have gathered."""
    mine = autopar.autoparallelize(
        copy.deepcopy(model), batch, mesh=2, parallel="zero3", cluster=eager_links(), timeout_s=30.0
    )
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    for step in range(4):
        mine(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            mine.save_pretrained(f"{folder}/all")
        if step == 2:
            full = get_model_state_dict(mine, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                mine.save_pretrained(f"{folder}/one", state_dict=full)
                mine.config.name_or_path = "elsewhere"
    return (
        {n: whole(p).detach().clone() for n, p in mine.named_parameters()},
        len(mine._autopar.programs),
        mine.config.architectures,
    )


def trained(model, batch, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
def test_saving_in_mid_training_changes_nothing(tmp_path):
    """It writes into the configuration of rank 0."""
    model, batch = gpt2_case()
    expected = trained(copy.deepcopy(model), batch, 4)
    results = on_processes(2, trains_and_saves, model, batch, str(tmp_path), timeout_s=100)
    for found, programs, _ in results:
        Equality.in_float64("saved in mid-training", found, expected, 1e-8).check()
        assert programs == 1
    assert results[0][2] == ["GPT2LMHeadModel"]
    for folder, done in (("all", 2), ("one", 3)):
        read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder, dtype=torch.float64)
        Equality.in_float64(
            folder, dict(read.named_parameters()), trained(copy.deepcopy(model), batch, done), 1e-8
        ).check()


def saves_alone(rank, model, batch):
    mine = autopar.autoparallelize(
        copy.deepcopy(model), batch, mesh=2, parallel="zero3", cluster=eager_links(), timeout_s=30.0
    )
    for _ in range(CALLS):
        mine(**batch).loss.backward()
    try:
        if rank == 0:
            mine.save_pretrained("never written")
        mine(**batch).loss.backward()
    except Letter as letter:
        return f"{type(letter).__name__}: {letter}"
    return "nothing"


@pytest.mark.filterwarnings("ignore")
def test_saving_by_one_rank_of_what_all_hold_is_a_letter_on_all():
    for said in on_processes(2, saves_alone, *gpt2_case(), timeout_s=60):
        assert "Disagreement" in said and "rank 0 calls save_pretrained" in said and "state_dict=" in said, said


class Config:
    def __init__(self) -> None:
        self.width, self.note, self._hidden = 2.0, "", 3.0

    @property
    def hidden(self):
        return self._hidden


class Mapped(Config):
    """As Hugging Face's: some attributes have two names."""

    attribute_map = {"size": "width"}

    def __getattribute__(self, name):
        if name != "attribute_map" and name in super().__getattribute__("attribute_map"):
            name = super().__getattribute__("attribute_map")[name]
        return super().__getattribute__(name)


class Elsewhere(Config):
    """Reads in a way of its own."""

    def __getattribute__(self, name):
        return super().__getattribute__("width" if name == "size" else name)


class Below(Config):
    """Reads in a way that nothing sees."""

    def __getattribute__(self, name):
        held = super().__getattribute__("__dict__")
        return held["width"] if name == "size" else held[name] if name in held else super().__getattribute__(name)


READS = {
    "by its name": lambda c: c.width,
    "by another": lambda c: c.size,
    "in a property": lambda c: c.hidden,
    "all of it": lambda c: vars(c)["width"],
    "of a copy": lambda c: copy.copy(c).width,
    "of those that are there": lambda c: sum(c.__dict__[k] for k in ("width", "_hidden")),
}


@pytest.mark.parametrize("config, name", diagonal([Config, Mapped, Elsewhere, Below], list(READS)))
def test_what_a_forward_reads_of_settings_is_seen_and_nothing_else(config, name):
    if name == "by another" and config is Config:
        return

    class Reader(nn.Linear):
        def forward(self, x):
            return super().forward(x) * READS[name](self.config)

    model, x = Reader(4, 4).double(), torch.ones(2, 4, dtype=torch.float64)
    model.config = config()
    mine = autopar.autoparallelize(model, (x,), mesh=1)
    try:
        first = mine(x)
        model.config.note = "saved"
        torch.testing.assert_close(mine(x), first)
        if config is not Below and name in ("by its name", "by another", "in a property"):
            assert len(mine._autopar.programs) == 1  # not looked at again
        model.config.width, model.config._hidden = 4.0, 6.0
        torch.testing.assert_close(mine(x), first * 2)
        assert "__getattribute__" not in vars(Config) and not {"__reduce_ex__", "width"} & set(vars(config))
    finally:
        torch.distributed.destroy_process_group()
