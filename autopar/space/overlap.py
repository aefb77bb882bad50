"""What may run beside compute: gathers of parameters and reductions of their gradients, in windows.

A lowering that starts them there implements it, and the objective prices it.

    windows      the forward is cut into runs of ops: a numbered block of the model is one; small ones are joined until
                 they read so many bytes of parameters as the plan says (BUCKET, or ZeRO-3's BLOCK: each by itself)
    forward      what window w gathers moves while window w-1 computes
    backward     what window w gathers again moves while the backward of window w+1 computes (the last of several
                 windows gathers nothing again: backward begins with it), and what it reduces while that of window w-1
                 does
    alone        what has no such window beside it (of the first in forward, of an only one in backward) moves when it
                 is read, a bucket at a time
    exposed      max(0, communication - compute) of each; where there is no such window, all of it; on a machine where
                 they slow each other, the share of the shorter that is hidden was measured

There is one stream for compute and one for communication. Everything else is in line. The cut does not depend on
choices: both sums are linear in them, so a window is a row of the solver.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.graph.graph import Graph
    from autopar.sharding.placement import Flow
    from autopar.space.space import Edge, Site

BUCKET = 25 * 2**20  # bytes of whole parameters that travel together
BLOCK = 1  # of windows: whatever reads a parameter is one
_HANDED_ON = frozenset(
    {"identity", "to", "t", "transpose", "permute", "view", "expand"}
)  # of a parameter alone, these are the parameter


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Communication that moves while some ops compute: seconds of edges and of sites, by choice.

    It happens so many times in a step.
    """

    name: str
    times: int
    communication: tuple[tuple[int, np.ndarray], ...]  # of an edge by [given, taken]
    compute: tuple[tuple[int, np.ndarray], ...]  # of a site by choice

    def seconds(self, picked: Sequence[int], edges: Sequence[Edge]) -> tuple[float, float]:
        """Of both, under these choices."""
        moved = sum(
            float(table[edges[k].given_by[picked[edges[k].source]], edges[k].taken_by[picked[edges[k].target]]])
            for k, table in self.communication
        )
        return moved, sum(float(run[picked[i]]) for i, run in self.compute)


@dataclass(frozen=True, slots=True)
class Cut:
    """The ops of a forward as windows.

    Of each op the window that it stands in, of each window its first and last op.
    """

    of: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    ends: tuple[int, ...]  # of each window the last op that reads a parameter
    buckets: Mapping[
        fx.Node, tuple[int, int]
        # of each parameter the first and the last op that read anything of the bucket in which it moves when it moves
        # alone
    ]
    stays: frozenset[
        fx.Node
        # parameters first read in the last of several windows: what is gathered of them is still there as backward
        # begins,
        # and is not gathered again
    ]

    def gathered(self, parameter: fx.Node, op: int) -> int:
        """The time from which a parameter that this op reads is there: as its window's predecessor begins."""
        w = self.of[op]
        return self.spans[w - 1][0] if w else self.buckets[parameter][0]

    def gathered_again(self, parameter: fx.Node, op: int) -> int:
        n, w = len(self.of), self.of[op]
        return 2 * n - 1 - (self.ends[w + 1] if w + 1 < len(self.spans) else self.buckets[parameter][1])

    def taken(self, parameter: fx.Node, op: int) -> int:
        """The time at which what was gathered with this op's parameters arrives."""
        return self.spans[self.of[op]][0] if self.of[op] else self.buckets[parameter][0]

    def taken_again(self, parameter: fx.Node, op: int) -> int:
        n, w = len(self.of), self.of[op]
        return 2 * n - 1 - (self.spans[w][1] if w + 1 < len(self.spans) else self.buckets[parameter][1])

    def together(self, parameter: fx.Node, op: int, again: bool) -> bool:
        """Do other parameters arrive with this one?"""
        alone = self.of[op] == (len(self.spans) - 1 if again else 0)
        return not alone or self.buckets[parameter][0] < self.buckets[parameter][1]

    def reduced(self, op: int) -> int:
        """The time at which the gradient that this op gives is reduced."""
        n, w = len(self.of), self.of[op]
        return 2 * n - 1 - (self.spans[w - 1][0] if w else op)


