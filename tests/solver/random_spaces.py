"""Random small spaces and problems, to be held against trying everything."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from autopar import Cluster, DeviceMesh
from autopar.graph.nodes import TensorType
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.placement import Flow, P, R, S, flow
from autopar.sharding.strategies import Choice, Strategy
from autopar.solver.tables import Factor, Problem
from autopar.space.setting import Setting
from autopar.space.space import Edge, Site, Space

MESH = DeviceMesh((2,))
FLOWS = [flow(R), flow(S(0)), flow(S(1)), flow(P()), Flow(R, P())]


@st.composite
def spaces(draw):
    """A random small space: sites in a row or a tree, some edges forbidden."""
    count = draw(st.integers(1, 5))
    numbers = st.integers(0, 50)
    parents = {i: sorted(set(draw(st.lists(st.integers(0, i - 1), max_size=2)))) for i in range(1, count)}
    sites, edges = [], []
    for i in range(count):
        rows = draw(
            st.lists(
                st.tuples(*[st.sampled_from(FLOWS)] * (len(parents.get(i, ())) + 1)),
                min_size=1,
                max_size=4,
                unique=True,
            )
        )
        choices = tuple(Choice((Strategy(row[:-1], row[-1:]),)) for row in rows)
        sites.append(Site(f"s{i}", "op", "op", choices, np.array([draw(numbers) for _ in choices]) * 1e-6))
    manager = ShapeConsistencyManager(MESH, Cluster.of("generic"))
    for i in range(count):
        for k, p in enumerate(parents.get(i, ())):
            given_ = list(dict.fromkeys(c.output() for c in sites[p].choices))
            taken = list(dict.fromkeys(c.operand(k) for c in sites[i].choices))
            seconds = (
                np.array(
                    [
                        [draw(st.one_of(numbers, st.just(np.inf) if draw(st.booleans()) else numbers)) for _ in taken]
                        for _ in given_
                    ],
                    float,
                )
                * 1e-6
            )
            edges.append(
                Edge(
                    p,
                    i,
                    k,
                    tuple(given_),
                    tuple(taken),
                    np.array([given_.index(c.output()) for c in sites[p].choices]),
                    np.array([taken.index(c.operand(k)) for c in sites[i].choices]),
                    seconds,
                    TensorType((8, 8), "float32", True),
                )
            )
    return Space(Setting(MESH, manager.costs.cluster), tuple(sites), tuple(edges), manager, "none")


@st.composite
def problems(draw):
    """Random tables over few variables, with loops; factors may see a variable by different classes."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = [int(n) for n in rng.integers(1, 4, draw(st.integers(2, 7)))]
    costs = [rng.integers(0, 30, n).astype(float) for n in sizes]
    for c in costs:
        c[rng.random(len(c)) < 0.1] = np.inf
    factors = []
    for _ in range(draw(st.integers(1, 14))):
        scope = tuple(sorted(rng.choice(len(sizes), 2, replace=False).tolist()))
        classes = tuple(np.unique(rng.integers(0, sizes[v], sizes[v]), return_inverse=True)[1] for v in scope)
        table = rng.integers(0, 30, [int(m.max()) + 1 for m in classes]).astype(float)
        table[rng.random(table.shape) < 0.05] = np.inf
        factors.append(Factor(scope, classes, table))
    owner = rng.integers(0, 4, len(sizes))  # of a region, or of none
    regions = [[int(v) for v in np.flatnonzero(owner == r)] for r in range(1, draw(st.integers(1, 3)))]
    return Problem(costs, factors, [r for r in regions if r])


@st.composite
def layered(draw):
    """Layers that share their tables, but for some; the first variable of each is read by the next.

    Hubs that any may read.
    """
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    layers, width, hubs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    maps = [np.array(m) for m in ([0, 1], [0, 0], [1, 0])]
    kinds = [
        (
            [rng.integers(0, 30, 2).astype(float) for _ in range(width)],
            [rng.integers(0, 30, (2, 2)).astype(float) for _ in range(16)],
        )
        for _ in range(2)
    ]
    wiring = [
        (int(a), int(b), int(m))
        for a, b, m in zip(rng.integers(0, width, 4), rng.integers(0, width, 4), rng.integers(0, 3, 4))
    ]
    to_hubs = [(int(v), int(h)) for v, h in zip(rng.integers(0, width, 3), rng.integers(0, max(hubs, 1), 3))]
    costs, factors, regions = [rng.integers(0, 9, 2).astype(float) for _ in range(hubs)], [], []
    for layer in range(layers):
        own, tables = kinds[int(rng.random() < 0.3)]
        first = hubs + layer * width
        costs += own
        ends = [(first + a, first + b, m) for a, b, m in wiring if a != b] + [(first - width, first + width - 1, 0)] * (
            layer > 0 and width > 0
        )
        ends += [(first + v, h, 0) for v, h in to_hubs if hubs]
        factors += [
            Factor(((a, b) if a < b else (b, a)), (maps[m], maps[0]), tables[k][: int(maps[m].max()) + 1])
            for k, (a, b, m) in enumerate(ends)
        ]
        regions.append(list(range(first + 1, first + width)))
    return Problem(costs, factors, [r for r in regions if r])
