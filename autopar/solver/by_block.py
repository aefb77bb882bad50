"""What a plan's step takes by block of the model: seconds of a micro-batch, and bytes. Stages are made of blocks.

A plan is made for the whole program of a micro-batch. What a stage of it takes is the sum over its blocks, for choices
are those of the plan wherever it is cut, and nothing is converted at a cut.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.lanes import BACKWARD, FORWARD, HOST, OPTIMIZER, events_of
from autopar.solver.pieces_by_block import STANDING, amount_of, blocks_of_piece, standing_kind
from autopar.solver.points import Point
from autopar.solver.stage_travels import away_of
from autopar.solver.states import Again
from autopar.space.space import Space
from autopar.space.steps import NOWHERE, Away
from autopar.space.timeline import Timeline
from autopar.stages.blocks import ByBlock, Units


def by_block(space: Space, point: Point, units: Units) -> ByBlock:
    """Seconds and bytes of a plan by block."""
    count = len(units.names)
    seconds = {part: np.zeros(count) for part in (FORWARD, BACKWARD, OPTIMIZER)}
    weights = np.zeros(count)
    passes = space.setting.passes
    for event in events_of(space, point):
        if event.lane == HOST and event.hidden_s is None:
            continue  # No op waits for a value that travels.
        *_, name = event.place.split(" to ")
        unit = units.of.get(name, 0)
        taken = event.seconds - (event.hidden_s or 0.0)
        part = event.part if event.part in (FORWARD, OPTIMIZER) else BACKWARD  # backward makes values again, too
        seconds[part][unit] += taken if part == OPTIMIZER else taken / passes
        if event.part == BACKWARD:
            weights[unit] += taken / passes * units.weights.get(name, 0.0)
    inward = seconds[BACKWARD] - weights
    return ByBlock(units.names, seconds[FORWARD], inward, weights, seconds[OPTIMIZER], *_bytes(space, point, units))


def _bytes(
    space: Space, point: Point, units: Units
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bytes by block: what stands, by kind, and then the last five of `ByBlock`."""
    memory = space.memory
    assert memory is not None
    count = len(units.names)
    ops = len(memory.passages.ops)
    settled = 2 * ops - 1  # time of the last backward, when sums of gradients are reduced
    standing = {kind: np.zeros(count) for kind in STANDING}
    gathered = np.zeros(count)
    after = np.zeros((memory.times - settled + 1, count))
    there = np.zeros(memory.times + 1)  # bytes at every time that are counted by block
    for piece in memory.pieces:
        amount = amount_of(piece, space, point.picked)
        stands = standing_kind(piece, ops)
        if not stands and piece.last < settled:
            continue
        blocks = list(blocks_of_piece(piece, space, units))
        if stands:
            (gathered if stands == "gathered parameters" else standing[stands])[blocks] += amount
        if piece.last >= settled:
            after[max(piece.first - settled, 0), blocks] += amount
            after[piece.last - settled + 1, blocks] -= amount
        there[piece.first] += amount
        there[piece.last + 1] -= amount
    of_time = np.array([units.of.get(space.sites[op.site].name, 0) for op in memory.passages.ops], int)
    line = Timeline.of(space, point.picked, point.held, point.momentary)
    away = away_of(line, point.offloaded)
    saved, waiting = saved_by_block(line, line.again(point.recomputed), units, of_time, away)
    beside = point.held[: 2 * ops] - np.cumsum(there)[: 2 * ops]
    before = np.concatenate([[0.0], np.cumsum(saved)[:-1]])
    busy = np.zeros(count)
    for unit in set(of_time.tolist()):
        own = np.flatnonzero(of_time == unit)
        busy[unit] = float(beside[[*own, *(2 * ops - 1 - own)]].max() - before[unit])
    return standing, gathered, np.cumsum(after, axis=0)[:-1], saved, waiting, busy


def saved_by_block(
    line: Timeline, again: Again, units: Units, of_time: np.ndarray, away: Away = NOWHERE
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a micro-batch by block that backward needs, and that gradients of parameters alone need.

    A value is saved by the block whose backward reads it, the first in forward's order. `again` are the runs that are
    recomputed, `away` the values that wait on the host, and `of_time` has the block of each op.
    """
    saved = np.zeros(len(units.names))
    waiting = np.zeros(len(units.names))
    left = set(line.saved(again)) - away.keys()
    for run in line.runs:
        unit = of_time[run.time]
        if units.weights.get(run.name, 0.0):
            waiting[unit] += float(line.bytes[[*run.keeps, *run.makes]].sum())
        saved[unit] += float(line.bytes[[v for v in run.keeps if v in left]].sum())
        left -= set(run.keeps)
    for value in left:
        saved[of_time[line.runs[line.made_by[value]].time]] += float(line.bytes[value])
    return saved, waiting
