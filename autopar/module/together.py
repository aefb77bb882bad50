"""What rank 0 captures and lowers for all ranks, and what others read of it.

Rank 0 sends a graph as text, and halves as data: ranks then run one program by construction, whatever order the entries
of a set have in each of them. A rank reads a graph only for a model that is like rank 0's; where one is not, or a graph
or its halves cannot be sent, each rank captures or lowers by itself, ranks compare what they have, and rank 0 says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.codegen.lower import Lowered
from autopar.codegen.records import Records, packed, unpacked
from autopar.graph.graph import Graph
from autopar.letters import AutoparError, BadGraph, BadProgram
from autopar.module.likeness import likeness_of, said_of
from autopar.module.reads import Reads
from autopar.module.start_time import StartTime
from autopar.progress import caution
from autopar.runtime.world import from_rank_0, once_all_have, plays_several_ranks, ranks_can_talk, reasons_of_all


@dataclass(frozen=True, slots=True)
class _Sent:
    """What rank 0 sends of a capture."""

    graph: str  # The graph as text; "" where it has none, and then the reason.
    why: str
    reads: Reads
    likeness: str
    said: str


def captured(
    model: nn.Module, meta_inputs: Any, reads: Reads, trace: Callable[[], Graph], time: StartTime | None = None
) -> Graph:
    """The graph that rank 0 traces, on every rank; `reads` gain the attributes that it reads meanwhile."""
    if not _is_one_of_many():
        return _each_traces(trace)
    made: list[Graph] = []

    def make() -> _Sent:
        made.append(trace())
        text, why = _written(made[0])
        return _Sent(text, why, reads, likeness_of(model, meta_inputs), said_of(model, reads))

    sent = from_rank_0(make)
    time = time or StartTime()
    time.of_all("traced")
    graph = made[0] if made else None
    why = sent.why
    if graph is None and not why:
        graph, why = _read(sent, model, meta_inputs)
    reasons = reasons_of_all(why)
    if graph is None or reasons:
        caution("each rank traces the model by itself: %s", reasons)
        return _each_traces(trace if not made else lambda: made[0])
    reads.update(sent.reads)
    time.lap("traced" if made else "read")
    return graph


def lowered(lower: Callable[[Records], Lowered], time: StartTime | None = None) -> Lowered:
    """The program of this rank, whose halves rank 0 lowers for all ranks that have the same."""
    if not _is_one_of_many():
        return lower(Records())
    made: list[Lowered] = []

    def make() -> tuple[bytes, str]:
        records = Records()
        made.append(lower(records))
        try:
            return packed(records.data()), made[0].plan.untyped
        except BadProgram as e:
            caution("each rank lowers its program by itself: %s", e.what)
            return b"", ""

    given, left_open = from_rank_0(make)
    time = time or StartTime()
    time.of_all("lowered")
    if made:
        return made[0]
    records = Records(unpacked(given), left_open) if given else Records()
    program = lower(records)
    time.lap("lowered" if records.lowered else "read")
    return program


def _each_traces(trace: Callable[[], Graph]) -> Graph:
    """The graph that this rank traces; a letter where ranks have different ones."""

    def traced() -> tuple[Graph, dict[str, str]]:
        graph = trace()
        return graph, {"models or meta_inputs": graph.digest}

    return once_all_have(traced)


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
