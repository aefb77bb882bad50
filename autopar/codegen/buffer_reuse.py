"""Write results over an operand that nothing reads afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from autopar.codegen.buffers import buffer_of, is_view
from autopar.kernels.buffer_reuse import twin_of
from autopar.runtime.collectives import part_start
from autopar.runtime.private import OpOverload

if TYPE_CHECKING:
    from autopar.codegen.half import Half


def write_over(half: Half) -> None:
    """Replace ops by their in-place twins where the first operand is not read afterwards.

    before    z = mm(c, w);  r = cross_entropy(z, t, -100, 0.0);  e = cross_entropy_backward(z, d, t, r[1], -100, 0.0)
    after     z = mm(c, w);  r = cross_entropy(z, t, -100, 0.0);  e = cross_entropy_backward_(z, d, t, r[1], -100, 0.0)

    An op of this half must have made that operand, or it is an input whose new value the op makes. All its readers must
    come before and read it at once: a collective that reads it may still be under way.
    """
    calls = [(n, _TWINS.get(n.target) or twin_of(n.target)) for n in half.graph.nodes if n.op == "call_function"]
    able = [(node, twin) for node, twin in calls if twin is not None]
    if not able:
        return
    place = {node: i for i, node in enumerate(half.graph.nodes)}
    read: dict[fx.Node, list[fx.Node]] = {}  # nodes that read or show a memory, by its owner
    for node in half.graph.nodes:
        read.setdefault(buffer_of(node), []).extend(node.users)
    for node, twin in able:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        owner = buffer_of(operand)
        is_read_before = all(place[n] <= place[node] and _reads_at_once(n) for n in read[owner])
        is_free = _is_made_here(owner) or _is_new_value(half, owner, node)
        if is_free and operand.meta["val"].is_contiguous() and is_read_before:
            node.target = twin


_TWINS: dict[Any, OpOverload] = {torch.ops.aten.index_copy.default: torch.ops.aten.index_copy_.default}


def _is_new_value(half: Half, owner: fx.Node, node: fx.Node) -> bool:
    """Whether a node makes the new value of an input that is written to."""
    return owner.name in half.written and half.leaving[half.written[owner.name]] is node


def _reads_at_once(node: fx.Node) -> bool:
    """Whether the node has read its operands when the next one runs; an asynchronous collective has not."""
    return isinstance(node.target, OpOverload) or node.target is part_start


def _is_made_here(node: fx.Node) -> bool:
    """Whether the node is a torch op with one result, in memory of its own."""
    target = node.target
    return isinstance(target, OpOverload) and len(target._schema.returns) == 1 and not is_view(node)
