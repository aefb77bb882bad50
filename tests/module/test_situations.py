"""Calls that differ from the one a model was made for.

The parallel model computes what the single-device model does, and lowers once for each kind of call.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from importlib import resources

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.letters import BadInput, Infeasible, NotCaptured
from autopar.module import state
from autopar.request import Request
from autopar.search import plan_again, plan_of
from autopar.testing import Equality, on_threads
from tests.language import gpt2
from tests.models import MLP, batch_of, eager_links, mlp_case
from tests.shares import by_day
from tests.training import results, whole

MESHES = [DeviceMesh((2,), ("dp",)), DeviceMesh((2, 2), ("dp", "tp"))]
X = torch.arange(32, dtype=torch.float64).view(8, 4) / 10


def parallel(model, batch, **how):
    """The model in parallel on two ranks that are threads, each with a copy of its own."""
    return autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, cluster=eager_links(), **how)


@pytest.mark.parametrize(
    "preset, mesh",
    by_day(itertools.product((None, "dp", "zero3", "megatron"), MESHES), ("zero3", MESHES[1])),
    ids=str,
)
def test_batches_of_other_sizes(preset, mesh):
    if preset == "megatron" and len(mesh.shape) == 1:
        mesh = DeviceMesh((2,), ("tp",))
    model, batch = mlp_case()
    expected = [results(model, model(**batch_of(rows))) for rows in (8, 3, 7, 1, 8)]

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=mesh, parallel=preset, cluster=eager_links())
        before = {n: p.placements for n, p in mine.named_parameters()}
        found = [results(mine, mine(**batch_of(rows))) for rows in (8, 3, 7, 1, 8)]
        assert {n: p.placements for n, p in mine.named_parameters()} == before and len(mine._autopar.programs) == 4
        return found

    for rank in on_threads(mesh.size, body):
        for ours, theirs in zip(rank, expected, strict=True):
            Equality.in_float64(f"{preset} on {mesh}", ours, theirs, 1e-9).check()


class OfNoRows(nn.Module):
    """Two layers, the first of which also reads none of the rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return (self.down(self.up(x).relu()) - x).square().sum() + self.up(x[:0]).sum()


@pytest.mark.parametrize(
    ("preset", "first"),
    by_day([("megatron", 8), ("megatron", 0), (None, 8), (None, 0), ("zero3", 8)], ("megatron", 8), (None, 0)),
    ids=str,
)
def test_batches_of_no_rows(preset, first):
    """As the last batch of a filtered data set, or as the example: gradients of zeros, as on one device."""
    torch.manual_seed(0)
    model, batches = OfNoRows().double(), [{"x": X[:first]}, {"x": X[:0]}, {"x": X}]
    alone = copy.deepcopy(model)

    def steps(model):
        return [results(model, model(**batch)) for batch in batches]

    expected = steps(alone)
    for found in on_threads(2, lambda rank: steps(parallel(model, batches[0], parallel=preset, memory_budget="inf"))):
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            Equality.in_float64(f"batch {k} under {preset}", one, other, 1e-9).check()


def test_a_pattern_that_matches_parameters_alone_does_not_undo_other_constraints():
    """Their storage is pinned by name where another batch is planned, which comes before any pattern."""
    model, batch = mlp_case()
    asked = dict(mesh=DeviceMesh((2, 2), ("dp", "tp")), constraints={"*.weight": "S(0)@dp; *", "x": "S(0)@dp"})
    request = Request(**asked, memory_budget="inf")
    first = plan_of(request.trace(model, batch), request)
    again = plan_again(request.trace(model, batch_of(4)), request, first)
    assert again.decisions["x"].flows() == first.decisions["x"].flows() and not again.warnings
    impossible = dataclasses.replace(request, constraints={"x": "S(7)@dp"})
    told = plan_again(request.trace(model, batch_of(3)), impossible, first).warnings
    assert told[0].startswith("another batch is planned without constraints and preset: ")


def test_another_batch_is_searched_for_once_under_the_budget_and_once_without_one(monkeypatch):
    """Whatever is in the way: a training loop waits."""
    model, batch = mlp_case()
    request, asked = Request(mesh=(2,), memory_budget="inf"), []
    first = plan_of(request.trace(model, batch), request)

    def refused(graph, request, started=math.inf, is_trial=False, known=math.inf):
        asked.append((request.memory_budget, is_trial))
        raise Infeasible("no plan")

    monkeypatch.setattr("autopar.search._in_few_turns", refused)
    with pytest.raises(Infeasible, match="no plan"):
        plan_again(request.trace(model, batch_of(4)), dataclasses.replace(request, memory_budget=1 << 20), first)
    assert asked == [(1 << 20, True), (math.inf, True)]


