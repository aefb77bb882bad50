"""Patches of torch, and of libraries around it: each a context manager, undone when it is left.

    what    the attribute that has another value inside
    why     what goes wrong without it
    how     the caller gives a function from the original to what stands in its place

All of them last as long as one capture, under the lock of captures (`private.TRACING`), for an attribute of a module is
the whole process's; what stands in its place asks whether it is the captured model that calls, on its thread, and calls
the original for everybody else.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch.distributions.gamma import Gamma
from torch.nn.modules.batchnorm import _BatchNorm

Replacing = Callable[[Any], Any]  # from the original to what stands in its place
ReplacingByName = Callable[[str, Any], Any]

OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute; the very object that stood there is put back."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def function_apply(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.autograd.Function.apply`: no mode of torch sees its call, and its backward would be lost."""
    original = vars(torch.autograd.Function)["apply"].__func__
    return patched(torch.autograd.Function, "apply", classmethod(replacing(original)))


def clear_autocast_cache(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.clear_autocast_cache`: nothing else says that an autocast region has ended."""
    return patched(torch, "clear_autocast_cache", replacing(torch.clear_autocast_cache))


def checkpoint_generator(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace the generator around the body of a non-reentrant checkpoint: its ops are to be told from others.

    Private: `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, torch 2.11 to 2.13.
    """
    name = "_checkpoint_without_reentrant_generator"
    return patched(checkpoints, name, replacing(getattr(checkpoints, name)))


def saved_tensors_hooks(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace the beginning of `torch.autograd.graph.saved_tensors_hooks`: a graph cannot hold such hooks."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    return patched(hooks, "__enter__", replacing(hooks.__enter__))


def batch_norm(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace the forward of batch norms: with momentum=None it reads how many batches there were."""
    return patched(_BatchNorm, "forward", replacing(_BatchNorm.forward))


def gamma_rsample(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `Gamma.rsample`: it writes through a detached view."""
    return patched(Gamma, "rsample", replacing(Gamma.rsample))


@contextlib.contextmanager
def seeding(replacing: ReplacingByName) -> Iterator[None]:
    """Replace the functions that seed or set torch's generator: the graph would not do so."""
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "manual_seed"),
            (torch.random, "manual_seed"),
            (torch, "set_rng_state"),
            (torch.random, "set_rng_state"),
            (torch, "seed"),
            (torch.random, "seed"),
            (torch.random, "fork_rng"),
        ):
            stack.enter_context(patched(owner, name, replacing(f"torch.{name}", getattr(owner, name))))
        yield


@contextlib.contextmanager
def outside_randomness(replacing: ReplacingByName) -> Iterator[None]:
    """Replace the draws of `random` and `numpy.random`: what they draw would be frozen into the graph."""
    about_state = ("getstate", "setstate", "seed", "get_state", "set_state")
    owners: list[Any] = [random, sys.modules.get("numpy.random")]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            for name in owner.__all__ if owner is not None else ():
                value = getattr(owner, name)
                if callable(value) and not isinstance(value, type) and name not in about_state:
                    stack.enter_context(patched(owner, name, replacing(f"{owner.__name__}.{name}", value)))
        yield


def transformers_look_at_masks() -> contextlib.AbstractContextManager[None]:
    """Let transformers' mask code believe that nobody traces, so that it looks at masks, and drops those of ones.

    Private: `transformers.masking_utils.is_tracing`, transformers 5.
    """
    return _patched_if_imported("transformers.masking_utils", "is_tracing", lambda *_: False)


def transformers_cache_nothing() -> contextlib.AbstractContextManager[None]:
    """Let transformers' method caches believe that torch.compile runs: they would keep fakes.

    Private: `transformers.pytorch_utils.is_torchdynamo_compiling`, transformers 5.
    """
    return _patched_if_imported("transformers.pytorch_utils", "is_torchdynamo_compiling", lambda: True)


@contextlib.contextmanager
def without_override_checks(is_wanted: bool) -> Iterator[None]:
    """Let `torch.overrides` say that nothing is overridden, where this is wanted.

    A function of torch.nn.init asks it, and would hand itself over again. Lasts as long as one call of it.
    """
    with contextlib.ExitStack() as stack:
        for check in OVERRIDE_CHECKS if is_wanted else ():
            stack.enter_context(patched(torch.overrides, check, lambda *_: False))
        yield


@contextlib.contextmanager
def fake_errors_told_once() -> Iterator[None]:
    """Silence the log of fake tensors: torch logs an op's error with its whole stack, and then raises it.

    Private: the logger's name, `torch._subclasses.fake_tensor`.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _patched_if_imported(module: str, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    owner = sys.modules.get(module)
    return patched(owner, name, value) if owner is not None else contextlib.nullcontext()
