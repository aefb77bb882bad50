"""Rules of experts: rows that travel, experts of others that are left out, hidden rows that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.certificate.calls import TypedCall, rule, types_in
from autopar.certificate.elementwise import met
from autopar.certificate.types import Dim, Refused, Type, axes_of, joined, without
from autopar.runtime.bodies import HALVES, layout_of
from autopar.runtime.experts import Setup

_Axes = frozenset[str]
_NONE: _Axes = frozenset()


@dataclass(frozen=True, slots=True)
class _Ways:
    """What each axis does to experts, on types that are settled along axes of which nothing is known."""

    lost: _Axes
    rows: Dim  # rows of the input, of ids and of weights
    travels: _Axes
    left_out: _Axes  # axes along which a device leaves out experts of others
    hidden: _Axes  # axes that cut hidden rows
    of_weights: _Axes  # axes along which weights are a part of a sum
    of_down: _Axes  # axes along which the last matrices are

    @property
    def summed(self) -> _Axes:
        """Axes along which each device has a part of each row's result."""
        return self.left_out | self.hidden


def _ways(call: TypedCall, more: Sequence[Type] = ()) -> _Ways:
    setup = Setup.of(call.args[-1])
    given = setup.named(call.args[0])
    read = list(setup.more(call.args[0]))  # Bodies read them besides rows.
    lost = _NONE.union(*(t.open for t in types_in([given, read, list(more)])))
    x, ids, weights, up, down, up_bias, down_bias = (_settled(t, lost) for t in given)
    assert x and ids and weights and up and down
    rows = _rows_of((x, ids, weights, *more), lost)
    for t in (up, down, up_bias, down_bias):
        _needs_own(t, setup, lost)
    travels = frozenset(hop.axis for hop in setup.hops if hop.travels) - lost
    left_out = frozenset(hop.axis for hop in setup.hops if not hop.travels) - lost
    if not travels <= frozenset(axes_of([rows])):
        raise Refused(f"rows travel along {sorted(travels)}, and lie as {x}", "these axes cut them")
    if both := left_out & frozenset(axes_of([rows])):
        raise Refused(f"{sorted(both)} cuts rows and experts", "rows travel there")
    hidden = _hidden(up, down, up_bias, setup)
    if setup.behind and (parts := hidden | down.sums):
        raise Refused(f"a part of a sum over {sorted(parts)} goes through a function", "the sum of all parts")
    _needs_summed((x, ids, up, up_bias, *_wholes(read, lost)))
    if down_bias and down_bias.sums != down.sums | hidden:
        raise Refused(
            f"the last bias lies as {down_bias}, and the last matrices as {down}",
            "both are parts of one sum, else the bias counts more than once",
        )
    if both := weights.sums & (down.sums | left_out | hidden):
        raise Refused(f"a part of a sum over {sorted(both)} is summed over it once more", "one of them")
    return _Ways(lost, rows, travels, left_out, hidden, weights.sums, down.sums)


def _needs_own(t: Type | None, setup: Setup, lost: _Axes) -> None:
    """Refuse matrices that are not those of a device's own experts."""
    by = [hop.axis for hop in setup.hops if hop.axis not in lost]
    if t and axes_of(t.dims[:1]) != by:
        raise Refused(f"experts are told apart along {by}, and matrices lie as {t}", "they are cut by these axes")


def _wholes(read: Sequence[Type], lost: _Axes) -> list[Type | None]:
    """Tensors that bodies read besides rows, of which a device has to have all."""
    settled = [_settled(t, lost) for t in read]
    for t in settled:
        if t and axes_of(t.dims):
            raise Refused(f"a parameter that experts read lies as {t}", "every device has all of it")
    return settled


def _needs_summed(types: Sequence[Type | None]) -> None:
    for t in types:
        if t and t.sums | t.most:
            raise Refused(f"it lies as {t}", "what experts read is summed before")


def _settled(t: Type | None, lost: _Axes) -> Type | None:
    """A type of which nothing is said along the axes along which something is unknown."""
    return t and Type(_left(t, lost), sums=t.sums - lost, most=t.most - lost, open=lost)


def _left(t: Type, lost: _Axes) -> tuple[Dim, ...]:
    return tuple(without(dim, lost) for dim in t.dims)


def _rows_of(types: Sequence[Type], lost: _Axes) -> Dim:
    """The rows that all of these have, each of them whole."""
    for t in types:
        if axes_of(t.dims[1:]):
            raise Refused(f"rows of experts lie as {t}", "each of them is whole")
    return met([replace(t, dims=t.dims[:1]) for t in types], 0, 1, types[0].shape[0], lost)


def _hidden(up: Type, down: Type, up_bias: Type | None, setup: Setup) -> _Axes:
    """The axes that cut hidden rows, of the first matrices and the last ones alike."""
    out, inner = (2, 1) if setup.transposed else (1, 2)
    width = up.dims[out]
    other = down.dims[inner]
    axes = axes_of([width])
    cut = axes_of([other])
    are_alike = axes == cut and (up_bias is None or up_bias.dims[1] == width)
    if are_alike and axes and layout_of(setup.body) == HALVES:  # Each device has the same part of both halves.
        are_alike = width == joined([(2, ()), *other])
    if not are_alike or axes_of([up.dims[3 - out], down.dims[3 - inner]]):
        raise Refused(f"matrices of experts lie as {up} and {down}", "hidden rows are cut alike in both")
    return frozenset(axes)


@rule("autopar.experts.default")
def _experts(call: TypedCall) -> list[Type]:
    ways = _ways(call)
    x, _, _, up, *_ = call.args[0]
    sums = ways.summed | ways.of_weights | ways.of_down
    out = Type((ways.rows, x.dims[1]), sums=sums, open=ways.lost)
    own = tuple(axes_of([ways.rows]))  # A device has rows of its own there.
    width = without(up.dims[2 if Setup.of(call.args[-1]).transposed else 1], ways.lost)
    there = [Type((((shape[0], own),), dim), open=ways.lost) for shape, dim in
             zip(call.shapes[1:], (x.dims[1], width), strict=True)]  # fmt: skip
    return [out, *there]


@rule("autopar.experts_backward.default")
def _experts_back(call: TypedCall) -> list[Type]:
    gradient = call.args[2]
    ways = _ways(call, [gradient])
    x, _, weights, up, down, up_bias, down_bias = Setup.of(call.args[-1]).named(call.args[0])
    assert x and weights and up and down
    if both := gradient.sums & (ways.summed | ways.of_weights | ways.of_down):
        raise Refused(f"a part of a sum over {sorted(both)} is summed over it once more", "it is summed before")
    comes = gradient.sums - ways.lost
    every = comes | frozenset(axes_of([ways.rows])) | ways.left_out | ways.hidden  # Each device has rows of its own.
    over_rows = comes | (frozenset(axes_of([ways.rows])) - ways.travels)  # Rows of other devices come along the rest.
    sums = [
        (x, comes | ways.summed | ways.of_weights | ways.of_down),
        (weights, comes | ways.summed | ways.of_down),
        (up, over_rows | ways.of_weights | ways.of_down),
        (down, over_rows | ways.of_weights),
        (up_bias, over_rows | ways.of_weights | ways.of_down),
        (down_bias, over_rows | ways.of_weights),
        *((t, every | ways.of_weights | ways.of_down) for t in Setup.of(call.args[-1]).more(call.args[0])),
    ]
    return [Type(_left(of, ways.lost), sums=by, open=ways.lost) for of, by in sums if of is not None]
