"""A plan in a notebook: its figures and its memory over the step, as HTML without scripts and style sheets.

Notebooks strip both, and have a light or a dark paper: text and lines take the notebook's colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import Any

from autopar.report.limits import LIMITS
from autopar.report.tiles import Tile, memory_of, subtitle_of, tiles_of
from autopar.solver.figures import size
from autopar.solver.plan import Plan
from autopar.solver.summary import title_of, verdict

_CHART = LIMITS
_FRAME = "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:6px 12px"
_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:8px"
_QUIET = "opacity:.7;font-size:12px"


def html_of(plan: Plan) -> str:
    """The title, the verdict, the tiles and the memory chart of the page, as a small piece of HTML."""
    memory = memory_of(plan, _CHART.few_times)
    parts = [
        f'<div style="font-weight:600;font-size:15px">{escape(title_of(plan))}</div>',
        f'<div style="{_QUIET}">{escape(subtitle_of(plan))}</div>',
        f'<div style="margin:6px 0">{escape(verdict(plan))}</div>',
        f'<div style="{_GRID}">{"".join(map(_tile, tiles_of(plan)))}</div>',
        *(_chart(plan, memory) if memory["times"] else ()),
    ]
    return f'<div style="font:13px/1.45 system-ui,sans-serif;max-width:{_CHART.width}px">{"".join(parts)}</div>'


def _tile(tile: Tile) -> str:
    return (
        f'<div style="{_FRAME}"><div style="{_QUIET}">{escape(tile.name)}</div>'
        f'<div style="font-size:17px;font-weight:600">{escape(tile.value)}</div>'
        f'<div style="{_QUIET}">{escape(tile.note)}</div></div>'
    )


def _chart(plan: Plan, memory: dict[str, Any]) -> Iterator[str]:
    """Memory over the step as areas above each other, with the budget as a line; then its key."""
    held: dict[str, Sequence[int]] = memory["held"]
    whole = [sum(column) for column in zip(*held.values(), strict=True)]
    is_near = plan.budget < _CHART.far * max(whole)  # A budget far above would press the rest flat.
    top = max(max(whole), plan.budget if is_near else 0) or 1
    stacks = list(accumulate(held.values(), _added))
    areas = [
        f'<path fill="{memory["colors"][kind]}" d="{_area(stack, top)}"/>'
        for kind, stack in reversed(list(zip(held, stacks, strict=True)))  # the highest first, the others before it
    ]
    lines = [_budget(plan, top)] if is_near else []
    ways = [time.partition(" ")[0] for time in memory["times"] if plan.pipeline is None]
    turns = [
        at for at, (one, following) in enumerate(pairwise(ways), 1) if one != following and following == "backward"
    ]
    begins = ways[0] if plan.pipeline is None else f"actions of the {plan.peak_at}"
    lines += [_turn(at / max(1, len(ways) - 1)) for at in turns]
    yield (
        f'<svg viewBox="0 0 {_CHART.width} {_y(0) + 18:.0f}" width="100%" style="display:block;margin-top:10px" '
        f'font-size="11" fill="currentColor" role="img"><title>memory over the step</title>'
        f'{"".join(areas)}{"".join(lines)}<text x="0" y="{_y(0) + 14:.0f}">{begins}</text></svg>'
    )
    key = "".join(_key(plan, memory["colors"]))
    yield f'<div style="font-size:12px;display:flex;flex-wrap:wrap;gap:2px 14px">{key}</div>'


def _key(plan: Plan, colors: dict[str, str]) -> Iterator[str]:
    """The kinds of memory with their bytes at the peak, the largest first."""
    for kind, nbytes in sorted(plan.memory.items(), key=lambda pair: -pair[1]):
        if nbytes >= _CHART.least * plan.peak_bytes:
            square = f"display:inline-block;width:10px;height:10px;border-radius:2px;background:{colors[kind]}"
            yield f'<span><span style="{square}"></span> {escape(kind)} {size(nbytes)}</span>'
    yield f"<span>at the {escape(plan.peak_at)}</span>"


def _added(below: Sequence[int], kind: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(below, kind, strict=True)]


def _area(stack: Sequence[float], top: float) -> str:
    """The area below a line of bytes, in whole pixels across and tenths of them up."""
    points = [f"{_x(k / max(1, len(stack) - 1)):.0f} {_y(nbytes / top):.1f}" for k, nbytes in enumerate(stack)]
    return f"M0 {_y(0):.0f}L{'L'.join(points)}L{_CHART.width} {_y(0):.0f}Z"


def _budget(plan: Plan, top: float) -> str:
    y = _y(plan.budget / top)
    line = f'<path d="M0 {y:.1f}H{_CHART.width}" stroke="#d0483e" stroke-width="1.5" stroke-dasharray="6 4"/>'
    return f'{line}<text x="0" y="{y - 4:.1f}">budget {size(plan.budget)}</text>'


def _turn(share: float) -> str:
    x = _x(share)
    line = f'<path d="M{x:.0f} {_CHART.top}V{_y(0):.0f}" stroke="currentColor" stroke-opacity=".3"/>'
    return f'{line}<text x="{x:.0f}" y="{_y(0) + 14:.0f}">backward</text>'


def _x(share: float) -> float:
    return _CHART.width * share


def _y(share: float) -> float:
    return _CHART.top + _CHART.height * (1 - share)
