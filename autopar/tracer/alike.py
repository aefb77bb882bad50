"""Numbers of values: equal for nodes of a graph that compute the same, once or several times."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from autopar.graph.graph import Graph, info


class Numbers:
    """A number for every node of a graph.

    Two nodes have one number if their ops, arguments and types agree, and their operands have one number each. A draw
    is like no other node, and so is an input or a parameter.
    """

    def __init__(self, graph: Graph) -> None:
        self.first: list[fx.Node] = []  # the first node of each number
        self._of: dict[fx.Node, int] = {}
        known: dict[Any, int] = {}
        for node in graph.nodes:
            about = info(node)
            key: Any = node
            if node.op == "call_function" and about.random < 0:
                key = node.target, self._key(node.args), self._key(node.kwargs), about.outputs
            self._of[node] = known.setdefault(key, len(known))
            if self._of[node] == len(self.first):
                self.first.append(node)

    def __getitem__(self, node: fx.Node) -> int:
        return self._of[node]

    def _key(self, value: Any) -> Any:
        """An argument in a form to compare."""
        if isinstance(value, fx.Node):
            return fx.Node, self._of[value]
        if isinstance(value, (tuple, list)):
            return tuple(map(self._key, value))
        if isinstance(value, dict):
            return tuple((name, self._key(given)) for name, given in value.items())
        return type(value), repr(value)
