"""`Setting`: the mesh, the machine and the training step that a space is built for."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.space.windows import BUCKET


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything a space depends on beside its graph and what is pinned."""

    mesh: DeviceMesh
    cluster: Cluster
    optimizer: str | float = "adamw"  # a name, or bytes of states for each parameter
    accumulation: int = 1  # calls in a step, each of a micro-batch of it
    reduce: str = ""  # the one dtype in which gradients of parameters are reduced; "": each in its own
    window_bytes: int = BUCKET  # of parameters that a window reads at least, but for the last
    regather: bool = False  # may gathered parameters be dropped and gathered again in backward?
    compiled: bool = False  # does torch.compile make the code?
    kernels: tuple[str, ...] = ()  # which of autopar's stand in the place of several ops
    apart: frozenset[str] = frozenset()  # results of such groups in whose place none stands, by name
    strict: bool = False  # is an op without a rule an error?
    turns: int = 1  # micro-batches of a call: the graph is that of one

    @property
    def passes(self) -> int:
        """The number of runs of the graph in a step."""
        return self.accumulation * self.turns
