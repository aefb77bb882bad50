"""Calls of `autopar.experts` that do not go together: a letter with the line of the model, before planning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.letters import NotServed

HELD = torch.ones(8)


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        weights, ids = x[..., :4].softmax(-1).topk(2)
        given = dict(input=x, ids=ids, weights=weights, up=self.up, down=self.down, body=F.silu)
        return autopar.experts(**given | self.change(given)).square().sum()


WRONG = {
    "rows of three dims": (lambda a: dict(input=a["input"][None]), "rows of two dims"),
    "ids that are no numbers of experts": (lambda a: dict(ids=a["ids"].float()), "whole numbers"),
    "fewer weights than ids": (lambda a: dict(weights=a["weights"][:, :1]), "ids and weights"),
    "one matrix": (lambda a: dict(up=a["up"][0]), "three dims"),
    "matrices the other way round": (lambda a: dict(up=a["up"].mT), "transposed=True"),
    "a gate too many": (lambda a: dict(gated=False), "a width of 1 x 8"),
    "a bias of another width": (lambda a: dict(up_bias=torch.zeros(4, 8)), "biases"),
    "an unknown gate": (lambda a: dict(gated="both"), "interleaved"),
    "a body that asks": (lambda a: dict(body=lambda rows: rows if rows.sum() > 0 else -rows), "no question"),
    "a body with a tensor of its own": (lambda a: dict(body=lambda rows, of=HELD: rows * of), "method"),
}


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG)
def test_a_call_that_does_not_fit_is_a_letter(change, said):
    x = torch.randn(6, 8)
    with pytest.raises(NotServed, match=said):
        Model(change)(x)
    with pytest.raises(NotServed, match=said) as letter:
        autopar.plan(Model(change), {"x": x}, mesh=2)
    assert "test_experts.py:" in letter.value.at and "in Model.forward" in letter.value.at


@pytest.mark.parametrize("imbalance", [0, 0.5, "much", True])
def test_a_load_below_the_mean_is_a_letter(imbalance):
    with pytest.raises(NotServed, match="imbalance"):
        autopar.Assume(imbalance=imbalance)
