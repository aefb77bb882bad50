"""`autopar plan` and `autopar fit`."""

from __future__ import annotations

import argparse
import json
from typing import Any

import autopar
from autopar.commands.models import Named, count_of
from autopar.letters import Letter
from autopar.limits import LIMITS
from autopar.needs import Fit, Needs
from autopar.request import Request
from autopar.solver.figures import aligned, size
from autopar.solver.plan import Plan


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
    """Plan a model, print the plan, and save it where asked."""
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
    """A plan as text, table or JSON, as a command line asks."""
    if asked.json:
        return json.dumps(found.to_dict(), indent=2)
    return found.table() if asked.table else str(found)


def fit(asked: argparse.Namespace) -> int:
    """Print the fewest devices of each kind that hold a training step."""
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
    print("\n".join(aligned(head, map(_cells, rows))))
    print("\nestimates, without a search; fewer devices may do with recompute: autopar plan says")
    return 0


def _cells(fit: Fit) -> tuple[str, ...]:
    if fit.devices is None:
        return fit.cluster, size(fit.room), f"more than {LIMITS.devices}", "", "", "", ""
    parts = (fit.states, fit.kept, fit.flying, fit.bytes)
    return fit.cluster, size(fit.room), str(fit.devices), *map(size, parts)


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
        raise Letter(f"--constrain {text!r} is not a constraint", advice='--constrain "lm_head.weight=S(0)@0"')
    return pattern, sharding
