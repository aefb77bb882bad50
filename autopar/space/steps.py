"""`Steps`: the steps of one timeline, in any states: which runs backward repeats, and the bytes at every time.

A place is that of an op in backward, the last op of forward first. Repeated runs come at the place of the op whose
backward first needs what they make. A moment counts everything that runs: forward's runs, then backward's ops, each
behind the runs that are repeated for it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from autopar.space.timeline import Run, Timeline

# runs, in order, each with the time of an op of forward: for the backward of later ops it is repeated in passing
Passing = tuple[tuple[int, int], ...]
# value -> the time behind which its memory is free, and the time before which it begins to come back from the host
Away = Mapping[int, tuple[int, int]]
NOWHERE: Away = MappingProxyType({})

_NEVER = -1  # instead of the place of an op


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """The runs that backward repeats, in order, each with the place of the op before which it comes."""

    runs: list[int]
    places: list[int]

    @property
    def is_often(self) -> bool:
        """Whether some run comes more than once."""
        return len(set(self.runs)) < len(self.runs)


class Steps:
    """The steps of one timeline; what does not depend on states is found once."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        runs = line.runs
        self.times = np.array([run.time for run in runs], int)  # run -> its time in forward
        self.back = 2 * line.ops - 1 - np.array([run.time for run in _backwards(line)], int)  # place -> its time
        self.reads = [np.array(run.reads, int) for run in runs]
        self.makes = [np.array(self._free(run.makes), int) for run in runs]
        makers = np.array(line.made_by, int)
        # run -> those whose results it reads, which may have to be made again
        self.asks = [frozenset(makers[self._free(run.reads)].tolist()) for run in runs]
        self.read = makers.copy()  # value -> the last run that reads it, or the one that makes it
        for i, read in enumerate(self.reads):
            self.read[read] = i
        self.keepers = _keepers(line)
        ends = [keepers[-1] if keepers else (_NEVER, False) for keepers in self.keepers]
        self.kept = np.array([place for place, _ in ends], int)  # value -> the place of the last op that keeps it
        self.goes_first = np.array([goes_first for _, goes_first in ends], bool)
        self.wanted: list[list[int]] = []  # run -> the places at which it may have to be repeated
        for values in self.makes:
            keepers = itertools.chain.from_iterable(self.keepers[v] for v in values.tolist())
            self.wanted.append(sorted(place for place, _ in keepers))
        self.first = [places[0] if places else _NEVER for places in self.wanted]

    def _free(self, values: Sequence[int]) -> list[int]:
        """The values that are dropped where their run is repeated."""
        return [v for v in values if not self.line.fixed[v]]

    def repeated(self, again: frozenset[int], passing: Passing = ()) -> Repeated:
        """The runs that backward repeats where these are not saved, and some are dropped again in passing."""
        until = dict(passing)
        asked = [(self.first[i], i) for i in again if self.first[i] != _NEVER and i not in until]
        asked += {(place, i) for i in again.intersection(until) for place in self.wanted[i]}
        asks = {i: again.intersection(self.asks[i]) for i in again}
        there = set[int]()
        runs = list[int]()
        places = list[int]()
        for place, pairs in itertools.groupby(sorted(asked), key=operator.itemgetter(0)):
            comes = sorted(_missing([i for _, i in pairs], asks, there))
            runs += comes
            places += [place] * len(comes)
            if until:
                time = 2 * self.line.ops - 1 - int(self.back[place])
                there.difference_update(i for i in comes if time > until.get(i, self.line.ops))
        return Repeated(runs, places)

    def held(self, repeated: Repeated, away: Away = NOWHERE) -> np.ndarray:
        """Bytes of the values of all runs at every time, the largest sum while it lasts."""
        line = self.line
        forward = len(line.runs)
        places = np.array(repeated.places, int)
        often = np.bincount(places, minlength=len(self.back))
        of_ops = forward + np.arange(len(self.back)) + np.cumsum(often)  # place -> its moment
        of_runs = forward + places + np.arange(len(places))
        times = np.concatenate([self.times, np.repeat(self.back, often + 1)])
        born = np.array(line.made_by, int)
        last = np.where(self.kept == _NEVER, self.read, of_ops[self.kept] - self.goes_first)
        # Earlier lives of values: first and last moment, and the value.
        lives: list[np.ndarray] = [np.zeros((0, 3), int)]
        if repeated.runs:
            made, of_made = _each([self.makes[i] for i in repeated.runs], of_runs)
            first = np.unique(made)
            lives.append(np.stack([born[first], self.read[first], first], 1))
            if repeated.is_often:
                lives += self._in_passing(repeated, of_ops, of_runs)
            born[made] = of_made  # Of several moments, the last stays.
            last[made] = np.maximum(last[made], of_made)
            read, of_read = _each([self.reads[i] for i in repeated.runs], of_runs)
            np.maximum.at(last, read, of_read)
        if away:
            values = np.array(list(away))
            gone, returns = np.array(list(away.values())).T
            lives.append(np.stack([born[values], np.searchsorted(times, gone, side="right") - 1, values], 1))
            born[values] = np.searchsorted(times, returns)
        return self._most(times, born, last, np.concatenate(lives), self._work(repeated, of_runs))

    def _in_passing(self, repeated: Repeated, of_ops: np.ndarray, of_runs: np.ndarray) -> list[np.ndarray]:
        """The lives of what is made more than once in backward, but for the last of each value."""
        came: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}  # value -> indices of the repeated runs that read it
        for k, i in enumerate(repeated.runs):
            came.setdefault(i, []).append(k)
            for v in self.line.runs[i].reads:
                readers.setdefault(v, []).append(k)
        lives = []
        for i, indices in came.items():
            for a, b in itertools.pairwise(indices):
                begins, ends = repeated.places[a], repeated.places[b]
                for v in self.makes[i].tolist():
                    reads = [of_runs[k] for k in readers.get(v, ()) if a < k < b]
                    kept = [of_ops[p] - first for p, first in self.keepers[v] if begins <= p < ends]
                    lives.append(np.array([[of_runs[a], max([of_runs[a], *reads, *kept]), v]], int))
        return lives

    def _work(self, repeated: Repeated, of_runs: np.ndarray) -> list[tuple[int, float]]:
        """Temporary bytes of repeated runs, by moment."""
        work = [self.line.runs[i].work for i in repeated.runs]
        return [(int(moment), nbytes) for moment, nbytes in zip(of_runs, work, strict=True) if nbytes]

    def _most(
        self,
        times: np.ndarray,
        born: np.ndarray,
        last: np.ndarray,
        lives: np.ndarray,
        work: Sequence[tuple[int, float]],
    ) -> np.ndarray:
        """The most bytes at every time, of values that live from one moment to another."""
        line = self.line
        count = len(times)
        size = np.concatenate([line.bytes, line.bytes[lives[:, 2]]])
        begins = np.concatenate([born, lives[:, 0]])
        ends = np.concatenate([np.where(line.leaves, count - 1, last), lives[:, 1]]) + 1
        change = np.bincount(begins, size, count + 1) - np.bincount(ends, size, count + 1)
        own = np.cumsum(change)[:-1]
        for moment, made in work:
            own[moment] += made
        starts = np.flatnonzero(np.diff(times, prepend=-1))  # every time is among them, in order
        is_op: np.ndarray = np.zeros(count, bool)
        is_op[starts[1:] - 1] = is_op[-1] = True  # the last of its time
        own[is_op] += line.momentary.temporaries[times[is_op]]
        own[~is_op] -= line.momentary.made[times[~is_op]]
        most = np.zeros(len(line.held))
        most[times[starts]] = np.maximum.reduceat(own, starts)
        return most


def _backwards(line: Timeline) -> Iterator[Run]:
    """The ops in the order of their backwards."""
    return (run for run in reversed(line.runs) if run.is_op)


def _keepers(line: Timeline) -> list[list[tuple[int, bool]]]:
    """The places at which backward reads each value, and whether it is freed before the op's peak."""
    found: list[list[tuple[int, bool]]] = [[] for _ in line.made_by]
    for place, run in enumerate(_backwards(line)):
        for v in run.keeps:
            found[v].append((place, v in run.first))
    return found


def _missing(wanted: list[int], asks: Mapping[int, Collection[int]], there: set[int]) -> list[int]:
    """The runs that have to be repeated so that these have been, which are there from then on."""
    found = list[int]()
    while wanted:
        i = wanted.pop()
        if i not in there:
            there.add(i)
            found.append(i)
            wanted += asks[i]
    return found


def _each(values: Sequence[np.ndarray], of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of several runs in a row, each with the moment of its run."""
    return np.concatenate(values), np.repeat(of, [len(some) for some in values])
