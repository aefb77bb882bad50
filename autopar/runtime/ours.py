"""Whether a tensor is a parallel model's: it lies on a mesh on which one stores parameters."""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.tensor import DTensor

# by identity, for equal meshes end at different times
_MESHES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def own(mesh: Any) -> None:
    """Note that parameters of a parallel model lie on this mesh, as long as it lives."""
    _MESHES[id(mesh)] = mesh


def is_ours(tensor: Any) -> bool:
    """Is it a DTensor of a parallel model: a parameter, a gradient, an optimizer's state?

    Meshes are compared by value: torch's caches hand out a mesh that is equal to the one that was given.
    """
    return isinstance(tensor, DTensor) and any(mesh == tensor.device_mesh for mesh in tuple(_MESHES.values()))
