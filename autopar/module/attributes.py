"""What the modules of a model say of themselves - numbers, words, flags, functions, lists and dicts of them, settings,
hooks, which parameters are there and tied - on which what their forward computes may depend.

states       each that they have been in has a number, which is part of a situation: a change of it is looked at by
             capturing again
unread       what a capture did not read cannot have mattered to it, whatever it says later: a counter of steps
settings     objects that hold nothing but what they were told: `config`, dataclasses, namespaces; watched as modules
             are, and their reads noted, too, where their class allows that
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import inspect
import numbers
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.letters import NotServed

State = tuple[Any, ...]
Unread = frozenset[tuple[int, int]]
Reads = set[tuple[int, str, str]]  # a place, and an attribute of what stands there
Place = tuple[int, str]  # a module, by its number, and which of its attributes are settings; "" for its own

_MOST_STATES = 16  # that are remembered: one that comes back later is a new one
_MOST_ENTRIES = 256  # of a list or dict that is watched: tables are longer, and would be looked at in every call
_ATOMS = frozenset({int, float, str, bool, type(None)})
_GONE = object()
_LASTING = (
    numbers.Number,
    str,
    bytes,
    frozenset,
    torch.dtype,
    torch.device,
    enum.Enum,
    type(None),  # which nobody changes in place
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
)
_OF_MODULES = frozenset(
    (*vars(nn.Module()), "_autopar", "_compiled_call_impl")
)  # hooks, modules and parameters are looked at by themselves


@contextlib.contextmanager
def reads_of(model: Any) -> Iterator[Reads]:
    """What is read inside of what the modules of a model say of themselves."""
    if not isinstance(model, nn.Module):  # a letter, soon
        yield set()
        return
    with Attributes(list(model.modules())).reads() as read:
        yield read


class Attributes:
    """Those of one model's modules; of a copy of a model, `like` those of the one that it was copied from."""

    def __init__(self, modules: Sequence[nn.Module], like: Attributes | None = None) -> None:
        self.modules = modules
        self.hooks = [
            *(
                (i, m._forward_pre_hooks, m._forward_hooks) for i, m in enumerate(modules)
            ),  # those that the whole model had before it was parallel
            *((i, m._backward_pre_hooks, m._backward_hooks) for i, m in enumerate(modules) if i),
        ]
        self.children = [tuple(m._modules.values()) for m in modules]
        if like is None:
            self.layout = 0  # counts how often what is watched was chosen anew
            self._watch_all()
            self.states: dict[int, State] = {0: self._now()}  # by number, of the latest
            self.latest = self.newest = 0  # the one that they were last seen in, and the last number
        else:
            if len(modules) != len(like.modules):
                raise NotServed(
                    f"a copy of a parallel {type(modules[0]).__name__} has {len(modules)} modules, and what it "
                    f"was copied from {len(like.modules)}",
                    advice=(
                        "exchange them before autoparallelize: what is emitted was traced from those that were there"
                    ),
                )
            self.layout = like.layout
            self._watch(like.keys)
            self.states, self.latest, self.newest = dict(like.states), like.latest, like.newest

    def state(self) -> int:
        """Which of the states they are in that they have been in. A letter where a module was exchanged for another."""
        if any(of.get(key) is not one for of, key, one in self.settings):  # others: what was known of them says nothing
            self.layout += 1
            self._watch_all()
        now = self._now()
        if now != self.states[self.latest]:
            self.latest = next((i for i, known in self.states.items() if known == now), self.newest + 1)
            if self.latest > self.newest:
                self.newest, self.states[self.latest] = self.latest, now
                self.states.pop(self.latest - _MOST_STATES, None)
        return self.latest

    def now(self) -> State:
        """The state that they were last seen in."""
        return self.states[self.latest]

    @contextlib.contextmanager
    def reads(self) -> Iterator[Reads]:
        """Which attributes of modules and of settings this thread reads inside."""
        found: Reads = set()
        places: dict[int, Place] = {id(m): (i, "") for i, m in enumerate(self.modules)}
        told = [(place, vars(self.modules[place[0]])[place[1]]) for place in self.keys if place[1]]
        places |= {id(settings): place for place, settings in told}
        keys: dict[type, set[str]] = {nn.Module: set()}
        for place, settings in told:
            if _can_be_noted(settings):
                keys.setdefault(type(settings), set()).update(self.keys[place])
        with _LOCK:
            _READERS[threading.get_ident()] = _Reader(places, found)
            for cls, of_one in keys.items():
                _note_reads_of(cls, of_one)
        try:
            yield found
        finally:
            with _LOCK:
                del _READERS[threading.get_ident()]
                for cls in keys:
                    _let_alone(cls)

    def unread(self, read: Reads) -> Unread:
        """Where in a state those stand that were not read."""
        return frozenset(
            (h, k)
            for h, (place, keys) in enumerate(self.keys.items())
            if self._are_noted(place)
            for k, key in enumerate(keys)
            if (*place, key) not in read
        )

    def _are_noted(self, place: Place) -> bool:
        module = self.modules[place[0]]
        return _can_be_noted(vars(module)[place[1]]) if place[1] else not _reads_by_itself(module)

    def same_but(self, then: State, unread: Unread) -> bool:
        """Is all as it was, but for what is not read?"""
        now = self.now()
        if now[2:] != then[2:]:
            return False
        pairs = zip(now[0], now[1], then[0], then[1], strict=True)
        return all(
            (h, k) in unread or k == len(mine) - 1
            for h, (mine, kinds, theirs, others) in enumerate(pairs)
            if mine != theirs or kinds != others
            for k, (x, y, a, b) in enumerate(zip(mine, theirs, kinds, others, strict=True))
            if a is not b or x != y
        )

    def _watch_all(self) -> None:
        places: dict[int, Place] = {}  # once each: many modules hold one configuration
        for i, module in enumerate(self.modules):
            for name in ("", *(k for k, v in vars(module).items() if _are_settings(k, v))):
                places.setdefault(id(self._held((i, name))), (i, name))
        self._watch(
            {
                place: [k for k, v in self._held(place).items() if k not in _OF_MODULES and not _are_settings(k, v)]
                for place in places.values()
            }
        )

    def _watch(self, keys: Mapping[Place, list[str]]) -> None:
        self.keys = {place: of_one for place, of_one in keys.items() if of_one}
        self.readers = [
            (self._held(place), itemgetter(*of_one, of_one[0])) for place, of_one in self.keys.items()
        ]  # of one key a getter gives no tuple
        self.settings = [(vars(m), k, v) for m in self.modules for k, v in vars(m).items() if _are_settings(k, v)]

    def _held(self, place: Place) -> dict[str, Any]:
        held = vars(self.modules[place[0]])
        return getattr(held.get(place[1]), "__dict__", {}) if place[1] else held

    def _now(self) -> State:
        for module, children in zip(self.modules, self.children, strict=True):
            if tuple(module._modules.values()) != children:
                raise NotServed(
                    f"the modules of a {type(module).__name__} were exchanged after autoparallelize",
                    advice="exchange them before: what is emitted was traced from those that were there",
                )
        hooks = [(i, *before.values(), _GONE, *after.values()) for i, before, after in self.hooks if before or after]
        try:
            held = [get(of) for of, get in self.readers]
        except KeyError:  # one is gone
            held = [
                [of.get(key, _GONE) for key in (*keys, keys[0])]
                for (of, _), keys in zip(self.readers, self.keys.values(), strict=True)
            ]
        first = dict[int, int]()  # of each parameter, whichever comes: ties are seen
        parameters = [
            None if p is None else (first.setdefault(id(p), len(first)), p.requires_grad, p.dtype)
            for m in self.modules
            for p in m._parameters.values()
        ]
        buffers = [
            None if b is None else (b.shape, b.dtype, b.requires_grad)
            for m in self.modules
            for b in m._buffers.values()
        ]
        return (
            [[v if type(v) in _ATOMS else _as_it_is(v) for v in values] for values in held],
            [[*map(type, values)] for values in held],
            self.layout,
            hooks,
            [(type(m), vars(m).get("forward")) for m in self.modules[1:]],
            parameters,
            buffers,
        )


