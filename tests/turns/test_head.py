"""The loss head in chunks: losses and gradients are those of the whole head, and no product is computed twice."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar import DeviceMesh, Plan, Precision
from autopar.codegen import chunks, joint
from autopar.graph.graph import Graph
from autopar.graph.kept import NotKept
from autopar.letters import NotServed
from autopar.testing import Equality, Unequal, on_processes, on_threads
from autopar.tracer import ColoTracer
from autopar.turns import chunked, in_chunks
from tests import language
from tests.models import eager_links
from tests.oracle import ByPosition, InFloat64
from tests.shares import diagonal
from tests.training import whole
from tests.turns.cases import SEED, case, check, on_rank

MODELS = ("gpt2", "llama", "bert", "t5")


@pytest.mark.parametrize(
    "count, mesh, name",
    [
        *diagonal([(3, (1,)), (8, (1,))], MODELS, 3),
        *(pytest.param(4, (2, 2), name, marks=pytest.mark.nightly) for name in MODELS),  # under plans of experts by day
    ],
    ids=str,
)
def test_a_head_in_chunks_is_the_head(name, count, mesh):
    mesh = DeviceMesh(mesh)
    check(
        f"{name} in {count} on {mesh}",
        on_threads(mesh.size, lambda rank: on_rank(rank, name, mesh, chunks=count)),
        name,
    )


@pytest.mark.parametrize(
    "parallel, mesh",
    [
        pytest.param("dp", (4,), marks=pytest.mark.nightly),
        ("zero3", (4,)),
        pytest.param("megatron", (2,), marks=pytest.mark.nightly),
        pytest.param({"tensor": {"size": 2, "mode": "megatron", "sequence": True}}, (2,), marks=pytest.mark.nightly),
        ({"tensor": 2, "data": 2}, (2, 2)),
    ],
    ids=str,
)
def test_experts_plans_have_heads_in_chunks(parallel, mesh):
    """The vocabulary is cut under tensor parallelism, and its sums are exchanged for every chunk."""
    mesh = DeviceMesh(mesh, ("dp", "tp")[: len(mesh)])
    body = functools.partial(on_rank, name="llama", mesh=mesh, chunks=4, parallel=parallel)
    check(str(parallel), on_threads(mesh.size, body), "llama")


@pytest.mark.machines
def test_gloo_ranks_have_heads_in_chunks_and_micro_batches():
    body = functools.partial(on_rank, name="gpt2", mesh=DeviceMesh((2,)), chunks=2, microbatches=2, parallel="zero2")
    check("gpt2 on processes", on_processes(2, body), "gpt2")


def test_half_precision_is_added_up_in_float32():
    """The gradients of a head in chunks are no further from those in float64 than those of the whole head."""
    torch.manual_seed(0)
    model, batch = language.llama(), language.drawn(8, 32, 256)
    exact = copy.deepcopy(model).double()
    with InFloat64():
        exact(**batch).loss.backward()
    expected = {n: p.grad for n, p in exact.named_parameters()}
    errors = {}
    for count in (1, 8):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), batch, mesh=(1,), chunks=count, precision=Precision("bfloat16", "float32")
        )
        mine(**batch).loss.backward()
        found = {n: whole(p.grad).double() for n, p in mine.named_parameters()}
        errors[count] = Equality.in_float64("bfloat16", found, expected, 1.0).worst
    assert errors[8] < 1.2 * errors[1], errors


def test_no_product_is_computed_twice():
    model, batch = case("llama")
    counted = {}
    for count in (1, 4):
        mine = autopar.autoparallelize(copy.deepcopy(model).float(), batch, mesh=(1,), chunks=count)
        with FlopCounterMode(display=False) as counter:
            mine(**batch).loss.backward()
        counted[count] = counter.get_total_flops()
    assert counted[4] == counted[1] > 0


def test_logits_of_a_head_in_chunks_are_not_kept():
    model, batch = case("gpt2")
    still = copy.deepcopy(model).eval()
    mine = autopar.autoparallelize(copy.deepcopy(still), batch, mesh=(1,), chunks=4)
    assert isinstance(mine(**batch).logits, NotKept)
    with torch.no_grad():
        torch.testing.assert_close(mine(**batch).logits, still(**batch).logits)
    for outputs in ("full", "sharded", ("logits",)):
        with pytest.raises(NotServed, match="the logits leave the step, or gradients arrive"):
            autopar.plan(model, batch, mesh=(1,), chunks=4, outputs=outputs)
    with pytest.raises(NotServed, match="17 chunks are more than its 16 rows"):
        autopar.plan(model, batch, mesh=(1,), chunks=17)


def test_a_model_without_a_head_says_so():
    model = torch.nn.Linear(4, 4)

    def loss(outputs, inputs):
        return outputs.square().sum()

    with pytest.raises(NotServed, match="computes no loss of classes"):
        autopar.plan(model, (torch.randn(4, 4),), mesh=(1,), chunks=2, loss=loss)


def test_a_budget_takes_the_head_in_chunks_by_itself():
    """Where the fastest plan does not fit; without a budget, or where logits are wanted, it stays whole."""
    torch.manual_seed(0)
    model, batch = language.gpt2(vocabulary=8192), language.drawn(8, 64, 8192)
    ask = functools.partial(autopar.plan, model, batch, mesh=(1,), cluster=eager_links())
    free = ask()
    assert free.chunks == 1
    budget = int(0.7 * free.peak_bytes)
    tight = ask(memory_budget=budget)
    assert tight.chunks > 1 and tight.peak_bytes <= budget and not tight.recomputed
    assert f"in {tight.chunks} chunks of rows" in tight.table()
    assert f"in {tight.chunks} chunks of rows, each of which takes" in tight.explain("lm_head/linear")
    wanted = ask(memory_budget=int(0.95 * free.peak_bytes), outputs="full")
    assert wanted.chunks == 1 and "the logits leave the step" in wanted.table()
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=Plan.from_dict(tight.to_dict()))
    mine.random_state.seed = SEED
    reference = copy.deepcopy(model)
    with ByPosition(SEED) as numbers:
        numbers.next_step()
        expected = reference(**batch).loss
    torch.testing.assert_close(mine(**batch).loss, expected)


def test_a_graph_with_a_head_in_chunks_is_written_and_read():
    model, batch = case("bert")
    graph = in_chunks(ColoTracer().trace(model, batch), 4, False)
    assert graph.chunks == 4 and Graph.from_json(graph.to_json()) == graph
    plan = autopar.plan(model, batch, mesh=(1,), chunks=4)
    assert plan.digest == graph.digest
    Plan.from_dict(plan.to_dict()).validate(model, batch)


# -- broken compilers


def _one_chunk_twice(patch):
    rows = chunks._rows
    patch.setattr(chunks, "_rows", lambda graph, node, place: rows(graph, node, 0))


def _unscaled(patch):
    """The gradient that arrives is taken for 1."""
    patch.setattr(
        chunks._Region,
        "_scale",
        lambda self, graph, end, whole, inside: end.replace_all_uses_with(
            whole, delete_user_cb=lambda user: user not in inside
        ),
    )


def _last_sum(patch):
    """The last chunk stands for all."""
    patch.setattr(chunks._Region, "_add", lambda self, graph, end, value: self.sums.__setitem__(end, value))


def _out_of_order(patch):
    whole = chunks._side_by_side
    patch.setattr(chunks, "_side_by_side", lambda graph, node, parts: whole(graph, node, parts[::-1]))


def _first_rows_again(patch):
    """The rows that chunks do not share are taken to be the first."""
    rows = chunked._rows_of
    patch.setattr(chunked, "_rows_of", lambda made, value, dim, start, *more: rows(made, value, dim, 0, *more))


def _without_the_rest(patch):
    patch.setattr(chunked._Parted, "_added_up", lambda self, node: self.values[node].turn)


@pytest.mark.parametrize(
    "mutant, name, count",
    [
        (_one_chunk_twice, "gpt2", 4),
        (_unscaled, "gpt2", 4),
        (_last_sum, "gpt2", 4),
        (_out_of_order, "gpt2", 4),
        (_first_rows_again, "bert", 3),
        (_without_the_rest, "bert", 3),
    ],
)
def test_a_broken_compiler_is_noticed(mutant, name, count, monkeypatch):
    joint.LOWERED.clear()
    mutant(monkeypatch)
    with pytest.raises(Unequal):
        check("broken", [on_rank(0, name, DeviceMesh((1,)), chunks=count)], name)
    joint.LOWERED.clear()


class Small(torch.nn.Module):
    """An embedding, two heads that can be added, and a loss that is made of the cross-entropy."""

    def __init__(self, logits, loss):
        super().__init__()
        self.table, self.inner = torch.nn.Embedding(22, 12), torch.nn.Linear(12, 12)
        self.head, self.other = torch.nn.Linear(12, 22, bias=False), torch.nn.Linear(12, 22, bias=False)
        self.logits, self.loss = logits, loss

    def forward(self, x, t):
        h = self.inner(self.table(x))
        entropy = torch.nn.functional.cross_entropy(self.logits(self, h).flatten(0, 1), t.flatten())
        return self.loss(self, entropy, h)


LOSSES = {
    "of its square": lambda m, e, h: e + e * e,
    "of its exponential": lambda m, e, h: (1 - torch.exp(-e)) ** 2 * e,
    "beside one of the hidden values": lambda m, e, h: e + h.pow(2).mean(),
    "beside one of the head's weight": lambda m, e, h: e + m.head.weight.pow(2).mean(),
    "beside nothing of the hidden values": lambda m, e, h: e + 0 * h.sum(),
}
HEADS = {
    "two heads": lambda m, h: m.head(h) + m.other(h),
    "two heads of two values": lambda m, h: m.head(h) + m.other(torch.tanh(h)),
}


@pytest.mark.parametrize(
    "logits, loss",
    [(lambda m, h: m.head(h), f) for f in LOSSES.values()] + [(f, LOSSES["of its square"]) for f in HEADS.values()],
    ids=[*LOSSES, *HEADS],
)
def test_gradients_that_arrive_beside_those_of_chunks(logits, loss):
    """What is made of the arriving gradient is no chunk's, and rows that stand side by side are added whole."""
    torch.manual_seed(0)
    model = Small(logits, loss).double()
    batch = {"x": torch.randint(0, 22, (4, 6)), "t": torch.randint(0, 22, (4, 6))}
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=(1,), memory_budget="inf", chunks=2)
    assert mine.plan.chunks == 2
    expected, found = model(**batch), mine(**batch)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for (name, p), q in zip(model.named_parameters(), mine.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(whole(q.grad), p.grad, msg=name)


def _penalised(m, z, t):
    return {"loss": F.cross_entropy(z.flatten(0, 1), t.flatten()) + 1e-2 * z.logsumexp(-1).pow(2).mean()}


def _masked(m, z, t):
    losses, mask = F.cross_entropy(z.flatten(0, 1), t.flatten(), reduction="none"), (t.flatten() > 3).to(z.dtype)
    return {"loss": (losses * mask).sum() / mask.sum()}


def _counted(m, z, t):
    mask = t != 2
    right = ((z.argmax(-1) == t) & mask).sum() / mask.sum()
    return {"loss": F.cross_entropy(z.flatten(0, 1), t.flatten()), "right": right, "logits": z}


def _several(m, z, t):
    z = z * m.scale
    p = z.log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1).mean()
    loss = F.cross_entropy(z.flatten(0, 1), t.flatten(), ignore_index=2, label_smoothing=0.1)
    other = F.nll_loss(p.flatten(0, 1), t.flatten(), reduction="sum")
    return {
        "loss": m.scale * loss + other / 70 + entropy * 0.3,
        "entropy": entropy.detach(),
        "largest": z.amax(-1).sum(),
    }


