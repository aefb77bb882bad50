"""Contents of Python values that can change in place: entries of lists, dicts and sets, attributes of objects.

Both who watches what a capture reads of modules (`module/attributes.py`) and who finds what forward sets on them
(`tracer/changes.py`) look into values by these functions and to these limits.
"""

from __future__ import annotations

import enum
import functools
import numbers
import types
from typing import Any

import torch
from torch import Tensor, nn

# Attributes that are torch's own: hooks, modules, parameters and buffers are looked at by themselves.
OF_TORCH = frozenset((*vars(nn.Module()), "_autopar", "_compiled_call_impl"))
PLAIN = (bool, int, float, str, type(None))
# Values of these types do not change in place.
LASTING = (
    numbers.Number,
    str,
    bytes,
    frozenset,
    torch.dtype,
    torch.device,
    enum.Enum,
    type(None),
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
)
MOST_ENTRIES = 256  # Longer lists, dicts and objects are tables, and not looked into: every call would pay for it.
MOST_LEVELS = 3  # Deeper nesting is not looked into.


def holder_of(value: Any) -> list[Any] | dict[Any, Any] | set[Any] | None:
    """The list, dict or set that a value is, or the dict of its attributes; None where it has none."""
    if isinstance(value, (list, dict, set)):
        return value
    if isinstance(value, (*LASTING, nn.Module, Tensor, types.ModuleType)):
        return None
    inside = dict_of(value)
    return inside if isinstance(inside, dict) else None


def dict_of(value: Any) -> Any:
    """The attributes of an object, unseen by whoever notes what is read of it; None where it has no dict."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def entries_of(holder: Any) -> dict[Any, Any]:
    """The entries of a list, dict or set by what they stand under."""
    if isinstance(holder, dict):
        return holder
    return dict(enumerate(holder)) if isinstance(holder, list) else dict.fromkeys(holder, True)


def has_tensors(value: Any, depth: int = MOST_LEVELS) -> bool:
    """Whether a value is a tensor, or holds one in lists, dicts or objects of a few levels."""
    if isinstance(value, (Tensor, nn.Module)) or depth < 0:
        return True
    inside = value if isinstance(value, tuple) else holder_of(value) or ()
    return any(has_tensors(one, depth - 1) for one in (inside.values() if isinstance(inside, dict) else inside))
