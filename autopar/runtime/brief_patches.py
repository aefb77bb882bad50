"""What autopar replaces in torch for a while: while a model is captured, or built on meta.

    what                                    why                                                     how long
    nn.Module.__getattribute__              reads of modules are noted: what a model's forward      while a thread
      and attributes of settings              does not read cannot matter to it                       captures a model
    nn.init.orthogonal_, nn.init.sparse_    on meta they do nothing, and must be noticed            while recipes run
                                                                                                      on meta
    functions that a capture answers        see `tracer/regions.py`                                 while it captures

The patches of a capture are context managers, and last as long as it does, under the lock of captures
(`private.TRACING`). The caller gives a function from the original to its replacement, which asks whether the captured
model calls, on its thread, and calls the original for everybody else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.utils.parametrize as parametrize
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.distributions.gamma import Gamma
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.runtime.patches import NOTHING, Patch


@contextlib.contextmanager
def seen_on_meta(does: Callable[[Tensor], None]) -> Iterator[None]:
    """Replace orthogonal_ and sparse_ on meta tensors by `does`, in this thread: torch's do nothing there."""
    thread = threading.get_ident()

    def make(theirs: Any) -> Any:
        @functools.wraps(theirs)
        def seen(tensor: Tensor, *args: Any, **how: Any) -> Tensor:
            if not tensor.is_meta or threading.get_ident() != thread:
                return theirs(tensor, *args, **how)
            does(tensor)
            return tensor

        return seen

    patches = [Patch(nn.init, name, make) for name in ("orthogonal_", "sparse_")]
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.undo()


class Notes(Protocol):
    """Notes which attributes of which objects this thread reads."""

    def watches(self, held: Any) -> str:
        """The way this thread watches an object: "module", "settings", or "" if its reads are not noted."""

    def note(self, held: Any, key: str) -> None: ...

    def note_all(self, held: Any) -> None: ...

    def count(self) -> int:
        """Number of attributes of settings read so far."""


def note_reads(cls: type, keys: Iterable[str], notes: Notes) -> list[Patch]:
    """Patch a class so that `notes` sees which attributes of its instances are read.

    For settings also reads of all attributes at once, and reads in ways that cannot be seen, which count as all.
    """
    reads_by_itself = any("__getattribute__" in vars(c) for c in cls.__mro__ if c is not object)
    get, reduce = _own_or_next(cls, "__getattribute__"), _own_or_next(cls, "__reduce_ex__")

    def read(self: Any, name: str) -> Any:
        kind = notes.watches(self)
        if kind != "settings":
            if kind:
                notes.note(self, name)
            return get(self, name)
        if name == "__dict__":
            notes.note_all(self)
        count = notes.count()
        value = get(self, name)
        is_unseen = reads_by_itself and notes.count() == count
        if is_unseen and (name in object.__getattribute__(self, "__dict__") or not hasattr(cls, name)):
            notes.note_all(self)
        return value

    def reduced(self: Any, protocol: Any) -> Any:  # a copy reads all, and not through the others
        notes.note_all(self)
        return reduce(self, protocol)

    patches = [Patch(cls, "__getattribute__", functools.partial(_instead, read))]
    if cls is not nn.Module:
        patches.append(Patch(cls, "__reduce_ex__", functools.partial(_instead, reduced)))
    return patches + note_keys(cls, keys, notes)


def note_keys(cls: type, keys: Iterable[str], notes: Notes) -> list[Patch]:
    """Put noting descriptors in the place of those `keys` of a class whose values stand in instances."""
    found = []
    for key in keys:
        if not hasattr(type(inspect.getattr_static(cls, key, None)), "__set__"):  # else its value is not there
            noted = _Noted(cls, key, notes)
            found.append(Patch(cls, key, functools.partial(_instead, noted)))
    return found


def _instead(ours: Any, theirs: Any) -> Any:
    return ours


def _own_or_next(cls: type, name: str) -> Callable[..., Any]:
    """A method of a class as it is now, or the next one in the caller's method resolution order."""
    own = vars(cls).get(name)
    return own if own is not None else lambda self, *given: getattr(super(cls, self), name)(*given)


