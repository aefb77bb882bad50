"""`PolicyStates`: the states of values that a policy of recompute leaves open, whatever the sharding.

A policy answers for the line of one sharding, and what it names may differ from one sharding to the next: a value that
enters another block is saved, and a conversion on the way may stand in for it. A bound holds for every sharding. So an
op is called repeated only where the policy names it on every line, and never repeated only where it names it on none;
between the two, the bound allows both (`joint.py`).

    selective, a function            the names alone decide
    full, as written, chen           ops that no other region reads are repeated; what another region reads is not.
                                     A conversion is in no region that a model wrote: it has its operand saved
    rotor, ilp                       both are allowed for all

A function may answer anything for another sharding. The bound is then of plans that recompute what it named here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.solver.policies import REGIONS, Policy
from autopar.space.passage import OWN, Passages
from autopar.space.space import Space

ALL_STATES = ("rotor", "ilp")  # policies that search among all states


@dataclass(frozen=True, slots=True, eq=False)
class PolicyStates:
    """Ops that backward repeats wherever it needs their results, and never, in every sharding."""

    repeats: tuple[bool | None, ...]  # op -> whether it is repeated; None: where the policy, or the line, says so
    converts: frozenset[int]  # edges whose conversions may be repeated
    # op that is repeated -> edges: where the value of one is converted, the results are saved instead
    unless: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @staticmethod
    def of(policy: str | Policy, space: Space, names: Collection[str]) -> PolicyStates:
        """The states that a policy leaves open; `names` is what it named for one sharding."""
        assert space.memory is not None
        passages = space.memory.passages
        own = [space.sites[op.site].name for op in passages.ops]
        repeats: list[bool | None]
        unless: dict[int, frozenset[int]] = {}
        if policy in ALL_STATES:
            return PolicyStates((None,) * len(own), frozenset(range(len(space.edges))))
        if isinstance(policy, str) and policy in REGIONS:
            regions = REGIONS[policy](own, [op.region for op in passages.ops])
            readers = _Readers(passages, regions, are_written=policy == "as written")
            repeats = [readers.repeats(time) for time in range(len(own))]
            open_ = [time for time, is_repeated in enumerate(repeats) if is_repeated is None]
            unless = {time: edges for time in open_ if (edges := readers.converted(time))}
            repeats = [True if time in unless else is_repeated for time, is_repeated in enumerate(repeats)]
        elif policy == "selective":
            repeats = [op.is_core for op in passages.ops]
        else:
            repeats = [name in names for name in own]
        free = _not_decided_by_names(passages)
        decided = tuple(None if time in free else is_repeated for time, is_repeated in enumerate(repeats))
        return PolicyStates(decided, _conversions(space, passages, names), unless)

    def until(self, passages: Passages, time: int) -> frozenset[int]:
        """Ops that may be repeated up to the backward at a time: for it, or for earlier ones."""
        last = 2 * len(passages.ops) - 1
        found = set[int]()
        times = [t for t, op in enumerate(passages.ops) if last - max(t, op.runs_at) <= time]
        pending = [source for t in times for source in _kept(passages, t)]
        while pending:
            op = pending.pop()
            if op not in found and self.repeats[op] is not False:
                found.add(op)
                pending += [source for edge in passages.ops[op].edges for source, _ in _behind(passages, edge)]
        return frozenset(found)


def _kept(passages: Passages, time: int) -> Iterator[int]:
    """The ops whose results the backward of an op reads, itself among them if it does."""
    op = passages.ops[time]
    if op.besides is not None or any(made.is_kept for made in op.made):
        yield time
    for edge, is_kept in zip(op.edges, op.kept, strict=True):
        if is_kept:
            yield from (source for source, _ in _behind(passages, edge))


def _conversions(space: Space, passages: Passages, names: Collection[str]) -> frozenset[int]:
    """The edges of values with a conversion among the names: equal conversions share a name."""
    label = [f"{space.sites[e.target].name}:{e.operand}" for e in space.edges]
    sources = {passages.sources[k] for k, name in enumerate(label) if name in names}
    return frozenset(k for k, source in enumerate(passages.sources) if source in sources)


def _not_decided_by_names(passages: Passages) -> frozenset[int]:
    """Ops whose states a line may decide against a policy.

    Views, which share the memory of what they show; ops inside a kernel, which are always repeated; routes, which never
    are; and those whose
    results may be saved whatever is named: what leaves the graph, what loss heads in chunks make and keep, and what is
    made of a parameter that is gathered for the forward alone.
    """
    found = set[int]()
    saved = set[int](passages.ends)
    for time, op in enumerate(passages.ops):
        kept = dict(zip(op.edges, op.kept, strict=True))
        is_view = any(made.shows != OWN for made in op.made)
        copies = [k for k, is_kept in kept.items() if k in passages.gathered and not is_kept]
        is_of_copy = any(passages.converted[k].any() for k in copies)
        if is_view or op.is_inner or op.in_chunks or op.is_route or is_of_copy:
            found.add(time)
        if op.in_chunks:
            saved.update(k for k, is_kept in kept.items() if is_kept)
    for edge in saved:
        found.update(time for time, _ in _behind(passages, edge))
    return frozenset(found)


def _behind(passages: Passages, edge: int) -> Iterator[tuple[int, int]]:
    """The values, as (op, output), whose memory may arrive over an edge: views, then what they show."""
    source = passages.sources[edge]
    while source[0] >= 0:
        yield source
        shows = passages.ops[source[0]].made[source[1]].shows
        if shows == OWN:
            return
        source = passages.sources[shows]


class _Readers:
    """The regions in which the results of ops are read, surely or perhaps.

    What reads a value is the op that takes it, or a conversion before it. A conversion counts to the region of the
    first op that takes its result, or to none in regions that the model wrote itself.
    """

    def __init__(self, passages: Passages, regions: Sequence[str], are_written: bool) -> None:
        self.passages = passages
        self.regions = regions
        self.are_written = are_written
        self.takers: dict[tuple[int, int], list[tuple[int, str]]] = {}  # value -> edges, and the regions they lead to
        for time, op in enumerate(passages.ops):
            for edge in op.edges:
                self.takers.setdefault(passages.sources[edge], []).append((edge, regions[time]))
        for edge in passages.ends:
            self.takers.setdefault(passages.sources[edge], []).append((edge, ""))
        self.at = {edge: time for time, op in enumerate(passages.ops) for edge in op.edges}

    def repeats(self, time: int) -> bool | None:
        """Whether an op is repeated: not if another region reads a result, None if it may or may not."""
        region = self.regions[time]
        leaves = [self._leaves(value, region) for value in self._own(time)]
        if not region or any(surely for surely, _ in leaves):
            return False
        return None if any(perhaps for _, perhaps in leaves) else True

    def converted(self, time: int) -> frozenset[int]:
        """The edges of which one has to convert for another region to read a result; none if unknown."""
        region = self.regions[time]
        found = set[int]()
        pending = self._own(time) if self.are_written else []
        while pending:
            for edge, taken in self.takers.get(pending.pop(), []):
                if taken != region:
                    return frozenset()
                if self.passages.converted[edge].any():
                    found.add(edge)
                pending += self._shown(edge)
        return frozenset(found)

    def _own(self, time: int) -> list[tuple[int, int]]:
        """The results of an op that have memory of their own."""
        return [(time, port) for port, made in enumerate(self.passages.ops[time].made) if made.shows == OWN]

    def _shown(self, edge: int) -> list[tuple[int, int]]:
        """The results of the op behind an edge that show the memory of what arrives over it."""
        if edge not in self.at:
            return []
        made = self.passages.ops[self.at[edge]].made
        return [(self.at[edge], port) for port, value in enumerate(made) if value.shows == edge]

    def _leaves(self, value: tuple[int, int], region: str) -> tuple[bool, bool]:
        """Whether a value, or what shows its memory, is surely read in another region, and whether it may be."""
        surely = perhaps = False
        takers = self.takers.get(value, [])
        for edge, own in takers:
            may_convert = bool(self.passages.converted[edge].any())
            is_end = edge not in self.at
            readers = set() if is_end else {own}
            if may_convert:
                readers |= {""} if self.are_written else {taken for _, taken in takers}
            perhaps = perhaps or any(reader != region for reader in readers)
            surely = surely or (not is_end and region not in readers)
            for shown in self._shown(edge):
                leaves = self._leaves(shown, region)
                perhaps = perhaps or leaves[1]
                # A view of a conversion's result does not show this value.
                surely = surely or (leaves[0] and not may_convert)
        return surely, perhaps
