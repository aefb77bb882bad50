"""The torch function that is being captured, and what it does below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_CONTAINERS = (list, tuple, dict)


class RunningCall:
    """The torch function that is being executed, and what was noted of it below."""

    def __init__(self) -> None:
        self.function: Any = None  # None: nothing is being executed
        self.drew: Any = None  # the random ATen op that it ran, if any
        self.wrote: list[tuple[Any, Tensor]] = []  # ATen ops that wrote to a tensor, with that tensor
        self.given: set[int] | None = None  # inside an autograd.Function: ids of the tensors that it was given
        self.is_transformed = False  # inside vmap, grad, jvp
        self.opened: list[Any] = []  # composite functions whose bodies are being recorded

    def begin(self, function: Any) -> None:
        """Note from here on what this function does."""
        self.function = function
        self.drew = None
        self.wrote = []


def name_of(function: Callable[..., Any]) -> str:
    """Name of a torch function."""
    return getattr(function, "__name__", str(function))


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _CONTAINERS):
            found += tensors_in(value.values() if isinstance(value, dict) else value, {})
    return found
