"""Find with what a step of a LightningModule calls the modules that are to run in parallel.

A step is begun on the first batch of the loader, with the modules as they are, and stopped at the last of the calls.
Of two networks the first has then run once. Its buffers, which parameters train, and random numbers are as before; what
the step keeps on the LightningModule stays, and nothing is logged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.integrations.adapting import keeping_random_states
from autopar.letters import NotServed


class _Called(Exception):
    """Raised when a step has reached the last call to plan."""


def first_calls(trainer: pl.Trainer, parts: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Arguments of the first call of each part in a step on the first batch."""
    module = trainer.lightning_module
    step, loop = {
        TrainerFn.FITTING: ("training_step", trainer.fit_loop),
        TrainerFn.VALIDATING: ("validation_step", trainer.validate_loop),
        TrainerFn.TESTING: ("test_step", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict_step", trainer.predict_loop),
    }[trainer.state.fn]
    if module.example_input_array is not None and list(parts.values()) == [module]:
        return dict.fromkeys(parts, module.example_input_array)
    called = dict[str, Any]()

    def note(name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        called.setdefault(name, _as_inputs(part, args, kwargs))
        if len(called) == len(parts):
            raise _Called

    handles = [
        part.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True) for name, part in parts.items()
    ]
    try:
        with keeping_random_states(), _as_it_was(module), contextlib.suppress(_Called):
            loop.setup_data()
            batch = next(iter(loop._combined_loader))[0]
            loop._combined_loader = None  # training sets it up again, and draws the same rows
            getattr(module, step)(trainer.strategy.batch_to_device(batch, module.device), 0)
    finally:
        for handle in handles:
            handle.remove()
    if missing := [name for name in parts if name not in called]:
        raise NotServed(
            f"{step} does not call {missing[0] or 'the LightningModule'}, which is to run in parallel",
            advice="AutoparStrategy(part=...): the name of the part that runs in parallel, or a list of several",
        )
    return called


@contextlib.contextmanager
def _as_it_was(module: pl.LightningModule) -> Iterator[None]:
    """Restore buffers and which parameters train after the block, in which nothing is logged."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    module.log = lambda *args, **how: None  # a step is no hook here, and Lightning would refuse
    try:
        yield
    finally:
        del module.log
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _as_inputs(part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Arguments without their history, positional ones by their names where others are named."""
    args, kwargs = pytree.tree_map_only(Tensor, _by_itself, (args, kwargs))
    if not kwargs:
        return args
    return {**dict(zip(inspect.signature(part.forward).parameters, args, strict=False)), **kwargs}


def _by_itself(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