def _are_settings(name: str, value: Any) -> bool:
    """A configuration, by its name or as what holds nothing but what it was told."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, Tensor, *_LASTING))
        and (name == "config" or is_dataclass(value) or isinstance(value, (types.SimpleNamespace, argparse.Namespace)))
    )


def _is_lasting(value: Any) -> bool:
    return isinstance(value, _LASTING) or (isinstance(value, tuple) and all(map(_is_lasting, value)))


def _as_it_is(value: Any) -> Any:
    """What a list or dict holds now, for it may be changed in place.

    Of a tensor, whose values are read in every call, its type; of anything else which one it is.
    """
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return [*value], [_as_it_is(v) for v in value.values()]
    if isinstance(value, (list, set)) and len(value) <= _MOST_ENTRIES:
        return type(value), [_as_it_is(v) for v in value]
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    return tuple(map(_as_it_is, value)) if isinstance(value, tuple) else value if _is_lasting(value) else _Itself(value)


def _reads_by_itself(module: nn.Module) -> bool:
    """Does its class read attributes in a way of its own, which cannot be noted?"""
    return any("__getattribute__" in vars(cls) for cls in type(module).__mro__ if cls not in (nn.Module, object))


class _Itself:
    """Equal to itself alone, and held: the place of what is gone may be another's."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def _can_be_noted(settings: Any) -> bool:
    """May its class be told for a while to note what is read? That of a SimpleNamespace may not."""
    cls = type(settings)
    return (
        bool(cls.__flags__ & _IS_OF_PYTHON)
        and not cls.__flags__ & _IS_IMMUTABLE
        and cast(Any, type(cls)).__setattr__ is type.__setattr__
    )


