"""Remove views that a half does not need: no kernel runs for a view, but the host spends time on starting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from autopar.codegen.buffers import is_view, read_instead
from autopar.codegen.joint_graph import BACK, OP
from autopar.runtime.private import UNSAFE_VIEW

if TYPE_CHECKING:
    from autopar.codegen.half import Half

_ATEN = torch.ops.aten
_RESHAPES = (_ATEN.reshape.default, _ATEN.view.default, UNSAFE_VIEW)
_GROWS = (*_RESHAPES, _ATEN.expand.default)
_TURNS = (_ATEN.t.default, _ATEN.transpose.int)
_SUM = _ATEN.sum.dim_IntList


def drop_idle_views(half: Half) -> None:
    """Remove views that change nothing, and views that were taken before.

    before    u = t(w);  v = t(u);  a = view(x, [4, 4]);  c = mm(a, v);  d = mm(z, t(w));  s = sum(d, [0], True);
              r = view(s, [4])                                                                # x is of 4 x 4
    after     u = t(w);  c = mm(x, w);  d = mm(z, u);  r = sum(d, [0])

    Two kinds of views stay, because a certificate needs them to tell how a value is cut: those that change the
    shape of the whole tensor, also where the shape of the part stays the same, and views of views. A result of the half
    never becomes another result or an input.
    """
    leaving = set(half.leaving)
    taken: dict[Any, fx.Node] = {}
    views = [n for n in half.graph.nodes if _only_shows(n)]
    for node in views:
        stays = node.target in _GROWS and (node.meta.get(BACK) or node.meta.get(OP)) in half.regrouped
        value = (None if stays else _the_same(node)) or taken.setdefault(_key(node), node)
        if value is node or (node in leaving and (value in leaving or value.op == "placeholder")):
            continue
        if node in leaving:
            leaving.add(value)
        read_instead(node, value)
    for node in reversed(views):
        if not node.users:
            half.graph.erase_node(node)


def _only_shows(node: fx.Node) -> bool:
    """Whether a node is a view with positional arguments only, and writes to nothing."""
    if node.op != "call_function" or node.kwargs or not is_view(node):
        return False
    return node.target is UNSAFE_VIEW or not node.target._schema.is_mutable


def _the_same(node: fx.Node) -> fx.Node | None:
    """The value that a view equals, or None.

    A sum that keeps its dims is first rewritten to drop them.
    """
    before = node.args[0]
    if not isinstance(before, fx.Node):
        return None
    if node.target in _RESHAPES and node.meta["val"].shape == before.meta["val"].shape:
        return before
    if node.target in _RESHAPES and _is_without_its_dims(node, before):
        before.args = before.args[:2]
        before.meta["val"] = node.meta["val"]
        return before
    if node.target in _TURNS and before.target in _TURNS and _swapped(node) == _swapped(before):
        value: fx.Node = before.args[0]
        return value
    return None


def _is_without_its_dims(node: fx.Node, before: fx.Node) -> bool:
    """Whether the view drops the dims that a sum has kept, and alone reads that sum."""
    is_sum = before.target is _SUM and before.args[2:] == (True,) and not before.kwargs
    if not is_sum or not before.args[1] or len(before.users) > 1:
        return False
    shape: Any = before.args[0].meta["val"].shape
    summed = {d % len(shape) for d in before.args[1]}
    return list(node.meta["val"].shape) == [n for d, n in enumerate(shape) if d not in summed]


def _swapped(node: fx.Node) -> set[int]:
    """The two dims that a transpose swaps; empty for a tensor of rank 1 or 0."""
    rank = node.meta["val"].dim()
    first, second = node.args[1:] if len(node.args) > 1 else (0, rank - 1)
    return {first % rank, second % rank} if rank > 1 else set()


def _key(node: fx.Node) -> Any:
    """A key that is equal for equal views of one value."""
    return node.target, tuple(tuple(a) if isinstance(a, list) else a for a in node.args)
