"""Text of figures: seconds, bytes, aligned columns, and rows of layers that are alike folded into one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.graph.layers import folded

Row = tuple[str, ...]


def time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{microseconds(seconds)} us"


def between(low: float, high: float) -> str:
    """An interval of seconds; the unit stands once where both have it."""
    first, last = time(low), time(high)
    return f"{first.partition(' ')[0] if first.split()[1] == last.split()[1] else first} to {last}"


def count(n: float) -> str:
    """A large number in short: 8.03B, 124M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g}{unit}"
    return f"{n:.0f}"


def sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{time(abs(seconds))}"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def size(n: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def budget_for(n: float) -> str:
    """A `memory_budget` argument that holds so many bytes, rounded up to two decimals."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f'memory_budget="{math.ceil(100 * n / scale) / 100:.2f}{unit}"'
    return f"memory_budget={math.ceil(n)}"


def folded_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows with those of layers that are alike folded into one, with `*` for the layer and their count."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault((folded(row[0]), *row[1:]), []).append(row)
    found = []
    for (name, *cells), alike in groups.items():
        found.append(alike[0] if len(alike) == 1 else (f"{name} (x{len(alike)})", *cells))
    return found


def aligned(head: Row, rows: Iterable[Row]) -> list[str]:
    """Lines of a table with aligned columns, the last one to the right; without rows, a line says so."""
    table = [head, *rows]
    if len(table) == 1:
        return [f"{head[0]}: none"]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for *cells, last in table:
        left = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*left, last.rjust(widths[-1])]).rstrip())
    return lines
