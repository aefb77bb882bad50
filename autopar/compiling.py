"""Lower the programs of all ranks of a plan, in one process without devices, and write them to a file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from autopar.codegen import lower
from autopar.codegen.local import local_program
from autopar.codegen.local_inputs import NO_ROWS, OwnRows, rows_of
from autopar.codegen.records import Records
from autopar.graph.graph import Graph
from autopar.letters import BadPlan, NotServed
from autopar.program_file import Origin, made_on
from autopar.solver.plan import Plan

Coordinate = tuple[int, ...]


def write_program(plan: Plan, path: str | os.PathLike[str], inputs: str, device: str) -> Path:
    """Lower the programs of a plan that `autopar.plan` has made here, and write them to a file."""
    origin = plan.origin
    if not isinstance(origin, Origin):
        raise BadPlan(
            "only a plan that autopar.plan has made in this process knows its model, and can be compiled",
            advice="autopar.plan(...).compile(path), or autopar compile",
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise NotServed(
            f"device={device!r}: a program is lowered where such a device is, for torch chooses kernels by it",
            advice="device='cpu' or 'cuda', on a machine that has one",
        )
    graph = origin.request.as_planned(origin.graph, plan)
    rows = rows_of(graph, plan) if inputs == "local" else NO_ROWS
    records = Records()
    for place in range(1 if plan.pipeline is None else plan.pipeline.coordinates):
        for coordinate in _distinct(graph, plan, rows):
            lower(graph, plan, coordinate, device, True, rows, place, records)
    written = Path(path)
    origin.program(plan, records, made_on(device, inputs)).write(written)
    return written


def _distinct(graph: Graph, plan: Plan, rows: OwnRows) -> Iterator[Coordinate]:
    """A coordinate for each local program that differs, as far as axes differ by themselves.

    A rank whose program is of none of them lowers it itself.
    """
    shape = plan.mesh.shape
    programs: dict[Coordinate, int] = {}

    def program(at: Coordinate) -> int:
        if at not in programs:
            programs[at] = hash(local_program(graph, plan, at, rows).fingerprint)
        return programs[at]

    corners = [(0,) * len(shape), tuple(n - 1 for n in shape)]
    differing = []
    for axis, size in enumerate(shape):
        along = [(*corner[:axis], i, *corner[axis + 1 :]) for corner in corners for i in range(size)]
        found = [program(at) for at in along]
        differs = any(len(set(found[k : k + size])) > 1 for k in (0, size))
        differing.append(range(size) if differs else range(1))
    first: dict[int, Coordinate] = {}
    for at in itertools.product(*differing):
        if first.setdefault(program(at), at) == at:
            yield at
