"""Tell tensors of parallel models from others: they lie on a mesh on which a parallel model stores parameters.

Stages of a pipeline have meshes of their own. A rank that is not on such a mesh has the tensor by name, without a part
of its own, and reads it from the ranks that have it (`far_of`).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from autopar.runtime.transfers import Line

_LOCK = threading.Lock()


class Far(NamedTuple):
    """How all ranks read what lies on the mesh of some stages: from one coordinate of the line."""

    line: Line
    source: int


@dataclass(frozen=True, slots=True)
class _Owned:
    """A mesh of a parallel model, for as long as the mesh lives."""

    mesh: weakref.ref[Any]
    far: Far | None


# live meshes by identity, as equal meshes end at different times; replaced and never changed, as threads read it
_meshes: tuple[_Owned, ...] = ()


def own(mesh: Any, far: Far | None = None) -> None:
    """Note that a parallel model stores parameters on this mesh, for as long as the mesh lives."""
    global _meshes
    with _LOCK:
        alive = [owned for owned in _meshes if owned.mesh() is not None]
        if all(owned.mesh() is not mesh for owned in alive):
            alive.append(_Owned(weakref.ref(mesh), far))
        _meshes = tuple(alive)


def is_ours(tensor: Any) -> bool:
    """Whether a tensor is a DTensor of a parallel model: a parameter, a gradient, an optimizer's state."""
    return isinstance(tensor, DTensor) and _owned(tensor.device_mesh) is not None


def far_of(tensor: Any) -> Far | None:
    """The way by which ranks of other stages read a tensor; None where all ranks are on its mesh."""
    owned = _owned(tensor.device_mesh) if isinstance(tensor, DTensor) else None
    return None if owned is None else owned.far


def _owned(mesh: Any) -> _Owned | None:
    """The latest of the parallel models' meshes that equals this one.

    Meshes are compared by value: torch's caches return a mesh that is equal to the one that was given.
    """
    for owned in reversed(_meshes):
        mine = owned.mesh()
        if mine is not None and mine == mesh:
            return owned
    return None
