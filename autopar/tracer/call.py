"""A call of a torch function: what it is given, and what is noted of it while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_CONTAINERS = (list, tuple, dict)


class RunningCall:
    """The torch function that is being executed, and what it has come to below."""

    def __init__(self) -> None:
        self.function: Any = None  # None: nothing is being executed
        self.drew: Any = None  # the random ATen op that it came to
        self.wrote: list[tuple[Any, Tensor]] = []  # the ATen ops that wrote, and to what
        self.given: set[int] | None = None  # inside an autograd.Function: ids of the tensors that it was given
        self.is_transformed = False  # inside vmap, grad, jvp
        self.opened: list[Any] = []  # composite functions whose bodies are being recorded

    def begin(self, function: Any) -> None:
        """Note from here on what this function does."""
        self.function = function
        self.drew = None
        self.wrote = []


def name_of(function: Callable[..., Any]) -> str:
    """A torch function's name in letters."""
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
