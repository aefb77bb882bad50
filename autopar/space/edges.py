"""`EdgeBuilder`: the edges of a space, each with a table of the seconds of its conversions.

Edges that are alike share their tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.fx as fx

from autopar.graph.graph import TensorType, info
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.placement import local_elements
from autopar.sharding.strategies import Choice, gradients, values
from autopar.space.constraints import HABITS
from autopar.space.overlap import Movement
from autopar.space.parameter_values import ParameterValues
from autopar.space.schedule import Schedule
from autopar.space.setting import Setting
from autopar.space.shared import Shared
from autopar.space.sites import Draft
from autopar.space.space import Edge, Flows, Site, reduces
from autopar.space.wiring import SiteKey, Wiring, source_of


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """One end of an edge: a site, and the index of its output or operand there."""

    index: int
    site: Site
    place: int


class _Cargo(NamedTuple):
    """A value on an edge, and how it travels."""

    type: TensorType
    ahead: ShapeConsistencyManager | None  # the conversions that gather a parameter, or what is handed on from one
    back: ShapeConsistencyManager  # the conversions of its gradient, which a parameter's own edge makes in buckets
    is_handed_on: bool  # whether ops other than a gathered cast stand between the parameter and this edge
    stays: bool  # whether the gathered copy is still there as backward begins
    reduced_in: int  # itemsize of its gradient while it is reduced; 0: the value's own
    chunks: int  # conversions in each pass: as often as its op runs
    is_before: bool  # whether it is made, or read, before the first micro-batch of a call
    habits: tuple[tuple[int, str], ...]  # habits of a preset that bind its reader
    is_fixed: bool  # whether it is taken as it lies: the old value of what a call carries on

    @property
    def is_parameter(self) -> bool:
        """Whether it is gathered, and its gradient reduced."""
        return self.ahead is not None


class _Table(NamedTuple):
    """Seconds of conversions, by [given, taken]: in a whole step (inf where none leads), and once each way."""

    seconds: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


class EdgeBuilder:
    """Builds the edges of a space and prices their conversions."""

    def __init__(
        self,
        setting: Setting,
        parameters: ParameterValues,
        schedule: Schedule,
        habits: Sequence[tuple[int, str]],
        shared: Shared,
    ) -> None:
        self.setting = setting
        self.parameters = parameters
        self.schedule = schedule
        self.habits = habits
        self.conversions = shared.values
        self.reductions = shared.reductions(schedule)
        self.gathers = shared.gathers(schedule, parameters)
        self.once = shared.once

    def wiring(self, drafts: Mapping[SiteKey, Draft]) -> Wiring:
        """Sites and edges: an edge for every operand of every site."""
        index = {key: i for i, key in enumerate(drafts)}
        edges: list[Edge] = []
        carried: list[fx.Node] = []
        takers: list[fx.Node] = []
        for key, draft in drafts.items():
            taker = key[0] if isinstance(key, tuple) else key
            for i, value in enumerate(draft.sources):
                source, port = source_of(value)
                given = _End(index[source], drafts[source].site, port)
                cargo = self._cargo(value, draft.operands[i], draft.site.op, taker)
                cargo = cargo._replace(is_fixed=draft.site.kind == "output" and i > 0)
                edges.append(self._edge(given, _End(index[key], draft.site, i), cargo))
                carried.append(value)
                takers.append(taker)
        return Wiring(tuple(d.site for d in drafts.values()), tuple(edges), tuple(carried), tuple(takers), index)

    def movements(self, wiring: Wiring, ops: Sequence[fx.Node]) -> dict[int, Movement]:
        """Seconds of gathers and reductions, for each edge that carries a parameter to an op."""
        at = {n: i for i, n in enumerate(ops)}
        found = {}
        for k, (value, taker) in enumerate(zip(wiring.values, wiring.takers, strict=True)):
            if value in self.parameters.owners and taker in at:
                is_before = taker in self.parameters.computed
                found[k] = Movement(at[taker], wiring.edges[k].forward, wiring.edges[k].backward, is_before)
        return found

    def _cargo(self, value: fx.Node, type_: TensorType, reader: str, taker: fx.Node) -> _Cargo:
        owners = self.parameters.owners
        is_handed_on = self.parameters.is_handed_on(value)
        return _Cargo(
            type_,
            self.gathers if value in owners else None,
            self.reductions if value in owners and not is_handed_on else self.conversions,
            is_handed_on,
            owners.get(value) in self.schedule.stays,
            self.parameters.reduced_in.get(value, 0),
            info(value).chunks,
            not self.parameters.computed.isdisjoint((value, taker)),
            self._habits_of(reader),
            is_fixed=False,
        )

    def _habits_of(self, reader: str) -> tuple[tuple[int, str], ...]:
        """The habits that bind an op as a reader."""
        return tuple((axis, habit) for axis, habit in self.habits if HABITS[habit].binds(reader))

    def _edge(self, source: _End, target: _End, cargo: _Cargo) -> Edge:
        giver, taker = source.site, target.site
        what = ("edge", source.place, target.place, cargo, giver.policies)
        like = self.once(what, (giver.choices, taker.choices), lambda: self._new_edge(source, target, cargo))
        return like.between(source.index, target.index, target.place)

    def _new_edge(self, source: _End, target: _End, cargo: _Cargo) -> Edge:
        marks = source.site.policies
        may_hide = self.setting.steps_in_backward
        apart = any(p.regathered or p.scattered or p.with_part or (may_hide and p.on_host) for p in marks)
        given, given_by = self._end(source.site.choices, source.place, Choice.output, apart)
        taken, taken_by = self._end(target.site.choices, target.place, Choice.operand)
        table = self.once(
            ("table", cargo, marks), (given, taken), lambda: self._table(given, taken, cargo, source.site)
        )
        return Edge(
            source.index,
            target.index,
            target.place,
            given,
            taken,
            given_by,
            taken_by,
            seconds=table.seconds,
            type=cargo.type,
            ahead=cargo.ahead,
            back=cargo.back if cargo.is_parameter else None,
            forward=table.forward,
            backward=table.backward,
            reduced_in=cargo.reduced_in,
        )

    def _end(
        self, choices: tuple[Choice, ...], place: int, flows_of: Callable[[Choice, int], Flows], apart: bool = False
    ) -> tuple[tuple[Flows, ...], np.ndarray]:
        """The distinct flows that may leave or arrive at one end, and the index of each choice's flows.

        With `apart`, each choice has an entry of its own.
        """

        def ends() -> tuple[tuple[Flows, ...], np.ndarray]:
            flows = [flows_of(c, place) for c in choices]
            return (tuple(flows), np.arange(len(flows))) if apart else _distinct(flows)

        return self.once(("end", place, flows_of, apart), (choices,), ends)

    def _table(self, given: Sequence[Flows], taken: Sequence[Flows], cargo: _Cargo, source: Site) -> _Table:
        forward = self._forward(given, taken, cargo)
        backward = np.zeros(forward.shape)
        cast = np.zeros(forward.shape)
        if cargo.type.requires_grad:
            backward, cast = self._backward(given, taken, cargo)
        batches = self.setting.passes
        if cargo.is_parameter:
            gathers, reductions = self._times(len(given), cargo, source)
            both = forward * gathers[:, None] + backward * reductions[:, None] + cast * batches
        else:
            ahead = self.setting.accumulation if cargo.is_before else batches
            both = (forward * ahead + backward * batches) * cargo.chunks
        leads = np.isfinite(both)
        return _Table(both, np.where(leads, forward, 0.0), np.where(leads, backward, 0.0))

    def _times(self, flows: int, cargo: _Cargo, source: Site) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of a step's gathers of a parameter and of reductions of its gradient, by leaving flow."""
        batches = self.setting.passes
        calls = self.setting.accumulation if self.setting.turns > 1 else 1
        gathers = np.full(flows, float(calls))
        reductions = np.ones(flows)
        if source.regathered:  # forward and backward of each micro-batch
            ahead = calls if cargo.is_before else batches
            gathers[np.array(source.regathered)] = ahead if cargo.stays else ahead + batches
        if source.scattered:
            reductions[np.array(source.scattered)] = batches
        elif cargo.is_handed_on:
            # Whether this gradient waits for the last micro-batch is unknown here, so one reduction in each is counted.
            reductions[:] = batches
        return gathers, reductions

    def _forward(self, given: Sequence[Flows], taken: Sequence[Flows], cargo: _Cargo) -> np.ndarray:
        """Seconds of converting a value once, by [given, taken]; inf where a preset's habit forbids it."""
        type_ = cargo.type
        table = (cargo.ahead or self.conversions).table(
            type_.shape, type_.itemsize, [values(f) for f in given], [values(f) for f in taken]
        )
        if cargo.is_fixed:
            pairs = itertools.product(map(values, given), map(values, taken))
            is_same = np.array([one == other for one, other in pairs]).reshape(len(given), len(taken))
            return np.where(is_same, 0.0, np.inf)
        return table if cargo.is_parameter else np.where(self._against_habit(given, taken, cargo), np.inf, table)

    def _backward(self, given: Sequence[Flows], taken: Sequence[Flows], cargo: _Cargo) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of converting a gradient once, and of casting it before that, by [given, taken]."""
        type_ = cargo.type
        back = functools.partial(
            cargo.back.table,
            type_.shape,
            sources=[gradients(f) for f in taken],
            targets=[gradients(f) for f in given],
        )
        backward = back(type_.itemsize).T
        nothing = np.zeros((len(given), len(taken)))
        if cargo.reduced_in:
            is_sum = reduces(taken, given).T
            backward = np.where(is_sum, back(cargo.reduced_in).T, backward)
            return backward, np.where(is_sum, self._cast_seconds(type_, taken, cargo.reduced_in), 0.0)
        if cargo.is_parameter and self.setting.reduce not in ("", type_.dtype):
            backward = np.where(reduces(taken, given).T, np.inf, backward)
        return backward, nothing

    def _cast_seconds(self, type_: TensorType, taken: Sequence[Flows], itemsize: int) -> np.ndarray:
        """Seconds of casting a gradient to the dtype in which it is reduced, by what arrives.

        A cast is compute: no window hides it.
        """
        elements = local_elements(type_.shape, map(gradients, taken), self.setting.mesh)
        return self.conversions.costs.moving(elements * (type_.itemsize + itemsize))

    def _against_habit(self, given: Sequence[Flows], taken: Sequence[Flows], cargo: _Cargo) -> np.ndarray:
        """A mask [given, taken] of conversions that a preset's habits forbid where its habitual ones exist."""
        found: np.ndarray = np.zeros((len(given), len(taken)), dtype=bool)
        for axis, habit in cargo.habits:
            leaves_so, arrives_so, _ = HABITS[habit]
            leaves = np.array([leaves_so(values(f).placements[axis]) for f in given])
            arrives = np.array([arrives_so(values(f).placements[axis]) for f in taken])
            if arrives.any():
                found |= leaves[:, None] & ~arrives[None, :]
        return found


def _distinct(flows: Sequence[Flows]) -> tuple[tuple[Flows, ...], np.ndarray]:
    """The distinct flows in order, and the index of each given one among them."""
    seen: dict[Flows, int] = {}
    where = np.array([seen.setdefault(f, len(seen)) for f in flows])
    return tuple(seen), where