def _shifted(m, z, t):
    """The rows of all tokens but the last, which no number of chunks shares evenly."""
    rows = z[..., :-1, :].contiguous()
    return {"loss": F.cross_entropy(rows.view(-1, 22), t[..., 1:].reshape(-1)), "logits": z}


def _shifted_numbers(m, z, t):
    z, t = torch.tanh(z / m.scale)[:, :-1] * 3, t[:, 1:]
    loss = F.cross_entropy(z.transpose(1, 2), t) + m.inner.weight.pow(2).mean() + 1e-2 * z.logsumexp(-1).pow(2).mean()
    return {"loss": loss, "right": (z.argmax(-1) == t).to(z.dtype).mean()}


class Numbers(Small):
    """Several numbers of one product."""

    def __init__(self, numbers):
        super().__init__(None, None)
        self.numbers, self.scale = numbers, torch.nn.Parameter(torch.tensor(1.3))

    def forward(self, x, t):
        return self.numbers(self, self.head(torch.tanh(self.inner(self.table(x)))), t)


NUMBERS = (_penalised, _masked, _counted, _several, _shifted, _shifted_numbers)
WAYS = ((None, 1, (16, 5), 1), ("dp", 2, (4, 8), 1), ("megatron", 2, (2, 7), 1))
IN_TURNS = [(numbers, ("zero3", 2, (8, 6), 2)) for numbers in (_penalised, _shifted_numbers)]