class _Noted:
    """Descriptor that notes reads of one attribute of settings.

    Whichever way a class of settings leads to its value - other names, properties, a `__getattribute__` - it ends here.
    """

    def __init__(self, cls: type, key: str, notes: Notes) -> None:
        self.key = key
        self.notes = notes
        self.of_class = inspect.getattr_static(cls, key, NOTHING)

    def __get__(self, held: Any, cls: type | None = None) -> Any:
        if held is not None:
            self.notes.note(held, self.key)
            if self.key in (values := object.__getattribute__(held, "__dict__")):
                return values[self.key]
        if self.of_class is NOTHING:
            raise AttributeError(f"{cls} has no attribute {self.key!r}")
        return self.of_class.__get__(held, cls) if hasattr(type(self.of_class), "__get__") else self.of_class

    def __set__(self, held: Any, value: Any) -> None:
        object.__getattribute__(held, "__dict__")[self.key] = value

    def __delete__(self, held: Any) -> None:
        try:
            del object.__getattribute__(held, "__dict__")[self.key]
        except KeyError as e:
            raise AttributeError(self.key) from e


Replacing = Callable[[Any], Any]  # takes the original, returns its replacement
ReplacingByName = Callable[[str, Any], Any]

OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside the block; the very object that stood there is put back."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def answered(function: Any, replacing: Replacing) -> Iterator[None]:
    """Replace what a Python function does, also for callers that have imported it by name.

    They hold the function itself, and so does what torch.compile made of it: another attribute of its module would not
    reach them, so its code is replaced. A function that is not of Python, or is made inside another one, stays.
    """
    answer = _answer_for(function)
    if answer is None:
        yield
        return
    code = function.__code__
    defaults = function.__kwdefaults__
    held = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    original = types.FunctionType(code, *held)
    original.__kwdefaults__ = defaults
    original.__annotations__ = function.__annotations__
    function.__kwdefaults__ = {**(defaults or {}), "autopar_answers": replacing(original)}
    function.__code__ = answer.__code__
    try:
        yield
    finally:
        function.__code__ = code
        function.__kwdefaults__ = defaults


def _answer(*args: Any, autopar_answers: Any, **kwargs: Any) -> Any:
    return autopar_answers(*args, **kwargs)


class _Method:
    """Holds the answer for a method that calls `super()`: its code closes over a class, as its replacement must."""

    @staticmethod
    def answer(*args: Any, autopar_answers: Any, **kwargs: Any) -> Any:
        super  # noqa: B018 - the name alone closes over the class
        return autopar_answers(*args, **kwargs)


def _answer_for(function: Any) -> Any:
    """The function whose code can take the place of this one's, or None."""
    if not isinstance(function, types.FunctionType):
        return None
    return {(): _answer, ("__class__",): _Method.answer}.get(function.__code__.co_freevars)


