"""The states of a plan's values in words: saved, recomputed, or on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.solver.decision import Offloaded, Recomputed
from autopar.solver.figures import Row, microseconds, size, time

if TYPE_CHECKING:
    from autopar.solver.plan import Plan


def state_of(plan: Plan, value: str) -> str:
    """The state of a value in a word or two."""
    match plan.states.get(value):
        case Recomputed():
            return "recomputed"
        case Offloaded():
            return "on the host"
        case _:
            return "saved"


def unsaved(plan: Plan) -> set[str]:
    """The values of ops and conversions that do not stay on the device."""
    return {*plan.recomputed, *plan.offloaded}


def way_of_copies(plan: Plan, value: str) -> str:
    """Text about a value on the host: when it is there, its bytes, and seconds of the link if known."""
    gone, comes = plan.offloaded[value]
    said = f"waits on the host: gone behind {gone}, returns before the backward of {comes}"
    travel = plan.search.travel(value) if plan.has_space and plan.search is not None else None
    if travel is not None:
        link = f"{time(travel.down_s)} of the link down and {time(travel.up_s)} up a step"
        return f"{said}; {size(travel.bytes)}, {link}"
    return f"{said}; {size(plan.needed[value][0])}" if value in plan.needed else said


def needed_rows(plan: Plan) -> Iterator[Row]:
    """Rows about values that backward needs and may not save; figures that the plan lacks are blank."""
    for name in dict.fromkeys((*plan.needed, *sorted(unsaved(plan)))):
        nbytes, seconds = plan.needed.get(name, (0, 0.0))
        figures = (size(nbytes), microseconds(seconds)) if name in plan.needed else ("", "")
        yield name, state_of(plan, name), *figures


def states_apart(one: Plan, other: Plan) -> Iterator[Row]:
    """Rows about values in other states, and one where values are on the host at other times."""
    for value in sorted(unsaved(one) | unsaved(other)):
        mine = state_of(one, value)
        theirs = state_of(other, value)
        if mine != theirs:
            yield value, mine, theirs
    both = one.offloaded.keys() & other.offloaded.keys()
    if any(one.offloaded[value] != other.offloaded[value] for value in both):
        yield "times on the host", *(f"{len(plan.offloaded)} values" for plan in (one, other))
