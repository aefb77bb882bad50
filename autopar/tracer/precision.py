"""Mixed precision: parameters keep the dtype in which they are stored, and the model computes in another.

The single-device program under a `Precision` is the model run on casts of its parameters and inputs (`reference`); the
graph holds those casts as ops of its own, each just before its first use. What a plan does with them follows from the
algebra: a parameter stored in parts is cast and then gathered, in half the bytes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.letters import NotServed

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.tracer.recorder import Recorder

DTYPES = {  # name that a caller may use -> torch's name
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "fp64": "float64",
    "float64": "float64",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtype in which the model computes, and dtype in which gradients are reduced.

    Parameters, gradients and optimizer states are stored in the model's own dtype.
    """

    param: str = "bfloat16"
    reduce: str = "float32"

    def __post_init__(self) -> None:
        for name in ("param", "reduce"):
            given = getattr(self, name)
            dtype = DTYPES.get(str(given).removeprefix("torch.").lower())
            if dtype is None:
                raise NotServed(
                    f"Precision({name}={given!r}) names no floating dtype",
                    seen=f"known: {', '.join(DTYPES)}",
                    advice='autopar.Precision(param="bfloat16", reduce="float32")',
                )
            object.__setattr__(self, name, dtype)

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor in the dtype of compute; integers stay."""
        return tensor.to(getattr(torch, self.param)) if tensor.is_floating_point() else tensor

    def check(self, name: str, parameter: Tensor) -> None:
        """Raise unless gradients are reduced in a dtype that they have: that of compute or of storage."""
        stored = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and self.reduce not in (self.param, stored):
            raise NotServed(
                f"{name} is stored in {stored} and computes in {self.param}: its gradient is never {self.reduce}, "
                "and cannot be reduced in it",
                seen=str(self),
                advice=f"a model that is stored in {self.reduce}, or reduce={stored!r}",
            )


def reference(model: torch.nn.Module, precision: Precision) -> Callable[..., Any]:
    """The single-device program that a parallel model computes under a precision, as a function."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, precision.cast, (args, kwargs))
        with NormsOfTwoDtypes():
            return torch.func.functional_call(
                model, {n: precision.cast(p) for n, p in model.named_parameters()}, args, kwargs
            )

    return run


class NormsOfTwoDtypes(TorchFunctionMode):
    """Function mode for batch and instance norms whose running statistics have another dtype than their input.

    Torch refuses most of them. A narrower input (bfloat16 beside float32) is normalised as torch does under autocast:
    weight and bias in the dtype of the statistics, the result in that of the input. For any other pair the statistics
    are cast to the dtype of the input, and written back in their own.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _NORMS:
            return function(*args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        input = named["input"]
        statistics = {n: named[n] for n in _STATISTICS if named[n] is not None}
        stored = next((t.dtype for t in statistics.values()), input.dtype)
        if stored == input.dtype:
            return function(**named)
        if stored == torch.float32 and input.dtype in (torch.bfloat16, torch.float16):
            affine = {n: named[n].to(stored) for n in ("weight", "bias") if named[n] is not None}
            return function(**named | affine)
        cast = {n: t.to(input.dtype) for n, t in statistics.items()}
        result = function(**named | cast)
        if named[_NORMS[function]]:
            with torch.no_grad():
                for name, tensor in statistics.items():
                    tensor.copy_(cast[name])
        return result


_NORMS: dict[Any, str] = {
    F.batch_norm: "training",
    F.instance_norm: "use_input_stats",
}  # each with the argument by which it writes
_STATISTICS = ("running_mean", "running_var")


@contextlib.contextmanager
def computing_in(precision: Precision | None, recorder: Recorder) -> Iterator[list[fx.Node]]:
    """Let modules hold recorded casts of their parameters in the block; yields the nodes of the casts."""
    casts: list[fx.Node] = []
    if precision is None:
        yield casts
        return
    made: dict[int, Tensor] = {}
    held: list[tuple[Any, str, Any]] = []
    try:
        for path, module in recorder.root.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_floating_point():
                    continue
                full = ".".join(filter(None, (path, name)))
                precision.check(full, parameter)
                if parameter.dtype == getattr(torch, precision.param):
                    continue
                if id(parameter) not in made:
                    with recorder.place.within(path):
                        made[id(parameter)] = precision.cast(parameter)
                        recorder.stand_ins[id(made[id(parameter)])] = full
                        casts.append(recorder.values.node(made[id(parameter)]))
                held.append((module._parameters, name, parameter))
                module._parameters[name] = made[id(parameter)]
        with NormsOfTwoDtypes():
            yield casts
    finally:
        for holder, name, parameter in held:
            holder[name] = parameter


def sink(casts: Sequence[fx.Node]) -> None:
    """Move casts from the program's start to just before their first use, and remove unused ones.

    A cast copy thereby lives no longer than it must.
    """
    for cast in casts:
        if not cast.users:
            cast.graph.erase_node(cast)
        else:
            order = {n: i for i, n in enumerate(cast.graph.nodes)} if len(cast.users) > 1 else {}
            min(cast.users, key=lambda n: order.get(n, 0)).prepend(cast)
