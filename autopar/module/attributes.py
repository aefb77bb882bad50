"""Watch the attributes of a model's modules and settings on which its forward may depend.

Watched are numbers, strings, flags, functions, lists and dicts of these, settings, hooks, and which parameters,
buffers and other tensors are there and tied.

    states       every state that the modules have been in has a number, which is part of a situation: in a new state
                 the model is captured again
    unread       attributes that a capture did not read cannot have mattered to it, such as a counter of steps
    settings     objects that hold only configuration: `config`, dataclasses, namespaces; they are watched like modules,
                 and reads of them are noted, too, where their class allows it
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from operator import itemgetter
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from autopar.graph.idle import IdleHook
from autopar.letters import NotServed
from autopar.module.limits import LIMITS
from autopar.module.reads import Place, Reads, taking_down
from autopar.tracer.contents import LASTING, MOST_ENTRIES, OF_TORCH, holder_of

Unread = frozenset[tuple[int, int]]
Ties = dict[int, tuple[Any, ...]]  # id(tensor) -> the first place at which it stands

_IS_OF_PYTHON = 1 << 9  # flag of a class that is defined in Python
_IS_IMMUTABLE = 1 << 8  # flag of a class whose attributes cannot be set
_ATOMS = frozenset({int, float, str, bool, type(None)})
_GONE = object()


class State(NamedTuple):
    """The state of the modules at one moment, to be compared with that of another."""

    values: list[list[Any]]  # Values of the watched attributes by place; the last of each repeats the first.
    types: list[list[type]]
    layout: int
    hooks: list[tuple[Any, ...]]
    forwards: list[tuple[type, Any]]  # The class of each module, and a forward of its own.
    parameters: list[tuple[Any, ...] | None]
    buffers: list[tuple[Any, ...] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """State of the modules that a capture saw, on which its graph may depend."""

    seen: State
    unread: Unread = frozenset()  # places in that state of attributes that were not read
    idle: tuple[IdleHook, ...] = ()  # hooks that run beside the program


@contextlib.contextmanager
def reads_of(model: Any) -> Iterator[Reads]:
    """Yield the set of attributes of a model's modules and settings that are read inside the block."""
    if not isinstance(model, nn.Module):  # a letter, soon
        yield set()
        return
    with Attributes(list(model.modules())).reads() as read:
        yield read