def cut(ops: Sequence[fx.Node], least: int = BUCKET) -> Cut:
    """Cut a forward by the blocks of the model.

    What reads less than `least` bytes of parameters goes with what follows.
    """
    from autopar.graph.graph import info, op_name, type_of
    from autopar.graph.layers import innermost_block

    if not ops:
        return Cut((), (), (), {}, frozenset())
    at = {op: i for i, op in enumerate(ops)}
    readers: dict[
        fx.Node, list[int]
        # of each parameter in the order in which they are first read; ops that hand it on, and those that read what
        # they
        # hand on
    ] = {}
    for op in ops:
        for v in op._input_nodes:
            if info(v).kind == "parameter" and v not in readers:
                pending, readers[v] = [v], []
                while pending:
                    for user in pending.pop().users:
                        if user in at:
                            readers[v].append(at[user])
                            if op_name(user) in _HANDED_ON:
                                pending.append(user)
    reads: list[list[fx.Node]] = [[] for _ in ops]  # the parameters that each op is the first to read
    for v, of_one in readers.items():
        reads[min(of_one)].append(v)
    windows, count, nbytes = list[int](), 0, 0
    for _, group in itertools.groupby(range(len(ops)), lambda i: innermost_block(info(ops[i]).module)):
        members = list(group)
        count, nbytes = count + len(members), nbytes + sum(type_of(v).nbytes for i in members for v in reads[i])
        if nbytes >= least:
            windows.append(count)
            count, nbytes = 0, 0
    if count:  # the rest, which reads little
        windows = [*windows[:-1], windows[-1] + count] if windows and not nbytes else [*windows, count]
    ends = list(itertools.accumulate(windows))
    spans = tuple((end - many, end - 1) for end, many in zip(ends, windows, strict=True))
    moved: dict[fx.Node, tuple[int, int]] = {}
    for first, last in spans:
        read = [vs for vs in reads[first : last + 1] if vs]
        for places in buckets([sum(type_of(v).nbytes for v in vs) for vs in read]):
            bucket = [v for k in places for v in read[k]]
            span = min(min(readers[v]) for v in bucket), max(max(readers[v]) for v in bucket)
            moved.update(dict.fromkeys(bucket, span))
    stays = frozenset(v for v, of_one in readers.items() if len(spans) > 1 and min(of_one) >= spans[-1][0])
    reading = {i for of_one in readers.values() for i in of_one}
    ends_of = tuple(max((i for i in range(first, last + 1) if i in reading), default=last) for first, last in spans)
    return Cut(tuple(w for w, many in enumerate(windows) for _ in range(many)), spans, ends_of, moved, stays)


def buckets(sizes: Sequence[int], full: int = BUCKET) -> list[list[int]]:
    """What travels together, by place: a bucket takes what comes until it is full."""
    found, held = list[list[int]](), full
    for k, size in enumerate(sizes):
        if held >= full:
            found.append([])
            held = 0
        found[-1].append(k)
        held += size
    return found


def closes(ready: Sequence[tuple[int, int]]) -> list[int]:
    """When each gradient's bucket is full and is reduced.

    Of each gradient, in the order of `ready`, when it is made and its bytes.
    """
    order = sorted(range(len(ready)), key=lambda k: ready[k][0])
    end = {order[i]: ready[order[bucket[-1]]][0] for bucket in buckets([ready[k][1] for k in order]) for i in bucket}
    return [end[k] for k in range(len(ready))]


def floating(graph: Graph) -> dict[fx.Node, fx.Node]:
    """Values that are parameters, or parameters handed on, each with its parameter.

    What arrives of them is gathered, and their gradients are reduced.
    """
    from autopar.graph.graph import info, op_name

    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if info(node).kind == "parameter":
            found[node] = node
        elif (
            info(node).kind == "op"
            and op_name(node) in _HANDED_ON
            and node._input_nodes
            and all(n in found for n in node._input_nodes)
        ):
            found[node] = found[next(iter(node._input_nodes))]
    return found


def casts_of_parameters(graph: Graph) -> dict[fx.Node, fx.Node]:
    """The one cast of a parameter that nothing else reads, and that parameter: what is gathered is the cast."""
    from autopar.graph.graph import info, op_name

    found = {}
    for node in graph.nodes:
        if (
            info(node).kind == "parameter"
            and len(users := [u for u in node.users if u.op != "output"]) == 1
            and info(users[0]).kind == "op"
            and op_name(users[0]) == "to"
        ):
            found[users[0]] = node
    return found


