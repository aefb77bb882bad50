"""`--inputs batch=auto`: the batch of a call for which most tokens pass in a second."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import autopar
from autopar.arguments import device_count
from autopar.commands.models import Named, NoModel
from autopar.letters import Infeasible
from autopar.limits import LIMITS
from autopar.needs import Needs
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import aligned, size, time
from autopar.solver.plan import Plan
from autopar.solver.workload import StepRates

log = logging.getLogger("autopar")


class Tried(NamedTuple):
    """A batch that was planned, with its plan and rates; without them where no plan fits."""

    rows: int
    plan: Plan | None = None
    rates: StepRates | None = None

    @property
    def per_s(self) -> float:
        return self.rates.per_s if self.rates is not None else 0.0


def best_batch(named: Named, given: Mapping[str, Any]) -> tuple[list[Tried], Plan]:
    """The batches that were planned, by their rows, and the plan of the best one.

    Doubled or halved from the largest batch that needs no recompute by an estimate, while more passes in a second; then
    once between the best and each neighbour.
    """
    if named.name.partition(":")[0].endswith(".py"):
        raise NoModel("batch=auto is of a configuration: a file.py gives its own inputs", advice="x=8x512, in numbers")
    search = _BatchSearch(named, given)
    search.double()
    search.refine()
    best = search.best
    if best.plan is None:
        raise search.letter
    log.info("most pass with a batch of %d: it is planned again to the end", best.rows)
    plan = autopar.plan(search.model, search.inputs(best.rows), **given)
    tried = {**search.tried, best.rows: Tried(best.rows, plan, plan.rates)}
    return [tried[rows] for rows in sorted(tried)], plan


def text_of_batches(tried: list[Tried], plan: Plan) -> list[str]:
    """A table of the batches that were planned, with a mark at that of the plan."""
    unit = next(t.rates.unit for t in tried if t.rates is not None)
    head = ("batch", "micro-batches", "recompute", "peak", "step", f"{unit}/s", "")
    return aligned(head, (_cells(t, t.plan is plan) for t in tried))


def _cells(tried: Tried, is_best: bool) -> tuple[str, ...]:
    plan = tried.plan
    if plan is None or tried.rates is None:
        return str(tried.rows), "", "", "no plan fits", "", "", ""
    share = f"{plan.recompute_s / plan.step_time_s:.1%}" if plan.recomputed else "none"
    cells = (
        str(plan.microbatches),
        share,
        size(plan.peak_bytes),
        time(tried.rates.step_s),
        f"{tried.rates.per_s:,.0f}",
    )
    return str(tried.rows), *cells, "taken" if is_best else ""


class _BatchSearch:
    """The search for a batch. Each is planned once, to within a few percent."""

    def __init__(self, named: Named, given: Mapping[str, Any]) -> None:
        self.named = named
        self.given = dict(given)
        self.request = Request(**given)
        mesh = self.request.mesh
        if mesh is None or isinstance(mesh, int):
            self.unit = device_count(mesh, self.request.hardware)
        else:
            self.unit = DeviceMesh.of(mesh).size
        self.model, first = named.with_batch(self.unit).made()
        self.needs = Needs.of(self.request.trace(self.model, first), self.request)
        self.tried = dict[int, Tried]()
        self.letter = Infeasible("no batch was planned")

    def inputs(self, rows: int) -> Any:
        return self.named.with_batch(rows).batch_of(self.model)

    @property
    def best(self) -> Tried:
        """The batch with which most passes in a second; the smallest of those within a little of it."""
        most = max(t.per_s for t in self.tried.values())
        return self.tried[min(t.rows for t in self.tried.values() if t.per_s >= (1 - LIMITS.batch_gain) * most)]

    def double(self) -> None:
        """Plan the batch of the estimate, then larger ones while they gain; else smaller ones."""
        rows = self._roomy()
        first = self._plan(rows)
        last = first
        while last.plan is not None and self._gains(larger := self._plan(2 * last.rows), last):
            last = larger
        smaller = first
        while last is first and smaller.rows >= 2 * self.unit:
            before, smaller = smaller, self._plan(smaller.rows // 2)
            if smaller.per_s <= before.per_s and before.plan is not None:
                break

    def refine(self) -> None:
        """Plan the batches halfway between the best and its neighbours."""
        best = self.best
        for rows in (best.rows * 3 // 4, best.rows * 3 // 2):
            if rows % self.unit == 0 and rows not in self.tried and best.plan is not None:
                self._plan(rows)

    def _gains(self, larger: Tried, smaller: Tried) -> bool:
        return larger.per_s > (1 + LIMITS.batch_gain) * smaller.per_s

    def _roomy(self) -> int:
        """The largest batch, a power of two of rows for each device, that needs no recompute by the estimate."""
        kept = self.needs.on(self.unit)
        room = self.request.budget - kept.states - self.needs.gathered
        if math.isinf(room):
            return self.unit
        each = kept.bytes - kept.states - self.needs.gathered
        return self.unit * 2 ** max(0, math.floor(math.log2(max(room, 1.0) / max(each, 1.0))))

    def _plan(self, rows: int) -> Tried:
        if rows not in self.tried:
            log.info("planning a batch of %d", rows)
            gap = max(self.given.get("gap", 0.0), LIMITS.fit_gap)
            try:
                plan = autopar.plan(self.model, self.inputs(rows), **{**self.given, "gap": gap})
            except Infeasible as e:
                self.letter = e
                self.tried[rows] = Tried(rows)
            else:
                rates = plan.rates
                self.tried[rows] = Tried(rows, plan, rates)
                self.given["mesh"] = plan.mesh  # Of several meshes the first batch decides, until it is planned again.
                log.info("%d rows: %s %s/s", rows, f"{rates.per_s:,.0f}", rates.unit)
        return self.tried[rows]
