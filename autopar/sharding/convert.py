"""Conversions: the cheapest sequence of collectives and local steps from one sharding to another.

    all_gather      S(d) -> R     also of an outer axis, where what is left is a cut by blocks
    slice           R -> S(d)     each device keeps its part; the axis becomes the innermost of dim d
    all_to_all      S(d) -> S(e)
    all_reduce      P(sum) -> R
    reduce_scatter  P(sum) -> S(d)
    lodge           R -> P(sum)   the first device keeps the value, the others hold zeros

The states are the layouts of a tensor, the moves are these steps, the search is Dijkstra's; all pairs of one shape are
found once and kept. Parts of blocks are put in order by the step that moves them. It runs while planning and lowering,
never in a training step.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.letters import BadSharding
from autopar.sharding.cluster import Cluster, Link, Measured
from autopar.sharding.cost_model import ALONE, CostModel, Message
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import P, Placement, R, S, Sharding


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversion: a collective, or a local move, on one mesh axis."""

    kind: str
    axis: int
    dim: int = -1  # gathered or cut; for all_to_all: gathered
    to_dim: int = -1  # the dim that all_to_all cuts
    blocks: tuple[int, ...] = ()  # blocks that are cut one by one, as in S(dim, blocks)
    to_blocks: tuple[int, ...] = ()

    def after(self, layout: Layout, mesh: DeviceMesh) -> Layout | None:
        """The layout after this step; None where the step cannot be taken."""
        n = mesh.shape[self.axis]
        sums = layout.partial
        if self.kind in ("all_reduce", "reduce_scatter"):
            layout = replace(layout, partial=sums - {self.axis})
        if self.kind == "lodge":
            return replace(layout, partial=sums | {self.axis})
        if self.kind in ("all_gather", "all_to_all"):
            gathered = layout.with_row(self.dim, layout.rows[self.dim].without(self.axis))
            if gathered is None or self.kind == "all_gather":
                return gathered
            return gathered.with_row(self.to_dim, gathered.rows[self.to_dim].cut(self.axis, n, self.to_blocks))
        if self.kind == "all_reduce":
            return layout
        return layout.with_row(self.dim, layout.rows[self.dim].cut(self.axis, n, self.blocks))

    def text(self, axes: Sequence[str]) -> str:
        at = f"@{axes[self.axis]}"
        if self.dim < 0:
            return f"{self.kind}{at}"
        dims = _dim_text(self.dim, self.blocks)
        if self.to_dim >= 0:
            dims += f"->{_dim_text(self.to_dim, self.to_blocks)}"
        return f"{self.kind}({dims}){at}"

    @staticmethod
    def parse(text: str, mesh: DeviceMesh) -> Step:
        match = re.fullmatch(r"(\w+?)(?:\((\d+)(?::([\d|]+))?(?:->(\d+)(?::([\d|]+))?)?\))?@(.+)", text.strip())
        if not match or match[1] not in KINDS:
            raise BadSharding(f"{text!r} is not a conversion step", seen=f"steps: {', '.join(KINDS)}")
        blocks, to_blocks = (tuple(map(int, b.split("|"))) if b else () for b in (match[3], match[5]))
        return Step(match[1], mesh.axis(match[6]), int(match[2] or -1), int(match[4] or -1), blocks, to_blocks)


def _dim_text(dim: int, blocks: Sequence[int]) -> str:
    return f"{dim}:{'|'.join(map(str, blocks))}" if blocks else str(dim)


REDUCTIONS = ("all_reduce", "reduce_scatter")
KINDS = ("all_gather", "slice", "all_to_all", "all_reduce", "reduce_scatter", "lodge")


_Tensor = tuple[tuple[int, ...], int, frozenset[Placement]]  # shape, bytes of an element, blocks it may be cut by
_Form = tuple[tuple[int, ...], frozenset[Placement]]  # shape, and blocks that it may be cut by


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """The layouts of a tensor by number, their elements on the fullest device, and steps between them."""

    index: Mapping[Layout, int]
    elements: Sequence[int]
    steps: Sequence[Mapping[int, tuple[Step, int]]]  # layout -> next layout -> step, elements where no axis of it cuts


