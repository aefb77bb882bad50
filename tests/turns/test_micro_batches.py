"""A batch that passes in micro-batches inside one call: losses, gradients and dropout are those of the whole batch."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar import DeviceMesh, Plan
from autopar.codegen import joint
from autopar.graph.graph import Graph, info, type_of
from autopar.graph.kept import NotKept
from autopar.letters import Infeasible, NotServed
from autopar.module.runner import Halves
from autopar.module.turn_runner import InTurns
from autopar.search import _may_fit, _numbers_of_turns
from autopar.testing import Equality, Unequal, on_processes, on_threads
from autopar.tracer import ColoTracer
from autopar.turns import in_micro_batches
from tests import language
from tests.fuzz.trial import fuzz
from tests.models import eager_links, mlp_case
from tests.oracle import ByPosition, InFloat64
from tests.shares import by_day
from tests.training import whole
from tests.turns.cases import MODELS, ROWS, SEED, case, check, on_rank, pictures, values, words
from tests.zoo import families


@pytest.mark.parametrize(
    "turns, mesh, name",
    # others run under plans of experts, with the head in chunks and on processes
    by_day(
        [(turns, mesh, name) for turns, mesh in ((2, (1,)), (8, (1,)), (4, (2, 2))) for name in MODELS],
        (2, (1,), "vit"),
        (8, (1,), "convnext"),
    ),
    ids=str,
)
def test_a_model_in_micro_batches_is_the_model(name, turns, mesh):
    mesh = DeviceMesh(mesh)
    if mesh.size > 1 and name in ("t5", "convnext"):
        mesh = DeviceMesh((2,))
    results = on_threads(mesh.size, lambda rank: on_rank(rank, name, mesh, microbatches=turns))
    check(f"{name} in {turns} on {mesh}", results, name)


@pytest.mark.parametrize(
    "parallel, mesh",
    [
        pytest.param("zero3", (4,), marks=pytest.mark.nightly),  # on processes by day
        pytest.param("megatron", (2,), marks=pytest.mark.nightly),
        ({"tensor": 2, "data": 2}, (2, 2)),
    ],
    ids=str,
)
def test_experts_plans_run_in_micro_batches(parallel, mesh):
    mesh = DeviceMesh(mesh, ("dp", "tp")[: len(mesh)])
    body = functools.partial(on_rank, name="gpt2", mesh=mesh, microbatches=2, parallel=parallel)
    check(f"{parallel}", on_threads(mesh.size, body), "gpt2")


@pytest.mark.machines
def test_gloo_ranks_run_in_micro_batches():
    body = functools.partial(on_rank, name="llama", mesh=DeviceMesh((2,)), microbatches=4, parallel="zero3")
    check("llama on processes", on_processes(2, body), "llama")


def test_micro_batches_recompute():
    """Under less than a plan in two turns holds."""
    torch.manual_seed(0)
    model, batch = language.gpt2(layers=3, vocabulary=64).double(), language.drawn(ROWS, 64, 64)
    ask = functools.partial(autopar.plan, model, batch, mesh=(1,), cluster=eager_links(), microbatches=2)
    with InFloat64():
        budget = int(0.8 * ask().peak_bytes)
        plan = ask(memory_budget=budget)
        assert plan.recomputed and plan.peak_bytes <= budget
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=Plan.from_dict(plan.to_dict()))
        mine.random_state.seed = SEED
        found = values(mine, batch)
        with ByPosition(SEED) as numbers:
            expected = values(copy.deepcopy(model), batch, next_step=numbers.next_step)
    Equality.in_float64("GPT-2 that recomputes", found, expected, 1e-9).check()


class Draws(nn.Module):
    """The dropped value itself is an output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x):
        dropped = nn.functional.dropout(self.layer(x), 0.5)
        noise = torch.rand_like(x)
        return {"loss": (dropped * noise).sum(), "dropped": dropped, "noise": noise}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_draws_what_its_rows_draw_in_the_batch(ranks):
    torch.manual_seed(0)
    model, batch = Draws(), {"x": torch.randn(8, 6).double()}

    def body(rank, turns):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), batch, mesh=ranks, parallel="dp", microbatches=turns, outputs="full"
        )
        mine.random_state.seed = SEED
        found = mine(**batch)
        return {"kept": whole(found["dropped"]).detach() != 0, "noise": whole(found["noise"])}

    one = on_threads(ranks, lambda rank: body(rank, 1))[0]
    for turns in (2, 4, 8)[: 4 - ranks]:
        for found in on_threads(ranks, lambda rank, turns=turns: body(rank, turns)):
            assert all(torch.equal(found[name], one[name]) for name in one)


