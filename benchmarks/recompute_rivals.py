"""Schedules of recompute by other ways: checkpoints of chains, segments, and torch's partitioner."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.step_graph import Step

SMALL = 1 << 16  # bytes of values that cut no chain
SLOTS, GRID = 500, 0.0125  # of memory in a chain's tables, and steps in which a chain is asked, of the peak
MOST_VALUES = 12  # of a stage: any of so many are saved or not


# -- a chain of stages


@dataclass(slots=True)
class Stage:
    """Ops of forward between two values that alone are alive, and the ops of backward that belong to them."""

    forward: list[int]
    backward: list[int]
    given: int  # the value that it reads
    made: int  # and the one that it leaves

    def merged(self, later: Stage) -> Stage:
        return Stage([*self.forward, *later.forward], [*later.backward, *self.backward], self.given, later.made)


def stages_of(step: Step) -> list[Stage]:
    """The chain, cut wherever one value alone is alive in forward, and one gradient in backward."""
    place = {i: p for p, i in enumerate(step.forward)}
    maker = {v: i for i in step.forward for v in step.ops[i].makes}
    last = {v: place[i] for i in step.forward for v in step.ops[i].reads} | {step.output: len(step.forward)}
    cuts = dict[int, int]()  # value -> where it is alone for the first time
    for p in range(len(step.forward) - 1):
        alive = [v for v, end in last.items() if end > p and place.get(maker.get(v, -1), -1) <= p]
        large = [v for v in alive if step.size[v] > SMALL]
        if len(large) == 1:
            cuts.setdefault(large[0], p)
    bounds = [(p, v) for v, p in cuts.items()] + [(len(step.forward) - 1, step.output)]
    stages, start, given = list[Stage](), 0, step.inputs[0]
    for p, v in bounds:
        stages.append(Stage(step.forward[start : p + 1], [], given, v))
        start, given = p + 1, v
    of = {v: s for s, stage in enumerate(stages) for i in stage.forward for v in step.ops[i].makes}
    wants = [max((of.get(v, -1) for v in step.ops[i].reads), default=-1) for i in step.backward]
    after = [*list(itertools.accumulate(reversed(wants), max))[::-1], -1]  # the latest stage from there on
    made = {v: p for p, i in enumerate(step.backward) for v in step.ops[i].makes}
    before = {*of, *step.inputs}
    ends = {v: p for p, i in enumerate(step.backward) for v in step.ops[i].reads if v not in before}
    start = 0
    for s in range(len(stages) - 1, 0, -1):
        p = start
        while p < len(step.backward):
            alive = [v for v, end in ends.items() if end >= p > made.get(v, -1) and step.size[v]]
            if after[p] < s and len(alive) == 1 and step.size[alive[0]] == step.size[stages[s].given]:
                break
            p += 1
        stages[s].backward, start = step.backward[start:p], p
    stages[0].backward = step.backward[start:]
    return stages


@dataclass(frozen=True, slots=True)
class Option:
    """What a stage saves, and what that takes. Bytes are without what the stage is given."""

    saved: float
    forward_peak: float
    backward_peak: float
    seconds: float  # of backward, with what it repeats
    order: tuple[int, ...]


class Chain:
    """The stages of a step, and what each may save."""

    def __init__(self, step: Step, stages: Sequence[Stage], with_options: bool) -> None:
        self.step, self.stages = step, stages
        alike = dict[Any, list[frozenset[int]]]()  # by what a stage does: sets of its values, by their place in it
        self.options = []
        for stage in stages:
            if not with_options:
                self.options.append([self._option(stage, self._kept(stage))])
                continue
            key, number = self._key(stage)
            if key not in alike:
                alike[key] = [frozenset(number[v] for v in saved) for saved in self._choices(stage)]
            values = {k: v for v, k in number.items()}
            self.options.append([self._option(stage, {values[k] for k in saved}) for saved in alike[key]])

    def _kept(self, stage: Stage) -> set[int]:
        """All that the stage's backward reads of what its forward makes."""
        made = {v for i in stage.forward for v in self.step.ops[i].makes}
        return {v for i in stage.backward for v in self.step.ops[i].reads if v in made}

    def _key(self, stage: Stage) -> tuple[Any, dict[int, int]]:
        """Equal for stages that do the same; and the values of one by their place in it."""
        number: dict[int, int] = {}
        rows = []
        for i in (*stage.forward, *stage.backward):
            op = self.step.ops[i]
            values = [number.setdefault(v, len(number)) for v in (*op.reads, *op.makes)]
            sizes = [float(self.step.size[v]) for v in op.makes]
            rows.append((round(op.seconds * 1e12), tuple(values), tuple(sizes)))
        return tuple(rows), number

    def _choices(self, stage: Stage) -> list[frozenset[int]]:
        """Sets of values that no other set beats in bytes and in seconds."""
        kept = self._kept(stage)
        free = sorted(
            (v for v in kept if self.step.size[v] > SMALL and v != stage.made), key=lambda v: -self.step.size[v]
        )
        always = kept.difference(free[:MOST_VALUES])
        rows = []
        for n in range(len(free[:MOST_VALUES]) + 1):
            for chosen in itertools.combinations(free[:MOST_VALUES], n):
                saved = frozenset(always | set(chosen))
                option = self._option(stage, saved)
                rows.append((option.saved, option.seconds, option.backward_peak, option.forward_peak, saved))
        best = list[Any]()
        for row in sorted(rows, key=lambda r: r[:4]):
            if not any(all(a <= b for a, b in zip(known[:4], row[:4], strict=True)) for known in best):
                best.append(row)
        return [row[4] for row in best]

    def _option(self, stage: Stage, saved: Iterable[int]) -> Option:
        step = self.step
        kept = {*saved, stage.made}
        maker = {v: i for i in stage.forward for v in step.ops[i].makes}
        have, order = {*kept, stage.given}, list[int]()

        def want(value: int) -> None:
            if value in have or value not in maker:
                return
            for v in step.ops[maker[value]].reads:
                want(v)
            order.append(maker[value])
            have.update(step.ops[maker[value]].makes)

        for i in stage.backward:
            for v in step.ops[i].reads:
                want(v)
            order.append(i)
        made = {v for i in stage.backward for v in step.ops[i].makes}
        before = {v for i in stage.backward for v in step.ops[i].reads if v not in maker and v not in made}
        ours = set(stage.backward)
        leaves = {v for i in step.backward if i not in ours for v in step.ops[i].reads} & made
        return Option(
            float(sum(step.size[v] for v in kept)),
            self._peak(stage.forward, set(), kept, stage.given),
            self._peak(order, kept | (before - {stage.given} - set(step.inputs)), leaves, stage.given),
            sum(step.ops[i].seconds for i in order),
            tuple(order),
        )

    def _peak(self, order: Sequence[int], there: set[int], stays: set[int], given: int) -> float:
        """The most bytes of a part of a schedule, without what its stage is given."""
        if not order:
            return 0.0
        lives = {v: [v, 0, -1] for v in there}
        done = list(lives.values())
        for p, i in enumerate(order):
            for v in self.step.ops[i].reads:
                if v in lives:
                    lives[v][2] = p
            for v in self.step.ops[i].makes:
                lives[v] = [v, p, p]
                done.append(lives[v])
        for v in stays & lives.keys():
            lives[v][2] = len(order) - 1
        held = np.zeros(len(order) + 1)
        for v, first, last in done:
            if v != given and last >= first:
                held[first : last + 1] += self.step.size[v]
        return float(held[:-1].max())

    # -- the best persistent checkpoints

    def table(self, most: float) -> Callable[[float], list[int] | None]:
        """Schedules by budget: least seconds of stages s to t in so many slots of memory, for all s, t and slots."""
        count, unit = len(self.stages), most / SLOTS

        def slots(n: float) -> int:
            return math.ceil(n / unit - 1e-9)

        alone = [sum(self.step.ops[i].seconds for i in stage.forward) for stage in self.stages]
        through = [slots(self._peak(stage.forward, set(), {stage.made}, stage.given)) for stage in self.stages]
        given = [slots(float(self.step.size[stage.given])) for stage in self.stages]
        need = [[max(slots(o.forward_peak), slots(o.backward_peak)) for o in options] for options in self.options]
        room = np.arange(SLOTS + 1)
        least: dict[tuple[int, int], np.ndarray] = {}
        picks: dict[tuple[int, int], np.ndarray] = {}  # an option, or minus the stage whose input is saved

        def later(table: np.ndarray, taken: int) -> np.ndarray:
            return np.concatenate([np.full(min(taken, SLOTS + 1), math.inf), table])[: SLOTS + 1]

        for s in range(count - 1, -1, -1):
            for t in range(s, count):
                best, pick = np.full(SLOTS + 1, math.inf), np.zeros(SLOTS + 1, int)

                def take(value: np.ndarray, at_least: int, what: int, best: Any = best, pick: Any = pick) -> None:
                    better = (room >= at_least) & (value < best)
                    best[better], pick[better] = value[better], what

                run = 0
                for j in range(s + 1, t + 1):
                    run = max(run, through[j - 1] + (given[j - 1] if j - 1 > s else 0))
                    value = sum(alone[s:j]) + later(least[j, t], given[j]) + least[s, j - 1]
                    take(value, max(run, given[j]), -j)  # first: of equal ones it has more that nobody reads again
                for k, option in enumerate(self.options[s]):
                    rest = np.zeros(SLOTS + 1) if t == s else later(least[s + 1, t], slots(option.saved))
                    take(alone[s] + option.seconds + rest, need[s][k], k)
                least[s, t], picks[s, t] = best, pick

        def order(s: int, t: int, left: int) -> list[int]:
            pick = int(picks[s, t][left])
            if pick < 0:
                ahead = [i for stage in self.stages[s:-pick] for i in stage.forward]
                return [*ahead, *order(-pick, t, left - given[-pick]), *order(s, -pick - 1, left)]
            option = self.options[s][pick]
            rest = order(s + 1, t, left - slots(option.saved)) if t > s else []
            return [*self.stages[s].forward, *rest, *option.order]

        def asked(budget: float) -> list[int] | None:
            left = min(SLOTS, int(budget / unit + 1e-9) - given[0])
            if left < 0 or not math.isfinite(least[0, count - 1][left]):
                return None
            return self.step.without_waste(order(0, count - 1, left))

        return asked


