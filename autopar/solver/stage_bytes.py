"""Bytes that the actions of each stage of a plan need, by the timeline of its own ops.

The plan's timeline is that of the whole program of a micro-batch. A stage runs some of its ops. Values that it reads of
other stages arrive, values that others read of it are there until its forward has ended, and all others live as they do
in the whole program, under the same recomputation. So a value that several stages read is counted in each, and one that
passes by a stage is not counted in it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.solver.pieces_by_block import amount_of, blocks_of_piece, is_sum, standing_kind
from autopar.solver.points import Point
from autopar.solver.stage_travels import away_of
from autopar.space.memory import Piece
from autopar.space.space import Space
from autopar.space.steps import Away
from autopar.space.timeline import Momentary, Run, Timeline
from autopar.stages.blocks import Units
from autopar.stages.held import Message, StageBytes

_GRADIENTS = ("gradients", "gradients of activations")


class Program:
    """The program of a micro-batch: its timeline, and the memory beside its values, by block."""

    def __init__(self, space: Space, point: Point, units: Units) -> None:
        memory = space.memory
        assert memory is not None
        self.space = space
        self.memory = memory
        self.point = point
        self.units = units
        self.ops = len(memory.passages.ops)
        held = np.sum(list(memory.held(point.picked, space.edges).values()), axis=0)
        self.line = Timeline.of(space, point.picked, held, point.momentary)
        self.times = {op.site: time for time, op in enumerate(memory.passages.ops)}
        self.names = [space.sites[site].name for site in self.times]
        self.blocks = [units.of.get(name, 0) for name in self.names]
        self.away = away_of(self.line, point.offloaded)
        self.anywhere = self._anywhere()
        amounts = ((piece, amount_of(piece, space, point.picked)) for piece in memory.pieces)
        self.pieces = [(piece, amount) for piece, amount in amounts if amount]

    def _anywhere(self) -> set[int]:
        """The runs that every stage makes for itself, and the conversions of their results."""
        runs = self.line.runs
        found = {i for i, run in enumerate(runs) if run.is_op and self.names[run.time] in self.units.anywhere}
        for i, run in enumerate(runs):
            if not run.is_op and all(self.line.made_by[v] in found for v in run.reads):
                found.add(i)
        return found

    def stages(self, ends: Sequence[tuple[int, int]]) -> tuple[list[StageBytes], list[Message]]:
        """The bytes of the stages that begin and end at these blocks, and of their messages."""
        beside = self._beside + self._copied([a for a, _ in ends])
        stages = [_Stage(self, range(a, z), beside) for a, z in ends]
        return [stage.figures() for stage in stages], list(self._messages(stages))

    def stands(self, blocks: Collection[int]) -> dict[str, float]:
        """Bytes by kind that stand on a device with these blocks, without sums; every device has all inputs."""
        found: dict[str, float] = {}
        for piece, amount in self.pieces:
            kind = standing_kind(piece, self.ops)
            own = blocks_of_piece(piece, self.space, self.units)
            is_here = kind == "inputs and buffers" or any(block in blocks for block in own)
            if kind and is_here and not is_sum(piece, self.ops):
                found[kind] = found.get(kind, 0.0) + amount
        return found

    @cached_property
    def _beside(self) -> np.ndarray:
        """Bytes by time of all that is neither a value nor stands."""
        change = np.zeros(self.memory.times + 1)
        for piece, amount in self.pieces:
            if standing_kind(piece, self.ops):
                change[piece.first] += amount
                change[piece.last + 1] -= amount
        return self.line.other - np.cumsum(change)[:-1]

    def _copied(self, firsts: Sequence[int]) -> np.ndarray:
        """Bytes by time of gradients that are copied to another stage, and lay in the memory of others."""
        change = np.zeros(self.memory.times + 1)
        edges = self.space.edges
        stage = {site: bisect.bisect_right(firsts, self.blocks[time]) for site, time in self.times.items()}
        apart = {k for k, edge in enumerate(edges) if stage.get(edge.source, 0) != stage.get(edge.target, 0)}
        if self.memory.shown is not None:
            missing = functools.partial(self.memory.shown.missing, lambda k: edges[k].place(self.point.picked))
            for sign, spans in ((1.0, missing(apart)), (-1.0, missing())):
                for amount, first, last in spans:
                    change[first] += sign * amount
                    change[last + 1] -= sign * amount
        return np.cumsum(change)[:-1]

    def _messages(self, stages: Sequence[_Stage]) -> Iterator[Message]:
        nbytes = self.line.bytes
        for reader, stage in enumerate(stages):
            for source, maker in enumerate(stages[:reader]):
                came = [v for v in stage.arrives if self.line.made_by[v] in maker.runs]
                own = [v for v in came if v not in maker.kept]
                back = [v for v in came if v in self.differentiable]
                if came:
                    yield Message(
                        source, reader, float(nbytes[own].sum()), float(nbytes[came].sum()), float(nbytes[back].sum())
                    )

    # -- values and gradients

    @cached_property
    def once(self) -> set[int]:
        """The values that are made before the first micro-batch."""
        picked = self.point.picked
        found = set[int]()
        for site, run in zip(self.times, (run for run in self.line.runs if run.is_op), strict=True):
            if self.space.is_once(site, picked[site]):
                found.update(run.makes)
        return found

    @cached_property
    def differentiable(self) -> set[int]:
        """The values whose gradients go back."""
        found = set[int]()
        for edge, both in self.line.travels.items():
            if self.space.edges[edge].type.requires_grad:
                found.update(both)
        return found

    def is_anywhere(self, site: int) -> bool:
        return self.space.sites[site].name in self.units.anywhere

    def back(self, site: int) -> int:
        """The time of the backward of an op."""
        return 2 * self.ops - 1 - self.times[site]

    def backs(self, site: int, blocks: Collection[int]) -> list[int]:
        """The times at which ops of some blocks give the gradient of a value, or of views and copies of it."""
        found = []
        pending = [site]
        while pending:
            for target in self._targets[pending.pop()]:
                if self.is_anywhere(target) or target in self._views:
                    pending.append(target)
                elif target in self.times and self.blocks[self.times[target]] in blocks:
                    found.append(self.back(target))
        return found

    @cached_property
    def _views(self) -> set[int]:
        """The ops whose results lie in the memory of what they read."""
        return {op.site for op in self.memory.passages.ops if op.made and op.made[0].shows >= 0}

    @cached_property
    def _targets(self) -> list[list[int]]:
        """The sites that read each site's value."""
        found: list[list[int]] = [[] for _ in self.space.sites]
        for edge in self.space.edges:
            found[edge.source].append(edge.target)
        return found


