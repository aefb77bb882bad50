"""What the terms of a mask say, as a description: a range of places, chunks, documents, and which keys count.

    q_idx - kv_idx < 64                     left = 63
    doc[b, q_idx] == doc[b, kv_idx]         documents: any number that a query's place and a key's are given alike
    kv_idx < length[b]                      counts: any condition on a key's place alone
    q_idx < length[b]                       rows: any condition on a query's place alone; other queries get zeros

A mask is a conjunction of such terms. Any other is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.letters import NotServed
from autopar.tracer.place_terms import CONSTANT, Reading, Term, is_by_places, symbols_of

_AND = ("bitwise_and", "logical_and")
_NOT = ("bitwise_not", "logical_not")
_OPPOSITE = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


@dataclass(frozen=True, slots=True)
class Linear:
    """The number q_idx * q + kv_idx * kv + rest."""

    q: int
    kv: int
    rest: int

    def plus(self, other: Linear, times: int = 1) -> Linear:
        return Linear(self.q + times * other.q, self.kv + times * other.kv, self.rest + times * other.rest)


def linear(value: Any) -> Linear | None:
    """A term as a sum of places and a whole number; None where it is something else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Linear(0, 0, int(value)) if value == int(value) else None
    if not isinstance(value, Term):
        return None
    if value.name in ("q_idx", "kv_idx"):
        return Linear(value.name == "q_idx", value.name == "kv_idx", 0)
    if value.name == "to" and not value.dtype.is_floating_point:
        return linear(value.given["input"])
    found = [linear(one) for one in value.operands]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    if value.name in ("add", "sub") and len(parts) == 2:
        return parts[0].plus(parts[1], 1 if value.name == "add" else -1)
    return Linear(0, 0, 0).plus(parts[0], -1) if value.name == "neg" else None


@dataclass(slots=True)
class PlaceMask:
    """A mask as it is read, term by term."""

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    documents: Term | None = None
    counts: list[Term] = field(default_factory=list)
    rows: list[Term] = field(default_factory=list)

    def take(self, value: Any, reading: Reading) -> None:
        """Narrow the mask by a term; raise where no description holds it."""
        for one in _conjuncts(value):
            if not self._takes(one, reading):
                text, at = (one.text, one.at) if isinstance(one, Term) else (repr(one), "")
                raise reading.letter(f"has a term that no description of a mask holds: {text}", at)

    def _takes(self, one: Any, reading: Reading) -> bool:
        if not isinstance(one, Term):
            return one is True
        if not one.is_truth:
            return False
        if one.name == CONSTANT:
            return bool(one.given["value"])
        ranges = _ranges(one)
        if ranges is not None:
            for bound in ranges:
                self._narrow(bound)
            return True
        if one.name == "eq" and (alike := _alike(one, reading)) is not None:
            return self._keeps_apart(alike, reading)
        if not is_by_places(one):
            return False
        depends = symbols_of(one)
        if depends <= {"b", "kv_idx"}:
            self.counts.append(one)
        elif depends <= {"b", "q_idx"}:
            self.rows.append(one)
        else:
            return False
        return True

    def _narrow(self, bound: Linear) -> None:
        """Keep the pairs for which a number that grows or falls with q_idx - kv_idx is not below zero."""
        far = bound.rest // abs(bound.q)
        if bound.q > 0:
            self.right = far if self.right is None else min(self.right, far)
        else:
            self.left = far if self.left is None else min(self.left, far)

    def _keeps_apart(self, number: Term, reading: Reading) -> bool:
        """Keep the pairs of places that have one number."""
        first, *rest = number.operands if number.name == "floor_divide" else (None,)
        if isinstance(first, Term) and first.name == "kv_idx" and type(rest[0]) is int and rest[0] > 0:
            chunks = [c for c in (self.chunk, rest[0]) if c is not None]
            self.chunk = min(chunks)
            return all(c % self.chunk == 0 for c in chunks)
        if self.documents is None:
            self.documents = number
        return reading.key(self.documents) == reading.key(number)


def _conjuncts(value: Any) -> Iterator[Any]:
    """The conditions that a mask joins by &."""
    if isinstance(value, Term) and value.name in _AND and all(_is_truth(one) for one in value.operands):
        for one in value.operands:
            yield from _conjuncts(one)
    else:
        yield value


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Term) and value.is_truth)


