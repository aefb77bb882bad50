"""Which cases of a long list run by day: the others are nightly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """The cases as parameters; from `first` on, every `step`-th runs by day."""
    found = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[] if i % step == first else [pytest.mark.nightly]))
    return found


def by_day(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """The cases as parameters; the chosen ones run by day, each of which must be a case."""
    cases = list(cases)
    assert all(case in cases for case in chosen), [case for case in chosen if case not in cases]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in chosen else [pytest.mark.nightly]
        )
        for case in cases
    ]


def diagonal(rows: Sequence[Any], columns: Sequence[Any], step: int = 2) -> list[Any]:
    """All pairs as parameters; by day each row runs with every `step`-th column, its neighbour with the next ones."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            column,
            marks=[] if (i + k) % step == 0 else [pytest.mark.nightly],
        )
        for i, row in enumerate(rows)
        for k, column in enumerate(columns)
    ]
