"""Predicted differences beside published ones: pairs of training runs that differ in one thing.

    python -m benchmarks.pairs [part of a kind ...]

What is judged of a pair is the log ratio of seconds that a device takes for a token: it needs no calibration, and no
knowledge of clocks or of the attention kernel of a run's time. By kind of difference:

    sign      pairs in which the same run is the faster one
    error     the median difference between predicted and published log ratio
    slope     predicted change for one of published change: least squares through the origin
    worst     the largest difference, and its pair

Rows are planned as they ran (`benchmarks.published`), and pairs that cannot be planned are counted by what they need.
A kind of three pairs or more is out of line with an error over .10, or a slope outside .7 to 1.4; the exit status says
how many are.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks import published

LEAST, ERROR, SLOPES = 3, 0.10, (0.7, 1.4)
HEADER = "| differs in | pairs | sign | error | slope | worst |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Pair:
    """Two rows, and the published and predicted change of seconds a token from the first to the second, as logs."""

    kind: str
    is_judged: bool
    ids: tuple[str, str]
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.published)

    @property
    def agrees(self) -> bool:
        return self.predicted * self.published > 0


def slope(pairs: Sequence[Pair]) -> float:
    """Predicted change for one of published change."""
    square = sum(p.published**2 for p in pairs)
    return sum(p.predicted * p.published for p in pairs) / square if square else math.nan


def is_in_line(pairs: Sequence[Pair]) -> bool:
    """Whether the pairs of a kind are as they should be; fewer than `LEAST` say nothing."""
    if len(pairs) < LEAST:
        return True
    return statistics.median(p.error for p in pairs) <= ERROR and SLOPES[0] <= slope(pairs) <= SLOPES[1]


def line(kind: str, pairs: Sequence[Pair]) -> str:
    """A line of the table."""
    worst = max(pairs, key=lambda p: p.error)
    sign = sum(p.agrees for p in pairs) / len(pairs)
    error = statistics.median(p.error for p in pairs)
    mark = "" if is_in_line(pairs) else " **out of line**"
    return (
        f"| {kind}{mark} | {len(pairs)} | {sign:.2f} | {error:.3f} | {slope(pairs):.2f} | "
        f"{worst.predicted:+.3f} for {worst.published:+.3f}: {' to '.join(worst.ids)} |"
    )


def pairs_of(given: Sequence[dict[str, Any]], steps: dict[str, published.Predicted]) -> list[Pair]:
    """The pairs both of whose rows were planned."""
    found = []
    for pair in given:
        ids = pair["a"], pair["b"]
        if all(name in steps for name in ids):
            a, b = (steps[name] for name in ids)
            change = math.log(b.seconds_a_token / a.seconds_a_token)
            found.append(Pair(pair["kind"], pair["judged"], ids, math.log(a.row["tps"] / b.row["tps"]), change))
    return found


def main(parts: Sequence[str]) -> int:
    data = json.loads(published.ROWS.read_text(encoding="utf-8"))
    given = [p for p in data["pairs"] if not parts or any(part in p["kind"] for part in parts)]
    wanted = {name for p in given for name in (p["a"], p["b"])}
    rows = [row for row in published.rows_of() if row["id"] in wanted]
    with ProcessPoolExecutor(published.WORKERS) as pool:
        steps = {r.row["id"]: r for r in pool.map(published.predicted, rows, [True] * len(rows))}
    pairs = pairs_of(given, steps)
    judged = [p for p in pairs if p.is_judged]
    kinds = {kind: [p for p in judged if p.kind == kind] for kind in dict.fromkeys(p.kind for p in judged)}
    print(HEADER)
    for kind, of in {**kinds, **({"all": judged} if judged else {})}.items():
        print(line(kind, of))
    print(f"\nNot judged, as something else differs too:\n\n{HEADER}")
    for kind in dict.fromkeys(p.kind for p in pairs if not p.is_judged):
        print(line(kind, [p for p in pairs if p.kind == kind and not p.is_judged]))
    needs = {row["id"]: row["needs"] for row in data["rows"] if "needs" in row}
    missing = [p for p in given if p["a"] in needs or p["b"] in needs]
    counts = Counter(need for p in missing for need in {*needs.get(p["a"], ()), *needs.get(p["b"], ())})
    print(f"\n{len(missing)} pairs cannot be planned. What they need, by number of pairs:\n")
    for need, count in counts.most_common():
        print(f"    {count:4}  {need}")
    print("\n| pair | published | predicted |\n|---|---|---|")
    for p in pairs:
        print(f"| {p.kind}: {p.ids[0]} to {p.ids[1]} | {p.published:+.3f} | {p.predicted:+.3f} |")
    return sum(not is_in_line(of) for of in kinds.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