@dataclass(frozen=True, slots=True)
class Path:
    """The steps from one sharding to another, and their seconds."""

    steps: tuple[Step, ...]
    seconds: float

    def text(self, axes: Sequence[str]) -> str:
        return ", ".join(s.text(axes) for s in self.steps) or "-"


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """The layouts of a tensor by number, and the steps between them."""

    index: Mapping[Layout, int]
    steps: Sequence[Mapping[int, tuple[float, Step]]]  # layout -> next layout -> (seconds, step)
    bytes: Sequence[int]  # layout -> bytes on the fullest device

    def routes(self, start: int, most_bytes: float) -> _Routes:
        """The cheapest paths from a layout, by Dijkstra's algorithm; none goes through one of more bytes."""
        before = {start: start}
        seconds = {start: 0.0}
        done = set[int]()
        queue = [(0.0, 0, start)]  # seconds, and of equal ones what was found first
        found = itertools.count(1)
        while queue:
            at, _, i = heapq.heappop(queue)
            if i in done:
                continue
            done.add(i)
            if i != start and self.bytes[i] > most_bytes:
                continue
            for j, (more, _) in self.steps[i].items():
                if j not in seconds or (j not in done and at + more < seconds[j]):
                    seconds[j] = at + more
                    before[j] = i
                    heapq.heappush(queue, (at + more, next(found), j))
        return _Routes(self, before, seconds)


@dataclass(frozen=True, slots=True, eq=False)
class _Routes:
    """The cheapest paths from one layout."""

    graph: _Graph
    before: Mapping[int, int]  # layout that is reached -> the one before it on its path
    seconds: Mapping[int, float]

    def to(self, end: int) -> Path | None:
        """The path to a layout; None where there is none."""
        if end not in self.before:
            return None
        steps = list[Step]()
        at = end
        while (before := self.before[at]) != at:
            steps.append(self.graph.steps[before][at][1])
            at = before
        return Path(tuple(steps[::-1]), self.seconds[end])


