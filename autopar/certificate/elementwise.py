"""Rules of elementwise ops and of constants: dims that meet must lie alike, and few ops accept partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.certificate.calls import Rule, TypedCall, is_constant, rule, unknown
from autopar.certificate.types import FREE, Dim, Refused, Type, axes_of, free, is_free, same, size, without

_NONE: frozenset[str] = frozenset()


def elementwise(call: TypedCall, linear: str = "") -> Type:
    """The type of the result of an elementwise op.

    Dims that meet must lie alike, and a partial sum needs an op that is linear in it. `linear` is "" (in no operand),
    "first", "all" (in all operands at once) or "one" (a product: in any one of them).
    """
    types = call.types
    shape = call.shapes[0]
    lost = frozenset(a for t in types for a in t.open)
    if any(t.is_start for t in types):
        rest = [t for t in types if not t.is_start]
        if not rest:
            return Type((), open=lost, is_start=True)
        if linear == "all" and all(is_constant(t) for t in rest):  # places of the part are those of the whole
            axes = tuple(a for t in types if t.is_start for a in t.open)
            is_cut = call.cuts_constants and len(shape) == 1 and len(axes) == 1
            return Type((((shape[0], axes),),) if is_cut else free(shape))
    dims = tuple(met(types, d, len(shape), shape[d], lost) for d in range(len(shape)))
    zeros = [t.is_zero for t in types]
    is_zero = {"": False, "first": zeros[:1] == [True], "all": all(zeros), "one": any(zeros)}[linear]
    made = Type(dims, sums=summed(types, linear, lost), open=lost, is_zero=is_zero)
    return made.opened(_doubtful(types, dims))


def as_parts(gradients: Sequence[Type]) -> Sequence[Type]:
    """Types of gradients of one value: beside a part of a sum, single rows are parts, too.

    A part has all rows of the value, so that the other gradient has one row because the value has one, and not because
    a device has one of several.
    """
    axes = frozenset(a for x in gradients if not x.is_zero for a in x.sums)
    found = []
    for x in gradients:
        own = axes & _axes_of_single_rows(x)
        found.append(replace(x, dims=tuple(without(dim, own) for dim in x.dims), sums=x.sums | own))
    return found


def _axes_of_single_rows(x: Type) -> frozenset[str]:
    return frozenset(a for dim in x.dims for n, own in dim if n == 1 and own != FREE for a in own)


def met(types: Sequence[Type], place: int, rank: int, n: int, lost: frozenset[str]) -> Dim:
    """The dim of a result at one place, from the operands' dims that broadcast there."""
    found: Dim | None = None
    for t in types:
        d = place - rank + len(t.dims)
        if d < 0:
            continue
        dim = without(t.dims[d], lost)
        if size(dim) == 1 and n != 1:
            if axes_of([dim]):
                raise Refused(f"along dim {place} one operand lies as {said_of(dim)}, and another has {n}", "as many")
            continue  # The row is repeated along this dim.
        if found is None or not found or (is_free(found) and dim):
            found = dim
        elif not dim:
            continue  # one row, whole: it is repeated where others are cut
        elif not is_free(dim) and not same(found, dim):
            if axes_of([found]) == axes_of([dim]):
                raise ValueError(f"dims of {size(found)} and {size(dim)} rows do not meet")  # not so in this op
            raise Refused(
                f"along dim {place} one operand lies as {said_of(found)} and another as {said_of(dim)}",
                "both have to lie alike",
            )
    return ((n, FREE),) if found is None else found


def said_of(dim: Dim) -> str:
    axes = axes_of([dim])
    return f"{size(dim)} rows cut by {', '.join(axes)}" if axes else f"{size(dim)} whole rows"


def summed(types: Sequence[Type], linear: str, lost: frozenset[str]) -> frozenset[str]:
    """The axes along which a result is a partial sum; refuses operands for which the op is not linear."""
    pending = frozenset(a for t in types if not t.is_zero for a in t.sums | t.most) - lost
    for axis in pending:
        having = [i for i, t in enumerate(types) if axis in t.sums]
        ready = [i for i, t in enumerate(types) if axis not in t.sums and not t.is_zero]
        if any(axis in t.most for t in types):
            raise Refused(f"an operand is one of those whose maximum over {axis} is meant", "the maximum comes first")
        fits = {
            "": False,
            "first": having == [0],
            "all": not ready,
            "one": len(having) == 1,
        }[linear]
        if not fits:
            others = ", and another is not" if ready and linear == "all" else ""
            raise Refused(f"an operand is a part of a sum over {axis}{others}", "it has to be summed before")
    return pending


def _doubtful(types: Sequence[Type], dims: Sequence[Dim]) -> frozenset[str]:
    """Axes that cut the result while an operand is a partial sum over them: it cannot be both."""
    return frozenset(axes_of(dims)) & frozenset(a for t in types for a in t.sums)


