"""The sources that a capture of a model runs: releases of installed packages, and digests of one's own code.

Followed are the model's classes, and what their methods name: functions and classes by what they run, numbers and texts
of modules by their values, own modules by their files. So a script may change around a model. What a function imports
when it runs is not among them.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from autopar.module.likeness import digest, module_name, text_of
from autopar.tracer.contents import PLAIN, dict_of

_INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders of installed packages
_APART = frozenset(sys.stdlib_module_names) | {"torch", "autopar"}  # What runs a capture has releases of its own.


def sources_of(model: nn.Module, *functions: Any) -> dict[str, str]:
    """Releases of the installed packages and digests of the code that a model's classes run."""
    found: dict[str, str] = {}
    pending: list[Any] = [cls for m in model.modules() for cls in type(m).__mro__]
    pending += functions
    pending += [v for m in model.modules() for v in dict_of(m).values() if isinstance(v, types.FunctionType)]
    seen = set[int]()
    while pending:
        one = pending.pop()
        module = _module_of(one)
        if id(one) in seen or not _is_looked_at(module):
            continue
        seen.add(id(one))
        if not _is_own(module):
            package = module.partition(".")[0]
            found[package] = str(getattr(sys.modules.get(package), "__version__", "no release"))
            pending += _put_there(one, found) if isinstance(one, type) else ()
        elif isinstance(one, types.ModuleType):
            file = _file_of(module)
            found[module] = "no file" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:32]
        elif isinstance(one, type):
            methods = dict(_methods(one))
            found[_path_of(one)] = digest([(name, text_of(method)) for name, method in methods.items()])
            pending += methods.values()
        elif isinstance(one, types.FunctionType):
            found[_path_of(one)] = digest(text_of(one))
            pending += _named_by(one, found)
    return dict(sorted(found.items()))


def files_of(package: str) -> str:
    """A digest of all Python files of a loaded package."""
    (folder,) = sys.modules[package].__path__
    files = sorted(Path(folder).rglob("*.py"))
    return digest([(str(file.relative_to(folder)), hashlib.sha256(file.read_bytes()).digest()) for file in files])


def _module_of(one: Any) -> str:
    named = one.__name__ if isinstance(one, types.ModuleType) else getattr(one, "__module__", "")
    return named if isinstance(named, str) else ""


def _path_of(one: Any) -> str:
    return f"{module_name(one.__module__)}.{one.__qualname__}"


def _is_looked_at(module: str) -> bool:
    return bool(module) and module.partition(".")[0] not in _APART


def _is_own(module: str) -> bool:
    """Whether a module is of no installed package."""
    file = _file_of(module)
    return file is None or _INSTALLED.isdisjoint(file.parts)


def _file_of(module: str) -> Path | None:
    """The file of a loaded module; None for one without, such as a notebook."""
    said = getattr(sys.modules.get(module), "__file__", None)
    return Path(said) if said and Path(said).exists() else None


def _methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions of a class by their names, those of properties and class methods, too."""
    for name, value in vars(cls).items():
        for of in (value, *(getattr(value, key, None) for key in ("__func__", "fget", "func"))):
            if isinstance(of, types.FunctionType):
                yield name, of


def _put_there(cls: type, found: dict[str, str]) -> Iterator[types.FunctionType]:
    """The methods of an installed class that its file does not say, whose text is noted."""
    for name, method in _methods(cls):
        if (method.__module__, method.__qualname__) != (cls.__module__, f"{cls.__qualname__}.{name}"):
            found[f"{_path_of(cls)}.{name}"] = digest(text_of(method))
            yield method


def _named_by(function: types.FunctionType, found: dict[str, str]) -> Iterator[Any]:
    """Things that a function names or closes over; numbers and texts are noted by their values."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())
    held = function.__globals__
    for name in _names_in(function.__code__):
        if name not in held:
            continue
        if isinstance(held[name], PLAIN):
            found[f"{module_name(function.__module__)}.{name}"] = repr(held[name])
        elif isinstance(held[name], (types.ModuleType, types.FunctionType, type)):
            yield held[name]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
