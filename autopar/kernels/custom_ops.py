"""Define the custom ops of a family: forward, backward, what autograd keeps between them, and the call of programs.

    @custom_op("autopar::rms_norm")                   its result is laid out like the first operand
    def normalised(x, weight, eps, rounds): ...

    @backward_of(normalised, "x weight")              autopar::rms_norm_backward: the gradients of these operands
    def normalised_backward(dy, x, weight, eps, rounds): ...

    rms_norm = call_of(normalised, reference)         what stands in programs in the place of the ops

The body of an op runs the kernel where `backend.runs` says so, and the ops that it stands for elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.runtime.private import function_of


def custom_op(name: str, like: str = "", fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that defines a custom op by the function that runs it.

    `like` names, for each result, a parameter of its shape and dtype; "" stands for one result like the first
    parameter. Where results are otherwise, `fake` makes empty ones from the arguments.
    """

    def define(run: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, run, mutates_args=())
        op.register_fake(fake or _empty_like(list(inspect.signature(run).parameters), like.split()))
        return op

    return define


def _empty_like(parameters: Sequence[str], like: Sequence[str]) -> Callable[..., Any]:
    """The function that makes empty results, contiguous, each like the argument of a name."""
    places = [parameters.index(name) for name in like] or [0]

    def fake(*arguments: Any) -> Any:
        made = tuple(arguments[place].new_empty(arguments[place].shape) for place in places)
        return made if len(made) > 1 else made[0]

    return fake


@dataclass(frozen=True, slots=True)
class _Differentiation:
    """What autograd keeps of a call of an op, and the call of its backward, by the names of their parameters."""

    inputs: Sequence[str]  # parameters of the op
    results: Sequence[str]  # names of its results, in order
    asked: Sequence[str]  # parameters of backward
    gradients: Sequence[Sequence[str]]  # names of the inputs that share each result of backward as their gradient
    backward: Callable[..., Any]

    @property
    def is_of_sum(self) -> bool:
        return len(self.gradients[0]) > 1

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the inputs and results that backward asks for."""
        results = output if isinstance(output, tuple) else (output,)
        known = dict(zip(self.inputs, inputs)) | dict(zip(self.results, results))
        kept = {name: known[name] for name in self.asked if name in known}
        tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
        ctx.tensors = tuple(tensors)
        ctx.numbers = {name: value for name, value in kept.items() if name not in tensors}
        ctx.save_for_backward(*tensors.values())
        ctx.set_materialize_grads(not self.is_of_sum)

    def run(self, ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs; None of those that have none."""
        if self.is_of_sum and of_results[-1] is None:  # Only the sum was read.
            return self._by_input([of_results[0]])
        known = ctx.numbers | dict(zip(ctx.tensors, ctx.saved_tensors))
        incoming = [name for name in self.asked if name not in known]
        known |= dict(zip(incoming, of_results))
        made = self.backward(*(known[name] for name in self.asked))
        return self._by_input(made if isinstance(made, tuple) else (made,))

    def _by_input(self, made: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        found = {name: gradient for names, gradient in zip(self.gradients, made) for name in names}
        return tuple(map(found.get, self.inputs))


def backward_of(
    op: Any, gradients: str, results: str = "", fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that defines the backward of an op, and lets autograd run it.

    `gradients` names the op's parameters whose gradients backward returns, each shaped like its operand unless `fake`
    makes them. `results` names the op's results, where backward keeps one. Backward is given what its parameters name:
    inputs and results of the op, and else gradients of results, in order. A first word "a+b" says that the first result
    is the sum of these operands: they share a gradient, which is that of the sum where no other result was read.
    """
    name = op._qualname
    operands = [word.split("+") for word in gradients.split()]
    like = [results.split()[0] if len(names) > 1 else names[0] for names in operands]

    def define(run: Callable[..., Any]) -> Any:
        backward = custom_op(f"{name}_backward", " ".join(like), fake)(run)
        asked = list(inspect.signature(run).parameters)
        inputs = list(inspect.signature(function_of(name)).parameters)
        by_name = _Differentiation(inputs, results.split(), asked, operands, backward)
        op.register_autograd(by_name.run, setup_context=by_name.keep)
        return backward

    return define


def call_of(op: Any, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a family: its custom op, or its reference where a program holds no custom ops."""
    function = function_of(op._qualname)
    first = next(iter(inspect.signature(function).parameters))

    def call(*arguments: Any, **named: Any) -> Any:
        operand = arguments[0] if arguments else named[first]
        return (op if backend.is_traced(operand.device.type) else reference)(*arguments, **named)

    call.__name__ = call.__qualname__ = op._qualname.partition("::")[2]
    call.__module__ = function.__module__
    call.__doc__ = function.__doc__
    return call
