"""`Fitting`: the fewest devices of a kind that hold a training step, by plans of it.

Numbers of devices are tried from the fewest on that no plan's parameters, gradients and optimizer states exceed. Each
is planned, in as few micro-batches as need no recompute by an estimate; where there is no such number, in as many as
leave every device a row of the batch. What fits is a plan that was found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.graph.graph import Graph, rows_of_batch
from autopar.letters import Infeasible, NotServed
from autopar.limits import LIMITS
from autopar.needs import Needs
from autopar.planning import Planning
from autopar.request import Request
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import several, size
from autopar.solver.limits import LIMITS as SOLVER
from autopar.solver.plan import Plan
from autopar.turns import FEW, head_of, in_chunks, numbers_of_chunks
from autopar.workload import workload_of

log = logging.getLogger("autopar")


class KindFit(NamedTuple):
    """A kind of device, and the plan on the fewest that hold a step; None where no number that was tried does."""

    kind: Cluster
    room: float  # bytes of a device that a plan may use
    plan: Plan | None
    refused: tuple[int, ...] = ()  # numbers of devices that were planned, and nothing fitted
    is_late: bool = False  # whether the plan, the fastest that was found, takes more days than a goal has


def counts_of(rows: int, node: int) -> Iterator[int]:
    """The numbers of devices that are planned: divisors of a node, then whole nodes.

    They share the rows of the batch evenly. Where there are more devices than rows can be shared by, the others cut
    weights, so that these groups have to share a node evenly.
    """
    sizes = [n for n in range(1, node) if node % n == 0] + list(range(node, LIMITS.devices + 1, node))
    return (n for n in sizes if node % (n // math.gcd(n, rows)) == 0)


@dataclass(slots=True, eq=False)
class Fitting:
    """Plans of one batch on any number of devices of any kind. Graphs of its micro-batches are made once."""

    request: Request  # The search sets its mesh and cluster.
    graph: Graph
    turned: dict[tuple[int, bool], Graph] = field(
        default_factory=dict
    )  # Keys: micro-batches, and whether the head is in chunks.
    needs: dict[str, Needs] = field(default_factory=dict)  # The key is the kind of kernels of a device.
    why_whole: str = ""  # why the model cannot run in micro-batches
    host_budget: str | int = 0  # bytes of a kind's own host that a device may use

    def counts(self, kind: Cluster) -> Iterator[int]:
        return counts_of(rows_of_batch(self.graph), kind.devices_per_node)

    def fewest(self, kind: Cluster) -> KindFit:
        """The plan on the fewest devices of a kind that hold a step."""
        room = self._on(kind, 1).budget
        refused = dict[int, float]()  # the smallest plan of each number of devices that holds no plan
        for devices in self.counts(kind):
            if self._needs(kind).least / devices > room or _is_hopeless(refused, devices, room):
                continue
            try:
                return KindFit(kind, room, self.on(kind, devices), tuple(refused))
            except Infeasible as e:
                refused[devices] = e.smallest
                log.info("%s: no plan on %s: %s", kind.name, several(devices, "device"), e.seen.partition(";")[0])
        return KindFit(kind, room, None, tuple(refused))

    def on(self, kind: Cluster, devices: int) -> Plan:
        """The plan on so many devices of a kind, with the micro-batches that it needs; raises `Infeasible`."""
        request = self._on(kind, devices)
        turns, is_roomy = self._turns(kind, devices, request.budget)
        *fewer, _ = (n for n in self._numbers(devices) if n <= turns)
        best = self._planned(request, turns, is_roomy)
        while fewer and best.recompute_s < _waiting_s(best) > LIMITS.waits * best.step_time_s:
            try:
                other = self._planned(request, fewer.pop(), is_roomy=False)
            except Infeasible:
                break
            if other.step_time_s >= best.step_time_s:
                break
            best = other
        return best

    def _planned(self, request: Request, turns: int, is_roomy: bool) -> Plan:
        """The plan in so many micro-batches. If not roomy, it recomputes, with a loss head in chunks."""
        mesh = DeviceMesh.of(request.mesh)
        hardware = request.hardware.name
        where = f"{hardware}: {several(mesh.size, 'device')}"
        log.info("%s: planning in %s", where, several(turns, "micro-batch"))
        graph = self._graph(turns, not is_roomy)
        plan = Planning(request, graph, math.inf, is_tight=not is_roomy).on(mesh)
        log.info("%s: a plan was found, of %s each", where, size(plan.peak_bytes))
        return replace(plan, workload=workload_of(self.graph, request))

    def _on(self, kind: Cluster, devices: int) -> Request:
        """The request for so many devices of a kind: rows on the first axis, weights on what is left."""
        shared = math.gcd(rows_of_batch(self.graph), devices)
        shape = (devices,) if shared in (1, devices) else (shared, devices // shared)
        hardware = kind.of_nodes(-(-devices // kind.devices_per_node))
        gap = max(self.request.gap, LIMITS.fit_gap)
        mesh = DeviceMesh.of(shape)
        return replace(self.request, mesh=mesh, cluster=hardware, gap=gap, host_budget=self.host_budget)

    def _needs(self, kind: Cluster) -> Needs:
        kernels = kind.device.kernels
        if kernels not in self.needs:
            self.needs[kernels] = Needs.of(self.graph, replace(self.request, cluster=kind))
        return self.needs[kernels]

    def _turns(self, kind: Cluster, devices: int, room: float) -> tuple[int, bool]:
        """The number of micro-batches to plan with, and whether an estimate needs no recompute in them."""
        needs = self._needs(kind)
        numbers = self._numbers(devices)
        for turns in numbers:
            if needs.on(devices, turns).bytes <= room:
                return turns, True
        return numbers[-1], False

    def _numbers(self, devices: int) -> list[int]:
        """The numbers of micro-batches that leave every device that shares the rows one row at least."""
        rows = rows_of_batch(self.graph)
        each = rows // math.gcd(rows, devices)
        if each == 1 or not self._may_turn(each):
            return [1]
        return [n for n in range(1, each + 1) if each % n == 0]

    def _may_turn(self, turns: int) -> bool:
        """Whether the model may run on some rows of a batch at a time."""
        if not self.why_whole:
            try:
                self._graph(turns, False)
            except NotServed as e:
                self.why_whole = e.what
                log.info("in one micro-batch: %s", e.what)
        return not self.why_whole

    def _graph(self, turns: int, in_parts: bool) -> Graph:
        """The graph of one of `turns` micro-batches, with its loss head in a few chunks where that is wanted."""
        if (turns, in_parts) not in self.turned:
            graph = self._graph(turns, False) if in_parts else self.request.in_turns(self.graph, turns)
            keeps = self.request.keeps_outputs
            head = head_of(graph, keeps).head if in_parts else None
            few = [n for n in (numbers_of_chunks(head) if head is not None else ()) if n <= FEW]
            self.turned[turns, in_parts] = in_chunks(graph, few[-1], keeps) if few else graph
        return self.turned[turns, in_parts]


def _is_hopeless(refused: dict[int, float], devices: int, room: float) -> bool:
    """Whether so many devices are far too few, if they divide the smallest plan on fewer evenly."""
    return any(
        math.isfinite(smallest) and smallest * fewer / devices > SOLVER.recompute.far * room
        for fewer, smallest in refused.items()
    )


def _waiting_s(plan: Plan) -> float:
    """Seconds of a step in which devices wait for communication."""
    return sum(c.seconds for c in plan.conversions) - plan.hidden_s
