"""Gradients of micro-batches that accumulate unreduced until the last one of a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar.letters import NotServed
from autopar.module.storage import Storage
from autopar.runtime.backward_steps import refuse_gradient
from autopar.runtime.host import HOST
from autopar.runtime.host_step import lying_on_host
from autopar.runtime.owned_meshes import is_ours
from autopar.runtime.patches import after_zero_grad, before_steps, replace_property
from autopar.runtime.private import local_part

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

    def sums(self, runner: Runner) -> list[Tensor | None]:
        """The sums that wait in a program; None for a gradient of which nothing waits."""
        return self.of.get(runner) or [None] * len(runner.settlement.names)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside the block nothing waits and gradients are reduced at once; afterwards all is as before."""
        before = self.on, self.of
        self.on = False
        self.of = {}
        try:
            yield
        finally:
            self.on, self.of = before

    def parameter(self, name: str) -> Tensor:
        """A parameter of the model."""
        model = self.model()
        assert model is not None
        return model.get_parameter(name)

    def deliver(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to `.grad` of a parameter."""
        parameter = self.parameter(name)
        wrapped = self.storage[name].wrap(gradient)
        if HOST.holds(local_part(parameter)):
            wrapped = lying_on_host(wrapped)
        parameter.grad = wrapped if parameter.grad is None else parameter.grad + wrapped

    def settled(self, runner: Runner) -> list[Tensor | None]:
        """Reduced sums of what waits in a program, which waits no longer."""
        return runner.settlement.settle(self.of.pop(runner))

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        """The names of those of these parameters for which something waits."""
        model = self.model()
        if not self.of or model is None:
            return []
        ids = {id(p) for p in parameters}
        theirs = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
        return [
            name
            for runner, totals in self.of.items()
            for name, total in zip(runner.settlement.names, totals, strict=True)
            if total is not None and name in theirs
        ]

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


def let_optimizers_know() -> None:
    """Let `zero_grad()` and `p.grad = None` also drop what waits, and refuse steps before it has arrived."""
    after_zero_grad(_forget)
    before_steps(_refuse_step)
    replace_property("grad", _set_grad, refuse_gradient)


def _set_grad(parameter: Tensor, value: Tensor | None, theirs: Callable[[Any], None]) -> None:
    theirs(value)
    if value is None and is_ours(parameter):
        _forget([parameter])


def _refuse_step(parameters: list[Tensor]) -> None:
    """Raise where gradients of these parameters wait: a step would go without them."""
    for waiting in tuple(_ALL):
        if names := waiting.names_of(parameters):
            raise NotServed(
                f"optimizer.step() while gradients of micro-batches under no_sync() wait, of {names[0]} for one",
                advice="the last micro-batch before a step outside of model.no_sync(): its backward reduces all",
            )


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks look at a parameter's gradient, so that it cannot wait."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