def function_apply(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.autograd.Function.apply`, whose call no mode of torch sees.

    What `f = MyFunction.apply` holds is reached, too; from torch 2.14 on, where it is a method of C, it is not.
    """
    held = vars(torch.autograd.Function)["apply"]
    if _answer_for(getattr(held, "__func__", None)) is not None:
        return answered(held.__func__, replacing)

    def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return held.__get__(None, cls)(*args, **kwargs)

    return patched(torch.autograd.Function, "apply", classmethod(replacing(original)))


def clear_autocast_cache(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.clear_autocast_cache`: nothing else says that an autocast region has ended."""
    return patched(torch, "clear_autocast_cache", replacing(torch.clear_autocast_cache))


def checkpoint_generator(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace the generator around the body of a non-reentrant checkpoint, to know its ops.

    Private: `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, torch 2.11 to 2.13; the one that it calls
    since 2.14, whose name ends in `_impl` and which checkpoints call themselves.
    """
    name = "_checkpoint_without_reentrant_generator"
    name = name if not hasattr(checkpoints, f"{name}_impl") else f"{name}_impl"
    return patched(checkpoints, name, replacing(getattr(checkpoints, name)))


def saved_tensors_hooks(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.autograd.graph.saved_tensors_hooks.__enter__`: a graph cannot hold such hooks."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    return patched(hooks, "__enter__", replacing(hooks.__enter__))


def batch_norm(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace the forward of batch norms: with momentum=None it reads the number of batches so far."""
    return patched(_BatchNorm, "forward", replacing(_BatchNorm.forward))


def gamma_rsample(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `Gamma.rsample`: it writes through a detached view."""
    return patched(Gamma, "rsample", replacing(Gamma.rsample))


@contextlib.contextmanager
def seeding(replacing: ReplacingByName) -> Iterator[None]:
    """Replace the functions that seed or set torch's generator, as a graph would not do so."""
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
    """Replace the draws of `random` and `numpy.random`, which would be frozen into the graph."""
    about_state = ("getstate", "setstate", "seed", "get_state", "set_state")
    owners: list[Any] = [random, sys.modules.get("numpy.random")]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            for name in owner.__all__ if owner is not None else ():
                value = getattr(owner, name)
                if callable(value) and not isinstance(value, type) and name not in about_state:
                    stack.enter_context(patched(owner, name, replacing(f"{owner.__name__}.{name}", value)))
        yield


def parametrizations_write_nothing() -> contextlib.AbstractContextManager[None]:
    """Let a parametrization that forward registers not set its tensor to itself, which would be a write.

    Private: `torch.nn.utils.parametrize._maybe_set`, torch 2.11 to 2.14.
    """

    def replacing(original: Any) -> Any:
        return lambda dest, src: None if dest is src else original(dest, src)

    return patched(parametrize, "_maybe_set", replacing(parametrize._maybe_set))


@contextlib.contextmanager
def transformers_masks(is_tracing: Replacing, find_documents: Replacing, mask: Replacing) -> Iterator[None]:
    """Replace the questions of transformers' mask code, and each function that makes masks.

    Private: `transformers.masking_utils.is_tracing` and `find_packed_sequence_indices`, and
    `transformers.utils.generic.GeneralInterface.__getitem__`, transformers 5.
    """
    module = sys.modules.get("transformers.masking_utils")
    if module is None:
        yield
        return
    interface = module.GeneralInterface
    look_up = interface.__getitem__

    def looked_up(self: Any, key: Any) -> Any:
        found = look_up(self, key)
        return mask(found) if isinstance(self, module.AttentionMaskInterface) else found

    with (
        patched(module, "is_tracing", is_tracing(module.is_tracing)),
        patched(module, "find_packed_sequence_indices", find_documents(module.find_packed_sequence_indices)),
        patched(interface, "__getitem__", looked_up),
    ):
        yield


def transformers_attention(replacing: Callable[[Any, bool], Any]) -> contextlib.AbstractContextManager[None]:
    """Replace attention functions of transformers; `replacing` is told of a model's own one.

    Private: `transformers.modeling_utils.AttentionInterface.get_interface`, transformers 5.
    """
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return contextlib.nullcontext()
    interface = module.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, implementation: Any, default: Any) -> Any:
        found = original(self, implementation, default)
        return replacing(found, found is default)

    return patched(interface, "get_interface", get_interface)


def transformers_experts(replacing: Any) -> contextlib.AbstractContextManager[None]:
    """Let experts of transformers run `replacing(original)`, whatever implementation is set.

    Private: `transformers.integrations.moe.ExpertsInterface.get_interface`, transformers 5.
    """
    module = sys.modules.get("transformers.integrations.moe")
    if module is None:
        return contextlib.nullcontext()
    found = module.ExpertsInterface
    return patched(found, "get_interface", replacing(found.get_interface))


def transformers_cache_nothing() -> contextlib.AbstractContextManager[None]:
    """Let transformers' method caches believe that torch.compile runs, so that they keep no fake tensors.

    Private: `transformers.pytorch_utils.is_torchdynamo_compiling`, transformers 5.
    """
    return _patched_if_imported("transformers.pytorch_utils", "is_torchdynamo_compiling", lambda: True)


@contextlib.contextmanager
def without_override_checks(is_wanted: bool) -> Iterator[None]:
    """Let `torch.overrides` say inside the block that nothing is overridden, where `is_wanted`.

    A function of torch.nn.init asks it, and would hand itself over again. Lasts as long as one call of it.
    """
    with contextlib.ExitStack() as stack:
        for check in OVERRIDE_CHECKS if is_wanted else ():
            stack.enter_context(patched(torch.overrides, check, lambda *_: False))
        yield


def fake_errors_told_once() -> contextlib.AbstractContextManager[None]:
    """Silence the log of fake tensors: torch logs an op's error with its whole stack, and then raises it.

    Private: the logger's name, `torch._subclasses.fake_tensor`.
    """
    return logged_from("torch._subclasses.fake_tensor", logging.CRITICAL)


@contextlib.contextmanager
def logged_from(name: str, level: int) -> Iterator[None]:
    """Drop messages of a logger below a level, inside the block."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def _patched_if_imported(module: str, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    owner = sys.modules.get(module)
    return patched(owner, name, value) if owner is not None else contextlib.nullcontext()


def transformers_in_two_groups() -> contextlib.AbstractContextManager[None]:
    """Let a Trainer group parameters by weight decay alone: a checkpoint has the groups of one device.

    It would make groups of each mesh. Private: `transformers.trainer.has_mixed_dtensor`, transformers 5.
    """
    module = sys.modules.get("transformers.trainer")
    if not hasattr(module, "has_mixed_dtensor"):
        return contextlib.nullcontext()
    return patched(module, "has_mixed_dtensor", lambda tensors: False)
