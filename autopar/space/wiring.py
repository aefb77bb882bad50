"""`Wiring`: the sites and edges of a space, with the graph nodes that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import info
from autopar.space.space import Edge, Site

SiteKey: TypeAlias = Any  # a node, or the output node and a position


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """Sites and edges in the order of the space, and the nodes that they stand for."""

    sites: tuple[Site, ...]
    edges: tuple[Edge, ...]
    values: tuple[fx.Node, ...]  # edge -> the value that it carries
    takers: tuple[fx.Node, ...]  # edge -> the node that takes it
    index: Mapping[SiteKey, int]  # site -> its place in `sites`

    def site(self, node: fx.Node) -> Site:
        return self.sites[self.index[node]]


def source_of(value: fx.Node) -> tuple[fx.Node, int]:
    """The op that gives a value, and the index of the value among its outputs."""
    return (value.args[0], value.args[1]) if info(value).kind == "part" else (value, 0)


def outputs_of(node: fx.Node) -> list[fx.Node | None]:
    """The values that an op gives, in order; None for an output that nobody uses."""
    parts = {part.args[1]: part for part in walks.parts(node)}
    count = len(info(node).outputs)
    return [node] if count == 1 and not parts else [parts.get(i) for i in range(count)]
