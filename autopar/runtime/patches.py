"""Everything in torch that autopar replaces, and how it is put back.

    what                                    why                                                     how long
    DTensor's handler of GradScaler's op    all ranks skip a step together, or none                 standing
    DTensor's handler of _is_any_true       detect_anomaly checks gradients that are DTensors       standing
    DTensor's handler of item(), methods    reads of a part, and writes to one, are reads of, and   standing
      that read, view and write, data,        writes to, the whole tensor
      methods of Tensor that add in place
    DTensor.__create_write_items__, ...     checkpoints of dims that are cut by blocks              standing
    DTensor.__reduce_ex__                   pickling one rank's part is an error                    standing
    DDP.__init__, FSDP.__init__,            a wrapper around a parallel model is an error           standing
      fully_shard's look at parameters
    Optimizer.zero_grad, p.grad = None      gradients that wait are dropped with the others         standing
    a hook before Optimizer.step            a step while gradients wait is an error                 standing
    nn.Module.__getattribute__              reads of modules are noted: what a model's forward      while a thread
      and attributes of settings              does not read cannot matter to it                       captures a model
    nn.init.eye_, nn.init.orthogonal_, ...  they take no DTensors                                   standing
    nn.init.orthogonal_, nn.init.sparse_    on meta they do nothing, and must be noticed            while recipes run
                                                                                                      on meta

Each first asks whether the object is a parallel model's (`owned_meshes.is_ours`, or the models and threads that asked
for it) and else does what torch does. Standing patches begin with the first parallel model and end with
`STANDING.undo()`. A patch that somebody else has put on top of one of these stays when it is undone.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor
from torch.distributions.gamma import Gamma
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime.owned_meshes import is_ours

_NOTHING = object()


class Patch:
    """A replaced attribute of a class or module, or entry of a dict.

    `make(theirs)` gives the replacement; `theirs` is None where there is nothing to replace.
    """

    def __init__(self, owner: Any, name: Any, make: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.name = name
        self.before = self._entries().get(name, _NOTHING)  # the owner's own: what is inherited stays where it is
        inherited = None if isinstance(owner, dict) else inspect.getattr_static(owner, name, None)
        self.ours = make(inherited if self.before is _NOTHING else self.before)
        self._put(self.ours)

    def _entries(self) -> Mapping[Any, Any]:
        return self.owner if isinstance(self.owner, dict) else vars(self.owner)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def undo(self) -> None:
        """Put back the original, unless somebody has replaced it again since."""
        if self._entries().get(self.name) is not self.ours:
            return
        if self.before is not _NOTHING:
            self._put(self.before)
        elif isinstance(self.owner, dict):
            del self.owner[self.name]
        else:
            delattr(self.owner, self.name)  # inherited, as it was


class Patches:
    """Patches that begin and end together, each applied once."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, Any], Patch | StepHook] = {}

    def put(self, owner: Any, name: Any, make: Callable[[Any], Any]) -> None:
        """Patch it, unless that is done already."""
        if (id(owner), name) not in self.known:
            self.known[id(owner), name] = Patch(owner, name, make)

    def undo(self) -> None:
        """Undo all patches, the last first."""
        while self.known:
            self.known.popitem()[1].undo()


STANDING = Patches()
_STEPS = 0, "before steps"


# -- gradients


def skip_together() -> None:
    """Let GradScaler skip a step on all ranks of a parallel model's mesh where one has found an inf.

    torch 2.13 reduces the finding over the axes that cut the first gradient of the list: where that is a copy and
    another is cut, ranks would diverge.
    """

    def make(theirs: Any) -> Any:
        def ours(op_call: Any, args: Any, kwargs: Any) -> None:
            theirs(op_call, args, kwargs)
            if is_ours(args[0][0]):
                mesh = args[0][0].device_mesh
                for axis in range(mesh.ndim):
                    dist.all_reduce(args[1], dist.ReduceOp.MAX, group=mesh.get_group(axis))

        return ours

    STANDING.put(handlers(), torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, make)


def let_anomalies_be_looked_for() -> None:
    """Let torch.autograd.detect_anomaly check this rank's part of a parallel model's gradients.

    torch 2.13 has no sharding rule for the op that it uses.
    """

    def make(theirs: Any) -> Any:
        def ours(op_call: Any, args: Any, kwargs: Any) -> Any:
            if is_ours(args[0]):
                return op_call(args[0]._local_tensor)
            if theirs is None:
                raise NotImplementedError(f"Operator {op_call} does not have a sharding strategy registered.")
            return theirs(op_call, args, kwargs)

        return ours

    STANDING.put(handlers(), torch.ops.aten._is_any_true.default, make)


def handlers() -> dict[Any, Any]:
    """The table of ops that DTensor passes to handlers of their own."""
    return DTensor._op_dispatcher._custom_op_handlers


