"""Check an optimizer before it steps parameters of a parallel model: its states, and whether it can step them at all.

Every class and form in torch was tried (tests/module/test_optimizers.py): those that are not listed here make the step
of one device. Optimizers of other projects are listed where they were seen to fail in the middle of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.letters import Consumed, NotServed
from autopar.module.storage import Storage
from autopar.runtime.host_step import is_stepped_on_host
from autopar.runtime.owned_meshes import far_of, is_ours
from autopar.runtime.private import StridedShard

_WHOLE = 'parallel="dp", which stores parameters whole'
_WITHOUT_FUSED = (torch.optim.SGD, torch.optim.Adagrad)  # torch has no form of these kernels for DTensors
_8_BIT = "torchao.optim.AdamW8bit, which steps parts of parameters as it steps whole ones"
# Optimizers of other projects: where a class is from, how its name ends, why it fails, what to take instead.
_OTHERS = (
    ("bitsandbytes.", "", "its kernels take plain tensors alone", _8_BIT),
    ("torchao.", "4bit", "its compiled step does not take DTensors", _8_BIT),
    ("transformers.", "Adafactor", "it adds plain tensors to parameters", f"torch.optim.Adafactor beside {_WHOLE}"),
)


def refuse_steps_on(parameters: Iterable[nn.Parameter]) -> None:
    """Let a step on these parameters, which `autoparallelize` has replaced, raise an error."""
    for parameter in parameters:
        parameter._autopar_consumed = True
    _look_before_steps()


@functools.cache
def _look_before_steps() -> None:
    """Check every optimizer before each step; registered once in a process."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check_step(optimizer))


def take_parts(optimizer: torch.optim.Optimizer) -> None:
    """Cut whole states of cut parameters, such as those from a checkpoint of one device."""
    if getattr(optimizer, "_autopar_seen", None) is optimizer.state:  # states are loaded as a new dictionary
        return
    for parameter, states in optimizer.state.items():
        for name, value in states.items() if is_ours(parameter) else ():
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
            if is_whole and name != "step":
                states[name] = Storage.like(parameter).take(value.to(parameter.device), False)
    optimizer._autopar_seen = optimizer.state


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise before a step that would fail halfway, so that nothing has been changed."""
    name = type(optimizer).__name__
    if any(getattr(p, "_autopar_consumed", False) for group in optimizer.param_groups for p in group["params"]):
        raise Consumed(
            "this optimizer holds parameters of the model from before autoparallelize",
            advice="build the optimizer from the parallel model's parameters()",
        )
    take_parts(optimizer)
    for group in optimizer.param_groups:
        spread = [p for p in group["params"] if is_ours(p)]
        if not spread:
            continue
        _check_hosted(optimizer, spread)
        if isinstance(optimizer, torch.optim.Rprop):
            raise _letter(name, spread[0], "it writes by masks", "torch.optim.RMSprop or AdamW")
        if isinstance(optimizer, torch.optim.Adafactor) and (cut := [p for p in spread if _is_cut(p)]):
            raise _letter(name, cut[0], "it takes norms of whole rows", f"torch.optim.AdamW, or {_WHOLE}")
        for of, ends, why, advice in _OTHERS:
            if any(c.__module__.startswith(of) and c.__name__.endswith(ends) for c in type(optimizer).__mro__):
                raise _letter(name, spread[0], why, advice)
        if isinstance(optimizer, torch.optim.LBFGS) and (cut := [p for p in spread if not _can_be_flattened(p)]):
            raise _letter(
                name,
                cut[0],
                "it makes one vector of all parameters: one is cut unevenly or by blocks, or lies on another stage",
                f"{_WHOLE}, and no stages",
            )
        if isinstance(optimizer, _WITHOUT_FUSED) and group.get("fused"):
            why = "torch has no such kernel for DTensors"
            advice = f"{name}(..., foreach=True)"
            raise _letter(f"{name}(fused=True)", spread[0], why, advice)


def _check_hosted(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise where the host has to step some of the parameters, and the optimizer steps on devices alone."""
    hosted = [p for p in parameters if is_stepped_on_host(p)]
    if hosted and not getattr(optimizer, "steps_on_host", False):
        raise _letter(
            type(optimizer).__name__,
            hosted[0],
            f"the plan has optimizer states of {len(hosted)} of them on the host, where it cannot step",
            'autopar.optim.AdamW, or a plan with optimizer="adamw", whose states stay on devices',
        )


def _letter(name: str, parameter: Tensor, why: str, advice: str) -> NotServed:
    spread: Any = parameter
    seen = f"one of shape {tuple(spread.shape)}, stored as {spread.placements}"
    return NotServed(f"{name} cannot step parameters of a parallel model: {why}", seen=seen, advice=advice)


def _is_cut(parameter: DTensor) -> bool:
    return any(not p.is_replicate() for p in parameter.placements)


def _can_be_flattened(parameter: DTensor) -> bool:
    """Whether each rank's part is one run of the flattened parameter: of one stage, not strided or uneven."""
    if far_of(parameter) is not None:
        return False
    sizes = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, StridedShard):
            return False
        if placement.is_shard():
            if sizes[placement.dim] % parameter.device_mesh.size(axis):
                return False
            sizes[placement.dim] //= parameter.device_mesh.size(axis)
    return True
