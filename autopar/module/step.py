"""The autograd node of a parallel model: one node per call, with emitted forward and emitted backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.graph.graph import info
from autopar.graph.tensor_form import TensorForm
from autopar.letters import NotServed
from autopar.module.waiting import has_hooks
from autopar.runtime.faults import naming_the_lacking, naming_the_lost
from autopar.runtime.private import let_go, part_of

if TYPE_CHECKING:
    from autopar.module.runner import Runner


class EmittedStep(torch.autograd.Function):
    """The autograd node of a call: emitted forward, emitted backward."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *primals: Tensor) -> tuple[Tensor, ...]:
        results = _results(runner, primals)
        count = runner.outputs
        ctx.runner = runner
        ctx.waits = runner.waiting.on and not any(map(has_hooks, primals))
        ctx.spread = [isinstance(p, DTensor) for p in primals]
        ctx.kept = [(i, primals[i], primals[i]._version) for i in runner.primals.kept]
        ctx.save_for_backward(*results[count:])
        ctx.set_materialize_grads(False)
        outputs = _apart(results[:count], primals)  # autograd tells outputs apart by identity
        named = info(runner.graph.output).outputs[: len(runner.graph.output_names)]
        wants = [t.requires_grad for t in named] + [False] * len(runner.graph.updates)
        ctx.mark_non_differentiable(*(o for o, has in zip(outputs, wants, strict=True) if not has))
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        runner: Runner = ctx.runner
        _check_backward(ctx, tangents)
        arrived = [tangents[i] for i in runner.differentiable]
        has_arrived = tuple(t is not None for t in arrived)
        gradients: list[Any] = [None] * runner.primals.count
        if not any(has_arrived):
            return (None, *gradients)
        filled = [None if t is None else _as_traced(t, form) for t, form in zip(arrived, runner.tangents, strict=True)]
        runner.check_arrived(has_arrived)
        with naming_the_lost("backward"), naming_the_lacking("backward"):
            given = [*ctx.saved_tensors, *filled]
            let_go(ctx)
            del filled, arrived, tangents
            found = runner.gradients(given, has_arrived, ctx.waits)
            if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
                runner.refuse_nan(found)
        for i, gradient in zip(runner.gets, found, strict=True):
            if gradient is not None:
                gradients[i] = runner.primals.as_gradient(i, gradient) if ctx.spread[i] else gradient
        runner.settle_copies()
        return (None, *gradients)


def outputs_of(runner: Runner, primals: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a call, from a node of autograd where gradients are on."""
    if torch.is_grad_enabled():
        outputs: tuple[Tensor, ...] = EmittedStep.apply(runner, *primals)
        return outputs
    return _apart(_results(runner, primals)[: runner.outputs], primals)


def _results(runner: Runner, primals: Sequence[Tensor]) -> Sequence[Tensor]:
    """Outputs, then the values saved for backward."""
    with naming_the_lost("forward"), naming_the_lacking("forward"):
        results = runner.results(_in_order(part_of(p) if isinstance(p, DTensor) else p) for p in primals)
        runner.settle_copies()
        return results


def _apart(outputs: Sequence[Tensor], primals: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs, each a tensor of its own: a copy where it is a primal, or another output."""
    found = list[Tensor]()
    there = set(map(id, primals))
    for output in outputs:
        found.append(output.clone() if id(output) in there else output)
        there.add(id(found[-1]))
    return tuple(found)


def _check_backward(ctx: Any, tangents: Sequence[Tensor | None]) -> None:
    """Raise for a backward that was not emitted, or whose parameters have changed since forward."""
    runner: Runner = ctx.runner
    if torch.is_grad_enabled():  # create_graph=True
        raise NotServed(
            "a gradient of gradients is asked for, and the emitted backward has none",
            advice="create_graph=False; or torch.func.grad inside the model, whose ops are captured",
        )
    for i, tangent in enumerate(tangents):
        if tangent is not None and i not in runner.differentiable:
            name = runner.graph.output_names[i]
            raise NotServed(
                f"a gradient arrives at the output {name!r}, and backward was lowered for the loss",
                advice=f"outputs=({name!r},), or compute with that output inside the model, or in loss=",
            )
    for i, parameter, version in ctx.kept:
        if parameter._version != version:
            raise NotServed(
                f"the parameter {runner.primals.names[i]} was modified in place between forward and backward, which "
                "needs it as it was",
                advice="backward before optimizer.step() and load_state_dict()",
            )


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy of it: programs are traced on contiguous inputs."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _as_traced(gradient: Tensor, form: TensorForm) -> Tensor:
    """An arrived gradient in the layout that backward was traced on; copied where it lies otherwise.

    The gradient of a sum, say, lies otherwise. A gradient arrives as a DTensor where a loss that is whole was added to
    one: to a penalty on parameters, say.
    """
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient if form.lies_like(gradient) else form.empty(str(gradient.device)).copy_(gradient)
