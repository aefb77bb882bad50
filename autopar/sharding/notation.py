"""The notation of sharding rules: one line says how an op may be cut.

    "m k, k n -> m n"     a letter (or a word) is a factor: a dim that may be cut. In the output it stays cut; missing
                          from every output it is a sum, and leaves P(sum)
    "b s! -> b s!"        `!` may not be cut
    "..., v~ d -> ... d"  `~` may be cut behind a mask: lowering has a local form of the op for it
    "n^ c -> n^ c"        `^` may be cut, and is reduced inside: the local form exchanges sums, and an output that lacks
                          the factor is whole
    "1 b -> a* b"         `*` is made here: an output has it, no operand does, and each device makes its own part
    "t h, e&t h -> t h"   `e&t` may also be cut together with t, by one axis: the local form sends rows to where their
                          e is; beside other marks, `e~&t`
    "a b -> a 1"          `1` is a dim of size one that is no factor
    "(h d) -> h d"        a dim that is a product of factors, major first: only the major one is cut, which a minor one
                          becomes where those before it are of size one
    "(g c!) -> (g c!)"    in a product too, `!` may not be cut
    "(b s+) -> b s"       `+` may be cut though it is minor: the dim is then cut by blocks, one for every value of those
                          before it
    "q|k|v -> q, k, v"    a dim that is several put end to end: they are cut together, each block of it by itself
    "a:3 (b c:4) -> ..."  a factor's size, where the shapes of a call do not say it
    "..., ... -> ..."     `...` are leading dims, aligned from the right; a dim of size 1 against a larger one is
                          broadcast
    "nothing -> a*"       no operands; an empty place is an operand without dims
    linear="x, y"         linear in one operand at a time: that operand and the output may be P(sum), the others R
    linear="x+y"          linear in several jointly: all of them and the output are P(sum) together

Operands stand in the order of the op's signature and are called x, y, z, ... . An operand that is None drops out, with
every mention of it; a number is an operand that is R on every device.

`parse` reads a line once; `Rule.bind` fits it to the shapes of one call and gives a `Binding`: which factors each dim
is.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.letters import BadRule

NAMES = (*"xyzuvwabcdefgh", *(f"x{i}" for i in range(14, 512)))  # names of the operands in `linear=`
_PLACES = {name: i for i, name in enumerate(NAMES)}
ELLIPSIS, ONE, NOTHING = "...", "1", "nothing"
_TOKEN = re.compile(r"\(([^()]*)\)(!?)|(\S+?)([!~*^]?)(?=\s|$)")
_TOGETHER = re.compile(r"(\w+)([!~]?)&(\w+)")
_FACTOR = re.compile(r"(\.\.\.|1|[A-Za-z_]\w*)(?::(\d+))?([+!]?)")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dim:
    """The factors of one dim: one, a product ("*"), or several end to end ("|"); none where it is broadcast."""

    factors: tuple[str, ...] = ()
    joined: str = ""

    @property
    def factor(self) -> str:
        return self.factors[0] if self.factors else ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A sharding rule: one line of notation, parsed."""

    text: str
    linear: str
    operands: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    groups: tuple[frozenset[int], ...]  # operands that are linear together, by position
    whole: frozenset[str]
    given: tuple[tuple[str, int], ...]  # sizes that the line itself says
    inside: frozenset[str] = frozenset()  # factors that the local form reduces itself
    minor: frozenset[str] = frozenset()  # factors that are cut by blocks where they stand behind others
    masked: frozenset[str] = frozenset()  # factors that are cut behind a mask
    made: frozenset[str] = frozenset()  # factors that each device makes its own part of
    together: tuple[tuple[str, str], ...] = ()  # pairs of factors that one axis may cut at once: rows travel

    def __str__(self) -> str:
        return self.text + (f"   linear={self.linear}" if self.linear else "")

    def bind(self, operands: Sequence[Shape | None], outputs: Sequence[Shape]) -> Binding:
        """Fit the rule to one call's shapes; `None` is an absent operand, and a number has the shape ()."""
        if len(operands) != len(self.operands) or len(outputs) != len(self.outputs):
            raise BadRule(
                f"the rule {self.text!r} has {len(self.operands)} operands and {len(self.outputs)} outputs",
                seen=f"a call with {len(operands)} and {len(outputs)}",
            )
        shapes = (*operands, *outputs)
        rows = [
            None if s is None else self._spread(p, s)
            for p, s in zip((*self.operands, *self.outputs), shapes, strict=True)
        ]
        pairs = [
            (d, n)
            for row, s in zip(rows, shapes, strict=True)
            if row is not None and s is not None
            for d, n in zip(row, s, strict=True)
        ]
        sizes = self._sizes(pairs)
        fitted = [
            None if row is None or s is None else _fitted(row, s, sizes) for row, s in zip(rows, shapes, strict=True)
        ]
        ins, outs = fitted[: len(operands)], fitted[len(operands) :]
        absent = {i for i, row in enumerate(ins) if row is None}
        groups = [group - absent for group in self.groups]
        return Binding(
            tuple(ins),
            tuple(row or () for row in outs),
            sizes,
            self.whole,
            tuple(dict.fromkeys(g for g in groups if g)),
            self.inside,
            self.minor,
            self.together,
        )

    def _spread(self, pattern: tuple[Dim, ...], shape: Shape) -> tuple[Dim, ...]:
        """A pattern dim for each dim of the shape; those of `...` count from the right, which aligns operands."""
        free = len(shape) - sum(d.factor != ELLIPSIS for d in pattern)
        if free < 0 or (free > 0 and all(d.factor != ELLIPSIS for d in pattern)):
            raise BadRule(f"the rule {self.text!r} does not fit", seen=f"an operand of shape {list(shape)}")
        leading = [Dim((f"{ELLIPSIS}{free - i}",)) for i in range(free)]
        found: list[Dim] = []
        for d in pattern:
            found += leading if d.factor == ELLIPSIS else [d]
        return tuple(found)

    def _sizes(self, pairs: list[tuple[Dim, int]]) -> dict[str, int]:
        """The size of every factor: from dims of one factor, then from joined dims with one unknown factor."""
        sizes = dict(self.given)
        for d, n in pairs:
            if not d.joined and d.factor != ONE:
                known = sizes.setdefault(d.factor, n)
                if known == 1:
                    sizes[d.factor] = n
                elif n not in (1, known):
                    raise BadRule(f"the rule {self.text!r} gives factor {d.factor} two sizes, {known} and {n}")
        for d, n in (p for _ in range(2) for p in pairs if p[0].joined):
            unknown = [f for f in d.factors if f not in sizes]
            have = [sizes[f] for f in d.factors if f in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = n - sum(have) if d.joined == "|" else n // math.prod(have)
            elif not unknown and n != (sum(have) if d.joined == "|" else math.prod(have)):
                raise BadRule(
                    f"the rule {self.text!r} does not fit: {d.joined.join(d.factors)} is {have}",
                    seen=f"a dim of size {n}",
                )
        return sizes


def _fitted(row: Sequence[Dim], shape: Shape, sizes: Mapping[str, int]) -> tuple[Dim, ...]:
    """The dims of one tensor, where a broadcast dim of size one has lost its factor."""
    return tuple(
        Dim() if n == 1 and not d.joined and sizes.get(d.factor) != 1 else d for d, n in zip(row, shape, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """What an axis cuts: one factor, or several that stand end to end in some dim, and the blocks cut one by one."""

    factors: tuple[str, ...]
    blocks: Shape = ()
    even: bool = False  # only parts of one size
    travels: bool = False  # the factors stand in different dims, and the local form sends rows from part to part


@dataclass(frozen=True, slots=True)
class Binding:
    """A rule fitted to shapes: the factors of every dim, and the size of every factor."""

    operands: tuple[tuple[Dim, ...] | None, ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: dict[str, int]
    whole: frozenset[str]
    groups: tuple[frozenset[int], ...]
    inside: frozenset[str] = frozenset()
    minor: frozenset[str] = frozenset()
    together: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> list[tuple[Dim, ...]]:
        return [row for row in (*self.operands, *self.outputs) if row is not None]

    def cuts(self, blocks: Mapping[str, Collection[Shape]] | None = None) -> Iterator[Cut]:
        """Everything that one axis may cut; `blocks` has, by factor, blocks by which it may also be cut."""
        ends = {f: d.factors for row in self.rows for d in row if d.joined == "|" for f in d.factors}
        joined = {f for row in self.rows for d in row if d.joined for f in d.factors}
        minor = {
            f for row in self.rows for d in row if d.joined == "*" for f in d.factors if self.blocks_of(d, f)
        } - self.minor
        seen: set[tuple[str, ...]] = set()
        for factor, size in self.sizes.items():
            together = ends.get(factor, (factor,))
            if size == 1 or together in seen or any(f in self.whole or f in minor for f in together):
                continue
            seen.add(together)
            yield Cut(together, even=factor in joined)
            if factor not in joined:
                yield from (Cut(together, b, True) for b in sorted((blocks or {}).get(factor, ())))
        yield from (Cut((a, b), travels=True) for a, b in self.together if min(self.sizes[a], self.sizes[b]) > 1)

    def without(self, places: Collection[int]) -> Binding:
        """The binding without the operands at these places, which take part in no joint linearity."""
        rows = tuple(None if i in places else row for i, row in enumerate(self.operands))
        return replace(self, operands=rows, groups=tuple(g for g in self.groups if g.isdisjoint(places)))

    def blocks_of(self, dim: Dim, factor: str) -> Shape:
        """The blocks by which a product of factors is cut where one of them is cut; none for the major one."""
        sizes = [self.sizes[f] for f in dim.factors]
        count = math.prod(sizes[: dim.factors.index(factor)])
        return (math.prod(sizes) // count,) * count if count > 1 else ()

    def is_inside(self, cut: Cut) -> bool:
        """Whether the op's local form itself reduces over the cut factors (`^` in the notation)."""
        return not self.inside.isdisjoint(cut.factors)

    def is_summed(self, cut: Cut) -> bool:
        return not self.is_inside(cut) and not any(
            f in d.factors for row in self.outputs for d in row for f in cut.factors
        )


@functools.cache
def parse(text: str, linear: str = "") -> Rule:
    """The rule that a line of notation says; a letter where it cannot be read."""
    together = tuple(dict.fromkeys((other, factor) for factor, _, other in _TOGETHER.findall(text)))
    left, arrow, right = _TOGETHER.sub(r"\1\2", text).partition("->")
    if not arrow:
        raise BadRule(f"the rule {text!r} has no arrow", advice='"m k, k n -> m n"')
    whole: set[str] = set()
    given: dict[str, int] = {}
    inside = frozenset(re.findall(r"(\w+)\^", text))
    operands = (
        () if left.strip() == NOTHING else tuple(_operand(piece, text, whole, given) for piece in left.split(","))
    )
    made: set[str] = set()
    outputs = tuple(_operand(piece, text, whole, given, made) for piece in right.split(","))
    known = made | {f for row in operands for d in row for f in d.factors}
    _check_factors(text, {f for row in outputs for d in row for f in d.factors} - whole, known, together)
    groups = []
    for joint in filter(None, (g.strip() for g in linear.split(","))):
        members = [_PLACES.get(name.strip(), -1) for name in joint.split("+")]
        if any(not 0 <= m < len(operands) for m in members):
            raise BadRule(
                f"linear={linear!r} names an operand that {text!r} does not have",
                advice=f"the operands are {', '.join(NAMES[: len(operands)])}",
            )
        groups.append(frozenset(members))
    minor = frozenset(re.findall(r"(\w+)(?::\d+)?\+", text))
    masked = frozenset(re.findall(r"(\w+)~", text))
    return Rule(
        text,
        linear,
        operands,
        outputs,
        tuple(groups),
        frozenset(whole),
        tuple(given.items()),
        inside,
        minor,
        masked,
        frozenset(made),
        together,
    )


def _check_factors(
    text: str, outputs: Collection[str], known: Collection[str], together: Sequence[tuple[str, str]]
) -> None:
    """Raise where an output has a factor that no operand has, or a mark names one."""
    for f in sorted(outputs):
        if f not in known and f != ONE:
            raise BadRule(
                f"the rule {text!r} has the factor {f} in an output only",
                advice=f"{f}!, where it stays whole, or {f}*, where each device makes its part",
            )
    for f in itertools.chain.from_iterable(together):
        if f not in known:
            raise BadRule(f"the rule {text!r} cuts {f} together with another factor, and no operand has it")


def public_name(op: str) -> str:
    """The name by which `autopar.rule` knows an op: `mylib::scan` for `ops.mylib.scan.default`."""
    parts = op.split(".")
    if len(parts) < 3 or parts[0] != "ops":
        return op
    return f"{parts[1]}::{'.'.join(parts[2:])}".removesuffix(".default")


def _operand(
    piece: str, text: str, whole: set[str], given: dict[str, int], made: set[str] | None = None
) -> tuple[Dim, ...]:
    dims = []
    names = []
    for inside, keep, token, mark in _TOKEN.findall(piece):
        pieces = inside.split() if inside else token.split("|")
        matches = [_FACTOR.fullmatch(p) for p in pieces]
        if not all(matches):
            raise BadRule(
                f"{token or inside!r} in the rule {text!r} is not a dim",
                advice=(
                    "a word, a word with ! (stays whole), ~ (behind a mask), ^ (reduced inside) or * (made here), (a "
                    "b), (a b+), a|b, 1, or ..."
                ),
            )
        factors = tuple(m[1] for m in matches if m)
        given.update({m[1]: int(m[2]) for m in matches if m and m[2]})
        whole.update(m[1] for m in matches if m and "!" in (keep, mark, m[3]))
        if mark == "*" and made is not None:
            made.update(factors)
        names += [f for f in factors if f != ONE]
        dims.append(Dim(factors, "" if len(factors) == 1 else "*" if inside else "|"))
    if len(set(names)) < len(names):
        raise BadRule(f"the rule {text!r} names a factor twice in one operand")
    return tuple(dims)
