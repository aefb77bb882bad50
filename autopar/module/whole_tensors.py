"""Let a user's loop read and write parameters, gradients and cut outputs as if they were whole tensors.

    p.grad.norm().item()      a number is that of the whole tensor, not of this rank's part; so are numpy() and tolist()
    p[9].zero_()              torch gives a copy of a row where the dim is cut: what is written to it is written to p
    p[9] = 0                  written to the part of each rank
    p.copy_(x), p.data = x    x may be whole: each rank takes its part
    loss + 0.1 * p.norm()     a plain number beside one of a parameter is one that all ranks have

Each of these may communicate, so all ranks must run the same lines: a rank that runs one alone gets a letter after a
timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree

from autopar.letters import NotServed
from autopar.module.checkpoint import whole
from autopar.module.far_tensors import across_meshes, are_apart, from_where_it_lies, is_view_of, read_whole
from autopar.module.storage import Storage
from autopar.runtime.faults import naming_the_lost
from autopar.runtime.owned_meshes import far_of, is_ours
from autopar.runtime.patches import (
    answer_across_meshes,
    answer_draws,
    answer_reads,
    before_adding_to_plain,
    begin_as_whole,
    replace_methods,
    replace_property,
)
from autopar.runtime.pending_norms import let_norms_be_summed
from autopar.runtime.private import hold_part, like_part, local_part, without_subclass_functions

_READS = ("numpy", "tolist", "__array__", "__format__")
_VIEWS = tuple(
    "__getitem__ select narrow split chunk unbind view view_as reshape flatten unflatten diagonal t transpose permute "
    "unsqueeze squeeze movedim swapaxes swapdims expand detach".split()
)
# Methods that give a new tensor, which DTensor computes for some placements alone, or not at all.
_COMPUTED = tuple(
    "index_select gather take take_along_dim masked_select nonzero argwhere unique unique_consecutive renorm tril triu "
    "addr unfold quantile nanquantile median kthvalue allclose bincount histc searchsorted bucketize".split()
)
_STAY = frozenset(  # they end in an underscore, and write no number
    "detach_ requires_grad_ rename_ retains_grad_ share_memory_ resize_ resize_as_ sparse_resize_ set_ swapaxes_ "
    "swapdims_ squeeze_ unsqueeze_ t_ transpose_".split()
)
_DRAWS = frozenset("normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_".split())
_CALLED = frozenset("apply_ map_ map2_".split())  # they call a function of the user's on each element
_WRITES = tuple(
    name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _STAY
) + tuple(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split())
_OPERATORS = tuple(
    f"__{name}__"
    for name in "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv pow matmul and or xor".split()
) + tuple("add sub mul div".split())
_SHIFTS = ("add", "radd", "sub", "rsub")  # a pending sum takes the number once, and not in each of its parts
_IN_PLACE = tuple(f"__i{name}__" for name in "add sub mul truediv".split()) + tuple("add_ sub_ mul_ div_".split())
_ABOUT = frozenset("dim size stride numel element_size is_floating_point is_complex storage_offset __len__".split())
_PIECE = "_autopar_piece"
_NOT_OF_DTENSOR = (torch.OutOfMemoryError, dist.DistError)  # errors that do not say that DTensor lacks an op


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A copy that torch has made where eager has a view: `look` gives it from the whole of `base`."""

    base: DTensor
    look: Callable[[Tensor], Tensor]


def read_and_write_as_whole() -> None:
    """Patch DTensor so that those of parallel models are read and written as whole tensors."""
    let_norms_be_summed()
    answer_reads(_number)
    answer_draws(_drawn_like)
    replace_methods(_READS, _read)
    replace_methods(_VIEWS, _looked_at)
    replace_methods(_COMPUTED, _computed)
    replace_methods(_WRITES, _written)
    replace_methods(_OPERATORS, _met)
    before_adding_to_plain(_IN_PLACE, _as_plain)
    replace_methods(("full_tensor", "to_local"), _up_to_date)
    replace_methods(("__setitem__",), lambda name, theirs: _set_item)
    replace_methods(("share_memory_",), _shared_with_nobody)
    replace_property("data", _set_data)
    begin_as_whole(is_ours, _begin)
    answer_across_meshes(across_meshes)