class OfRows(nn.Module):
    """A mask that is drawn, with a row for each of the batch, and another value of inputs alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.ones(8, 4) * torch.rand(8, 4)
        return (self.linear(x * 2) * mask).sum()


def test_a_turn_makes_its_rows_alone():
    graph = in_micro_batches(ColoTracer().trace(OfRows(), {"x": torch.zeros(8, 4)}), 2, keeps_outputs=False)
    ops = [node for node in graph.nodes if info(node).kind == "op"]
    assert all(node.users for node in ops)
    assert {type_of(node).shape[0] for node in ops if len(type_of(node).shape) == 2} == {4}


def test_what_looks_at_all_rows_is_a_letter():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    resnet = transformers.ResNetForImageClassification(config).train()
    with pytest.raises(NotServed, match="batch_norm_updating looks at all rows") as letter:
        autopar.plan(resnet, pictures(), mesh=(1,), microbatches=2)
    assert "modeling_resnet.py" in letter.value.at
    autopar.plan(resnet.eval(), pictures(), mesh=(1,), microbatches=2)  # its statistics stand still


def test_a_contrastive_loss_is_a_letter():
    with pytest.raises(NotServed, match="looks at all rows of a batch") as letter:
        autopar.plan(families.clip().train(), families.text_and_picture(), mesh=(1,), microbatches=2)
    assert "modeling_clip.py" in letter.value.at


def test_micro_batches_have_to_share_the_rows():
    model, batch = mlp_case()
    with pytest.raises(NotServed, match="do not share the 8 rows"):
        autopar.plan(model, batch, mesh=(1,), microbatches=3)
    with pytest.raises(NotServed, match="not a number of parts"):
        autopar.plan(model, batch, mesh=(1,), microbatches=0)


def test_a_budget_asks_for_micro_batches():
    """As many as it has room for, and a letter where even one row does not fit."""
    model, batch = case("llama")
    ask = functools.partial(autopar.plan, model, batch, mesh=(1,), cluster=eager_links(), recompute="none")
    free = ask()
    two = ask(microbatches=2)
    assert free.microbatches == 1 and two.peak_bytes < free.peak_bytes
    found = ask(memory_budget=two.peak_bytes)
    assert (found.microbatches, found.peak_bytes) == (2, two.peak_bytes)
    assert "in 2 micro-batches" in str(found)
    with pytest.raises(Infeasible):
        ask(memory_budget=2**16)


def test_a_budget_asks_for_an_odd_number_of_micro_batches():
    """Rows of which no half is whole are shared by what shares them."""
    assert [list(_numbers_of_turns(rows)) for rows in (1, 8, 9, 12, 15)] == [
        [1],
        [1, 2, 4, 8],
        [1, 3, 9],
        [1, 2, 3, 4, 6, 12],
        [1, 3, 5, 15],
    ]
    model, batch = mlp_case(batch=225)
    ask = functools.partial(autopar.plan, model, batch, mesh=(1,), cluster=eager_links(), recompute="none")
    three = ask(microbatches=3)
    found = ask(memory_budget=three.peak_bytes)
    assert (found.microbatches, found.peak_bytes) == (3, three.peak_bytes)


def test_what_turns_save_says_whether_more_may_fit():
    """Of 100 bytes and 240 by rows: 340, 220, 180; no number of turns needs less than 100."""
    letters = {turns: Infeasible("", smallest=100 + 240 / turns) for turns in (1, 2, 3)}
    assert _may_fit(letters, 101) and not _may_fit(letters, 99)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


@pytest.mark.nightly
def test_a_plan_in_many_turns_is_found_where_a_few_cannot_fit_whatever_they_recompute():
    """And where nothing fits, the letter's budget is one that a plan in micro-batches keeps to."""
    with torch.device("meta"):
        model, batch = Deep(), {"x": torch.empty(16384, 64), "y": torch.empty(16384, 64)}
    ask = functools.partial(autopar.plan, model, batch, mesh=2, parallel="dp")
    held = 2**23  # bytes of the inputs, which all turns have
    found = ask(memory_budget=1.15 * held)
    assert found.microbatches > 4 and held < found.peak_bytes <= 1.15 * held
    with pytest.raises(Infeasible, match="micro-batches") as letter:
        ask(memory_budget=0.9 * held)
    assert letter.value.smallest < 2 * held
    assert ask(memory_budget=letter.value.smallest).peak_bytes <= letter.value.smallest


