"""What a capture depends on of a model and its call, as text that is equal in any process where they are alike.

Ranks compare it, so that one may capture for all; and a program that was kept is taken for a model that is like the one
of which it was made. What stands in no order, as the entries of a set do, is sorted; what has no text is named by its
type. Where a tensor is, and what it holds, are left out: a program is the same for all values of parameters.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import numbers
import sys
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.graph.calls import as_call, learn_dataclasses
from autopar.graph.idle import HELD_BY
from autopar.module.attributes import are_settings, can_be_noted, reads_by_itself
from autopar.module.limits import LIMITS
from autopar.tracer.contents import OF_TORCH, dict_of


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


def said_of(model: nn.Module, reads: Collection[tuple[int, str, str]]) -> str:
    """A digest of the attributes of modules and settings that a capture has read, as they are now.

    Of modules and settings whose reads cannot be noted, all attributes count.
    """
    modules = list(model.modules())
    places = {place for place in reads if place[2] not in OF_TORCH and not place[2].startswith("__")}
    for i, module in enumerate(modules):
        if reads_by_itself(module):
            places.update((i, "", key) for key in dict_of(module) if key not in OF_TORCH)
    return digest([(*place, _attribute(modules, *place)) for place in sorted(places)])


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
    if key not in held:
        return f"of the class: {text_of(getattr(type(owner), key, None))}"
    if are_settings(key, held[key]) and can_be_noted(held[key]):
        return _name_of(type(held[key]))  # What was read of them is by itself among the reads.
    return text_of(held[key])


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


def text_of(value: Any) -> str:
    """A value as text, with what it holds; each object stands once."""
    try:
        return _text(value, {})
    except RecursionError:
        return f"{_name_of(type(value))} at {id(value):#x}"  # It is like no other, and nothing is kept for it.


def _text(value: Any, seen: dict[int, Any]) -> str:
    if isinstance(value, (numbers.Number, str, bytes, type(None), torch.dtype, enum.Enum, range)):
        return repr(value)
    if isinstance(value, (Tensor, nn.Module)):
        return f"a tensor {_form(value)}" if isinstance(value, Tensor) else _name_of(type(value))
    if isinstance(value, torch.device):
        return value.type  # Ranks have devices of their own.
    if isinstance(value, type):
        return _name_of(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if id(value) in seen:
        return f"{_name_of(type(value))} again"
    seen[id(value)] = value  # It has to live, or another would get its id.
    if len(seen) > LIMITS.objects:
        raise RecursionError(f"more than {LIMITS.objects} objects are behind a value")
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return _function(value, seen)
    return _structure(value, seen)


def _function(function: Any, seen: dict[int, Any]) -> str:
    """A function by what it runs, its defaults, and what it closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    held = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items(), *cells
    return f"{_name_of(function)} {_code(function.__code__)} {_several(held, seen)}"


def _structure(value: Any, seen: dict[int, Any]) -> str:
    """A container or an object by its type and what it holds."""
    kind = _name_of(type(value))
    if isinstance(value, (set, frozenset)):
        return f"{kind} {_joined(sorted(_text(v, seen) for v in value))}"
    if isinstance(value, functools.partial):
        return f"{kind} {_several((value.func, *value.args, *value.keywords.items()), seen)}"
    inside: Any = value if isinstance(value, (tuple, list, Mapping)) else dict_of(value)
    if inside is None:
        said = repr(value)
        return kind if " at 0x" in said else f"{kind} {said}"
    return f"{kind} {_several(inside.items() if isinstance(inside, Mapping) else inside, seen)}"


def _several(values: Iterable[Any], seen: dict[int, Any]) -> str:
    return _joined([_text(v, seen) for v in values])


def _joined(texts: Iterable[str]) -> str:
    """Texts as one that tells them apart, each behind its length.

    Quotes around quotes would double what they hold at every level.
    """
    return "".join(f"{len(text)}:{text}," for text in texts)


def module_name(module: str) -> str:
    """The name of a module; for the script that runs, the one by which another would import it."""
    file = getattr(sys.modules.get(module), "__file__", None) if module == "__main__" else None
    return Path(file).stem if file else module


def _name_of(named: Any) -> str:
    home = module_name(getattr(named, "__module__", None) or "")
    return f"{home}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def _code(code: types.CodeType) -> str:
    """A digest of what a function runs, without its place in a file."""
    constants = [_code(c) if isinstance(c, types.CodeType) else text_of(c) for c in code.co_consts]
    return digest((code.co_code, code.co_names, code.co_varnames, constants))