class ShapeConsistencyManager:
    """Cheapest conversions between layouts, on one mesh of one cluster.

    With `most_bytes`, no device holds more of the tensor than that on the way; at both ends it may. `messages` has, by
    kind of collective, the message in which it travels with others and of which it pays a share. Managers `like` one
    another, of one mesh, share the possible steps of each shape.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        cluster: Cluster,
        most_bytes: float = math.inf,
        messages: Mapping[str, Message] | None = None,
        like: ShapeConsistencyManager | None = None,
    ) -> None:
        self.mesh = mesh
        self.costs = CostModel(cluster, mesh.size)
        self.most_bytes = most_bytes
        self.messages = messages or {}

        def levels(kind: str) -> list[tuple[tuple[int, Link | Measured], ...]]:
            return [cluster.levels(mesh, axis, kind) for axis in range(len(mesh.shape))]

        self._levels = {kind: levels(kind) for kind in KINDS}
        # Found once for a shape, and kept as long as the manager: one planning or lowering.
        self._ways: dict[_Form, _Ways] = like._ways if like else {}
        self._graphs: dict[_Tensor, _Graph] = {}
        self._seconds: dict[_Tensor, np.ndarray] = {}
        self._routes: dict[tuple[_Tensor, int], _Routes] = {}
        self._steps: dict[tuple[str, int, bool, int], float] = {}  # seconds by kind, axis, turned, and bytes

    def path(self, shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding) -> Path:
        """The cheapest path from `source` to `target` for a tensor of this global shape; a letter if none."""
        tensor = shape, itemsize, _blocks_of(source, target)
        start, end = self._numbers(tensor, (source, target))
        found = self._from(tensor, start).to(end) if start >= 0 and end >= 0 else None
        if found is None:
            raise BadSharding(
                f"no sequence of collectives leads from {source.text(self.mesh.axes)} to {target.text(self.mesh.axes)}",
                seen=f"a tensor of shape {list(shape)} on mesh {self.mesh}",
            )
        return found

    def table(
        self, shape: tuple[int, ...], itemsize: int, sources: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> np.ndarray:
        """Seconds from every source (row) to every target (column); inf where no path leads."""
        tensor = shape, itemsize, _blocks_of(*sources, *targets)
        if tensor not in self._seconds:
            self._seconds[tensor] = self._all_pairs(self._graph(tensor))
        return self._seconds[tensor][np.ix_(self._numbers(tensor, sources), self._numbers(tensor, targets))]

    def _numbers(self, tensor: _Tensor, shardings: Sequence[Sharding]) -> list[int]:
        """The numbers of a tensor's layouts; -1 where one cannot be."""
        index = self._graph(tensor).index
        layouts = (Layout.of(tensor[0], sharding, self.mesh) for sharding in shardings)
        return [-1 if layout is None else index.get(layout, -1) for layout in layouts]

    def _all_pairs(self, graph: _Graph) -> np.ndarray:
        """The seconds of the cheapest paths between all layouts; a last row and column of inf lead nowhere."""
        count = len(graph.index)
        distances = np.full((count + 1, count + 1), math.inf)
        np.fill_diagonal(distances[:-1, :-1], 0.0)
        for i, steps in enumerate(graph.steps):
            for j, (seconds, _) in steps.items():
                distances[i, j] = min(seconds, distances[i, j])
        for k in range(count):
            if graph.bytes[k] <= self.most_bytes:
                np.minimum(distances, distances[:, k, None] + distances[None, k, :], out=distances)
        return distances

    def _from(self, tensor: _Tensor, start: int) -> _Routes:
        """The cheapest paths from a layout."""
        if (tensor, start) not in self._routes:
            self._routes[tensor, start] = self._graph(tensor).routes(start, self.most_bytes)
        return self._routes[tensor, start]

    def _graph(self, tensor: _Tensor) -> _Graph:
        """The graph of a tensor's layouts, cuts by its blocks among them."""
        if tensor not in self._graphs:
            shape, itemsize, blocks = tensor
            if (shape, blocks) not in self._ways:
                self._ways[shape, blocks] = self._ways_between(shape, blocks)
            ways = self._ways[shape, blocks]

            def priced(to: Mapping[int, tuple[Step, int]]) -> dict[int, tuple[float, Step]]:
                return {j: (self._seconds_of(step, elements * itemsize), step) for j, (step, elements) in to.items()}

            nbytes = [elements * itemsize for elements in ways.elements]
            self._graphs[tensor] = _Graph(ways.index, list(map(priced, ways.steps)), nbytes)
        return self._graphs[tensor]

    def _ways_between(self, shape: tuple[int, ...], blocks: frozenset[Placement]) -> _Ways:
        """Every layout of a tensor of this shape by its number, and every step between two of them."""
        cuts = [*(S(d) for d in range(len(shape))), *sorted(blocks, key=repr)]
        index = {state: i for i, state in enumerate(dict.fromkeys(self._states(shape, cuts)))}
        steps: list[dict[int, tuple[Step, int]]] = [{} for _ in index]
        for state, i in index.items():
            for step in steps_from(state, cuts, self.mesh):
                after = step.after(state, self.mesh)
                if after is not None and after in index:
                    steps[i][index[after]] = step, self._uncut(step, state)
        return _Ways(index, list(map(self._elements, index)), steps)

    def _states(self, shape: tuple[int, ...], cuts: Sequence[Placement]) -> Iterator[Layout]:
        placements: list[Placement] = [R, P(), *cuts]
        orders = list(itertools.permutations(range(len(self.mesh.shape))))
        for combination in itertools.product(*([R] if n == 1 else placements for n in self.mesh.shape)):
            for sharding in dict.fromkeys(Sharding(combination, order) for order in orders):
                if layout := Layout.of(shape, sharding, self.mesh):
                    yield layout

    def step_seconds(self, step: Step, before: Layout, itemsize: int) -> float:
        """Seconds of one step that starts from layout `before`, on the fullest device."""
        return self._seconds_of(step, self._uncut(step, before) * itemsize)

    def _seconds_of(self, step: Step, nbytes: int) -> float:
        """Seconds of one step of a tensor of so many bytes where its axis does not cut it."""
        alike = step.kind, step.axis, step.dim > 0, nbytes
        if alike not in self._steps:
            levels = self._levels[step.kind][step.axis]
            message = self.messages.get(step.kind, ALONE)
            self._steps[alike] = self.costs.step(step.kind, step.dim, levels, nbytes, message)
        return self._steps[alike]

    def _uncut(self, step: Step, before: Layout) -> int:
        """Elements on the fullest device of a layout from which a step goes, where its axis does not cut them."""
        gathered = (
            before.with_row(step.dim, before.rows[step.dim].without(step.axis))
            if step.kind in ("all_gather", "all_to_all")
            else before
        )
        assert gathered is not None, (step, before)
        return self._elements(gathered)

    def _elements(self, layout: Layout) -> int:
        """Elements of a layout on the fullest device, the one at coordinate 0."""
        return math.prod(layout.local_shape(self.mesh, (0,) * len(self.mesh.shape)))


