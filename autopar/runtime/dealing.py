"""Dealing: rows of a sequence that axes cut plainly go to the devices on which an attention has as much work to do.

Where queries see what is before them, the last part of a sequence has most to do. So rows are cut into pieces, each
device gets as many of them, and the result goes back the same way: outside, positions, labels and losses know nothing.

    halves    2 n pieces; a device gets one from the front and its mirror image from the back
    work      more pieces, the largest first to the device with the least work: documents end anywhere

Several axes exchange one after the other. Axes along which keys go round come first: devices that share keys share
queries that see as much of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.sees import SIZES, Places, Sees
from autopar.runtime.wires import Wire

HALVES = "halves"
WORK = "work"


class Cutting(NamedTuple):
    """An axis that cuts rows, and this device's place on it."""

    axis: str
    parts: int
    place: int


@dataclass(frozen=True, slots=True)
class Setup:
    """How an attention of a part is computed, beside its tensors; as text it is an argument of the ops."""

    sees: str
    queries: int  # rows of the whole
    keys: int
    cuts: tuple[Cutting, ...] = ()  # axes that cut queries, major first
    rings: tuple[Cutting, ...] = ()  # axes of them that cut keys as well: keys go round
    dealt: str = ""
    given: tuple[bool, bool, bool] = (False, False, False)  # whether there are documents, counts, sinks

    def text(self) -> str:
        return json.dumps([self.sees, self.queries, self.keys, self.cuts, self.rings, self.dealt, self.given])

    @staticmethod
    @functools.cache
    def of(text: str) -> Setup:
        """Read the setup that `text` says."""
        sees, queries, keys, cuts, rings, dealt, given = json.loads(text)
        return Setup(sees, queries, keys, _cuttings(cuts), _cuttings(rings), dealt, tuple(given))

    @property
    def order(self) -> tuple[Cutting, ...]:
        """The axes in the order of the deal."""
        rings = {ring.axis for ring in self.rings}
        return (*self.rings, *(cut for cut in self.cuts if cut.axis not in rings))

    @property
    def parts(self) -> int:
        return math.prod(cut.parts for cut in self.cuts)

    @property
    def pieces(self) -> int:
        return self.parts * (2 if self.dealt == HALVES else SIZES.pieces)

    def bounds(self) -> np.ndarray:
        return np.arange(self.pieces + 1) * self.queries // self.pieces

    def axes(self, of_keys: bool) -> tuple[Cutting, ...]:
        """The axes along which queries or keys are dealt, in the order in which they lie."""
        return self.rings if of_keys else self.cuts


def _cuttings(given: Sequence[Sequence[Any]]) -> tuple[Cutting, ...]:
    return tuple(Cutting(*cutting) for cutting in given)


Owners = tuple[int, ...]  # the device that computes each piece, counted in the order of the deal


def owners_of(how: Setup, places: Callable[[], Places]) -> Owners:
    """The device of each piece; where that depends on documents, the places of a call say."""
    n = how.parts
    if how.dealt == HALVES:
        return tuple(min(piece, 2 * n - 1 - piece) for piece in range(2 * n))
    seen = places().seen(Sees.of(how.sees), how.queries)
    work = np.add.reduceat(np.append(seen, 0.0), np.minimum(how.bounds()[:-1], how.queries))
    work[how.bounds()[:-1] == how.bounds()[1:]] = 0.0
    owners: np.ndarray = np.zeros(how.pieces, np.int64)
    for cut in how.order:  # Devices that share keys are told apart last.
        before = owners.copy()
        for group in np.unique(before):
            own = np.flatnonzero(before == group)
            owners[own] = group * cut.parts + _shared_out(work[own], cut.parts)
    return tuple(owners.tolist())


