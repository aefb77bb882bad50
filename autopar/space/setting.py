"""`Setting`: the mesh, the machine and the training step that a space is built for."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import DURING_BACKWARD
from autopar.sharding.mesh import DeviceMesh
from autopar.space.windows import BUCKET


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a space depends on, beside its graph and constraints."""

    mesh: DeviceMesh
    cluster: Cluster
    optimizer: str | float = "adamw"  # a name, or bytes of states for each parameter
    accumulation: int = 1  # calls that make one optimizer step
    reduce: str = ""  # the one dtype in which gradients of parameters are reduced; "": each in its own
    window_bytes: int = BUCKET  # least bytes of parameters in a window, but for the last
    regather: bool = False  # whether gathered parameters may be dropped and gathered again
    compiled: bool = False  # whether torch.compile makes the code
    kernels: tuple[str, ...] = ()  # families of autopar's kernels that may stand for groups of ops
    apart: frozenset[str] = frozenset()  # results of groups that no kernel stands for, by name
    strict: bool = False  # whether an op without a rule is an error
    host_bytes: float = 0.0  # bytes of the host that optimizer states of a device may take
    parts_on_host: bool = False  # whether parameters themselves may lie there too, beside their states
    turns: int = 1  # micro-batches of a call; the graph is of one

    @property
    def steps_in_backward(self) -> bool:
        """Whether the host steps parameters while backward goes on; several passes end with final gradients."""
        return self.optimizer == DURING_BACKWARD and self.passes == 1

    @property
    def passes(self) -> int:
        """The number of times that the graph runs in a step."""
        return self.accumulation * self.turns