def after_zero_grad(forget: Callable[[list[Tensor]], None]) -> None:
    """Call `forget` with the parameters of parallel models whose gradients an optimizer has zeroed."""

    def make(theirs: Any) -> Any:
        @functools.wraps(theirs)
        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            theirs(self, set_to_none)
            parameters = [p for group in self.param_groups for p in group["params"] if is_ours(p)]
            if parameters:
                forget(parameters)

        return zero_grad

    STANDING.put(torch.optim.Optimizer, "zero_grad", make)


class StepHook:
    """A hook that torch calls before each step of any optimizer, put back as a patch is."""

    def __init__(self, look: Callable[[list[Tensor]], None]) -> None:
        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if any(given is not None for given in (*args[1:], *kwargs.values())):
                return  # a closure has the last backward before the step in it
            parameters = [p for group in optimizer.param_groups for p in group["params"] if is_ours(p)]
            if parameters:
                look(parameters)

        self.undo = register_optimizer_step_pre_hook(before).remove


def before_steps(look: Callable[[list[Tensor]], None]) -> None:
    """Call `look` with the parameters of parallel models that an optimizer is about to step."""
    if _STEPS not in STANDING.known:
        STANDING.known[_STEPS] = StepHook(look)


# -- reads and writes


def answer_reads(number: Callable[[DTensor], Any]) -> None:
    """Let `number` read scalar DTensors of parallel models: for item(), float(), bool() and comparisons."""

    def make(theirs: Any) -> Any:
        def ours(op_call: Any, args: Any, kwargs: Any) -> Any:
            if is_ours(args[0]):
                return number(args[0])
            return op_call(args[0]._local_tensor) if theirs is None else theirs(op_call, args, kwargs)

        return ours

    STANDING.put(handlers(), torch.ops.aten._local_scalar_dense.default, make)


_DRAWS_LIKE: dict[Any, Callable[..., Tensor]] = {  # ops by which others draw the same on a tensor that is made first
    torch.ops.aten.randn_like.default: lambda x: torch.empty_like(x).normal_(),
    torch.ops.aten.rand_like.default: lambda x: torch.empty_like(x).uniform_(),
    torch.ops.aten.randint_like.default: lambda x, high: torch.empty_like(x).random_(0, high),
    torch.ops.aten.randint_like.low_dtype: lambda x, low, high: torch.empty_like(x).random_(low, high),
    torch.ops.aten.bernoulli.default: lambda x: torch.empty_like(x).bernoulli_(x),
    torch.ops.aten.bernoulli.p: lambda x, p: torch.empty_like(x).bernoulli_(p),
}


def answer_draws(draw: Callable[..., Tensor]) -> None:
    """Let `draw` answer ops that draw numbers like a DTensor of a parallel model; it is passed the op."""
    for op, otherwise in _DRAWS_LIKE.items():

        def make(theirs: Any, op: Any = op, otherwise: Callable[..., Tensor] = otherwise) -> Any:
            def ours(op_call: Any, args: Any, kwargs: Any) -> Any:
                if is_ours(args[0]):
                    return draw(op, *args, **kwargs)
                return otherwise(*args) if theirs is None else theirs(op_call, args, kwargs)

            return ours

        STANDING.put(handlers(), op, make)


def replace_methods(names: Iterable[str], make: Callable[[str, Any], Any]) -> None:
    """Replace methods of DTensor by what `make` gives for a name and torch's method."""
    for name in names:

        def made(theirs: Any, name: str = name) -> Any:
            return functools.wraps(theirs)(make(name, theirs))

        STANDING.put(DTensor, name, made)


def before_adding_to_plain(names: Iterable[str], as_plain: Callable[[Any], Any]) -> None:
    """Let `as_plain` turn the operand of a plain tensor's method that writes in place, where it is a DTensor."""
    for name in names:

        def make(theirs: Any) -> Any:
            @functools.wraps(theirs)
            def ours(self: Tensor, other: Any, *args: Any, **how: Any) -> Any:
                if isinstance(other, DTensor) and not isinstance(self, DTensor):
                    other = as_plain(other)
                return theirs(self, other, *args, **how)

            return ours

        STANDING.put(Tensor, name, make)


def begin_as_whole(is_asked: Callable[[Tensor], bool], begin: Callable[..., Any]) -> None:
    """Let `begin` initialise tensors where torch's function takes no DTensor; it is passed that function."""

    def make(theirs: Any) -> Any:
        @functools.wraps(theirs)
        def ours(tensor: Tensor, *args: Any, **how: Any) -> Tensor:
            return begin(theirs, tensor, *args, **how) if is_asked(tensor) else theirs(tensor, *args, **how)

        return ours

    for name in ("eye_", "dirac_", "orthogonal_", "sparse_"):
        STANDING.put(nn.init, name, make)


