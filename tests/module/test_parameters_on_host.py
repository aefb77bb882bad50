"""Parameters that lie on the host: training, evaluation and checkpoints are bit for bit those of devices."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import autopar
from autopar.runtime.host import HOST
from autopar.runtime.private import local_part
from tests.host import CASES, model_in, planned, small_values_travel, stepped
from tests.training import whole


def train(rank, model, batch, plan, max_norm):
    """All that three steps leave: two of which gradients of a micro-batch wait for another's, an evaluation between."""
    torch.manual_seed(0)
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2, max_norm=max_norm)
    stepped(mine, batch, optimizer, 1)
    with torch.no_grad():
        evaluated = getattr(outputs := mine(**batch), "loss", outputs)
    with mine.no_sync():
        getattr(outputs := mine(**batch), "loss", outputs).backward()
    getattr(outputs := mine(**batch), "loss", outputs).backward()
    found = {f"grad of {name}": whole(p.grad).clone() for name, p in mine.named_parameters()}
    optimizer.step()
    saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(optimizer.state_dict())
    stepped(mine, batch, optimizer, 1)
    mine.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    del saved
    stepped(mine, batch, optimizer, 1)
    for name, p in mine.named_parameters():
        parts = [local_part(p), local_part(p.grad)]
        assert {HOST.holds(part) for part in parts} == {name in plan.wholly_hosted}, name
        found[name] = whole(p.detach()).clone()
        found |= {f"{name} {k}": whole(v).clone() for k, v in optimizer.state[p].items() if k != "step"}
    return found | {"norm": optimizer.norm, "evaluated": evaluated}


@pytest.mark.parametrize(("name", "how", "dtype"), CASES)
def test_training_is_that_of_devices(name, how, dtype, threads):
    """Where all parameters lie on the host, and where every second one does; what has left is overwritten."""
    model, batch = model_in(name, dtype)
    plan = planned(model, batch, how)
    expected = threads(plan.mesh.size, train, model, batch, plan, 0.5)
    with small_values_travel():
        for names in ("*", list(plan.parameters)[::2]):
            there = planned(model, batch, how, names)
            for found, right in zip(threads(plan.mesh.size, train, model, batch, there, 0.5), expected, strict=True):
                assert found.keys() == right.keys()
                assert not [k for k in right if not torch.equal(found[k], right[k])]
    gc.collect()
    assert not HOST.bytes