def test_another_batch_is_planned_without_the_file_of_the_cluster(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(resources.files("autopar.sharding.clusters").joinpath("a100.json").read_text())
    model, batch = mlp_case()
    request = Request(mesh=2, cluster=str(path), memory_budget="inf")
    first = plan_of(request.trace(model, batch), request)
    path.unlink()
    again = plan_again(request.trace(model, batch_of(4)), request, first)
    assert again.cluster == first.cluster and "mine" in again.cluster


def ids(rows, length):
    made = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    return {"input_ids": made, "labels": made}


def test_train_eval_lengths_and_no_labels():
    """A training loop with validation.

    Another length, a last batch, eval without gradients, logits without labels, and training again. (The loss of
    Hugging Face is in float32.)
    """
    torch.manual_seed(3)
    model = gpt2(1, width=32, vocabulary=61, length=32, dropout=0.0).double()

    def loop(model, put):
        put("train", results(model, model(**ids(4, 8)).loss))
        put("longer", results(model, model(**ids(4, 12)).loss))
        model.eval()
        with torch.no_grad():
            out = model(**ids(3, 8))
            put("eval", {"loss": out.loss})
            logits = model(input_ids=ids(2, 8)["input_ids"]).logits
            put("logits", {"logits": whole(logits)})
        assert not out.loss.requires_grad
        put("eval with gradients", results(model, model(**ids(4, 8)).loss))
        model.train()
        put("train again", results(model, model(**ids(4, 8)).loss))

    expected = {}
    loop(model, expected.__setitem__)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model).train(), ids(4, 8), mesh=MESHES[1], cluster=eager_links())
        found = {}
        loop(mine, found.__setitem__)
        return found

    for rank in on_threads(4, body):
        for name, theirs in expected.items():
            Equality.in_float64(name, rank[name], theirs, 1e-6).check()


def test_dropout_stops_in_eval_and_parameters_thaw():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    model[0].requires_grad_(False)
    x, mean = torch.randn(6, 8).double(), (lambda out, inputs: out.square().mean())
    expected = {}
    own = copy.deepcopy(model).eval()
    expected["frozen"] = results(own, own(x).square().mean())
    own.requires_grad_(True)
    expected["thawed"] = results(own, own(x).square().mean())
    own[2].bias.requires_grad_(False)
    expected["frozen again"] = results(own, own(x).square().mean())

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), (x,), mesh=2, loss=mean, cluster=eager_links()).eval()
        found = {"frozen": results(mine, mine(x)[0])}
        mine.requires_grad_(True)
        found["thawed"] = results(mine, mine(x)[0])
        mine[2].bias.requires_grad_(False)
        found["frozen again"] = results(mine, mine(x)[0])
        return found

    for rank in on_threads(2, body):
        for name, theirs in expected.items():
            Equality.in_float64(name, rank[name], theirs, 1e-9).check()


def test_one_kind_of_call_is_planned_once_however_it_is_written(monkeypatch):
    model, batch = mlp_case()
    planned = []
    monkeypatch.setattr("autopar.api.plan_again", lambda graph, *how: planned.append(graph) or plan_again(graph, *how))

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, cluster=eager_links())
        for call in (
            lambda b: mine(**b),
            lambda b: mine(b["x"], b["y"]),
            lambda b: mine(b["x"], y=b["y"]),
            lambda b: mine(y=b["y"], x=b["x"]),
        ):
            values = {call(batch).item(), call(batch).item()}
            assert len(values) == 1
        with torch.no_grad():
            assert mine(**batch).item() in values
        with torch.inference_mode():
            assert mine(**batch).item() in values
        before = len(mine._autopar.programs)
        for _ in range(2):
            mine(**batch_of(5))
        return before, len(mine._autopar.programs)

    assert on_threads(2, body) == [(2, 3)] * 2 and len(planned) == 1


def test_under_autocast_it_computes_as_eager_does_under_autocast():
    model, batch = MLP(16), {k: v.float() for k, v in batch_of(8).items()}
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(model, model(**batch))
    plain = results(model, model(**batch))

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", cluster=eager_links())
        found = [results(mine, mine(**batch))]
        with torch.autocast("cpu", torch.bfloat16):
            loss = mine(**batch)
        return [*found, results(mine, loss)]

    for without, within in on_threads(2, body):
        assert all(torch.allclose(within[k], expected[k], rtol=2e-2, atol=1e-3) for k in expected) and not torch.equal(
            within["loss"], without["loss"]
        )
        assert torch.allclose(without["loss"], plain["loss"], rtol=1e-6)


