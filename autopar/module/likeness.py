"""What a capture depends on of a model and its call, as text that is equal in any process where they are alike.

Ranks compare it, so that one may capture for all; and a program that was kept is taken for a model that is like the one
of which it was made. What stands in no order, as the entries of a set do, is sorted; what has no text is named by its
type. Where a tensor is, and what it holds, are left out: a program is the same for all values of parameters.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.graph.calls import as_call, learn_dataclasses
from autopar.graph.idle import HELD_BY
from autopar.module.reads import Reads
from autopar.tracer.contents import MOST_ENTRIES, MOST_LEVELS, OF_TORCH, dict_of, holder_of


def likeness_of(model: nn.Module, meta_inputs: Any) -> str:
    """A digest of a model's modules, parameters and buffers, and of the arguments of a call."""
    modules = [(path, *_kind(m)) for path, m in model.named_modules(remove_duplicate=False)]
    parameters = [(n, _form(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    buffers = [(n, _form(b)) for n, b in model.named_buffers(remove_duplicate=False)]
    args, kwargs = as_call(meta_inputs)
    learn_dataclasses((args, kwargs))
    leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    ties = _ties(model)
    return digest((modules, parameters, buffers, ties, list(map(text_of, leaves)), str(structure)))


def said_of(model: nn.Module, reads: Reads) -> str:
    """A digest of the attributes of modules and settings that a capture has read, as they are now."""
    modules = list(model.modules())
    return digest([(*place, _attribute(modules, *place)) for place in sorted(reads) if place[2] not in OF_TORCH])


def digest(value: Any) -> str:
    """A hash of a value's text."""
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _attribute(modules: Sequence[nn.Module], place: int, settings: str, key: str) -> str:
    """An attribute of a module, or of its settings, as text; one that the object lacks may be its class's."""
    if place >= len(modules):
        return "no such module"
    owner: Any = modules[place]
    if settings:
        owner = dict_of(owner).get(settings)
    held = dict_of(owner) or {}
    if key in held:
        return text_of(held[key])
    return f"of the class: {text_of(getattr(type(owner), key, None))}"


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """A module's class and mode, and how many hooks it has."""
    return _name_of(type(module)), module.training, *(len(dict_of(module)[kind]) for kind in HELD_BY)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, str(tensor.layout)


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one tensor."""
    first: dict[int, str] = {}
    found = []
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            found.append((first[id(tensor)], name))
    return found


def text_of(value: Any, levels: int = MOST_LEVELS) -> str:
    """A value as text, to a few levels of what it holds."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, enum.Enum)):
        return repr(value)
    if isinstance(value, Tensor):
        return f"tensor {_form(value)}"
    if isinstance(value, torch.device):
        return value.type  # Ranks have devices of their own.
    if isinstance(value, type):
        return _name_of(value)
    if isinstance(value, functools.partial):
        return f"partial {_several((value.func, *value.args, *value.keywords.items()), levels)}"
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"{_name_of(value)} {_code(value.__code__)}"
    return _structure(value, levels)


def _structure(value: Any, levels: int) -> str:
    """A container or an object by its type and what it holds."""
    kind = _name_of(type(value))
    if levels < 0:
        return kind
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(text_of(v, levels - 1) for v in value)}"
    inside: Any = value if isinstance(value, (tuple, Mapping)) else holder_of(value)
    if inside is None or len(inside) > MOST_ENTRIES:
        return kind if inside is None else f"{kind} of {len(inside)}"
    entries = inside.items() if isinstance(inside, Mapping) else inside
    return f"{kind} {_several(entries, levels - 1)}"


def _several(values: Iterable[Any], levels: int) -> str:
    return str([text_of(v, levels) for v in values])


def _name_of(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def _code(code: types.CodeType) -> str:
    """A digest of what a function runs, without its place in a file."""
    constants = [_code(c) if isinstance(c, types.CodeType) else text_of(c) for c in code.co_consts]
    return digest((code.co_code, code.co_names, code.co_varnames, constants))
