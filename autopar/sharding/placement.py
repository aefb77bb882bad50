"""How a tensor lies on a mesh: `R`, `S(dim)`, `P(sum)` on one axis; a sharding has one placement per axis.

    Placement   R: every device holds the whole;  S(0): each holds its part of dim 0;  P(sum): the value is the sum of
                what they hold
    Flow        what an edge carries on one axis: the placement of the value, and that of its gradient, written
                value/gradient; `S(0)` alone means `S(0)/S(0)`, `R` alone `R/R`, `P(sum)` alone `P(sum)/R`
    Sharding    a placement per axis; where several axes cut one dim, `order` says which axis is major (default: mesh
                order)

`S(2, blocks=(64, 16, 16))` cuts each block of the dim separately: each device holds its part of the first 64, then of
the next 16, then of the last 16. Many equal blocks are written in short: `blocks=16x4096`. A fused query-key-value
weight is cut by heads in this way. Blocks are cut evenly or not at all. Parts are those of `torch.chunk`: the first
devices hold ceil(n / k) rows, the last may hold fewer, so a gather of padded parts is the whole after one trim.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopar.letters import BadSharding

if TYPE_CHECKING:
    from autopar.sharding.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on one mesh axis."""

    kind: str  # "R", "S" or "P"
    dim: int = -1  # the dim that S cuts
    reduction: str = ""  # how the parts of P combine
    blocks: tuple[int, ...] = ()  # the blocks that S cuts one by one; empty: the dim is one block
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # The hash of text differs between processes, that of numbers does not.
        numbers = ("RSP".find(self.kind), self.dim, len(self.reduction), self.blocks)
        object.__setattr__(self, "_hash", hash(numbers))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_replicated(self) -> bool:
        return self.kind == "R"

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    def __repr__(self) -> str:
        blocks = f", blocks={_in_runs(self.blocks)}" if self.blocks else ""
        return {"R": "R", "S": f"S({self.dim}{blocks})", "P": f"P({self.reduction})"}[self.kind]

    @staticmethod
    def parse(text: str) -> Placement:
        """The placement that a text writes: `R`, `S(1)`, `P(sum)`; a bare `P` is `P(sum)`."""
        text = text.strip()
        if text == "R":
            return R
        if match := _CUT.fullmatch(text):
            return S(int(match[1]), _from_runs(match[2] or match[3] or ""))
        if text in ("P", "P(sum)"):
            return P("sum")
        raise BadSharding(f"{text!r} is not a placement", advice="R, S(dim) or P(sum), for example S(0)")


def _in_runs(blocks: tuple[int, ...]) -> str:
    """Blocks as text, more than three equal ones in a row in short: `16x4096`, `(8x64, 16, 16)`."""
    runs = [(size, len(list(alike))) for size, alike in itertools.groupby(blocks)]
    if max(count for _, count in runs) <= 3:
        return str(blocks)
    said = [f"{count}x{size}" if count > 3 else ", ".join([str(size)] * count) for size, count in runs]
    return said[0] if len(said) == 1 else f"({', '.join(said)})"


def _from_runs(text: str) -> tuple[int, ...]:
    """The blocks that `_in_runs` wrote."""
    blocks: list[int] = []
    for run in filter(str.strip, text.split(",")):
        *count, size = map(int, run.split("x"))
        blocks += [size] * math.prod(count)
    return tuple(blocks)


_RUN = r"\s*(?:[1-9]\d{,4}x)?\d+\s*"
_CUT = re.compile(rf"S\(\s*(\d+)\s*(?:,\s*blocks=(?:\(({_RUN}(?:,{_RUN})*,?\s*)\)|([1-9]\d{{,4}}x\d+))\s*)?\)")
R = Placement("R")


def S(dim: int, blocks: tuple[int, ...] = ()) -> Placement:
    """The placement that cuts dim `dim`; with `blocks`, it cuts each block of the dim separately."""
    if dim < 0:
        raise BadSharding(f"S({dim}): a dim counts from 0")
    if any(n < 1 for n in blocks):
        raise BadSharding(f"blocks={blocks}: a block has at least one row")
    return Placement("S", dim=dim, blocks=blocks if len(blocks) > 1 else ())


def P(reduction: str = "sum") -> Placement:
    """The placement of parts that `reduction` combines; autopar carries sums only."""
    if reduction != "sum":
        raise BadSharding(f"P({reduction}) is not a placement that autopar carries", advice="P(sum)")
    return Placement("P", reduction=reduction)


@dataclass(frozen=True, slots=True)
class Flow:
    """The placements of a value and of its gradient on one axis."""

    value: Placement
    gradient: Placement
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((hash(self.value), hash(self.gradient))))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.value) if self == flow(self.value) else f"{self.value!r}/{self.gradient!r}"

    @staticmethod
    def parse(text: str) -> Flow:
        value, slash, gradient = text.partition("/")
        return Flow(Placement.parse(value), Placement.parse(gradient)) if slash else flow(Placement.parse(value))


