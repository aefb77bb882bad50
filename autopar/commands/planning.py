"""`autopar plan` and `autopar fit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import autopar
from autopar.arguments import RESERVE
from autopar.commands.models import Named, count_of
from autopar.graph.graph import Graph, info, type_of
from autopar.graph.layers import innermost_block
from autopar.letters import Letter
from autopar.request import Request
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import optimizer_figures
from autopar.solver.figures import aligned, size
from autopar.solver.plan import Plan
from autopar.space.saved import saved_bytes

_MOST_DEVICES = 4096


def asked_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `autopar.plan` that a command line gives."""
    given = {
        "mesh": asked.mesh,
        "cluster": asked.cluster,
        "memory_budget": asked.budget,
        "optimizer": _number_or_name(asked.optimizer),
        "precision": asked.precision,
        "parallel": asked.parallel,
        "recompute": asked.recompute,
        "accumulation": asked.accumulation,
        "microbatches": _number_or_name(asked.microbatches),
        "chunks": _number_or_name(asked.chunks),
        "compile": asked.compile or None,
        "strict": asked.strict or None,
        "assume": autopar.Assume(no_padding=True) if asked.no_padding else None,
    }
    constraints = dict(_constraint(text) for text in asked.constrain or ())
    return {name: value for name, value in {**given, "constraints": constraints or None}.items() if value is not None}


def plan(asked: argparse.Namespace) -> int:
    """Plan a model, print the plan, and write it."""
    model, inputs = Named(asked.model, asked.inputs).made()
    found = autopar.plan(model, inputs, **asked_of(asked))
    if asked.beside:
        found.beside()
    if asked.out:
        found.save(asked.out)
    if asked.report:
        found.report(asked.report, asked.budgets)
    print(shown(found, asked))
    return 0


def shown(found: Plan, asked: argparse.Namespace) -> str:
    """A plan as a command line asks to see it."""
    if asked.json:
        return json.dumps(found.to_dict(), indent=2)
    return found.table() if asked.table else str(found)


def fit(asked: argparse.Namespace) -> int:
    """A table of the fewest devices of each kind that hold a training step."""
    model, inputs = Named(asked.model, asked.inputs).made()
    request = Request(
        mesh=1, memory_budget=asked.budget, precision=asked.precision, optimizer=_number_or_name(asked.optimizer)
    )
    needs = Needs.of(request.trace(model, inputs), request)
    rows = [needs.on(kind, request) for kind in asked.clusters.split(",")]
    if asked.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return 0
    print(f"{asked.model}: {count_of(model)}; everything in parts over all devices, nothing recomputed\n")
    head = ("cluster", "memory", "devices", "states", "kept for backward", "in flight", "bytes a device")
    print("\n".join(aligned(head, [row.cells() for row in rows])))
    print("\nestimates, without a search; fewer devices may do with recompute: autopar plan says")
    return 0


class Fit(NamedTuple):
    """The fewest devices of a kind that hold a step, and the bytes of each of them by kind."""

    cluster: str
    room: float
    devices: int | None  # None: no number that was tried
    states: float = 0.0
    kept: float = 0.0
    flying: float = 0.0

    def cells(self) -> tuple[str, ...]:
        if self.devices is None:
            return self.cluster, size(self.room), f"more than {_MOST_DEVICES}", "", "", "", ""
        parts = (self.states, self.kept, self.flying)
        return self.cluster, size(self.room), str(self.devices), *map(size, parts), size(sum(parts))


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of a step on one device: what is cut over devices, and what is not."""

    graph: Graph
    states: float  # parameters, gradients and states of the optimizer
    gathered: float  # the largest block of parameters, whole while it is used

    @staticmethod
    def of(graph: Graph, request: Request) -> Needs:
        sizes = {name: type_of(node).nbytes for name, node in graph.parameters.items()}
        trained = sum(type_of(node).nbytes for node in graph.parameters.values() if type_of(node).requires_grad)
        kept = optimizer_figures(request.optimizer, 4)["kept"]
        blocks: dict[str, int] = {}
        for name, nbytes in sizes.items():
            place = innermost_block(name) or name
            blocks[place] = blocks.get(place, 0) + nbytes
        narrow = getattr(torch, request.precision.param).itemsize / 4 if request.precision is not None else 1.0
        return Needs(graph, sum(sizes.values()) + trained * (1 + kept), 2 * narrow * max(blocks.values(), default=0))

    def on(self, kind: str, request: Request) -> Fit:
        cluster = Cluster.of(kind)
        has_budget = request.memory_budget is not None
        room = request.budget if has_budget else cluster.device.memory_bytes * (1 - RESERVE)
        kept = saved_bytes(self.graph, cluster, emitted=True)
        largest = max(type_.nbytes for node in self.graph.nodes for type_ in info(node).outputs)
        for n in (2**k for k in range(_MOST_DEVICES.bit_length())):
            gathered = self.gathered if n > 1 else 0.0
            found = Fit(kind, room, n, self.states / n, kept / n, gathered + 2 * largest / n)
            if sum(found[3:]) <= room:
                return found
        return Fit(kind, room, None)


def _number_or_name(text: str | None) -> Any:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _constraint(text: str) -> tuple[str, str]:
    pattern, equals, sharding = text.partition("=")
    if not equals:
        raise Letter(f"--constrain {text!r} is no constraint", advice='--constrain "lm_head.weight=S(0)@0"')
    return pattern, sharding
