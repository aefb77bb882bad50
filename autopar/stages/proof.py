"""Proof of an order: that it computes every turn, that somebody can always move, and what it holds.

    complete    each stage has F once for each turn, then B once, or I and then W once, on the stage's coordinate
    bounded     no coordinate holds more turns of stages than planned
    moving      what waits for what has no cycle: order on a coordinate, F for F before it, B or I for that behind it
    matching    on a channel, an ordered pair of coordinates and a direction, sends are in the order of receives

So ranks that wait at receives alone never wait for ever. Where sends wait too, until their receive is posted, it
depends on how early that is: `Proof.receives_ahead`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.letters import BadOrder
from autopar.stages.actions import Action, Order

Borders = Iterable[tuple[int, int]]
_NEEDS = {"F": "", "B": "F", "I": "F", "W": "I"}  # Before an action, this is the last of its stage and turn.
_Place = tuple[int, int]  # coordinate and index


@dataclass(frozen=True, slots=True)
class Proof:
    """What is proven of an order, beside that it is complete, moves and matches.

    `in_flight` are the most turns of stages that a coordinate holds. Where a send waits for its receive to be posted,
    the order moves if that is done `receives_ahead` actions before the one that needs it begins: zero is just before.
    """

    in_flight: tuple[int, ...]
    receives_ahead: int


def prove(order: Order, limits: Sequence[int] | None = None, borders: Borders | None = None) -> Proof:
    """Prove the order, or raise a letter that names a coordinate and an action.

    `limits` are the most turns of stages that each coordinate may hold. `borders` are pairs of stages of which the
    second reads what the first gives: those of a chain unless said.
    """
    if set(order.place) != set(range(order.coordinates)):
        raise BadOrder(f"an order on {order.coordinates} coordinates places stages at {order.place}")
    in_flight = tuple(_most_held(order, r, limits[r] if limits else None) for r in range(order.coordinates))
    waits = _Waits(order, borders or ((s, s + 1) for s in range(order.stages - 1)))
    stuck = waits.stuck()
    if stuck is not None:
        raise waits.letter(stuck)
    waits.must_match()
    return Proof(in_flight, waits.least_ahead())


def _most_held(order: Order, r: int, limit: int | None) -> int:
    """The most turns of stages that a coordinate holds, whose actions have to be complete."""
    done = {(s, turn): "" for s, at in enumerate(order.place) if at == r for turn in range(order.turns)}
    now = most = 0
    for action in order.actions[r]:
        of = action.stage, action.turn
        if of not in done:
            raise BadOrder(f"coordinate {r} runs {action!r}, which is not of its stages and turns")
        if done[of] != _NEEDS[action.kind]:
            seen = f"of stage {action.stage} and turn {action.turn} it has run {done[of] or 'nothing'}"
            raise BadOrder(f"coordinate {r} runs {action!r} too early or twice", seen=seen)
        done[of] = action.kind
        now += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, now)
        if limit is not None and now > limit:
            raise BadOrder(f"coordinate {r} holds {now} turns of stages with {action!r}", seen=f"{limit} were planned")
    for (stage, turn), last in done.items():
        if last not in ("B", "W"):
            lost = Action({"": "F", "F": "B", "I": "W"}[last], stage, turn)
            raise BadOrder(f"coordinate {r} never runs {lost!r}", advice="B, or I and W, for each F")
    return most


class _Waits:
    """What each action of an order waits for, and what waits for it."""

    def __init__(self, order: Order, borders: Borders) -> None:
        self.order = order
        places = {
            (action.kind == "F", action.stage, action.turn): (r, k)
            for r, actions in enumerate(order.actions)
            for k, action in enumerate(actions)
            if action.kind != "W"
        }
        near: dict[tuple[bool, int], list[int]] = {(way, s): [] for way in (True, False) for s in range(order.stages)}
        for source, reader in borders:
            near[True, source].append(reader)
            near[False, reader].append(source)

        def ends(action: Action, is_reader: bool) -> list[_Place]:
            is_forward = action.kind == "F"
            to = near[is_forward == is_reader, action.stage] if action.kind != "W" else []
            return [places[is_forward, stage, action.turn] for stage in to]

        self.sources: list[list[list[_Place]]] = []
        self.readers: list[list[list[_Place]]] = []
        for actions in order.actions:
            self.sources.append([ends(action, False) for action in actions])
            self.readers.append([ends(action, True) for action in actions])

    def stuck(self, ahead: int | None = None) -> list[int] | None:
        """Indices of stuck coordinates, or None; with `ahead`, sends wait for receives posted so early."""
        counts = [len(actions) for actions in self.order.actions]
        now = [0] * len(counts)
        has_run = [False] * len(counts)  # the action at `now`, which may still wait in its sends
        is_moving = True
        while is_moving:
            is_moving = False
            for r, count in enumerate(counts):
                while now[r] < count:
                    if not has_run[r]:
                        if not all(k < now[c] + has_run[c] for c, k in self.sources[r][now[r]]):
                            break
                        has_run[r] = is_moving = True
                    if ahead is not None and not all(c == r or k <= now[c] + ahead for c, k in self.readers[r][now[r]]):
                        break
                    now[r] += 1
                    has_run[r] = False
                    is_moving = True
        return now if now != counts else None

    def least_ahead(self) -> int:
        """The least number of actions ahead at which receives have to be posted where sends wait for them."""
        high = 0
        while self.stuck(high) is not None:
            high = 2 * high + 1
        tried = range(high // 2, high)  # all receives posted from the start are sends that wait for nothing
        return tried.start + bisect_left(tried, True, key=lambda ahead: self.stuck(ahead) is None)

    def letter(self, now: Sequence[int]) -> BadOrder:
        """The letter that tells the circle in which coordinates wait for each other."""
        actions = self.order.actions
        r = next(r for r in range(len(now)) if now[r] < len(actions[r]))
        seen: list[int] = []
        told: list[str] = []
        while r not in seen:
            seen.append(r)
            waiting = actions[r][now[r]]
            c, k = next((c, k) for c, k in self.sources[r][now[r]] if k >= now[c])
            told.append(f"coordinate {r} waits at {waiting!r} for {actions[c][k]!r} of coordinate {c}")
            r = c
        circle = told[seen.index(r) :]
        return BadOrder(f"{circle[0]}, for ever", seen="\n".join(circle[1:] + circle[:1]))

    def must_match(self) -> None:
        """Compare the messages of each channel as they are sent and as they are received."""
        sent: dict[tuple[int, int, bool], list[tuple[_Place, _Place]]] = defaultdict(list)
        received: dict[tuple[int, int, bool], list[tuple[_Place, _Place]]] = defaultdict(list)
        for r, actions in enumerate(self.order.actions):
            for k, action in enumerate(actions):
                for c, other in self.readers[r][k]:
                    sent[r, c, action.kind == "F"].append(((r, k), (c, other)))
                for c, other in self.sources[r][k]:
                    received[c, r, action.kind == "F"].append(((c, other), (r, k)))
        for channel, messages in sent.items():
            pairs = zip(messages, received[channel]) if channel[0] != channel[1] else ()
            for (a, i), (b, j) in ((ours[0], theirs[1]) for ours, theirs in pairs if ours != theirs):
                what = f"coordinate {a} sends {self.order.actions[a][i]!r} to coordinate {b}"
                raise BadOrder(f"{what}, which receives for {self.order.actions[b][j]!r} first")