@pytest.mark.parametrize(
    "numbers, way", [*diagonal(NUMBERS, WAYS, 4), *IN_TURNS], ids=lambda v: getattr(v, "__name__", str(v))
)
def test_numbers_of_a_head_in_chunks_are_those_of_the_head(numbers, way):
    """A loss of several sums, losses of rows behind a mask, counts beside the loss, and logits that are sliced."""
    parallel, ranks, shape, turns = way
    how = dict(mesh=ranks, parallel=parallel, memory_budget="inf", chunks=4, microbatches=turns)
    model = Numbers(numbers).double()
    batch = {"x": torch.randint(0, 22, shape), "t": torch.randint(0, 22, shape)}
    mine = [copy.deepcopy(model) for _ in range(ranks)]
    expected = model(**batch)
    expected["loss"].backward()

    def body(rank):
        found = autopar.autoparallelize(mine[rank], batch, **how)
        assert found.plan.chunks == 4
        numbers = found(**batch)
        numbers["loss"].backward()
        return {k: whole(v).detach() for k, v in numbers.items() if k != "logits"}, found

    def compared(rank):
        numbers, found = body(rank)
        for name, number in numbers.items():
            torch.testing.assert_close(number, expected[name].detach(), msg=name)
        for (name, p), q in zip(model.named_parameters(), found.parameters(), strict=True):
            torch.testing.assert_close(whole(q.grad) if q.grad is not None else None, p.grad, msg=name)

    on_threads(ranks, compared)


@pytest.mark.parametrize(
    "numbers, why",
    [
        (lambda m, z, t: _penalised(m, z - z.mean(), t), "sub looks at several rows"),
        (lambda m, z, t: {"loss": _penalised(m, z, t)["loss"] * z.pow(2).mean()}, "several sums over rows"),
    ],
)
def test_a_head_that_needs_all_rows_says_so(numbers, why):
    batch = {"x": torch.randint(0, 22, (4, 8)), "t": torch.randint(0, 22, (4, 8))}
    with pytest.raises(NotServed, match=why):
        autopar.plan(Numbers(numbers), batch, mesh=(1,), chunks=4)
