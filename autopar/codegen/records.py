"""`Records`: halves of programs as data, by what they are lowered from, so that one process lowers for many.

A key is a digest of the local program and of every decision that its halves depend on; it is equal in any process. So a
graph, a plan and records are a lowered program: all else that a rank needs follows from the graph and the plan.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch.fx as fx

from autopar.codegen import archive
from autopar.codegen.archive import Data
from autopar.codegen.halves import Joint
from autopar.codegen.local import LocalProgram
from autopar.collector import without_collections
from autopar.letters import BadProgram
from autopar.ops.entry import Op
from autopar.ops.lookup import own_name
from autopar.runtime.private import OpOverload


@dataclass(slots=True, eq=False)
class Records:
    """The halves that are known as data, and those that a lowering has used."""

    known: Mapping[str, Data] = field(default_factory=dict)
    beside: Callable[[str], Collection[str]] = lambda key: ()  # Other ranks use these known ones beside a key.
    # What the certificate of these halves has left open, as text, where one was made; None: none was.
    left_open: str | None = None
    used: dict[str, Joint] = field(default_factory=dict)
    lowered: set[str] = field(default_factory=set)  # keys of those that were traced here
    of_others: dict[str, Data] = field(default_factory=dict)  # Only other ranks have used these.

    def get(self, key: str, lower: Callable[[], Joint]) -> Joint:
        """The halves under a key: read where they are known, else lowered."""
        if (data := self.known.get(key)) is not None:
            return archive.read(data)
        self.lowered.add(key)
        return lower()

    @property
    def are_certified(self) -> bool:
        """Whether a certificate was made of all halves that were used."""
        return self.left_open is not None and self.used.keys() <= self.known.keys()

    @without_collections
    def data(self) -> dict[str, Data]:
        """The halves that were used, here and on other ranks, as data."""
        mine = {key: self.known.get(key) or archive.write(joint) for key, joint in self.used.items()}
        beside = {other: self.known.get(other) for key in self.used for other in self.beside(key)}
        return {**{key: data for key, data in beside.items() if data is not None}, **self.of_others, **mine}

    def own_data(self) -> dict[str, Data]:
        """Those of the halves that were lowered here, as data."""
        return {key: data for key, data in self.data().items() if key in self.lowered}


@without_collections
def packed(data: Any) -> bytes:
    """Data as compressed JSON."""
    return zlib.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), level=6)


@without_collections
def unpacked(given: bytes) -> Any:
    """The data that was packed; a letter where the bytes are not such."""
    try:
        return json.loads(zlib.decompress(given))
    except (ValueError, zlib.error, RecursionError) as e:
        raise BadProgram("these bytes are not a program", seen=f"{type(e).__name__}: {e}") from e


def key_of(program: LocalProgram, *decisions: Any) -> str:
    """A digest of all that the halves of a program depend on, which is equal in any process."""
    nodes = [(n.op, n.name, _name_of(n), *about) for n, about in program.recorded]
    what = nodes, program.types, program.inputs, program.parameters, program.buffers, decisions
    return hashlib.sha256(_said(what).encode()).hexdigest()[:32]


def _name_of(node: fx.Node) -> str:
    """The name of a node's function."""
    target: Any = node.target
    if isinstance(target, Op):
        return f"{target.name} {own_name(target.call)}"
    if isinstance(target, (str, OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def _said(value: Any) -> str:
    """A value as text that does not depend on the order of sets and dicts."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_said, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(map(_said, value.items())))}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_said, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_said(getattr(value, f.name)) for f in fields(value))})"
    return repr(value)
