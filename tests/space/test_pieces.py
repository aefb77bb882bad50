"""The pieces of memory of one product by hand: bytes on two devices, and when they are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer

# x of (2, 4) times a weight of (6, 4), in float32. Times of forward: x 0, product 1, relu 2, sum 3; of backward:
# sum 4, relu 5, product 6; of the step: 8.
X, WEIGHT, RESULT, NUMBER = 2 * 4 * 4, 6 * 4 * 4, 2 * 6 * 4, 4
ALWAYS = (0, 8)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 6, bias=False)

    def forward(self, x):
        return torch.relu(self.w(x)).sum()


@pytest.fixture(scope="module")
def space():
    graph = ColoTracer().trace(Product(), {"x": torch.randn(2, 4)})
    return shardings(graph, Setting(autopar.DeviceMesh((2,)), autopar.Cluster.of("generic")))


def of_site(space, name, choice):
    """Kind, bytes and times of the pieces of a site under a choice."""
    (place,) = (i for i, site in enumerate(space.sites) if site.name == name)
    (k,) = (i for i, c in enumerate(space.sites[place].choices) if str(c) == choice)
    pieces = [p for p in space.memory.pieces if not p.is_edge and p.place == place]
    return [(p.kind, p.bytes[k], (p.first, p.last)) for p in pieces]


def of_edge(space, source, target, given, taken):
    """The same of the edge between two sites, where this flow leaves and that arrives."""
    for place, edge in enumerate(space.edges):
        if (space.sites[edge.source].name, space.sites[edge.target].name) == (source, target):
            at = [str(f[0]) for f in edge.given].index(given), [str(f[0]) for f in edge.taken].index(taken)
            pieces = [p for p in space.memory.pieces if p.is_edge and p.place == place]
            return [(p.kind, p.bytes[at], (p.first, p.last)) for p in pieces if p.bytes[at]]
    raise KeyError((source, target))


@pytest.mark.parametrize("choice, parts", [("-> R", 1), ("-> S(0)", 2), ("-> S(1)", 2)])
def test_a_parameter_has_its_gradient_two_states_and_a_temporary(space, choice, parts):
    held = WEIGHT / parts
    assert of_site(space, "w.weight", choice) == [
        ("parameters", held, ALWAYS),
        ("gradients", held, (6, 8)),  # from the backward of the product on
        ("optimizer states", 2 * held, ALWAYS),
        ("step temporaries", held, (8, 8)),
    ]


def test_an_input_is_held_all_the_while(space):
    assert of_site(space, "x", "-> R") == [("inputs and buffers", X, ALWAYS)]


@pytest.mark.parametrize("product, relu, parts", [("R, R -> R", "R -> R", 1), ("R, S(0) -> S(1)", "S(1) -> S(1)", 2)])
def test_a_value_is_there_until_its_last_reader(space, product, relu, parts):
    held = RESULT / parts
    assert of_site(space, "w/linear", product) == [
        ("transients", held, (1, 1)),  # the relu is written over it
        ("gradients of activations", held, (5, 6)),
    ]
    assert of_site(space, "/relu", relu) == [
        ("saved activations", held, (2, 5)),  # its sign is needed in backward
        ("gradients of activations", held, (4, 5)),
    ]


def test_a_conversion_makes_what_arrives_and_its_gradient_comes_whole(space):
    edge = space, "w.weight", "w/linear"
    assert of_edge(*edge, "S(0)", "S(0)") == []
    assert of_edge(*edge, "R", "S(0)") == [
        ("gathered parameters", WEIGHT / 2, (1, 1)),
        ("gradients", WEIGHT, (6, 6)),  # gathered, as it is stored
    ]
    # of a whole product the relu takes a part, which is made for it
    assert of_edge(space, "w/linear", "/relu", "R", "S(1)")[0] == ("transients", RESULT / 2, (2, 2))
