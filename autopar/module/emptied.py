"""A half that takes its operands from a list and empties it.

Each is freed after its last use, and not when the call ends.
"""

from __future__ import annotations

import torch.fx as fx


def from_a_list(module: fx.GraphModule) -> fx.GraphModule:
    """Let the caller hand over what it holds; Python would keep a call's arguments until it returns.

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
        node.replace_all_uses_with(taken)
        graph.erase_node(node)
    module.recompile()
    return module
