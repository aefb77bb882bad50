"""Estimate the memory of a step without a search, and say what helps where no plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autopar.arguments import device_count
from autopar.graph.graph import Graph, info, type_of
from autopar.graph.layers import innermost_block
from autopar.letters import Infeasible, Letter
from autopar.limits import LIMITS
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import size
from autopar.space.saved import bytes_that_stand, saved_bytes
from autopar.tracer.precision import Precision


class Fit(NamedTuple):
    """Devices that hold a step, and the bytes on each.

    `states` are parameters, gradients and optimizer states; `kept` is saved for backward; `flying` is temporary:
    gathered parameters and the largest values.
    """

    devices: int | None  # None: no number that was tried
    states: float = 0.0
    kept: float = 0.0
    flying: float = 0.0

    @property
    def bytes(self) -> float:
        return self.states + self.kept + self.flying


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of a step without recompute, over all devices together, but for what each holds whole (`gathered`)."""

    states: float  # parameters, gradients and states of the optimizer
    least: float  # the same and what the optimizer's step makes: no plan has less
    gathered: float  # the largest block of parameters, whole while it is used
    kept: float  # saved for backward
    largest: float  # the largest value

    @staticmethod
    def of(graph: Graph, request: Request) -> Needs:
        computed = getattr(torch, request.precision.param).itemsize if request.precision is not None else None
        blocks: dict[str, int] = {}
        for name, node in graph.parameters.items():
            place = innermost_block(name) or name
            type_ = type_of(node)
            nbytes = type_.nbytes if computed is None else type_.nbytes // type_.itemsize * computed
            blocks[place] = blocks.get(place, 0) + nbytes
        return Needs(
            states=bytes_that_stand(graph, request.optimizer),
            least=bytes_that_stand(graph, request.optimizer, steps=True),
            gathered=2.0 * max(blocks.values(), default=0),
            kept=saved_bytes(graph, request.hardware, emitted=True),
            largest=max(type_.nbytes for node in graph.nodes for type_ in info(node).outputs),
        )

    def on(self, devices: int, turns: int = 1) -> Fit:
        """The bytes on each of so many devices, in so many micro-batches."""
        parts = devices * turns
        gathered = self.gathered if devices > 1 else 0.0
        return Fit(devices, self.states / devices, self.kept / parts, gathered + 2 * self.largest / parts)

    def within(self, room: float) -> Fit:
        """The fewest devices, among powers of two, on which the step fits in `room` bytes each."""
        fits = (self.on(2**k) for k in range(LIMITS.devices.bit_length()))
        return next((fit for fit in fits if fit.bytes <= room), Fit(None))


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
            fit = Needs.of(traced(other) if how else graph, other).within(request.budget)
        except Letter:  # a model that does not run so
            continue
        if fit.devices is not None and fit.devices > _devices_of(request):
            said.append(f"{fit.devices} devices{f' with {what}' if what else ''} ({size(fit.bytes)} each)")
    if said:
        yield f"an estimate without recompute: {', or '.join(said)}"
