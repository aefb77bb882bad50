"""What of torch, and of libraries around it, behaves otherwise while a module is captured. All of it is put back.

    autograd.Function.apply      one node, with its backward; checkpoints are opened and their ops tagged
    numpy.random, random         a draw would be frozen into the graph: a letter
    transformers                 with no_padding, its mask code is told that nobody traces, so that it looks at the
                                 masks and drops them
    clear_autocast_cache         is heard
    BatchNorm, Gamma.rsample     are spelled without questions about values, and without writing through a detached view
    TorchScript, torch.compile   run op by op, so that every op comes by

Private parts: `torch.utils.checkpoint._checkpoint_without_reentrant_generator` and `CheckpointFunction` (torch 2.11 to
2.13), `transformers.masking_utils.is_tracing`, `transformers.pytorch_utils.is_torchdynamo_compiling` (transformers
5.x).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as checkpoints
from torch.distributions.gamma import Gamma
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.tracer.recorder import patched
from autopar.tracer.respelled import averages_over_all, cumulative_batch_norm, gamma_rsample

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

_GENERATOR = "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def captured(recorder: Recorder) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(torch.jit.optimized_execution(False))  # its autodiff would detach what it runs
        enter(torch.compiler.set_stance("force_eager"))
        enter(
            patched(
                torch.autograd.Function,
                "apply",
                classmethod(_apply(recorder, torch.autograd.Function.__dict__["apply"].__func__)),
            )
        )
        enter(patched(torch, "clear_autocast_cache", _clearing(recorder, torch.clear_autocast_cache)))
        enter(patched(checkpoints, _GENERATOR, _region(recorder, getattr(checkpoints, _GENERATOR))))
        if recorder.assume.no_padding and "transformers.masking_utils" in sys.modules:
            enter(patched(sys.modules["transformers.masking_utils"], "is_tracing", lambda *_: False))
        if "transformers.pytorch_utils" in sys.modules:  # its method caches would keep fakes
            enter(patched(sys.modules["transformers.pytorch_utils"], "is_torchdynamo_compiling", lambda: True))
        for owner, name in (
            (torch, "manual_seed"),
            (torch.random, "manual_seed"),
            (torch, "set_rng_state"),
            (torch.random, "set_rng_state"),
            (torch, "seed"),
            (torch.random, "seed"),
            (torch.random, "fork_rng"),
        ):
            enter(
                patched(
                    owner,
                    name,
                    _refusing(
                        recorder,
                        f"torch.{name}",
                        getattr(owner, name),
                        "seeds or sets torch's generator inside forward",
                        "seeding outside the model",
                    ),
                )
            )
        enter(
            patched(
                torch.autograd.graph.saved_tensors_hooks,
                "__enter__",
                _refusing(
                    recorder,
                    "saved_tensors_hooks",
                    torch.autograd.graph.saved_tensors_hooks.__enter__,
                    "hooks what autograd saves",
                    "them around the call of the model",
                ),
            )
        )
        enter(
            patched(
                _BatchNorm,
                "forward",
                _while_captured(recorder, _BatchNorm.forward, cumulative_batch_norm, averages_over_all),
            )
        )
        enter(patched(Gamma, "rsample", _while_captured(recorder, Gamma.rsample, gamma_rsample)))
        enter(_no_outside_randomness(recorder))
        yield


def _apply(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != recorder.thread or not recorder.watched or recorder.inside is not None:
            return original(cls, *args, **kwargs)
        if issubclass(cls, checkpoints.CheckpointFunction):
            function, _, *rest = args
            wanted = any(
                isinstance(a, torch.Tensor) and a.requires_grad for a in rest
            )  # or nothing in it gets a gradient
            with _open_region(recorder), torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
                return function(*rest)
        return recorder.apply(cls, lambda *a, **k: original(cls, *a, **k), args, kwargs)

    return apply


def _refusing(
    recorder: Recorder, name: str, original: Callable[..., Any], what: str, advice: str
) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != recorder.thread or not recorder.watched:
            return original(*args, **kwargs)
        raise recorder.letter(f"the model {what} ({name})", (), advice)

    return refused


def _clearing(recorder: Recorder, original: Callable[[], None]) -> Callable[[], None]:
    """Autocast forgets its casts of parameters when its outermost region ends; so does the graph."""

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
    """A method as it is spelled for a graph, where the model that is captured calls it so that this is asked for."""

    def method(own: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == recorder.thread and recorder.watched and is_asked(own):
            return spelled(own, *args, **kwargs)
        return original(own, *args, **kwargs)

    return method


def _region(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != recorder.thread or not recorder.watched:
            yield from original(*args, **kwargs)
            return
        with _open_region(recorder):
            yield

    return generator


@contextlib.contextmanager
def _open_region(recorder: Recorder) -> Iterator[None]:
    recorder.regions.append(recorder.region_count)
    recorder.region_count += 1
    try:
        yield
    finally:
        recorder.regions.pop()


@contextlib.contextmanager
def _no_outside_randomness(recorder: Recorder) -> Iterator[None]:
    """Draws that torch's generator does not make are letters; what was imported by name is found by its state."""
    owners: list[Any] = [random]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        owners.append(numpy_random)

    def state() -> Any:
        return random.getstate(), *((str(numpy_random.get_state()),) if numpy_random is not None else ())

    def refusing(name: str, original: Any) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != recorder.thread:
                return original(*args, **kwargs)
            raise recorder.letter(
                f"the model draws from {name}: the numbers drawn while tracing would be used for ever",
                (),
                "torch's random functions, or switching this off in the config",
            )

        return refused

    before = state()
    with contextlib.ExitStack() as stack:
        for owner in owners:
            for name in owner.__all__:
                value = getattr(owner, name)
                if (
                    callable(value)
                    and not isinstance(value, type)
                    and name not in ("getstate", "setstate", "seed", "get_state", "set_state")
                ):
                    stack.enter_context(patched(owner, name, refusing(f"{owner.__name__}.{name}", value)))
        yield
        if state() != before and any(
            t is not threading.current_thread() and not t.daemon for t in threading.enumerate()
        ):
            recorder.assumptions.append(
                "numpy's or Python's random numbers were drawn while tracing, by another thread or by the model: "
                "what the model drew is frozen"
            )
        elif state() != before:
            raise recorder.letter(
                "the model draws from numpy's or Python's random numbers, which would be frozen",
                (),
                "torch's random functions",
            )