@pytest.mark.nightly
def test_a_line_says_what_no_earlier_call_had(caplog):
    """Autocast is new; the mode and gradients are not, though the call before had both otherwise."""
    model, batch = MLP(16), {k: v.float() for k, v in batch_of(8).items()}
    mine = autopar.autoparallelize(model, batch, mesh=1)
    with torch.no_grad():
        mine.eval()(**batch)
    with caplog.at_level("INFO", "autopar"), torch.autocast("cpu", torch.bfloat16):
        mine.train()(**batch)
    (said,) = [line for line in caplog.messages if line.startswith("planned and lowered")]
    assert "at its first call under this autocast (bfloat16 on cpu); expected" in said


def test_inputs_that_want_gradients_get_them():
    model, batch = mlp_case()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, cluster=eager_links())
        mine(**batch).backward()
        x = batch["x"].clone().requires_grad_()
        mine(x, batch["y"]).backward()
        return x.grad

    x = batch["x"].clone().requires_grad_()
    model(x, batch["y"]).backward()
    for gradient in on_threads(2, body):
        torch.testing.assert_close(gradient, x.grad)


def test_hooks_of_the_model_itself_run_once_and_later_ones_too():
    model, batch = mlp_case()
    model.register_forward_hook(lambda module, args, out: out * 2)
    expected = model(**batch).item()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, cluster=eager_links())
        first = mine(**batch).item()
        mine.register_forward_hook(lambda module, args, out: out * 10)
        return first, mine(**batch).item(), mine(**batch_of(5)).item()

    five = model(**batch_of(5)).item()
    for found in on_threads(2, body):
        assert found == pytest.approx((expected, expected * 10, five * 10), rel=1e-9)


WRONG_CALLS = [
    (lambda m, b: m(b["x"], b["y"], 3), BadInput, "does not take these inputs"),
    (lambda m, b: m(), BadInput, "missing a required argument"),
    (lambda m, b: m(x=b["x"][:4], y=b["y"]), NotCaptured, "raises RuntimeError"),
    (lambda m, b: m(x=b["x"].float(), y=b["y"]), NotCaptured, "float32 and float64"),
    (lambda m, b: m(x=b["x"][:, :3], y=b["y"]), NotCaptured, "raises RuntimeError"),
    (lambda m, b: m(x=3, y=b["y"]), NotCaptured, "raises TypeError"),
]


def test_a_wrong_call_is_a_letter_before_any_collective():
    """On one rank of two: it does not wait for the other, and both go on."""
    model, batch = mlp_case()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2)
        losses = []
        for call, letter, match in WRONG_CALLS:
            if rank == 0:
                with pytest.raises(letter, match=match):
                    call(mine, batch)
            losses.append(mine(**batch).item())
        return losses

    assert on_threads(2, body) == [pytest.approx([model(**batch).item()] * len(WRONG_CALLS))] * 2


def test_only_so_many_programs_are_kept(monkeypatch):
    monkeypatch.setattr(state, "LIMITS", dataclasses.replace(state.LIMITS, programs=3))
    model, batch = mlp_case()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2)
        values = [mine(**batch_of(rows)).item() for rows in (1, 2, 3, 4, 1)]
        return len(mine._autopar.programs), values[0] == values[-1]

    assert on_threads(2, body) == [(3, True)] * 2


def test_a_call_under_inference_mode_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double().eval()
    own = copy.deepcopy(model)
    own(X).sum().backward()

    def body(rank):
        mine = parallel(model.train(), (X,)).eval()
        with torch.inference_mode():
            mine(X)
        mine(X).sum().backward()
        return [whole(p.grad) for p in mine.parameters()]

    for found in on_threads(2, body):
        for gradient, p in zip(found, own.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4).double()

    def forward(self, x, k):
        h = self.l(x).square().mean()
        if isinstance(k, set):
            return h * (2 if "a" in k else 3)
        return h if k is True else h * 5 if isinstance(k, float) else h * 3


def test_constants_are_what_they_are_now():
    model = Switched()

    def body(rank):
        mine = parallel(model, {"x": X, "k": True})
        found = [mine(X, k).item() for k in (True, 1, 1.0)]
        held = {"z"}
        found.append(mine(X, held).item())
        held.add("a")
        found.append(mine(X, held).item())
        for _ in range(3):
            mine(X, float("nan"))
        return found, len(mine._autopar.programs)

    base = model(X, True).item()
    for found, programs in on_threads(2, body):
        assert found == pytest.approx([base, 3 * base, 5 * base, 3 * base, 2 * base]) and programs == 6


def test_a_model_made_without_gradients_is_lowered_once_for_training(monkeypatch):
    """Under no_grad a user may make the model that then trains: its inputs want gradients in the first call."""
    model, x = nn.Linear(4, 4).double(), X.clone().requires_grad_()

    def refused(*_):
        raise AssertionError("lowered again")

    with torch.no_grad():
        mine = autopar.autoparallelize(model, {"input": x}, mesh=1, cluster=eager_links())
    monkeypatch.setattr(state, "lower_again", refused)
    mine(input=x).sum().backward()
    assert x.grad is not None
