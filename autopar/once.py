"""`Once`: what is made once of objects that are known by identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Once:
    """What is made once of some objects, such as tables that are too large to be compared.

    once = Once()
    table = once(("share", 2), (cost,), lambda: cost / 2)

    Objects are told apart by identity. They are kept with what is made of them: the identity of one that is gone may be
    another's.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}

    def __call__(self, what: Hashable, objects: tuple[object, ...], make: Callable[[], _T]) -> _T:
        """The value of `what` for these objects, from `make` the first time."""
        key = (what, *map(id, objects))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = objects, make()
        made: _T = found[1]
        return made

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