def whole_of(tensor: DTensor) -> Tensor:
    """The tensor in full on every rank; raises a letter where other ranks do not join in."""
    _refresh(tensor)
    return _gathered(tensor)


def _gathered(tensor: DTensor) -> Tensor:
    """The tensor in full, as its parts are."""
    with naming_the_lost("a read of a parameter, a gradient or an output, which all ranks make"), torch.no_grad():
        parts = like_part(local_part(tensor), tensor)  # the same parts, without the base of a piece
        return whole(_reduced(parts))


def store(tensor: DTensor, full: Tensor, of_rank_0: bool = False) -> None:
    """Write the whole tensor, or that of rank 0: each rank its part, also to the base of a piece."""
    with torch.no_grad():
        _hold(tensor, Storage.like(tensor).take(full, of_rank_0).to_local())
    _hand_on(tensor)


def _hold(tensor: DTensor, part: Tensor) -> None:
    """Write this rank's part, if it has one."""
    if tensor.device_mesh.get_coordinate() is not None:
        local_part(tensor).copy_(_summand(part, tensor))


def _summand(part: Tensor, tensor: DTensor) -> Tensor:
    """This rank's share of a pending sum: all of it on the first rank of an axis, else zero."""
    for placement, place in zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True):
        if not isinstance(placement, Partial):
            continue
        if type(placement) is not Partial or placement.reduce_op not in ("sum", "avg", "max", "min"):
            raise NotServed(
                f"a tensor that is stored as {placement} is written to in place",
                advice="the form that returns a new tensor: x = x.clamp(max=1.0)",
            )
        if placement.reduce_op == "sum" and place:
            part = torch.zeros_like(part)
    return part


def _number(tensor: DTensor) -> Any:
    return whole_of(tensor).item()


def _read(name: str, theirs: Any) -> Any:
    def read(self: DTensor, *args: Any, **how: Any) -> Any:
        if not is_ours(self):
            return theirs(self, *args, **how)
        if self.requires_grad and name in ("numpy", "__array__"):
            raise RuntimeError(
                f"Can't call {name}() on Tensor that requires grad. Use tensor.detach().{name}() instead."
            )
        if name == "__format__" and self.dim():
            return theirs(self, *args, **how)
        return getattr(whole_of(self), name)(*args, **how)

    return read


def _up_to_date(name: str, theirs: Any) -> Any:
    """A method of DTensor itself, of which a piece is what its base holds now."""
    if name == "full_tensor":
        theirs = from_where_it_lies(theirs)

    def give(self: DTensor, *args: Any, **how: Any) -> Any:
        _refresh(self)
        return theirs(self, *args, **how)

    return give


def _looked_at(name: str, theirs: Any) -> Any:
    """A method that views a tensor; where it copies, its result remembers the tensor that it comes from."""

    def look(self: DTensor, *args: Any, **how: Any) -> Any:
        try:
            made = theirs(self, *args, **how)
        except RuntimeError as e:
            if isinstance(e, _NOT_OF_DTENSOR) or not is_ours(self):
                raise
            if name == "__getitem__" and _copies(args[0]):
                return _of_the_whole(name, self, args, how)
            if not _is_cut(self):
                raise
            made = theirs(self.redistribute(placements=[Replicate()] * self.device_mesh.ndim), *args, **how)
        if (_piece_of(self) is None and not _is_cut(self)) or (name == "__getitem__" and _copies(args[0])):
            return made
        for place, one in enumerate(made) if isinstance(made, (tuple, list)) else ((None, made),):
            if isinstance(one, DTensor) and (_piece_of(self) is not None or not is_view_of(one, self)):
                _mark(one, _Piece(self, _looking(name, args, how, place)))
        return made

    return look


