"""`autopar show`, `explain`, `report` and `diff`, for saved plans."""

from __future__ import annotations

import argparse
import json

from autopar.commands.planning import shown
from autopar.report import write_report
from autopar.solver.plan import Plan
from autopar.solver.text import SAME


def show(asked: argparse.Namespace) -> int:
    """Print a plan as a summary, as a table, or as JSON."""
    print(shown(Plan.load(asked.plan), asked))
    return 0


def explain(asked: argparse.Namespace) -> int:
    """Print the decisions at the places that a name matches."""
    print(Plan.load(asked.plan).explain(asked.place))
    return 0


def report(asked: argparse.Namespace) -> int:
    """Write a page about a plan."""
    path = write_report(Plan.load(asked.plan), asked.out)
    print(json.dumps({"report": str(path)}) if asked.json else path)
    return 0


def diff(asked: argparse.Namespace) -> int:
    """Print the places at which two plans differ; returns 1 where they do."""
    one, other = Plan.load(asked.plan), Plan.load(asked.other)
    said = one.diff(other)
    alike = said == SAME
    print(json.dumps({"alike": alike, "differences": said.splitlines()}, indent=2) if asked.json else said)
    return 0 if alike else 1
