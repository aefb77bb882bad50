"""One random module on a random mesh under a random legal plan, in float64, against eager.

Losses, outputs, gradients, parameters and buffers are compared.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar import DeviceMesh
from autopar.certificate import VARIABLE
from autopar.codegen import joint
from autopar.graph.graph import Graph
from autopar.solver.plan import Plan
from autopar.testing import Equality, Unequal, on_threads
from autopar.tracer import ColoTracer
from autopar.turns import in_micro_batches
from tests.fuzz.modules import Drawn
from tests.fuzz.steps import ODD_SIZES, SIZES
from tests.oracle import ByPosition
from tests.random_plans import random_plan_of, uneven_plan_of, with_random_states
from tests.training import whole

SEED = 97531
MESHES = [
    DeviceMesh((2,)),
    DeviceMesh((3,)),
    DeviceMesh((4,)),
    DeviceMesh((2, 2), ("dp", "tp")),
    DeviceMesh((2, 1, 2)),
    DeviceMesh((3, 2)),
    DeviceMesh((2, 2, 2)),
]

UNEVEN_MESHES = [DeviceMesh((2,)), DeviceMesh((3,))]


def two_steps(model, batch, accumulates, next_step=lambda: None):
    """All values of two steps; the second adds its gradients to those of the first where it `accumulates`."""
    parameters, found = dict(model.named_parameters()), {}
    for step in range(2):
        next_step()
        out = model(**batch)
        found |= {f"{step}.loss": out["loss"].detach(), f"{step}.last": whole(out["last"]).detach().clone()}
        if out["loss"].requires_grad:
            out["loss"].backward()
            found |= {
                f"{step}.gradient of {n}": whole(p.grad).clone() for n, p in parameters.items() if p.grad is not None
            }
            descend(parameters.values(), 0.01)
            if not accumulates:
                model.zero_grad()
    return found | {n: whole(t).detach().clone() for n, t in (*parameters.items(), *model.named_buffers())}


@torch.no_grad()
def descend(parameters, rate):
    """One step of gradient descent on local shards, without DTensor's own dispatch."""
    for p in parameters:
        if p.grad is not None:
            here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
            assert here.shape == there.shape, (p, p.grad)
            here.add_(there, alpha=-rate)


def drawn_uneven(seed: int) -> tuple[Graph, Plan]:
    """The graph of a random module of odd sizes, and a plan that cuts parameters of it unevenly and recomputes."""
    model, rng = Drawn(seed, sizes=ODD_SIZES), np.random.default_rng(seed)
    mesh = UNEVEN_MESHES[rng.integers(len(UNEVEN_MESHES))]
    graph = ColoTracer().trace(model, model.batch)
    return graph, uneven_plan_of(graph, mesh, rng)


def drawn(seed: int, of_all: bool = False, in_turns: bool = False) -> tuple[Graph, Plan]:
    """The graph of a random module, and a random legal plan of it on a random mesh."""
    model, rng = Drawn(seed, of_all), np.random.default_rng(seed)
    mesh = MESHES[rng.integers(len(MESHES))]
    graph = ColoTracer().trace(model, model.batch)
    if in_turns:
        rows = len(model.batch["x"])
        graph = in_micro_batches(graph, int(rng.choice([n for n in range(2, rows + 1) if rows % n == 0])), True)
    return graph, with_random_states(random_plan_of(graph, mesh, rng), rng)


def fuzz(seed: int, of_all: bool = False, limit_s: float = 60.0, in_turns: bool = False, uneven: bool = False) -> Drawn:
    """Raises Unequal where the parallel module is not what eager is.

    With `of_all`, steps are drawn from all of torch; with `in_turns` the batch passes in micro-batches, or a letter
    says that it cannot; if `uneven`, devices hold unequal parts of a parameter. Ranks that have not ended after the
    limit hang.
    """
    make = functools.partial(Drawn, seed, of_all, ODD_SIZES if uneven else SIZES)
    alone = make()  # made before draws go by position
    model, accumulates = make(), seed % 8 == 0  # rarely: torch dispatches an addition anew in each thread
    with ByPosition(SEED) as numbers:
        expected = two_steps(alone, model.batch, accumulates, numbers.next_step)
    graph, plan = drawn_uneven(seed) if uneven else drawn(seed, of_all, in_turns)
    mesh = plan.mesh

    made = [make() for _ in range(mesh.size)]

    def body(rank):
        mine = autopar.autoparallelize(made[rank], model.batch, plan=plan, outputs="full" if in_turns else "auto")
        mine.random_state.seed = SEED
        return two_steps(mine, model.batch, accumulates)

    results = on_threads(mesh.size, body, timeout_s=limit_s)
    turns = f" in {graph.turns} turns" if in_turns else ""
    case = f"seed {seed}{turns} on {mesh}: {', '.join([*model.names, *model.called])}"
    for rank, result in enumerate(results):
        Equality.in_float64(f"{case}, rank {rank}", result, expected, 1e-9).check()
        if drifting := [name for name in result if not torch.equal(result[name], results[0][name])]:
            raise Unequal(f"{case}: ranks 0 and {rank} hold different bits of {', '.join(drifting)}")
    return model


def kills(mutant, seeds):
    """The first of these seeds by which a broken compiler is noticed: its values are wrong.

    A broken one may also end with an error; that counts for nothing.
    """
    patch = pytest.MonkeyPatch()
    joint.LOWERED.clear()
    patch.setenv(VARIABLE, "off")  # by its values, not by its types
    try:
        mutant(patch)
        for seed in seeds:
            try:
                fuzz(seed)
            except Unequal:
                return seed
            except Exception:
                continue
    finally:
        patch.undo()
        joint.LOWERED.clear()
    return None
