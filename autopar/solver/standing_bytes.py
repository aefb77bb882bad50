"""Memory that no plan avoids: parameters, gradients and optimizer states, in as many parts as may be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from autopar.letters import Infeasible
from autopar.solver.figures import size
from autopar.solver.limits import LIMITS
from autopar.space.memory import Piece
from autopar.space.space import Space


def refuse_below(space: Space, budget: float) -> None:
    """Raise if parameters, gradients and optimizer states, in their smallest parts, exceed a budget.

    Only for large spaces: in others the smallest plan is soon found, which says more.
    """
    if space.memory is None or not math.isfinite(budget) or len(space.sites) <= LIMITS.searches.long:
        return
    kinds = standing(space)
    least = sum(kinds.values())
    if least <= budget * (1 + 1e-9):
        return
    fills = ", ".join(f"{kind} {size(n)}" for kind, n in sorted(kinds.items(), key=lambda pair: -pair[1]) if n)
    raise Infeasible(
        f"no plan fits in {size(budget)} a device on mesh {space.setting.mesh}",
        seen=f"{size(least)} are needed by any plan; at the optimizer step, in as many parts as may be: {fills}",
        advice="more devices, or an optimizer that keeps less",
        needs=least,
        smallest=math.inf,
    )


def standing(space: Space) -> dict[str, float]:
    """The least bytes at the start of the optimizer's step, by kind, from each site's smallest choice."""
    assert space.memory is not None
    time = 2 * len(space.memory.ops)
    return _least(space, lambda piece: piece.first <= time <= piece.last)


def least_standing(space: Space) -> float:
    """The least bytes that are held at every time of a step: they are there however few rows come at once."""
    assert space.memory is not None
    last = space.memory.times - 1
    return sum(_least(space, lambda piece: piece.first == 0 and piece.last == last).values())


def _least(space: Space, is_counted: Callable[[Piece], bool]) -> dict[str, float]:
    """The least bytes of some pieces, by kind, from each site's smallest choice."""
    assert space.memory is not None
    of_sites: dict[int, list[tuple[str, np.ndarray]]] = defaultdict(list)
    for piece in space.memory.pieces:
        if not piece.is_edge and is_counted(piece):
            of_sites[piece.place].append((piece.kind, piece.bytes))
    found: dict[str, float] = defaultdict(float)
    for place, pieces in of_sites.items():
        whole = np.sum([held for _, held in pieces], axis=0)
        least = int(np.where(np.isfinite(space.sites[place].seconds), whole, math.inf).argmin())
        for kind, held in pieces:
            found[kind] += float(held[least])
    return dict(found)
