"""Walks over a small graph: two views of one value, an op with several results, and what reads them."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.fx as fx

from autopar.graph import walks


@pytest.fixture
def nodes():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    found = {"x": x, "w": w}
    found["cast"] = graph.call_method("float", (w,))
    found["turned"] = graph.call_method("t", (found["cast"],))
    found["product"] = graph.call_function(torch.mm, (x, found["turned"]))
    found["pair"] = graph.call_function(torch.split, (found["product"], 2))
    found["first"] = graph.call_function(operator.getitem, (found["pair"], 0))
    found["second"] = graph.call_function(operator.getitem, (found["pair"], 1))
    found["square"] = graph.call_function(torch.mul, (found["first"], found["first"]))
    found["both"] = graph.call_function(torch.add, (found["square"], found["cast"]))
    graph.output((found["both"],))
    return found


def hands_on(node):
    return node.op == "call_method"


def test_ancestors_are_all_that_a_value_is_made_of(nodes):
    assert walks.ancestors([nodes["square"]]) == {
        nodes[n] for n in ("x", "w", "cast", "turned", "product", "pair", "first", "square")
    }
    stops = {nodes["product"], nodes["cast"]}.__contains__
    assert walks.ancestors([nodes["both"]], stops) == {nodes[n] for n in ("both", "square", "first", "pair")}


def test_an_origin_is_behind_all_that_hands_on(nodes):
    assert (
        walks.origin(nodes["turned"], hands_on) is nodes["w"] and walks.origin(nodes["pair"], hands_on) is nodes["pair"]
    )


def test_values_made_of_one_source(nodes):
    found = walks.made_of_one(nodes["x"].graph.nodes, {nodes["x"], nodes["w"]}.__contains__, hands_on)
    assert found == {nodes[n]: nodes[s] for n, s in (("x", "x"), ("w", "w"), ("cast", "w"), ("turned", "w"))}


def test_uses_follow_what_hands_on(nodes):
    assert list(walks.uses(nodes["w"], hands_on)) == [nodes[n] for n in ("cast", "turned", "product", "both")]
    assert list(walks.uses(nodes["cast"], lambda _: False)) == [nodes["turned"], nodes["both"]]


def test_parts_and_operands(nodes):
    assert walks.parts(nodes["pair"]) == [nodes["first"], nodes["second"]] and walks.parts(nodes["first"]) == []
    assert walks.operands(nodes["square"]) == [nodes["first"], nodes["first"]]
