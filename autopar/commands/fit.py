"""`autopar fit`: on how many devices of each kind a step fits, or a number of tokens is trained in time."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from autopar.commands.clusters import cluster_of, notes_of
from autopar.commands.fitting import Fitting, KindFit
from autopar.commands.goals import Goal
from autopar.commands.models import Named, count_of
from autopar.commands.planning import number_or_name
from autopar.request import Request
from autopar.solver.figures import aligned, time
from autopar.solver.plan import Plan
from autopar.solver.workload import StepRates
from autopar.workload import workload_of

_GIB = 2**30


def fit(asked: argparse.Namespace) -> int:
    """Print the fewest devices of each kind that hold a step, or that train so many tokens in time."""
    goal = Goal.of(asked.tokens, asked.days, asked.price)
    names = asked.clusters.split(",")
    kinds = [cluster_of(name, asked.fabric) for name in names]
    model, inputs = Named(asked.model, asked.inputs).made()
    request = Request(
        mesh=1,
        memory_budget=asked.budget,
        precision=asked.precision,
        optimizer=number_or_name(asked.optimizer),
        accumulation=asked.accumulation,
        compile=asked.compile,
    )
    fitting = Fitting(request, request.trace(model, inputs), host_budget=asked.host_budget or 0)
    work = StepRates(workload_of(fitting.graph, request), 1, 0.0)
    rows = [fitting.fewest(kind) for kind in kinds]
    if goal is not None:
        rows = [goal.met(fitting, held) for held in rows]
    if asked.json:
        print(json.dumps([_data(held, goal) for held in rows], indent=2))
        return 0
    print(f"{asked.model}: {count_of(model)}, {work.amount:,} {work.unit} a step\n")
    print("\n".join(_text(rows, work.unit, goal)))
    example = next((held for held in rows if held.plan is not None), None)
    if example is not None and example.plan is not None:
        print(f"\n{_command(asked, example.plan, names[rows.index(example)])}")
        print("    plans the first of these again, and closer to the fastest")
    vain = [_in_vain(held) for held in rows if held.refused or held.plan is None]
    vain += [_late(held) for held in rows if held.is_late]
    print("\n".join(["", *vain, *_explained(goal), *(note for kind in kinds for note in notes_of(kind))]))
    return 0


def _explained(goal: Goal | None) -> list[str]:
    """Lines that say what the rows are."""
    late = ", or they take longer" if goal is not None and goal.days is not None else ""
    text = (
        "Each line is a plan that was found, a few percent from the fastest. On fewer devices none was found, or they "
        f"lack the room for parameters, gradients and optimizer states{late}. Numbers of devices that share the rows "
        "of the batch evenly are tried: divisors of a node, then whole nodes. Seconds are the middle of what nine "
        "steps of ten take; recompute is its share of them."
    )
    return textwrap.wrap(text, width=118)


def _text(rows: list[KindFit], unit: str, goal: Goal | None) -> list[str]:
    """Two tables: what devices do, and what they hold."""
    head = ["cluster", "devices", "mesh", "micro-batches", "recompute", "step", f"{unit}/s", "a device"]
    if goal is not None:
        head += ["days", *(["cost"] if goal.price is not None else [])]
    kinds = ["parameters", "gradients", "optimizer states", "saved activations"]
    said = aligned(tuple(head), (_does(held, goal) for held in rows))
    held_head = ("GiB a device", "devices", *kinds, "others", "of", "peak")
    holds = [_holds(held, held.plan, kinds) for held in rows if held.plan is not None]
    return [*said, "", *aligned(held_head, holds)] if holds else said


def _in_vain(held: KindFit) -> str:
    """A line about the numbers of devices on which no plan was found."""
    if not held.refused:
        return f"{held.kind.name}: no number of devices that shares the rows has room for what any plan keeps"
    return f"{held.kind.name}: no plan was found on {', '.join(map(str, held.refused))} devices"


def _late(held: KindFit) -> str:
    """A line about a goal that no number of devices reaches."""
    return f"{held.kind.name}: no number of devices that shares the rows is in time; a larger batch shares among more"


def _does(held: KindFit, goal: Goal | None) -> tuple[str, ...]:
    plan = held.plan
    columns = 6 + (goal is not None) + (goal is not None and goal.price is not None)
    if plan is None:
        return (held.kind.name, "none", *[""] * columns)
    rates = plan.rates
    share = f"{plan.recompute_s / plan.step_time_s:.1%}" if plan.recomputed else "none"
    turns = str(plan.microbatches)
    shape = "x".join(map(str, plan.mesh.shape))
    cells = [plan.cluster.partition(" ")[0], str(rates.devices), shape, turns, share, time(rates.step_s)]
    cells += [f"{rates.per_s:,.0f}", f"{rates.per_s_device:,.0f}"]
    if goal is not None:
        cells.append(f"{goal.days_of(rates):,.1f}")
        cost = goal.cost_of(rates)
        cells += [f"{cost:,.0f}"] if cost is not None else []
    return tuple(cells)


def _holds(held: KindFit, plan: Plan, kinds: list[str]) -> tuple[str, ...]:
    each = [plan.memory.get(kind, 0) for kind in kinds]
    parts = [*each, plan.peak_bytes - sum(each), held.room, plan.peak_bytes]
    return held.kind.name, str(plan.mesh.size), *(f"{n / _GIB:.2f}" for n in parts)


def _command(asked: argparse.Namespace, plan: Plan, kind: str) -> str:
    """The command that plans a row of the table; `kind` is a name or the path of a profile."""
    shape = plan.mesh.shape if len(plan.mesh.shape) > 1 else (*plan.mesh.shape, 1)  # A number would ask for any mesh.
    said = [f"autopar plan {asked.model} --mesh {'x'.join(map(str, shape))}"]
    fabric = f" --fabric {asked.fabric}" if asked.fabric else ""
    cluster = f"{kind}{fabric}" if kind.endswith(".json") else plan.cluster.partition(" ")[0]
    said.append(f"--cluster {cluster} --microbatches {plan.microbatches}")
    names = ("inputs", "precision", "budget", "host_budget")
    said += [f"--{name.replace('_', '-')} {getattr(asked, name)}" for name in names if getattr(asked, name)]
    said += [f"--optimizer {asked.optimizer}"] if asked.optimizer != "adamw" else []
    said += [f"--accumulation {asked.accumulation}"] if asked.accumulation > 1 else []
    return " ".join([*said, *(["--compile"] if asked.compile else [])])


def _data(held: KindFit, goal: Goal | None) -> dict[str, Any]:
    """A row as JSON."""
    plan = held.plan
    found: dict[str, Any] = {
        "kind": held.kind.name,
        "room": held.room,
        "planned_in_vain": list(held.refused),
        "is_late": held.is_late,
    }
    if plan is None:
        return {**found, "devices": None}
    rates = plan.rates
    days = {} if goal is None else {"days": goal.days_of(rates), "cost": goal.cost_of(rates)}
    return {
        **found,
        "cluster": plan.cluster.partition(" ")[0],
        "devices": plan.mesh.size,
        "mesh": list(plan.mesh.shape),
        "microbatches": plan.microbatches,
        "chunks": plan.chunks,
        "recomputed": len(plan.recomputed),
        "recompute_s": plan.recompute_s,
        "offloaded": len(plan.offloaded),
        "host_bytes": plan.host_bytes,
        "expected_s": rates.step_s,
        "interval_s": list(plan.step_interval_s),
        "unit": rates.unit,
        "per_s": rates.per_s,
        "per_s_device": rates.per_s_device,
        "memory": dict(plan.memory),
        **days,
    }