def _ranges(one: Term) -> list[Linear] | None:
    """Numbers of q_idx - kv_idx that a comparison of places asks not to be below zero.

    None where it compares something else, or asks for places and not for the distance between them.
    """
    name = one.name
    if name in _NOT and isinstance(one.operands[0], Term) and one.operands[0].name in _OPPOSITE:
        one = one.operands[0]
        name = _OPPOSITE[one.name]
    if name == "eq":
        first, second = one.operands
        bounds = [*_least(first, second, 0), *_least(second, first, 0)]
        if any(abs(bound.q) != 1 for bound in bounds):
            return None
    elif name in _OPPOSITE:
        greater, smaller = one.operands if name in ("ge", "gt") else one.operands[::-1]
        bounds = _least(greater, smaller, name in ("gt", "lt"))
    else:
        return None
    if bounds and all(b.q >= 0 and b.kv >= 0 and b.rest >= 0 for b in bounds):
        return []  # true at all places, as q_idx >= 0 is
    return bounds if bounds and all(b.q == -b.kv != 0 for b in bounds) else None


def _least(greater: Any, smaller: Any, least: int) -> list[Linear]:
    """Numbers that are not below zero where `greater - smaller >= least`; [] if it asks otherwise."""
    wide = linear(greater)
    is_size = isinstance(smaller, Term) and smaller.name == "abs"
    low = linear(smaller.given["input"] if is_size else smaller)
    if wide is None or low is None or (is_size and (wide.q, wide.kv) != (0, 0)):
        return []
    return [wide.plus(low, sign).plus(Linear(0, 0, -least)) for sign in ((1, -1) if is_size else (-1,))]


def _alike(one: Term, reading: Reading) -> Term | None:
    """The number that an equality asks of a query's place and of a key's alike; None if it asks otherwise."""
    mine, other = sorted(one.operands, key=lambda x: "q_idx" not in symbols_of(x))
    if not isinstance(mine, Term) or not isinstance(other, Term):
        return None
    is_whole = not other.dtype.is_floating_point and is_by_places(other)
    if not is_whole or not {"kv_idx"} <= symbols_of(other) <= {"b", "kv_idx"}:
        return None
    is_mirrored = reading.key(mine, {"q_idx": "kv_idx"}) == reading.key(other)
    return other if is_mirrored and "kv_idx" not in symbols_of(mine) else None


@dataclass(slots=True)
class ScoreChange:
    """What a score becomes: factor * score, or outside * tanh(factor * score), where some terms hold."""

    factor: float = 1.0
    outside: float | None = None
    where: list[Term] = field(default_factory=list)

    def take(self, value: Any, reading: Reading) -> None:
        """Follow a term down to the score; raise where it is something else."""
        if not isinstance(value, Term):
            raise self._letter(value, reading)
        one, other = (*value.operands, None, None)[:2]
        if value.name == "score":
            return
        if value.name == "to" and value.dtype.is_floating_point:
            self.take(one, reading)
        elif value.name == "where" and not self.where and _is_lowest(value.given["other"]):
            self.take(value.given["input"], reading)
            self.where.append(one)
        elif value.name == "tanh":
            self.take(one, reading)
            if self.outside is not None or self.where:
                raise self._letter(value, reading)
            self.outside = 1.0
        elif value.name in ("mul", "div") and len(value.given) == 2 and _is_number(other):
            self.take(one, reading)
            self._multiply(other if value.name == "mul" else 1 / other)
        elif value.name == "mul" and _is_number(one):
            self.take(other, reading)
            self._multiply(one)
        else:
            raise self._letter(value, reading)

    def _multiply(self, number: float) -> None:
        if self.outside is None:
            self.factor *= number
        else:
            self.outside *= number

    def scale(self, scale: float) -> tuple[float | None, float]:
        """The softcap, or None, and the factor of a query's product with a key in the form of a description."""
        if self.outside is None:
            return None, scale * self.factor
        exact = 1.0 if math.isclose(self.factor * self.outside, 1.0, rel_tol=1e-15) else self.factor * self.outside
        return abs(self.outside), scale * exact

    @staticmethod
    def _letter(value: Any, reading: Reading) -> NotServed:
        text, at = (value.text, value.at) if isinstance(value, Term) else (repr(value), "")
        return reading.letter(
            f"makes of a score what no description of a mask holds: {text}",
            at,
            "cap * torch.tanh(score / cap), or the score itself; a bias as attn_mask of scaled_dot_product_attention",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0


def _is_lowest(value: Any) -> bool:
    return not isinstance(value, (Term, Tensor)) and value == -math.inf
