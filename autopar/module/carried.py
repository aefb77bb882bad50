"""Carried values of a call, as plans need them: how each is stored, and its whole shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.graph.calls import Call, leaf_names
from autopar.module.storage import Storage


def carried_shardings(model: nn.Module, call: Call, axes: Sequence[str]) -> dict[str, str]:
    """The shardings of the inputs of a call that are spread over the mesh, as text, by name."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    named = zip(leaf_names(model.forward, call.args, call.kwargs), leaves, strict=True)
    return {name: Storage.like(leaf).sharding.text(axes) for name, leaf in named if isinstance(leaf, DTensor)}


def of_whole_tensors(call: Call) -> Call:
    """The call with tensors on meta, of whole shapes, for those that are spread."""

    def whole(leaf: DTensor) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    return Call(*pytree.tree_map_only(DTensor, whole, (call.args, call.kwargs)))
