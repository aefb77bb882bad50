"""Compare the parallel program's result with the single-device program's.

    float64    each tensor within `tolerance` of the reference, relative to max(its norm, 1e-3 x global norm /
               sqrt(tensors)):
               1e-9 for losses and gradients, 1e-8 for parameters after optimizer steps
    float32    error against the float64 reference at most twice float32 eager's own error against it, plus 1e-6 of that
               scale;
               after AdamW, whose steps turn rounding noise of vanishing gradients into motion, parameters may instead
               differ from eager's by at most twice the largest difference among eager runs with permuted sums

`Equality.check` raises with a table of what failed and by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Unequal(AssertionError):
    """Raised where results differ; the message says which and by how much."""


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    error: float  # norm of the difference over the scale
    allowed: float

    @property
    def failed(self) -> bool:
        return not self.error <= self.allowed  # nan fails

    def __str__(self) -> str:
        return f"{self.name:<40} error {self.error:.2e}  allowed {self.allowed:.2e}"


@dataclass(frozen=True, slots=True)
class Equality:
    """The outcome of one comparison."""

    what: str
    rows: tuple[Comparison, ...]

    @property
    def failures(self) -> list[Comparison]:
        return [row for row in self.rows if row.failed]

    @property
    def worst(self) -> float:
        return max((row.error for row in self.rows), default=0.0)

    def check(self) -> Equality:
        if self.failures:
            ordered = sorted(self.failures, key=lambda r: -r.error)
            raise Unequal(
                f"{self.what}: {len(self.failures)} of {len(self.rows)} differ\n"
                + "\n".join(f"    {row}" for row in ordered[:20])
            )
        return self

    @staticmethod
    def in_float64(what: str, actual: Tensors, expected: Tensors, tolerance: float) -> Equality:
        scales = scales_of(expected)
        return Equality(
            what,
            (
                *_names(actual, expected),
                *(
                    Comparison(n, distance(actual[n], e) / scales[n], tolerance)
                    for n, e in expected.items()
                    if n in actual
                ),
            ),
        )

    @staticmethod
    def in_float32(
        what: str, actual: Tensors, eager: Tensors, expected: Tensors, permuted: Sequence[Tensors] = ()
    ) -> Equality:
        """Compare float32 results with those of float32 eager, and of eager in float64 as `expected`.

        `permuted` are eager float32 runs with reordered sums, for results after AdamW.
        """
        scales = scales_of(expected)
        rows = []
        for n, e in expected.items():
            if n not in actual:
                continue
            error = distance(actual[n], e) / scales[n]
            own = distance(eager[n], e) / scales[n]
            row = Comparison(n, error, 2 * own + 1e-6)
            if row.failed and permuted:
                runs = [eager, *permuted]
                spread = max(distance(a[n], b[n]) for i, a in enumerate(runs) for b in runs[i + 1 :]) / scales[n]
                row = Comparison(n, distance(actual[n], eager[n]) / scales[n], 2 * spread + 1e-6)
            rows.append(row)
        return Equality(what, (*_names(actual, expected), *rows))


def distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference, in float64; NaN where shapes differ."""
    if a.shape != b.shape:
        return float("nan")
    return float((a.detach().double() - b.detach().double()).norm())


def scales_of(tensors: Tensors) -> dict[str, float]:
    """The norm that each tensor's errors are relative to: its own, at least 1/1000 of a typical one."""
    norms = {n: float(t.detach().double().norm()) for n, t in tensors.items()}
    typical = sum(v * v for v in norms.values()) ** 0.5 / max(1, len(norms)) ** 0.5
    return {n: max(v, 1e-3 * typical, torch.finfo(torch.float64).tiny) for n, v in norms.items()}


def _names(actual: Tensors, expected: Tensors) -> list[Comparison]:
    """A failed comparison for each tensor that only one side has."""
    return [
        Comparison(f"{n} ({'missing' if n in expected else 'unexpected'})", float("nan"), 0.0)
        for n in sorted(set(actual) ^ set(expected))
    ]
