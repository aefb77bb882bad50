"""What autopar replaces in torch from the first parallel model on, and how it is put back.

    what                                    why
    DTensor's handler of GradScaler's op    all ranks skip a step together, or none
    DTensor's handler of _is_any_true       detect_anomaly checks gradients that are DTensors
    DTensor's handler of item(), methods    reads of a part, and writes to one, are reads of, and writes to, the whole
      that read, view and write, data,        tensor
      methods of Tensor that add in place
    DTensor's sums of norms                 they are wrong (`pending_norms.py`)
    DTensor's search for conversions        torch 2.11 converts no dim that is cut by blocks
    DTensor.__create_write_items__, ...     checkpoints of dims that are cut by blocks
    DTensor.__reduce_ex__                   pickling one rank's part is an error
    torch.save                              the error comes before a file is opened; whole tensors are written plain
    DDP.__init__, FSDP.__init__,            a wrapper around a parallel model is an error
      fully_shard's look at parameters
    Optimizer.zero_grad, p.grad = None      gradients that wait are dropped with the others
    a hook before Optimizer.step            a step while gradients wait is an error
    nn.init.eye_, nn.init.orthogonal_, ...  they take no DTensors

Each first asks whether the object is a parallel model's (`owned_meshes.is_ours`) and else does what torch does; the
search for conversions asks whether torch's would be an error. These
patches begin with the first parallel model and end with `STANDING.undo()`. A patch that somebody else has put on top of
one of these stays when it is undone. Those that last a while are in `brief_patches.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor, _dtensor_spec, _redistribute
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime.owned_meshes import is_ours

NOTHING = object()


class Patch:
    """A replaced attribute of a class or module, or entry of a dict.

    `make(theirs)` gives the replacement; `theirs` is None where there is nothing to replace.
    """

    def __init__(self, owner: Any, name: Any, make: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.name = name
        self.before = self._entries().get(name, NOTHING)  # the owner's own: what is inherited stays where it is
        inherited = None if isinstance(owner, dict) else inspect.getattr_static(owner, name, None)
        self.ours = make(inherited if self.before is NOTHING else self.before)
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
        if self.before is not NOTHING:
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
    another is cut, or lies on another stage, ranks would diverge.
    """

    def make(theirs: Any) -> Any:
        def ours(op_call: Any, args: Any, kwargs: Any) -> None:
            gradients, found, *scale = args
            if not is_ours(gradients[0]):
                theirs(op_call, args, kwargs)
                return
            op_call([getattr(g, "_local_tensor", g) for g in gradients], found, *scale, **kwargs)
            dist.all_reduce(found, dist.ReduceOp.MAX)

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


def answer_across_meshes(answer: Callable[[Any, Any, Any], Any]) -> None:
    """Let `answer` give the result of an op that DTensor is asked for the first time, or NotImplemented.

    Operands on several meshes are never asked for by a known name, as that is an error in torch.
    """

    def make(theirs: Any) -> Any:
        def ours(self: Any, op_call: Any, args: Any, kwargs: Any, *more: Any, **how: Any) -> Any:
            found = answer(op_call, args, kwargs)
            return theirs(self, op_call, args, kwargs, *more, **how) if found is NotImplemented else found

        return ours

    STANDING.put(type(DTensor._op_dispatcher), "_propagate_op_sharding_dispatch_slow_path", make)


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


# -- conversions


def convert_blocks() -> None:
    """Let torch 2.11 convert dims that are cut by blocks of one size, as later ones do.

    Its search reads such blocks as an order of axes, and ends in an error where they are none; going through the axes
    one by one is right for them.
    """
    if hasattr(_dtensor_spec, "_StridedShardNotDecodableError"):  # torch catches it itself
        return

    def is_order(spec: Any) -> bool:
        if not spec.use_strided_shard_as_shard_order:
            return True
        return spec._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh) is not None

    def make(theirs: Any) -> Any:
        def ours(self: Any, source: Any, target: Any, shape: Any) -> Any:
            if is_order(source) and is_order(target):
                return theirs(self, source, target, shape)
            return self.generate_greedy_transform_infos(source, target)

        return ours

    STANDING.put(_redistribute.DTensorRedistributePlanner, "generate_graph_based_transform_infos", make)


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
    """Let `as_plain` replace a DTensor operand of plain tensors' methods that write in place."""
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


def replace_property(
    name: str, put: Callable[[DTensor, Any, Callable[[Any], None]], None], look: Callable[[DTensor], None] | None = None
) -> None:
    """Let `put` set a property of DTensor, or delete it: set it to None; it is passed torch's setter.

    `look` is called before the property is read.
    """

    def make(theirs: Any) -> Any:
        def get(self: DTensor) -> Any:
            if look is not None:
                look(self)
            return theirs.__get__(self)

        def set_(self: DTensor, value: Any) -> None:
            put(self, value, functools.partial(theirs.__set__, self))

        def delete(self: DTensor) -> None:
            put(self, None, lambda _: theirs.__delete__(self))

        return property(get, set_, delete)

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


def answer_pickling(pickled: Callable[[DTensor], Tensor]) -> None:
    """Let `pickled` give the tensor that is pickled for one of a parallel model: itself, or another."""

    def make(theirs: Any) -> Any:
        def reduced(self: DTensor, protocol: Any) -> Any:
            instead = pickled(self) if is_ours(self) else self
            return theirs(self, protocol) if instead is self else instead.__reduce_ex__(protocol)

        return reduced

    STANDING.put(DTensor, "__reduce_ex__", make)


def around_torch_save(block: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    """Enter `block` of what torch.save is given, before it opens a file."""

    def make(theirs: Any) -> Any:
        @functools.wraps(theirs)
        def save(obj: Any, *args: Any, **how: Any) -> None:
            with block(obj):
                theirs(obj, *args, **how)

        return save

    for module in (torch, torch.serialization):
        STANDING.put(module, "save", make)


def answer_checkpoints(is_asked: Callable[[DTensor], bool], answers: Mapping[str, Callable[..., Any]]) -> None:
    """Let these methods of DTensor answer for tensors of parallel models for which `is_asked`."""
    for name, answer in answers.items():
        STANDING.put(DTensor, name, functools.partial(_answered, is_asked, answer))


def _answered(is_asked: Callable[[DTensor], bool], answer: Callable[..., Any], theirs: Any) -> Any:
    @functools.wraps(theirs)
    def ours(self: DTensor, *given: Any) -> Any:
        return answer(self, *given) if is_ours(self) and is_asked(self) else theirs(self, *given)

    return ours
