"""The memory of a step, estimated without a search: how many devices it takes, and what helps where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autopar.arguments import RESERVE, device_count
from autopar.graph.graph import Graph, info, type_of
from autopar.graph.layers import innermost_block
from autopar.letters import Infeasible, Letter
from autopar.limits import LIMITS
from autopar.request import Request
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import size
from autopar.space.saved import bytes_that_stand, saved_bytes
from autopar.tracer.precision import Precision


class Fit(NamedTuple):
    """The fewest devices of a kind that hold a step, and the bytes on each.

    `states` are parameters, gradients and optimizer states; `kept` is saved for backward; `flying` is there for the
    while: gathered parameters and the largest values.
    """

    cluster: str
    room: float
    devices: int | None  # None: no number that was tried
    states: float = 0.0
    kept: float = 0.0
    flying: float = 0.0

    @property
    def bytes(self) -> float:
        return self.states + self.kept + self.flying


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of a step without recompute: what devices share (`states`), and what each holds whole (`gathered`)."""

    graph: Graph
    states: float  # parameters, gradients and states of the optimizer
    gathered: float  # the largest block of parameters, whole while it is used

    @staticmethod
    def of(graph: Graph, request: Request) -> Needs:
        computed = getattr(torch, request.precision.param).itemsize if request.precision is not None else None
        blocks: dict[str, int] = {}
        for name, node in graph.parameters.items():
            place = innermost_block(name) or name
            type_ = type_of(node)
            nbytes = type_.nbytes if computed is None else type_.nbytes // type_.itemsize * computed
            blocks[place] = blocks.get(place, 0) + nbytes
        states = bytes_that_stand(graph, request.optimizer)
        return Needs(graph, states, 2.0 * max(blocks.values(), default=0))

    def on(self, kind: str, request: Request) -> Fit:
        """The fewest devices of a kind on which the step fits: in the budget, or in memory less a reserve."""
        cluster = Cluster.of(kind)
        has_budget = request.memory_budget is not None
        return self.within(request.budget if has_budget else cluster.device.memory_bytes * (1 - RESERVE), cluster, kind)

    def within(self, room: float, cluster: Cluster, kind: str = "") -> Fit:
        """The fewest devices, among powers of two, on which the step fits in `room` bytes each."""
        kept = saved_bytes(self.graph, cluster, emitted=True)
        largest = max(type_.nbytes for node in self.graph.nodes for type_ in info(node).outputs)
        for n in (2**k for k in range(LIMITS.devices.bit_length())):
            gathered = self.gathered if n > 1 else 0.0
            found = Fit(kind, room, n, self.states / n, kept / n, gathered + 2 * largest / n)
            if found.bytes <= room:
                return found
        return Fit(kind, room, None)


def with_remedies(letter: Infeasible, request: Request, graph: Graph, traced: Callable[[Request], Graph]) -> Infeasible:
    """The letter about a budget that no plan fits, with remedies: devices, precision, arguments to free.

    `traced` gives the graph of another request of the same model.
    """
    if not letter.smallest:
        return letter  # no budget was in the way
    if letter.is_of_states and (request.parallel is not None or request.constraints):
        return letter  # The request keeps parameters whole on any number of devices.
    found = [*_ruled_out(letter, request), *_devices(request, graph, traced)]
    return letter.but(advice="; ".join([letter.advice, *found]))


def _ruled_out(letter: Infeasible, request: Request) -> Iterator[str]:
    """Advice about arguments that keep the search from saving memory."""
    if letter.is_of_states:
        return  # nothing of it makes these less
    for name, rules_out in (("recompute", "none"), ("microbatches", 1), ("chunks", 1)):
        if getattr(request, name) == rules_out:
            yield f'{name}="auto", which was ruled out'
    if request.recompute not in ("auto", "none"):
        yield 'recompute="auto", which may drop other values'


def _devices_of(request: Request) -> int:
    """The number of devices that a request is for."""
    asked = request.mesh
    if asked is None or isinstance(asked, int):
        return device_count(asked, request.hardware)
    return DeviceMesh.of(asked).size


def _devices(request: Request, graph: Graph, traced: Callable[[Request], Graph]) -> Iterator[str]:
    """Advice about how many more devices would do, as the request is and with bfloat16.

    What a preset or constraints keep whole is not known to the estimate.
    """
    if request.parallel is not None or request.constraints:
        return
    asks: list[tuple[str, dict[str, Any]]] = [("", {})]
    if request.precision is None:
        asks.append(('precision="bf16"', {"precision": Precision("bfloat16", "float32")}))
    said = []
    for what, how in asks:
        other = replace(request, **how)
        try:
            fit = Needs.of(traced(other) if how else graph, other).within(request.budget, request.hardware)
        except Letter:  # a model that does not run so
            continue
        if fit.devices is not None and fit.devices > _devices_of(request):
            said.append(f"{fit.devices} devices{f' with {what}' if what else ''} ({size(fit.bytes)} each)")
    if said:
        yield f"an estimate without recompute: {', or '.join(said)}"
