"""`Half`: forward or backward of a step while it is scheduled, with where its parameters are read (`Read`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from autopar.codegen.buffers import hands_on
from autopar.codegen.recomputed import NOTHING, Recomputed
from autopar.graph import walks


@dataclass(frozen=True, slots=True, order=True)
class Read:
    """Where forward first reads a parameter: its window, and its bucket within the window."""

    window: int
    bucket: int
    nbytes: int  # bytes of the whole parameter
    # the windows beside whose compute it is gathered, in forward and again in backward; None: in line
    beside: tuple[int | None, int | None] = (None, None)
    stays: bool = False  # whether its gathered copy is kept for backward
    is_alone: bool = False  # whether its gradient shares no bucket
    is_reduced_at_once: bool = False  # whether its gradient never waits


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """Forward or backward of a training step, while its collectives are scheduled."""

    graph: fx.Graph
    reads: Mapping[str, Read]  # keyed by the names of the parameters' placeholders
    is_backward: bool
    kept: Mapping[str, Read] = field(default_factory=dict)  # placeholders of parameters that are kept from forward
    recomputed: Recomputed = NOTHING  # nodes that backward recomputes, and the places that want them
    outputs: int | None = None  # number of forward's results that the caller gets; the others are saved
    regrouped: frozenset[str] = frozenset()  # views that change whole shapes, even where shapes of parts stay
    # placeholders that are written to, each with the place of the output that is its new value
    written: Mapping[str, int] = field(default_factory=dict)
    # the parameter from which each conversion, cast and view leads that reads nothing else
    ways: Mapping[str, str] = field(default_factory=dict)

    @property
    def leaving(self) -> list[fx.Node]:
        """The results that the caller gets: outputs in forward, gradients in backward."""
        results: Any = self.graph.output_node().args[0]
        return [n for n in results[: self.outputs] if isinstance(n, fx.Node)]

    def text(self) -> str:
        """The graph as readable Python."""
        return str(self.graph.python_code("self").src)


def fetched(graph: fx.Graph, reads: Mapping[str, Read]) -> dict[fx.Node, fx.Node]:
    """The nodes that are made of one parameter alone, each with the placeholder of that parameter."""

    def is_parameter(node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in reads

    return walks.made_of_one(graph.nodes, is_parameter, hands_on)
