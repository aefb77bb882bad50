"""Write a page about a plan: one file for a browser, without network access.

    page.html, page.css, page.js     the page, and what all of its script uses
    charts.js, graph.js, tables.js, stages.js   what draws its data
    uPlot.*                          the library that draws charts (MIT)
    cytoscape*                       the library that draws graphs, and its layout in layers (MIT)

`data_of` is all that the page shows, as JSON; the browser only computes what part of it is visible. `html_of` is the
beginning of it for a notebook.
"""

from __future__ import annotations

import json
import math
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.graph.layers import folded
from autopar.letters import BadPlan
from autopar.report.lanes import step_of
from autopar.report.limits import LIMITS
from autopar.report.notebook import html_of
from autopar.report.picture import alike, cuts, drawn
from autopar.report.tiles import memory_of, subtitle_of, tiles_of
from autopar.solver.figures import time
from autopar.solver.plan import Beside, Plan
from autopar.solver.staged import gantt_of
from autopar.solver.summary import title_of, verdict

__all__ = ["data_of", "html_of", "write_report"]

_FILES = {
    "/*uplot.css*/": "uPlot.min.css",
    "/*page.css*/": "page.css",
    "/*uplot.js*/": "uPlot.iife.min.js",
    "/*cytoscape.js*/": "cytoscape.min.js",
    "/*dagre.js*/": "cytoscape-dagre.min.js",
    "/*page.js*/": "page.js",
    "/*charts.js*/": "charts.js",
    "/*graph.js*/": "graph.js",
    "/*tables.js*/": "tables.js",
    "/*stages.js*/": "stages.js",
}


def write_report(plan: Plan, path: str | Path, budgets: int = 0) -> Path:
    """Write the page to `path`; with `budgets`, it shows step times over so many memory budgets."""
    page = _file("page.html")
    for mark, name in _FILES.items():
        page = page.replace(mark, _file(name))
    data = json.dumps(data_of(plan, budgets), separators=(",", ":")).replace("<", "\\u003c")  # ends no script
    title = f"{title_of(plan)}: {time(plan.expected_s)} a step"
    page = page.replace("@title@", escape(title)).replace('"@data@"', data)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as e:
        raise BadPlan(f"the report cannot be written to {path}", seen=f"{type(e).__name__}: {e}") from e
    return Path(path)


def data_of(plan: Plan, budgets: int = 0) -> dict[str, Any]:
    """All that the page shows, as values for JSON."""
    groups = alike(plan)
    return {
        "title": title_of(plan),
        "subtitle": subtitle_of(plan),
        "tiles": [tile._asdict() for tile in tiles_of(plan)],
        "verdict": verdict(plan),
        "summary": str(plan),
        "step_s": plan.step_time_s,
        "bound_s": plan.lower_bound_s,
        "budget": plan.budget if math.isfinite(plan.budget) else None,
        "peak": {"bytes": plan.peak_bytes, "at": plan.peak_at, "kinds": dict(plan.memory)},
        "line": memory_of(plan, LIMITS.times),
        "step": step_of(plan),
        **({} if plan.pipeline is None else {"pipeline": gantt_of(plan)}),
        "parameters": _parameters(plan),
        "places": _places(plan, groups),
        "graph": drawn(plan, groups),
        "axes": list(plan.mesh.axes),
        "curve": _curve(plan, budgets) if plan.has_space and budgets else [],
        "beside": [_rival(rival) for rival in plan.known_beside or ()],
        "meshes": [list(row) for row in plan.meshes],
        "said": {
            "warnings": list(plan.warnings),
            "assumed": list(plan.assumptions),
            "defaults": [list(pair) for pair in plan.defaults],
        },
    }


def _file(name: str) -> str:
    return resources.files("autopar.report").joinpath(name).read_text(encoding="utf-8")


def _parameters(plan: Plan) -> list[list[Any]]:
    """Rows of parameters that are stored alike: name, count, sharding, bytes of all in full."""
    rows: dict[tuple[str, str], list[int]] = {}
    regathered = plan.regathered
    for name, sharding in plan.parameters.items():
        stored = sharding.text(plan.mesh.axes) + (" (regathered)" if name in regathered else "")
        rows.setdefault((folded(name), stored), []).append(plan.parameter_bytes[name])
    return [[name, len(sizes), stored, sum(sizes)] for (name, stored), sizes in rows.items()]


def _places(plan: Plan, groups: list[list[str]]) -> list[dict[str, Any]]:
    """Places that decide alike, in the step's order, with name, count, op, choice, seconds and more."""
    arriving: dict[str, list[float]] = {}
    for c in plan.conversions:
        arriving.setdefault(c.target, []).append(c.seconds)
    recomputed = plan.recomputed
    offloaded = plan.offloaded
    found = []
    for members in groups:
        d = plan.decisions[members[0]]
        moved = sum(sum(arriving.get(one, ())) for one in members)
        seconds = sum(plan.decisions[one].seconds for one in members)
        found.append(
            {
                "name": folded(members[0]),
                "count": len(members),
                "op": d.op,
                "choice": repr(d.choice),
                "cut": cuts(plan, members[0]),
                "outputs": list(d.outputs),
                "seconds": seconds,
                "moved": moved,
                "recomputed": members[0] in recomputed,
                "offloaded": members[0] in offloaded,
                "told": plan.explain(members[0]) if seconds or moved else "",
                "source": d.source,
            }
        )
    return found


def _rival(rival: Beside) -> list[Any]:
    """Name, seconds or None, bytes, whether it fits, and why there would be none."""
    return [rival.name, None if rival.why else rival.step_time_s, rival.peak_bytes, rival.fits, rival.why]


def _curve(plan: Plan, budgets: int) -> list[list[float]]:
    """Budgets, step times and bounds, for budgets with a plan."""
    points = [p for p in plan.curve(budgets) if math.isfinite(p.step_time_s)]
    return [[p.budget, p.step_time_s, p.lower_bound_s] for p in points]