def _looking(name: str, args: Sequence[Any], how: Any, place: int | None) -> Callable[[Tensor], Tensor]:
    def look(full: Tensor) -> Tensor:
        seen = getattr(full, name)(*args, **how)
        return seen if place is None else seen[place]

    return look


def _computed(name: str, theirs: Any) -> Any:
    """A method that gives a new tensor: of the whole one where DTensor cannot compute it."""

    def compute(self: DTensor, *args: Any, **how: Any) -> Any:
        try:
            if far_of(self) is None:  # else ranks that hold nothing would meet no error
                return theirs(self, *args, **how)
        except RuntimeError as e:
            if not is_ours(self) or isinstance(e, _NOT_OF_DTENSOR):
                raise
        return _of_the_whole(name, self, args, how)

    return compute


def _of_the_whole(name: str, tensor: DTensor, args: Sequence[Any], how: Mapping[str, Any]) -> Any:
    """The result of a method of the whole tensor, on every rank, with gradients.

    Beside a plain tensor it is plain: ranks may have others. Its gradients would then be of this rank alone.
    """
    is_beside_a_plain_one = any(map(_is_plain, pytree.tree_leaves((args, how))))
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    if is_beside_a_plain_one and is_recorded:
        raise NotServed(
            f"{name} of a tensor of a parallel model and a plain one, with gradients: nothing says whether all ranks "
            "have that one",
            advice=f"x.full_tensor().{name}(...), where all ranks have it; x.detach(), where no gradient is wanted",
        )
    with naming_the_lost("a read of a parameter, a gradient or an output, which all ranks make"):
        full = tensor.full_tensor() if is_recorded else whole_of(tensor)
    made = getattr(full, name)(*map(_in_full, args), **{key: _in_full(value) for key, value in how.items()})
    if is_beside_a_plain_one:
        return made
    mesh = tensor.device_mesh
    return pytree.tree_map_only(Tensor, lambda x: _as_copies(x, mesh), made)


def _written(name: str, theirs: Any) -> Any:
    """A method that writes in place, also into the tensor that this one is a piece of.

    What DTensor cannot write to parts is written to the whole.
    """

    def write(self: DTensor, *args: Any, **how: Any) -> Any:
        if name == "copy_" and args and _is_plain(args[0]) and is_ours(self) and _may_write(self):
            store(self, args[0].to(self.device, self.dtype).expand(self.shape))
            return self
        if name in _DRAWS | _CALLED and is_ours(self) and _may_write(self):
            full = whole_of(self).clone()
            getattr(full, name)(*map(_in_full, args), **how)
            store(self, full, of_rank_0=name in _DRAWS)
            return self
        if _piece_of(self) is not None:
            _may_write(self)
        with _naming_a_plain_one(name, self, "x.copy_(x.full_tensor() * mask), for copy_ takes a tensor that is whole"):
            is_beside_a_plain_one = any(map(_is_plain, pytree.tree_leaves((args, how))))
            try:
                if is_beside_a_plain_one or not _is_pending(self):
                    return theirs(self, *args, **how)
            except RuntimeError as e:
                if isinstance(e, _NOT_OF_DTENSOR) or is_beside_a_plain_one or not (is_ours(self) and _may_write(self)):
                    raise
        full = whole_of(self).clone()
        getattr(full, name)(*map(_in_full, args), **{key: _in_full(value) for key, value in how.items()})
        store(self, full)
        return self

    return write