class _Stage:
    """The runs of one stage, and the bytes at the times of its ops."""

    def __init__(self, program: Program, blocks: range, beside: np.ndarray) -> None:
        self.program = program
        self.blocks = blocks
        self.beside = beside
        line = program.line
        self.runs = self._runs()
        own = [line.runs[i] for i in sorted(self.runs)]
        others = [run for i, run in enumerate(line.runs) if i not in self.runs and i not in program.anywhere]
        made = {v for run in own for v in run.makes}
        self.begun = made & program.once
        self.arrives = sorted({v for run in own for v in (*run.reads, *run.keeps)} - made - program.once)
        self.leaves = sorted(made & {v for run in others for v in (*run.reads, *run.keeps)})
        self.values = {v: k for k, v in enumerate([*self.arrives, *sorted(made - program.once)])}
        forward = np.array([run.time for run in own if run.is_op], int)
        self.times: np.ndarray = np.concatenate([forward, 2 * program.ops - 1 - forward[::-1]])
        self.line = self._line(own)
        self.again = self.line.again({line.runs[i].name for i in line.again(program.point.recomputed)})

    def _runs(self) -> set[int]:
        """The runs of these blocks, and those of no block whose results they need."""
        line = self.program.line
        anywhere = self.program.anywhere
        found = {i for i, run in enumerate(line.runs) if self.program.blocks[run.time] in self.blocks} - anywhere
        pending = list(found)
        while pending:
            run = line.runs[pending.pop()]
            more = {line.made_by[v] for v in (*run.reads, *run.keeps)} & anywhere - found
            found |= more
            pending += more
        return found

    def _line(self, own: Sequence[Run]) -> Timeline:
        """The timeline of this stage's runs, behind one that makes all values that arrive."""
        whole = self.program.line
        last = len(self.times) // 2 - 1
        runs = [Run("", 0.0, (), self._numbers(self.arrives), (), (), 0, is_op=False)]
        time = 0
        for run in own:
            reads = self._numbers(run.reads)
            if run is own[-1]:
                reads += self._numbers([*self.leaves, *self.arrives])
            makes, keeps, first = map(self._numbers, (run.makes, run.keeps, run.first))
            runs.append(replace(run, reads=reads, makes=makes, keeps=keeps, first=first, time=min(time, last)))
            time += run.is_op
        made_by = {v: i for i, run in enumerate(runs) for v in run.makes}
        momentary = self.program.point.momentary
        return Timeline(
            tuple(runs),
            whole.bytes[list(self.values)],
            np.zeros(len(self.values), bool),
            tuple(made_by[k] for k in range(len(self.values))),
            last + 1,
            np.zeros(len(self.times)),
            Momentary(momentary.temporaries[self.times], momentary.made[self.times]),
            (),
            {},
            frozenset(k for v, k in self.values.items() if whole.fixed[v] or k < len(self.arrives)),
        )

    def _numbers(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.values[v] for v in values if v in self.values)

    @cached_property
    def kept(self) -> set[int]:
        """The values that forward keeps for backward."""
        numbers = list(self.values)
        return {numbers[k] for k in self.line.saved(self.again)}

    def figures(self) -> StageBytes:
        """The bytes that the actions of this stage need."""
        half = len(self.times) // 2
        held = self._held()
        gradients = self.gradients()
        made = np.array([gradients.get(int(time), 0.0) for time in self.times[half:]])
        nbytes = self.program.line.bytes
        saved = float(nbytes[list(self.kept - self.program.away.keys())].sum())
        forward = float(held[:half].max())
        backward = float(held[half:].max())
        first = float((held[half:] + np.cumsum(made) - made).max())
        differentiable = self.program.differentiable
        if differentiable.isdisjoint(self.arrives):  # No stage waits for gradients: W is all of backward.
            waiting = saved + float(nbytes[[v for v in self.leaves if v in differentiable]].sum())
            needs = {"F": forward, "B": backward, "I": waiting, "W": backward}
            begins = {"F": forward, "B": first, "I": waiting, "W": first}
        else:
            halves = _Halves(self, held[half:], made)
            waiting = halves.waiting
            needs = {"F": forward, "B": backward, "I": halves.inward, "W": halves.weights}
            begins = {"F": forward, "B": first, "I": halves.inward, "W": halves.first}
        begun = float(nbytes[list(self.begun)].sum())
        return StageBytes(begun, sum(gradients.values()), saved, waiting, needs, begins)

    def _held(self) -> np.ndarray:
        """Bytes at the times of this stage's ops, beside what stands."""
        passing = tuple(self._passing())
        found = self.line.under(self.again, passing, self._away()).held - self.line.other + self.beside[self.times]
        for piece, amount in self.program.pieces:
            if piece.kind in _GRADIENTS and not piece.is_edge and piece.place in self.program.times:
                found -= amount * self._is_elsewhere(piece)
        return found

    def _passing(self) -> Iterator[tuple[int, int]]:
        """The runs of this stage that are recomputed in passing, by the numbers and times of its own timeline."""
        forward = self.times[: len(self.times) // 2].tolist()
        numbers = {i: number for number, i in enumerate(sorted(self.runs), 1)}
        for i, time in self.program.line.passing(self.program.point.passing):
            if i in numbers:
                yield numbers[i], bisect.bisect_right(forward, time) - 1

    def _away(self) -> Away:
        """The values of this stage on the host, and the times of its own timeline between which they are."""
        forward = self.times[: len(self.times) // 2].tolist()
        last = len(self.times) - 1
        ops = 2 * self.program.ops - 1
        return {
            self.values[v]: (bisect.bisect_left(forward, gone), last - bisect.bisect_left(forward, ops - comes))
            for v, (gone, comes) in self.program.away.items()
            if v in self.values
        }

    def _is_elsewhere(self, piece: Piece) -> np.ndarray:
        """At which times of this stage a gradient of the whole program is not here.

        The gradient of a value that has arrived, or of a copy of a parameter, begins with its first reader in this
        stage. There is something to add to it only where another reader in this stage has given one.
        """
        program = self.program
        is_counted = (piece.first <= self.times) & (self.times <= piece.last)
        is_copy = program.is_anywhere(piece.place)
        if not is_copy and program.blocks[program.times[piece.place]] in self.blocks:
            return np.zeros(len(self.times))
        backs = program.backs(piece.place, self.blocks)
        all_backs = program.backs(piece.place, range(len(program.units.names)))
        is_added = piece.first > min(all_backs, default=piece.first)
        if not backs or (is_added and len(backs) == 1):
            return is_counted
        is_here = self.times >= min(backs)
        return is_counted & ~(is_here & (self.times <= max(backs)) if is_copy else is_here)

    def gradients(self) -> dict[int, float]:
        """Bytes of this stage's sums of gradients, by the time of the backward that has made each."""
        program = self.program
        found: dict[int, float] = {}
        for piece, amount in program.pieces:
            if not is_sum(piece, program.ops):
                continue
            target = program.space.edges[piece.place].target
            if program.is_anywhere(target):
                backs = program.backs(target, self.blocks)
            else:
                backs = [program.back(target)] if program.blocks[program.times[target]] in self.blocks else []
            if backs:
                found[max(backs)] = found.get(max(backs), 0.0) + amount
        return found


class _Halves:
    """Bytes of the two parts of a stage's backward, which is whole in `backward`, by its steps.

    The first makes the gradients that another stage awaits. The second reads the values that its ops keep, and the
    gradients of their results. `made` are sums of gradients of parameters.
    """

    def __init__(self, stage: _Stage, backward: np.ndarray, made: np.ndarray) -> None:
        nbytes = stage.line.bytes
        half = len(backward)
        ops = [run for run in reversed(stage.line.runs) if run.is_op]
        is_late = np.array([stage.program.units.weights.get(run.name, 0.0) > 0.0 for run in ops])
        last = {v: step for step, run in enumerate(ops) for v in run.keeps}  # the last step that reads each
        last_late = {v: step for step, run in enumerate(ops) if is_late[step] for v in run.keeps}
        # The gradient of a result is as large as the result. Other ops than products make those of parameters at once.
        comes = np.where(is_late, [nbytes[list(run.makes)].sum() for run in ops], made)
        kept = np.zeros(half)
        freed = np.zeros(half)
        for v, step in last_late.items():
            kept[last[v]] += nbytes[v]
            freed[step] += nbytes[v]
        self.waiting = float((kept + comes).sum())
        before = np.cumsum(kept + comes) - kept - comes
        self.inward = max(self.waiting, float((backward - np.where(is_late, made, 0.0) + before).max()))
        left = self.waiting - np.cumsum(freed + comes) + freed + comes
        self.weights = max(self.waiting, float((left + made).max()))
        self.first = max(self.waiting, float((left + np.cumsum(made)).max()))