def reduced_in(casts: Mapping[fx.Node, fx.Node], dtype: str) -> dict[fx.Node, int]:
    """Of each of these casts whose gradient is reduced before it is what the parameter's is, but in that dtype.

    The bytes of an element of it.
    """
    from autopar.graph.graph import type_of

    return {
        cast: type_of(parameter).itemsize
        for cast, parameter in casts.items()
        if type_of(parameter).dtype == dtype != type_of(cast).dtype
    }


def reduces(taken: Sequence[Sequence[Flow]], given: Sequence[Sequence[Flow]]) -> np.ndarray:
    """Is a gradient that comes back so a sum that is reduced to what goes on so?"""
    partial = [np.array([[flow.gradient.is_partial for flow in flows] for flows in side]) for side in (taken, given)]
    found: np.ndarray = (partial[0][:, None] & ~partial[1][None]).any(-1)
    return found


def marked(edge: Edge, choices: Sequence[bool]) -> np.ndarray:
    """What leaves at an edge under the choices of a parameter that are marked (those that are gathered again, say)."""
    flows: np.ndarray = np.zeros(len(edge.given), dtype=bool)
    if any(choices):
        flows[edge.given_by[np.array(choices, bool)]] = True
    return flows


def windows_of(
    made: Cut,
    ops: Sequence[str],
    op_sites: Sequence[int],
    sites: Sequence[Site],
    edges: Sequence[Edge],
    floats: Mapping[int, tuple[int, np.ndarray, np.ndarray]],
    accumulation: int = 1,
    hidden: float = 1.0,
) -> tuple[Window, ...]:
    """The windows of a step.

    `floats` say of an edge which op takes it, and the seconds of its gather and of its reduction. Of the shorter of
    both sums `hidden` is the share that takes no time.

    Of several micro-batches the first gathers what is kept, and the last reduces what waits; what is gathered again and
    what is reduced at once move in each.
    """
    count = len(made.spans)
    moved: dict[
        tuple[int, str, bool], list[tuple[int, np.ndarray]]
    ] = {}  # by the window that it runs beside; in every micro-batch, or in one of them
    known: dict[Any, np.ndarray] = {}
    shares: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def part(edge: int, choices: tuple[bool, ...], table: np.ndarray) -> np.ndarray:
        key = id(table), choices
        if key not in known:
            known[key] = np.where(marked(edges[edge], choices)[:, None], table, 0.0)
        return known[key]

    def share(table: np.ndarray) -> np.ndarray:
        """The same table for the same table."""
        if hidden != 1 and id(table) not in shares:
            shares[id(table)] = table, hidden * table  # the table is held, so that its id stays its own
        return table if hidden == 1 else shares[id(table)][1]

    def put(beside: int, way: str, every: bool, edge: int, table: np.ndarray) -> None:
        if hidden and table.any() and 0 <= beside < count:
            moved.setdefault((beside, way, every), []).append((edge, share(table)))

    for edge, (op, gather, reduction) in floats.items():
        w, source = made.of[op], sites[edges[edge].source]
        put(w - 1, "forward", False, edge, gather)
        put(w - 1, "forward", True, edge, part(edge, source.regathered, gather))
        again = part(edge, source.regathered, gather)
        for every in (False, True):
            put(w + 1, "backward", every, edge, again)
        put(w - 1, "backward", False, edge, reduction)
        put(w - 1, "backward", True, edge, part(edge, source.scattered, reduction))
    found = []
    for (w, way, every), communication in sorted(moved.items(), key=lambda item: item[0]):
        if not every or accumulation > 1:
            first, last = made.spans[w]
            k = ("forward", "backward").index(way)
            run = tuple(
                (s, share(sites[s].compute[k]))
                for s in op_sites[first : last + 1]
                if sites[s].compute and sites[s].compute[k].any()
            )
            found.append(
                Window(
                    f"{way} of {ops[first]} to {ops[last]}", accumulation - 1 if every else 1, tuple(communication), run
                )
            )
    return tuple(found)
