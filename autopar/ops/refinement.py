"""The rule of a view: dims of both shapes are products of common factors.

For example, with factors f0, f1 and f2:

    f32[6, 4] -> f32[2, 12]        (f2:2 f1:3+) f0 -> f2 (f1:3 f0:4)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.ops.rows import rule_from, whole_dims
from autopar.sharding.notation import Rule


def view_rule(arguments: Mapping[str, Any]) -> Rule:
    """The rule of a view, by the common refinement of both shapes; dims without one stay whole.

    In a first dim that is flattened, (batch, sequence, ...), the sequence may be cut inside each batch.
    """
    before = arguments["input"].shape
    after = arguments["size"]
    if math.prod(before) == 0:
        return rule_from([whole_dims("a", len(before))], [whole_dims("b", len(after))], linear="x")
    left = list[str]()
    right = list[str]()
    names = 0
    for group in _groups(before, after):
        marks = sorted({1, *_products(group[0]), *_products(group[1])})
        if all(y % x == 0 for x, y in itertools.pairwise(marks)):
            left += _refined(group[0], marks, names, is_first=not left)
            right += _refined(group[1], marks, names, is_first=not right)
        else:
            left += ["1" if n == 1 else f"w{names}_{k}!" for k, n in enumerate(group[0])]
            right += ["1" if n == 1 else f"v{names}_{k}!" for k, n in enumerate(group[1])]
        names += len(marks)
    return rule_from([left], [right], linear="x")


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The smallest groups of dims of two shapes with equal products."""
    i = j = 0
    while i < len(before) or j < len(after):
        a, b = i, j
        left, right = before[i] if i < len(before) else 1, after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while left != right:
            if left < right:
                left *= before[i]
                i += 1
            else:
                right *= after[j]
                j += 1
        yield before[a:i], after[b:j]


def _products(dims: Sequence[int]) -> Iterator[int]:
    """Products of the last dim, of the last two, and so on."""
    return itertools.accumulate(reversed(dims), operator.mul)


def _refined(dims: Sequence[int], marks: Sequence[int], first: int, is_first: bool) -> list[str]:
    """The dims of one side of a group as products of its factors, which lie between marks.

    The second factor of the tensor's first dim may be cut inside each value of the first.
    """
    factors = {y: (f"f{first + k}", y // x) for k, (x, y) in enumerate(itertools.pairwise(marks))}
    found = list[str]()
    total = math.prod(dims)
    for n in dims:
        inner = total // n
        inside = [factors[m] for m in reversed(marks) if inner < m <= total]
        if n == 1:
            found.append("1")
        elif len(inside) == 1:
            found.append(inside[0][0])
        else:
            words = [f"{factor}:{size}" for factor, size in inside]
            words[1] += "+" if is_first and not found else ""
            found.append(f"({' '.join(words)})")
        total = inner
    return found
