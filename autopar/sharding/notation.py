"""The notation of sharding rules: one line says how an op may be cut.

    "m k, k n -> m n"        a letter (or a word) is a factor: a dim that may be cut
                             in the output it stays cut; missing from every output it is a sum and leaves P(sum)
    "b s! -> b s!"           `!` may not be cut
    "a b -> a 1"             `1` is a dim of size one that is no factor
    "..., ... -> ..."        `...` leading dims, aligned from the right; a dim of size 1 against a larger one is broadcast
    linear="x, y"            linear in one operand at a time: that operand and the output may be P(sum), the others R
    linear="x+y"             linear in several jointly: all of them and the output are P(sum) together

Operands stand in the order of the op's signature and are called x, y, z, ... . An operand that is None drops out, with
every mention of it; a number is an operand that is R on every device.

`parse` reads a line once; `Rule.bind` fits it to the shapes of one call and gives a `Binding`: which factor each dim is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.letters import BadRule

NAMES = "xyzuvwabcdefgh"                                       # what `linear=` calls the operands
ELLIPSIS, ONE = "...", "1"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of an operand in a rule: the name of its factor, and whether it must stay whole."""

    factor: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of notation, read."""

    text: str
    linear: str
    operands: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    groups: tuple[frozenset[int], ...]                         # operands that are linear together, by position

    def __str__(self) -> str:
        return self.text + (f"   linear={self.linear}" if self.linear else "")

    def bind(self, operands: Sequence[tuple[int, ...] | None], outputs: Sequence[tuple[int, ...]]) -> Binding:
        """Fit the rule to one call. `None` is an operand that is absent; a number has the shape ()."""
        if len(operands) != len(self.operands) or len(outputs) != len(self.outputs):
            raise BadRule(f"the rule {self.text!r} has {len(self.operands)} operands and {len(self.outputs)} outputs",
                          seen=f"a call with {len(operands)} and {len(outputs)}")
        sizes: dict[str, int] = {}
        whole: set[str] = set()
        rows = [
            None if shape is None else self._factors(pattern, shape, sizes, whole)
            for pattern, shape in zip((*self.operands, *self.outputs), (*operands, *outputs), strict=True)
        ]
        fitted = [                                             # a dim of size 1 against a larger factor is broadcast: no factor
            None if row is None else tuple("" if size == 1 and sizes.get(f) != 1 else f for f, size in zip(row, shape, strict=True))  # type: ignore[arg-type]
            for row, shape in zip(rows, (*operands, *outputs), strict=True)
        ]
        ins, outs = fitted[: len(operands)], fitted[len(operands):]
        groups = [group - {i for i, row in enumerate(ins) if row is None} for group in self.groups]
        return Binding(tuple(ins), tuple(row or () for row in outs), sizes, frozenset(whole), tuple(dict.fromkeys(g for g in groups if g)))

    def _factors(self, pattern: tuple[Dim, ...], shape: tuple[int, ...], sizes: dict[str, int], whole: set[str]) -> tuple[str, ...]:
        """The factor of each dim of one operand; learns factor sizes on the way."""
        named = [d for d in pattern if d.factor != ELLIPSIS]
        free = len(shape) - len(named)
        has_ellipsis = len(named) < len(pattern)
        if free < 0 or (free > 0 and not has_ellipsis):
            raise BadRule(f"the rule {self.text!r} does not fit", seen=f"an operand of shape {list(shape)} at {_write(pattern)!r}")
        dims: list[Dim] = []
        for d in pattern:                                      # leading dims are numbered from the right: that aligns operands
            dims += [Dim(f"{ELLIPSIS}{free - i}") for i in range(free)] if d.factor == ELLIPSIS else [d]
        for d, size in zip(dims, shape, strict=True):
            if d.factor == ONE:
                continue
            known = sizes.setdefault(d.factor, size)
            if known == 1:
                sizes[d.factor] = size
            elif size not in (1, known):
                raise BadRule(f"the rule {self.text!r} gives factor {d.factor} two sizes, {known} and {size}")
            if d.whole:
                whole.add(d.factor)
        return tuple(d.factor for d in dims)


@dataclass(frozen=True, slots=True)
class Binding:
    """A rule fitted to shapes: the factor of every dim ("" where the dim is broadcast), and the size of every factor."""

    operands: tuple[tuple[str, ...] | None, ...]
    outputs: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]
    whole: frozenset[str]
    groups: tuple[frozenset[int], ...]

    @property
    def cuttable(self) -> list[str]:
        return [f for f, size in self.sizes.items() if f not in self.whole and size > 1]

    def is_summed(self, factor: str) -> bool:
        return all(factor not in out for out in self.outputs)


@functools.cache
def parse(text: str, linear: str = "") -> Rule:
    """Read one line of notation."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise BadRule(f"the rule {text!r} has no arrow", advice='"m k, k n -> m n"')
    operands = tuple(_operand(piece, text) for piece in left.split(","))
    outputs = tuple(_operand(piece, text) for piece in right.split(","))
    known = {d.factor for row in operands for d in row}
    for d in (d for row in outputs for d in row):
        if d.factor not in known and d.factor != ONE:
            raise BadRule(f"the rule {text!r} has the factor {d.factor} in an output only")
    groups = []
    for joint in filter(None, (g.strip() for g in linear.split(","))):
        members = [NAMES.find(name.strip()) for name in joint.split("+")]
        if any(not 0 <= m < len(operands) for m in members):
            raise BadRule(f"linear={linear!r} names an operand that {text!r} does not have", advice=f"the operands are {', '.join(NAMES[:len(operands)])}")
        groups.append(frozenset(members))
    return Rule(text, linear, operands, outputs, tuple(groups))


def _operand(piece: str, text: str) -> tuple[Dim, ...]:
    dims = []
    for token in piece.split():
        match = re.fullmatch(r"(\.\.\.|1|[A-Za-z_][A-Za-z_0-9]*)(!?)", token)
        if not match:
            raise BadRule(f"{token!r} in the rule {text!r} is not a dim", advice="a word, a word with ! (stays whole), 1, or ...")
        dims.append(Dim(match[1], whole=bool(match[2])))
    named = [d.factor for d in dims if d.factor != ONE]
    if len(set(named)) < len(named):
        raise BadRule(f"the rule {text!r} names a factor twice in one operand")
    return tuple(dims)


def _write(pattern: Sequence[Dim]) -> str:
    return " ".join(d.factor + "!" * d.whole for d in pattern)
