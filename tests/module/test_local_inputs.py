"""inputs="local": every rank passes its own rows, and the step is that of the whole batch on one device."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.letters import BadInput, Disagreement, NotServed
from autopar.testing import Equality
from tests.equality.gpt2 import gpt2
from tests.models import eager_links, mlp_case
from tests.oracle import InFloat64
from tests.training import OPTIMIZERS, whole

DP, BOTH = autopar.DeviceMesh(4), autopar.DeviceMesh((2, 2), ("dp", "tp"))


def local(model, batch, mesh, **how):
    return autopar.autoparallelize(model, batch, mesh=mesh, cluster=eager_links(), inputs="local", **how)


def rows(model, batch):
    """This rank's part, cut by torch alone, as input_specs says."""
    here, mesh = {}, model.plan.mesh.to_torch("cpu")
    for name, t in batch.items():
        for axis in [
            s.partition("@")[2] or "devices" for s in model.input_specs[name].split(", ") if s != "R"
        ]:  # of a mesh of one axis it is not said
            parts = t.chunk(mesh.size(mesh.mesh_dim_names.index(axis)))
            i = mesh.get_local_rank(axis)
            t = parts[i] if i < len(parts) else t[:0]
        here[name] = t
    return here


def trained(model, batches, part=lambda b: b):
    stepper, losses = OPTIMIZERS["sgd"](model.parameters()), {}
    for i, batch in enumerate(batches):
        stepper.zero_grad()
        out = model(**part(batch))
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        stepper.step()
        losses[f"loss.{i}"] = loss.detach()
    with torch.no_grad():
        out = model(**part(batches[0]))
    return {
        **losses,
        "evaluated": (out if isinstance(out, torch.Tensor) else out.loss).detach(),
        **{n: whole(p).detach() for n, p in model.named_parameters()},
    }