def _met(name: str, theirs: Any) -> Any:
    """A binary operator: a plain number is one that all ranks have, and a larger plain tensor a letter.

    DTensor takes plain numbers, too, but hands back gradients that are DTensors. It adds a number to each part of a
    pending sum where it has met a tensor of no dims before: the sum is made first.
    """

    def meet(self: DTensor, *args: Any, **how: Any) -> Any:
        if args and are_apart(self, args[0]):
            return getattr(self.full_tensor(), name)(read_whole(args[0]), *args[1:], **how)
        if args and not isinstance(args[0], DTensor) and is_ours(self):
            if _is_plain(args[0]) and not args[0].dim():
                args = (_as_copies(args[0].to(self.device), self.device_mesh), *args[1:])
            if name.strip("_") in _SHIFTS and any(p.is_partial() for p in self.placements):
                self = _reduced(self)
        with _naming_a_plain_one(name, self, 'outputs="full", for an output; x.full_tensor() on all ranks'):
            return theirs(self, *args, **how)

    return meet


def _reduced(tensor: DTensor) -> DTensor:
    """The tensor with its pending reductions made, with gradients."""
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _as_copies(plain: Tensor, mesh: Any) -> DTensor:
    """A plain tensor that all ranks have as a DTensor, through which gradients come back plain."""
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _as_plain(value: Any) -> Any:
    """A number of a parallel model as a plain one, for `loss += p.norm()`; anything else as it is."""
    if not isinstance(value, DTensor) or value.dim() or not is_ours(value):
        return value
    with naming_the_lost("a number of a parameter, a gradient or an output, which all ranks read"):
        return value.full_tensor()


@contextlib.contextmanager
def _naming_a_plain_one(name: str, tensor: DTensor, advice: str) -> Iterator[None]:
    """Replace torch's error about a DTensor and a plain tensor by a letter."""
    try:
        yield
    except RuntimeError as e:
        if "mixed torch.Tensor and DTensor" not in str(e) or not is_ours(tensor):
            raise
        raise NotServed(
            f"{name} of a tensor of a parallel model and a plain one: nothing says how that lies on the ranks",
            seen=f"{tuple(tensor.shape)}, stored as {tensor.placements}",
            advice=advice,
        ) from e


def _set_item(self: DTensor, index: Any, value: Any) -> None:
    theirs = super(DTensor, self).__setitem__
    if not is_ours(self) or not _may_write(self):
        theirs(index, value)
        return
    full = whole_of(self).clone()
    full[_in_full(index)] = _in_full(value)
    store(self, full)


def _set_data(tensor: DTensor, value: Any, theirs: Callable[[Any], None]) -> None:
    """Set `tensor.data`: the tensor holds another part from here on, and what held the old one keeps it.

    torch's own setter leaves a DTensor the part that it has.
    """
    alike = isinstance(value, Tensor) and _kind(value) == _kind(tensor)
    if not is_ours(tensor) or not alike:
        theirs(value)
    elif _piece_of(tensor) is not None or any(p.is_partial() for p in tensor.placements):
        store(tensor, _in_full(value))
    elif isinstance(value, DTensor) and value.placements == tensor.placements and _piece_of(value) is None:
        hold_part(tensor, local_part(value))
    else:
        hold_part(tensor, Storage.like(tensor).take(_in_full(value), False).to_local())


def _shared_with_nobody(name: str, theirs: Any) -> Any:
    def share(self: DTensor) -> DTensor:
        if is_ours(self):
            raise NotServed(
                "the memory of a parallel model's tensor is shared with other processes, and it is this rank's part",
                advice="autopar.gather(model), the plain model, for processes that read it",
            )
        shared: DTensor = theirs(self)
        return shared

    return share


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _begin(theirs: Callable[..., Any], tensor: DTensor, *args: Any, **how: Any) -> DTensor:
    """Apply a function of nn.init to the whole tensor, with rank 0's draws."""
    full = whole_of(tensor).clone()
    with torch.no_grad():
        theirs(full, *args, **how)
    store(tensor, full, of_rank_0=True)
    return tensor


def _drawn_like(op: Callable[..., Tensor], tensor: DTensor, *args: Any, **how: Any) -> Tensor:
    """The draws of rank 0 in the shape of a tensor of a parallel model, of which each rank takes its part."""
    return Storage.like(tensor).take(op(whole_of(tensor), *args, **how), True)


