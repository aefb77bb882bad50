"""`Passage`: an op as values pass through it, whatever is chosen (see `timeline.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OWN = -1  # instead of an edge's number: memory of its own


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A value that an op makes."""

    bytes: np.ndarray  # bytes by choice of the op
    shows: int  # the edge whose value's memory it shows; OWN of a value with memory of its own
    is_kept: bool  # whether the backward of its own op reads it


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """An op, as values pass through it: where its operands come from, and what its backward reads."""

    site: int
    edges: tuple[int, ...]  # edges of the operands
    kept: tuple[bool, ...]  # whether the backward reads each operand as it arrives
    first: tuple[bool, ...]  # whether the backward frees each operand before its own peak
    made: tuple[Made, ...]
    region: str = ""  # the model's own checkpoint region around it
    is_core: bool = False  # whether it is in the core of an attention, between the products
    besides: np.ndarray | None = None  # bytes that its backward reads besides, by choice
    work: np.ndarray | None = None  # temporary bytes, by choice
    in_chunks: bool = False  # whether it runs once for each chunk, forward and backward together
    is_inner: bool = False  # whether its result stays inside a kernel, in no memory
    runs_at: int = OWN  # the time of the op in whose kernel it runs; OWN: a kernel of its own
    is_route: bool = False  # whether it says where rows go: made again it might say otherwise, so it never is


@dataclass(frozen=True, slots=True, eq=False)
class Passages:
    """The ops of a graph in the order of the forward, and the edges between them."""

    ops: tuple[Passage, ...] = ()
    sources: tuple[tuple[int, int], ...] = ()  # edge -> (op that makes its value, output); (-1, 0) without one
    # edge -> a number for each flow of `taken`; conversions of a value to equal numbers are one
    arrives: tuple[np.ndarray, ...] = ()
    converted: tuple[np.ndarray, ...] = ()  # edge -> bytes that its conversion makes, by [given, taken]
    gathered: frozenset[int] = frozenset()  # edges of parameters
    ends: tuple[int, ...] = ()  # edges by which values leave the graph
