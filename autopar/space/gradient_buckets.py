"""`GradientBuckets`: the times at which gradients of parameters are reduced, and from which they are stored as such."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph.graph import Graph, type_of
from autopar.space.arrivals import Arrivals
from autopar.space.lifetimes import Lifetimes, readers
from autopar.space.schedule import Schedule, travels_alone
from autopar.space.setting import Setting
from autopar.space.space import Site
from autopar.space.windows import buckets_by_window
from autopar.space.wiring import Wiring


@dataclass(frozen=True, slots=True, eq=False)
class GradientBuckets:
    """The trained parameters of a graph, in order, and the times of their gradients."""

    closes: Mapping[fx.Node, int]  # time at which a parameter's gradient bucket is full and reduced
    # Last time at which a bucket's message may be under way: programs finish it before they pack a later one.
    under_way: Mapping[fx.Node, int]
    # Last time at which a gradient is on its way to the host, where its parameter lies there.
    leaves: Mapping[fx.Node, int]
    wait: frozenset[fx.Node]  # parameters whose gradient may be reduced only after the last micro-batch
    accumulates: bool
    adds_twice: bool  # micro-batches of a call are added up beside what has waited of other calls
    settled: int  # the last time of backward
    first_to_settle: int  # time of the first bucket of gradients that wait for the last micro-batch, or -1

    @staticmethod
    def of(
        trained: Sequence[fx.Node], lifetimes: Lifetimes, schedule: Schedule, wiring: Wiring, setting: Setting
    ) -> GradientBuckets:
        clock = lifetimes.clock
        accumulates = setting.passes > 1
        first = [lifetimes.first_use(n) for n in trained]
        closes = _closes(
            [clock.mirrored(op) for op in first],
            [type_of(n).nbytes for n in trained],
            [schedule.of[op] for op in first],
            [travels_alone(n) for n in trained],
        )
        casts = {parameter: cast for cast, parameter in lifetimes.parameters.casts.items()}
        each = {n for n in trained if (policy := wiring.site(casts.get(n, n)).scattered) and all(policy)}
        wait = [n for n in trained if n not in each] if accumulates else []
        twice = setting.accumulation > 1 and setting.turns > 1
        closing = dict(zip(trained, closes, strict=True))
        # Over several axes the next step of a message goes on beside the next bucket.
        is_one_step = sum(size > 1 for size in setting.mesh.shape) < 2
        under_way = _while_under_way(closing) if is_one_step else dict.fromkeys(closing, clock.settled)
        leaves = {n: schedule.is_down(op) for n, op in zip(trained, first, strict=True)}
        settles = min((closing[n] for n in wait), default=-1)
        return GradientBuckets(closing, under_way, leaves, frozenset(wait), accumulates, twice, clock.settled, settles)

    def lies_from(self, parameter: fx.Node) -> int:
        """The time from which the whole gradient is stored as the parameter is; until then edges count it."""
        if not self.accumulates:
            return self.closes[parameter]
        return self.settled if parameter in self.wait else 0


def trained_parameters(graph: Graph) -> list[fx.Node]:
    """Parameters that receive a gradient, in the order of the graph."""
    return [n for n in graph.parameters.values() if type_of(n).requires_grad and readers(n)]


def _closes(ready: Sequence[int], sizes: Sequence[int], windows: Sequence[int], alone: Sequence[bool]) -> list[int]:
    """The time at which each gradient's bucket is full.

    A gradient is given by the time at which it is made, its bytes, its window, and whether it travels alone.
    """
    order = sorted((k for k in range(len(ready)) if not alone[k]), key=lambda k: ready[k])
    closes = list(ready)
    for bucket in buckets_by_window([sizes[k] for k in order], [windows[k] for k in order]):
        for i in bucket:
            closes[order[i]] = ready[order[bucket[-1]]]
    return closes


def _while_under_way(closes: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The last time before another bucket is packed as a bucket's message has arrived, for each parameter.

    While a smaller one is packed, the message before it counts still: the op that closes the bucket ran beside it.
    """
    nbytes = Counter[int]()
    for parameter, time in closes.items():
        nbytes[time] += type_of(parameter).nbytes
    times = sorted(nbytes)
    arrivals, under_way, ends = Arrivals(), dict[int, float](), dict.fromkeys(times, times[-1] if times else 0)
    for time in times:
        arrivals.now += nbytes[time]
        for before in [before for before, arrives in under_way.items() if arrives <= arrivals.now]:
            del under_way[before]
            ends[before] = time - (nbytes[time] >= nbytes[before])
        under_way[time] = arrivals.send("", nbytes[time])
    return {parameter: ends[time] for parameter, time in closes.items()}


def is_always(site: Site, policy: Sequence[bool]) -> bool:
    """Whether a policy holds for all choices of a site that cut it; False where none does."""
    if not policy:
        return False
    marks = [is_so for is_so, is_cut in zip(policy, site.is_cut(), strict=True) if is_cut]
    return bool(marks) and all(marks)