def replace_property(name: str, put: Callable[[DTensor, Any, Callable[[Any], None]], None]) -> None:
    """Let `put` set a property of DTensor; it is passed torch's setter."""

    def make(theirs: Any) -> Any:
        def get(self: DTensor) -> Any:
            return theirs.__get__(self)

        def set_(self: DTensor, value: Any) -> None:
            put(self, value, functools.partial(theirs.__set__, self))

        return property(get, set_)

    STANDING.put(DTensor, name, make)


# -- wrappers and files


def before_wrapping(wrapper: type[nn.Module], look: Callable[[Tensor, str], None]) -> None:
    """Call `look` with a parameter of a parallel model before a wrapper is put around it."""

    def make(theirs: Any) -> Any:
        @functools.wraps(theirs)
        def init(self: nn.Module, module: nn.Module, *args: Any, **how: Any) -> None:
            if isinstance(module, nn.Module):
                _show_first(module.parameters(), look, wrapper.__name__)
            theirs(self, module, *args, **how)

        return init

    STANDING.put(wrapper, "__init__", make)


def before_fully_shard(look: Callable[[Tensor, str], None]) -> None:
    """Call `look` with a parameter of a parallel model before fully_shard takes it.

    What is patched is the function by which fully_shard collects parameters, as users hold fully_shard itself.
    """

    def make(theirs: Any) -> Any:
        def ours(*args: Any, **how: Any) -> Any:
            parameters, buffers = theirs(*args, **how)
            _show_first(parameters, look, "fully_shard")
            return parameters, buffers

        return ours

    for module in (_fsdp_init, _fully_shard):
        if hasattr(module, "_get_managed_states"):
            STANDING.put(module, "_get_managed_states", make)


def _show_first(parameters: Iterable[Tensor], look: Callable[[Tensor, str], None], wrapper: str) -> None:
    first = next(filter(is_ours, parameters), None)
    if first is not None:
        look(first, wrapper)


def before_pickling(look: Callable[[DTensor], None]) -> None:
    """Call `look` with a tensor of a parallel model before it is pickled or copied."""

    def make(theirs: Any) -> Any:
        def reduced(self: DTensor, protocol: Any) -> Any:
            if is_ours(self):
                look(self)
            return theirs(self, protocol)

        return reduced

    STANDING.put(DTensor, "__reduce_ex__", make)


def answer_checkpoints(is_asked: Callable[[DTensor], bool], answers: Mapping[str, Callable[..., Any]]) -> None:
    """Let these methods of DTensor answer for tensors of parallel models for which `is_asked`."""
    for name, answer in answers.items():
        STANDING.put(DTensor, name, functools.partial(_answered, is_asked, answer))


def _answered(is_asked: Callable[[DTensor], bool], answer: Callable[..., Any], theirs: Any) -> Any:
    @functools.wraps(theirs)
    def ours(self: DTensor, *given: Any) -> Any:
        return answer(self, *given) if is_ours(self) and is_asked(self) else theirs(self, *given)

    return ours


# -- for a while


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
        self.of_class = inspect.getattr_static(cls, key, _NOTHING)

    def __get__(self, held: Any, cls: type | None = None) -> Any:
        if held is not None:
            self.notes.note(held, self.key)
            if self.key in (values := object.__getattribute__(held, "__dict__")):
                return values[self.key]
        if self.of_class is _NOTHING:
            raise AttributeError(f"{cls} has no attribute {self.key!r}")
        return self.of_class.__get__(held, cls) if hasattr(type(self.of_class), "__get__") else self.of_class

    def __set__(self, held: Any, value: Any) -> None:
        object.__getattribute__(held, "__dict__")[self.key] = value

    def __delete__(self, held: Any) -> None:
        try:
            del object.__getattribute__(held, "__dict__")[self.key]
        except KeyError as e:
            raise AttributeError(self.key) from e


Replacing = Callable[[Any], Any]  # from the original to what stands in its place
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


def function_apply(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.autograd.Function.apply`, whose call no mode of torch sees."""
    held = vars(torch.autograd.Function)["apply"]  # a classmethod, from torch 2.14 on one of C

    def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return held.__get__(None, cls)(*args, **kwargs)

    return patched(torch.autograd.Function, "apply", classmethod(replacing(original)))


def clear_autocast_cache(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace `torch.clear_autocast_cache`: nothing else says that an autocast region has ended."""
    return patched(torch, "clear_autocast_cache", replacing(torch.clear_autocast_cache))


def checkpoint_generator(replacing: Replacing) -> contextlib.AbstractContextManager[None]:
    """Replace the generator around the body of a non-reentrant checkpoint, to know its ops.

    Private: `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, torch 2.11 to 2.13.
    """
    name = "_checkpoint_without_reentrant_generator"
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


def transformers_look_at_masks() -> contextlib.AbstractContextManager[None]:
    """Let transformers' mask code believe that nobody traces, so that it drops masks of ones.

    Private: `transformers.masking_utils.is_tracing`, transformers 5.
    """
    return _patched_if_imported("transformers.masking_utils", "is_tracing", lambda *_: False)


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
