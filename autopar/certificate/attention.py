"""Rules of attention of cut queries: rows that are dealt, and keys that are whole, go round a ring, or have a halo.

Rows that are dealt are cut by an axis of no mesh first, which is named after their deal; so are keys with a halo. They
meet neither rows that lie plainly nor those of another deal, and only the deal itself brings them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.certificate.calls import TypedCall, rule, types_in
from autopar.certificate.elementwise import met
from autopar.certificate.types import Dim, Refused, Type, axes_of, is_free, joined, same, size, whole, without
from autopar.runtime.dealing import Setup, room_of
from autopar.runtime.halos import has_halo, rows_of_halo

_Axes = frozenset[str]
_NONE: _Axes = frozenset()


def _deal_of(how: Setup) -> str:
    """The name of a deal: rows of one are in the same order, on whatever device."""
    along = "+".join(cut.axis for cut in how.cuts)
    rings = "".join(f", keys along {ring.axis}" for ring in how.rings)
    return f"deal of {how.queries} rows over {along} by {how.dealt}{rings} ({how.sees})"


def _halo_of(how: Setup) -> str:
    """The name of a halo, by which keys that have it meet no others."""
    along = "+".join(cut.axis for cut in how.cuts)
    return f"halo of {how.keys} keys of {how.queries} queries over {along} ({how.sees})"


def _rows(how: Setup, of_keys: bool, is_dealt: bool) -> Dim:
    """The rows that a device has of queries or keys, as they lie or as they are moved for the op."""
    axes = tuple(cut.axis for cut in how.axes(of_keys))
    if of_keys and is_dealt and has_halo(how):
        return ((rows_of_halo(how.text(), is_back=False), (_halo_of(how), *axes)),)
    n = room_of(how.text(), of_keys, not (is_dealt and axes))
    if not axes:
        return whole(n)
    return ((n, (_deal_of(how), *axes) if is_dealt else axes),)


def _needs_rows(t: Type, dim: Dim, what: str) -> None:
    if not is_free(t.dims[2]) and not same(t.dims[2], dim):
        raise Refused(f"{what} lie as {t} in {t.shape[2]} rows", f"they are {_said(dim)}")


def _said(dim: Dim) -> str:
    axes = axes_of([dim])
    return f"{size(dim)} rows cut by {', '.join(axes)}" if axes else f"{size(dim)} whole rows"


def _needs_summed(types: Sequence[Type]) -> None:
    for t in types:
        if t.sums | t.most:
            raise Refused(f"it lies as {t}", "what says which keys count, and how much, is summed before")


def _needs_told(told: Sequence[Type], how: Setup) -> None:
    """Refuse documents and counts of which a device has not all that devices of its rows have."""
    _needs_summed(told)
    for t in told:
        if axes_of(t.dims[1:]):
            raise Refused(f"documents lie as {t}", "every device knows where all of them end")
        if both := frozenset(axes_of(t.dims)).intersection(cut.axis for cut in how.cuts):
            raise Refused(f"{sorted(both)} cuts queries, and documents as {t}", "these devices have the same ones")


@rule("autopar.deal.default")
def _deal(call: TypedCall) -> list[Type]:
    """Rows in another order on other devices: what they are a part of besides, they stay."""
    tensors, told, setup, of_keys, is_back = call.args
    how = Setup.of(setup)
    lost = _NONE.union(*(t.open for t in types_in(told)))
    _needs_told([t.opened(lost) for t in told], how)
    return _moved([t.opened(lost) for t in tensors], how, of_keys, is_back)


def _moved(tensors: Sequence[Type], how: Setup, of_keys: bool, is_back: bool) -> list[Type]:
    made = []
    for t in tensors:
        before, after = (without(_rows(how, of_keys, dealt), t.open) for dealt in (is_back, not is_back))
        _needs_rows(t, before, "what is dealt")
        made.append(replace(t, dims=(*t.dims[:2], after, t.dims[3])))
    return made


@rule("autopar.halo.default")
def _halo(call: TypedCall) -> list[Type]:
    """Keys with those of other devices that are seen; back, sums of gradients of the same keys."""
    tensors, setup, is_back = call.args
    how = Setup.of(setup)
    if not has_halo(how):
        raise Refused("no keys of these are seen by some devices alone", "they go round a ring")
    return _moved(tensors, how, True, is_back)


@dataclass(frozen=True, slots=True)
class _Ways:
    """What each axis cuts, on types that are settled along axes of which nothing is known."""

    lost: _Axes
    batch: Dim
    heads: Dim
    groups: Dim  # heads of keys and values
    queries: Dim
    keys: Dim
    value: Type

    @property
    def shared(self) -> _Axes:
        """Axes along which devices have other queries of the same heads of keys."""
        return frozenset(axes_of([self.heads])) - frozenset(axes_of([self.groups]))

    def out(self, width: int, sums: _Axes) -> Type:
        return Type((self.batch, self.heads, self.queries, whole(width)), sums=sums, open=self.lost)

    def of_keys(self, width: int, sums: _Axes) -> Type:
        return Type((self.batch, self.groups, self.keys, whole(width)), sums=sums, open=self.lost)


def _ways(call: TypedCall, more: Sequence[Type] = ()) -> _Ways:
    how = Setup.of(call.args[-1])
    lost = _NONE.union(*(t.open for t in types_in([call.args[0], list(more)])))
    query, key, value, *rest = (t.opened(lost) for t in call.args[0])
    are_moved = (False, bool(how.dealt)), (True, bool(how.dealt) or has_halo(how))
    of_query, of_key = (without(_rows(how, *of), lost) for of in are_moved)
    results = [t.opened(lost) for t in more]
    count = sum(how.given[:2])
    _needs_summed([query, key, *rest])
    _needs_told(rest[:count], how)
    for t, dim, what in [(key, of_key, "keys"), (value, of_key, "values"), (query, of_query, "queries"),
                         *((t, of_query, "results") for t in results)]:  # fmt: skip
        _needs_rows(t, dim, what)
        if axes_of(t.dims[3:]):
            raise Refused(f"{what} lie as {t}", "each row is whole")
    each = [query, key, value, *results]
    batch = met([replace(t, dims=t.dims[:1]) for t in each], 0, 1, query.shape[0], lost)
    groups = met([replace(t, dims=t.dims[1:2]) for t in (key, value)], 0, 1, key.shape[1], lost)
    heads = query.dims[1]
    groups = _groups(heads, groups)
    for t in results:
        _needs_alike(t, 1, heads, "results")
    for t in rest[count:]:
        _needs_alike(t, 0, heads, "sinks")
    for t in rest[:count]:
        if axes_of(t.dims[:1]) or size(t.dims[0]) != 1:
            _needs_alike(t, 0, batch, "documents")
    cuts = axes_of([batch, heads, of_query])
    if both := {a for a in cuts if cuts.count(a) > 1 or a in value.sums}:
        raise Refused(f"{sorted(both)} tells two things apart: {query} and {value}", "no device has a row's result")
    return _Ways(lost, batch, heads, groups, of_query, of_key, value)


def _needs_alike(t: Type, d: int, dim: Dim, what: str) -> None:
    if not is_free(t.dims[d]) and not same(t.dims[d], dim):
        raise Refused(f"{what} lie as {t} in {t.shape[d]} rows", f"they are cut as those of queries: {_said(dim)}")


def _groups(heads: Dim, groups: Dim) -> Dim:
    """The heads of keys, each of which as many heads of queries follow that share it."""
    if is_free(groups) and size(groups) == size(heads):  # Each has a copy of its own.
        return heads
    rest = tuple(a for a in axes_of([heads]) if a not in axes_of([groups]))
    if not same(heads, joined([*groups, (size(heads) // size(groups), rest)])):
        raise Refused(f"heads of queries are {_said(heads)}, and of keys {_said(groups)}", "they are cut alike")
    return groups


@rule("autopar.attention.default")
def _attention(call: TypedCall) -> list[Type]:
    ways = _ways(call)
    statistic = Type((ways.batch, ways.heads, ways.queries), open=ways.lost)
    return [ways.out(ways.value.shape[3], ways.value.sums), statistic]  # linear in values


@rule("autopar.attention_backward.default")
def _attention_back(call: TypedCall) -> list[Type]:
    """Gradients of queries, keys, values and sinks; those of keys that do not go round are parts of sums."""
    tensors, (out, log_sum), gradient, setup = call.args
    how = Setup.of(setup)
    ways = _ways(call, [out, gradient, replace(log_sum, dims=(*log_sum.dims, ()))])
    _needs_summed([log_sum])
    comes, of_values = (_NONE if t.is_zero else t.sums - ways.lost for t in (gradient, ways.value))
    if out.sums - ways.lost != of_values:
        raise Refused(f"values lie as {ways.value} and results as {out}", "both are parts of one sum")
    if both := comes & of_values:
        raise Refused(f"a part of a sum over {sorted(both)} is summed over it once more", "it is summed before")
    cuts = frozenset(cut.axis for cut in how.cuts) - ways.lost
    others = ways.shared | cuts.difference(ring.axis for ring in how.rings)  # Their queries read these keys as well.
    query, key, value, *_ = tensors
    made = [
        ways.out(query.shape[3], comes | of_values),
        ways.of_keys(key.shape[3], comes | of_values | others),
        ways.of_keys(value.shape[3], comes | others),
    ]
    of_rows = cuts | frozenset(axes_of([ways.batch]))
    return made + [Type((ways.heads,), sums=comes | of_values | of_rows, open=ways.lost)] * how.given[2]
