"""Patches of torch: they ask whose an object is, and what was there is put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.module.attributes import reads_of
from autopar.module.optimizers import check_step
from autopar.runtime import patches
from autopar.runtime.owned_meshes import is_ours
from autopar.runtime.patches import Patch, Patches
from tests.models import MLP

BATCH = {k: torch.randn(8, 16) for k in ("x", "y")}


class Shelf:
    book = "theirs"


def test_a_patch_is_undone_and_what_was_inherited_is_inherited_again():
    class Upper(Shelf):
        pass

    own, inherited = Patch(Shelf, "book", lambda theirs: theirs + " and ours"), Patch(Upper, "book", str.upper)
    assert (Shelf.book, Upper.book) == ("theirs and ours", "THEIRS AND OURS")
    inherited.undo()
    own.undo()
    assert Upper.book == "theirs" and "book" not in vars(Upper)
    entry = {}
    added = Patch(entry, "op", lambda theirs: [theirs])
    assert entry == {"op": [None]}
    added.undo()
    assert entry == {}


def test_another_s_patch_on_ours_stays():
    patch = Patch(Shelf, "book", lambda theirs: "ours")
    Shelf.book = "another's"
    patch.undo()
    assert Shelf.book == "another's"
    Shelf.book = "theirs"


def test_patches_stand_once_and_end_together():
    standing = Patches()
    for _ in range(2):
        standing.put(Shelf, "book", lambda theirs: theirs + "!")
    assert Shelf.book == "theirs!"
    standing.undo()
    assert Shelf.book == "theirs"


def test_after_undo_torch_is_as_it_was(threads):
    def of_torch():
        handlers = dict(patches.handlers())
        methods = [DTensor.__reduce_ex__, DTensor.__create_write_items__, DistributedDataParallel.__init__]
        return handlers, [*methods, torch.optim.Optimizer.zero_grad, nn.Module.__getattribute__, nn.init.orthogonal_]

    patches.STANDING.undo()
    before, model = of_torch(), MLP(16, 2)
    autopar.autoparallelize(copy.deepcopy(model), BATCH, mesh=1)
    assert of_torch() != before
    patches.STANDING.undo()
    assert of_torch() == before and "__getattribute__" not in vars(nn.Module)
    autopar.autoparallelize(model, BATCH, mesh=1)  # for whoever comes next


def test_a_step_is_looked_at_once_however_many_models_there_are(threads):
    patches.STANDING.undo()
    model, seen = autopar.autoparallelize(MLP(16, 2), BATCH, mesh=1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    patches.STANDING.undo()
    for _ in range(3):
        patches.before_steps(seen.append)
    optimizer.step()
    optimizer.step(lambda: None)  # a closure may have the last backward in it
    assert len(seen) == 1 and len(seen[0]) == len(list(model.parameters()))
    patches.STANDING.undo()
    optimizer.step()
    assert len(seen) == 1
    autopar.autoparallelize(MLP(16, 2), BATCH, mesh=1)  # for whoever comes next


def test_reads_are_noted_of_the_model_s_own_modules_alone():
    model, other = MLP(16, 2), MLP(16, 2)
    with reads_of(model) as read:
        assert model.training and other.training
    assert {name for _, _, name in read} >= {"training"}
    assert nn.Module.__getattribute__ is object.__getattribute__


def test_other_people_s_tensors_are_left_alone(fake_world):
    with fake_world(4):
        mine = autopar.autoparallelize(MLP(16, 2), BATCH, mesh=(4,), parallel="zero3")
        assert all(map(is_ours, mine.parameters()))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        theirs = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Replicate()]))
        assert not is_ours(theirs) and not is_ours(torch.zeros(1))
        check_step(torch.optim.Rprop([theirs]))
        copy.copy(theirs.data)  # no error about files
        with pytest.raises(autopar.NotServed, match="Rprop cannot step parameters of a parallel model"):
            check_step(torch.optim.Rprop(mine.parameters()))
        theirs.grad = torch.zeros_like(theirs)
        with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
            torch.ops.aten._is_any_true(theirs.grad.to(torch.bool))
        assert not torch.ops.aten._is_any_true(next(mine.parameters()).detach().to(torch.bool) & False)
