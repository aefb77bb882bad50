"""What the actions of each stage of a plan hold, by the timeline of its own ops.

The plan's timeline is that of the whole program of a micro-batch. A stage runs some of its ops: what they read of other
stages arrives, what others read of theirs is there until their forward has ended, and all else lives as it does in the
whole program, under the same recomputation. So a value that several stages read is in each, and one that passes by a
stage is not in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.solver.points import Point
from autopar.space.memory import Piece
from autopar.space.space import Space
from autopar.space.timeline import RESIDENT, Momentary, Run, Timeline
from autopar.stages.blocks import Units
from autopar.stages.held import Message, StageBytes

_STANDING = ("parameters", "gradients", "optimizer states", "inputs and buffers")
_GRADIENTS = ("gradients", "gradients of activations")


def standing_kind(piece: Piece, ops: int) -> str:
    """The kind of a piece that is there from forward to backward whatever runs between; "" of any other."""
    is_long = piece.kind in _STANDING and piece.last - piece.first >= ops
    is_kept = piece.kind == "gathered parameters" and piece.first < ops <= piece.last
    return piece.kind if is_long or is_kept else ""


def blocks_of_piece(piece: Piece, space: Space, units: Units) -> tuple[int, ...]:
    """The blocks whose stages hold a piece; the sum of a gradient is with the op that makes it."""
    edge = space.edges[piece.place] if piece.is_edge else None
    if edge is not None and piece.kind == "gradients":
        target = space.sites[edge.target].name
        if target not in units.anywhere:
            return (units.of.get(target, 0),)
    site = space.sites[edge.source if edge else piece.place].name
    return units.shared.get(site, (units.of.get(site, 0),))


def amount_of(piece: Piece, space: Space, picked: Sequence[int]) -> float:
    """Bytes of a piece under the picked choices."""
    place = space.edges[piece.place].place(picked) if piece.is_edge else picked[piece.place]
    return float(piece.bytes[place])


class Program:
    """The program of a micro-batch: its timeline, and what is there beside its values, by block."""

    def __init__(self, space: Space, point: Point, units: Units) -> None:
        memory = space.memory
        assert memory is not None
        self.space = space
        self.memory = memory
        self.picked = point.picked
        self.units = units
        self.ops = ops = len(memory.passages.ops)
        held = np.sum(list(memory.held(point.picked, space.edges).values()), axis=0)
        self.line = line = Timeline.of(space, point.picked, held, point.momentary)
        self.again = line.again(point.recomputed)
        self.passing = line.passing(point.passing)
        self.momentary = point.momentary
        sites = [op.site for op in memory.passages.ops]
        self.times = {site: time for time, site in enumerate(sites)}
        self.names = [space.sites[site].name for site in sites]
        self.blocks = [units.of.get(name, 0) for name in self.names]
        is_once = [space.is_once(site, point.picked[site]) for site in sites]
        self.once = {v for run in line.runs if run.is_op and is_once[run.time] for v in run.makes}
        self.anywhere = self._anywhere()
        amounts = ((piece, amount_of(piece, space, point.picked)) for piece in memory.pieces)
        self.pieces = [(piece, amount) for piece, amount in amounts if amount]
        stands = np.zeros(memory.times + 1)
        for piece, amount in self.pieces:
            if standing_kind(piece, ops):
                stands[piece.first] += amount
                stands[piece.last + 1] -= amount
        self.beside = line.other - np.cumsum(stands)[:-1]  # bytes by time that are neither values nor stand

    def stages(self, ends: Sequence[tuple[int, int]]) -> tuple[list[StageBytes], list[Message]]:
        """The bytes of the stages that begin and end at these blocks, and of what they give each other."""
        beside = self.beside + self._copied(ends)
        stages = [_Stage(self, range(a, z), beside) for a, z in ends]
        return [stage.bytes() for stage in stages], list(self._messages(stages))

    def _copied(self, ends: Sequence[tuple[int, int]]) -> np.ndarray:
        """Bytes by time of gradients that lie in the memory of others, less where these are in another stage."""
        change = np.zeros(self.memory.times + 1)
        if self.memory.shown is None:
            return change[:-1]
        edges = self.space.edges
        stage = {site: bisect.bisect_right([a for a, _ in ends], self.blocks[t]) for site, t in self.times.items()}
        apart = {
            k for k, edge in enumerate(edges) if stage.get(edge.source, 0) != stage.get(edge.target, 0)
        }
        for sign, cut in ((1.0, apart), (-1.0, ())):
            for amount, first, last in self.memory.shown.missing(lambda k: edges[k].place(self.picked), cut):
                change[first] += sign * amount
                change[last + 1] -= sign * amount
        return np.cumsum(change)[:-1]

    def stands(self, blocks: Collection[int]) -> dict[str, float]:
        """Bytes by kind that stand on a device with these blocks; every device has all inputs."""
        found: dict[str, float] = {}
        for piece, amount in self.pieces:
            kind = standing_kind(piece, self.ops)
            if not kind or self.is_sum(piece):
                continue
            if kind == "inputs and buffers" or not blocks.isdisjoint(blocks_of_piece(piece, self.space, self.units)):
                found[kind] = found.get(kind, 0.0) + amount
        return found

    def is_sum(self, piece: Piece) -> bool:
        """Whether a piece is a sum of gradients, which the first backward begins."""
        return piece.kind == "gradients" and piece.is_edge and bool(standing_kind(piece, self.ops))

    def is_anywhere(self, site: int) -> bool:
        return self.space.sites[site].name in self.units.anywhere

    def backs(self, site: int, blocks: Collection[int]) -> list[int]:
        """The times at which ops of some blocks give the gradient of a value, or of views and copies of it."""
        found = []
        pending = [site]
        while pending:
            for target in self.targets[pending.pop()]:
                if self.is_anywhere(target) or target in self.views:
                    pending.append(target)
                elif target in self.times and self.blocks[self.times[target]] in blocks:
                    found.append(2 * self.ops - 1 - self.times[target])
        return found

    @cached_property
    def views(self) -> set[int]:
        """The ops whose results lie in the memory of what they read."""
        ops = self.memory.passages.ops
        return {op.site for op in ops if op.made and all(made.shows >= 0 for made in op.made)}

    @cached_property
    def targets(self) -> list[list[int]]:
        """The sites that read what each site gives."""
        found: list[list[int]] = [[] for _ in self.space.sites]
        for edge in self.space.edges:
            found[edge.source].append(edge.target)
        return found

    @cached_property
    def differentiable(self) -> set[int]:
        """The values whose gradients go back."""
        edges = self.space.edges
        return {v for edge, both in self.line.travels.items() if edges[edge].has_gradient for v in both}

    def _anywhere(self) -> set[int]:
        """The runs that every stage makes for itself, and the conversions of what these make."""
        line = self.line
        found = {i for i, run in enumerate(line.runs) if run.is_op and self.names[run.time] in self.units.anywhere}
        for i, run in enumerate(line.runs):
            if not run.is_op and all(line.made_by[v] in found for v in run.reads):
                found.add(i)
        return found

    def _messages(self, stages: Sequence[_Stage]) -> Iterator[Message]:
        nbytes = self.line.bytes
        for reader, stage in enumerate(stages):
            for source, maker in enumerate(stages[:reader]):
                came = [v for v in stage.arrives if self.line.made_by[v] in maker.runs]
                back = [v for v in came if v in self.differentiable]
                own = [v for v in came if v not in maker.kept]
                if came:
                    yield Message(source, reader, *(float(nbytes[some].sum()) for some in (own, came, back)))


class _Stage:
    """The runs of one stage, and what they hold."""

    def __init__(self, program: Program, blocks: range, beside: np.ndarray) -> None:
        self.program = program
        self.beside = beside
        self.blocks = blocks
        line = program.line
        own = {i for i, run in enumerate(line.runs) if program.blocks[run.time] in blocks} - program.anywhere
        pending = list(own)
        while pending:
            run = line.runs[pending.pop()]
            more = {line.made_by[v] for v in (*run.reads, *run.keeps)} & program.anywhere - own
            own |= more
            pending += more
        self.runs = own
        made = {v for i in own for v in line.runs[i].makes}
        read = {v for i in own for v in (*line.runs[i].reads, *line.runs[i].keeps)}
        others = [run for i, run in enumerate(line.runs) if i not in own and i not in program.anywhere]
        self.begun = made & program.once
        self.arrives = sorted(read - made - program.once)
        self.leaves = sorted(made.intersection(v for run in others for v in (*run.reads, *run.keeps)))
        self.values = {v: k for k, v in enumerate([*self.arrives, *sorted(made - program.once)])}
        times = np.array([line.runs[i].time for i in sorted(own) if line.runs[i].is_op], int)
        self.times: np.ndarray = np.concatenate([times, 2 * program.ops - 1 - times[::-1]])
        self.line = self._line()
        self.again = self.line.again(line.runs[i].name for i in program.again)

    @cached_property
    def kept(self) -> set[int]:
        """The values that forward keeps for backward."""
        numbers = list(self.values)
        return {numbers[k] for k in self.line.saved(self.again)}

    def _line(self) -> Timeline:
        """The timeline of this stage's runs, behind one that makes what arrives."""
        whole = self.program.line
        runs = [Run("", 0.0, (), tuple(range(len(self.arrives))), (), (), 0, is_op=False)]
        time = 0
        last = len(self.times) // 2 - 1
        for i in sorted(self.runs):
            run = whole.runs[i]
            own = {part: self._numbers(getattr(run, part)) for part in ("reads", "makes", "keeps", "first")}
            runs.append(replace(run, time=min(time, last), **own))
            time += run.is_op
        left = self._numbers([*self.leaves, *self.arrives])
        runs[-1] = replace(runs[-1], reads=(*runs[-1].reads, *left))
        made_by = [0] * len(self.values)
        for i, run in enumerate(runs):
            for v in run.makes:
                made_by[v] = i
        values = list(self.values)
        momentary = self.program.momentary
        return Timeline(
            tuple(runs),
            whole.bytes[values],
            np.zeros(len(values), bool),
            tuple(made_by),
            last + 1,
            np.zeros(len(self.times)),
            Momentary(momentary.temporaries[self.times], momentary.made[self.times]),
            (),
            {},
            frozenset(k for v, k in self.values.items() if whole.fixed[v] or v in self.arrives),
        )

    def _numbers(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.values[v] for v in values if v in self.values)

    def bytes(self) -> StageBytes:
        """What the actions of this stage hold."""
        half = len(self.times) // 2
        held = self._held()
        sums, total = self._sums()
        program = self.program
        saved = float(program.line.bytes[list(self.kept)].sum())
        forward = float(held[:half].max())
        backward = float(held[half:].max())
        first = float((held[half:] + sums).max())
        if any(v in program.differentiable for v in self.arrives):
            halves = _Halves(self, held[half:])
            needs = {"I": halves.inward, "W": halves.weights}
            begins = {"I": halves.inward, "W": halves.first}
            waiting = halves.waiting
        else:  # No stage waits for gradients: W is all of backward.
            back = [v for v in self.leaves if v in program.differentiable]
            waiting = saved + float(program.line.bytes[back].sum())
            needs = {"I": waiting, "W": backward}
            begins = {"I": waiting, "W": first}
        begun = float(program.line.bytes[list(self.begun)].sum())
        return StageBytes(
            begun, total, saved, waiting, {"F": forward, "B": backward, **needs}, {"F": forward, "B": first, **begins}
        )

    def _held(self) -> np.ndarray:
        """Bytes at the times of this stage's ops, beside what stands."""
        program = self.program
        found = self.line.under(self.again).held - self.line.other + self.beside[self.times]
        for piece, amount in program.pieces:
            if piece.kind in _GRADIENTS and not piece.is_edge and piece.place in program.times:
                found -= amount * self._is_elsewhere(piece)
        return found

    def _is_elsewhere(self, piece: Piece) -> np.ndarray:
        """At which times of this stage a gradient of the whole program is not here.

        The gradient of what has come, or of a copy of a parameter, begins with the first reader of this stage, and
        there is something to add to it only where another one of it has read it, too.
        """
        program = self.program
        times = self.times
        is_counted = (piece.first <= times) & (times <= piece.last)
        site = piece.place
        is_copy = program.is_anywhere(site)
        if not is_copy and program.blocks[program.times[site]] in self.blocks:
            return np.zeros(len(times))
        backs = program.backs(site, self.blocks)
        is_added = piece.first > min(program.backs(site, range(len(program.units.names))), default=piece.first)
        if not backs or (is_added and len(backs) == 1):
            return is_counted
        is_here = times >= min(backs)
        return is_counted & ~(is_here & (times <= max(backs)) if is_copy else is_here)

    def gradients(self) -> dict[int, float]:
        """Bytes of the sums of gradients that this stage makes, by the time of the backward that has made them."""
        program = self.program
        found: dict[int, float] = {}
        for piece, amount in program.pieces:
            if not program.is_sum(piece):
                continue
            target = program.space.edges[piece.place].target
            if program.is_anywhere(target):
                backs = program.backs(target, self.blocks)
            else:
                time = program.times[target]
                backs = [2 * program.ops - 1 - time] if program.blocks[time] in self.blocks else []
            if backs:
                found[max(backs)] = found.get(max(backs), 0.0) + amount
        return found

    def _sums(self) -> tuple[np.ndarray, float]:
        """Sums that the first backward has made before each of its times, and all of them."""
        gradients = self.gradients()
        back = self.times[len(self.times) // 2 :]
        made = np.array([sum(n for begins, n in gradients.items() if begins < time) for time in back])
        return made, sum(gradients.values())


class _Halves:
    """What the two parts of a stage's backward hold: the gradients of what came in, then those of parameters."""

    def __init__(self, stage: _Stage, backward: np.ndarray) -> None:
        line = stage.line
        count = line.ops
        gradients = stage.gradients()
        of_time = [gradients.get(int(time), 0.0) for time in stage.times[count:]]  # by step of backward
        ops = [run for run in reversed(line.runs) if run.is_op]
        shares = [stage.program.units.weights.get(run.name, 0.0) for run in ops]
        freed = {v: step for step, run in enumerate(ops) for v in run.keeps}  # the last step of backward that reads it
        later = {v: step for step, run in enumerate(ops) if shares[step] for v in run.keeps}  # the last of W
        come = np.array([float(line.bytes[list(run.makes)].sum()) * bool(s) for run, s in zip(ops, shares, strict=True)])
        ready = np.array([0.0 if share else n for n, share in zip(of_time, shares, strict=True)])  # made by I
        kept = np.zeros(count)
        frees = np.zeros(count)
        for v, step in later.items():
            kept[freed[v]] += line.bytes[v]
            frees[step] += line.bytes[v]
        stays = np.cumsum(kept + come + ready)
        before = np.concatenate([[0.0], stays[:-1]])
        self.waiting = float(stays[-1])
        self.inward = max(float((backward - (np.array(of_time) - ready) + before).max()), self.waiting)
        left = self.waiting - np.concatenate([[0.0], np.cumsum(frees + come + ready)[:-1]])
        made = np.array(of_time)
        self.weights = max(float((left + made).max()), self.waiting)
        self.first = max(float((left + np.cumsum(made)).max()), self.waiting)


__all__ = ["Program", "amount_of", "blocks_of_piece", "standing_kind"]