def test_outputs_of_a_step_are_kept_where_they_are_asked_for():
    model, batch = case("gpt2")
    still = copy.deepcopy(model).eval()
    expected = still(**batch).logits
    mine = autopar.autoparallelize(copy.deepcopy(still), batch, mesh=(1,), microbatches=4, outputs="full")
    torch.testing.assert_close(mine(**batch).logits, expected)
    mine = autopar.autoparallelize(copy.deepcopy(still), batch, mesh=(1,), microbatches=4)
    logits = mine(**batch).logits
    assert isinstance(logits, NotKept) and "logits" in repr(logits)
    for use in (lambda: logits.argmax(-1), lambda: torch.cat([logits]), lambda: logits > 0, lambda: logits[0]):
        with pytest.raises(NotServed, match='outputs="full"'):
            use()
    with torch.no_grad():  # evaluation is whole
        torch.testing.assert_close(mine(**batch).logits, expected)
    with pytest.raises(NotServed, match="one loss"):
        autopar.plan(model, batch, mesh=(1,), microbatches=4, outputs=("logits",))


def test_another_batch_passes_in_as_many_turns_as_share_it():
    model, batch = case("gpt2")
    with InFloat64():
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=(1,), microbatches=4)
    few = {name: value[:6] for name, value in batch.items()}
    reference = copy.deepcopy(model)
    mine.random_state.load_state_dict({"seed": SEED, "step": 0})
    with InFloat64(), ByPosition(SEED) as numbers:
        expected = values(reference, few, 1, numbers.next_step)
    with InFloat64():
        found = values(mine, few, 1)
    Equality.in_float64("six rows", found, {n: t for n, t in expected.items() if n in found}, 1e-9).check()
    assert mine._autopar.last.lowered.plan.microbatches == 3


def test_gradients_of_calls_in_micro_batches_wait():
    """`no_sync` around a call whose batch passes in turns."""
    model, batch = mlp_case()
    reference = copy.deepcopy(model)
    for _ in range(2):
        reference(**batch).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), batch, mesh=2, parallel="zero2", accumulation=2, microbatches=2
        )
        with mine.no_sync():
            mine(**batch).backward()
        assert all(p.grad is None for p in mine.parameters())
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for found in on_threads(2, body):
        Equality.in_float64("two calls", found, expected, 1e-9).check()


def test_a_graph_of_a_micro_batch_is_written_and_read():
    model, batch = case("gpt2")
    graph = in_micro_batches(ColoTracer().trace(model, batch), 4, False)
    assert Graph.from_json(graph.to_json()) == graph
    plan = autopar.plan(model, batch, mesh=(1,), microbatches=4)
    assert plan.digest == graph.digest
    again = Plan.from_dict(plan.to_dict())
    again.validate(model, batch)
    assert again.microbatches == 4


def test_turns_share_one_program():
    """However many there are, as many programs are traced: one of a turn, one of the ending."""
    model, batch = case("gpt2")
    counts = {}
    for turns in (2, 8):
        joint.LOWERED.clear()
        autopar.autoparallelize(copy.deepcopy(model), batch, mesh=(1,), microbatches=turns)
        counts[turns] = len(joint.LOWERED.known)
    assert counts == {2: 2, 8: 2}


def test_ranks_pass_their_own_rows_in_micro_batches():
    """Where nothing goes by the places of rows; dropout does."""
    batch = words(256)

    def body(rank, model, **how):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), batch, mesh=2, parallel="dp", microbatches=2, inputs="local", **how
            )
            return values(mine, {name: value.chunk(2)[rank] for name, value in batch.items()})

    model = case("llama")[0]
    with InFloat64():
        expected = values(copy.deepcopy(model), batch)
    for result in on_threads(2, lambda rank: body(rank, model, assume=language.NO_PADDING)):
        found = {n: t for n, t in result.items() if n in expected}
        Equality.in_float64("own rows", found, expected, 1e-9).check()
    with pytest.raises(NotServed, match="goes by the places of rows in the batch"):
        on_threads(2, lambda rank: body(rank, case("gpt2")[0]))


