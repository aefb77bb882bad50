"""The ops that a custom op of autopar's stands for, as a graph of its own: what a kernel makes has the type that they
give it.

A custom op runs them itself wherever no kernel does. They are traced once for each call that is alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import kernels
from autopar.kernels import backend
from autopar.kernels.over import pure
from autopar.runtime.private import TRACING, FakeTensorMode, clean_room, function_of

_OURS = "autopar::"
# what these tell of a device's part of a vocabulary has no type
_OF_PARTS = "autopar::cross_entropy_rows", "autopar::cross_entropy_shares", "autopar::cross_entropy_part"


def _name(target: Any) -> str:
    """The name of a custom op, as it was registered."""
    return str(pure(target)).rpartition(".")[0].replace(".", "::", 1)


def is_body_known(target: Any) -> bool:
    """Is it the custom op of a kernel, which runs the ops that it stands for where no kernel does?"""
    name = _name(target)
    if not name.startswith(_OURS) or name.startswith(_OF_PARTS):
        return False
    return str(getattr(function_of(name), "__module__", "")).startswith(kernels.__name__)


def body_of(node: fx.Node) -> fx.Graph:
    """The graph of what a call runs, whose placeholders are its tensors in their order.

    It gives a list of results.
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
        return make_fx(torch.func.functionalize(run, remove="mutations"))(*fake).graph  # as values alone
