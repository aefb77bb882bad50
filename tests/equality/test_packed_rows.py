"""Rows that hold several documents, in rings of devices: any lengths, windows and ends, however a program runs."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import autopar
from autopar import DeviceMesh, Plan
from autopar.testing import Equality
from tests.training import whole

RANKS, HEADS, WIDTH = 4, 4, 4
RING = dict(context=dict(size=RANKS, how="ring"))
WINDOWS = {
    "causal": lambda b, h, q, k: q >= k,
    "strictly causal": lambda b, h, q, k: q > k,
    "itself alone": lambda b, h, q, k: (q >= k) & (q - k < 1),
    "three places": lambda b, h, q, k: (q >= k) & (q - k < 3),
    "wider than the row": lambda b, h, q, k: (q >= k) & (q - k < 1000),
    "from afar": lambda b, h, q, k: q - k >= 3,
    "both sides": lambda b, h, q, k: abs(q - k) <= 2,
    "nothing": lambda b, h, q, k: (q - k >= 3) & (abs(q - k) <= 2),
}


class Packed(nn.Module):
    """One layer of attention; a query sees its own document through a window, and keys that count."""

    def __init__(self, window: str = "causal", groups: int = 2, of_values: int = WIDTH) -> None:
        super().__init__()
        self.window, self.groups, self.of_values = WINDOWS[window], groups, of_values
        self.q = nn.Linear(8, HEADS * WIDTH, bias=False)
        self.k = nn.Linear(8, groups * WIDTH, bias=False)
        self.v = nn.Linear(8, groups * of_values)
        self.o = nn.Linear(HEADS * of_values, 8)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sees) -> Tensor:
        rows, _, length, _ = query.shape
        blocks = create_block_mask(sees, rows, None, length, length, device="cpu")
        return flex_attention(query, key, value, block_mask=blocks, enable_gqa=self.groups != HEADS)

    def forward(self, x: Tensor, y: Tensor, documents: Tensor, counts: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        heads = (m(x).view(rows, length, n, -1).transpose(1, 2)
                 for m, n in ((self.q, HEADS), (self.k, self.groups), (self.v, self.groups)))  # fmt: skip
        terms = [self.window, lambda b, h, q, k: documents[b, q] == documents[b, k]]
        if counts is not None:
            terms.append(lambda b, h, q, k: counts[b, k])
        seen = self.attend(*heads, and_masks(*terms))
        return F.mse_loss(x + self.o(seen.transpose(1, 2).flatten(2)), y)


class Written(Packed):
    """The same with a tensor of queries by keys; a query that sees nothing gets zeros."""

    def attend(self, query, key, value, sees):
        i = torch.arange(query.shape[2])
        seen = sees(torch.arange(len(query))[:, None, None], 0, i[:, None], i)[:, None]
        key, value = (x.repeat_interleave(HEADS // self.groups, 1) for x in (key, value))
        scores = (query @ key.mT / WIDTH**0.5).masked_fill(~seen, -torch.inf)
        is_blind = ~seen.any(-1, keepdim=True)
        weights = scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
        return weights @ value


def written(model: Packed) -> Written:
    other = copy.deepcopy(model)
    other.__class__ = Written
    return other


def batch(*rows: tuple[int, ...], dtype=torch.float64, padding: bool = False) -> dict[str, Tensor]:
    """Rows of documents of these lengths; with padding the first row is nothing else, and the others begin with it."""
    shape = (len(rows), sum(rows[0]))
    x, y = torch.randn(2, *shape, 8, dtype=torch.float64).to(dtype)
    numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    given = {"x": x, "y": y, "documents": torch.stack(numbers).int()}
    if padding:
        places = torch.arange(shape[1])
        given["counts"] = places >= torch.tensor([[shape[1]], *[[shape[1] // 3]] * (len(rows) - 1)])
    return given


def step(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**given)
    loss.backward()
    with torch.inference_mode():
        again = model(**given).clone()
    gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
    return {"loss": loss.detach(), "in inference mode": again, **gradients}


def steps(model: nn.Module, calls: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [step(model, given) for given in calls]


def by_rank(model, given, plan: Plan, calls, threads, **how) -> list[list[dict[str, Tensor]]]:
    def body(rank):
        return steps(autopar.autoparallelize(copy.deepcopy(model), given, plan=plan, **how), calls)

    return threads(plan.mesh.size, body, timeout_s=170)


def check(model, given, threads, calls=(), mesh=RANKS, parallel=RING, planning=(), **how) -> None:
    """Raises Unequal where a rank's results of a call are not those of eager torch."""
    plan = autopar.plan(model, given, mesh=mesh, parallel=parallel, memory_budget="inf", **dict(planning))
    calls = [given, *calls]
    expected = steps(written(model), calls)
    for found in by_rank(model, given, plan, calls, threads, **how):
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            Equality.in_float64(f"call {k}", one, other, 1e-9).check()


