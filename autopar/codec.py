"""Values as JSON by their types: what a `Codec` writes it reads again, and checks.

    str, bool             as they are
    int                   a whole number from 0
    float                 a finite number
    T | None              null, or T
    tuple, frozenset      a list; of a set in sorted order
    Mapping[str, T]       an object
    a dataclass           an object by the names of its fields, of which one with a default may be missing

Where a type does not say enough, a function does: for a type, or for an attribute by its name. A file is edited, or
comes from somewhere else: data that does not read is an error that says where it is, as `decisions.up/linear.seconds`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Read = Callable[[Any], Any]  # takes data of JSON; raises one of UNREADABLE, or a letter
Write = Callable[[Any], Any]

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
_MOST = 2**62  # whole numbers in a file must be smaller


class Misread(ValueError):
    """Raised for data that does not read, with its place."""

    def __init__(self, place: object, why: Exception) -> None:
        super().__init__(f"{seen(why)}, at {place}")
        self.place = place
        self.why = why


def seen(error: Exception) -> str:
    """The text of an error of reading, for a letter."""
    return str(error) if isinstance(error, Misread) else f"{type(error).__name__}: {error}"


class Codec:
    """Writes and reads values by their types, or by functions for types and for attributes by their names."""

    def __init__(self, reads: Mapping[Any, Read], writes: Mapping[Any, Write], is_strict: bool = False) -> None:
        self._reads = {str: text, bool: truth, int: whole, float: number, **reads}
        self._writes = writes
        self._is_strict = is_strict  # whether an object with an unknown name is an error

    def write(self, value: Any, keys: Iterable[str]) -> dict[str, Any]:
        """These attributes of a value as an object."""
        found = {}
        for key in keys:
            write = self._writes.get(key, self.plain)
            found[key] = write(getattr(value, key))
        return found

    def plain(self, value: Any) -> Any:
        """A value as data that JSON can hold."""
        if type(value) in self._writes:
            return self._writes[type(value)](value)
        if dataclasses.is_dataclass(value):
            return self.write(value, fields_of(value))
        if isinstance(value, Mapping):
            return {name: self.plain(v) for name, v in value.items()}
        if isinstance(value, (tuple, frozenset)):
            return [self.plain(v) for v in (sorted(value) if isinstance(value, frozenset) else value)]
        return value

    def read(self, cls: type, data: Any, missing: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        """These attributes of a `cls` from an object; those that it lacks are in `missing`, or an error."""
        return _filled({key: self._named(cls, key) for key in keys}, data, missing)

    def reader(self, kind: Any) -> Read:
        """The function that reads values of a type."""
        if kind not in self._reads:
            self._reads[kind] = self._derived(kind)
        return self._reads[kind]

    def _named(self, cls: Any, key: str) -> Read:
        """The function that reads an attribute of a class, a field or a property."""
        if key in self._reads:
            return self._reads[key]
        owned = getattr(cls, key, None)
        kind = _hints(owned.fget)["return"] if isinstance(owned, property) else _hints(cls)[key]
        return self.reader(kind)

    def _derived(self, kind: Any) -> Read:
        origin = typing.get_origin(kind)
        inner = typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            return self._record(kind)
        if origin in (types.UnionType, typing.Union) and inner[1:] == (types.NoneType,):
            read = self.reader(inner[0])
            return lambda data: None if data is None else read(data)
        if origin is tuple and inner[1:] != (...,):
            return in_order(*map(self.reader, inner))
        if origin in (tuple, frozenset):
            read = each(self.reader(inner[0]))
            return lambda data: origin(read(data))
        assert origin in (dict, Mapping), kind
        return by_name(self.reader(inner[1]))

    def _record(self, cls: Any) -> Read:
        reads = {name: self._named(cls, name) for name in fields_of(cls)}
        missing = defaults_of(cls)

        def read(data: Any) -> Any:
            found = _filled(reads, data, missing)
            if self._is_strict and (unknown := sorted(data.keys() - found.keys())):
                raise KeyError(f"{unknown[0]} is not one of {', '.join(found)}")
            return cls(**found)

        return read


def fields_of(record: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(record)]


def defaults_of(record: Any) -> dict[str, Any]:
    """The defaults of a dataclass's fields by name."""
    given = {field.name: field.default for field in dataclasses.fields(record)}
    return {name: default for name, default in given.items() if default is not dataclasses.MISSING}


_hints = functools.cache(typing.get_type_hints)


def _filled(reads: Mapping[str, Read], data: Any, missing: Mapping[str, Any]) -> dict[str, Any]:
    given = entries(data)
    found = {}
    for key, read in reads.items():
        if key in given:
            found[key] = _read_at(key, read, given[key])
        elif key in missing:
            found[key] = missing[key]
        else:
            raise KeyError(key)
    return found


def _read_at(place: object, read: Read, data: Any) -> Any:
    try:
        return read(data)
    except Misread as e:
        raise Misread(f"{place}.{e.place}", e.why) from e.why
    except UNREADABLE as e:
        raise Misread(place, e) from e


# -- reading containers


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these pairs, unless a name stands twice."""
    listed = list(pairs)
    if len(found := dict(listed)) < len(listed):
        raise ValueError("a name stands twice in one object")
    return found


def each(read: Read) -> Read:
    """Reads a list as a tuple."""
    return lambda data: tuple(_read_at(i, read, v) for i, v in enumerate(items(data)))


def in_order(*reads: Read) -> Read:
    """Reads a list of so many values as a tuple."""

    def read(data: Any) -> tuple[Any, ...]:
        if len(items(data)) != len(reads):
            raise ValueError(f"{shown(data)} does not have {len(reads)} entries")
        return tuple(_read_at(i, one, v) for i, (one, v) in enumerate(zip(reads, data, strict=True)))

    return read


def by_name(read: Read) -> Read:
    """Reads an object as a dict."""
    return lambda data: {text(name): _read_at(name, read, v) for name, v in entries(data).items()}


def pairs_by_name(read: Read) -> Read:
    """Reads an object as pairs of a name and a value in sorted order; `dict` writes them."""
    named = by_name(read)
    return lambda data: tuple(sorted(named(data).items()))


# -- reading what stands in them


def shown(value: Any) -> str:
    """A value of a file as short text."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:80]


def _of(kind: Any, what: str) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{shown(value)} is not {what}")
        return value

    return read


items = _of((list, tuple), "a list")
entries = _of(Mapping, "an object")
text = _of(str, "a string")
truth = _of(bool, "true or false")


def number(value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Reads a finite number in a range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{shown(value)} is not a finite number")
    if not least <= value <= most:
        end = f" to {most:g}" if math.isfinite(most) else ""
        raise ValueError(f"{shown(value)} is not a number from {least:g}{end}")
    return float(value)


def whole(value: Any, least: int = 0, most: int = _MOST) -> int:
    """Reads a whole number in a range, without its end."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < most:
        raise ValueError(f"{shown(value)} is not a whole number from {least} to {most}")
    return value