_IS_OF_PYTHON, _IS_IMMUTABLE = 1 << 9, 1 << 8  # flags of a class
_LOCK = threading.Lock()
_NOTED: dict[
    type, tuple[int, dict[str, Any]]
] = {}  # classes whose reads are noted: for how many threads, and what their own attributes of those names are


@dataclass(slots=True)
class _Reader:
    """A thread that notes what it reads."""

    places: dict[int, Place]
    found: Reads = field(default_factory=set)
    met: int = 0  # how many attributes of settings it has met


_READERS: dict[int, _Reader] = {}  # by thread


class _Noted:
    """In the place of an attribute of settings.

    Whichever way a class of settings leads there - other names, properties, a `__getattribute__` - it ends here.
    """

    def __init__(self, cls: type, key: str) -> None:
        self.key, self.of_class = key, inspect.getattr_static(cls, key, _GONE)

    def __get__(self, held: Any, cls: type | None = None) -> Any:
        if held is not None:
            _note(held, self.key)
            if self.key in (values := object.__getattribute__(held, "__dict__")):
                return values[self.key]
        if self.of_class is _GONE:
            raise AttributeError(f"{cls} has no attribute {self.key!r}")
        return self.of_class.__get__(held, cls) if hasattr(type(self.of_class), "__get__") else self.of_class

    def __set__(self, held: Any, value: Any) -> None:
        object.__getattribute__(held, "__dict__")[self.key] = value

    def __delete__(self, held: Any) -> None:
        try:
            del object.__getattribute__(held, "__dict__")[self.key]
        except KeyError as e:
            raise AttributeError(self.key) from e


def _note_reads_of(cls: type, keys: Iterable[str]) -> None:
    """Note which attributes are read of instances of a class.

    Of settings also where they are read together, or in a way that is not seen.
    """
    users, own = _NOTED.get(cls, (0, {}))
    _NOTED[cls] = users + 1, own

    def put(name: str, value: object) -> None:
        if name not in own:
            own[name] = vars(cls).get(name, _GONE)
            setattr(cls, name, value)

    def read(self: Any, name: str) -> Any:
        reader = _READERS.get(threading.get_ident())
        place = None if reader is None else reader.places.get(id(self))
        if place is None or reader is None or not place[1]:
            if place is not None and reader is not None:
                reader.found.add((*place, name))
            return get(self, name)
        if name == "__dict__":
            _note_all(self)
        met = reader.met
        value = get(self, name)
        if (
            reads_by_itself
            and reader.met == met
            and (name in object.__getattribute__(self, "__dict__") or not hasattr(cls, name))
        ):
            _note_all(self)
        return value

    def reduced(self: Any, protocol: Any) -> Any:  # a copy reads all, and not through the others
        _note_all(self)
        return reduce(self, protocol)

    if not users:
        reads_by_itself = any("__getattribute__" in vars(c) for c in cls.__mro__ if c is not object)
        get, reduce = _own_or_next(cls, "__getattribute__"), _own_or_next(cls, "__reduce_ex__")
        put("__getattribute__", read)
        if cls is not nn.Module:
            put("__reduce_ex__", reduced)
    for key in keys:
        if not hasattr(type(inspect.getattr_static(cls, key, None)), "__set__"):  # else its value is not there
            put(key, _Noted(cls, key))


def _own_or_next(cls: type, name: str) -> Callable[..., Any]:
    """A method of a class as it is now, or of whatever stands behind it in the class of who calls it."""
    own = vars(cls).get(name)
    return own if own is not None else lambda self, *given: getattr(super(cls, self), name)(*given)


def _let_alone(cls: type) -> None:
    users, own = _NOTED[cls]
    if users > 1:
        _NOTED[cls] = users - 1, own
        return
    del _NOTED[cls]
    for name, value in own.items():
        if value is _GONE:
            delattr(cls, name)
        else:
            setattr(cls, name, value)


def _note(held: Any, key: str) -> None:
    reader = _READERS.get(threading.get_ident())
    if reader is not None and (place := reader.places.get(id(held))) is not None:
        reader.found.add((*place, key))
        reader.met += 1


def _note_all(held: Any) -> None:
    for key in object.__getattribute__(held, "__dict__"):
        _note(held, key)
