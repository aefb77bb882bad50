"""What a module holds under dotted names: tensors and values, registered, as attributes, in lists, tuples and dicts.

blocks.0.scale       a parameter, a buffer or an attribute of the module blocks.0
tables.1, state.ema  an entry of a list or a dict that is an attribute
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.runtime.private import copy_each

_REGISTERED = ("_parameters", "_buffers", "_modules")  # the attributes in which torch itself keeps what is registered


def plain_tensors(module: torch.nn.Module) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Tensors that a module holds as plain attributes, also in a list, tuple or dict, with their paths."""
    for name, value in vars(module).items():
        entries: Any = ()
        if name in _REGISTERED:
            continue
        if isinstance(value, Tensor):
            yield (name,), value
        elif isinstance(value, (list, tuple)):
            entries = enumerate(value)
        elif isinstance(value, dict):
            entries = value.items()
        yield from (((name, str(at)), entry) for at, entry in entries if isinstance(entry, Tensor))


def replace_plain_tensors(module: torch.nn.Module, made: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor of `plain_tensors` by what `made` gives for it, except for parameters."""

    def replaced(value: Any) -> Any:
        return made(value) if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) else value

    for name, value in list(vars(module).items()):
        if name in _REGISTERED:
            continue
        if isinstance(value, Tensor):
            vars(module)[name] = replaced(value)
        elif isinstance(value, list):
            value[:] = map(replaced, value)
        elif isinstance(value, dict):
            value.update({key: replaced(entry) for key, entry in value.items() if isinstance(entry, Tensor)})
        elif type(value) is tuple and any(isinstance(entry, Tensor) for entry in value):
            vars(module)[name] = tuple(map(replaced, value))


def tensor_of(model: torch.nn.Module, name: str) -> Tensor:
    """The tensor under a dotted name: a parameter, buffer or attribute, maybe in a list or dict."""
    owner, last = _owner(model, name)
    found: Tensor = _entry(owner, last)
    return found


def set_at(model: torch.nn.Module, name: str, value: Any) -> None:
    """Let a dotted name stand for another value; a list that is one entry shorter grows."""
    owner, last = _owner(model, name)
    if isinstance(owner, list):
        owner[int(last) : int(last) + 1] = [value]
    elif isinstance(owner, dict):
        is_of_numbers = last.isdecimal() and not any(isinstance(key, str) for key in owner)
        owner[next((key for key in owner if str(key) == last), int(last) if is_of_numbers else last)] = value
    else:
        setattr(owner, last, value)


def write_buffer(model: torch.nn.Module, name: str, value: Tensor) -> None:
    """Give a buffer its new value: in place where shape and dtype are the same, else as a new tensor."""
    owner, last = _owner(model, name)
    held = _entry(owner, last, None)
    if isinstance(held, Tensor) and _is_like(held, value):
        with torch.no_grad():
            held.copy_(value)
    elif held is None and isinstance(owner, torch.nn.Module) and not hasattr(owner, last):
        owner.register_buffer(last, value.detach())
    else:
        set_at(model, name, value.detach())


class Registered:
    """Names of parameters or buffers, whose modules are looked up once for each model.

    A path costs a walk through the modules, and a call would walk one for each of hundreds of buffers. The modules of a
    parallel model stay what they are; what they hold may be another tensor in each call, or in another dict.
    """

    def __init__(self, names: Sequence[str], kind: Literal["_parameters", "_buffers"]) -> None:
        self.names = names
        self._kind = kind
        # a model, and for each name the attributes of its module, which do not keep the module alive
        self._places: tuple[weakref.ref[torch.nn.Module], list[tuple[Mapping[str, Any], str]]] | None = None

    def find(self, model: torch.nn.Module) -> list[Tensor | None]:
        """The tensor under each name; None where nothing is registered there."""
        if self._places is None or self._places[0]() is not model:
            modules = dict(model.named_modules(remove_duplicate=False))
            paths = [name.rpartition(".") for name in self.names]
            held = [(vars(modules[path]) if path in modules else {}, last) for path, _, last in paths]
            self._places = weakref.ref(model), held
        found = list[Tensor | None]()
        for attributes, last in self._places[1]:
            of = attributes.get(self._kind, ())
            found.append(of[last] if last in of else None)  # noqa: SIM401 - of a ScriptModule they have no get()
        return found

    def tensors(self, model: torch.nn.Module) -> list[Tensor]:
        """The tensor under each name, maybe in an attribute, a list or a dict."""
        found = zip(self.names, self.find(model), strict=True)
        return [tensor_of(model, name) if tensor is None else tensor for name, tensor in found]


def write_buffers(model: torch.nn.Module, buffers: Registered, values: Sequence[Tensor]) -> None:
    """Give buffers their new values, in place and together where shapes and dtypes stay.

    Else, and where two names stand for one tensor, they are written one by one.
    """
    held = [tensor for tensor in buffers.find(model) if type(tensor) is Tensor]
    are_apart = len(set(map(id, held))) == len(values)  # every value has a buffer of its own
    if values and are_apart and all(map(_is_like, held, values)):
        copy_each(held, values)
        return
    for name, value in zip(buffers.names, values, strict=True):
        write_buffer(model, name, value)


def _owner(model: torch.nn.Module, name: str) -> tuple[Any, str]:
    """The holder of a dotted name, and the name there: a key of a dict may have dots itself."""
    at: Any = model
    parts = name.split(".")
    while len(parts) > 1 and not (isinstance(at, dict) and _has(at, ".".join(parts))):
        part = parts.pop(0)
        while isinstance(at, dict) and parts and not _has(at, part):
            part = f"{part}.{parts.pop(0)}"
        if not parts:  # a key that is not there yet
            return at, part
        at = _entry(at, part)
    return at, ".".join(parts)


def _is_like(held: Tensor, value: Tensor) -> bool:
    return held.shape == value.shape and held.dtype == value.dtype


def _has(owner: dict[Any, Any], name: str) -> bool:
    return any(str(key) == name for key in owner)


def _entry(owner: Any, part: str, *default: Any) -> Any:
    """The entry of a list, tuple or dict, or the attribute of anything else, or the default."""
    if isinstance(owner, (list, tuple)):
        return owner[int(part)] if not default or int(part) < len(owner) else default[0]
    if isinstance(owner, dict):
        return next((value for key, value in owner.items() if str(key) == part), *default)
    return getattr(owner, part, *default)
