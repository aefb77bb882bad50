"""Trace the ops that a custom op of autopar stands for, so that its kernel's result gets the type that they give.

A custom op runs these ops itself wherever no kernel does. Calls that are alike are traced once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import kernels
from autopar.kernels import backend
from autopar.kernels.buffer_reuse import pure
from autopar.runtime.private import TRACING, FakeTensorMode, clean_room, function_of

_OURS = "autopar::"
# results of these for a part of a vocabulary have no type
_OF_PARTS = "autopar::cross_entropy_rows", "autopar::cross_entropy_shares", "autopar::cross_entropy_part"


def _name(target: Any) -> str:
    """Registered name of a custom op, such as "autopar::bits_at"."""
    return str(pure(target)).rpartition(".")[0].replace(".", "::", 1)


def is_body_known(target: Any) -> bool:
    """Whether the op is a kernel's custom op, whose function can also run the ops that it stands for."""
    name = _name(target)
    if not name.startswith(_OURS) or name.startswith(_OF_PARTS):
        return False
    return str(getattr(function_of(name), "__module__", "")).startswith(kernels.__name__)


def body_of(node: fx.Node) -> fx.Graph:
    """The graph that a call stands for.

    The graph's placeholders are the call's tensors in order, and the graph returns a list.
    """
    function = function_of(_name(node.target))
    places = list(node.all_input_nodes)

    def run(*given: Tensor) -> list[Tensor]:
        env = dict(zip(places, given, strict=True))
        made = function(*fx.map_arg(node.args, env.__getitem__), **fx.map_arg(node.kwargs, env.__getitem__))
        return list(made) if isinstance(made, tuple) else [made]

    with TRACING, clean_room(), backend.as_ops(), FakeTensorMode():
        values = [n.meta["val"] for n in places]
        fake = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
        return make_fx(torch.func.functionalize(run, remove="mutations"))(*fake).graph  # Mutations become new values.
