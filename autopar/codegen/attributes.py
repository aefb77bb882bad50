"""What the modules of a model say of themselves - numbers, words, flags, functions, lists and dicts of them, settings, hooks - on which what their forward computes may depend.

    states       each that they have been in has a number, which is part of a situation: a change of it is looked at once, by capturing again
    forgotten    what changed and made no difference to the graph is not watched any longer: a counter of steps
    settings     objects that hold nothing but what they were told: `config`, dataclasses, namespaces; watched as modules are
"""

from __future__ import annotations

import argparse
import enum
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from autopar.letters import NotServed

Place = tuple[int, str]                                        # a module, by its number, and which of its attributes are settings; "" for its own

_MOST_STATES = 64                                              # that are remembered: one that comes back later is a new one
_MOST_ENTRIES = 256                                            # of a list or dict that is watched: tables are longer, and would be looked at in every call
_ATOMS = frozenset({int, float, str, bool, type(None)})
_GONE = object()
_LASTING = (int, float, str, bool, bytes, complex, torch.dtype, torch.device, enum.Enum, type(None),       # which nobody changes in place
            types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
_OF_MODULES = frozenset((*vars(nn.Module()), "_autopar"))      # hooks, modules and parameters are looked at by themselves


class Attributes:
    """Those of one model's modules; of a copy of a model, `like` those of the one that it was copied from."""

    def __init__(self, modules: Sequence[nn.Module], like: Attributes | None = None) -> None:
        self.modules = modules
        self.hooks = [*((i, m._forward_pre_hooks, m._forward_hooks) for i, m in enumerate(modules)),           # those that the whole model had before it was parallel
                      *((i, m._backward_pre_hooks, m._backward_hooks) for i, m in enumerate(modules) if i)]
        self.children = [tuple(m._modules.values()) for m in modules]
        if like is None:
            self._watch_all()
            self.states: list[tuple[Any, ...] | None] = [self._now()]
            self.latest = 0                                    # of those, the one that they were last seen in
        else:
            if len(modules) != len(like.modules):
                raise NotServed(f"a copy of a parallel {type(modules[0]).__name__} has {len(modules)} modules, and what it was copied from {len(like.modules)}", advice="exchange them before autoparallelize: what is emitted was traced from those that were there")
            self._watch(like.keys)
            self.states, self.latest = list(like.states), like.latest

    def state(self) -> int:
        """Which of the states they are in that they have been in. A letter where a module was exchanged for another."""
        if any(of.get(key) is not one for of, key, one in self.settings):      # others: what was known of them says nothing
            self._watch_all()
            self.states = [None] * len(self.states)
        now = self._now()
        if now != self.states[self.latest]:
            self.latest = next((i for i, known in enumerate(self.states) if known == now), len(self.states))
            self.states += [now] if self.latest == len(self.states) else []
            self.states[:-_MOST_STATES] = [None] * len(self.states[:-_MOST_STATES])
        return self.latest

    def forget(self, before: int) -> None:
        """What differs between now and a state before made no difference: it is not watched any longer."""
        if (then := self.states[before]) is not None:
            self._watch({place: [key for key, mine, theirs in zip(keys, a, b, strict=False) if mine == theirs] for (place, keys), a, b in zip(self.keys.items(), self._now()[0], then[0], strict=True)})
            self.states = [None] * len(self.states)
            self.states[self.latest] = self._now()

    def _watch_all(self) -> None:
        places: dict[int, Place] = {}                          # once each: many modules hold one configuration
        for i, module in enumerate(self.modules):
            for name in ("", *(k for k, v in vars(module).items() if _are_settings(k, v))):
                places.setdefault(id(self._held((i, name))), (i, name))
        self._watch({place: [k for k, v in self._held(place).items() if k not in _OF_MODULES and not _are_settings(k, v)] for place in places.values()})

    def _watch(self, keys: Mapping[Place, list[str]]) -> None:
        self.keys = {place: of_one for place, of_one in keys.items() if of_one}
        self.readers = [(self._held(place), itemgetter(*of_one, of_one[0])) for place, of_one in self.keys.items()]        # of one key a getter gives no tuple
        self.settings = [(vars(m), k, v) for m in self.modules for k, v in vars(m).items() if _are_settings(k, v)]

    def _held(self, place: Place) -> dict[str, Any]:
        held = vars(self.modules[place[0]])
        return getattr(held.get(place[1]), "__dict__", {}) if place[1] else held

    def _now(self) -> tuple[Any, ...]:
        for module, children in zip(self.modules, self.children, strict=True):
            if tuple(module._modules.values()) != children:
                raise NotServed(f"the modules of a {type(module).__name__} were exchanged after autoparallelize", advice="exchange them before: what is emitted was traced from those that were there")
        hooks = [(i, *before.values(), _GONE, *after.values()) for i, before, after in self.hooks if before or after]
        try:
            held = [get(of) for of, get in self.readers]
        except KeyError:                                       # one is gone
            held = [[of.get(key, _GONE) for key in (*keys, keys[0])] for (of, _), keys in zip(self.readers, self.keys.values(), strict=True)]
        return [[v if type(v) in _ATOMS else _as_it_is(v) for v in values] for values in held], hooks, [type(m) for m in self.modules[1:]]


def _are_settings(name: str, value: Any) -> bool:
    """A configuration, by its name or as what holds nothing but what it was told."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, *_LASTING)) and (name == "config" or is_dataclass(value) or isinstance(value, (types.SimpleNamespace, argparse.Namespace)))


def _is_lasting(value: Any) -> bool:
    return isinstance(value, _LASTING) or (isinstance(value, tuple) and all(map(_is_lasting, value)))


def _as_it_is(value: Any) -> Any:
    """What a list or dict holds now, for it may be changed in place; of a tensor, whose values are read in every call, its type; of anything else which one it is."""
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return [*value], [_as_it_is(v) for v in value.values()]
    if isinstance(value, (list, set)) and len(value) <= _MOST_ENTRIES:
        return type(value), [_as_it_is(v) for v in value]
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return tuple(map(_as_it_is, value)) if isinstance(value, tuple) else value if _is_lasting(value) else id(value)
