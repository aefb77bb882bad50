"""What torch functions do with rows that a mask chooses (`chosen.py`): each row by itself, or a letter.

An op is run on the whole in the place of the rows where its rule says that it treats each row by itself: the factor of
the rows may be cut, and stands in every output.

Rows that are not chosen are computed too, from zeros. What they come to is never read, but an infinite slope there
would make a NaN of a gradient of zero: where an op is not finite everywhere, it sees another number in their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import TensorType
from autopar.letters import BadRule
from autopar.ops.entry import SHAPE, Op, goes_beyond, rule_of
from autopar.ops.lookup import functional, lookup
from autopar.sharding.notation import ELLIPSIS, Cut, Dim, Rule
from autopar.tracer.call import name_of, tensors_in
from autopar.tracer.chosen import ChosenRows, Count, Mask, Rows, are_alike
from autopar.tracer.recorder import Recorder

Operand: TypeAlias = tuple[Any, Rows | None]  # an operand of an op, and the rows that it stands for

# Ops that give finite numbers, with finite slopes, for finite operands.
_FINITE = frozenset(
    (
        "abs add addmm amax amin argmax argmin atan baddbmm bitwise_and bitwise_not bitwise_or bmm cat ceil celu "
        "chunk clamp clone contiguous cos cumsum detach dropout einsum elu eq erf expand flip floor full_like ge "
        "gelu glu gt hardsigmoid hardswish hardtanh identity isfinite isinf isnan layer_norm le leaky_relu lerp "
        "linear log_softmax logical_and logical_not logical_or logsigmoid logsumexp lt masked_fill matmul maximum "
        "mean minimum mish mm mul narrow ne neg ones_like pad permute relu relu6 repeat rms_norm roll round rsub "
        "select selu sigmoid sign silu sin softmax softplus softsign split square stack sub sum t tanh to topk "
        "transpose tril triu unbind view where zeros_like"
    ).split()
)
_SAFE_OPERANDS = {"div": ("input",), "pow": ("exponent",)}  # any finite number may stand there
_LOOK_UPS = frozenset("embedding gather index index_select one_hot take take_along_dim".split())
_RULE_OF = {"mean": "sum"}  # a sum and a quotient, which a pass makes of it
_KEEPS_PLACES = frozenset("view expand index select repeat to contiguous clone detach unbind".split())


def row_wise(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a function on the wholes of chosen rows; raise where it looks at several rows."""
    counts = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Count)]
    if counts and not any(recorder.values.chosen.of(t) for t in tensors_in(args, kwargs)):
        raise counts[0].letter()
    args, kwargs = _sized((args, kwargs))
    result = recorder.execute(function, args, kwargs)
    outputs = tensors_in((result,), {})
    if not outputs:
        return result
    given = {id(t) for t in tensors_in(args, kwargs)}
    if any(id(out) in given for out in outputs):  # the operand itself
        return result
    op, arguments = lookup(function, args, kwargs, result)
    if counts and op.local(SHAPE) is None:  # anywhere else the number of rows is a value
        raise counts[0].letter()
    for fake, rows in zip(outputs, _computed(recorder, op, arguments, outputs), strict=True):
        recorder.values.chosen.show(fake, rows)
    return result


