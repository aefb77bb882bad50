"""Initialise a model that was built on meta, by the recipes of its modules, without the whole model in memory.

Recipes run children first, as constructors would have run them, one module at a time:

    module      `reset_parameters()` (or `_reset_parameters()`), then the nearest `_init_weights(module)` above it, as
                Hugging Face's models have. All ranks draw the same numbers, from rank 0's generator; each keeps its
                part
    counter     the same recipes, but what they draw is a function of (seed, name, position): a rank draws its own part
                alone, and nothing is there in full

A run on meta finds which tensors a recipe writes, as a parent may write its children's. A tensor that no recipe writes
is refused by a letter.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.graph.held import plain_tensors
from autopar.letters import NotServed
from autopar.runtime.brief_patches import seen_on_meta
from autopar.runtime.private import TorchDispatchMode
from autopar.runtime.random import SECOND, as_normal, as_uniform, bits_at, key_of
from autopar.runtime.world import all_ranks_hold, from_rank_0

_DRAWING = threading.Lock()  # ranks that are threads have one generator
_UNWRITTEN = -7770777  # marks integers that are not written yet; nan marks other numbers


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor hangs: a dict of its module, and the name in it."""

    held: dict[str, Any]
    key: str


def is_on_meta(model: nn.Module, given: Collection[int] = ()) -> bool:
    """Whether any parameter or buffer is on meta, except those that are `given` values already."""
    return any(t.is_meta and id(t) not in given for t in (*model.parameters(), *model.buffers()))


def places_of(model: nn.Module, given: Collection[int] = ()) -> dict[int, tuple[str, Tensor, list[Place]]]:
    """Each parameter and buffer on meta, once, by id: first name, tensor, and all places where it hangs."""
    found: dict[int, tuple[str, Tensor, list[Place]]] = {}
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.is_meta and id(tensor) not in given:
                    found.setdefault(id(tensor), (f"{path}.{key}".lstrip("."), tensor, []))[2].append(Place(held, key))
        if astray := [".".join(at) for at, value in plain_tensors(module) if value.is_meta]:
            raise NotServed(
                f"{path or type(model).__name__}.{astray[0]} is a tensor on meta that is neither parameter nor "
                "buffer: no recipe gives it values",
                advice="register_buffer, or a model that is built with values",
            )
    return found


def recipes(model: nn.Module) -> Iterator[tuple[nn.Module, list[Callable[[], Any]]]]:
    """Every module with the functions that initialise it, children first."""

    def walk(
        module: nn.Module, above: Callable[[nn.Module], Any] | None
    ) -> Iterator[tuple[nn.Module, list[Callable[[], Any]]]]:
        own = getattr(module, "_init_weights", None)
        if callable(own) and _takes_one(own):
            above = own
        for child in module.children():
            if id(child) not in seen:
                seen.add(id(child))
                yield from walk(child, above)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        steps = [reset] if callable(reset) else []
        if above is not None:
            steps.append(lambda above=above, module=module: above(module))
        yield module, steps

    seen = {id(model)}
    yield from walk(model, None)


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def initialise(model: nn.Module, keep: Callable[[str, Tensor, Tensor], None], given: Collection[int] = ()) -> None:
    """Run the recipes in full, module by module, with rank 0's random state on all ranks.

    `keep(name, on_meta, whole)` gets each tensor when its module is done, and again if a later recipe writes it again.
    """
    places = places_of(model, given)
    done = set[int]()
    sums = list[tuple[str, int]]()
    state = from_rank_0(torch.get_rng_state)
    with _DRAWING:
        before = torch.get_rng_state()
    for module, steps in recipes(model):
        written = _written(steps, places)
        if not written:
            continue
        real = {i: _unwritten(places[i][1]) for i in written}
        for i, tensor in real.items():
            for place in places[i][2]:
                place.held[place.key] = tensor
        try:
            with _DRAWING:
                others = torch.get_rng_state()
                torch.set_rng_state(state)
                try:
                    for step in steps:
                        step()
                    state = torch.get_rng_state()
                finally:
                    torch.set_rng_state(others)
        finally:
            for i in written:
                for place in places[i][2]:
                    place.held[place.key] = places[i][1]
        for i, tensor in real.items():
            share = _share_unwritten(tensor)
            if share == 1.0 and tensor.numel():  # the run on meta took another branch
                continue
            if share:
                raise NotServed(
                    f"{places[i][0]} is written in part only by what gives {type(module).__name__} its values",
                    advice="a model that is built with values",
                )
            sums.append((places[i][0], _checksum(tensor)))
            keep(places[i][0], places[i][1], tensor.detach())
            done.add(i)
    with _DRAWING:
        torch.set_rng_state(state if torch.distributed.get_rank() == 0 else before)
    all_ranks_hold("initial values: a recipe draws from elsewhere than torch's generator", sums)
    _refuse_unwritten(places, done)


