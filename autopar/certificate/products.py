"""Rules of products: a contraction over a dim that is cut gives a partial sum."""

from __future__ import annotations

from dataclasses import replace

from autopar.certificate.calls import TypedCall, rule, types_in
from autopar.certificate.elementwise import elementwise, met, said_of, summed
from autopar.certificate.types import Dim, Refused, Type, axes_of, is_free, plain, same, whole, without

_NONE: frozenset[str] = frozenset()


def _contracted(one: Dim, other: Dim, lost: frozenset[str]) -> frozenset[str]:
    """The axes that cut a contracted dim, along which the result is a partial sum."""
    one, other = without(one, lost), without(other, lost)
    if one and other and not is_free(one) and not is_free(other) and not same(one, other):
        raise Refused(
            f"the sum runs over {said_of(one)} of one operand and {said_of(other)} of the other",
            "both have to lie alike",
        )
    return frozenset(axes_of([one, other]))


def _product(call: TypedCall, a: Type, b: Type, batch: int) -> Type:
    """A matrix product, behind `batch` dims that both operands have."""
    lost = a.open | b.open
    dims = [met([a, b], d, batch + 2, call.shapes[0][d], lost) for d in range(batch)]
    rows, columns = without(a.dims[-2], lost), without(b.dims[-1], lost)
    sums = _contracted(a.dims[-1], b.dims[-2], lost)
    if both := frozenset(axes_of([rows])) & frozenset(axes_of([columns])):
        raise Refused(f"{', '.join(both)} cuts rows of one operand and columns of the other", "one of them is whole")
    pending = summed([a, b], "one", lost)
    if both := sums & pending:
        raise Refused(f"a part of a sum over {', '.join(both)} is summed over it once more", "one of them")
    if both := pending.intersection(axes_of([*dims, rows, columns])):
        raise Refused(f"a part of a sum over {', '.join(both)} meets rows that it cuts", "it has to be summed before")
    made = Type((*dims, rows, columns), sums=sums | pending, open=lost)
    if is_free(a.dims[-1]) and is_free(b.dims[-2]):  # repeated rows were summed: over a part, or over the whole
        return made.opened(call.axes - frozenset(axes_of(made.dims)))
    return made


@rule("mm.default", "bmm.default")
def _matrices(call: TypedCall) -> Type:
    a, b = call.args[:2]
    return _product(call, a, b, len(a.dims) - 2)


@rule("addmm.default", "baddbmm.default")
def _added_product(call: TypedCall) -> Type:
    bias, a, b = call.args[:3]
    product = _product(call, a, b, len(a.dims) - 2)
    return elementwise(TypedCall((product, bias), {}, call.shapes, call.axes), "all")


@rule("convolution.default")
def _convolution(call: TypedCall) -> Type:
    x, weight, bias = call.args[:3]
    are_groups_cut = _are_groups_cut(x.dims[1], weight)
    is_plain = call.args[8] == 1 or are_groups_cut
    if call.args[6] or not is_plain or axes_of(x.dims[2:]) or axes_of(weight.dims[2:]):
        return _of_rows(call, x, [weight, *types_in(bias)])
    lost = x.open | weight.open
    if are_groups_cut:
        x = replace(x, dims=(x.dims[0], weight.dims[1], *x.dims[2:]))  # a device has all channels of its groups
    elif not weight.dims[1] or not x.dims[1]:  # one channel of each group, where groups are cut
        lost |= frozenset(axes_of([x.dims[1], weight.dims[1], weight.dims[0]]))
    sums = _contracted(without(x.dims[1], lost), without(weight.dims[1], lost), lost)
    pending = summed([x, weight], "one", lost)
    dims = (without(x.dims[0], lost), without(weight.dims[0], lost), *plain(call.shapes[0][2:]))
    made = Type(dims, sums=sums | pending, open=lost)
    if bias is None:
        return made
    like = replace(bias, dims=(bias.dims[0], *[()] * (len(dims) - 2)))
    return elementwise(TypedCall((made, like), {}, call.shapes, call.axes), "all")


def _are_groups_cut(channels: Dim, weight: Type) -> bool:
    """Whether each device has groups of its own, in a convolution by groups."""
    out, of_group = weight.dims[:2]
    are_cut_alike = len(channels) == len(out) == 1 and channels[0][1] == out[0][1] != () and not is_free(channels)
    return are_cut_alike and not axes_of([of_group]) and not is_free(of_group)


def _of_rows(call: TypedCall, x: Type, others: list[Type]) -> Type:
    """Type of an op that treats rows alike: its rows are cut as those of `x`, and nothing is known beside."""
    rows = frozenset(axes_of(x.dims[:1]))
    lost = frozenset(a for t in (x, *others) for a in t.known) - rows | frozenset(a for t in others for a in t.known)
    return Type((x.dims[0], *plain(call.shapes[0][1:]))).opened(lost | x.open)


@rule("convolution_backward.default")
def _convolution_back(call: TypedCall) -> list[Type]:
    gradient, x, weight = call.args[:3]
    are_groups_cut = _are_groups_cut(x.dims[1], weight) and same(gradient.dims[1], weight.dims[0])
    is_plain = are_groups_cut or (weight.dims[1] and x.dims[1] and call.args[9] == 1)
    are_pictures_cut = axes_of([*x.dims[2:], *gradient.dims[2:], *weight.dims[2:]])
    is_odd = bool(not is_plain or call.args[7] or are_pictures_cut)
    lost = gradient.open | x.open | weight.open
    rows = met([gradient, x], 0, len(x.dims), call.shapes[0][0] if call.shapes[0] else 1, lost)
    batch = frozenset(axes_of([rows]))
    out = without(weight.dims[0], lost)
    into = without(weight.dims[1], lost)
    has = [*call.at(10, (True, True, True))]
    of_x = summed([gradient, weight], "one", lost) if has[0] else _NONE
    of_w = summed([gradient, x], "one", lost) if has[1] else _NONE
    of_b = summed([gradient], "one", lost) if has[2] else _NONE
    if is_odd:
        lost |= frozenset(axes_of([*x.dims[1:], *gradient.dims[1:], *weight.dims])) - batch
        out, into = without(out, lost), without(into, lost)
        into = whole(call.shapes[0][1]) if len(call.shapes[0]) > 1 else ()
    elif not are_groups_cut:
        _contracted(gradient.dims[1], weight.dims[0], lost)
        _contracted(x.dims[1], weight.dims[1], lost)
    sums = of_x if are_groups_cut else of_x | frozenset(axes_of([out]))  # a device has all outputs of its groups
    pictures = [plain(s[2:]) if len(s) > 2 else () for s in call.shapes]
    back = Type((rows, without(x.dims[1], lost) if are_groups_cut else into, *pictures[0]), sums=sums, open=lost)
    of_weight = Type((out, without(weight.dims[1], lost), *pictures[1]), sums=of_w | batch, open=lost)
    of_bias = Type((out,), sums=of_b | batch, open=lost)
    return [back, of_weight, of_bias]
