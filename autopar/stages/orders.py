"""Makers of orders that others published, for any number of turns, and of one that goes by prices.

Those on a looped place are one maker: GPipe, 1F1B, interleaved 1F1B and zero bubble differ in how many forwards run
before the first backward, and in how many weights' gradients are put off. Those on a V are the phases of a coordinate,
as text, or the slots of one turn, which all others repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from autopar.letters import NotServed, among
from autopar.stages.actions import Action, Order, Prices, StagePrices
from autopar.stages.greedy import listed

__all__ = ["CAPPED", "ON_A_V", "ORDERS", "Action", "Order", "Prices", "StagePrices", "order_of"]


def order_of(
    name: str,
    coordinates: int,
    turns: int,
    stages_each: int = 1,
    prices: Prices | None = None,
    caps: Sequence[int] | None = None,
) -> Order:
    """The order of that name with `stages_each` stages a coordinate: two on a V, whatever is asked.

    No coordinate holds more than `caps` turns of stages between their F and their B or W; orders in `CAPPED` can do
    with one. `prices` are what the greedy order goes by.
    """
    if name not in ORDERS:
        raise NotServed(f"{name!r} is not an order of pipelines", seen=among(ORDERS, name))
    if caps is not None and (name not in CAPPED or (stages_each > 1 and name != "greedy")):
        raise NotServed(f"the order {name!r} has no form that holds fewer turns", advice='one stage each, or "greedy"')
    return ORDERS[name](coordinates, turns, stages_each, prices, caps)


_Maker = Callable[[int, int, int, "Prices | None", "Sequence[int] | None"], Order]


def _looped(lead: Callable[[int], int | None], is_split: bool = False) -> _Maker:
    """Stage s on coordinate s modulo their number; turns pass the stages of a coordinate in rounds.

    A round has as many turns as there are coordinates, or some more where those do not divide the turns: the first
    rounds are the largest. A coordinate runs ahead by such a round in all stages but its last, and by `lead` of the
    number of coordinates behind it; None is by all. Where backward is split, it puts off as many weights' gradients as
    there are coordinates before it.
    """

    def made(p: int, n: int, each: int, prices: Prices | None, caps: Sequence[int] | None) -> Order:
        rounds = 1 if lead(0) is None else max(1, n // p)
        sizes = [n // rounds + (k < n % rounds) for k in range(rounds)]
        turns = [range(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(rounds)]
        forwards = [(part * p, turn) for some in turns for part in range(each) for turn in some]
        backwards = [((each - 1) * p - stage, turn) for stage, turn in forwards]

        def at(r: int) -> Iterator[Action]:
            further = lead(p - 1 - r)
            ahead = n * each if further is None else min((each - 1) * sizes[0] + further, n * each)
            late = r
            if caps is not None:
                # A coordinate that ran further ahead than those before it would wait for forwards that wait for it.
                ahead = min(ahead, min(caps[: r + 1]) - 1)
                late = min(late, caps[r] - 1 - ahead)
            for k in range(-ahead, n * each + late):
                if k + ahead < n * each:
                    yield Action("F", forwards[k + ahead][0] + r, forwards[k + ahead][1])
                if 0 <= k < n * each:
                    yield Action("I" if is_split else "B", backwards[k][0] + r, backwards[k][1])
                if is_split and k >= late:
                    yield Action("W", backwards[k - late][0] + r, backwards[k - late][1])

        return Order(tuple(s % p for s in range(p * each)), n, tuple(tuple(at(r)) for r in range(p)))

    return made


def _zb_v(p: int, r: int, n: int) -> str:
    """Phases of coordinate `r` of ZB-V, of its stages 0 and 1: a W follows its I until the end."""
    warm = "F0 " * (2 * (p - r) - 1) + "F1 F0 " * r + "F1 I1 W1 " * (p - r)
    steady = "F0 I0 W0 F1 I1 W1 " * (n - 2 * p + r + 1) + "I0 W0 F1 I1 W1 " * (p - r - 1)
    return warm + steady + "I0 I1 " * r + "I0 W0 " * (p - r) + "W1 " * r + "W0 " * r


def _dualpipe_v(p: int, r: int, n: int) -> str:
    """Phases of coordinate `r` of DualPipeV; a W alone is the one that has waited longest."""
    last = ("B1 B0 " * (r + 1)).split()
    last[r + 1 :] = [token.replace("B", "I") for token in last[r + 1 :]]
    warm = "F0 " * (2 * (p - r - 1)) + "F0 F1 " * (r + 1) + "I1 W F1 " * (p - r - 1)
    steady = "F0 B1 F1 B0 " * (n - 2 * p + r + 1) + "B1 F1 B0 " * (p - r - 1)
    return warm + steady + " ".join(last) + " W I0" * (p - r - 1) + " W" * (r + 1)


def _on_a_v(phases: Callable[[int, int, int], str]) -> _Maker:
    """Stages go down the coordinates and up again; phases serve two turns a coordinate, and more.

    An order for more turns with some left out is an order for the others: what waited has less to wait for.
    """

    def made(p: int, n: int, each: int, prices: Prices | None, caps: Sequence[int] | None) -> Order:
        def at(r: int) -> Iterator[Action]:
            stages = {"0": r, "1": 2 * p - 1 - r}
            turns = {(kind, part): iter(range(2 * p + n)) for kind in "FB" for part in stages}
            waiting: list[tuple[str, int]] = []
            for token in phases(p, r, max(n, 2 * p)).split():
                kind = token[0]
                part = token[1:]
                if kind == "W":
                    part, turn = next(late for late in waiting if part in ("", late[0]))
                    waiting.remove((part, turn))
                else:
                    turn = next(turns["F" if kind == "F" else "B", part])
                if kind == "I":
                    waiting.append((part, turn))
                if turn < n:
                    yield Action(kind, stages[part], turn)

        return Order((*range(p), *reversed(range(p))), n, tuple(tuple(at(r)) for r in range(p)))

    return made


def _v_half(p: int, r: int) -> tuple[int, int, int, int]:
    """Slots of V-half: turns go down the coordinates at half the speed at which they come up."""
    later = 3 * p + 3 * (p % 2 == 0)
    return 2 * r, 3 * p - r - 2, later + 2 * r - 1, later + 3 * p - r - 2


def _v_min(p: int, r: int) -> tuple[int, int, int, int]:
    """Slots of V-min: turns go down and up the coordinates without a pause."""
    later = 2 * p + 2 * (p % 3 == 0)
    return r, 2 * p - r - 1, later + r, later + 2 * p - r - 1


def _in_slots(slots: Callable[[int, int], tuple[int, int, int, int]], period: int = 6) -> _Maker:
    """Orders in which each turn repeats the slots of the one before, a `period` later.

    A period has a slot of equal length for each action of a turn. `slots` has those of a coordinate's first F, second
    F, second I and first I. No two of them are the same modulo the period, so turns never meet, and each W has one of
    the two slots that are left. So a coordinate holds as many turns as begin from an F to its W. Where less is held, at
    the beginning and the end, a W runs in the first slot that is idle.
    """

    def most_held(down: int, up: int, back_up: int, back_down: int) -> int:
        taken = {slot % period for slot in (down, up, back_up, back_down)}
        held = [0] * period
        for begins, late in ((up, back_up + 1), (down, back_down + 1)):
            while late % period in taken:
                late += 1
            taken.add(late % period)
            for slot in range(begins, late + 1):
                held[slot % period] += 1
        return max(held)

    def made(p: int, n: int, each: int, prices: Prices | None, caps: Sequence[int] | None) -> Order:
        fixed: list[list[tuple[str, int]]] = []
        most = []
        for r in range(p):
            actions = ("F", r), ("F", 2 * p - 1 - r), ("I", 2 * p - 1 - r), ("I", r)
            begins = [*zip(slots(p, r), actions, strict=True)]
            every = sorted((slot + period * turn, action) for turn in range(n) for slot, action in begins)
            fixed.append([action for _, action in every])
            most.append(most_held(*slots(p, r)))
        unit = Prices((StagePrices(1.0, 1.0, 1.0),) * (2 * p))
        return listed((*range(p), *reversed(range(p))), n, unit, most, fixed)

    return made


def _by_prices(p: int, n: int, each: int, prices: Prices | None, caps: Sequence[int] | None) -> Order:
    """Stages go to and fro over the coordinates; unless capped, each holds what the first of 1F1B does."""
    place = tuple(s % p if s // p % 2 == 0 else p - 1 - s % p for s in range(p * each))
    return listed(place, n, prices or Prices((StagePrices(1.0, 1.0, 1.0),) * len(place)), caps or (p * each,) * p)


ORDERS: Mapping[str, _Maker] = {
    "gpipe": _looped(lambda behind: None),
    "1f1b": _looped(lambda behind: behind),
    "interleaved": _looped(lambda behind: 2 * behind),
    "zero-bubble": _looped(lambda behind: behind, is_split=True),
    "zb-v": _on_a_v(_zb_v),
    "dualpipe-v": _on_a_v(_dualpipe_v),
    "v-half": _in_slots(_v_half),
    "v-min": _in_slots(_v_min),
    "greedy": _by_prices,
}
ON_A_V = ("zb-v", "dualpipe-v", "v-half", "v-min")  # Orders with two stages on each coordinate.
CAPPED = ("1f1b", "zero-bubble", "greedy")
