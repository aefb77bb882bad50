"""What a model in stages saves is read without stages, and by other stages; what one device has saved is read by it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import autopar
from tests.stages.models import Decoder, Twice, case
from tests.stages.ranks import NONE, apart, made, outcome

pytestmark = pytest.mark.machines


class Saves(Decoder):
    def save_pretrained(self, folder, is_main_process=True, state_dict=None):
        folder.mkdir()
        torch.save(self.state_dict() if state_dict is None else state_dict, folder / "weights.pt")


def trained(model, batch, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    go_on(model, optimizer, batch, steps)
    return model, optimizer


def go_on(model, optimizer, batch, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()


def assert_alike(model, alone, bar=1e-9):  # AdamW makes much of the rounding of key biases, whose gradient is none
    there = dict(alone.named_parameters())
    wrong = {n: e for n, p in model.named_parameters() if not (e := apart(p.detach(), there[n].detach())) < bar}
    assert not wrong, wrong


def of_the_ways_between_meshes(folder):
    _, batch = case("decoder")
    torch.manual_seed(1)
    first = Saves().double()
    alone, its = trained(copy.deepcopy(first), batch, 2)
    in_two, optimizer = trained(made(copy.deepcopy(first), batch, (2, 2)), batch, 2)
    spread = autopar.autoparallelize(copy.deepcopy(first), batch, mesh=4, parallel="dp", memory_budget="inf")
    in_four = made(copy.deepcopy(first), batch, (4,), parallel=None)
    others = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (spread, in_four)]
    yield "trained", lambda: assert_alike(in_two, alone)

    def there_and_back():
        autopar.save(folder / "a", in_two, optimizer, step=2)
        assert autopar.load(folder / "a", spread, others[0]).step == 2
        assert_alike(spread, alone)
        go_on(alone, its, batch)
        go_on(spread, others[0], batch)
        autopar.save(folder / "b", spread, others[0], step=3)
        assert autopar.load(folder / "b", in_four, others[1]).step == 3
        go_on(alone, its, batch)
        go_on(in_four, others[1], batch)
        assert_alike(in_four, alone)

    yield "autopar.save and load", there_and_back

    def by_torch():
        state = {"model": in_two.state_dict(), "optimizer": get_optimizer_state_dict(in_two, optimizer)}
        dcp.save(state, checkpoint_id=folder / "c")
        for model, other in ((in_four, others[1]), (spread, others[0])):
            into = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, other)}
            dcp.load(into, checkpoint_id=folder / "c")
            model.load_state_dict(into["model"])
            assert_alike(model, in_two)
            for name, states in into["optimizer"]["state"].items():
                assert apart(states["exp_avg"], state["optimizer"]["state"][name]["exp_avg"].full_tensor()) == 0.0, name

    yield "torch.distributed.checkpoint", by_torch

    def on_one_device():
        plain = autopar.gather(in_two)
        assert type(plain) is Saves and plain.head.weight is plain.table.weight
        assert_alike(in_two, plain, 1e-15)
        in_two.load_state_dict(alone.state_dict())
        assert_alike(in_two, alone, 1e-15)
        in_two.save_pretrained(folder / "d")
        dist.barrier()
        saved = torch.load(folder / "d" / "weights.pt")
        assert saved.keys() == alone.state_dict().keys()
        assert all(torch.equal(saved[name], value) for name, value in alone.state_dict().items())
        with pytest.raises(autopar.NotServed, match="holds a part"):
            torch.save(in_two.state_dict(), folder / "e.pt")

    yield "one device", on_one_device


def test_checkpoints_go_from_stages_to_none_and_back(tmp_path):
    assert outcome(of_the_ways_between_meshes, tmp_path) == NONE


def of_models_on_meta(folder):
    from safetensors.torch import save_file

    alone, batch = case("twice")
    if dist.get_rank() == 0:
        save_file(alone.state_dict(), folder / "weights.safetensors")
    dist.barrier()

    def on_meta():
        with torch.device("meta"):
            return Drawn().double()

    read = made(on_meta(), batch, weights=str(folder / "weights.safetensors"))
    yield "weights=", lambda: assert_alike(read, alone, 1e-15)
    for init in ("module", "counter"):
        found = []
        for make in (made, lambda model, batch, **how: autopar.autoparallelize(model, batch, mesh=4, **how)):
            torch.manual_seed(3)
            found.append(make(on_meta(), batch, init=init))
        yield init, lambda found=found: assert_alike(*found, 1e-15)


class Drawn(Twice):
    def reset_parameters(self):
        nn.init.normal_(self.shared)


@pytest.mark.nightly
def test_models_on_meta_begin_as_without_stages(tmp_path):
    assert outcome(of_models_on_meta, tmp_path) == NONE
