"""The minimum over a variable, and the entries of tables laid end to end, against what writing it out gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.once import Once
from autopar.solver import tables
from autopar.solver.limits import LIMITS
from autopar.solver.tables import Factor, minimum_over
from autopar.space.lookup import Tables, Taken


def random_factors(rng, choices, neighbours):
    """A variable 0 with factors to its neighbours: of few different numbers, equal and infinite ones among them."""
    factors, numbers = [], [0.0, 0.5, 1.0, 2.0, np.inf] if rng.random() < 0.7 else rng.random(1000)
    for n, count in neighbours.items():
        for _ in range(rng.integers(1, 3)):
            own, theirs = rng.integers(1, choices + 1), rng.integers(1, count + 1)
            classes = [np.append(np.arange(a), rng.integers(0, a, b - a)) for a, b in ((own, choices), (theirs, count))]
            factors.append(Factor((0, n), tuple(classes), rng.choice(numbers, (own, theirs))))
    return factors


@pytest.mark.parametrize("large", [0, LIMITS.elimination.large], ids=["row by row", "kind by kind"])
def test_the_minimum_over_a_variable_is_that_of_all_its_choices(large, monkeypatch):
    # Small tables are treated as large ones are.
    monkeypatch.setattr(tables, "_LIMITS", replace(LIMITS.elimination, large=large, cheap=10))
    rng, shapes = np.random.default_rng(3), Once()
    for _ in range(400):
        neighbours = {n: int(rng.integers(1, 30)) for n in range(1, rng.integers(2, 4))}
        choices = int(rng.integers(1, 40))
        factors = random_factors(rng, choices, neighbours)
        for _ in range(2):  # the second time with other costs and tables over the same classes
            cost = rng.choice([0.0, 1.0, 2.0, np.inf], choices)
            factors = [Factor(f.scope, f.classes, rng.permutation(f.table)) for f in factors]
            classes, table = minimum_over(0, cost, factors, tuple(neighbours), shapes)
            written_out = np.full((choices, *neighbours.values()), 0.0) + cost.reshape(-1, *[1] * len(neighbours))
            for f in factors:
                (mine, theirs), wide = f.classes, [1] * len(neighbours)
                wide[f.scope[1] - 1] = len(theirs)
                written_out = written_out + f.table[mine][:, theirs].reshape(choices, *wide)
            np.testing.assert_allclose(table[np.ix_(*classes)], written_out.min(axis=0), rtol=1e-14)


def test_tables_laid_end_to_end_give_each_plans_entries():
    rng = np.random.default_rng(0)
    shared = rng.random((3, 4))
    of_sites, of_edges = [(1, rng.random(5)), (0, rng.random(2))], [(2, shared), (0, rng.random((4, 2))), (1, shared)]
    laid = Tables(of_sites, of_edges)
    for _ in range(20):
        taken = Taken(rng.integers(0, 2, 2), rng.integers(0, 3, 3), rng.integers(0, 2, 3))
        assert laid.of_sites(taken).tolist() == [table[taken.choices[i]] for i, table in of_sites]
        assert laid.of_edges(taken).tolist() == [table[taken.leaves[k], taken.arrives[k]] for k, table in of_edges]
