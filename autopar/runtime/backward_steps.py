"""Steps of parameters on the CPUs of the host while backward goes on.

    hand_over       backward calls it where a gradient is final and nothing reads its parameter any more
    BackwardSteps   the steps of an optimizer, in a thread, one piece behind the other

Copies down begin where a gradient is handed over, on the thread and behind the compute that has made it. Their events
stand behind all that reads the parameter, too, so that copies up need wait for nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.letters import NotServed
from autopar.runtime.host_step import Coming, HostSteps, Piece

_STEPPERS = WeakIdKeyDictionary()  # parameter -> a weak reference to its steps
_TAKES: ContextVar[Callable[[str, Tensor], None] | None] = ContextVar("takes", default=None)


def stepper_of(parameter: Tensor) -> BackwardSteps | None:
    """The steps of the optimizer that steps a parameter while backward goes on, if there is one."""
    known: Any = _STEPPERS.get(parameter)
    return None if known is None else known()


def hand_over(gradient: Tensor, name: str) -> Tensor:
    """The final gradient of a parameter, which may be stepped from here on."""
    take = _TAKES.get()
    if take is not None:
        take(name, gradient)
    return gradient


def refuse_gradient(parameter: Any) -> None:
    """Raise where a gradient is read by which backward has stepped its parameter already."""
    if parameter.__dict__.get("_autopar_stepped"):
        raise NotServed(
            "a gradient is read between backward and optimizer.step(), and backward has stepped its parameter by it",
            advice="AdamW(during_backward=False), where gradients are clipped, scaled or looked at",
        )


@contextlib.contextmanager
def handing_over(parameter_of: Callable[[str], Tensor], names: Iterable[str]) -> Iterator[Collection[str]]:
    """Let a backward inside the block hand parameters over to their optimizers; all are stepped behind it.

    Gives the names of those that were.
    """
    steppers = {}
    taken = set[str]()
    for name in names:
        parameter = parameter_of(name)
        if (stepper := stepper_of(parameter)) is not None and not _is_looked_at(parameter):
            steppers[name] = parameter, stepper
    each = list({id(stepper): stepper for _, stepper in steppers.values()}.values())
    for stepper in each:
        stepper.refuse([parameter for parameter, of in steppers.values() if of is stepper])

    def take(name: str, gradient: Tensor) -> None:
        if name in steppers:
            parameter, stepper = steppers[name]
            taken.add(name)
            stepper.begin(parameter, gradient)

    token = _TAKES.set(take)
    try:
        yield taken
    finally:
        _TAKES.reset(token)
        for stepper in each:
            stepper.end()


def _is_looked_at(parameter: Tensor) -> bool:
    """Whether hooks see or change a gradient behind backward, so that it is not final there."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


@dataclass(eq=False)
class BackwardSteps:
    """The steps of an optimizer in a thread of their own: from a backward to the optimizer's `step`."""

    piece_of: Callable[[Tensor, Tensor], Piece]  # a parameter, with its gradient; counts a step of it
    rates_of: Callable[[Tensor], Any]  # the rates of a parameter's last step, and its number
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "autopar-steps"))
    _begun: list[Future[None]] = field(default_factory=list)
    # Parameters that have been stepped and `step` has not taken over yet, with their rates.
    _stepped: dict[Tensor, Any] = field(default_factory=dict)

    def take(self, parameter: Tensor) -> None:
        """Step a parameter in each backward that hands it over from now on."""
        _STEPPERS[parameter] = weakref.ref(self)

    def refuse(self, parameters: Iterable[Tensor]) -> None:
        """Raise where a backward would not give the whole gradients of these parameters for the next step."""
        for parameter in parameters:
            if parameter in self._stepped:
                raise NotServed(
                    "a second backward before optimizer.step(), and the first one has stepped parameters",
                    advice="model.no_sync() around all micro-batches of a step but the last, or during_backward=False",
                )
            if parameter.grad is not None:
                raise NotServed(
                    "a backward that adds to gradients, by which it steps parameters",
                    advice="optimizer.zero_grad() before it, which sets gradients to None, or during_backward=False",
                )

    @torch.no_grad()
    def begin(self, parameter: Tensor, gradient: Tensor) -> None:
        """Begin to step a parameter by its final gradient, behind what was begun before."""
        whole = self.piece_of(parameter, gradient)
        self._stepped[parameter] = self.rates_of(parameter)
        _mark((parameter,), True)
        if whole.lies_here:
            event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
            self._begun.append(self._thread.submit(_in_place, whole, event))
            return
        for piece in whole.cut(HostSteps().size):
            self._begun.append(self._thread.submit(_from_device, Coming.of(piece)))

    def end(self) -> None:
        """Wait for all that was begun; raises what it has raised."""
        begun = self._begun
        self._begun = []
        for step in begun:
            step.result()

    def taken_over(self) -> Collection[Tensor]:
        """The parameters that need no other step; raises where one behind backward would be another."""
        stepped = self._stepped
        if any(self.rates_of(parameter) != rates for parameter, rates in stepped.items()):
            raise NotServed(
                "the learning rate, or another rate, changed after backward had stepped parameters",
                advice="schedulers behind optimizer.step(), or during_backward=False",
            )
        _mark(stepped, False)
        more = [parameter for parameter in stepped if parameter.grad is not None]
        if more:
            _mark(stepped, True)
            raise NotServed(
                f"a gradient of a parameter of shape {tuple(more[0].shape)} came from outside of the model, after "
                "backward had stepped the parameter",
                advice="a penalty on parameters inside of the model, or during_backward=False",
            )
        self._stepped = {}
        return stepped


def _mark(parameters: Iterable[Any], is_stepped: bool) -> None:
    """Note whether reading the gradients of parameters is an error."""
    for parameter in parameters:
        parameter._autopar_stepped = is_stepped


@torch.no_grad()
def _in_place(piece: Piece, event: Any) -> None:
    """Step a parameter that lies on the host, behind what the device had to do before that."""
    if event is not None:
        event.synchronize()
    piece.in_place()


@torch.no_grad()
def _from_device(coming: Coming) -> None:
    """Step a piece, and send its values up: the copies down have waited for what reads the parameter."""
    coming.step(is_unread=True).end_on_host()
