"""Note which attributes of modules and settings a thread reads while it captures a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.runtime.brief_patches import note_keys, note_reads
from autopar.runtime.patches import Patch

Place = tuple[int, str]  # a module, by its number, and which of its attributes are settings; "" for its own
Reads = set[tuple[int, str, str]]  # a place, and an attribute of what stands there


@dataclass(slots=True)
class _Reader:
    """One thread that notes its reads."""

    places: Mapping[int, Place]  # place of each watched object, by the object's id
    found: Reads
    count: int = 0  # attributes of settings that it has read


class _Readers:
    """All threads that note their reads, and the patches of classes that let them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_thread: dict[int, _Reader] = {}
        self.patches: dict[type, list[Patch]] = {}
        self.users: dict[type, int] = {}  # threads that need those of a class

    def watches(self, held: Any) -> str:
        """The way this thread watches an object: as "module", as "settings", or "" for not at all."""
        reader = self.of_thread.get(threading.get_ident())
        place = None if reader is None else reader.places.get(id(held))
        if place is None:
            return ""
        return "settings" if place[1] else "module"

    def note(self, held: Any, key: str) -> None:
        """Note a read of an attribute, where this thread watches the object."""
        reader = self.of_thread.get(threading.get_ident())
        if reader is not None and (place := reader.places.get(id(held))) is not None:
            reader.found.add((*place, key))
            reader.count += bool(place[1])

    def note_all(self, held: Any) -> None:
        """Note a read of all attributes of an object."""
        for key in object.__getattribute__(held, "__dict__"):
            self.note(held, key)

    def count(self) -> int:
        """Number of attributes of settings that this thread has read."""
        return self.of_thread[threading.get_ident()].count

    def begin(self, reader: _Reader, keys: Mapping[type, set[str]]) -> None:
        """Let this thread note reads of these attributes of instances of these classes."""
        with self.lock:
            self.of_thread[threading.get_ident()] = reader
            for cls, of_one in keys.items():
                known = self.patches.get(cls)
                if known is None:
                    self.patches[cls] = note_reads(cls, of_one, self)
                else:
                    known += note_keys(cls, of_one, self)
                self.users[cls] = self.users.get(cls, 0) + 1

    def end(self, keys: Mapping[type, set[str]]) -> None:
        """Stop noting reads of this thread; a class is unpatched when its last reader ends."""
        with self.lock:
            del self.of_thread[threading.get_ident()]
            for cls in keys:
                self.users[cls] -= 1
                if self.users[cls]:
                    continue
                del self.users[cls]
                for patch in reversed(self.patches.pop(cls)):
                    patch.undo()


_READERS = _Readers()


@contextlib.contextmanager
def taking_down(places: Mapping[int, Place], keys: Mapping[type, set[str]]) -> Iterator[Reads]:
    """Yield the set of attributes that this thread reads inside the block, of the objects at these places."""
    found: Reads = set()
    _READERS.begin(_Reader(places, found), keys)
    try:
        yield found
    finally:
        _READERS.end(keys)
