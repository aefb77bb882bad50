"""What rank 0 captures and lowers for all ranks, and what others read of it.

Rank 0 sends a graph as text, and halves as data: ranks then run one program by construction, whatever order the entries
of a set have in each of them. A rank reads a graph only for a model that is like rank 0's; where one is not, or a graph
or its halves cannot be sent, each rank captures or lowers by itself, ranks compare what they have, and rank 0 says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from autopar.codegen.lower import Lowered
from autopar.codegen.records import Records, packed, unpacked
from autopar.graph.calls import Call
from autopar.graph.graph import Graph
from autopar.letters import AutoparError, BadGraph, BadProgram
from autopar.module.likeness import likeness_of, said_of
from autopar.module.reads import Reads
from autopar.module.start_time import StartTime
from autopar.progress import caution
from autopar.runtime.world import (
    all_ranks_hold,
    as_long_as_a_start,
    from_rank_0,
    gathered_on_rank_0,
    once_all_have,
    plays_several_ranks,
    rank_here,
    ranks_can_talk,
    reasons_of_all,
)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What rank 0 sends of a capture."""

    graph: str  # The graph as text; "" where it has none, and then the reason.
    why: str
    reads: frozenset[tuple[int, str, str]]
    likeness: str
    said: str


Trace = Callable[[], Graph]


def captured_at_start(model: nn.Module, meta_inputs: Any, reads: Reads, trace: Trace, time: StartTime) -> Graph:
    """The graph of the call that a model is made parallel for; no rank waits in vain for one that raises."""

    def each(trace: Trace) -> Graph:
        def traced() -> tuple[Graph, dict[str, str]]:
            graph = trace()
            return graph, {"models or meta_inputs": graph.digest}

        return once_all_have(traced)

    return _captured(model, meta_inputs, reads, trace, each, time)


def captured_again(model: nn.Module, call: Call, reads: Reads, trace: Trace) -> Graph:
    """The graph of a call of another kind, of which all ranks have agreed that they make it."""

    def each(trace: Trace) -> Graph:
        graph = trace()
        all_ranks_hold("calls", graph.digest)
        return graph

    return _captured(model, call, reads, trace, each, StartTime())


def _captured(
    model: nn.Module,
    meta_inputs: Any,
    reads: Reads,
    trace: Trace,
    each: Callable[[Trace], Graph],
    time: StartTime,
) -> Graph:
    """The graph that rank 0 traces, with what it has read; `each` gives that of a rank by itself.

    `reads` gain the attributes that rank 0 has read meanwhile.
    """
    if not _is_one_of_many():
        return each(trace)
    made: list[Graph] = []

    def make() -> _Sent:
        made.append(trace())
        text, why = _written(made[0])
        read = frozenset(reads)  # More is read of the model from here on, to compare it.
        return _Sent(text, why, read, likeness_of(model, meta_inputs), said_of(model, read))

    sent = from_rank_0(make)
    time.of_all("tracing")
    graph = made[0] if made else None
    why = sent.why
    if graph is None and not why:
        graph, why = _read(sent, model, meta_inputs)
    reasons = reasons_of_all(why)
    if graph is None or reasons:
        caution("each rank traces the model by itself: %s", reasons)
        return each(trace if not made else lambda: made[0])
    reads.clear()
    reads.update(sent.reads)
    time.lap("tracing" if made else "read")
    return graph


class Known(Protocol):
    """Halves that were kept, and a place to keep more; on rank 0 alone, for others are sent theirs."""

    def records(self) -> Records: ...

    def keep(self, records: Records) -> None: ...


def lowered(lower: Callable[..., Lowered], known: Known, time: StartTime | None = None) -> Lowered:
    """The program of this rank, whose halves rank 0 lowers for all ranks that have the same."""
    mine = known.records()
    if not _is_one_of_many():
        program = lower(records=mine)
        known.keep(mine)
        return program
    made: list[Lowered] = []

    def make() -> tuple[bytes, str]:
        made.append(lower(records=mine))
        try:
            return packed(mine.data()), made[0].plan.untyped
        except BadProgram as e:
            caution("each rank lowers its program by itself: %s", e.what)
            return b"", ""

    given, left_open = from_rank_0(make)
    time = time or StartTime()
    time.of_all("lower")
    if not made:
        mine = Records(unpacked(given), left_open=left_open) if given else Records()
        made.append(lower(records=mine))
        time.lap("lower" if mine.lowered else "read")
    own = packed(mine.own_data()) if rank_here() and given and mine.lowered else b""
    with as_long_as_a_start():  # Others may still lower what only they have.
        for others in gathered_on_rank_0(own):
            mine.of_others.update(unpacked(others))
    known.keep(mine)
    return made[0]


def _is_one_of_many() -> bool:
    """Whether other ranks are other processes; ranks of one process share what it has lowered."""
    return ranks_can_talk() and not plays_several_ranks()


def _written(graph: Graph) -> tuple[str, str]:
    """The text of a graph, or why it has none."""
    if graph.idle:
        return "", f"a hook of {graph.idle[0].path or 'the model'} runs beside the program"
    try:
        return graph.to_json(), ""
    except BadGraph as e:
        return "", e.what


def _read(sent: _Sent, model: nn.Module, meta_inputs: Any) -> tuple[Graph | None, str]:
    """The graph that rank 0 has sent, or why it is not that of this rank's model."""
    try:
        if likeness_of(model, meta_inputs) != sent.likeness:
            return None, "ranks were given other modules, parameters or inputs"
        if said_of(model, sent.reads) != sent.said:
            return None, "attributes that the model reads differ between ranks"
        return Graph.from_json(sent.graph), ""
    except AutoparError as e:
        return None, e.what
