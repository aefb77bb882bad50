"""Functions of torch over lists of tensors (`torch._foreach_*`), as one call for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.letters import NotCaptured
from autopar.runtime.private import FOREACH
from autopar.tracer.place import source


def _norm(input: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    return torch.linalg.vector_norm(input, ord, dtype=dtype)


def _sum_of_powers(input: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    return _norm(input, ord, dtype) ** ord


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(input: Tensor, tensor1: Tensor, tensor2: Tensor, value: Any = 1, scalars: Any = None) -> Tensor:
        scale = value if scalars is None else scalars
        if isinstance(scale, Tensor):
            raise NotCaptured(
                f"{function.__name__} of a list takes its scales from the values of a tensor",
                at=source(),
                advice="a list of numbers, or a product before it",
            )
        return function(input, tensor1, tensor2, value=scale)

    return call


_OF_ONE: dict[str, Callable[..., Tensor]] = {
    "norm": _norm,
    "powsum": _sum_of_powers,
    "pow": torch.pow,  # accepts a number as its base
    **{name: _scaled(getattr(Tensor, name)) for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")},
    "maximum_": lambda target, other: target.copy_(torch.maximum(target, other)),
    "minimum_": lambda target, other: target.copy_(torch.minimum(target, other)),
}


def _for_each(name: str) -> Callable[..., Any]:
    """A function over lists as calls of its function of one tensor."""
    function = _OF_ONE.get(name) or getattr(Tensor, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        lengths = {len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))}
        if len(lengths) != 1:
            raise NotCaptured(f"_foreach_{name} of lists of different lengths", at=source())

        def at(place: int, value: Any) -> Any:
            return value[place] if isinstance(value, (list, tuple)) else value

        made = []
        for place in range(lengths.pop()):
            given = [at(place, value) for value in args]
            named = {key: at(place, value) for key, value in kwargs.items()}
            made.append(function(*given, **named))
        return args[0] if name.endswith("_") else tuple(made)

    return call


FOR_EACH = {function: _for_each(name) for name, function in FOREACH.items()}
