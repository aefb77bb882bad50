"""Cutting: one plan of the whole program in stages, cut where its step is fastest.

A stage is the sum of its blocks (`solver/by_block.py`). Cuts, orders, and what each stage recomputes under a budget are
searched among these sums (`stages/search.py`); the plan that is found is counted as it is (`solver/stage_bytes.py`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, info, type_of
from autopar.letters import Infeasible, NotServed
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import local_shape
from autopar.sharding.strategies import values
from autopar.solver.by_block import by_block
from autopar.solver.figures import size
from autopar.solver.plan import Plan
from autopar.solver.plan_of_choices import with_states
from autopar.solver.points import Point
from autopar.solver.rivals import PricedSpace
from autopar.solver.stage_bytes import Program
from autopar.solver.stage_levels import Level, StageLevels
from autopar.stages.asked import Asked
from autopar.stages.blocks import ByBlock, Units
from autopar.stages.held import most_held
from autopar.stages.levels import InFlight
from autopar.stages.orders import ON_A_V, ORDERS, Order
from autopar.stages.pipeline import Pipeline, StageFigures
from autopar.stages.search import Atoms, Block, Choice, Slow, best_cuts
from autopar.stages.simulate import simulated

_WHOLE = ("gpipe", "1f1b", "interleaved")  # orders whose backward is whole, so that all of it hides copies
_OF_LITTLE_MEMORY = ("v-half", "v-min")  # orders that others are faster than where they fit
_OF_ANY_NUMBER = ("gpipe", "interleaved", "greedy")  # orders with as many stages on each coordinate as there are


class Slower(Exception):
    """Raised where the fastest stages found, whatever they hold, take longer than a plan that is known."""

    def __init__(self, bound: float, mesh: DeviceMesh) -> None:
        super().__init__(f"{bound} s at least")
        self.bound = bound
        self.mesh = mesh  # The mesh of a stage.


class _Staged:
    """A plan of the whole program, and what it takes by block."""

    def __init__(self, graph: Graph, plan: Plan, units: Units, request: Request, asked: Asked) -> None:
        search = plan.search
        assert isinstance(search, PricedSpace) and search.counted is not None
        self.plan = plan
        self.search = search
        self.space = search.counted.space
        self.units = units
        self.found = by_block(self.space, search.point, units)
        self.mesh = asked.whole(plan.mesh)
        self.borders = _borders(graph, plan, units)
        self.atoms = _atoms(self.found, units, _seconds(request, self.mesh, asked.axis, self.borders))
        self.starts = starts_of(units.names, asked)
        self.merged = _merged(self.atoms, self.starts)

    def ends(self, choice: Choice) -> list[tuple[int, int]]:
        """The first block of each stage, and the one behind its last."""
        firsts = [self.starts[at] for at in accumulate(choice.cut, initial=0) if at < len(self.starts)]
        return list(pairwise((*firsts, len(self.found.names))))

    def memory(self, choice: Choice) -> tuple[dict[str, int], dict[int, int]]:
        """Bytes of the fullest coordinate by kind, and the most of each."""
        program = Program(self.space, self.search.point, self.units)
        prices, _ = self.merged.prices(choice.cut)
        return _memory(program, self.found, self.ends(choice), choice, prices.hops(choice.order.place))


@dataclass(frozen=True, slots=True, eq=False)
class _Fitted:
    """Stages that fit, and the bytes of a device of each coordinate."""

    choice: Choice
    staged: _Staged
    room: float  # bytes in which they were searched
    memory: tuple[dict[str, int], dict[int, int]]
    on_host: tuple[int, ...]  # bytes there of each stage and micro-batch

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        place = self.choice.order.place
        return self.choice.run.seconds + _once(self.staged.found, self.staged.ends(self.choice), place)

    @property
    def hosts(self) -> list[int]:
        """The most bytes on the host of a device of each coordinate."""
        none = np.zeros(len(self.on_host))
        return InFlight(self.choice.order).most(np.array(self.on_host, float), none).astype(int).tolist()


class Cutting:
    """One plan of the whole program, and the cuts of it that fit in the budget.

    Under a budget, stages recompute what they have to, each for itself.
    """

    def __init__(self, graph: Graph, plan: Plan, units: Units, request: Request, asked: Asked) -> None:
        self.staged = functools.partial(_Staged, graph, units=units, request=request, asked=asked)
        self.request = request
        self.asked = asked
        self.coordinates = int(asked.size)
        self.base = self.staged(plan)
        self.starts = self.base.starts
        self.recomputes = math.isfinite(request.budget) and request.recompute == "auto"
        if request.room is not None and asked.schedule not in (*_WHOLE, "auto"):
            raise NotServed(
                f"host_budget= and the order {asked.schedule!r}, whose backward runs in two parts",
                advice=f"{' or '.join(map(repr, _WHOLE))}, or no host_budget",
            )

    def check(self, known: float) -> None:
        """Raise `Slower` where the fastest stages, whatever they hold, take `known` seconds."""
        base = self.base
        choice = self._choice(math.inf, known=known)
        if choice.run.seconds + _once(base.found, base.ends(choice), choice.order.place) >= known:
            raise Slower(choice.bound + self._least_once, base.plan.mesh)

    @property
    def _least_once(self) -> float:
        """Seconds of the optimizer, if all coordinates had as much of it."""
        return float(self.base.found.once.sum()) / self.coordinates

    def plan(self, known: float = math.inf) -> Plan:
        """The plan with the fastest stages; raises `Slower` where it is found to take `known` seconds."""
        fitted = self._fitting(known)
        choice = fitted.choice
        staged = fitted.staged
        memory, most = fitted.memory
        found = staged.found
        plan = staged.plan
        ends = staged.ends(choice)
        place = choice.order.place
        step = fitted.seconds
        figures = _figures(found, ends, choice, staged.merged, staged.borders)
        stages = zip(figures, place, fitted.on_host, strict=True)
        pipeline = Pipeline(
            staged.mesh,
            self.asked.axis,
            choice.name,
            place,
            tuple(found.names[a] for a, _ in ends[1:]),
            choice.order.texts(),
            1.0 - plan.step_time_s / (self.coordinates * step),
            tuple(replace(stage, peak_bytes=most[at], host_bytes=there) for stage, at, there in stages),
        )
        cut = tuple(z - a for a, z in ends)
        staged.search.cuts = functools.partial(_moved, found, staged.atoms, choice.order, cut, fitted.room)
        fullest = max(place, key=lambda at: most[at])
        full = [str(stage) for stage, at in enumerate(place) if at == fullest]
        least = choice.bound + self._least_once
        return replace(
            plan,
            pipeline=pipeline,
            step_time_s=step,
            lower_bound_s=min(least, step),
            bound_of=self._bound_of(choice),
            memory=memory,
            budget=self.request.budget,
            host_bytes=max(fitted.hosts, default=0),
            host_budget=0.0 if self.request.room is None else self.request.room.bytes,
            cluster=str(self.request.hardware),
            sources={name: seconds * step / plan.step_time_s for name, seconds in plan.sources.items()},
            peak_at=f"devices of stage{'s' * (len(full) > 1)} {', '.join(full)}",
        )

    def _bound_of(self, choice: Choice) -> str:
        halves = "" if any(choice.run.kept) else " and backward whole"
        cuts = "at these cuts" if self.asked.cuts else "whatever its cuts"
        turns = self.base.plan.microbatches
        return (
            f"of these shardings in {turns} micro-batches on {self.coordinates} coordinates of stages, with as many in "
            f"flight{halves}, {cuts},"
        )

    def _with(self, point: Point) -> _Staged:
        """The plan with other states."""
        base = self.base
        plan = replace(with_states(base.plan, base.space, point), search=base.search.at(point))
        return self.staged(plan)

    def _fitting(self, known: float) -> _Fitted:
        """The fastest stages that fit, of those without values on the host and of those with some."""
        letters: list[Infeasible | Slower] = []
        found: list[_Fitted] = []
        may_wait = self.request.room is not None and math.isfinite(self.request.budget)
        for most in (0.0, math.inf) if may_wait else (0.0,):
            try:
                found.append(self._fit(min([known, *(one.seconds for one in found)]), most))
            except (Infeasible, Slower) as e:
                letters.append(e)
        if not found:
            raise letters[-1]
        return found[-1]

    def _fit(self, known: float, most: float) -> _Fitted:
        """The fastest cut and order that fit, where a block has at most so many bytes on the host.

        The search adds up what stands in blocks and what they save. Stages need more while they run, how much depends
        on the order: where it is too much, the search has less room. Where more is on the host than it has room for,
        blocks have less there.
        """
        room = self.request.budget
        levels = self._levels(most) if self.recomputes or most else None
        atoms = self._atoms_of_levels(levels.levels[1:] if levels is not None else ())
        while True:
            choice = self._choice(room, atoms, known, of_whole=most > 0)
            staged = self.base
            there: list[int] = [0] * len(choice.cut)
            if levels is not None and any(choice.levels):
                ends = staged.ends(choice)
                there = [round(levels.on_host(level)[a:z].sum()) for level, (a, z) in zip(choice.levels, ends)]
                staged = self._with(levels.together(ends, choice.levels))
                prices, _ = staged.merged.prices(choice.cut)
                choice = replace(choice, run=simulated(choice.order, prices))
            fitted = _Fitted(choice, staged, room, staged.memory(choice), tuple(there))
            over = max(fitted.memory[1].values()) - self.request.budget
            if levels is not None and self.request.room is not None and max(fitted.hosts) > self.request.room.bytes:
                most = levels.most_on_host * self.request.room.bytes / max(fitted.hosts)
                levels = self._levels(most)
                atoms = self._atoms_of_levels(levels.levels[1:])
            elif over <= 0:
                return fitted
            else:
                room = min(room, max(choice.sizes)) - over

    def _levels(self, most: float = 0.0) -> StageLevels:
        """The levels of this sharding, of which the first recomputes nothing."""
        base = self.base
        levels = StageLevels(base.space, base.search.point, base.units, self.recomputes, most)
        if base.plan.recomputed:
            self.base = self._with(levels.whole)
        return levels

    def _atoms_of_levels(self, levels: Sequence[Level]) -> list[Atoms]:
        """The blocks at each level."""
        found = []
        base = self.base.atoms
        for level in levels:
            amounts = zip(base.blocks, level.seconds.tolist(), level.saved.tolist(), strict=True)
            blocks = (replace(b, inward=b.inward + seconds, saved=saved) for b, seconds, saved in amounts)
            found.append(_merged(replace(base, blocks=tuple(blocks)), self.starts))
        return found

    def _choice(
        self, room: float, levels: Sequence[Atoms] = (), known: float = math.inf, of_whole: bool = False
    ) -> Choice:
        """The fastest cut and order that fit; if `of_whole`, of those whose backward is whole."""
        asked = self.asked
        left_out = ("gpipe", *(_OF_LITTLE_MEMORY if math.isinf(room) else ()))
        names = [name for name in ORDERS if name not in left_out] if asked.schedule == "auto" else [asked.schedule]
        names = [name for name in names if name in _WHOLE or not of_whole]
        each = len(self.starts) // self.coordinates if asked.cuts else asked.stages_each
        if asked.cuts or (each and asked.schedule != "auto"):
            names = [name for name in names if _has(name, each)]
        if not names:
            raise NotServed(
                f"the order {asked.schedule!r} does not have {each} stages on each coordinate",
                seen=f"cuts={list(asked.cuts)}" if asked.cuts else f"stages_each={each}",
                advice=" or ".join(f'"{name}"' for name in ORDERS if _has(name, each)),
            )
        budget = size(self.request.budget)
        turns = self.base.plan.microbatches
        known -= self._least_once
        try:
            return best_cuts(self.base.merged, self.coordinates, turns, names, each, room, levels, known)
        except Slow as e:
            raise Slower(e.bound + self._least_once, self.base.plan.mesh) from e
        except Infeasible as e:
            raise e.but(
                what=f"no cut into stages on {self.coordinates} coordinates fits in {budget} a device",
                advice="more stages, smaller micro-batches, or another preset inside a stage",
            ) from e


def _figures(
    found: ByBlock, ends: Sequence[tuple[int, int]], choice: Choice, merged: Atoms, borders: Sequence[float]
) -> Iterator[StageFigures]:
    """The figures of each stage, at the prices at which its order was chosen."""
    prices, _ = merged.prices(choice.cut)
    place = choice.order.place
    assert isinstance(prices.transfer, tuple)
    for stage, ((a, z), price) in enumerate(zip(ends, prices.stages, strict=True)):
        is_last = z == len(found.names)
        yield StageFigures(
            found.names[a:z],
            price.forward,
            price.inward,
            price.weights,
            0.0 if is_last else prices.transfer[stage],
            0 if is_last or place[stage] == place[stage + 1] else round(borders[z - 1]),
            round(sum(found.stands(a, z).values())),
            round(float(found.saved[a:z].sum())),
            round(float(found.waiting[a:z].sum())),
            choice.run.saved[stage],
        )


def _once(found: ByBlock, ends: Sequence[tuple[int, int]], place: Sequence[int]) -> float:
    """Seconds of the optimizer on the coordinate where it takes longest."""
    each = dict.fromkeys(place, 0.0)
    for (a, z), at in zip(ends, place, strict=True):
        each[at] += float(found.once[a:z].sum())
    return max(each.values())


def _has(name: str, each: int) -> bool:
    """Whether an order can have `each` stages on a coordinate."""
    return name in _OF_ANY_NUMBER or each == (2 if name in ON_A_V else 1)


def _moved(found: ByBlock, atoms: Atoms, order: Order, cut: Sequence[int], room: float) -> list[tuple[int, int, float]]:
    """Seconds of the step with each stage but the first begun a block later or earlier, in the same order."""
    rows = []
    for stage, by in ((stage, by) for stage in range(1, len(cut)) for by in (-1, 1)):
        other = list(cut)
        other[stage - 1] += by
        other[stage] -= by
        if min(other) < 1:
            continue
        prices, blocks = atoms.prices(other)
        held = order.most_held([block.saved for block in blocks], [block.kept for block in blocks])
        bytes_ = list(held)
        for block, at in zip(blocks, order.place, strict=True):
            bytes_[at] += block.standing
        fits = max(bytes_) <= room
        ends = list(pairwise(accumulate(other, initial=0)))
        seconds = simulated(order, prices).seconds + _once(found, ends, order.place)
        rows.append((stage, by, seconds if fits else math.inf))
    return rows


def starts_of(names: Sequence[str], asked: Asked) -> list[int]:
    """The blocks at which a stage may begin: where the caller says, or any."""
    blocks = len(names)
    if not asked.cuts:
        each = asked.stages_each or (2 if asked.schedule in ("interleaved", *ON_A_V) else 1)
        if blocks < int(asked.size) * each:
            how = "" if each == 1 else f", {each} on each of {asked.size} coordinates (schedule {asked.schedule!r})"
            raise NotServed(
                f"the model has {blocks} blocks, and pipeline={asked.size} asks for more stages{how}",
                seen=f"blocks: {', '.join(names) or 'none'}",
                advice=f"pipeline={blocks // each}" if blocks >= 2 * each else "no pipeline",
            )
        return list(range(blocks))
    if unknown := [name for name in asked.cuts if name not in names]:
        raise NotServed(
            f"cuts= names {unknown[0]!r}, and the model has no such block", seen=f"blocks: {', '.join(names)}"
        )
    starts = [0, *map(names.index, asked.cuts)]
    if starts != sorted(set(starts)) or len(starts) % int(asked.size):
        raise NotServed(
            f"cuts={list(asked.cuts)} does not make stages for {asked.size} coordinates, in the order of the blocks",
            seen=f"blocks: {', '.join(names)}",
            advice=f"{int(asked.size) - 1} blocks in their order, the first block of the model left out",
        )
    return starts


def _merged(atoms: Atoms, starts: Sequence[int]) -> Atoms:
    """Atoms of the blocks between places where a stage may begin."""
    ends = list(pairwise((*starts, len(atoms.blocks))))
    assert isinstance(atoms.transfer, tuple)
    return Atoms(
        tuple(functools.reduce(operator.add, atoms.blocks[a:z]) for a, z in ends),
        tuple(atoms.transfer[a - 1] for a in starts[1:]),
        sum(z <= atoms.frozen for _, z in ends),
    )


def _memory(
    program: Program, found: ByBlock, ends: Sequence[tuple[int, int]], choice: Choice, hops: Sequence[float]
) -> tuple[dict[str, int], dict[int, int]]:
    """Bytes of the fullest coordinate by kind, and the most of each."""
    stages, messages = program.stages(ends)
    by_kind: dict[int, dict[str, float]] = {}
    for at, held in enumerate(most_held(choice.order, choice.run, hops, stages, messages)):
        own = [stage for stage, of in enumerate(choice.order.place) if of == at]
        blocks = {unit for stage in own for unit in range(*ends[stage])}
        kinds = program.stands(blocks)
        if begun := sum(stages[stage].begun for stage in own):
            kinds["gathered parameters"] = kinds.get("gathered parameters", 0.0) + begun
        after = float(found.after[:, sorted(blocks)].sum(1).max())
        if after > sum(kinds.values()) + held.total:  # nothing is in flight when parameters are stepped
            sums = sum(stages[stage].gradients for stage in own)
            kinds["gradients"] = kinds.get("gradients", 0.0) + sums
            by_kind[at] = {**kinds, "step temporaries": after - sum(kinds.values())}
        else:
            kinds["gradients"] = kinds.get("gradients", 0.0) + held.gradients
            by_kind[at] = {**kinds, "saved activations": held.saved, "transients": held.transients}
    most = {at: round(sum(kinds.values())) for at, kinds in by_kind.items()}
    fullest = max(most, key=lambda at: most[at])
    return {kind: round(nbytes) for kind, nbytes in by_kind[fullest].items()}, most


def _borders(graph: Graph, plan: Plan, units: Units) -> list[float]:
    """Bytes of a device that cross the border behind each block."""
    nodes = {node.name: node for node in graph.nodes}
    borders = [0.0] * (len(units.names) - 1)
    for name, block, last in units.crossing:
        nbytes = _local_bytes(nodes[name], plan)
        for border in range(block, last):
            borders[border] += nbytes
    return borders


def _local_bytes(node: fx.Node, plan: Plan) -> int:
    """Bytes of the fullest device's part of a value, as its op leaves it."""
    made_by, place = (node.args[0], int(str(node.args[1]))) if info(node).kind == "part" else (node, 0)
    assert isinstance(made_by, fx.Node)
    lies = values(plan.decisions[info(made_by).key].choice.output(place))
    whole = type_of(node)
    return math.prod(local_shape(whole.shape, lies, plan.mesh, (0,) * len(plan.mesh.shape))) * whole.itemsize


def _seconds(request: Request, mesh: DeviceMesh, axis: str, borders: Sequence[float]) -> tuple[float, ...]:
    """Seconds in which the values of a border go from one device to another."""
    *_, (_, link) = request.hardware.levels(mesh, mesh.axis(axis), "send")
    return tuple(link.latency_s + nbytes / link.wire("send", 2) for nbytes in borders)


def _atoms(found: ByBlock, units: Units, seconds: tuple[float, ...]) -> Atoms:
    stands = np.sum([found.gathered, *found.standing.values()], axis=0)
    columns = (found.forward, found.inward, found.weights, stands, found.saved, found.waiting)
    return Atoms(tuple(Block(*map(float, entry)) for entry in zip(*columns, strict=True)), seconds, units.frozen)