class Turned(nn.Module):
    """Rows behind positions in one dim, as recurrent models have them, and a dropout of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x):
        flat = self.layer(x).transpose(0, 1).reshape(-1, 6)
        return {"loss": nn.functional.dropout(flat, 0.5, self.training).square().mean()}


def test_draws_of_rows_that_lie_apart_are_no_others():
    """They are counted from where a part begins: a letter, where rows lie in blocks."""
    with pytest.raises(NotServed, match="dropout looks at all rows"):
        autopar.plan(Turned(), {"x": torch.randn(4, 3, 6).double()}, mesh=(1,), microbatches=2)
    autopar.plan(Turned().eval(), {"x": torch.randn(4, 3, 6).double()}, mesh=(1,), microbatches=2)


@pytest.mark.parametrize(
    "pad_to, length, how",
    by_day(
        [
            (*lengths, how)
            for lengths in ((8, 13), (None, 15), (None, 14))
            for how in ({"microbatches": 2}, {"chunks": 4})
        ],
        (8, 13, {"chunks": 4}),
        (None, 14, {"microbatches": 2}),
    ),
    ids=str,
)
def test_other_lengths_pass_in_turns(how, pad_to, length):
    """Where outputs are dropped, those that stay are cut back; chunks that do not share a length are fewer."""
    model, few = case("llama")[0], language.drawn(ROWS, length, 256)
    with InFloat64():
        mine = autopar.autoparallelize(
            copy.deepcopy(model), words(256), mesh=(1,), pad_to=pad_to, assume=language.NO_PADDING, **how
        )
        values(mine, words(256), 1)
        found, expected = values(mine, few, 1), values(copy.deepcopy(model), few, 1)
    Equality.in_float64(f"{length} tokens", found, {n: t for n, t in expected.items() if n in found}, 1e-9).check()


def test_what_turns_cannot_serve_is_a_letter():
    model, batch = case("gpt2")
    with pytest.raises(NotServed, match="the name of the axis of time"):
        autopar.plan(model, batch, mesh=DeviceMesh((2,), ("time",)), microbatches=2)
    half = autopar.Precision("float16", "float32")
    for how in ({"microbatches": 2}, {"chunks": 2}):
        with pytest.raises(NotServed, match="gradients of float16 need the scale"):
            autopar.plan(copy.deepcopy(model).float(), batch, mesh=(1,), precision=half, **how)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "order",
    [
        pytest.param((True, False), id="trained first"),
        pytest.param((False, True, False), id="evaluated first"),
    ],
)
def test_evaluation_of_a_batch_that_trains_in_turns_is_whole(order):
    """Also where only a later batch is planned in turns."""
    model, batch = case("gpt2")
    large = language.drawn(ROWS, 48, 128)
    budget = autopar.plan(model, batch, mesh=(1,), cluster=eager_links()).peak_bytes
    mine = autopar.autoparallelize(
        copy.deepcopy(model), batch, mesh=(1,), cluster=eager_links(), memory_budget=budget, recompute="none"
    )
    assert (mine.plan.microbatches, mine.plan.chunks) == (1, 1)
    for trains in order:
        with torch.set_grad_enabled(trains):
            logits = mine(**large).logits
        assert isinstance(logits, NotKept) if trains else logits.shape == (ROWS, 48, 128)


SEEDS = 3


@pytest.mark.parametrize("first", range(0, SEEDS, 3))
@pytest.mark.filterwarnings("ignore")
def test_random_modules_in_micro_batches_compute_the_same(first):
    """Or a letter says what looks at all rows."""
    assert sum(_is_served(seed) for seed in range(first, first + 3)) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, 200, 11))
@pytest.mark.filterwarnings("ignore")
def test_two_hundred_random_modules_in_micro_batches_compute_the_same(first):
    for seed in range(first, first + 11):
        _is_served(seed)


def _is_served(seed):
    try:
        fuzz(seed, in_turns=True)
    except NotServed:
        return False
    return True


# -- broken compilers


def _means_of_means(patch):
    """A turn counts its own targets, as if all turns had as many."""
    rows = InTurns._rows

    def own(self, primal, place):
        is_whole = place < len(self.in_turns) and not self.in_turns[place]
        if not is_whole:
            return rows(self, primal, place)
        return primal.chunk(self.turns.size)[self.turns.index].repeat(self.turns.size, 1)

    patch.setattr(InTurns, "_rows", own)


def _counts_of_a_turn(patch):
    """A turn counts its own targets alone."""
    rows = InTurns._rows

    def own(self, primal, place):
        is_whole = place < len(self.in_turns) and not self.in_turns[place]
        if not is_whole:
            return rows(self, primal, place)
        parts = [torch.full_like(part, -100) for part in primal.chunk(self.turns.size)]
        parts[self.turns.index] = primal.chunk(self.turns.size)[self.turns.index]
        return torch.cat(parts)

    patch.setattr(InTurns, "_rows", own)


def _bits_by_turn(patch):
    """Every turn draws for the rows of the first."""
    patch.setattr(InTurns, "_axes", lambda self: {**super(InTurns, self)._axes(), "time": _first()})


def _first():
    class First:
        name, size, index = "time", 4, 0

    return First()


def _scaled_twice(patch):
    gradients = InTurns.gradients

    def twice(self, given, arrived, waits):
        return [None if g is None else g * 0.5 for g in gradients(self, given, arrived, waits)]

    patch.setattr(InTurns, "gradients", twice)


def _last_alone(patch):
    """The gradients of the last turn stand for all."""
    hold = Halves.hold
    patch.setattr(Halves, "hold", lambda self, sums, given, arrived: hold(self, [None] * len(sums), given, arrived))


@pytest.mark.parametrize("mutant", [_means_of_means, _counts_of_a_turn, _bits_by_turn, _scaled_twice, _last_alone])
def test_a_broken_compiler_is_noticed(mutant, monkeypatch):
    joint.LOWERED.clear()
    mutant(monkeypatch)
    with pytest.raises(Unequal):
        check("broken", [on_rank(0, "gpt2", DeviceMesh((1,)), microbatches=4)], "gpt2")


class Layer(nn.Module):
    """A layer, a table and buffers of as many rows as the batch has, and what is computed with them."""

    def __init__(self, compute):
        super().__init__()
        self.layer, self.cell, self.unit = nn.Linear(8, 8), nn.LSTMCell(8, 8), nn.GRUCell(8, 8)
        self.table = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mean", torch.linspace(0, 1, 8))
        self.register_buffer("places", torch.arange(8).flip(0))
        self.compute = compute

    def forward(self, x):
        return self.compute(self, self.layer(x)).abs().pow(2).mean()


def _steps(self, x):
    state = h = x.new_zeros(8, 8), x.new_zeros(8, 8)
    for t in range(x.shape[1]):
        state = self.cell(x[:, t], state)
        h = self.unit(x[:, t], state[0])
    return h


def _running(self, x):
    with torch.no_grad():
        self.mean.lerp_(self.mean.flip(0), 0.1)
        self.places.copy_(self.places.roll(1))
    return x + self.mean + self.table[self.places].softmax(0)[0]


BY_ROWS = {
    "transforms": lambda self, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=6, dim=1) + torch.fft.fft2(x),
    "short transforms": lambda self, x: torch.stft(x.flatten(1), 16, window=self.mean.repeat(2), return_complex=True),
    "cells": _steps,
    "a running mean": _running,
    "a table of as many rows": lambda self, x: x @ (self.table[self.places] @ self.table.T).softmax(0),
    "rows with parameters": lambda self, x: x.sum(1) * self.table[self.places].tanh(),
    "masks of positions": lambda self, x: torch.ones(8, 8, dtype=x.dtype).tril() @ x.mT,
}


@pytest.mark.parametrize("compute", BY_ROWS.values(), ids=BY_ROWS)
def test_what_is_no_row_of_the_batch_stays_whole(compute):
    """Ops along other dims are of some rows; buffers and tables are not, even if they are as long as the batch."""
    torch.manual_seed(0)
    model, batch = Layer(compute).double(), {"x": torch.randn(8, 6, 8).double()}
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=(1,), microbatches=4)
    for call in range(2):
        expected, found = model(**batch), mine(**batch)
        torch.testing.assert_close(found, expected, msg=str(call))
    expected.backward()
    found.backward()
    for (name, p), q in zip(model.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad) if q.grad is not None else None, p.grad, msg=name)
    for (name, p), q in zip(model.named_buffers(), mine.buffers(), strict=True):
        torch.testing.assert_close(whole(q), p, msg=name)


@torch.library.custom_op("autopar_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.mark.parametrize(
    "compute, why",
    [
        (lambda self, x: doubled(x), "has no sharding rule, so it may look at all rows"),
        (lambda self, x: x - x.mean(0), "takes a sum over all rows"),
        (lambda self, x: x.sort(0).values, "sort looks at all rows"),
    ],
)
def test_a_letter_says_why_rows_are_needed(compute, why):
    with pytest.raises(NotServed, match=why):
        autopar.plan(Layer(compute), {"x": torch.randn(8, 6, 8)}, mesh=(1,), microbatches=4)
