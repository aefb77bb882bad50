"""What of a gap under a tight budget is the states', and whether faster shardings could fit at all.

    python -m benchmarks.gaps Pegasus 0.5

For the plan's own sharding, and for those that the joint search met, the integer program of their states
(`autopar/solver/state_program.py`) is solved to its end. Its rows are below what a step holds, but for runs that are
made in passing: what it says is the least recompute, and where it has no solution the sharding fits under no states.
"""

from __future__ import annotations

import functools
import sys

import pulp
import transformers

import autopar
from autopar.solver import recompute
from autopar.solver.joint_search import JointSearch
from autopar.solver.lined import Lined
from autopar.solver.state_program import _Program
from benchmarks.hard_plans import PEGASUS, SMALL, TOKENS, language_model

MODELS = {
    "Granite": ("CausalLM", SMALL),
    "SmolLM3": ("CausalLM", SMALL | TOKENS),
    "Pegasus": ("ConditionalGeneration", PEGASUS),
}


def least_seconds(lined: Lined, budget: int) -> float | None:
    """The seconds that recompute takes at least under a sharding within a budget; None where nothing fits."""
    program = _Program(lined.states)
    for row, there in program.rows:
        row.changeRHS(budget - there)
    status = program.program.solve(pulp.PULP_CBC_CMD(msg=False, threads=1))
    return pulp.value(program.program.objective) if status == pulp.LpStatusOptimal else None


def main(kind: str, share: float) -> None:
    """Print the plan under a share of the free peak, and the shardings that its search met, the fastest first."""
    met: list[JointSearch] = []
    search = recompute.JointSearch.of

    def noted(task):
        found = search(task)
        met.extend([found] if found is not None else [])
        return found

    task, sizes = MODELS[kind]
    model = language_model(f"{kind}For{task}", getattr(transformers, f"{kind}Config")(**sizes), 8, 16)
    plan_of = functools.partial(autopar.plan, *model, mesh=(2,))
    free = plan_of()
    budget = int(share * free.peak_bytes)
    recompute.JointSearch.of = staticmethod(noted)
    plan = plan_of(memory_budget=budget)
    print(
        f"{kind} at {share}: {plan.step_time_s * 1e3:.4f} ms, gap {plan.gap:.2%}, free {free.step_time_s * 1e3:.4f} ms"
    )
    space, point = plan.search.counted.space, plan.search.point
    joint = next(one for one in met if one.task.space is space)
    bare = plan.search.counted.point(point.picked)
    own = Lined.of(joint.task, bare)
    least = least_seconds(own, budget)
    print(
        f"its sharding: {bare.seconds * 1e3:.4f} ms and {point.recompute_s * 1e3:.4f} ms of recompute, which is "
        f"{least * 1e3:.4f} ms at least"
    )
    for lined in sorted(joint.met.values(), key=lambda one: one.point.seconds):
        least = least_seconds(lined, budget)
        fits = "fits under no states" if least is None else f"recompute of {least * 1e3:.4f} ms at least"
        print(f"met: {lined.point.seconds * 1e3:.4f} ms, {fits}")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
