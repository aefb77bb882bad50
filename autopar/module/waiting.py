"""Gradients of micro-batches that wait, not reduced, for the last one of a step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autopar.module.storage import Storage

if TYPE_CHECKING:
    from autopar.module.module import Runner


class Waiting:
    """Gradients of micro-batches that are not reduced yet, by the program that made them."""

    def __init__(self, model: nn.Module, storage: dict[str, Storage]) -> None:
        self.on = False  # does what runs now add to them?
        self.of: dict[
            Runner, list[Tensor | None]
        ] = {}  # None where for a parameter nothing waits, and for others something does
        self.model, self.storage = weakref.ref(model), storage
        _ALL[:] = [ref for ref in (*_ALL, weakref.ref(self)) if ref() is not None]

    def add(self, runner: Runner, fresh: list[Tensor | None]) -> None:
        """Add to what waits, in the wider of the dtypes in which a gradient waits and in which it is stored."""
        totals = self.of.setdefault(runner, [None] * len(fresh))
        for k, (gradient, dtype) in enumerate(zip(fresh, runner.waiting_dtypes, strict=True)):
            total = totals[k]
            if total is None:
                totals[k] = None if gradient is None else gradient.to(dtype)
            elif gradient is not None:
                total += gradient

    def deliver(self, name: str, gradient: Tensor) -> None:
        """Add to the `.grad` of a parameter."""
        model = self.model()
        assert model is not None
        parameter, wrapped = model.get_parameter(name), self.storage[name].wrap(gradient)
        parameter.grad = wrapped if parameter.grad is None else parameter.grad + wrapped

    def settled(self, runner: Runner) -> list[Tensor | None]:
        """Reduce what waits of a program."""
        return runner.settle(self.of.pop(runner))

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """What waits for these parameters."""
        model = self.model()
        if not self.of or model is None:
            return
        ids = {id(p) for p in parameters}
        forgotten = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
        for runner, totals in list(self.of.items()) if forgotten else ():
            totals[:] = [
                None if name in forgotten else total for total, name in zip(totals, runner.names_that_wait, strict=True)
            ]
            if all(total is None for total in totals):
                del self.of[runner]


_ALL: list[weakref.ref[Waiting]] = []


def let_optimizers_forget() -> None:
    """Let `zero_grad()` of every optimizer also forget what waits for its parameters: torch has no hook there."""
    theirs = torch.optim.Optimizer.zero_grad
    if getattr(theirs, "of_autopar", False):
        return

    @functools.wraps(theirs)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        theirs(self, set_to_none)
        for found in tuple(_ALL):
            if (waiting := found()) is not None:
                waiting.forget(p for group in self.param_groups for p in group["params"])

    zero_grad.of_autopar = True  # type: ignore[attr-defined]
    torch.optim.Optimizer.zero_grad = zero_grad