def initialise_by_position(
    model: nn.Module,
    seed: int,
    part_of: Callable[[str, Tensor], list[Tensor]],
    keep: Callable[[str, Tensor, Tensor], None],
    given: Collection[int] = (),
) -> None:
    """Run the recipes on meta, and apply their ops to this rank's parts, with draws by position.

    `part_of(name, on_meta)` gives the places of each dim that belong to this rank.
    """
    places = places_of(model, given)
    names = {i: (name, tensor) for i, (name, tensor, _) in places.items()}
    mode = _ByPosition(seed, names, part_of)

    def refuse(tensor: Tensor) -> None:
        raise NotServed(
            'a recipe draws an orthogonal or sparse matrix, and init="counter" draws element by element',
            advice='init="module"',
        )

    for _, steps in recipes(model):
        for step in steps:
            with _DRAWING, mode, torch.no_grad(), seen_on_meta(refuse):
                step()
    for i, part in mode.parts.items():
        keep(*names[i], part)
    _refuse_unwritten(places, set(mode.parts))


def _refuse_unwritten(places: dict[int, tuple[str, Tensor, list[Place]]], done: set[int]) -> None:
    if left := [name for i, (name, tensor, _) in places.items() if i not in done and tensor.numel()]:
        raise NotServed(
            f"nothing gives values to {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}: its module has "
            "neither reset_parameters nor an _init_weights above it that writes it",
            advice="reset_parameters in that module, weights=path, or a model that is built with values",
        )


def _written(steps: list[Callable[[], Any]], places: dict[int, tuple[str, Tensor, list[Place]]]) -> list[int]:
    """Ids of the tensors that the steps write, found by a run on meta."""
    watch = _Writes({tensor.untyped_storage()._cdata: i for i, (_, tensor, _) in places.items()})
    with _DRAWING, watch, torch.no_grad(), seen_on_meta(lambda tensor: [tensor.zero_()].clear()):
        for step in steps:
            step()
    return list(watch.found)


class _Writes(TorchDispatchMode):
    """Notes which storages are written to."""

    def __init__(self, storages: dict[int, int]) -> None:
        super().__init__()
        self.storages = storages
        self.found = dict[int, None]()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for value, argument in zip(args, function._schema.arguments, strict=False):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, Tensor)
                and value.is_meta
            ):
                which = self.storages.get(value.untyped_storage()._cdata)
                if which is not None:
                    self.found[which] = None
        return function(*args, **(kwargs or {}))


