"""Ranks whose parts lie otherwise in memory run the same collectives.

An uneven part of one row is contiguous however it is turned.
"""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx

from autopar.codegen.halves import split
from autopar.codegen.joint_graph import JointGraph
from autopar.codegen.joint_passes import drop_round_trips
from autopar.runtime.collectives import STEPS

aten = torch.ops.aten
MEMORY_ORDER = {"memory_format": torch.contiguous_format}


def placed(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape)
    return node


def called(target, val: torch.Tensor, *args, **kwargs) -> fx.Node:
    """A call at the end of its operands' graph."""
    node = args[0].graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    return node


@pytest.mark.parametrize("rows", [1, 2])
def test_a_round_trip_is_dropped_however_its_value_lies(rows):
    graph = fx.Graph()
    x = placed(graph, "x", 4, rows)
    turned = called(aten.t.default, torch.empty(4, rows).t(), x)
    part = called(STEPS["slice"], torch.empty(rows, 2), turned, "dp", 1, 4, ())
    back = called(STEPS["all_gather"], torch.empty(rows, 4), part, "dp", 1, 4, ())
    graph.output((back,))
    joint = JointGraph(graph, [x], [], [back], [], [], (), 1)
    drop_round_trips(joint)
    assert not graph.find_nodes(op="call_function", target=STEPS["all_gather"])
    (out,) = joint.outputs
    assert out.meta["val"].is_contiguous() and (out is turned) == (rows == 1)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_regathered_parameter_is_made_again_however_it_lies(rows):
    graph = fx.Graph()
    w, x = placed(graph, "w", 2, rows), placed(graph, "x", 3, rows)
    tangent = placed(graph, "tangent", 3, 4)
    whole = called(STEPS["all_gather"], torch.empty(4, rows), w, "dp", 0, 4, ())
    used = called(aten.t.default, torch.empty(4, rows).t(), whole)
    if not used.meta["val"].is_contiguous():  # what a conversion without steps leaves
        used = called(aten.clone.default, torch.empty(rows, 4), used, **MEMORY_ORDER)
    y = called(aten.mm.default, torch.empty(3, 4), x, used)
    gradient = called(
        aten.mm.default, torch.empty(3, rows), tangent, called(aten.t.default, torch.empty(rows, 4).t(), used)
    )
    graph.output((y, gradient, None))
    joint = JointGraph(graph, [w, x], [tangent], [y], [gradient], [1], (0,), 2, held=[None])
    gathers = split(joint, {w}).backward.find_nodes(op="call_function", target=STEPS["all_gather"])
    assert len(gathers) == 1