def _shared_out(work: np.ndarray, parts: int) -> np.ndarray:
    """A part for each piece: all parts get as many pieces, and nearly as much work."""
    room: np.ndarray = np.full(parts, len(work) // parts)
    done: np.ndarray = np.zeros(parts)
    found: np.ndarray = np.zeros(len(work), np.int64)
    for piece in np.argsort(-work, kind="stable"):
        part = int(np.argmin(np.where(room > 0, done, np.inf)))
        found[piece] = part
        room[part] -= 1
        done[part] += work[piece]
    return found


class _Stage(NamedTuple):
    """One exchange: rows in the order in which they are sent, and how what arrives is put in order."""

    axis: str
    order: np.ndarray
    sends: tuple[int, ...]
    comes: tuple[int, ...]
    arrange: np.ndarray

    @property
    def arranged_back(self) -> tuple[np.ndarray, np.ndarray]:
        """The order in which rows that arrived are sent back, and how what returns is put in order."""
        return np.argsort(self.arrange), np.argsort(self.order)


class Deal:
    """How rows of queries, or of keys that go round, are dealt."""

    def __init__(self, how: Setup, owners: Owners | None, of_keys: bool) -> None:
        self.how = how
        self.cuts = how.axes(of_keys)
        self.rows = rows = how.keys if of_keys else how.queries
        self._lies = coordinates(rows, self.cuts)
        self._goes = self._lies if owners is None else _targets(how, owners, rows, len(self.cuts) if of_keys else None)
        self._here = {cut.axis: cut.place for cut in self.cuts}
        self._held: dict[Any, np.ndarray] = {}  # Each step of a ring asks again.
        self.stages = [] if owners is None else [self._stage(i) for i in range(len(self.cuts))]

    def held(self, place: dict[str, int], done: int | None = None) -> np.ndarray:
        """The rows of a device once so many axes have exchanged theirs, by default all."""
        key = done, tuple(place[cut.axis] for cut in self.cuts)
        if key not in self._held:
            self._held[key] = self._found(place, done)
        return self._held[key]

    def _found(self, place: dict[str, int], done: int | None) -> np.ndarray:
        is_there: np.ndarray = np.ones(self.rows, bool)
        for i, cut in enumerate(self.cuts):
            by = self._goes if done is None or i < done else self._lies
            is_there &= by[cut.axis] == place[cut.axis]
        return np.flatnonzero(is_there)

    @property
    def here(self) -> np.ndarray:
        """The rows of this device once all are dealt."""
        return self.held(self._here)

    def _stage(self, i: int) -> _Stage:
        axis, parts, place = self.cuts[i]
        before = self.held(self._here, i)
        goes = self._goes[axis][before]
        order = np.argsort(goes, kind="stable")
        comes = []
        for other in range(parts):
            theirs = self.held({**self._here, axis: other}, i)
            comes.append(theirs[self._goes[axis][theirs] == place])
        return _Stage(
            axis,
            order,
            tuple(np.bincount(goes, minlength=parts).tolist()),
            tuple(map(len, comes)),
            np.argsort(np.concatenate(comes), kind="stable"),
        )


def coordinates(rows: int, cuts: Sequence[Cutting]) -> dict[str, np.ndarray]:
    """For each row the place on each axis where it lies, as `part` cuts a dim."""
    offset: np.ndarray = np.arange(rows)
    size: np.ndarray = np.full(rows, rows)
    found = {}
    for axis, parts, _ in cuts:
        step: np.ndarray = -(-size // parts)
        place = offset // step
        offset = offset - place * step
        size = np.minimum(step, size - place * step)
        found[axis] = place
    return found


def _targets(how: Setup, owners: Owners, rows: int, first: int | None) -> dict[str, np.ndarray]:
    """The place of each row's device on the axes of the deal, or on the first of them."""
    piece = np.searchsorted(how.bounds(), np.arange(rows), "right") - 1
    left = np.array(owners)[piece]
    found = {}
    for axis, parts, _ in reversed(how.order):
        found[axis] = left % parts
        left = left // parts
    return {cut.axis: found[cut.axis] for cut in how.order[:first]}


@functools.lru_cache(maxsize=16)  # each has several numbers for each row, and new documents make a new one
def deal_of(setup: str, owners: Owners | None, of_keys: bool) -> Deal:
    """The deal of a setup; None for rows that stay as they lie."""
    return Deal(Setup.of(setup), owners, of_keys)


def room_of(setup: str, of_keys: bool, is_back: bool) -> int:
    """Rows of the tensor that a deal gives: as many as there may be, where documents decide."""
    how = Setup.of(setup)
    if is_back:
        here = {cut.axis: cut.place for cut in how.axes(of_keys)}
        return len(deal_of(setup, None, of_keys).held(here))
    if how.dealt == HALVES:
        return len(deal_of(setup, owners_of(how, _nothing), of_keys).here)
    most = int(np.diff(how.bounds()).max())
    return how.pieces // math.prod(cut.parts for cut in how.axes(of_keys)) * most


def _nothing() -> Places:
    raise AssertionError("halves are dealt by their numbers alone")


def dealt(tensors: Sequence[Tensor], deal: Deal, wires: dict[str, Wire], room: int, is_back: bool) -> list[Tensor]:
    """Bring rows [b, heads, rows, width] where they are computed, or back, in one message an axis."""
    columns = [x.shape[0] * x.shape[1] * x.shape[3] for x in tensors]
    rows = [x.movedim(2, 0) for x in tensors]
    for stage in reversed(deal.stages) if is_back else deal.stages:
        order, arrange = stage.arranged_back if is_back else (stage.order, stage.arrange)
        sends, comes = (stage.comes, stage.sends) if is_back else (stage.sends, stage.comes)
        sent = [x[torch.from_numpy(order).to(x.device)].flatten(1) for x in rows]
        arrived = wires[stage.axis].rows(torch.cat(sent, 1) if len(sent) > 1 else sent[0], sends, comes)
        del sent, rows
        rows = list(arrived[torch.from_numpy(arrange).to(arrived.device)].split(columns, 1))
        del arrived
    made = []
    for x, part in zip(tensors, rows, strict=True):
        laid = empty_rows(x, room, x.shape[3])
        laid[:, :, : len(part)] = part.view(len(part), *x.shape[:2], x.shape[3]).movedim(0, 2)
        laid[:, :, len(part) :] = 0
        made.append(laid)
    return made


def empty_rows(x: Tensor, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor with the batch and heads of another; its memory has rows before heads."""
    return x.new_empty(x.shape[0], rows, x.shape[1], width, dtype=dtype).transpose(1, 2)
