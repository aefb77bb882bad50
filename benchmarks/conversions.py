"""Conversions of random pairs under one table of costs: ours, DTensor's two planners, and a greedy one-step search.

    python -m benchmarks.conversions        fails where ours is dearer than any of them

The greedy search is Colossal-Auto's: the neighbour whose dims look nearest to the target's, a gather counting 20, a cut
5, each further step 6; two axes, no sums.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import statistics
import sys

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

from autopar import Cluster, DeviceMesh, P, R, S
from autopar.sharding.convert import ShapeConsistencyManager, Step
from autopar.sharding.layout import Layout
from autopar.sharding.placement import Sharding
from autopar.testing import fake_world

#          mesh, shape, cluster, pairs
WORLDS = [
    ((8,), (64, 32, 16), "h100-8x1", 120),
    ((2, 4), (64, 32, 16), "h100-8x1", 900),
    ((4, 8), (64, 32), "h100-8x4", 900),
    ((8, 8), (4096, 1024, 64), "a100-8x8", 900),
    ((2, 2, 2), (16, 32, 8), "l4-8x1", 250),
    ((2, 4, 8), (512, 1024), "h200-8x8", 250),
]
KINDS = {
    ("S", "R"): "all_gather",
    ("R", "S"): "slice",
    ("S", "S"): "all_to_all",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("R", "P"): "lodge",
}


def cost(manager, steps, layout, target):
    """Seconds of a sequence of steps, which must end at the target."""
    total = 0.0
    for step in steps:
        total += manager.step_seconds(step, layout, 4)
        layout = step.after(layout, manager.mesh)
    assert layout == target, (steps, layout, target)
    return total


def of_dtensor(source, target, smallest, mesh):
    """The steps of torch's planner: its greedy default, or the one that looks for the least cost.

    None where it asks for one that torch does not run.
    """

    def letter(p):
        return "S" if isinstance(p, Shard) else "P" if isinstance(p, Partial) else "R"

    steps = []
    for info in _gen_transform_infos_non_cached(source._spec, target._spec, use_graph_based_transform=smallest):
        a, b = info.src_dst_placements
        dims = [p.dim for p in (a, b) if isinstance(p, Shard)]
        if (letter(a), letter(b)) not in KINDS:
            return None
        steps.append(Step(KINDS[letter(a), letter(b)], info.mesh_dim, *dims))
    return steps


def greedy(source, target, axes):
    """The steps of the greedy search, between shardings as tuples of axes for each dim."""

    @functools.cache
    def distance(a, b):
        best, frontier = {a: 0}, [a]
        while frontier:  # a gather takes the last axis away, a cut puts one there
            further = []
            for dim in frontier:
                moves = [(dim[:-1], 20)] if dim else []
                moves += [((*dim, x), 5) for x in range(axes) if x not in dim and (not dim or x > dim[-1])]
                for there, price in moves:
                    total = best[dim] + price + (6 if dim != a else 0)
                    if total < best.get(there, 1e9):
                        best[there] = total
                        further.append(there)
            frontier = further
        return best[b]

    state, steps = source, []
    while state != target:
        options = []
        for d, mine in enumerate(state):
            if mine:
                gathered = (*state[:d], mine[:-1], *state[d + 1 :])
                options.append((Step("all_gather", mine[-1], d), gathered))
                options += [
                    (Step("all_to_all", mine[-1], d, e), (*gathered[:e], (*gathered[e], mine[-1]), *gathered[e + 1 :]))
                    for e in range(len(state))
                    if e != d and (not state[e] or mine[-1] > state[e][-1])
                ]
        free = set(range(axes)) - {a for dim in state for a in dim}
        options += [
            (Step("slice", a, d), (*state[:d], (*state[d], a), *state[d + 1 :]))
            for d in range(len(state))
            for a in free
            if not state[d] or a > state[d][-1]
        ]
        step, state = min(options, key=lambda o: sum(distance(a, b) for a, b in zip(o[1], target, strict=True)))
        steps.append(step)
        if len(steps) > 20:
            return None
    return steps


def main() -> None:
    print(
        f"torch {torch.__version__}; 4-byte elements; seconds under each cluster's own figures; a ratio is theirs "
        "to ours\n"
    )
    print(
        "| mesh | shape | cluster | pairs | ours: steps | against | compared | dearer than ours | mean ratio | "
        "largest | ours dearer |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    choose, dearer, compared = random.Random(0), 0, 0
    for mesh_shape, shape, cluster, pairs in WORLDS:
        mesh = DeviceMesh(mesh_shape)
        manager = ShapeConsistencyManager(mesh, Cluster.of(cluster))
        options = [R, P(), *(S(d) for d in range(len(shape)))]
        states = [
            s for p in itertools.product(options, repeat=len(mesh_shape)) if Layout.of(shape, s := Sharding(p), mesh)
        ]
        theirs: dict[str, list[float]] = {"DTensor, greedy": [], "DTensor, least cost": [], "greedy one-step": []}
        lengths = []
        with fake_world(mesh.size):
            torch_mesh = mesh.to_torch("cpu")
            for _ in range(pairs):
                source, target = choose.sample(states, 2)
                path = manager.path(shape, 4, source, target)
                lengths.append(len(path.steps))
                ends = [Layout.of(shape, s, mesh) for s in (source, target)]
                tensors = [
                    DTensor.from_local(
                        torch.empty(end.local_shape(mesh, (0,) * len(mesh_shape)), device="meta"),
                        torch_mesh,
                        [
                            Shard(p.dim) if p.is_shard else Partial() if p.is_partial else Replicate()
                            for p in s.placements
                        ],
                        run_check=False,
                    )
                    for end, s in zip(ends, (source, target), strict=True)
                ]
                found = {
                    name: of_dtensor(*tensors, smallest, torch_mesh)
                    for name, smallest in (("DTensor, greedy", False), ("DTensor, least cost", True))
                }
                if len(mesh_shape) == 2 and not source.partial_axes and not target.partial_axes:
                    dims = [tuple(tuple(s.cuts.get(d, ())) for d in range(len(shape))) for s in (source, target)]
                    found["greedy one-step"] = greedy(*dims, 2)
                for name, steps in found.items():
                    if steps is not None:
                        theirs[name].append(cost(manager, steps, *ends) / path.seconds)
        for name, ratios in theirs.items():
            if ratios:
                worse = sum(r < 1 - 1e-9 for r in ratios)
                dearer, compared = dearer + worse, compared + len(ratios)
                print(
                    f"| {mesh_shape} | {shape} | {cluster} | {pairs} | {statistics.mean(lengths):.2f} | {name} | "
                    f"{len(ratios)} | {sum(r > 1 + 1e-9 for r in ratios)} | {statistics.mean(ratios):.2f} "
                    f"| {max(ratios):.2f} | {worse} |",
                    flush=True,
                )
    print(f"\n{sum(p for *_, p in WORLDS)} pairs, {compared} comparisons, ours dearer in {dearer}")
    if dearer:
        sys.exit(1)


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    main()
