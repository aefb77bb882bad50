"""`PlanCache`: a folder of plans, so that a job that starts again takes its plan instead of searching.

A plan is found by its key, a digest of the graph and of everything that decides a plan: what was asked, the cluster and
the kernels that are priced, users' rules, the releases of autopar and torch. Its file is KEY-CONTENT.json, where
CONTENT is a digest of what was written: one that was edited no longer has its own name. A file is a plan as `plan.save`
writes it, and is checked against the graph before it is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from autopar import __version__
from autopar.codegen.checked import check_plan
from autopar.graph.graph import Graph
from autopar.kernels.measured import taken
from autopar.letters import BadPlan, NotServed
from autopar.ops.declare import rules_of_users
from autopar.progress import caution, tell
from autopar.request import Request
from autopar.solver.plan import Plan

VARIABLE = "AUTOPAR_CACHE"
_TOLD_OTHERWISE = ("loss", "cluster")  # The graph and the hardware, which are in the key, tell of these.


@dataclass(frozen=True, slots=True)
class PlanCache:
    """The folder in which plans are kept; None keeps none."""

    folder: Path | None

    @staticmethod
    def of(folder: str | os.PathLike[str] | None) -> PlanCache:
        """The cache in a folder, in that of AUTOPAR_CACHE where None is given, or none."""
        given = os.environ.get(VARIABLE, "") if folder is None else folder
        if not isinstance(given, (str, os.PathLike)):
            raise NotServed(f"cache={folder!r} is not a folder", advice='cache="plans"')
        return PlanCache(Path(given) if os.fspath(given) else None)

    def plan(self, graph: Graph, request: Request, make: Callable[[], Plan], *also: str) -> Plan:
        """The plan that is kept for a graph and a request, or the one that `make` makes, which is kept.

        `also` is what else decides it. Where an argument cannot be told from another by its text, nothing is kept.
        """
        if self.folder is None:
            return make()
        asked = words_of(request)
        if unclear := [name for name, text in asked.items() if " at 0x" in text]:
            caution("%s= has no text to find its plan by: this plan is not kept in %s", unclear[0], self.folder)
            return make()
        self._open()
        key = _digest(
            repr((graph.digest, sorted(asked.items()), also, rules_of_users(), __version__, torch.__version__))
        )
        kept = self._read(key, graph, request)
        if kept is not None:
            return kept
        plan = make()
        self._write(key, plan)
        return plan

    def _open(self) -> None:
        """Make the folder; a letter where it cannot be written to, before a search that would take a while."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as e:
            raise NotServed(
                f"plans cannot be kept in {self.folder}", seen=f"{type(e).__name__}: {e}", advice="cache=another folder"
            ) from e

    def _read(self, key: str, graph: Graph, request: Request) -> Plan | None:
        """The plan that is kept under a key, if it is as it was written and belongs to the graph."""
        assert self.folder is not None
        for path in sorted(self.folder.glob(f"{key}-*.json")):
            try:
                if _digest(path.read_bytes()) != path.stem.partition("-")[2]:
                    raise BadPlan("the file was changed since it was written")
                plan = Plan.load(path)
                check_plan(request.as_planned(graph, plan), plan)
            except (BadPlan, OSError) as e:
                caution("the kept plan %s is not taken, the model is planned anew: %s", path, str(e).split("\n")[0])
            else:
                tell("took the kept plan %s, without a search", path)
                return plan
        return None

    def _write(self, key: str, plan: Plan) -> None:
        """Write a plan under its key: whole, or not at all."""
        assert self.folder is not None
        written = self.folder / f".{key}-{uuid.uuid4().hex}"
        try:
            plan.save(written)
            path = self.folder / f"{key}-{_digest(written.read_bytes())}.json"
            written.replace(path)
            tell("kept the plan as %s", path)
        except (BadPlan, OSError) as e:
            caution("the plan is not kept in %s: %s", self.folder, e)
            with contextlib.suppress(OSError):
                written.unlink()


def words_of(request: Request) -> Mapping[str, str]:
    """The arguments of a request, as text by name: equal where the same plan would be made."""
    asked: dict[str, Any] = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in _TOLD_OTHERWISE}
    device = request.hardware.device
    asked["priced kernels"] = taken(request.kernels, device.kernels, request.compile)
    asked["names a cluster"] = request.cluster is not None
    return {name: repr(value) for name, value in asked.items()}


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]
