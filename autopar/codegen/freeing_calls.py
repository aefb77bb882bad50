"""Rewrite an emitted half to take its operands from a list and empty it, so that each is freed after its last use."""

from __future__ import annotations

import torch.fx as fx

from autopar.codegen.buffers import read_instead


def from_a_list(module: fx.GraphModule) -> fx.GraphModule:
    """Pop operands from one list: Python would keep a call's arguments alive until it returns.

    before    def forward(a, b):     c = mul(a, a);  d = mul(c, b)
    after     def forward(given):    a = given.pop(0);  b = given.pop(0);  c = mul(a, a);  d = mul(c, b)          # a
              ends where c begins
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(next(iter(graph.nodes))):
        given = graph.placeholder("given")
    for node in placeholders:
        with graph.inserting_before(node):
            taken = graph.call_method("pop", (given, 0))
        taken.meta.update(node.meta)
        read_instead(node, taken)
        graph.erase_node(node)
    module.recompile()
    return module