def write_to_rows(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a write to chosen rows, which are a copy: they stand for other values from here on."""
    target = args[0] if args else kwargs["input"]
    rows = recorder.values.chosen.of(target)
    assert rows is not None
    storage = target.untyped_storage()._cdata
    others = (t for t in recorder.values.chosen.alive if t is not target and t.untyped_storage()._cdata == storage)
    if any(True for _ in others):
        raise recorder.values.chosen.letter(
            rows.mask, f"{name_of(function)} writes to rows of which there are views", "the form that returns new rows"
        )
    op, arguments = functional(function, args, kwargs)
    if op is None:
        raise misfit(recorder, name_of(function), rows.mask)
    result = recorder.execute(function, args, kwargs)
    (written,) = _computed(recorder, op, arguments, [target])
    recorder.values.chosen.rows[id(target)] = written
    return result


def misfit(recorder: Recorder, name: str, mask: Mask) -> Exception:
    """The letter about a function that does not treat each of the chosen rows by itself."""
    return recorder.values.chosen.letter(
        mask,
        f"{name} does not treat each of the chosen rows by itself",
        "what looks at several rows, on all rows under the mask: torch.where(mask, y, 0).sum(0)",
    )


def first_of(recorder: Recorder, values: Any) -> Rows:
    """The first chosen rows among values."""
    found = (recorder.values.chosen.of(t) for t in tensors_in((values,), {}))
    rows = next((rows for rows in found if rows is not None), None)
    assert rows is not None
    return rows


def _sized(values: Any) -> Any:
    """The values with numbers of chosen rows as fakes have them, where chosen rows are among them."""
    return pytree.tree_map_only(Count, lambda _: ChosenRows.SIZE, values)


def _computed(recorder: Recorder, op: Op, arguments: dict[str, Any], outputs: Sequence[Tensor]) -> list[Rows]:
    """The rows that an op gives, computed on the wholes."""
    operands, met = _operands(recorder, op, arguments)
    mask = met[0].mask
    rule = _rule(op, arguments, outputs)
    dims = None if rule is None else _dims_of_outputs(op, rule, operands, outputs)
    if rule is None or dims is None:
        raise misfit(recorder, op.name, mask)
    has_draws = recorder.call.drew is not None  # each place has draws of its own
    lead = mask.shape if has_draws else torch.broadcast_shapes(*(rows.lead for rows in met))
    shapes = [met[0].of_size(tuple(fake.shape), dim, lead) for fake, dim in zip(outputs, dims, strict=True)]
    is_direct = op.local(SHAPE) is not None or (not has_draws and _reaches_from_the_right(rule, operands))
    with recorder.values.chosen.recorded():
        try:
            results = _run(op, arguments, operands, shapes, None if is_direct else lead)
        except RuntimeError as e:
            raise misfit(recorder, op.name, mask) from e
        wholes = [w if w.dtype == fake.dtype else w.to(fake.dtype) for w, fake in zip(results, outputs, strict=True)]
    if [tuple(whole.shape) for whole in wholes] != shapes:
        raise misfit(recorder, op.name, mask)
    return [
        Rows(whole, mask, dim, _places(op, arguments, met[0], n))
        for n, (whole, dim) in enumerate(zip(wholes, dims, strict=True))
    ]


def _operands(recorder: Recorder, op: Op, arguments: dict[str, Any]) -> tuple[list[Operand], list[Rows]]:
    """The operands of an op, and the rows among them, which one mask has chosen."""
    chosen = recorder.values.chosen
    operands = [(value, chosen.of(value)) for value in op.operands(arguments)]
    met = [rows for _, rows in operands if rows is not None]
    if not met:
        raise misfit(recorder, op.name, first_of(recorder, arguments).mask)
    if not all(are_alike(rows.mask.node, met[0].mask.node) for rows in met):
        raise chosen.letter(met[0].mask, f"{op.name} gets rows that two masks choose", "one mask for both")
    return operands, met


def _run(
    op: Op,
    arguments: dict[str, Any],
    operands: Sequence[Operand],
    shapes: Sequence[tuple[int, ...]],
    flat: tuple[int, ...] | None,
) -> list[Tensor]:
    """The outputs of an op on wholes, in which the mask's dims are one where `flat` has their sizes."""
    wholes = [None if rows is None else _ready(op, name, rows) for name, (_, rows) in _named(op, operands)]
    if flat is not None:
        wholes = [
            None if whole is None or rows is None else _flat(whole, rows, flat)
            for whole, (_, rows) in zip(wholes, operands, strict=True)
        ]
    given = _placed(arguments, operands, wholes)
    if (size := op.local(SHAPE)) is not None:
        given[size] = shapes[0]
    results = tensors_in((op.run(given),), {})
    return results if flat is None else [r.reshape(shape) for r, shape in zip(results, shapes, strict=True)]


def _rule(op: Op, arguments: dict[str, Any], outputs: Sequence[Tensor]) -> Rule | None:
    """The rule of a call on fakes, whose rows have a size of their own."""
    name = _RULE_OF.get(op.name, op.name)
    types = pytree.tree_map_only(Tensor, TensorType.of, arguments)
    return rule_of(name, {**types, "outputs": tuple(map(TensorType.of, outputs))})


def _dims_of_outputs(op: Op, rule: Rule, operands: Sequence[Operand], outputs: Sequence[Tensor]) -> list[int] | None:
    """The dim of each output in which the rows stand; None for an op that looks at several of them."""
    shapes = [None if v is None else tuple(v.shape) if isinstance(v, Tensor) else () for v, _ in operands]
    try:
        binding = rule.bind(shapes, [tuple(out.shape) for out in outputs])
    except BadRule:
        return None
    factors = {
        row[rows.dim].factor
        for (_, rows), row in zip(operands, binding.operands, strict=True)
        if rows is not None and row is not None
    }
    if len(factors) != 1:
        return None
    (factor,) = factors
    if factor in binding.whole | binding.inside or goes_beyond(op.name, binding, Cut((factor,))):
        return None
    where = [_dims_with(row, factor) for row in binding.operands]
    if where != [[] if rows is None else [rows.dim] for _, rows in operands]:
        return None
    found = [_dims_with(row, factor) for row in binding.outputs]
    return [dims[0] for dims in found] if all(len(dims) == 1 for dims in found) else None


def _dims_with(row: Sequence[Dim] | None, factor: str) -> list[int]:
    """The dims that are a factor; none where it is one of several in a dim."""
    found = [d for d, dim in enumerate(row or ()) if factor in dim.factors]
    return [] if any(row[d].joined for d in found if row) else found


def _named(op: Op, operands: Sequence[Operand]) -> list[tuple[str, Operand]]:
    """The operands with the names of their arguments; of a list of tensors each has the name of the list."""
    names = [n for n, p in op.signature.parameters.items() if p.annotation is Tensor] if op.signature else []
    is_list = len(names) != len(operands)
    return [(names[0] if is_list else names[n], operand) for n, operand in enumerate(operands)]


def _placed(arguments: dict[str, Any], operands: Sequence[Operand], wholes: Sequence[Tensor | None]) -> dict[str, Any]:
    """The arguments with wholes in the place of rows."""
    by_id = {id(value): whole for (value, _), whole in zip(operands, wholes, strict=True) if whole is not None}
    return {n: pytree.tree_map_only(Tensor, lambda t: by_id.get(id(t), t), v) for n, v in arguments.items()}


def _reaches_from_the_right(rule: Rule, operands: Sequence[Operand]) -> bool:
    """Whether an op takes any number of leading dims, and no other operand reaches to the rows."""
    behind = [value.dim() - rows.dim - 1 for value, rows in operands if rows is not None]
    for pattern, (value, rows) in zip(rule.operands, operands, strict=True):
        if rows is not None and (not pattern or pattern[0].factor != ELLIPSIS):
            return False
        has_leading = bool(pattern) and pattern[0].factor == ELLIPSIS
        if rows is None and has_leading and isinstance(value, Tensor) and value.dim() > min(behind):
            return False
    return True


def _flat(whole: Tensor, rows: Rows, lead: tuple[int, ...]) -> Tensor:
    """The whole with one dim in the place of the mask's."""
    shape = tuple(whole.shape)
    if rows.lead != lead:
        whole = whole.expand(*shape[: rows.dim], *lead, *shape[rows.dim + rows.rank :])
    return whole.reshape(*shape[: rows.dim], math.prod(lead), *shape[rows.dim + rows.rank :])


def _ready(op: Op, name: str, rows: Rows) -> Tensor:
    """The whole; before an op that is not finite everywhere, with a number in rows not chosen."""
    whole = rows.whole
    if op.name in _LOOK_UPS:
        return whole if whole.is_floating_point() else shielded(rows, 0)
    if op.name in _FINITE or name in _SAFE_OPERANDS.get(op.name, ()) or whole.dtype == torch.bool:
        return whole
    return shielded(rows, 0.5 if whole.is_floating_point() or whole.is_complex() else 1)


def shielded(rows: Rows, number: float) -> Tensor:
    """The whole, with a number in the rows that are not chosen."""
    mask = rows.mask.tensor
    shared = [d for d, (size, n) in enumerate(zip(rows.lead, mask.shape, strict=True)) if size != n]
    return torch.where(beside(mask.any(shared, keepdim=True) if shared else mask, rows), rows.whole, number)


def beside(mask: Tensor, rows: Rows) -> Tensor:
    """A mask with as many dims as the whole."""
    behind = rows.whole.dim() - rows.dim - rows.rank
    return mask.reshape(*[1] * rows.dim, *mask.shape, *[1] * behind) if rows.dim or behind else mask


def _places(op: Op, arguments: dict[str, Any], rows: Rows, output: int) -> tuple[int, ...]:
    """The dims of the mask along which the rows that an op gives are still the places."""
    if not rows.places or op.name not in _KEEPS_PLACES:
        return ()
    if len(rows.places) == 1:
        return rows.places
    if op.name == "unbind":
        return (rows.places[output],)
    index = arguments.get("index")
    last = index[-1] if isinstance(index, tuple) and index else index
    return (rows.places[last],) if isinstance(last, int) else ()