class Attributes:
    """Watched attributes of one model's modules; a copy of a model takes those of the original as `like`."""

    def __init__(self, modules: Sequence[nn.Module], like: Attributes | None = None) -> None:
        self.modules = modules
        self.keys: dict[Place, list[str]] = {}  # the attributes that are watched
        self.readers: list[tuple[dict[str, Any], Callable[[Any], tuple[Any, ...]]]] = []  # getters of these, by place
        self.known = _Known()
        self.settings: list[tuple[dict[str, Any], str, Any]] = []  # the dict, the key and the object of each
        # The model itself counts with the hooks that it had before it was parallel.
        forward = [(i, m._forward_pre_hooks, m._forward_hooks) for i, m in enumerate(modules)]
        backward = [(i, m._backward_pre_hooks, m._backward_hooks) for i, m in enumerate(modules) if i]
        self.hooks = [*forward, *backward]
        self.children = [tuple(m._modules.values()) for m in modules]
        self.own = [vars(m) for m in modules]
        self.counts = list(map(len, self.own))
        self.asked: frozenset[str] = frozenset() if like is None else like.asked  # captures read these of classes
        if like is None:
            self.layout = 0  # counts how often what is watched was chosen anew
            self._watch_all()
            self.states: dict[int, State] = {0: self._now()}  # the latest states by number
            self.latest = self.newest = 0  # number of the state last seen, and the highest number
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
            self.states = dict(like.states)
            self.latest = like.latest
            self.newest = like.newest

    def state(self) -> int:
        """Number of the state that the modules are in now; raises where a module was exchanged for another."""
        # attributes of exchanged settings are chosen anew
        are_others = any(of.get(key) is not one for of, key, one in self.settings)
        if are_others or self._has_more():
            self.layout += 1
            self._watch_all()
        now = self._now()
        if now != self.states[self.latest]:
            self.latest = next((i for i, known in self.states.items() if known == now), self.newest + 1)
            if self.latest > self.newest:
                self.newest = self.latest
                self.states[self.latest] = now
                self.states.pop(self.latest - LIMITS.states, None)
        return self.latest

    def _has_more(self) -> bool:
        """Whether a module has gained an attribute that a capture has read from its class, or found missing."""
        counts = list(map(len, self.own))
        if counts == self.counts:
            return False
        self.counts = counts
        known = {(place[0], key) for place, of_one in self.keys.items() if not place[1] for key in of_one}
        asked = self.asked - OF_TORCH
        return any(key in asked and (i, key) not in known for i, own in enumerate(self.own) for key in own)

    def now(self) -> State:
        """The state that the modules were last seen in."""
        return self.states[self.latest]

    @contextlib.contextmanager
    def reads(self) -> Iterator[Reads]:
        """Yield the attributes of modules and settings that this thread reads inside the block."""
        places: dict[int, Place] = {id(m): (i, "") for i, m in enumerate(self.modules)}
        keys: dict[type, set[str]] = {nn.Module: set()}
        for place, of_one in self.keys.items():
            if not place[1]:
                continue
            settings = vars(self.modules[place[0]])[place[1]]
            places[id(settings)] = place
            if can_be_noted(settings):
                keys.setdefault(type(settings), set()).update(of_one)
        with taking_down(places, keys) as found:
            yield found

    def sight(self, read: Reads, idle: tuple[IdleHook, ...] = ()) -> Sight:
        """The present state, as seen by a capture that has read these attributes and no others."""
        found = set()
        self.asked |= {key for i, name, key in read if not name and key not in self.own[i]}
        for h, (place, keys) in enumerate(self.keys.items()):
            if self._are_noted(place):
                found |= {(h, k) for k, key in enumerate(keys) if (*place, key) not in read}
        return Sight(self.now(), frozenset(found), idle)

    def _are_noted(self, place: Place) -> bool:
        module = self.modules[place[0]]
        return can_be_noted(vars(module)[place[1]]) if place[1] else not reads_by_itself(module)

    def same_but(self, sight: Sight) -> bool:
        """Whether the present state equals one that was seen, except for attributes that were not read."""
        now = self.now()
        is_same = now[2:] == sight.seen[2:]  # all but values and types of attributes
        return is_same and not any(True for _ in self._differences(now, sight))

    def changed(self, sight: Sight) -> list[str]:
        """Text about each difference between the present state and an earlier one.

        Attributes that were not read are left out, and which parameters train.
        """
        mine = self.now()
        then = sight.seen
        if mine.layout != then.layout:
            return ["attributes were added, or settings exchanged"]
        paths = [path for path, _ in self.modules[0].named_modules()]
        said = []
        for (module, settings), key, value, before in self._differences(mine, sight):
            name = ".".join(filter(None, (paths[module], settings, key)))
            said.append(f"{name} {_as_change(value, before)}")
        for i, path in enumerate(paths):
            hooks = [hook for hook in mine.hooks if hook[0] == i]
            if hooks != [hook for hook in then.hooks if hook[0] == i]:
                said.append(f"hooks of {path or 'the model'} have changed")
        if mine.forwards != then.forwards:
            said.append("the class or forward of a module has changed")
        held = [p and (p[0], p[2]) for p in mine.parameters]
        if held != [p and (p[0], p[2]) for p in then.parameters]:
            said.append("parameters were tied, untied, cast, added or removed")
        if mine.buffers != then.buffers:
            said.append("buffers were tied, untied or exchanged for others")
        return said

    def _differences(self, now: State, sight: Sight) -> Iterator[tuple[Place, str, Any, Any]]:
        """Watched attributes that differ from an earlier state of one layout: place, name, value now and then."""
        then = sight.seen
        for h, (place, keys) in enumerate(self.keys.items()):
            if now.values[h] == then.values[h] and now.types[h] == then.types[h]:
                continue
            for k, key in enumerate(keys):
                value = now.values[h][k]
                before = then.values[h][k]
                is_other = now.types[h][k] is not then.types[h][k] or value != before
                if is_other and (h, k) not in sight.unread:
                    yield place, key, value, before

    def _watch_all(self) -> None:
        places: dict[int, Place] = {}  # once each: many modules hold one configuration
        for i, module in enumerate(self.modules):
            for name in ("", *(k for k, v in vars(module).items() if are_settings(k, v))):
                places.setdefault(id(self._held((i, name))), (i, name))
        self._watch({place: self._plain_keys(place) for place in places.values()})

    def _plain_keys(self, place: Place) -> list[str]:
        """Names of a module's or settings' attributes that are neither torch's own nor settings themselves."""
        return [k for k, v in self._held(place).items() if k not in OF_TORCH and not are_settings(k, v)]

    def _watch(self, keys: Mapping[Place, list[str]]) -> None:
        self.keys = {place: of_one for place, of_one in keys.items() if of_one}
        self.readers = [
            (self._held(place), itemgetter(*of_one, of_one[0]))  # a getter of one key alone does not give a tuple
            for place, of_one in self.keys.items()
        ]
        self.settings = [(vars(m), k, v) for m in self.modules for k, v in vars(m).items() if are_settings(k, v)]
        self.known.of.clear()

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
            held = []
            for (of, _), keys in zip(self.readers, self.keys.values(), strict=True):
                held.append(tuple(of.get(key, _GONE) for key in (*keys, keys[0])))
        first: Ties = {}
        parameters = [
            None if p is None else (first.setdefault(id(p), (i, name)), p.requires_grad, p.dtype)
            for i, m in enumerate(self.modules)
            for name, p in m._parameters.items()
        ]
        buffers = [
            None if b is None else (first.setdefault(id(b), (i, name)), b.shape, b.dtype, b.requires_grad)
            for i, m in enumerate(self.modules)
            for name, b in m._buffers.items()
        ]
        contents = [self.known.contents(values, first, h) for h, values in enumerate(held)]
        return State(
            [of_one.values for of_one in contents],
            [of_one.types for of_one in contents],
            self.layout,
            hooks,
            [(type(m), vars(m).get("forward")) for m in self.modules[1:]],
            parameters,
            buffers,
        )


