"""`Exchange`: messages that the local form of an op sends, so that plans pay for them and programs are held to them.

A form sends along every axis that cuts what its rule marks (`~`, `^`). An entry says what, once for a call:

    exchanges=(2, 1)                                          all-reduces of what is left of the marked factors
    exchanges=(Exchange("all_gather"), Exchange("reduce_scatter", BACKWARD))
    exchanges=lambda call, along: (Exchange("send", count=lambda n: n - 1, nbytes=keys_and_values, beside=1.0),)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from autopar.letters import BadRule, among
from autopar.sharding.notation import public_name

if TYPE_CHECKING:
    from autopar.ops.local import Here

FORWARD, BACKWARD = WAYS = ("forward", "backward")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
LargestShapes: TypeAlias = Sequence[tuple[int, ...]]  # shape of each operand's part on the fullest device
Messages: TypeAlias = Mapping[str, Counter[str]]  # number of messages of each kind, by way


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of one kind along each axis on which a form communicates; `n` is the number of devices there."""

    kind: str  # a collective, or "send": each device to the next one
    way: str = FORWARD
    count: int | Callable[[int], int] = 1  # number of messages, or a function of n that returns it
    # bytes of a collective's tensor where the axis does not cut it, or of what one device sends: a function of the
    # largest parts of the operands and of n. None: of what is left of the first output without the marked factors
    nbytes: Callable[[LargestShapes, int], float] | None = None
    # share of the op's compute in this way that runs beside the messages and may hide them; 0: they are in line
    beside: float | Callable[[int], float] = 0.0

    def __post_init__(self) -> None:
        for said, known in ((self.kind, KINDS), (self.way, WAYS)):
            if said not in known:
                raise BadRule(f"{said!r} is not what a form exchanges", seen=among(known, said))

    def times(self, n: int) -> int:
        """The number of messages on an axis of n devices."""
        return self.count(n) if callable(self.count) else self.count

    def hides(self, n: int) -> float:
        """The share of the op's compute that may hide the messages."""
        return self.beside(n) if callable(self.beside) else self.beside


class Along(NamedTuple):
    """Where a form sends: a device under a choice, and the axis."""

    here: Here
    axis: str


Exchanges: TypeAlias = tuple[int, int] | tuple[Exchange, ...]


def read_exchanges(said: Exchanges) -> tuple[Exchange, ...]:
    """The exchanges of an entry, whose short form has the all-reduces in forward and in backward."""
    exchanges = tuple(exchange for exchange in said if isinstance(exchange, Exchange))
    counts = [count for count in said if isinstance(count, int)]
    if len(exchanges) == len(said):
        return exchanges
    if len(counts) != len(said) or len(counts) != len(WAYS):
        raise BadRule(
            f"exchanges={said!r} is neither two numbers of all-reduces, forward and backward, nor Exchanges",
            advice='exchanges=(1, 0), or exchanges=(Exchange("all_gather"),)',
        )
    return tuple(Exchange("all_reduce", way, n) for way, n in zip(WAYS, counts, strict=True) if n)


def messages_of(exchanges: Iterable[Exchange], n: int) -> Messages:
    """The messages on an axis of n devices."""
    found = {way: Counter[str]() for way in WAYS}
    for exchange in exchanges:
        found[exchange.way][exchange.kind] += exchange.times(n)
    return found


def is_said(sent: Messages, said: Messages, operands: Iterable[Any]) -> bool:
    """Whether a form sends what its entry says, in each way that has run; `operands` are types.

    Backward may send less than that where some operand wants no gradient.
    """
    is_frozen = any("float" in t.dtype and not t.requires_grad for t in operands)
    fewer = is_frozen and BACKWARD in sent and sent[BACKWARD] <= said[BACKWARD]
    return all(found == said[way] or (way == BACKWARD and fewer) for way, found in sent.items())


_EVERYWHERE = "a form that sends along every axis that cuts what its rule marks, as `here.lies(0).cuts` lists them"


def misfit(op: str, sent: Messages, said: Messages, at: str, where: str) -> BadRule:
    """The letter about a form that sends other messages than its entry says."""
    return BadRule(
        f"the local form of {public_name(op)} sends other messages than its entry says, by which plans are priced",
        at=at,
        seen=f"{where}: it sends {_listed(sent)}; its entry says {_listed(said)}",
        advice=_as_written(sent) if any(map(any, sent.values())) else _EVERYWHERE,
    )


def _listed(messages: Messages) -> str:
    """Text such as `2 all_reduce in forward, nothing in backward`."""
    listed = []
    for way, found in messages.items():
        counts = [f"{n} {kind}" for kind, n in sorted(found.items()) if n]
        listed.append(f"{' and '.join(counts) or 'nothing'} in {way}")
    return ", ".join(listed)


def _as_written(messages: Messages) -> str:
    """The argument of an entry that says these messages."""
    found = [(kind, way, n) for way, kinds in messages.items() for kind, n in sorted(kinds.items()) if n]
    if all(kind == "all_reduce" for kind, _, _ in found):
        counts = {way: n for _, way, n in found}
        return f"exchanges=({counts.get(FORWARD, 0)}, {counts.get(BACKWARD, 0)})"
    return f"exchanges=({''.join(f'Exchange({kind!r}, {way!r}, {n}), ' for kind, way, n in found).rstrip()})"
