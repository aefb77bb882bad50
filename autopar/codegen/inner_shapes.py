"""`InnerShapes`: the shapes of what an op makes inside of whole operands, by which the certificate reads its views."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import Graph, info, run, type_of
from autopar.runtime.private import TorchDispatchMode

Shapes = tuple[tuple[int, ...], ...]


class InnerShapes:
    """The shapes that ops of a graph make in forward and backward, each looked at when it is first asked for."""

    def __init__(self, graph: Graph) -> None:
        self.ops = {n.name: n for n in graph.nodes if info(n).kind == "op"}
        self._known: dict[str, Shapes] = {}

    def __call__(self, name: str) -> Shapes:
        """The shapes of an op, by its name; none for one that the graph lacks or meta tensors cannot run."""
        if name not in self._known:
            self._known[name] = _made_by(self.ops[name]) if name in self.ops else ()
        return self._known[name]


def _made_by(node: fx.Node) -> Shapes:
    """The shapes of all results of torch's ops in one call and its backward, run on meta tensors."""
    types = {n: type_of(n) for n in node.all_input_nodes}
    given = {
        n: torch.empty(t.shape, dtype=t.torch_dtype, device="meta", requires_grad=t.requires_grad)
        for n, t in types.items()
    }
    seen = _Seen()
    try:
        with torch.enable_grad(), torch.device("meta"), seen:
            results = [t for t in pytree.tree_leaves(run(node, given)) if isinstance(t, Tensor) and t.requires_grad]
            wanted = [t for t in given.values() if t.requires_grad]
            if results and wanted:
                torch.autograd.grad(results, wanted, [torch.empty_like(t) for t in results], allow_unused=True)
    except (RuntimeError, TypeError, ValueError, IndexError):
        pass  # meta tensors cannot run it: what was seen so far
    return tuple(seen.shapes)


class _Seen(TorchDispatchMode):
    """Notes the shapes of the results of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[tuple[int, ...], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.shapes.update(dict.fromkeys(tuple(t.shape) for t in pytree.tree_leaves(made) if isinstance(t, Tensor)))
        return made