class _Contents(NamedTuple):
    """Values of the watched attributes at one place."""

    held: tuple[Any, ...]
    values: list[Any]  # the same in a form that can be compared later
    types: list[type]


class _Known:
    """The latest contents of places at which no value can change in place."""

    def __init__(self) -> None:
        self.of: dict[int, _Contents] = {}

    def contents(self, held: tuple[Any, ...], first: Ties, at: int) -> _Contents:
        """The contents of a place; those already known where the same objects stand there."""
        known = self.of.get(at)
        if known is not None and all(map(operator.is_, held, known.held)):
            return known
        made = _Contents(held, _as_they_are(held, first, at), [*map(type, held)])
        if all(map(_is_lasting, held)):
            self.of[at] = made
        return made


def are_settings(name: str, value: Any) -> bool:
    """Whether an attribute holds settings: it is named `config`, or is a dataclass or namespace."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, Tensor, *LASTING))
        and (name == "config" or is_dataclass(value) or isinstance(value, (types.SimpleNamespace, argparse.Namespace)))
    )


class _Lasting(dict[type, bool]):
    """Whether values of a type do not change in place; to ask this of abstract types takes long."""

    def __missing__(self, cls: type) -> bool:
        self[cls] = issubclass(cls, LASTING)
        return self[cls]


_ARE_LASTING = _Lasting()


def _is_lasting(value: Any) -> bool:
    return _ARE_LASTING[type(value)] or (isinstance(value, tuple) and all(map(_is_lasting, value)))


def _as_they_are(values: tuple[Any, ...], first: Ties, at: int) -> list[Any]:
    return [v if type(v) in _ATOMS or _is_of_atoms(v) else _as_it_is(v, first, (at, k)) for k, v in enumerate(values)]


def _is_of_atoms(value: Any) -> bool:
    return type(value) is tuple and _ATOMS.issuperset(map(type, value))


def _as_it_is(value: Any, first: Ties, at: tuple[Any, ...]) -> Any:
    """A value that can be compared later, even if the object is changed in place meanwhile.

    A list or dict gives its content; a tensor its type and the place where it stands first, as its values are read in
    every call; another object its identity, and the numbers and strings that it holds.
    """
    if isinstance(value, Tensor):
        return first.setdefault(id(value), at), value.shape, value.dtype, value.requires_grad
    if isinstance(value, tuple):
        return tuple(_as_it_is(v, first, (*at, k)) for k, v in enumerate(value))
    if _is_lasting(value):
        return value
    holder = holder_of(value)
    if holder is None or len(holder) > MOST_ENTRIES:
        return _Itself(value)
    entries = [*(holder.items() if isinstance(holder, dict) else enumerate(holder))]
    if holder is not value:
        return _Itself(value), [(k, type(v), v if _is_lasting(v) else _Itself(v)) for k, v in entries]
    if all(_ARE_LASTING[type(v)] for _, v in entries):
        return type(value), entries
    return type(value), [(k, _as_it_is(v, first, (*at, k))) for k, v in entries]


def _as_change(value: Any, before: Any) -> str:
    if value is _GONE or before is _GONE:
        return "is gone" if value is _GONE else "is new"
    if not {type(value), type(before)} <= _ATOMS:
        return "has changed"
    return f"is {value!r:.60}, and was {before!r:.60}"


def reads_by_itself(module: nn.Module) -> bool:
    """Whether the module's class overrides `__getattribute__`, so that reads cannot be noted."""
    return any("__getattribute__" in vars(cls) for cls in type(module).__mro__ if cls not in (nn.Module, object))


class _Itself:
    """Compares by identity, and keeps its object alive so that the id is not used again."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def can_be_noted(settings: Any) -> bool:
    """Whether the class of settings can be patched to note reads; that of a SimpleNamespace cannot."""
    cls = type(settings)
    return (
        bool(cls.__flags__ & _IS_OF_PYTHON)
        and not cls.__flags__ & _IS_IMMUTABLE
        and cast(Any, type(cls)).__setattr__ is type.__setattr__
    )