def steps_from(state: Layout, cuts: Sequence[Placement], mesh: DeviceMesh) -> Iterator[Step]:
    """Every step that can follow a layout, where `cuts` are the placements that may cut the tensor."""
    for axis, n in enumerate(mesh.shape):
        if n == 1:
            continue
        if axis in state.partial:
            yield Step("all_reduce", axis)
            yield from (Step("reduce_scatter", axis, c.dim, blocks=c.blocks) for c in cuts)
        elif (dim := state.cut_by(axis)) is None:
            yield Step("lodge", axis)
            yield from (Step("slice", axis, c.dim, blocks=c.blocks) for c in cuts)
        else:
            yield Step("all_gather", axis, dim)
            yield from (Step("all_to_all", axis, dim, c.dim, to_blocks=c.blocks) for c in cuts if c.dim != dim)


def leads_to(path: Sequence[Step], shape: Sequence[int], source: Sharding, mesh: DeviceMesh) -> Layout | None:
    """The layout of a tensor after these steps; None where one of them cannot be taken."""
    state = Layout.of(tuple(shape), source, mesh)
    for step in path:
        cuts = [
            S(dim, blocks)
            for dim, blocks in ((step.dim, step.blocks), (step.to_dim, step.to_blocks))
            if 0 <= dim < len(shape)
        ]
        if state is None or step not in steps_from(state, cuts, mesh):
            return None
        state = step.after(state, mesh)
    return state


def _blocks_of(*shardings: Sharding) -> frozenset[Placement]:
    """The blocked placements that occur at the ends of a conversion: no path needs others."""
    return frozenset(p for s in shardings for p in s.placements if p.blocks)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A step as one device runs it.

    `dims` has an entry for each dim that is gathered or cut: the dim, its local size when the axis does not cut it, and
    its blocks then.
    """

    kind: str
    axis: str
    dims: tuple[tuple[int, int, tuple[int, ...]], ...] = ()

    def __repr__(self) -> str:
        inside = ", ".join(f"{d}:{'|'.join(map(str, blocks)) if blocks else size}" for d, size, blocks in self.dims)
        return f"{self.kind}({inside})@{self.axis}" if inside else f"{self.kind}@{self.axis}"

    @staticmethod
    def parse_all(text: str) -> tuple[LocalStep, ...]:
        steps = []
        for kind, inside, axis in re.findall(r"(\w+)(?:\(([^)]*)\))?@([^;]+)", text):
            dims = []
            for entry in filter(None, inside.split(",")):
                dim, _, sizes = entry.partition(":")
                numbers = tuple(map(int, sizes.split("|")))
                dims.append((int(dim), sum(numbers), numbers if len(numbers) > 1 else ()))
            steps.append(LocalStep(kind, axis, tuple(dims)))
        return tuple(steps)


def localise(
    path: Sequence[Step], shape: Sequence[int], source: Sharding, mesh: DeviceMesh, coordinate: Sequence[int]
) -> tuple[tuple[LocalStep, ...], tuple[int, ...]]:
    """Steps as the device at `coordinate` runs them, and the local shape after the last one."""
    state = Layout.of(tuple(shape), source, mesh)
    local = () if state is None else state.local_shape(mesh, coordinate)
    steps = []
    for step in path:
        after = step.after(state, mesh) if state else None
        if state is None or after is None:
            raise BadSharding(
                f"{step.text(mesh.axes)} cannot follow here",
                seen=f"a tensor of shape {list(shape)}, {source.text(mesh.axes)} at first, on mesh {mesh}",
            )
        before = local
        local = after.local_shape(mesh, coordinate)
        dims = []
        for d in (step.dim, step.to_dim):
            if d >= 0:  # the size is that which the dim has when the axis does not cut it
                is_cut_before = step.axis in state.rows[d].axes
                row, size = (state.rows[d], local[d]) if is_cut_before else (after.rows[d], before[d])
                dims.append((d, size, row.met(step.axis, size)))
        steps.append(LocalStep(step.kind, mesh.axes[step.axis], tuple(dims)))
        state = after
    return tuple(steps), local
