"""Placements, flows and shardings: what is written is what is read, and parts are those of torch.chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar import Cluster, DeviceMesh, P, R, S
from autopar.letters import BadSharding
from autopar.sharding.placement import Flow, Placement, Sharding, every_part_holds_something, local_shape, part

MESH = DeviceMesh((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    "text", ["R", "S(0)@dp", "S(1)@tp", "S(0)@dp, S(0)@tp", "S(0)@tp, S(0)@dp", "P(sum)@dp, S(2)@tp"]
)
def test_a_sharding_reads_what_it_writes(text):
    assert Sharding.parse(text, MESH).text(MESH.axes) == text


@given(st.lists(st.integers(1, 3), max_size=12).map(tuple))
def test_blocks_read_what_they_write(blocks):
    assert Placement.parse(repr(S(1, blocks))) == S(1, blocks)


def test_many_equal_blocks_are_written_in_short():
    assert repr(S(1, (4096,) * 16)) == "S(1, blocks=16x4096)"
    assert repr(S(1, (64,) * 8 + (16, 16))) == "S(1, blocks=(8x64, 16, 16))"
    assert repr(S(0, (7, 7, 7))) == "S(0, blocks=(7, 7, 7))"
    for wrong in ("S(1, blocks=0x4)", "S(1, blocks=(x))", "S(1, blocks=(4x)", "S(0, blocks=99999999x1)"):
        with pytest.raises(BadSharding, match="is not a placement"):
            Placement.parse(wrong)


def test_the_order_of_writing_is_the_order_of_cutting():
    assert Sharding.parse("S(0)@tp, S(0)@dp", MESH) != Sharding.parse("S(0)@dp, S(0)@tp", MESH)
    assert Sharding.parse("S(0)@tp, S(1)@dp", MESH) == Sharding.parse("S(1)@dp, S(0)@tp", MESH)


def test_on_one_axis_a_sharding_is_its_placement():
    assert Sharding((S(0),)) == S(0) and hash(Sharding((S(0),))) == hash(S(0)) and Sharding((S(0),)) != R


@pytest.mark.parametrize(
    "text, flow", [("R", Flow(R, R)), ("S(1)", Flow(S(1), S(1))), ("P(sum)", Flow(P(), R)), ("R/P(sum)", Flow(R, P()))]
)
def test_a_placement_alone_stands_for_a_flow(text, flow):
    assert Flow.parse(text) == flow and repr(flow) == text


@pytest.mark.parametrize("text", ["S(0)", "S(-1)@dp", "Q@dp", "S(0)@pp", "S(0)@dp, S(1)@dp", "P(max)@tp", ""])
def test_what_cannot_be_read_is_a_letter(text):
    with pytest.raises(BadSharding):
        Sharding.parse(text, MESH)


@given(st.integers(1, 40), st.integers(1, 9))
def test_parts_are_those_of_chunk(size, parts):
    pieces = torch.arange(size).chunk(parts)
    for i in range(parts):
        start, length = part(size, parts, i)
        assert torch.arange(size)[start : start + length].tolist() == (pieces[i].tolist() if i < len(pieces) else [])


@given(st.integers(1, 30), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_no_part_is_empty_when_it_is_said_so(size, parts):
    mesh = DeviceMesh(tuple(parts))
    sharding = Sharding((S(0),) * len(parts))
    smallest = min(local_shape((size,), sharding, mesh, mesh.coordinate(r))[0] for r in range(mesh.size))
    assert every_part_holds_something(size, parts) == (smallest > 0)


@pytest.mark.parametrize(
    "shape, axes", [((0,), None), ((2, 2), ("a",)), ((2, 2), ("a", "a")), ((2,), ("a@b",)), ((), None), ((True,), None)]
)
def test_a_mesh_that_cannot_be_is_a_letter(shape, axes):
    with pytest.raises(BadSharding):
        DeviceMesh(shape, axes)


@pytest.mark.parametrize(
    "name", ["generic", "a100", "h100", "h200", "l4", "rtx4090", "gb300", "mi355x", "l40s", "h100pcie"]
)
def test_a_cluster_file_says_where_its_figures_are_from(name):
    cluster = Cluster.of(f"{name}-4x2")
    assert (cluster.devices_per_node, cluster.nodes, len(cluster.links)) == (4, 2, 2) and {
        n for n, _ in cluster.sources
    } >= {"device", "links"}
    assert cluster.links[0].bytes_per_s > cluster.links[1].bytes_per_s and cluster.device.rate(
        "bfloat16"
    ) > cluster.device.rate("float32") >= cluster.device.rate("float64")
