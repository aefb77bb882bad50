"""`autopar compile`: the programs of all ranks of a plan, lowered once and kept in a file."""

from __future__ import annotations

import argparse
import json

import autopar
from autopar.commands.models import Named
from autopar.commands.planning import asked_of


def compile(asked: argparse.Namespace) -> int:
    """Plan a model, lower the programs of its ranks, and write them."""
    model, inputs = Named(asked.model, asked.inputs).made()
    found = autopar.plan(model, inputs, **asked_of(asked))
    path = found.compile(asked.out, inputs="local" if asked.rows else "global", device=asked.device)
    size = path.stat().st_size
    said = f"{path}: {size / 2**20:.2f} MiB, for {found.devices} ranks on mesh {found.mesh}"
    print(json.dumps({"written": str(path), "bytes": size}, indent=2) if asked.json else said)
    return 0