@pytest.mark.parametrize(
    "mesh, how, text",
    [
        (DP, dict(parallel="dp"), "S(0)"),
        pytest.param(BOTH, dict(parallel=dict(tensor=2, data=2)), "S(0)@dp", marks=pytest.mark.nightly),
        pytest.param(BOTH, dict(parallel="zero3"), "S(0)@dp, S(0)@tp", marks=pytest.mark.nightly),
        pytest.param(DP, dict(constraints={"x": "S(1)", "y": "R"}), "R", marks=pytest.mark.nightly),
        pytest.param(DP, dict(constraints={"x": "S(0)", "y": "R"}), "S(0)", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_ranks_pass_their_own_rows(mesh, how, text, threads):
    """Rows that divide and rows that do not (7 of 4 ranks: 2, 2, 2, 1), a batch again, one without gradients."""
    model, batch = mlp_case()
    batches = [batch, {n: t[:7] for n, t in batch.items()}, {n: t[:4] * 2 for n, t in batch.items()}, batch]
    expected = trained(copy.deepcopy(model), batches)

    def body(rank):
        mine = local(copy.deepcopy(model), batch, mesh, **how)
        assert mine.input_specs == {"x": text, "y": text}
        return trained(mine, batches, lambda b: rows(mine, b))

    for result in threads(4, body):
        Equality.in_float64(f"{how} on {mesh}", result, expected, 1e-9).check()


@pytest.mark.parametrize("share, says", [(1, False), (4, True)])
def test_a_plan_for_the_rows_of_one_rank_is_noticed(share, says, threads, caplog):
    model, batch = mlp_case(batch=16)
    planned = {n: t[: 16 // share] for n, t in batch.items()}

    def body(rank):
        mine = local(copy.deepcopy(model), planned, DP, parallel="dp")
        for count in (16, 8):
            mine(**rows(mine, {n: t[:count] for n, t in batch.items()}))

    with caplog.at_level("INFO", "autopar"):
        threads(4, body)
    hints = [line for line in caplog.messages if line.startswith("the batch of all ranks has 16 rows")]
    assert len(hints) == says


def test_means_over_unequal_numbers_of_targets(threads):
    """Dropout off; targets are ignored in unequal numbers on the ranks.

    The loss is that of the batch, no mean of means.
    """
    model, batch = gpt2(0.0)
    with InFloat64():
        expected = trained(copy.deepcopy(model), [batch] * 2)

    def body(rank):
        with InFloat64():
            mine = local(copy.deepcopy(model), batch, BOTH, parallel=dict(tensor=2, data=dict(size=2, zero=3)))
            assert set(mine.input_specs.values()) == {"S(0)@dp"}
            return trained(mine, [batch] * 2, lambda b: rows(mine, b))

    for result in threads(4, body):
        Equality.in_float64("gpt2", result, expected, 1e-9).check()


def test_the_sampler_gives_ranks_of_a_part_the_same_and_all_everything(threads):
    model, batch = mlp_case()
    data = list(range(16))

    def body(rank):
        mine = local(copy.deepcopy(model), batch, BOTH, parallel=dict(tensor=2, data=2))
        everything = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=BOTH, parallel="dp").sampler(data)
        sampler = mine.sampler(data)
        sampler.set_epoch(3)
        return list(sampler), list(everything)

    found = threads(4, body)
    assert found[0][0] == found[1][0] and found[2][0] == found[3][0] and sorted(found[0][0] + found[2][0]) == data
    assert all(sorted(e) == data and e == found[0][1] for _, e in found)


@pytest.mark.parametrize(
    "wrong, letter, match",
    [
        (lambda rank, x, y: (x[: 1 + rank], y[: 1 + rank]), BadInput, r"ranks pass \[1, 2, 3, 4\] rows"),
        (lambda rank, x, y: (x[: 1 - rank // 2], y[: 1 - rank // 2]), BadInput, r"ranks pass \[1, 1, 0, 0\] rows"),
        (lambda rank, x, y: (x, y[:1]), BadInput, "different numbers of rows"),
        (lambda rank, x, y: (x.float() if rank == 2 else x, y), Disagreement, r"\[2\] differ"),
        (lambda rank, x, y: (x + (rank % 2), y), Disagreement, r"\[1, 3\] differ"),
    ],
)
def test_wrong_parts_are_letters_on_every_rank(wrong, letter, match, threads):
    model, batch = mlp_case()

    def body(rank):
        mine = local(copy.deepcopy(model), batch, BOTH, parallel=dict(tensor=2, data=2))
        x, y = wrong(rank, *rows(mine, batch).values())
        with pytest.raises(letter, match=match):
            mine(x, y)
        return mine(**rows(mine, batch)).item()

    assert len(set(threads(4, body))) == 1


def test_inputs_that_want_gradients_come_whole(threads):
    model, batch = mlp_case()
    batch["x"].requires_grad_()
    with pytest.raises(NotServed, match="wants a gradient"):
        threads(
            2, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="dp", inputs="local")
        )


def test_neither_do_they_later(threads):
    """They came without one when the model was made parallel; a gradient that stays None would say nothing."""
    model, batch = mlp_case()

    def body(rank):
        mine = local(copy.deepcopy(model), batch, DP, parallel="dp")
        here = rows(mine, batch)
        with torch.no_grad():
            mine(here["x"].clone().requires_grad_(), here["y"])  # nobody asks for it
        with pytest.raises(NotServed, match="wants a gradient"):
            mine(here["x"].clone().requires_grad_(), here["y"])

    threads(4, body)


class Counted(torch.nn.Module):
    """As Hugging Face's models take it: a sum over so many items, or a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = mlp_case()

    def forward(self, x, y, **loss_kwargs):
        off = (self.inner(x) - y).pow(2)
        count = loss_kwargs.get("num_items_in_batch")
        return off.mean() if count is None else off.sum() / count


def test_a_loss_that_a_trainer_would_scale_is_a_letter(threads):
    """Its convention is that of DDP, which takes the mean over ranks."""
    batch = mlp_case()[1]

    def body(rank):
        mine = local(Counted(), batch, DP, parallel="dp")
        here = rows(mine, batch)
        with pytest.raises(NotServed, match="model_accepts_loss_kwargs = False"):
            mine(**here, num_items_in_batch=torch.tensor(batch["y"].numel()))
        assert mine(**here, num_items_in_batch=None).isfinite()

    threads(4, body)
