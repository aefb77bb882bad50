"""Rewrite the local program before it is differentiated: passes with a before and an after, in the order of PASSES."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from autopar.codegen.local import LocalProgram
from autopar.graph.graph import info


def drop_unread_ops(program: LocalProgram) -> None:
    """Remove ops that nothing reads: casts of parameters whose conversions cast; draws stay.

    before    w = to(p, bfloat16);  v = convert(p, "all_gather(0:64)@dp", ..., "bfloat16");  y = mm(x, v)
    after     v = convert(p, "all_gather(0:64)@dp", ..., "bfloat16");  y = mm(x, v)
    """
    for node in program.fx.nodes:
        about = info(node) if node.op == "call_function" else None
        if about is not None and about.kind == "op" and about.random < 0 and not node.users:
            program.fx.erase_node(node)


PASSES: tuple[Callable[[LocalProgram], None], ...] = (drop_unread_ops,)


def verify(program: LocalProgram, after: str) -> None:
    """Raise unless operands stand before their readers and every node but the output is described."""
    seen: set[fx.Node] = set()
    for node in program.fx.nodes:
        assert seen.issuperset(node.all_input_nodes), (after, node)
        assert node.op == "output" or info(node), (after, node)
        seen.add(node)
