"""Text of figures: seconds, bytes, aligned columns, and rows of layers that are alike folded into one."""

from __future__ import annotations

import math
import re
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


def several(n: int, noun: str) -> str:
    """A number of things: 1 device, 2 devices, 2 batches."""
    return f"{n} {noun}" + ("" if n == 1 else "es" if noun.endswith("ch") else "s")


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
    """Lines of a table, columns of numbers and the last to the right; a line where it has no rows."""
    table = [head, *rows]
    if len(table) == 1:
        return [f"{head[0]}: none"]
    columns = list(zip(*table, strict=True))
    placed = []
    for k, column in enumerate(columns):
        width = max(map(len, column))
        is_right = k + 1 == len(columns) or (k > 0 and all(map(_is_number, column[1:])))
        placed.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*placed, strict=True)]


def _is_number(cell: str) -> bool:
    return not cell or re.fullmatch(r"[\d,.]+%?", cell) is not None
