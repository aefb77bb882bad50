"""The bound of plans with values on the host, by the time that forward gives the link."""

from __future__ import annotations

import numpy as np

from autopar.sharding.host import Host
from autopar.solver.budget import Budgeted
from autopar.solver.joint import JointPrices, JointTables
from autopar.solver.joint_search import JointSearch
from autopar.solver.lined import Lined
from autopar.solver.link_bound import least_beside_link
from autopar.solver.offload import Room, pace_of
from autopar.solver.searches import Task
from autopar.space import timeline
from tests.solver.drawn_schedules import language_space, schedules


def with_all_away(lined, again):
    """The bytes of a plan with all on the host that comes in time, and its seconds."""
    states = lined.states.of(again)
    through = lined.line.under(states.again)
    away = lined.packing.travels(list(lined.packing._groups(states.again, through)), lined.packing._ends(through))
    return lined.line.under(states.again, (), away).held, lined.point.seconds + states.seconds


def test_no_plan_is_under_the_bound_of_what_it_holds(monkeypatch):
    """Whatever is repeated, with as much away as comes in time; bounds are raised over those of the whole step."""
    monkeypatch.setattr(timeline, "SMALL", 0)
    space = language_space(1)
    counted = Budgeted(space)
    free = counted.fastest(np.inf, 0.0).best
    rate = 0.5 * free.held.max() / pace_of(space, free.picked)[: len(space.memory.ops)].sum()
    room = Room(Host("slot", rate, rate, 0.0, 2**40), 2.0**40)
    task = Task(counted, np.inf, "cbc", None, 0.0, np.inf, recomputes=True, room=room)
    search = JointSearch.of(task)
    time = search.tables.time
    later = time + 1 + int(search.first.line.other[time + 1 :].argmax())
    tables = JointTables(counted, time, later)
    apart = free.seconds / free.held.max()
    for share, price in ((0.03, 0.0), (0.1, 0.0), (0.3, 0.0), (0.1, apart), (0.0, 3 * apart)):
        exposed = tuple(one * (1 - share) for one in search.free.prices.exposed)
        at = JointPrices(share / rate, exposed, price)
        search.beside_link[at] = least_beside_link(tables, at, search.first, room.host).bound
    raised = 0
    for lined in (search.first, *(Lined.of(task, drawn.point) for drawn, _, _ in schedules(space, counted))):
        some = [frozenset(list(lined.line.again(lined.line.names))[::n]) for n in (1, 2, 5, 20)]
        for again in (frozenset(), *some):
            held, seconds = with_all_away(lined, again)
            bound = search.bound_beside_host(held[[time, later]].max(), 4 * seconds)
            raised += bound > 1.001 * search.free.bound
            assert bound <= seconds * (1 + 1e-9)
    assert raised