def test_one_model_is_called_with_any_documents(threads):
    """They end where parts end, have one place, and are more than a number of 8 bits tells apart; a row is padding.

    Rows are shorter than there are devices, too.
    """
    model = Packed().double()
    given = batch((3, 4, 4, 5), (1,) * 16, padding=True)
    same = [batch((4, 4, 4, 4), (8, 8), padding=True), batch((16,), (15, 1), padding=True)]
    others = [batch((2, 1), (3,), padding=True), batch((1,), padding=True)]
    check(model, given, threads, [*same, *others])


@pytest.mark.nightly
def test_one_model_is_called_with_fewer_rows_than_devices(threads):
    square = dict(mesh=(2, 2), parallel=dict(data=2, context=dict(size=2, how="ring")))
    given = batch((13,), (3, 10), (6, 7), (1, 12))
    check(Packed().double(), given, threads, [batch((3, 10)), batch((13,), (6, 7), (5, 8))], **square)


@pytest.mark.nightly
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_of_any_reach(window, threads):
    check(Packed(window).double(), batch((3, 10), (7, 6)), threads)


@pytest.mark.nightly
@pytest.mark.parametrize(("groups", "of_values"), [(1, 4), (1, 7), (4, 3)])
def test_one_head_of_keys_and_values_of_another_width(groups, of_values, threads):
    check(Packed("three places", groups, of_values).double(), batch((3, 10), (7, 6)), threads)


HOW = {
    "micro-batches": (dict(microbatches=2), {}),
    "recomputed": (dict(recompute="full"), {}),
    "compiled": ({}, dict(compile="aot_eager")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", HOW)
def test_however_a_program_runs(name, threads):
    planning, how = HOW[name]
    check(Packed("three places").double(), batch((3, 10), (7, 6)), threads, planning=planning, **how)


@pytest.mark.nightly
def test_a_plan_that_was_saved_and_recomputation_give_the_same_bits(threads, tmp_path):
    model, given = Packed().double(), batch((3, 10), (7, 6))
    planned = functools.partial(autopar.plan, model, given, mesh=RANKS, parallel=RING, memory_budget="inf")
    plan = planned()
    plan.save(tmp_path / "plan.json")
    expected = by_rank(model, given, plan, [given], threads)
    for other in (Plan.load(tmp_path / "plan.json"), planned(recompute="full"), planned(recompute="selective")):
        found = by_rank(model, given, other, [given], threads)
        for (one,), (right,) in zip(found, expected, strict=True):
            assert all(torch.equal(one[n], right[n]) for n in right)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_a_lower_precision_it_is_as_good_as_eager_torch(dtype, threads):
    """Errors of the loss and of all gradients together, against double precision."""
    model = Packed().to(dtype)
    given = batch((30, 40, 26), (10, 10, 76), dtype=dtype)
    exact = step(written(model).double(), given | {n: given[n].double() for n in "xy"})
    eager = step(written(model), given)

    def error(found):
        return sum(float((found[n].double() - e).norm() / e.norm()) ** 2 for n, e in exact.items()) ** 0.5

    plan = autopar.plan(model, given, mesh=DeviceMesh((RANKS,)), parallel=RING, memory_budget="inf")
    for (found,) in by_rank(model, given, plan, [given], threads):
        assert error(found) <= 2 * error(eager)
