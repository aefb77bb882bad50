"""Bytes of a parameter's gradient on its way over an edge, until it lies as the parameter is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Span: TypeAlias = tuple[np.ndarray, int, int]  # bytes, and their first and last time


@dataclass(frozen=True, slots=True, eq=False)
class GradientBytes:
    """Bytes of a gradient in each of its forms, by [given, taken] of the edge."""

    is_sum: np.ndarray
    sums: np.ndarray  # partial sums as they come
    others: np.ndarray  # gradients that need no reduction here
    cuts: np.ndarray  # parts that are cut after an earlier reduction
    packed: np.ndarray  # temporary bytes of packing a bucket
    scattered: np.ndarray  # the bucket until it has been scattered
    between: np.ndarray  # the bucket between two steps of its reduction; 0 over one axis
    stored: np.ndarray  # a sum once it is reduced
    widens: float  # bytes of an element of a sum over micro-batches, for one of a partial sum


@dataclass(frozen=True, slots=True, eq=False)
class GradientTimes:
    """The times of a gradient on its way."""

    back: int  # backward of the op that makes it
    full: int  # end of the bucket that it travels in
    is_alone: bool  # whether it is reduced at once, without the bucket
    reduced: int  # end of the reduction
    goes_on: int  # end of its next step
    settled: int  # the last time of backward


def reduced(nbytes: GradientBytes, times: GradientTimes, accumulates: bool) -> Iterator[Span]:
    """A gradient that is reduced in each micro-batch.

    Where micro-batches accumulate, it is added to the sum of earlier ones, which lies as the parameter does, as soon as
    it is reduced, or at once where it needs no reduction.
    """
    back, full = times.back, times.full
    closes = back if times.is_alone else full
    yield nbytes.sums, back, back if times.is_alone else full - 1
    yield nbytes.others, back, back if accumulates else full - 1
    yield nbytes.packed, max(back, closes), max(back, closes)
    yield nbytes.scattered, closes, max(closes, times.reduced)
    yield nbytes.between, closes, times.goes_on
    if accumulates:
        yield nbytes.stored, closes, max(closes, times.reduced)
    else:
        yield nbytes.cuts, back + 1, full - 1


def summed(nbytes: GradientBytes, times: GradientTimes, adds_twice: bool) -> Iterator[Span]:
    """The sum over micro-batches of a gradient that is reduced in each of them."""
    total = np.where(nbytes.is_sum, np.minimum(nbytes.sums, nbytes.stored), nbytes.others)
    for _ in range(1 + adds_twice):
        yield total, 0, times.settled - 1


def waiting(nbytes: GradientBytes, times: GradientTimes, adds_twice: bool, is_first: bool) -> Iterator[Span]:
    """A gradient that is reduced after the last micro-batch, in the first of the buckets or a later one.

    Each is added to the sum where it is made. Sums are kept in the dtype of storage if that is wider, and cast back one
    by one; all of them are there when the first bucket is packed. A sum that needs no reduction is the gradient itself.
    """
    whole = nbytes.sums + nbytes.others
    for _ in range(1 + adds_twice):
        yield np.where(nbytes.is_sum, whole * nbytes.widens, whole), 0, times.settled - 1
    yield nbytes.sums, times.settled, times.settled
    yield whole, times.back, min(times.back, times.settled - 1)
    if is_first:
        yield nbytes.scattered, times.settled, times.settled


def where(mask: np.ndarray, spans: Iterator[Span]) -> Iterator[Span]:
    """The same bytes where the mask is set, and none elsewhere."""
    for nbytes, first, last in spans:
        if first <= last:
            yield np.where(mask, nbytes, 0.0), first, last
