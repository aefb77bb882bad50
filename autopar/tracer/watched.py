"""Numbers that tell when something is decided by them: a count of calls that only grows decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def watched(value: int | float, name: str, decides: set[str]) -> int | float:
    """A number that adds its name to a set where something goes by it; so does what is computed from it."""
    made: Any = (_Int if isinstance(value, int) else _Float)(value)
    made.name = name
    made.decides = decides
    return made


def unwatched(value: Any) -> Any:
    """A watched number as a plain one; anything else as it is."""
    if isinstance(value, _Int):
        return int.__pos__(value)
    return float.__pos__(value) if isinstance(value, _Float) else value


class _Int(int):
    """An int that is watched."""


class _Float(float):
    """A float that is watched."""


def _computed(of: type, name: str) -> Callable[..., Any]:
    theirs = getattr(of, name)

    def compute(self: Any, *others: Any) -> Any:
        made = theirs(self, *others)
        return watched(made, self.name, self.decides) if type(made) in (int, float) else made

    return compute


def _decided(of: type, name: str) -> Callable[..., Any]:
    theirs = getattr(of, name)

    def decide(self: Any, *others: Any) -> Any:
        self.decides.add(self.name)
        return theirs(self, *others)

    return decide


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv neg pos abs pow rpow".split()
# Floor division and modulo decide: their result may be the same in the next call and differ in the tenth.
_DECISIONS = "bool eq ne lt le gt ge hash floordiv rfloordiv mod rmod divmod int float round trunc floor ceil".split()
for _cls, _of in ((_Int, int), (_Float, float)):
    for _name in _ARITHMETIC:
        setattr(_cls, f"__{_name}__", _computed(_of, f"__{_name}__"))
    for _name in _DECISIONS:
        setattr(_cls, f"__{_name}__", _decided(_of, f"__{_name}__"))
