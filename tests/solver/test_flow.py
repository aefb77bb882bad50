"""Maximum flows and minimum cuts, against networkx."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest

from autopar.solver.flow import Network


@pytest.mark.parametrize("seed", range(200))
def test_the_most_flows_and_the_cut_proves_it(seed):
    rng = np.random.default_rng(seed)
    nodes, count = int(rng.integers(2, 12)), int(rng.integers(1, 40))
    network, theirs, arcs = Network(nodes), nx.DiGraph(), []
    theirs.add_nodes_from(range(nodes))
    for _ in range(count):
        a, b = (int(x) for x in rng.integers(0, nodes, 2))
        if a == b or theirs.has_edge(a, b):
            continue
        endless = {a, b} != {0, nodes - 1} and nodes - 1 not in (a, b) and rng.random() < 0.3
        capacity = math.inf if endless else float(rng.choice([0.0, rng.random(), float(rng.integers(1, 4))]))
        arcs.append((a, b, capacity, network.add(a, b, capacity)))
        theirs.add_edge(a, b, capacity=capacity)
    network.fill(0, nodes - 1)
    most = nx.maximum_flow_value(theirs, 0, nodes - 1)
    balance = np.zeros(nodes)
    for a, b, capacity, arc in arcs:
        assert 0 <= network.flow(arc) <= capacity + 1e-12
        balance[a] -= network.flow(arc)
        balance[b] += network.flow(arc)
    assert balance[-1] == pytest.approx(most) and balance[1:-1] == pytest.approx(0, abs=1e-12)
    side = set(network.reached(0))
    assert nodes - 1 not in side
    assert sum(c for a, b, c, _ in arcs if a in side and b not in side) == pytest.approx(most)
