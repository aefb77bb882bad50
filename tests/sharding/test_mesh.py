"""Meshes: who stands where, and the one that a table of links asks for."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

import autopar
from autopar import Cluster, DeviceMesh
from autopar.letters import BadCluster, BadSharding
from autopar.sharding.cluster import Measured
from autopar.sharding.costs import collective_seconds
from autopar.sharding.topology import logical_mesh
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer
from tests.models import mlp_case

MESH = DeviceMesh((2, 3, 4), ("pp", "dp", "tp"))


def test_ranks_are_row_major():
    assert [MESH.rank(MESH.coordinate(r)) for r in range(24)] == list(range(24)) and MESH.coordinate(17) == (1, 1, 1)
    grid = np.arange(24).reshape(2, 3, 4)
    for a, name in enumerate(MESH.axes):
        assert sorted(MESH.groups(name)) == sorted(
            map(tuple, np.moveaxis(grid, a, -1).reshape(-1, grid.shape[a]).tolist())
        )


def test_parts_of_a_mesh_are_meshes():
    assert MESH["tp"] == DeviceMesh(4, ("tp",)) and MESH["pp", "tp"] == DeviceMesh((2, 4), ("pp", "tp"))
    for wrong in ("ep", ("tp", "pp"), ("tp", "tp")):
        with pytest.raises(BadSharding):
            MESH[wrong]
    with pytest.raises(BadSharding, match="is not a coordinate"):
        MESH.rank((2, 0, 0))


def test_torchs_own_mesh_is_taken_as_it_is(fake_world):
    with fake_world(8):
        theirs = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert DeviceMesh.of(theirs) == DeviceMesh((2, 4), ("dp", "tp"))
        turned = torch.distributed.device_mesh.DeviceMesh(
            "cpu", torch.arange(8).view(2, 4).t().contiguous(), mesh_dim_names=("tp", "dp")
        )
        ours = DeviceMesh.of(turned)
        assert ours.ranks == (0, 4, 1, 5, 2, 6, 3, 7) and ours.coordinate(5) == (1, 1)
        assert torch.equal(ours.to_torch("cpu").mesh, turned.mesh)


def test_models_of_one_job_share_process_groups(fake_world):
    """Of equal meshes; those of the job before have ended with it."""
    mesh, turned = DeviceMesh((2, 4), ("dp", "tp")), DeviceMesh((2, 4), ("dp", "tp"), (0, 1, 2, 4, 3, 5, 6, 7))
    with fake_world(8):
        first = mesh.to_torch("cpu")
        assert DeviceMesh((2, 4), ("dp", "tp")).to_torch("cpu") is first
        others = [turned, DeviceMesh((2, 4), ("tp", "dp")), DeviceMesh((8,))]
        assert len({id(m.to_torch("cpu")) for m in (mesh, *others)}) == 4
    with fake_world(8):
        assert mesh.to_torch("cpu") is not first


def test_ranks_in_another_order_train_alike(threads):
    model, batch = mlp_case()
    mesh = DeviceMesh((2, 2), ("dp", "tp"), ranks=(0, 2, 1, 3))
    plan = autopar.Plan.from_dict(
        autopar.plan(model, batch, mesh=mesh, constraints={"blocks.0.up.weight": "S(0)@dp, S(1)@tp"}).to_dict()
    )
    assert plan.mesh == mesh
    expected = model(**batch)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        return mine(**batch).detach()

    for result in threads(4, body):
        torch.testing.assert_close(result, expected.detach())


def test_ranks_that_do_not_ascend_are_a_letter_at_run_time(fake_world):
    with fake_world(4), pytest.raises(autopar.NotServed, match="do not ascend"):
        DeviceMesh((2, 2), None, (3, 0, 2, 1)).to_torch("cpu")


@pytest.mark.parametrize(
    "shape, axes, ranks", [(2.5, None, ()), (None, None, ()), ((2,), 5, ()), ((2,), None, 5), ((2,), None, (0.0, 1.0))]
)
def test_what_is_no_mesh_is_a_letter(shape, axes, ranks):
    with pytest.raises(BadSharding):
        DeviceMesh(shape, axes, ranks)


def test_an_axis_of_size_one_is_no_axis():
    model, batch = mlp_case()
    graph = ColoTracer().trace(model, batch)
    narrow, wide = (shardings(graph, Setting(DeviceMesh(shape), Cluster.of("h100-8x1"))) for shape in ((4,), (1, 4, 1)))
    assert [len(s.choices) for s in narrow.sites] == [len(s.choices) for s in wide.sites]
    assert all(np.allclose(a.seconds, b.seconds) for a, b in zip(narrow.edges, wide.edges, strict=True))
    assert all(np.allclose(a.seconds, b.seconds) for a, b in zip(narrow.sites, wide.sites, strict=True))


def test_an_axis_that_spans_nodes_is_priced_on_both_levels():
    cluster = Cluster.of("h100-8x4")
    inner, outer = cluster.links
    assert cluster.levels(DeviceMesh((4, 8)), 1) == ((8, inner),) and cluster.levels(DeviceMesh((4, 8)), 0) == (
        (4, outer),
    )
    assert cluster.levels(DeviceMesh(32), 0) == cluster.levels(DeviceMesh((1, 32)), 1) == ((8, inner), (4, outer))
    assert cluster.levels(DeviceMesh((16, 2)), 0) == ((4, inner), (4, outer)) and cluster.levels(
        DeviceMesh((8, 3)), 0
    ) == ((8, outer),)
    within = [(mesh, axis) for mesh in ((6,), (3,), (2, 3), (3, 2), (7, 1)) for axis in range(len(mesh))]
    for mesh, axis in within:  # whose ranks are all on the first node
        assert [link for _, link in cluster.levels(DeviceMesh(mesh), axis)] == [inner]
    assert cluster.levels(DeviceMesh(12), 0) == ((12, outer),)  # eight and four
    got = collective_seconds("all_gather", cluster.levels(DeviceMesh(32), 0), 1e9)
    wire = dict(outer.reached)["all_gather"], dict(inner.reached)["all_gather"]
    moved = 31 / 32 * 1e9 * max(1 / 8 / (0.957 * wire[0]), 1 / wire[1])  # the share of four nodes
    assert got == pytest.approx(inner.latency_s + 28 * inner.hop_s + 3 * outer.hop_s + moved)
    flat = outer.latency_s + 31 / 32 * 1e9 / outer.bytes_per_s
    assert got < flat / 4


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2, 4), (2, 3, 4)])
@pytest.mark.parametrize("node", [4, 8])
def test_devices_of_a_stage_are_priced_where_they_stand(shape, node):
    """On all links between the ranks of each stage's groups, by hand; where stages are divided unlike, no faster."""
    for at in range(len(shape)):
        axes = ("dp", "tp")[: len(shape) - 1]
        mesh = DeviceMesh(shape, (*axes[:at], "pp", *axes[at:]))
        cluster = dataclasses.replace(Cluster.of("h100-8x8"), devices_per_node=node)
        inner, outer = cluster.links
        inside = cluster.within_stages(mesh, "pp")
        for i, axis in enumerate(axes):
            of_nodes = [Counter(rank // node for rank in group).values() for group in mesh.groups(axis)]
            counts = {count for of_group in of_nodes for count in of_group}
            size = mesh.shape[mesh.axis(axis)]
            here = counts.pop() if len(counts) == 1 else 1
            right = tuple((n, link) for n, link in ((here, inner), (size // here, outer)) if n > 1)
            found = inside.levels(mesh[axes], i)
            if 3 not in shape:
                assert found == right, (mesh, axis)
            assert found[-1][1] == right[-1][1] or found[-1][1] is outer, (mesh, axis)
    assert cluster.within_stages(DeviceMesh((2, 4), ("pp", "dp")), "pp") is cluster


def test_what_was_measured_of_strides_holds_inside_a_stage():
    times = [Measured("all_reduce", 2, stride, 1e-5, stride * 1e9) for stride in (1, 2, 4)]
    cluster = dataclasses.replace(Cluster.of("h100-8x1"), measured=tuple(times))
    mesh = DeviceMesh((2, 2, 2), ("dp", "pp", "tp"))
    inside = cluster.within_stages(mesh, "pp")
    for i, (axis, stride) in enumerate((("dp", 4), ("tp", 1))):
        ((_, found),) = inside.levels(mesh["dp", "tp"], i, "all_reduce")
        assert found.bytes_per_s == stride * 1e9, axis


def test_a_ring_is_slower_by_a_hop_for_each_device_and_a_tree_by_one_for_each_doubling():
    cluster = Cluster.of("h100-8x64")
    hop = cluster.links[1].hop_s
    levels = [cluster.levels(DeviceMesh((n, 8)), 0) for n in (16, 64)]
    ring, tree = ([collective_seconds(kind, of, 0.001) for of in levels] for kind in ("all_gather", "all_reduce"))
    assert ring[1] - ring[0] == pytest.approx(48 * hop) and tree[1] - tree[0] == pytest.approx(4 * hop)


# -- a mesh from a table


def tables(groups, inner, middle, outer, seed, noise=0.0):
    """Ranks shuffled into groups of groups; bandwidths by how far apart they stand."""
    rng = np.random.default_rng(seed)
    n = groups[0] * groups[1] * groups[2]
    place = rng.permutation(n)
    bandwidth = np.empty((n, n))
    for a, b in itertools.product(range(n), repeat=2):
        x, y = place[a], place[b]
        near = (
            inner
            if x // groups[2] == y // groups[2]
            else middle
            if x // (groups[1] * groups[2]) == y // (groups[1] * groups[2])
            else outer
        )
        bandwidth[a, b] = near * (1 + noise * rng.random())
    bandwidth = np.minimum(bandwidth, bandwidth.T)
    return np.full((n, n), 1e-6), bandwidth


def slowest(mesh, latency, bandwidth):
    """The slowest pair in a group of each axis, innermost first."""
    distance = latency + 2**24 / bandwidth
    return tuple(
        max(distance[a, b] for group in mesh.groups(x) for a, b in itertools.combinations(group, 2))
        for x in reversed(range(len(mesh.shape)))
    )


@pytest.mark.parametrize(
    "groups, shape",
    [((1, 2, 4), (2, 4)), ((2, 2, 2), (2, 2, 2)), ((1, 4, 2), (4, 2)), ((2, 4, 4), (2, 4, 4)), ((4, 2, 8), (4, 2, 8))],
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_shuffled_machines_are_found(groups, shape, noise):
    for seed in range(3):
        latency, bandwidth = tables(groups, 3e11, 5e10, 1e9, seed, noise)
        found = logical_mesh(latency, bandwidth)
        assert found.shape == shape, (found, groups)
        limits = {8: 2**24 / 3e11, 4: 2**24 / 3e11, 2: 2**24 / 3e11}
        assert slowest(found, latency, bandwidth)[0] <= limits[shape[-1]] + 2e-6
        assert logical_mesh(latency, bandwidth, shape).ranks == found.ranks


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2, 2, 2)])
def test_no_order_of_ranks_has_faster_links_inside(shape):
    n = int(np.prod(shape))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        bandwidth = rng.random((n, n)) * 1e10 + 1e9
        bandwidth = (bandwidth + bandwidth.T) / 2
        latency = np.full((n, n), 1e-6)
        found = slowest(logical_mesh(latency, bandwidth, shape), latency, bandwidth)
        best = min(
            slowest(DeviceMesh(shape, None, (0, *rest)), latency, bandwidth)[0]
            for rest in itertools.permutations(range(1, n))
        )
        assert found[0] == pytest.approx(best)


def test_rails_stand_opposite_each_other():
    """Two nodes of four: inside all is fast, between nodes each device has one partner that is near, and they are
    numbered at random.
    """
    for seed in range(5):
        partner = np.random.default_rng(seed).permutation(4)
        bandwidth = np.full((8, 8), 1e9)
        bandwidth[:4, :4] = bandwidth[4:, 4:] = 3e11
        for a, b in enumerate(partner):
            bandwidth[a, 4 + b] = bandwidth[4 + b, a] = 5e10
        mesh = logical_mesh(np.full((8, 8), 1e-6), bandwidth, (2, 4))
        assert slowest(mesh, np.full((8, 8), 1e-6), bandwidth)[1] == pytest.approx(1e-6 + 2**24 / 5e10)


@pytest.mark.parametrize(
    "latency, bandwidth, shape",
    [
        (np.ones((2, 3)), np.ones((2, 3)), None),
        (np.ones((2, 2)), np.zeros((2, 2)), None),
        (np.ones((4, 4)), np.ones((4, 4)), (3, 2)),
        (np.full((2, 2), np.nan), np.ones((2, 2)), None),
    ],
)
def test_a_table_that_cannot_be_is_a_letter(latency, bandwidth, shape):
    with pytest.raises(BadCluster):
        logical_mesh(latency, bandwidth, shape)