def flow(value: Placement) -> Flow:
    """The flow that a placement written alone stands for: `S(0)/S(0)` for `S(0)`, `P(sum)/R` for `P(sum)`."""
    return Flow(value, value if value.is_shard else R)


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """How a tensor lies on the whole mesh: a placement per axis. On a mesh of one axis it equals its only placement."""

    placements: tuple[Placement, ...]
    order: tuple[int, ...] = ()  # axes, major first; empty is mesh order

    def __post_init__(self) -> None:
        order = self.order or tuple(range(len(self.placements)))
        plain = all(list(axes) == sorted(axes) for axes in self._cuts(order).values())
        object.__setattr__(self, "order", tuple(range(len(self.placements))) if plain else self._normal(order))

    def _cuts(self, order: Sequence[int]) -> dict[int, list[int]]:
        cuts: dict[int, list[int]] = {}
        for axis in order:
            if self.placements[axis].is_shard:
                cuts.setdefault(self.placements[axis].dim, []).append(axis)
        return cuts

    def _normal(self, order: Sequence[int]) -> tuple[int, ...]:
        """The order in normal form: it matters among axes that cut one dim only, and is mesh order elsewhere."""
        result = list(range(len(self.placements)))
        for axes in self._cuts(order).values():
            for slot, axis in zip(sorted(axes), axes, strict=True):
                result[slot] = axis
        return tuple(result)

    @property
    def cuts(self) -> dict[int, list[int]]:
        """The axes that cut each dim, major first, by dim."""
        return self._cuts(self.order)

    @property
    def partial_axes(self) -> tuple[int, ...]:
        return tuple(a for a, p in enumerate(self.placements) if p.is_partial)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Placement):
            return self.placements == (other,)
        if isinstance(other, Sharding):
            return self.placements == other.placements and self.order == other.order
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.placements[0]) if len(self.placements) == 1 else hash((self.placements, self.order))

    def __repr__(self) -> str:
        return self.text(tuple(str(a) for a in range(len(self.placements))))

    def text(self, axes: Sequence[str]) -> str:
        """The sharding as `S(0)@dp, P(sum)@tp`, or as `S(0)` on a mesh of one axis; axes not named are `R`."""
        if len(axes) == 1:
            return repr(self.placements[0])
        return (
            ", ".join(f"{self.placements[a]!r}@{axes[a]}" for a in self.order if not self.placements[a].is_replicated)
            or "R"
        )

    @staticmethod
    def parse(text: str, mesh: DeviceMesh) -> Sharding:
        """The sharding that `text` writes; axes stand in the order in which they cut, major first."""
        placements = [R] * len(mesh.shape)
        order = []
        pieces = [piece for piece in outside_brackets(text) if piece.strip()]
        if not pieces:
            raise BadSharding("an empty sharding", advice='"R", or placements such as "S(0)@dp"')
        for piece in pieces:
            placement, at, axis_name = piece.partition("@")
            if not at and placement.strip() == "R" and len(pieces) == 1:
                break
            if not at and len(mesh.shape) > 1:
                raise BadSharding(
                    f"{piece.strip()!r} names no axis", seen=f"mesh {mesh}", advice=f"{piece.strip()}@{mesh.axes[0]}"
                )
            axis = mesh.axis(axis_name.strip()) if at else 0
            if axis in order:
                raise BadSharding(f"axis {mesh.axes[axis]} stands twice in {text!r}")
            placements[axis] = Placement.parse(placement)
            order.append(axis)
        order += [a for a in range(len(mesh.shape)) if a not in order]
        return Sharding(tuple(placements), tuple(order))


def part(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of one of the parts that torch.chunk cuts a dim of this size into."""
    step = -(-size // parts)
    start = min(step * index, size)
    return start, min(step, size - start)


def runs(
    size: Sequence[int], sharding: Sharding, mesh: Sequence[int], coordinate: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """For each dim of a tensor the (start, length) ranges that the device at `coordinate` holds, in order."""
    found = [[(0, n)] for n in size]
    for dim, axes in sharding.cuts.items():
        for axis in axes:
            blocks = sharding.placements[axis].blocks or (1,)
            cut = []
            for start, length in found[dim]:
                for block in blocks:
                    rows = block * length // sum(blocks)
                    first, held = part(rows, mesh[axis], coordinate[axis])
                    cut.append((start + first, held))
                    start += rows
            found[dim] = cut
    return found


def local_shape(
    shape: Sequence[int], sharding: Sharding, mesh: DeviceMesh, coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The local shape of a tensor on the device at `coordinate`."""
    result = list(shape)
    for dim, axes in sharding.cuts.items():
        for axis in axes:
            result[dim] = part(result[dim], mesh.shape[axis], coordinate[axis])[1]
    return tuple(result)


def largest_local_shape(shape: Sequence[int], sharding: Sharding, mesh: DeviceMesh) -> tuple[int, ...]:
    """The local shape on the fullest device, which every other waits for: the one at coordinate 0."""
    return local_shape(shape, sharding, mesh, (0,) * len(mesh.shape))


def local_elements(shape: Sequence[int], shardings: Iterable[Sharding], mesh: DeviceMesh) -> np.ndarray:
    """Elements that the fullest device holds of a tensor, by sharding."""
    return np.array([math.prod(largest_local_shape(shape, sharding, mesh)) for sharding in shardings], float)


def outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Pieces of a text between the separators that stand outside of brackets."""
    pieces = [""]
    depth = 0
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if c == separator and not depth:
            pieces.append("")
        else:
            pieces[-1] += c
    return pieces


@functools.lru_cache(maxsize=1 << 14)
def _holds_something(size: int, parts: tuple[int, ...]) -> bool:
    sizes = {size}
    for count in parts:
        sizes = {
            part(whole, count, i)[1]
            for whole, i in itertools.product(sizes, (0, count - 2, count - 1))
            if 0 <= i < count
        }
    return min(sizes) > 0


def every_part_holds_something(size: int, parts: Sequence[int]) -> bool:
    """Whether axes of these sizes, one inside the other, can cut a dim without leaving an empty part."""
    return _holds_something(size, tuple(parts))