def _unwritten(tensor: Tensor) -> Tensor:
    """A whole tensor filled with marks that show which elements are not written yet."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    elif made.dtype == torch.bool:
        made.fill_(False)
    else:
        made.fill_(_UNWRITTEN % (2 ** (8 * made.itemsize - 1)))
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _checksum(tensor: Tensor) -> int:
    """A checksum of a tensor that is equal on ranks which hold the same values."""
    return (
        int(tensor.detach().contiguous().view(torch.uint8).to(torch.int64).sum())
        if tensor.numel() and tensor.dim()
        else zlib.crc32(repr(tensor.detach().tolist()).encode())
    )


def _share_unwritten(tensor: Tensor) -> float:
    if tensor.dtype == torch.bool or not tensor.numel():
        return 0.0
    marks = (
        tensor.detach().isnan()
        if tensor.is_floating_point() or tensor.is_complex()
        else tensor == _UNWRITTEN % (2 ** (8 * tensor.itemsize - 1))
    )
    share = marks.double().mean().item()
    return share if tensor.itemsize > 2 or tensor.is_floating_point() else float(share == 1.0)  # others may hold it


class _ByPosition(TorchDispatchMode):
    """Applies each op of a recipe on meta to this rank's part of the tensor; what it draws depends on positions."""

    def __init__(
        self, seed: int, names: dict[int, tuple[str, Tensor]], part_of: Callable[[str, Tensor], list[Tensor]]
    ) -> None:
        super().__init__()
        self.seed = seed
        self.names = names
        self.part_of = part_of
        self.which = {tensor.untyped_storage()._cdata: i for i, (_, tensor) in names.items()}
        self.parts: dict[int, Tensor] = {}
        self.places: dict[int, list[Tensor]] = {}
        self.draws: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = (
            function._schema.arguments
            and function._schema.arguments[0].alias_info is not None
            and function._schema.arguments[0].alias_info.is_write
        )
        i = (
            self.which.get(args[0].untyped_storage()._cdata)
            if writes and isinstance(args[0], Tensor) and args[0].is_meta
            else None
        )
        if i is not None:
            self._do(i, function, args, kwargs)
        return function(*args, **kwargs)

    def _do(self, i: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Apply to the part what an op does to the whole tensor on meta."""
        name, tensor = self.names[i]
        base = function.overloadpacket
        if i in self.parts and _is_one_row(tensor, args[0]) and base in _CONSTANTS:  # the row of a padding index
            row = args[0].storage_offset() // max(1, tensor.stride(0))
            here = (self.places[i][0] == row).nonzero().flatten()
            self.parts[i].index_fill_(0, here, *(args[1:] or (0.0,)))
            return
        known = _known_values(tensor, base, args)
        if known is None and not _is_element_by_element(tensor, args, kwargs):
            raise NotServed(
                f"{name} gets values that are not drawn or computed element by element ({function}), and "
                'init="counter" knows no other',
                advice='init="module"',
            )
        if i not in self.parts:
            self.places[i] = self.part_of(name, tensor)
            self.parts[i] = torch.empty([p.numel() for p in self.places[i]], dtype=tensor.dtype)
        part = self.parts[i]
        if known is not None:  # a table that the recipe has computed
            part.copy_(known[torch.meshgrid(*self.places[i], indexing="ij")] if known.dim() else known)
        elif base in _DRAWN:
            given = {a.name: v for a, v in zip(function._schema.arguments, args, strict=False)} | kwargs
            part.copy_(self._drawn(i, base, given))
        elif base in _REFUSED:
            raise NotServed(
                f'{name} is drawn by {function}, and init="counter" knows the uniform and the normal distribution',
                advice='init="module"',
            )
        else:
            function(part, *args[1:], **kwargs)

    def _drawn(self, i: int, base: Any, given: dict[str, Any]) -> Tensor:
        """This rank's part of a tensor's next draw, by seed, name, number of the draw and positions."""
        name, tensor = self.names[i]
        number = self.draws[i] = self.draws.get(i, -1) + 1
        key = torch.tensor(key_of(self.seed, _number_of(name)))
        one, two = (bits_at(key, number + more, tensor.shape, self.places[i]) for more in (0, SECOND))
        first, second = (float(given.get(word, default)) for word, default in _DRAWN[base])
        if base is torch.ops.aten.normal_:
            return as_normal(one, two, torch.float64) * second + first
        return as_uniform(one, torch.float64) * (second - first) + first


_CONSTANTS = (torch.ops.aten.fill_, torch.ops.aten.zero_)
_DRAWN = {  # random op of a recipe -> names of its two numbers, with their defaults
    torch.ops.aten.normal_: (("mean", 0), ("std", 1)),
    torch.ops.aten.uniform_: (("from", 0), ("to", 1)),
}
_REFUSED = (torch.ops.aten.random_, torch.ops.aten.bernoulli_, torch.ops.aten.exponential_)


def _is_one_row(tensor: Tensor, written: Tensor) -> bool:
    return bool(tensor.dim()) and written.shape == tensor.shape[1:]


def _known_values(tensor: Tensor, base: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The values that a recipe copies into a whole buffer, equal on all ranks; None for all else.

    Parameters are left out, as their values may have been drawn, differently on each rank.
    """
    is_copy = base is torch.ops.aten.copy_ and isinstance(args[1], Tensor) and not args[1].is_meta
    if not is_copy or isinstance(tensor, nn.Parameter):
        return None
    return args[1] if args[0].shape == tensor.shape == args[1].shape else None


def _is_element_by_element(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op writes the whole tensor, from numbers alone."""
    given = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    return args[0].shape == tensor.shape and not any(a.dim() or a.is_meta for a in given)


def _number_of(name: str) -> int:
    return zlib.crc32(name.encode())
