"""Tell tensors of parallel models from others: they lie on a mesh on which a parallel model stores parameters."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch.distributed.tensor import DTensor

_LOCK = threading.Lock()
# live meshes by identity, as equal meshes end at different times; replaced and never changed, as threads read it
_meshes: tuple[weakref.ref[Any], ...] = ()


def own(mesh: Any) -> None:
    """Note that a parallel model stores parameters on this mesh, for as long as the mesh lives."""
    global _meshes
    with _LOCK:
        alive = [ref for ref in _meshes if ref() is not None]
        if all(ref() is not mesh for ref in alive):
            alive.append(weakref.ref(mesh))
        _meshes = tuple(alive)


def is_ours(tensor: Any) -> bool:
    """Whether a tensor is a DTensor of a parallel model: a parameter, a gradient, an optimizer's state.

    Meshes are compared by value: torch's caches return a mesh that is equal to the one that was given.
    """
    if not isinstance(tensor, DTensor):
        return False
    alive = [ref() for ref in _meshes]
    return any(mesh is not None and mesh == tensor.device_mesh for mesh in alive)
