"""Letters about the calls of torch that no graph can hold, while a module is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.letters import NotCaptured
from autopar.ops.entry import SPELLINGS, WRITES, facts_of
from autopar.tracer.call import name_of, tensors_in

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

# Torch's errors where fakes are asked for values.
VALUE_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException")
_SAYS_ITS_SHAPE = {  # a call with the same result, whose shape does not depend on values
    "one_hot": "one_hot(x, num_classes=n)",
    "tensor_split": "tensor_split(x, [i, j, ...]), with a list of numbers",
    "repeat_interleave": "repeat_interleave(x, counts, output_size=n), or one count for all",
    "bincount": "one_hot(x, num_classes=n).sum(0)",
}


def letter_about(
    recorder: Recorder, error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NotCaptured | None:
    """The letter for an error of a torch function on fakes, or None where the error says enough."""
    name = name_of(function)
    # a kernel may read values where others read shapes
    if type(error).__name__ in VALUE_ERRORS or "data is not allocated yet" in str(error):
        return depends_on_values(recorder, function, args)
    if isinstance(error, AssertionError) and "FakeTensor" in str(error):
        return recorder.letter(f"{name} uses a tensor from outside the model and its inputs", args)
    dtype = None if recorder.precision is None else recorder.precision.param
    if dtype and isinstance(error, RuntimeError) and _runs_in_single_precision(recorder, dtype, function, args, kwargs):
        return recorder.letter(
            f"torch has no {name} in {dtype}, in which precision= has the model compute: {error}",
            args,
            f"a cast where it is read: {name}(x.float(), ...); or no precision=",
        )
    return None


def _runs_in_single_precision(
    recorder: Recorder, dtype: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a function that failed on operands of this dtype runs on float32."""
    narrow = getattr(torch, dtype)
    if not any(t.dtype == narrow for t in tensors_in(args, kwargs)):
        return False
    was_running = recorder.place.is_running
    recorder.place.is_running = False
    try:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype == narrow else t, (args, kwargs))
        function(*args, **kwargs)
    except RuntimeError:
        return False
    finally:
        recorder.place.is_running = was_running
    return True


def depends_on_values(recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...]) -> NotCaptured:
    """The letter for a function whose result has a shape that depends on a tensor's values."""
    name = name_of(function)
    what = f"the shape of {name}'s result depends on the values of a tensor, which a graph cannot hold"
    return recorder.letter(what, args, _SAYS_ITS_SHAPE.get(name, "torch.where, or a mask of fixed shape"))


def refuse_write(recorder: Recorder, target: Tensor, name: str) -> None:
    """Refuse writes that a graph of values cannot hold."""
    base = target
    recorder.node(target)
    while (parent := recorder.values.parent(base)) is not None:
        base = parent
        recorder.node(base)  # The write may change requires_grad, so the node comes first.
    if id(base) in recorder.names.sharing:
        raise recorder.letter(
            f"{name} writes to memory that another tensor of the model or its inputs shares",
            (target,),
            "tensors of their own: .clone()",
        )
    is_parameter = recorder.names.kinds.get(id(base)) == "parameter"
    if is_parameter or id(base) in recorder.stand_ins:
        written = recorder.names.of[id(base)][0] if is_parameter else recorder.stand_ins[id(base)]
        raise recorder.letter(
            f"{name} writes to the parameter {written} inside the model",
            (target,),
            "a buffer, or a new tensor",
        )
    has_no_history = target.is_leaf and (base is target or not base.requires_grad)  # a parameter made in forward
    if target.requires_grad and not torch.is_grad_enabled() and not has_no_history:
        raise recorder.letter(
            f"{name} writes under no_grad to a value that carries a gradient: the gradient would not know",
            (target,),
            "the form that returns a new tensor",
        )


def refuse_hidden_write(recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a function that has written to an argument and is not known to do so."""
    is_known = function in SPELLINGS and SPELLINGS[function][0].name in WRITES
    if not is_known and any(recorder.values.shares_storage(target) for _, target in recorder.call.wrote):
        raise recorder.letter(
            f"{name_of(function)} writes to a tensor that it was given ({recorder.call.wrote[0][0]})",
            args,
            "the form that returns a new tensor",
        )


def refuse_layouts(
    recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...], tensors: Sequence[Tensor]
) -> None:
    """Refuse tensors that are not strided: sparse or nested."""
    layouts = {str(t.layout).removeprefix("torch.") for t in tensors if t.layout != torch.strided}
    if layouts:
        raise recorder.letter(
            f"{name_of(function)} reads or gives a tensor of layout {min(layouts)}, which a plan cannot cut",
            args,
            "a dense tensor, x.to_dense(); of a sparse product index_add or scatter_add over its places",
        )


def refuse_sparse_gradients(recorder: Recorder, op: Any, arguments: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Refuse lookups in a trained table whose gradient would be sparse."""
    is_sparse = arguments.get("sparse") is True or arguments.get("sparse_grad") is True
    if is_sparse and any(t.requires_grad for t in tensors_in((arguments,), {})):
        raise recorder.letter(
            f"{op.name} gives a sparse gradient, which a plan cannot cut or reduce",
            args,
            "sparse=False: the same values",
        )


def refuse_mixed_dtypes(recorder: Recorder, op: Any, arguments: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Refuse operands of several dtypes where torch accepts them on fakes, but not on real tensors."""
    if not facts_of(op.name).one_dtype:
        return
    floating = [t for t in tensors_in((arguments,), {}) if t.is_floating_point()]
    dtypes = {str(t.dtype).removeprefix("torch.") for t in floating}
    if len(dtypes) > 1:
        raise recorder.letter(
            f"{op.name} of {' and '.join(sorted(dtypes))}: on real tensors torch refuses to mix them, on "
            "fakes it does not",
            args,
            "inputs of the model's own dtype; under precision=, a buffer cast where it is read: table.to(x.dtype)",
        )