def _elementwise(linear: str) -> Rule:
    return lambda call: elementwise(call, linear)


@rule("add.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar")
def _sum_of_two(call: TypedCall) -> Type:
    has_number = any(isinstance(a, (int, float)) and a != 0 for a in call.args[:2])
    return elementwise(call, "" if has_number else "all")


@rule("sub.Tensor")
def _difference(call: TypedCall) -> Type:
    if any(t.is_start for t in call.types):  # places as a part counts them
        return elementwise(call)
    return _sum_of_two(call)


rule("mul.Tensor")(_elementwise("one"))
rule(
    "div.Tensor", "div.Scalar", "mul.Scalar", "neg.default", "clone.default", "alias.default", "detach.default",
    "gelu_backward.default", "silu_backward.default", "tanh_backward.default",
    "sigmoid_backward.default", "threshold_backward.default", "elu_backward.default", "leaky_relu_backward.default",
    "hardtanh_backward.default", "softplus_backward.default", "xlogy.Tensor", "lift_fresh_copy.default",
    "contiguous.default", "native_dropout_backward.default", "logit_backward.default",
)(_elementwise("first"))  # fmt: skip


rule("lerp.Scalar")(_elementwise("all"))


@rule("_to_copy.default")
def _cast(call: TypedCall) -> Type:
    dtype = call.kwargs.get("dtype")
    cuts_off = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return elementwise(call, "" if cuts_off else "first")


def _of_losses(linear: str, reduction: int) -> Rule:
    """A rule for losses that are not reduced; `reduction` is the index of the argument that says so."""
    return lambda call: elementwise(call, linear) if call.at(reduction, 1) == 0 else unknown(call)


for _name, _operands in {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
}.items():  # fmt: skip
    rule(f"{_name}.default")(_of_losses("", _operands))
    rule(f"{_name}_backward.default")(_of_losses("first", _operands + 1))
rule("binary_cross_entropy_with_logits.default")(_of_losses("", 4))  # The backward is made of other ops.


def _added(linear: str) -> Rule:
    """A rule for an op that adds the result of another op, on two operands, to a third operand."""

    def of(call: TypedCall) -> Type:
        x, one, other = call.args[:3]
        made = elementwise(replace(call, args=(one, other), kwargs={}), linear)
        return elementwise(replace(call, args=(x, made), kwargs={}), "all")

    return of


rule("addcmul.default")(_added("one"))
rule("addcdiv.default")(_added("first"))


@rule("where.self")
def _where(call: TypedCall) -> Type:
    condition, *branches = call.args
    if isinstance(condition, Type) and condition.sums:
        raise Refused("the condition is a part of a sum", "it has to be summed before")
    sums = elementwise(replace(call, args=tuple(branches)), "all").sums
    if any(b.is_zero for b in branches):  # a device leaves out of its part of a sum what is not its own
        condition = replace(condition, open=condition.open - sums)
    dims = elementwise(replace(call, args=(condition, *(replace(b, sums=_NONE) for b in branches))))
    return replace(dims, sums=sums - dims.open, is_zero=all(b.is_zero for b in branches))


@rule("masked_fill.Scalar")
def _masked(call: TypedCall) -> Type:
    x, mask, value = call.args[:3]
    made = elementwise(replace(call, args=(replace(x, sums=_NONE), mask)))
    if x.sums and value != 0:
        raise Refused("a part of a sum is filled with a number", "it has to be summed before")
    return replace(made, sums=x.sums - made.open)


@rule("copy.default")
def _copied(call: TypedCall) -> Type:
    """A tensor that overwrites all of another of its shape."""
    over, x = call.args[:2]
    return x if len(x.dims) == len(over.dims) else elementwise(call)


@rule("zeros_like.default")
def _zeros_like(call: TypedCall) -> Type:
    return replace(_like(call), is_zero=True)


@rule("ones_like.default", "full_like.default", "empty_like.default", "fill.Scalar")
def _like(call: TypedCall) -> Type:
    x = call.args[0]
    return Type(x.dims, open=x.open)


def _constant(call: TypedCall) -> Type:
    return Type(free(call.shapes[0]))


def _zeros(call: TypedCall) -> Type:
    return Type(free(call.shapes[0]), is_zero=True)


rule("zeros.default", "new_zeros.default")(_zeros)
rule(
    "arange.default", "arange.start", "arange.start_step", "full.default", "ones.default", "new_full.default",
    "new_ones.default", "empty.memory_format", "new_empty.default",
)(_constant)  # fmt: skip


@rule("scalar_tensor.default")
def _number(call: TypedCall) -> Type:
    return Type((), is_zero=call.args[0] == 0)
