"""Handlers of torch functions that write to a tensor, which stands for a new value from there on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import TensorType
from autopar.ops.entry import OPS, facts_of
from autopar.ops.lookup import functional, lookup
from autopar.tracer import chosen_ends, refused_calls
from autopar.tracer.call import name_of, tensors_in
from autopar.tracer.recorder import Recorder
from autopar.tracer.values import is_same_view, overlaps, storage_of


def into(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle torch.mul(x, y, out=z): z stands for the product from here on."""
    target = kwargs["out"]
    refused_calls.refuse_write(recorder, target, f"{name_of(function)} to out=")
    before = TensorType.of(target)
    result = recorder.execute(function, args, kwargs)
    after = TensorType.of(target)
    if before.shape != after.shape:
        raise recorder.letter(
            f"{name_of(function)} gives out= another shape", args, "the form that returns a new tensor"
        )
    made, arguments = lookup(function, args, {k: v for k, v in kwargs.items() if k != "out"}, target)
    node = recorder.emit(made, arguments, (after,), recorder.call.drew is not None)
    recorder.values.write(target, _cast_back(recorder, node, recorder.type_of_run(made, arguments), after))
    return result


def in_place(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle x.add_(y): x stands for a new value from here on."""
    target = args[0] if args else kwargs["input"]
    refuse_generator(recorder, args, kwargs)
    if recorder.values.chosen.meets(args, kwargs):
        return chosen_ends.write(recorder, function, args, kwargs)
    refused_calls.refuse_write(recorder, target, name_of(function))
    made, arguments = functional(function, args, kwargs)
    if function is Tensor.__setitem__ and isinstance(args[2], Tensor) and _is_that_view(recorder, *args[:3]):
        return recorder.execute(function, args, kwargs)  # z[1:] += y puts back what is there already
    _refuse_ambiguous(recorder, function, made, arguments, args, target)
    # The operands are those before the write.
    before = recorder.resolved(arguments)
    old = recorder.node(target)
    may_promote = made is not None and _may_promote(made, arguments, target)
    result = recorder.execute(function, args, kwargs)
    after = TensorType.of(target)
    if made is None:
        node = _copied(recorder, before["source"], arguments["source"], after)
    else:
        node = recorder.program.add_op(made, before, (after,), recorder.call.drew is not None)
        if may_promote:
            node = _cast_back(recorder, node, recorder.type_of_run(made, arguments), after)
        if after.requires_grad and facts_of(made.name).overwrites and torch.is_grad_enabled():
            node = _with_zero_gradient(recorder, node, old, after)
    recorder.values.write(target, node)
    return result


def turned(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle x.unsqueeze_(0): x stands for the view from here on.

    Refused where other tensors share its memory, as one value would have two shapes.
    """
    target = args[0]
    name = name_of(function)
    if recorder.values.is_shared(target):
        raise recorder.letter(f"{name} gives another shape to a tensor that others are views of", args, name[:-1])
    before = recorder.node(target)
    result = recorder.execute(function, args, kwargs)
    made, arguments = lookup(getattr(Tensor, name[:-1]), args, kwargs, target)
    node = recorder.emit(made, {**arguments, "input": before}, (TensorType.of(target),))
    recorder.values.rename(target, node)
    return result


def refuse_generator(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse draws from a generator of the model's own, and several results written to out=."""
    if kwargs.get("generator") is not None:
        raise recorder.letter(
            "random numbers from a generator of the model's own are not captured",
            args,
            "torch's default generator, seeded by torch.manual_seed",
        )
    if isinstance(kwargs.get("out"), (tuple, list)):
        raise recorder.letter("results are written to out=", args, "the form that returns new tensors")


def _refuse_ambiguous(
    recorder: Recorder, function: Any, made: Any, arguments: dict[str, Any], args: tuple[Any, ...], target: Tensor
) -> None:
    """Refuse writes whose result depends on how tensors lie in memory."""
    is_part = function is Tensor.__setitem__
    for other in tensors_in((), arguments):
        meets = other is not target and overlaps(other, target)
        if meets and (not is_part or _is_written(recorder, other, target, args[1])):
            raise recorder.letter(
                f"{name_of(function)} reads memory that it writes, through another view",
                args,
                "a copy of what it reads: .clone()",
            )
    facts = facts_of(made.name) if made is not None else None
    if facts and facts.overwrites and facts.draws and not target.is_contiguous():
        raise recorder.letter(
            f"{name_of(function)} fills a view with draws, whose order depends on its memory",
            args,
            "draws in a tensor of its own",
        )


def _is_that_view(recorder: Recorder, whole: Tensor, index: Any, value: Tensor) -> bool:
    """Whether `value` is the view of `whole` at this index; not so behind .data or .detach()."""
    values = recorder.values
    if storage_of(value) != storage_of(whole) or values.places_of(value) != values.places_of(whole):
        return False
    part = _part(recorder, whole, index)
    is_same = part is not None and is_same_view(value, part)
    return is_same and values.has_gradient(value) == values.has_gradient(whole)


def _is_written(recorder: Recorder, other: Tensor, whole: Tensor, index: Any) -> bool:
    """Whether a write to `whole` at an index may reach what another view of its memory shows."""
    part = _part(recorder, whole, index)
    return part is None or overlaps(other, part) or is_same_view(other, part)


def _part(recorder: Recorder, whole: Tensor, index: Any) -> Tensor | None:
    """The view at an index, by a look that is not the model's own call; None where places are looked up."""
    if any(x.dtype == torch.bool for x in tensors_in((index,), {})):
        return None
    recorder.call.function = "index"
    try:
        part = whole[index]
    finally:
        recorder.call.function = None
    return part if storage_of(part) == storage_of(whole) else None


def _may_promote(made: Any, arguments: dict[str, Any], target: Tensor) -> bool:
    """Whether the op may give another dtype than the target's."""
    has_several_dtypes = len({t.dtype for t in tensors_in((), arguments)}) > 1
    return has_several_dtypes or not target.is_floating_point() or facts_of(made.name).truth


def _cast_back(recorder: Recorder, node: fx.Node, made: TensorType, wanted: TensorType) -> fx.Node:
    """The node, cast to the target's dtype where the op gives another."""
    if made.dtype == wanted.dtype:
        return node
    node.meta["info"] = replace(node.meta["info"], outputs=(made,))
    return recorder.emit(OPS["to"], {"input": node, "dtype": wanted.torch_dtype}, (wanted,))


def _copied(recorder: Recorder, node: fx.Node, source: Tensor, wanted: TensorType) -> fx.Node:
    """The value that is copied into a target, broadcast and cast."""
    if tuple(source.shape) != wanted.shape:
        type_ = replace(TensorType.of(source), shape=wanted.shape)
        node = recorder.emit(OPS["expand"], {"input": node, "size": wanted.shape}, (type_,))
    if TensorType.of(source).dtype != wanted.dtype:
        node = recorder.emit(OPS["to"], {"input": node, "dtype": wanted.torch_dtype}, (wanted,))
    return node


def _with_zero_gradient(recorder: Recorder, node: fx.Node, old: fx.Node, type_: TensorType) -> fx.Node:
    """The node as a `where` over the old value, so that what is overwritten gets a gradient of zeros."""
    no = {"size": (), "fill_value": False, "dtype": torch.bool}
    never = recorder.emit(OPS["full"], no, (TensorType((), "bool"),))
    return recorder.emit(OPS["where"], {"condition": never, "input": old, "other": node}, (type_,))
