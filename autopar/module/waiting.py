"""Gradients of micro-batches that accumulate unreduced until the last one of a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from autopar.module.storage import Storage
from autopar.runtime.patches import after_zero_grad

if TYPE_CHECKING:
    from autopar.module.runner import Runner


class Waiting:
    """Unreduced gradients of micro-batches, by the program that made them."""

    def __init__(self, model: nn.Module, storage: dict[str, Storage]) -> None:
        self.on = False  # whether a forward that runs now will add to them
        self.of: dict[Runner, list[Tensor | None]] = {}  # one per gradient, None where nothing waits
        self.model = weakref.ref(model)
        self.storage = storage
        _ALL.add(self)

    def add(self, runner: Runner, fresh: list[Tensor | None]) -> None:
        """Add to what waits, in the wider of the dtypes in which a gradient arrives and in which it is stored."""
        totals = self.of.setdefault(runner, [None] * len(fresh))
        for k, (gradient, dtype) in enumerate(zip(fresh, runner.settlement.waiting_dtypes, strict=True)):
            total = totals[k]
            if total is None:
                totals[k] = None if gradient is None else gradient.to(dtype)
            elif gradient is not None:
                total += gradient

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside the block nothing waits and gradients are reduced at once; afterwards all is as before."""
        before, self.on, self.of = (self.on, self.of), False, {}
        try:
            yield
        finally:
            self.on, self.of = before

    def deliver(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to `.grad` of a parameter."""
        model = self.model()
        assert model is not None
        parameter, wrapped = model.get_parameter(name), self.storage[name].wrap(gradient)
        parameter.grad = wrapped if parameter.grad is None else parameter.grad + wrapped

    def settled(self, runner: Runner) -> list[Tensor | None]:
        """Reduced sums of what waits in a program, which waits no longer."""
        return runner.settlement.settle(self.of.pop(runner))

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Drop what waits for these parameters."""
        model = self.model()
        if not self.of or model is None:
            return
        ids = {id(p) for p in parameters}
        forgotten = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
        for runner, totals in list(self.of.items()) if forgotten else ():
            for k, name in enumerate(runner.settlement.names):
                if name in forgotten:
                    totals[k] = None
            if all(total is None for total in totals):
                del self.of[runner]


def _forget(parameters: list[Tensor]) -> None:
    """Drop what waits for these parameters in any model."""
    for waiting in tuple(_ALL):
        waiting.forget(parameters)


_ALL: weakref.WeakSet[Waiting] = weakref.WeakSet()


def let_optimizers_forget() -> None:
    """Let an optimizer's `zero_grad()` also drop what waits for its parameters; torch has no hook for it."""
    after_zero_grad(_forget)