def by_table(step: Step, stages: Sequence[Stage], with_options: bool) -> list[list[int]]:
    peak = step.played([*step.forward, *step.backward])[0].max()
    asked = Chain(step, stages, with_options).table(1.2 * peak)
    orders = [asked(share * peak) for share in np.arange(0.05, 1.2, GRID)]
    return [order for order in orders if order is not None]


def by_segments(step: Step, stages: Sequence[Stage], lengths: Iterable[Sequence[int]]) -> list[list[int]]:
    """Schedules in which segments of so many stages are run again as wholes; the last, shorter or not, is saved."""
    orders = []
    for parts in lengths:
        ends = list(itertools.accumulate(parts))
        order, rest = list(step.forward), list(stages[ends[-1] if ends else 0 :])
        order += [i for stage in reversed(rest) for i in stage.backward]
        for end, length in reversed(list(zip(ends, parts, strict=True))):
            segment = stages[end - length : end]
            order += [i for stage in segment for i in stage.forward]
            order += [i for stage in reversed(segment) for i in stage.backward]
        orders.append(step.without_waste(order))
    return orders


def periodic(stages: Sequence[Stage]) -> list[list[int]]:
    return [[k] * ((len(stages) - 1) // k) for k in range(1, len(stages) + 1)]


def greedy(step: Step, stages: Sequence[Stage]) -> list[list[int]]:
    """A segment ends where its saved values come to so many bytes."""
    chain = Chain(step, [], False)
    saved = [sum(float(step.size[v]) for v in {*chain._kept(stage), stage.made}) for stage in stages]
    found = []
    for k in range(1, 41):
        parts, length, held = list[int](), 0, 0.0
        for n in saved:
            length, held = length + 1, held + n
            if held > sum(saved) * k / 40:
                parts.append(length)
                length, held = 0, 0.0
        found.append(parts)
    return found


def by_torch(step: Step) -> list[list[int]]:
    """torch's minimum cut and knapsack, at budgets of its own from 1 to 0."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    node = {step.ops[i].node: i for i in (*step.forward, *step.backward)}
    orders = []
    for k in range(21):
        graph = copy.deepcopy(step.graph)
        for a, b in zip(step.graph.graph.nodes, graph.graph.nodes, strict=True):
            b.meta = dict(a.meta)
        how = dict(activation_memory_budget=1 - k / 20, activation_memory_budget_runtime_estimator="flops", cse=False)
        with config.patch(activation_memory_budget_solver="dp", **how):
            parts = min_cut_rematerialization_partition(graph, None, num_fwd_outputs=1)
        calls = [n.name for part in parts for n in part.graph.nodes if n.op == "call_function"]
        orders.append([node[name] for name in calls if name in node])
    return orders
