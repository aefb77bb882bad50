"""`autopar plan`."""

from __future__ import annotations

import argparse
import json
from typing import Any

import autopar
from autopar.commands.batches import best_batch, text_of_batches
from autopar.commands.clusters import cluster_of, notes_of
from autopar.commands.models import Named
from autopar.letters import Letter
from autopar.solver.plan import Plan
from autopar.solver.staged import FORMS, strip_of


def asked_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `autopar.plan` that a command line gives."""
    given = {
        "mesh": asked.mesh,
        "cluster": cluster_of(asked.cluster, asked.fabric) if asked.cluster or asked.fabric else None,
        "memory_budget": asked.budget,
        "host_budget": asked.host_budget,
        "optimizer": number_or_name(asked.optimizer),
        "precision": asked.precision,
        "parallel": asked.parallel,
        "recompute": asked.recompute,
        "accumulation": asked.accumulation,
        "microbatches": number_or_name(asked.microbatches),
        "chunks": number_or_name(asked.chunks),
        "pipeline": number_or_name(asked.pipeline),
        "compile": asked.compile or None,
        "strict": asked.strict or None,
        "assume": autopar.Assume(no_padding=True) if asked.no_padding else None,
    }
    constraints = dict(_constraint(text) for text in asked.constrain or ())
    return {name: value for name, value in {**given, "constraints": constraints or None}.items() if value is not None}


def plan(asked: argparse.Namespace) -> int:
    """Plan a model, print the plan, and save it where asked."""
    named = Named(asked.model, asked.inputs)
    given = asked_of(asked)
    if named.asks_for_batch:
        tried, found = best_batch(named, given)
        table = text_of_batches(tried, found)
    else:
        model, inputs = named.made()
        found, table = autopar.plan(model, inputs, **given), []
    if asked.beside:
        found.beside()
    if asked.out:
        found.save(asked.out)
    if asked.report:
        found.report(asked.report, asked.budgets)
    print(shown(found, asked))
    if asked.verbose and not asked.json and (strip := strip_of(found)):
        print("\n".join(["", *strip, FORMS]))
    notes = notes_of(given["cluster"]) if "cluster" in given else []
    if not asked.json and (table or notes):
        print("\n".join(["", *table, *notes]))
    return 0


def shown(found: Plan, asked: argparse.Namespace) -> str:
    """A plan as text, table or JSON, as a command line asks."""
    if asked.json:
        rates = found.rates
        expected = {"step_s": rates.step_s, "interval_s": list(found.step_interval_s), "mfu": rates.mfu}
        expected |= {"unit": rates.unit, "per_s": rates.per_s, "per_s_device": rates.per_s_device}
        return json.dumps({**found.to_dict(), "expected": expected}, indent=2)
    return found.table() if asked.table else str(found)


def number_or_name(text: str | None) -> Any:
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