def _in_full(value: Any) -> Any:
    """A value with all its DTensors gathered, inside lists and tuples too."""
    if isinstance(value, DTensor):
        return whole_of(value)
    return type(value)(map(_in_full, value)) if type(value) in (tuple, list) else value


class PieceTensor(DTensor):
    """A piece of a cut tensor: every op on it, however it is called, finds and leaves it as a view in eager would be.

    Its values are those that its base holds now, and what is written to it is written to its base.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how = kwargs or {}
        name = getattr(op, "__name__", "")
        with without_subclass_functions():
            if name == "__get__" or name in _ABOUT:
                about = op(*args, **how)
                if getattr(op, "__self__", None) is Tensor.data:  # a piece of the piece, as large
                    _mark(about, _Piece(args[0], lambda full: full))
                return about
            for piece in _pieces_in((args, how)):
                _refresh(piece)
            made = op(*args, **how)
            for piece in _pieces_in(_written_by(name, args, how)):
                _hand_on(piece)
        return made


def _mark(one: DTensor, piece: _Piece) -> None:
    """Let a copy that torch has made be a piece of a tensor."""
    one.__dict__[_PIECE] = piece
    if type(one) is DTensor:
        one.__class__ = PieceTensor


def _pieces_in(values: Any) -> list[DTensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, PieceTensor)]


def _written_by(name: str, args: Sequence[Any], how: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes to, by its name: `add_`, `_foreach_mul_`, `constant_`, or by `out=`."""
    ends = name.endswith("_") and not name.startswith("__") and name not in _STAY
    first = args[0] if args else how.get("tensor", how.get("input"))
    return [first if ends or name in _WRITES or how.get("inplace") is True else None, how.get("out")]


def _refresh(tensor: DTensor) -> None:
    """Update a piece from its base, which may have been written since.

    A piece whose gradients are recorded stays as it is: backward may have kept its values.
    """
    piece = _piece_of(tensor)
    if piece is not None and not tensor.requires_grad:
        with torch.no_grad():
            seen = piece.look(whole_of(piece.base))
            _hold(tensor, Storage.like(tensor).take(seen, False).to_local())


def _hand_on(tensor: DTensor) -> None:
    """Write a piece back into its base."""
    piece = _piece_of(tensor)
    if piece is not None:
        written = _gathered(tensor).clone()  # before the base is, with which it may share memory
        full = whole_of(piece.base).clone()
        with torch.no_grad():
            piece.look(full).copy_(written)
        store(piece.base, full)


def _may_write(tensor: DTensor) -> bool:
    """Whether the tensor may be written in place; raises where eager does or gradients would be lost."""
    root = tensor
    while (piece := _piece_of(root)) is not None:
        root = piece.base
    if not (root.requires_grad and torch.is_grad_enabled()):
        return True
    if root.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad, or a view of one, is being used in an in-place operation."
        )
    raise NotServed(
        "a tensor of a parallel model is written to in place where gradients are recorded, and it is cut",
        advice="torch.where, or the form that returns a new tensor; inside the model any write is served",
    )


def _piece_of(tensor: Any) -> _Piece | None:
    return getattr(tensor, "__dict__", {}).get(_PIECE)


def _is_cut(tensor: DTensor) -> bool:
    return is_ours(tensor) and any(not p.is_replicate() for p in tensor.placements)


def _is_pending(tensor: DTensor) -> bool:
    """Whether it is a pending reduction of a parallel model, of which no gradient is recorded."""
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    return not is_recorded and is_ours(tensor) and any(p.is_partial() for p in tensor.placements)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _copies(index: Any) -> bool:
    """Whether an index gives a copy in eager as well: by tensors or lists."""
    return any(isinstance(i, (Tensor, list)) for i in (index if isinstance(index, tuple) else (index,)))
