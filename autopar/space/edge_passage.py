"""`EdgePassage`: a value on its way over an edge, with its bytes and its times."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from autopar.graph.graph import TensorType
from autopar.space.local_bytes import EdgeBytes
from autopar.space.space import Edge


@dataclass(frozen=True, slots=True, eq=False)
class EdgePassage:
    """A value on its way over an edge."""

    index: int
    edge: Edge
    value: fx.Node
    taker: fx.Node
    type: TensorType
    bytes: EdgeBytes
    now: int  # time at which it is taken
    back: int  # time at which its gradient comes
