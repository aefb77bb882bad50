"""Plans in stages: the plan of the whole program on the mesh of one stage, cut where its step is fastest.

Choices inside a stage do not depend on where the model is cut, as a value leaves a stage as it lies. So one plan prices
every cut: its seconds and bytes by block make up those of any stage (`solver/by_block.py`), and cuts and orders are
searched among them (`stages/search.py`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch.fx as fx

from autopar.arguments import check_fits
from autopar.graph.graph import Graph, info, rows_of_batch, type_of
from autopar.letters import Infeasible, Letter, NotServed
from autopar.limits import LIMITS
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import local_shape
from autopar.sharding.strategies import values
from autopar.solver.by_block import by_block
from autopar.solver.figures import size
from autopar.solver.plan import Plan
from autopar.solver.rivals import PricedSpace
from autopar.solver.stage_bytes import Program
from autopar.space.space import Outdone
from autopar.stages.asked import Asked
from autopar.stages.blocks import ByBlock, Units
from autopar.stages.cuts import blocks_of, units_of
from autopar.stages.held import most_held
from autopar.stages.orders import ORDERS, Order
from autopar.stages.pipeline import FORWARD, Pipeline, StageFigures, forward_orders
from autopar.stages.search import Atoms, Block, Choice, best_cuts
from autopar.stages.simulate import simulated

_ON_A_V = ("zb-v", "dualpipe-v")  # orders with two stages on each coordinate
_OF_ANY_NUMBER = ("gpipe", "interleaved", "greedy")  # orders with as many stages on each coordinate as there are


class _Slower(Exception):
    """Raised where the fastest stages found, whatever they hold, take longer than a plan that is known."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"{bound} s at least")
        self.bound = bound


class Inside(Protocol):
    """Plans what a stage does; raises `Outdone` where a bound says that no plan takes less than `known` seconds."""

    def __call__(self, request: Request, known: float = math.inf) -> Plan: ...


def staged(graph: Graph, request: Request, inside: Inside) -> Plan:
    """The fastest plan found of a graph in stages; `inside` plans what a stage does."""
    asked = request.pipeline
    assert isinstance(asked, Asked)
    if asked.mesh is not None:
        check_fits(asked.mesh.size, request.hardware)
    if asked.schedule == FORWARD:
        plan = inside(_of_a_stage(request, asked))
        pipeline = Pipeline(
            asked.whole(plan.mesh), asked.axis, FORWARD, asked.place, asked.cuts, forward_orders(asked.place)
        )
        return replace(plan, pipeline=pipeline, cluster=str(request.hardware))
    if asked.size != "auto":
        return _in_stages(graph, request, asked, inside)
    return _in_any_number(graph, request, asked, inside)


