"""What each coordinate of a pipeline holds while it runs its order, action by action.

    stands       parameters, states, inputs: always
    gradients    sums over micro-batches: from the first backward on
    saved        values of a micro-batch in flight: from F to B or I, and others from I to W
    sent         a value or a gradient: at its sender until it is received, at its receiver one action ahead

An action needs more while it runs than it leaves behind, so the fullest moment is within an action.
`solver/stage_bytes.py` says what the actions of a stage need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.stages.actions import Action, Order
from autopar.stages.simulate import Run


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage on one device. What an action needs includes what its own micro-batch has saved."""

    begun: float  # values of parameters alone, made once for all micro-batches
    gradients: float  # sums of gradients, once there are any
    saved: float  # kept of a micro-batch between F and B or I
    waiting: float  # kept of a micro-batch between I and W
    needs: Mapping[str, float]  # the most while an action runs, by its kind, beside all sums of gradients
    first: Mapping[str, float]  # the same while the stage's first backward runs, which begins its sums

    def while_running(self, kind: str, is_first: bool) -> float:
        return self.first[kind] if is_first else self.needs[kind]


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that a stage gives another for each micro-batch, and gets back."""

    source: int
    reader: int
    sent: float  # values that the source would not keep if it did not send them
    value: float  # all values
    gradient: float


@dataclass(frozen=True, slots=True)
class Held:
    """The fullest moment of a coordinate within its order, beside what always stands."""

    gradients: float = 0.0
    saved: float = 0.0
    transients: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.saved + self.transients


def most_held(
    order: Order, run: Run, hops: Sequence[float], stages: Sequence[StageBytes], messages: Iterable[Message]
) -> list[Held]:
    """The fullest moment of each coordinate; `run` and `hops` say when what is sent arrives."""
    travels = _travelling(order, run, hops, messages)
    return [
        max(_moments(actions, stages, beside), key=lambda held: held.total)
        for actions, beside in zip(order.actions, travels, strict=True)
    ]


def _moments(actions: Sequence[Action], stages: Sequence[StageBytes], travels: Sequence[float]) -> Iterator[Held]:
    """The fullest moment of each action of a coordinate."""
    sums = 0.0
    saved = 0.0
    begun = set[int]()  # stages whose sums of gradients exist
    for action, beside in zip(actions, travels, strict=True):
        stage = stages[action.stage]
        before = {"F": 0.0, "B": stage.saved, "I": stage.saved, "W": stage.waiting}[action.kind]
        after = {"F": stage.saved, "B": 0.0, "I": stage.waiting, "W": 0.0}[action.kind]
        needs = stage.while_running(action.kind, action.stage not in begun)
        own = min(needs, max(before, after))
        yield Held(sums, saved - before + own, needs - own + beside)
        saved += after - before
        if action.kind in "BW" and action.stage not in begun:
            begun.add(action.stage)
            sums += stage.gradients


def _travelling(order: Order, run: Run, hops: Sequence[float], messages: Iterable[Message]) -> list[list[float]]:
    """Bytes on their way while each action of each coordinate runs."""
    place = order.place
    found = [[0.0] * len(actions) for actions in order.actions]
    at = {
        ("F" if a.kind == "F" else "B", a.stage, a.turn): i
        for actions in order.actions
        for i, a in enumerate(actions)
        if a.kind != "W"
    }

    def travel(kind: str, sender: int, receiver: int, hop: float, own: float, nbytes: float) -> None:
        a = place[sender]
        b = place[receiver]
        for turn in range(order.turns if nbytes else 0):
            sent = at[kind, sender, turn]
            read = at[kind, receiver, turn]
            if a == b:  # a copy, from one stage of the coordinate to the other
                for k in range(sent + 1, read):
                    found[a][k] += nbytes
                continue
            awaited = max(read - 1, 0)  # memory to receive it is there one action ahead
            if awaited < read:
                found[b][awaited] += nbytes
            arrives = max(run.ends[a][sent] + hop, run.starts[b][awaited])
            k = sent + 1
            while k < len(found[a]) and run.starts[a][k] < arrives:
                found[a][k] += own
                k += 1

    for message in messages:
        low, high = sorted((message.source, message.reader))
        hop = sum(hops[low:high])
        travel("F", message.source, message.reader, hop, message.sent, message.value)
        travel("B", message.reader, message.source, hop, message.gradient, message.gradient)
    return found
