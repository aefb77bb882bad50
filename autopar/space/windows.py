"""`Window`: communication that may run beside compute: gathers of parameters and reductions of their gradients.

A lowering that starts them there implements it, and the objective prices it.

    windows      the forward is cut into runs of ops: a numbered block of the model is one; small ones are joined until
                 they read so many bytes of parameters as the plan says (BUCKET, or ZeRO-3's BLOCK: each by itself)
    forward      what window w gathers moves while window w-1 computes
    backward     what window w gathers again moves while the backward of window w+1 computes (the last of several
                 windows gathers nothing again: backward begins with it), and what it reduces while that of window w-1
                 does
    alone        what has no such window beside it (of the first in forward, of an only one in backward) moves when it
                 is read, a bucket at a time
    exposed      max(0, communication - compute) of each; where there is no such window, all of it; on a machine where
                 they slow each other, the share of the shorter that is hidden was measured

There is one stream for compute and one for communication. Everything else is in line. The cut (`schedule.py`) does not
depend on choices: both sums are linear in them, so a window is a row of the solver (`overlap.py` builds them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from autopar.space.space import Edge

# What moves, or is computed, beside the compute of a window's ops.
LINKS = "links"  # communication between devices
UP = "up"  # copies from the host
DOWN = "down"  # copies to it
CPUS = "cpus"  # steps of its CPUs

BUCKET = 25 * 2**20  # bytes of whole parameters that travel together
BLOCK = 1  # least bytes of a window: each block that reads a parameter is one


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Communication that moves while some ops compute: tables of seconds by edge and by site."""

    way: str  # "forward" or "backward"
    span: tuple[int, int]  # the first and the last of the sites that compute, as forward runs them
    name: str
    times: int  # number of times in a step
    communication: tuple[tuple[int, np.ndarray], ...]  # an edge and its table by [given, taken]
    compute: tuple[tuple[int, np.ndarray], ...]  # a site and its table by choice
    lane: str = LINKS

    def seconds(self, picked: Sequence[int], edges: Sequence[Edge]) -> tuple[float, float]:
        """(communication, compute) seconds of the window under the picked choices."""
        moved = sum(float(table[edges[k].place(picked)]) for k, table in self.communication)
        return moved, sum(float(run[picked[i]]) for i, run in self.compute)


def seconds_on_host(
    windows: Sequence[Window], picked: Sequence[int], edges: Sequence[Edge]
) -> dict[int, tuple[float, float]]:
    """Seconds of parameters on the host in windows, and those of them that compute hides, by site."""
    found: dict[int, tuple[float, float]] = {}
    for window in (window for window in windows if window.lane != LINKS):
        moved, run = window.seconds(picked, edges)
        share = min(1.0, run / moved) if moved else 0.0
        for edge, table in ((edges[k], table) for k, table in window.communication):
            seconds = window.times * float(table[edge.place(picked)])
            whole, hidden = found.get(edge.source, (0.0, 0.0))
            found[edge.source] = whole + seconds, hidden + share * seconds
    return found


def buckets_by_window(sizes: Sequence[int], windows: Sequence[int]) -> list[list[int]]:
    """Indices of items in order, each bucket of one window: beside its neighbour they are reduced."""
    found = list[list[int]]()
    for window in dict.fromkeys(windows):
        places = [k for k, of in enumerate(windows) if of == window]
        for bucket in buckets([sizes[k] for k in places]):
            found.append([places[k] for k in bucket])
    return found


def buckets(sizes: Sequence[int], full: int = BUCKET) -> list[list[int]]:
    """Indices of items grouped in order into buckets, each closed once it holds `full` bytes or more."""
    found = list[list[int]]()
    held = full
    for k, size in enumerate(sizes):
        if held >= full:
            found.append([])
            held = 0
        found[-1].append(k)
        held += size
    return found
