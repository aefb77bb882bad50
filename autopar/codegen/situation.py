"""What a lowered program was made for. A call in another situation - other shapes, eval, other parameters that train, autocast - needs another program; one without gradients needs half of one."""

from __future__ import annotations

import argparse
import enum
import functools
import inspect
import math
import pickle
import types
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.letters import BadInput, NotServed
from autopar.tracer.capture import Call
from autopar.tracer.graph import Graph

_MOST_STATES = 64                                              # that are remembered: one that comes back later is a new one
_MOST_ENTRIES = 256                                            # of a list or dict that is watched: tables are longer, and would be looked at in every call
_ATOMS = frozenset({int, float, str, bool, type(None)})
_SAID = (int, float, str, bool, bytes, complex, torch.dtype, torch.device, enum.Enum, type(None))
_LASTING = (*_SAID, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)      # which nobody changes in place
_GONE = object()
_OF_MODULES = frozenset(vars(nn.Module()))                     # hooks, modules and parameters are looked at by themselves


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything of a call that its graph depends on."""

    leaves: tuple[Any, ...]                                    # of each tensor shape, dtype and whether it wants a gradient; of anything else itself
    structure: pytree.TreeSpec
    modes: tuple[bool, ...]                                    # of every module: does it train?
    trained: tuple[bool, ...]                                  # of every parameter
    autocast: tuple[tuple[str, torch.dtype], ...]              # of each kind of device for which it is on
    said: int = 0                                              # which of the states its modules are in: what they say of themselves, and their hooks

    def kind(self, with_rows: bool) -> tuple[Any, ...]:
        """All of it but how long things are; with how many rows there are, or without."""
        leaves = tuple([(len(leaf[0]), *(leaf[0][:1] if with_rows else ()), *leaf[1:]) if isinstance(leaf[0], torch.Size) else leaf for leaf in self.leaves])
        return leaves, self.structure, self.modes, self.trained, self.autocast, self.said

    def differs(self, other: Situation) -> str:
        """In what it differs from another one, for a person."""
        said = []
        if self.structure != other.structure or len(self.leaves) != len(other.leaves):
            said.append("arguments")
        elif self.leaves != other.leaves:
            said += sorted({_as_text(mine) for mine, theirs in zip(self.leaves, other.leaves, strict=True) if mine != theirs})
        said += [name for name, mine, theirs in (("train and eval", self.modes, other.modes), ("parameters that train", self.trained, other.trained), ("autocast", self.autocast, other.autocast), ("attributes or hooks of modules", self.said, other.said)) if mine != theirs]
        return ", ".join(said)


def _as_text(leaf: Any) -> str:
    return f"{str(leaf[1]).removeprefix('torch.')}{list(leaf[0])}" if isinstance(leaf[0], torch.Size) else str(leaf[1])[:80]


class Caller:
    """Reads calls of one model: by whatever name or position an argument comes, it is the same call."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.name = model, type(model).__name__
        self.modules, self.parameters = list(model.modules()), list(model.parameters())
        self.children = [tuple(m._modules.values()) for m in self.modules]
        self._watch([(of, [k for k, v in of.items() if k not in _OF_MODULES and _entries(v) <= _MOST_ENTRIES]) for of in _with_attributes(self.modules)])
        self.states: list[tuple[Any, ...] | None] = [self._state()]
        self.latest = 0                                        # of those, the one that they were last seen in
        try:
            self.signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):
            self.signature = None

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves of a call's arguments, by name and in the order of names."""
        if self.signature is None:
            return pytree.tree_flatten((args, {k: kwargs[k] for k in sorted(kwargs)}))
        try:
            named = self.signature.bind(*args, **kwargs).arguments
        except TypeError as e:
            raise BadInput(f"{self.name}.forward does not take these inputs: {e}", seen=f"forward{self.signature}", advice="the arguments of the model's own forward") from e
        return pytree.tree_flatten({k: {name: named[k][name] for name in sorted(named[k])} if self.signature.parameters[k].kind is inspect.Parameter.VAR_KEYWORD else named[k] for k in sorted(named)})

    def call(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Call:
        """The call that has these leaves; arguments by name, where they have one and nothing stands after them that has none."""
        given = pytree.tree_unflatten(list(leaves), structure)
        if self.signature is None:
            return Call(*given)
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        if any(kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for name in given):
            bound = inspect.BoundArguments(self.signature, OrderedDict(given))
            return Call(bound.args, bound.kwargs)
        return Call((), {key: value for name, of_one in given.items() for key, value in (of_one.items() if kinds[name] is inspect.Parameter.VAR_KEYWORD else ((name, of_one),))})

    def situation(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> Situation:
        """Of a call, now."""
        grad = torch.is_grad_enabled()
        return Situation(
            tuple([(leaf.shape, leaf.dtype, grad and leaf.requires_grad) if isinstance(leaf, Tensor) else _said(leaf) for leaf in leaves]), structure,
            tuple([m.training for m in self.modules]), tuple([p.requires_grad for p in self.parameters]),
            tuple([(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]), self.said(),
        )

    def said(self) -> int:
        """Which of the states its modules are in that they have been in: their numbers, words and hooks. A letter where one was exchanged for another."""
        now = self._state()
        if now != self.states[self.latest]:
            self.latest = next((i for i, known in enumerate(self.states) if known == now), len(self.states))
            self.states += [now] if self.latest == len(self.states) else []
            self.states[:-_MOST_STATES] = [None] * len(self.states[:-_MOST_STATES])
        return self.latest

    def forget(self, before: int) -> None:
        """What differs between now and a state before made no difference: it is not watched any longer."""
        if (then := self.states[before]) is not None:
            self._watch([(of, [key for key, mine, theirs in zip(keys, a, b, strict=False) if mine == theirs]) for (of, keys, _), a, b in zip(self.watched, self._state()[0], then[0], strict=True)])
            self.states = [None] * len(self.states)
            self.states[self.latest] = self._state()

    def _watch(self, attributes: Iterable[tuple[dict[str, Any], list[str]]]) -> None:
        self.watched = [(of, keys, itemgetter(*keys, keys[0])) for of, keys in attributes if keys]     # of one key a getter gives no tuple

    def _state(self) -> tuple[Any, ...]:
        for module, children in zip(self.modules, self.children, strict=True):
            if tuple(module._modules.values()) != children:
                raise NotServed(f"the modules of a {type(module).__name__} were exchanged after autoparallelize", advice="exchange them before: what is emitted was traced from those that were there")
        hooks = [(i, kind, *there.values()) for i, m in enumerate(self.modules) if i for kind, there in enumerate((m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)) if there]
        try:
            held = [get(of) for of, _, get in self.watched]
        except KeyError:                                       # one is gone
            held = [[of.get(key, _GONE) for key in (*keys, keys[0])] for of, keys, _ in self.watched]
        return [[v if type(v) in _ATOMS else _now(v) for v in values] for values in held], hooks

    def names(self, structure: pytree.TreeSpec) -> list[str]:
        """Of each leaf of a call what it is called: its argument, and its place in it."""
        tree = pytree.tree_unflatten([0] * structure.num_leaves, structure)
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]

    def places(self, graph: Graph) -> list[int]:
        """Of each input of a graph, in its order: which leaf of a call it is."""
        args, kwargs = pytree.tree_unflatten(list(range(graph.input_spec.num_leaves)), graph.input_spec)
        order = self.arguments(args, kwargs)[0]
        at = {leaf: order.index(i) for i, leaf in enumerate(graph.input_leaves) if isinstance(leaf, str)}
        return [at[str(node.target)] for node in graph.inputs.values()]


def _with_attributes(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """What modules hold, and their settings, once each."""
    held = {id(of): of for m in modules for of in (vars(m), *(vars(v) for k, v in vars(m).items() if _are_settings(k, v))) if of}
    return list(held.values())


def _are_settings(name: str, value: Any) -> bool:
    """A configuration, by its name or as what holds nothing but what it was told."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, *_LASTING)) and (name == "config" or is_dataclass(value) or isinstance(value, (types.SimpleNamespace, argparse.Namespace)))


def _is_lasting(value: Any) -> bool:
    return isinstance(value, _LASTING) or (isinstance(value, tuple) and all(map(_is_lasting, value)))


def _entries(value: Any) -> float:
    """Of how many lasting things it consists; infinitely many where there is anything else."""
    if _is_lasting(value):
        return 1
    if not isinstance(value, (list, tuple, set, dict)) or len(value) > _MOST_ENTRIES:
        return math.inf
    return 1 + sum(map(_entries, value.values() if isinstance(value, dict) else value))


def _now(value: Any) -> Any:
    """What a list or dict holds now, for it may be changed in place; of a tensor, whose values are read in every call, its type; of anything else which one it is."""
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return [*value], [_now(v) for v in value.values()]
    if isinstance(value, (list, set)) and len(value) <= _MOST_ENTRIES:
        return type(value), [_now(v) for v in value]
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return tuple(map(_now, value)) if isinstance(value, tuple) else value if _is_lasting(value) else id(value)


def _said(value: Any) -> tuple[type, Any]:
    """A constant argument as it is now: the caller may change it later. 1, 1.0 and True are three things, and nan is itself."""
    if isinstance(value, _SAID):
        return type(value), repr(value)
    try:
        return type(value), pickle.dumps(value)
    except Exception as e:
        raise BadInput(f"an argument is a {type(value).__name__}, of which cannot be said whether it is the same in the next call", seen=f"{type(e).__name__}: {e}", advice="tensors, numbers, text, and what can be pickled") from e
