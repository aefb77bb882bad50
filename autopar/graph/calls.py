"""A call of a model: its arguments, the names of their leaves, and the structures that outputs have."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.carried import is_carried
from autopar.letters import NotCaptured


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The arguments with which a model was called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(meta_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs from what a caller may pass: a mapping, a tuple or list, one tensor, or a `Call`."""
    if isinstance(meta_inputs, Call):
        return meta_inputs.args, meta_inputs.kwargs
    if isinstance(meta_inputs, Tensor):
        return (meta_inputs,), {}
    if hasattr(meta_inputs, "keys"):
        return (), dict(meta_inputs)
    if isinstance(meta_inputs, (tuple, list)):
        return tuple(meta_inputs), {}
    raise NotCaptured(
        f"meta_inputs is a {type(meta_inputs).__name__}",
        advice="a dict of keyword arguments, or a tuple of positional ones",
    )


def leaf_names(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for every leaf of a function's arguments: that of its parameter, and the path inside.

    What a function takes by `*args` is named by its position.
    """
    places = [str(i) for i in range(len(args))]
    for i, name in enumerate(_positional(function)[: len(args)]):
        places[i] = name
    named = [*zip(places, args, strict=True), *kwargs.items()]
    return [
        ".".join([str(name), *map(_step, path)])
        for name, value in named
        for path, _ in pytree.tree_flatten_with_path(value)[0]
    ]


def _positional(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a function takes by position, up to its `*args`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # the function is not written in Python
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in itertools.takewhile(lambda p: p.kind in kinds, parameters)]


def _step(key: pytree.KeyEntry) -> str:
    """The text of one step into a structure: an index, a key, or the name of a field."""
    match key:
        case pytree.SequenceKey(idx=step) | pytree.MappingKey(key=step) | pytree.GetAttrKey(name=step):
            return str(step)
    return str(key)


def output_names(outputs: Any, has_loss: bool) -> list[str]:
    """A name for every leaf of the outputs; the first is "loss" where the caller has given a `loss=`."""
    names = [".".join(map(_step, path)) or "out" for path, _ in pytree.tree_flatten_with_path(outputs)[0]]
    return ["loss", *names[1:]] if has_loss else names


def learn_dataclasses(value: Any) -> None:
    """Register the dataclasses among inputs or outputs with torch's pytree, as structures like any other."""
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES and not type(value).__name__.endswith("Cache"):
            pytree.register_dataclass(
                type(value), serialized_type_name=f"{type(value).__module__}.{type(value).__qualname__}"
            )
        children = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    else:
        return
    for child in children:
        learn_dataclasses(child)


def without_caches(outputs: Any) -> tuple[Any, tuple[str, ...]]:
    """The outputs with None for key-value caches, which serve generation, and a line about each cache."""
    dropped: list[str] = []

    def is_cache(value: Any) -> bool:
        return type(value).__name__.endswith("Cache") and not is_carried(value)

    def drop(value: Any) -> Any:
        if is_cache(value):
            dropped.append(f"the output {type(value).__name__} is dropped: caches serve generation, not training")
            return None
        return value

    return pytree.tree_map(drop, outputs, is_leaf=is_cache), tuple(dict.fromkeys(dropped))
