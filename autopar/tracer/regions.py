"""Changes to torch, and to libraries around it, while a module is captured; all of them are undone.

    autograd.Function.apply      one node, with its backward; checkpoints are opened and their ops tagged
    numpy.random, random         a draw would be frozen into the graph: a letter
    transformers                 its mask code looks at masks that are known, and drops those of ones; masks are noted
                                 with what they say, and attention functions become ops that need no mask tensor
    clear_autocast_cache         is noticed
    BatchNorm, Gamma.rsample     are spelled without questions about values, and without writing through a detached view
    TorchScript, torch.compile   run op by op, so that every op is seen
    flex_attention, varlen_attn  become the op of attention whose mask is a description
    defaults, garbage collector  torch's default dtype is kept; Python's collector is off

How each is patched and undone is in `runtime/brief_patches.py`; the replacements are here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as checkpoints

from autopar.ops.experts import assumed_imbalance
from autopar.runtime import brief_patches
from autopar.tracer.attention_calls import attention_calls_read
from autopar.tracer.attention_masks import DescribedAttention
from autopar.tracer.experts import experts_of_transformers
from autopar.tracer.respelled import averages_over_all, cumulative_batch_norm, gamma_rsample

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


@contextlib.contextmanager
def keeping_defaults() -> Iterator[None]:
    """Restore torch's default dtype after the block."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Switch garbage collection off in the block: it would walk every node repeatedly, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def captured(recorder: Recorder) -> Iterator[None]:
    """Apply all changes that a capture needs, for the block."""
    with contextlib.ExitStack() as stack:
        for change in _changes(recorder):
            stack.enter_context(change)
        yield


def _changes(recorder: Recorder) -> Iterator[AbstractContextManager[Any]]:
    yield torch.jit.optimized_execution(False)  # The autodiff of torch.jit would detach its results.
    yield torch.compiler.set_stance("force_eager")
    yield brief_patches.function_apply(lambda original: _apply(recorder, original))
    yield brief_patches.clear_autocast_cache(lambda original: _clearing(recorder, original))
    yield brief_patches.checkpoint_generator(lambda original: _region(recorder, original))
    yield _described_attention(recorder)
    yield brief_patches.transformers_cache_nothing()
    yield brief_patches.parametrizations_write_nothing()
    lines = recorder.assumptions.lines
    yield brief_patches.transformers_experts(lambda original: experts_of_transformers(original, lines))
    yield attention_calls_read(recorder)
    yield assumed_imbalance(recorder.assumptions.declared.imbalance)
    what = "seeds or sets torch's generator inside forward"
    advice = "seeding outside the model"
    yield brief_patches.seeding(lambda name, original: _refusing(recorder, name, original, what, advice))
    yield brief_patches.saved_tensors_hooks(
        lambda original: _refusing(
            recorder, "saved_tensors_hooks", original, "hooks what autograd saves", "them around the call of the model"
        )
    )
    yield brief_patches.batch_norm(
        lambda original: _while_captured(recorder, original, cumulative_batch_norm, averages_over_all)
    )
    yield brief_patches.gamma_rsample(lambda original: _while_captured(recorder, original, gamma_rsample))
    yield _no_outside_randomness(recorder)


@contextlib.contextmanager
def _described_attention(recorder: Recorder) -> Iterator[None]:
    attention = DescribedAttention(recorder)
    with (
        brief_patches.transformers_masks(attention.is_tracing, attention.find_documents, attention.mask_of),
        brief_patches.transformers_attention(attention.function),
    ):
        try:
            yield
        finally:
            attention.close()


def _apply(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.place.is_in_model() or recorder.call.function is not None:
            return original(cls, *args, **kwargs)
        if issubclass(cls, checkpoints.CheckpointFunction):
            function, _, *rest = args
            wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in rest)  # else nothing gets a gradient
            with recorder.place.region(), torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
                return function(*rest)
        return recorder.apply(cls, functools.partial(original, cls), args, kwargs)

    return apply


def _refusing(
    recorder: Recorder, name: str, original: Callable[..., Any], what: str, advice: str
) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if not recorder.place.is_in_model():
            return original(*args, **kwargs)
        raise recorder.letter(f"the model {what} ({name})", (), advice)

    return refused


def _clearing(recorder: Recorder, original: Callable[[], None]) -> Callable[[], None]:
    """Clear the graph's casts of parameters with autocast's own, when its outermost region ends."""

    def clear() -> None:
        recorder.casts.cached.clear()
        original()

    return clear


def _while_captured(
    recorder: Recorder,
    original: Callable[..., Any],
    spelled: Callable[..., Any],
    is_asked: Callable[..., bool] = lambda *_: True,
) -> Callable[..., Any]:
    """A method that calls `spelled` where the captured model calls it and `is_asked`, else the original."""

    def method(own: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.place.is_in_model() and is_asked(own):
            return spelled(own, *args, **kwargs)
        return original(own, *args, **kwargs)

    return method


def _region(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.place.is_in_model():
            yield from original(*args, **kwargs)
            return
        with recorder.place.region():
            yield

    return generator


@contextlib.contextmanager
def _no_outside_randomness(recorder: Recorder) -> Iterator[None]:
    """Refuse draws from another generator than torch's in the block.

    A draw by a function that was imported by name shows in the generator's state.
    """

    def refusing(name: str, original: Any) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != recorder.place.thread:
                return original(*args, **kwargs)
            raise recorder.letter(
                f"the model draws from {name}: the numbers drawn while tracing would be used for ever",
                (),
                "torch's random functions, or switching this off in the config",
            )

        return refused

    generators = _generators_near(recorder.root)
    before = _outside_states(generators)
    with brief_patches.outside_randomness(refusing):
        yield
        if _outside_states(generators) == before:
            return
        if not any(t is not threading.current_thread() and not t.daemon for t in threading.enumerate()):
            raise recorder.letter(
                "the model draws from numpy's or Python's random numbers, which would be frozen",
                (),
                "torch's random functions",
            )
        recorder.assumptions.lines.append(
            "numpy's or Python's random numbers were drawn while tracing, by another thread or by the model: "
            "what the model drew is frozen"
        )


def _generators_near(root: torch.nn.Module) -> list[Any]:
    """Generators of Python and numpy that modules of a model hold, or the files of their classes."""
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = () if numpy_random is None else (numpy_random.Generator, numpy_random.RandomState)
    holders: dict[int, Any] = {}
    for module in root.modules():
        file = sys.modules.get(type(module).__module__)
        holders |= {id(module): module} if file is None else {id(module): module, id(file): file}
    held = [value for holder in holders.values() for value in vars(holder).values()]
    return [value for value in held if isinstance(value, (random.Random, *of_numpy))]


def _outside_states(generators: Sequence[Any]) -> list[Any]:
    """State of Python's generator, of numpy's where it is imported, and of these."""
    numpy_random = sys.modules.get("numpy.random")
    found = [random.getstate(), *([str(numpy_random.get_state())] if numpy_random is not None else [])]
    for generator in generators:
        is_of_python = isinstance(generator, random.Random)
        found.append(generator.getstate() if is_of_python else str(_state_of(generator)))
    return found


def _state_of(generator: Any) -> Any:
    """State of a generator of numpy, of either kind."""
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state
