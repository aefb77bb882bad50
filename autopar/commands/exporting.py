"""`autopar export`: write a plan for other systems, and list what they cannot express, with predicted seconds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from autopar.commands.exports.exported import KINDS, Exported, Written
from autopar.commands.exports.fsdp2 import fsdp2
from autopar.commands.exports.hf import hf
from autopar.commands.exports.titan import torchtitan, torchtitan_toml
from autopar.solver.figures import aligned, time
from autopar.solver.plan import Plan

_MOST_SHOWN = 12

# What writes for a target, and the file that it goes to: plan.json is a plan's own.
TARGETS: dict[str, tuple[Callable[[Exported], Written], str]] = {
    "fsdp2": (fsdp2, "fsdp2.py"),
    "hf": (hf, "tp_plan.json"),
    "torchtitan": (torchtitan, "titan_plan.py"),
    "torchtitan-toml": (torchtitan_toml, "titan.toml"),
}


def export(asked: argparse.Namespace) -> int:
    """Write a plan for another system, and print what is lost."""
    told = Exported.of(Plan.load(asked.plan))
    write, file = TARGETS[asked.to]
    written = write(told)
    path = Path(asked.out or file)
    path.write_text(written.text, encoding="utf-8")
    unsaid = sorted(written.unsaid, key=lambda one: -one.seconds)
    if asked.json:
        print(json.dumps({"written": str(path), "unsaid": [one._asdict() for one in unsaid]}, indent=2))
        return 0
    print(f"{path}: {', '.join(f'{kind} {told.degree(kind)}' for kind in KINDS)}")
    if not unsaid:
        print("all that the plan decides is said")
        return 0
    rows = [(one.what, time(one.seconds) if one.seconds else "") for one in unsaid]
    more = [(f"{len(rows) - _MOST_SHOWN} more, in --json", "")] if len(rows) > _MOST_SHOWN else []
    print("\n" + "\n".join(aligned((f"what {asked.to} cannot be told", "of the step"), rows[:_MOST_SHOWN] + more)))
    return 0
