"""The fake mode of a capture: runs every ATen op on shapes alone, and sees what the function mode above cannot.

    writes and draws        are noted for the torch function that led to them
    ops without a function  inside TorchScript and transforms: they are recorded here

Torch's own dispatch through a fake mode would take most of the time of a capture, so plain cases take short cuts: a
view is taken of the meta tensor inside, and the result of an op is remembered by the shapes of its operands.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import TensorType, info
from autopar.ops.entry import OPS
from autopar.ops.lookup import functional, lookup
from autopar.runtime.private import (
    TO_COPY,
    FakeTensor,
    FakeTensorMode,
    by_its_parts,
    clean_room,
    in_kernel_invocation_manager,
)
from autopar.tracer import refused_calls
from autopar.tracer.call import tensors_in

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


class DispatchMode(FakeTensorMode):
    """A fake mode that also tells the recorder what cannot be seen from above."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.is_deep = False  # inside an op that is being run here
        self.remembered: dict[Any, Any] = {}  # (op, operands' shapes, ...) -> shape, stride and dtype of its result

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return torch.device("meta") if self.in_kernel_invocation else args[0].fake_device
        recorder = self.recorder
        kwargs = kwargs or {}
        if self.is_deep or threading.get_ident() != recorder.place.thread:
            return self.dispatch(function, types, args, kwargs)
        if torch.is_inference_mode_enabled():  # composites come down here whole, which torch opens in any other mode
            with self:
                opened = by_its_parts(function, args, kwargs)
            if opened is not NotImplemented:
                return opened
        call = recorder.call
        self.is_deep = True
        above = call.function
        call.function = above or function  # nothing from here on is the model's own call
        try:
            self._note(function, args, kwargs)
            result = self.fake(function, types, args, kwargs)
            if above is None and recorder.place.is_running:
                self.record(function, args, kwargs, result)
            return result
        except Exception as e:
            if above is None and type(e).__name__ in refused_calls.VALUE_ERRORS:
                raise refused_calls.depends_on_values(recorder, function, args) from e
            raise
        finally:
            self.is_deep = False
            call.function = above

    def fake(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op on fake tensors."""
        kind = _nature(function).result
        if kind == "view" and type(args[0]) is FakeTensor:
            with in_kernel_invocation_manager(self):
                made = function(*args, **kwargs)
            return FakeTensor(self, made, torch.device("cpu"))
        key = None
        if kind == "fresh":
            key = _described((function, args, *kwargs.items()) if kwargs else (function, args))
        if key is None:
            return self.dispatch(function, types, args, kwargs)
        known = self.remembered.get(key)
        if known is not None:
            shape, stride, dtype = known
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), torch.device("cpu"))
        result = self.dispatch(function, types, args, kwargs)
        if type(result) is FakeTensor and result.constant is None and result.fake_device.type == "cpu":
            self.remembered[key] = result.shape, result.stride(), result.dtype
        return result

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what an op is about to do: communicate, draw, write, or read inside an autograd.Function."""
        recorder = self.recorder
        call = self.recorder.call
        nature = _nature(function)
        if nature.communicates:
            raise recorder.letter(
                f"the model communicates itself ({function})",
                args,
                "the single-device program: the plan brings the collectives",
            )
        if nature.draws and not _is_without_chance(function, args, kwargs):
            call.drew = function
        if nature.writes:
            call.wrote += [(function, target) for target in _written_to(function, args)]
        if call.given is not None:
            recorder.check_given(args)
        if recorder.casts.noted is not None and nature.result != "view":  # views and casts commute
            recorder.casts.note(function, args)

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write a node for an ATen op that ran outside any torch function: in TorchScript, or in a transform.

        It is an op below autograd; at replay autograd differentiates it anew.
        """
        recorder = self.recorder
        call = self.recorder.call
        is_constant = function in _CONSTANTS and not isinstance(args[0], FakeTensor)
        if call.is_transformed and is_constant:  # torch.tensor(...) inside a transform, or the 2 of x * 2
            with clean_room():
                data = args[0].tolist() if isinstance(args[0], Tensor) else args[0]
            node = recorder.emit(OPS["tensor"], {"data": data, "dtype": result.dtype}, (result,))
            recorder.values.bind_all(result, node, (OPS["tensor"], {}))
            return
        for tensor in tensors_in(args, kwargs):
            if not isinstance(tensor, FakeTensor) and tensor.dim():
                raise recorder.outsider(tensor)
        args, kwargs = pytree.tree_map(_as_number, (args, kwargs))
        flows = (
            torch.is_grad_enabled()
            and function is not torch.ops.aten.detach.default
            and any(info(recorder.node(t)).outputs[0].requires_grad for t in tensors_in(args, kwargs))
        )
        if _nature(function).writes:
            self._record_write(function, args, kwargs, flows)
        elif not (isinstance(result, Tensor) and recorder.knows(result)):
            self._record_op(function, args, kwargs, result, flows)
        call.drew = None
        call.wrote = []

    def _record_write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flows: bool) -> None:
        recorder = self.recorder
        call = self.recorder.call
        if isinstance(kwargs.get("out"), Tensor):
            raise recorder.letter(f"{function} writes to out=", args, "the form that returns new tensors")
        refused_calls.refuse_write(recorder, args[0], str(function))
        made, arguments = functional(function, args, kwargs)
        if made is None:
            made = OPS["copy"]
            arguments = {"input": args[0], **arguments}
        if any(target is not args[0] for writer, target in call.wrote if writer is function):
            raise recorder.letter(
                f"{function} writes to another operand than its first", args, "the form that returns new tensors"
            )
        node = recorder.emit(made, arguments, (_type_of(args[0], flows),), call.drew is not None)
        recorder.values.write(args[0], node)

    def _record_op(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, flows: bool
    ) -> None:
        recorder = self.recorder
        call = self.recorder.call
        made, arguments = lookup(function, args, kwargs, result)
        outputs = [_type_of(t, flows) for t in tensors_in((result,), {})]
        if outputs:
            node = recorder.emit(made, arguments, outputs, call.drew is not None)
            if made.name == "detach" and not call.is_transformed and torch.is_grad_enabled():
                recorder.detached_below.append(node)
            recorder.values.bind_all(result, node, (made, arguments))


def _type_of(tensor: Tensor, flows: bool) -> TensorType:
    type_ = TensorType.of(tensor)
    return replace(type_, requires_grad=flows and type_.may_have_gradient)


def _as_number(value: Any) -> Any:
    """The value of a real tensor among fakes, which stands for a Python number; others as they are."""
    return value.item() if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value


def _described(value: Any) -> Any:
    """A hashable key of all that an op's result depends on; None where it cannot be told."""
    if type(value) is FakeTensor:
        is_plain = value.constant is None and value.fake_device.type == "cpu"
        return (value.shape, value.stride(), value.dtype) if is_plain else None
    if isinstance(value, (tuple, list)):
        parts = tuple([_described(v) for v in value])
        return None if None in parts else parts
    if isinstance(value, Tensor):
        return None
    return (type(value), value)


_CONSTANTS = (torch.ops.aten.lift_fresh.default, TO_COPY)  # ops that turn a real tensor or a number into a constant


class _Nature:
    """Properties of an ATen op, read from its schema."""

    __slots__ = ("communicates", "draws", "result", "writes")

    def __init__(self, function: Any) -> None:
        self.writes: bool = function._schema.is_mutable
        self.draws: bool = torch.Tag.nondeterministic_seeded in function.tags
        self.communicates: bool = "c10d" in function.namespace
        self.result = _result_of(function)  # "view" of its operand, "fresh" tensor of its operands' shapes, or ""


@functools.cache
def _nature(function: Any) -> _Nature:
    return _Nature(function)


def _result_of(function: Any) -> str:
    schema = function._schema
    tags = function.tags
    if schema.is_mutable or function.namespace != "aten" or "lift" in schema.name:
        return ""
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return ""
    if len(schema.returns) != 1 or not isinstance(schema.returns[0].type, torch.TensorType):
        return ""
    if not any(isinstance(a.type, torch.TensorType) or str(a.type) == "List[Tensor]" for a in schema.arguments):
        return ""
    if function.is_view:
        return "view"
    return "" if schema.returns[0].alias_info else "fresh"


def _written_to(function: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among the positional arguments of an ATen op that it writes to."""
    for value, argument in zip(args, function._schema.arguments, strict=False):
        if argument.alias_info and argument.alias_info.is_write and isinstance(value, Tensor):
            yield value


def _is_without_chance(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random op is called so that it draws nothing, such as attention without dropout."""
    names = [a.name for a in function._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return any(n in names and not given.get(n) for n in ("dropout_p", "training"))