def _in_any_number(graph: Graph, request: Request, asked: Asked, inside: Inside) -> Plan:
    """The fastest plan found in any power of two of stages; its `meshes` lists all of them."""
    assert isinstance(request.mesh, int)
    devices = request.mesh
    plans: list[Plan] = []
    letters: list[Letter] = []
    rows: list[tuple[str, float, float, int, str]] = []
    for count in (2**k for k in range(devices.bit_length()) if devices % 2**k == 0):
        known = min((plan.step_time_s for plan in plans), default=math.inf)
        of_count = replace(asked, size=count) if count > 1 else None
        asking = replace(request, mesh=devices // count, pipeline=of_count)
        name = f"{count} stages"
        try:
            plan = _in_stages(graph, asking, of_count, inside, known) if of_count else inside(asking)
            plans.append(plan)
            rows.append((f"{name} of {plan.mesh}", plan.step_time_s, plan.lower_bound_s, plan.peak_bytes, ""))
        except Outdone as e:
            rows.append((name, 0.0, e.floor, 0, "slower, even if no stage waited"))
        except _Slower as e:
            rows.append((name, 0.0, e.bound, 0, "slower, whatever they hold"))
        except Letter as e:
            letters.append(e)
            rows.append((name, 0.0, 0.0, 0, e.what))
    if not plans:
        raise letters[0]
    best = min(plans, key=lambda plan: plan.step_time_s)
    return replace(best, meshes=tuple(rows), lower_bound_s=min(bound for *_, bound, _, _ in rows if bound))


def _if_none_waits(plan: Plan) -> float:
    """Seconds of a step of a plan in stages, if no stage ever waited for another."""
    assert plan.pipeline is not None
    return plan.step_time_s * (1.0 - plan.pipeline.idle)


def _in_stages(graph: Graph, request: Request, asked: Asked, inside: Inside, known: float = math.inf) -> Plan:
    """The fastest plan found with a number of stages, of several numbers of micro-batches.

    They end where a plan would take `known` seconds even if no stage ever waited: more of them only shorten the wait.
    Raises `Outdone` where the first would.
    """
    _starts(blocks_of(list(graph.nodes)), asked)
    plans: list[Plan] = []
    letter: Letter | None = None
    slower: _Slower | None = None
    for turns in _numbers_of_turns(graph, request, int(asked.size)):
        mesh = plans[0].mesh if plans else request.mesh  # meshes are searched with one number of them
        try:
            best = min([known, *(plan.step_time_s for plan in plans)])
            plans.append(_in_turns(graph, replace(request, microbatches=turns, mesh=mesh), asked, inside, best))
            if _if_none_waits(plans[-1]) >= known:
                break
        except Outdone:
            if not plans:
                raise
            break
        except _Slower as e:
            slower = e
        except (Infeasible, NotServed) as e:
            letter = letter or e
    if plans:
        return min(plans, key=lambda plan: plan.step_time_s)
    if slower is not None:
        raise slower
    assert letter is not None
    raise letter


def _numbers_of_turns(graph: Graph, request: Request, stages: int) -> list[int]:
    """Numbers of micro-batches to try: what is asked for, or some that fill the stages."""
    if request.microbatches != "auto":
        return [int(request.microbatches)]
    rows = rows_of_batch(graph)
    fits = [n for n in range(1, rows + 1) if rows % n == 0]
    return list(dict.fromkeys(min(fits, key=lambda n: abs(math.log(n / (stages * fill)))) for fill in LIMITS.fills))


def _in_turns(graph: Graph, request: Request, asked: Asked, inside: Inside, known: float) -> Plan:
    """The fastest plan found in some micro-batches; under a budget one that saves as much as fits.

    Raises `Outdone` where the busiest of as many stages would work for `known` seconds at least, and `_Slower` where
    stages take as long without a budget: no budget is searched then.
    """
    freer = _of_a_stage(replace(request, memory_budget=math.inf), asked)
    inside = functools.partial(_shared_evenly, inside, int(asked.size), known)
    plan = inside(freer)
    turned = request.as_planned(graph, plan, asked)
    units = units_of(turned)
    letter: Infeasible | None = None
    saved = _most_saved(plan)
    peak = plan.peak_bytes
    for share in LIMITS.tighter:
        try:
            if share < 1.0:
                plan = inside(replace(freer, memory_budget=peak - round((1 - share) * saved)))
            cutting = _Cutting(turned, plan, units, request, asked)
            if share == 1.0 and math.isfinite(request.budget) and math.isfinite(known):
                cutting.check(known)
            return cutting.plan()
        except Infeasible as e:
            letter = letter or e
    assert letter is not None
    raise letter


def _shared_evenly(inside: Inside, stages: int, known: float, request: Request) -> Plan:
    """The plan of all that stages do; raises `Outdone` where an equal share of it takes `known` seconds."""
    try:
        return inside(request, known * stages)
    except Outdone as e:
        raise Outdone(e.floor / stages) from e


def _of_a_stage(request: Request, asked: Asked) -> Request:
    """The request for what a stage does, whose devices may stand apart in the mesh of all."""
    mesh = asked.mesh
    if mesh is None:  # the axis of stages is the first of a mesh that is searched
        size = request.mesh if isinstance(request.mesh, int) else DeviceMesh.of(request.mesh).size
        mesh = DeviceMesh((int(asked.size), size), (asked.axis, "stage"))
    return replace(request, cluster=request.hardware.within_stages(mesh, asked.axis))


def _most_saved(plan: Plan) -> float:
    """The most bytes that a plan saves for backward; the optimizer's step may hold more, and none of them."""
    search = plan.search
    assert isinstance(search, PricedSpace) and search.counted is not None
    space = search.counted.space
    assert space.memory is not None
    return float(space.memory.held(search.point.picked, space.edges)["saved activations"].max())


class _Cutting:
    """One plan of the whole program, and the cuts of it that fit in the budget."""

    def __init__(self, graph: Graph, plan: Plan, units: Units, request: Request, asked: Asked) -> None:
        search = plan.search
        assert isinstance(search, PricedSpace) and search.counted is not None
        self.search = search
        self.whole_plan = plan
        self.units = units
        self.request = request
        self.asked = asked
        self.coordinates = int(asked.size)
        self.found = by_block(search.counted.space, search.point, units)
        self.program = Program(search.counted.space, search.point, units)
        self.mesh = asked.whole(plan.mesh)
        self.borders = _borders(graph, plan, units)
        self.atoms = _atoms(self.found, units, _seconds(request, self.mesh, asked.axis, self.borders))
        self.starts = _starts(units.names, asked)

    def check(self, known: float) -> None:
        """Raise `_Slower` where the fastest stages, whatever they hold, take `known` seconds."""
        choice = self._choice(_merged(self.atoms, self.starts), math.inf)
        if choice.run.seconds + _once(self.found, self._ends(choice), choice.order.place) >= known:
            raise _Slower(choice.bound + float(self.found.once.sum()) / self.coordinates)

    def plan(self) -> Plan:
        """The plan with the fastest stages."""
        found = self.found
        plan = self.whole_plan
        merged = _merged(self.atoms, self.starts)
        choice, room, memory, most = self._fitting(merged)
        ends = self._ends(choice)
        place = choice.order.place
        step = choice.run.seconds + _once(found, ends, place)
        figures = _figures(found, ends, choice, merged, self.borders)
        pipeline = Pipeline(
            self.mesh,
            self.asked.axis,
            choice.name,
            place,
            tuple(self.units.names[a] for a, _ in ends[1:]),
            choice.order.texts(),
            1.0 - plan.step_time_s / (self.coordinates * step),
            tuple(replace(stage, peak_bytes=most[at]) for stage, at in zip(figures, place, strict=True)),
        )
        cut = tuple(z - a for a, z in ends)
        self.search.cuts = functools.partial(_moved, found, self.atoms, choice.order, cut, room)
        fullest = max(place, key=lambda at: most[at])
        full = [str(stage) for stage, at in enumerate(place) if at == fullest]
        least = choice.bound + float(found.once.sum()) / self.coordinates
        return replace(
            plan,
            pipeline=pipeline,
            step_time_s=step,
            lower_bound_s=min(least, step),
            bound_of=self._bound_of(choice),
            memory=memory,
            budget=self.request.budget,
            cluster=str(self.request.hardware),
            sources={name: seconds * step / plan.step_time_s for name, seconds in plan.sources.items()},
            peak_at=f"devices of stage{'s' * (len(full) > 1)} {', '.join(full)}",
        )

    def _bound_of(self, choice: Choice) -> str:
        halves = "" if any(choice.run.kept) else " and backward whole"
        cuts = "at these cuts" if self.asked.cuts else "whatever its cuts"
        turns = self.whole_plan.microbatches
        return (
            f"of these shardings in {turns} micro-batches on {self.coordinates} coordinates of stages, with as many in "
            f"flight{halves}, {cuts},"
        )

    def _ends(self, choice: Choice) -> list[tuple[int, int]]:
        """The first block of each stage, and the one behind its last."""
        firsts = [self.starts[at] for at in accumulate(choice.cut, initial=0) if at < len(self.starts)]
        return list(pairwise((*firsts, len(self.found.names))))

    def _fitting(self, merged: Atoms) -> tuple[Choice, float, dict[str, int], dict[int, int]]:
        """The fastest cut and order that fit, the room in which they were searched, and their bytes.

        The search adds up what stands in blocks and what they save. Stages need more while they run, how much depends
        on the order: where it is too much, the search has less room.
        """
        room = self.request.budget
        while True:
            choice = self._choice(merged, room)
            prices, _ = merged.prices(choice.cut)
            hops = prices.hops(choice.order.place)
            memory, most = _memory(self.program, self.found, self._ends(choice), choice, hops)
            over = max(most.values()) - self.request.budget
            if over <= 0:
                return choice, room, memory, most
            room = min(room, max(choice.sizes)) - over

    def _choice(self, merged: Atoms, room: float) -> Choice:
        """The fastest cut and order that fit."""
        asked = self.asked
        names = [name for name in ORDERS if name != "gpipe"] if asked.schedule == "auto" else [asked.schedule]
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
        try:
            return best_cuts(merged, self.coordinates, self.whole_plan.microbatches, names, each, room)
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
    return name in _OF_ANY_NUMBER or each == (2 if name in _ON_A_V else 1)


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


def _starts(names: Sequence[str], asked: Asked) -> list[int]:
    """The blocks at which a stage may begin: where the caller says, or any."""
    blocks = len(names)
    if not asked.cuts:
        each = asked.stages_each or (2 if asked.schedule in ("interleaved", *_ON_A_V) else 1)
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
