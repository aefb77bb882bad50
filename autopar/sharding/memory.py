"""What a step holds in memory on the fullest device: pieces, each with the bytes of every choice and the time during which it is there.

    time 0 .. n-1       the forward of op 0 .. n-1
    time n .. 2n-1      the backward of op n-1 .. 0
    time 2n             the optimizer's step

A piece belongs to a site (bytes by its choice) or to an edge (bytes by what leaves and what arrives: a conversion makes something). The memory at a time is a sum over choices, so it is a row of the solver; the
peak of a plan is the largest of them. Values that lie on one memory (views) are one piece, as long as nothing converts between them. States of the optimizer are there from the second step on: that step counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.sharding.costs import optimizer_figures
from autopar.sharding.overlap import marked
from autopar.sharding.placement import Sharding, largest_local_shape
from autopar.sharding.saved import kept_by, memories, owners
from autopar.sharding.strategies import Choice, gradients, values

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.sharding.cluster import Cluster
    from autopar.sharding.mesh import DeviceMesh
    from autopar.sharding.overlap import Cut
    from autopar.sharding.space import Edge, Site
    from autopar.tracer.graph import Graph, TensorType

KINDS = ("parameters", "gradients", "optimizer states", "step temporaries", "inputs and buffers", "saved activations", "gathered parameters", "gradients of activations", "transients")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Something that is in memory from `first` to `last`."""

    kind: str
    place: int                                                 # index of a site, or of an edge
    is_edge: bool
    bytes: np.ndarray                                          # by choice; of an edge by [given, taken]
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """All pieces of a step."""

    pieces: tuple[Piece, ...]
    ops: tuple[str, ...]                                       # names in the order of the forward

    @property
    def times(self) -> int:
        return 2 * len(self.ops) + 1

    def when(self, time: int) -> str:
        n = len(self.ops)
        return f"forward of {self.ops[time]}" if time < n else f"backward of {self.ops[2 * n - 1 - time]}" if time < 2 * n else "optimizer step"

    def held(self, picked: Sequence[int], edges: Sequence[Edge]) -> dict[str, np.ndarray]:
        """Bytes at every time, by kind."""
        changes = {kind: np.zeros(self.times + 1) for kind in KINDS}
        for piece in self.pieces:
            if piece.is_edge:
                e = edges[piece.place]
                amount = piece.bytes[e.given_by[picked[e.source]], e.taken_by[picked[e.target]]]
            else:
                amount = piece.bytes[picked[piece.place]]
            changes[piece.kind][piece.first] += amount
            changes[piece.kind][piece.last + 1] -= amount
        return {kind: np.cumsum(change)[:-1] for kind, change in changes.items()}

    def row(self, time: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Bytes at one time, by choice of each site and by flows of each edge."""
        sites: dict[int, np.ndarray] = {}
        edges: dict[int, np.ndarray] = {}
        for piece in self.pieces:
            if piece.first <= time <= piece.last:
                into = edges if piece.is_edge else sites
                into[piece.place] = into[piece.place] + piece.bytes if piece.place in into else piece.bytes
        return sites, edges


def memory_of(graph: Graph, mesh: DeviceMesh, cluster: Cluster, optimizer: str | float, sites: Sequence[Site], edges: Sequence[Edge], ends: Sequence[tuple[fx.Node, fx.Node]], index: Mapping[Any, int],
              made: Cut, handed_on: Collection[fx.Node], accumulation: int = 1) -> Memory:
    """The pieces of a graph's step. `ends` say of each edge which value it carries and who takes it; `made` how the forward is cut into windows; `handed_on` are the values that move beside them."""
    return _Pieces(graph, mesh, cluster, optimizer, sites, edges, ends, index, made, handed_on, accumulation).build()


class _Pieces:
    def __init__(self, graph: Graph, mesh: DeviceMesh, cluster: Cluster, optimizer: str | float, sites: Sequence[Site], edges: Sequence[Edge], ends: Sequence[Any], index: Mapping[Any, int],
                 made: Cut, handed_on: Collection[fx.Node], accumulation: int) -> None:
        from autopar.tracer.graph import info

        self.graph, self.mesh, self.kind, self.optimizer = graph, mesh, cluster.device.kernels, optimizer
        self.sites, self.edges, self.ends, self.index, self.cut, self.handed_on, self.accumulates = sites, edges, ends, index, made, handed_on, accumulation > 1
        self.ops = [n for n in graph.nodes if info(n).kind == "op"]
        self.at = {n: i for i, n in enumerate(self.ops)}
        self.n = len(self.ops)
        self.pieces: list[Piece] = []
        self._shared: dict[Any, Any] = {}

    def build(self) -> Memory:
        from autopar.tracer.graph import info

        self._read_graph()
        for node in self.graph.nodes:
            if info(node).kind in ("parameter", "input", "buffer"):
                self._standing(node)
            elif info(node).kind == "op":
                self._values(node)
        for e, (value, target) in enumerate(self.ends):
            self._conversion(e, value, target)
        for name, type_ in self.graph.unread if self.sites else ():        # whole on every device, whatever is chosen
            self._add("parameters" if name.startswith("parameter ") else "inputs and buffers", 0, np.full(len(self.sites[0].choices), float(type_.nbytes)), 0, 2 * self.n)
        return Memory(tuple(self.pieces), tuple(info(n).key for n in self.ops))

    def _read_graph(self) -> None:
        """Who keeps which value, who lies on whose memory, and until when each value is needed through itself."""
        from autopar.tracer.graph import info

        memory = memories(self.graph)
        owner = owners(self.graph, memory)
        self.keeps: dict[fx.Node, set[fx.Node]] = {}
        self.besides: dict[fx.Node, int] = {}
        for op in self.ops:
            kept, self.besides[op] = kept_by(op, self.kind)
            self.keeps[op] = set(kept)
        self.is_view = {n: owner[memory[n]] is not n for n in self.graph.nodes}
        self.producer = {n: (n.args[0] if info(n).kind == "part" else n) for n in self.graph.nodes if info(n).kind in ("op", "part")}
        self.users = {n: [u for u in n.users if info(u).kind in ("op", "output")] for n in self.graph.nodes}
        self.end: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node not in self.producer and info(node).kind not in ("parameter", "input", "buffer"):
                continue
            last = self.at.get(self.producer.get(node), 0)     # type: ignore[arg-type]
            if node in self.producer and node in self.keeps[self.producer[node]]:   # type: ignore[index]
                last = self._back(self.producer[node])         # type: ignore[arg-type]
            for user in self.users[node]:
                last = max(last, 2 * self.n - 1 if user not in self.at else self._back(user) if node in self.keeps[user] else self.at[user])
            self.end[node] = last

    def _back(self, op: fx.Node) -> int:
        return 2 * self.n - 1 - self.at[op]

    def _last_use(self, value: fx.Node) -> int:
        """The last op of the forward that reads a value, through views too: where its gradient begins."""
        if ("last", value) not in self._shared:
            places = [self.n - 1 if u not in self.at else max((self._last_use(w) for w in self._outputs(u)), default=self.at[u]) if self._passes(u, value) else self.at[u] for u in self.users[value]]
            self._shared["last", value] = max(places, default=self.at.get(self.producer.get(value), 0))   # type: ignore[arg-type]
        return int(self._shared["last", value])

    def _outputs(self, op: fx.Node) -> list[fx.Node]:
        from autopar.tracer.graph import info

        parts = [u for u in op.users if info(u).kind == "part"]
        return parts or [op]

    def _passes(self, op: fx.Node, value: fx.Node) -> bool:
        """Do the op's outputs lie on this value's memory?"""
        return all(self.is_view[w] for w in self._outputs(op)) and len([v for v in op._input_nodes if v is value]) > 0

    # -- pieces

    def _add(self, kind: str, place: int, bytes_: np.ndarray, first: int, last: int, is_edge: bool = False) -> None:
        if first <= last and bytes_.any():
            self.pieces.append(Piece(kind, place, is_edge, bytes_, first, last))

    def _local(self, site: int, port: int, type_: TensorType, of: Callable[..., Sharding], end: Callable[..., Any] = Choice.output) -> np.ndarray:
        """Bytes of an output (or operand) by choice."""
        choices = self.sites[site].choices
        key = (id(choices), port, type_, of, end)
        if key not in self._shared:
            self._shared[key] = choices, np.array([self._bytes(type_, of(end(c, port))) for c in choices], float)
        found: np.ndarray = self._shared[key][1]
        return found

    def _bytes(self, type_: TensorType, sharding: Sharding) -> int:
        key = (type_.shape, type_.itemsize, sharding)
        if key not in self._shared:
            self._shared[key] = math.prod(largest_local_shape(type_.shape, sharding, self.mesh)) * type_.itemsize
        return int(self._shared[key])

    def _standing(self, node: fx.Node) -> None:
        """What is there before the step: parameters with all that follows them, inputs and buffers."""
        from autopar.tracer.graph import info, type_of

        site, type_, always = self.index[node], type_of(node), 2 * self.n
        held = self._local(site, 0, type_, values)
        if info(node).kind != "parameter":
            self._add("inputs and buffers", site, held, 0, always)
            return
        self._add("parameters", site, held, 0, always)
        if type_.requires_grad and self.users[node]:
            figures = optimizer_figures(self.optimizer, type_.itemsize)
            begins = 2 * self.n - 1 - self._last_use(node)
            self._add("gradients", site, held, 0 if self.accumulates else begins, always)
            uses = [u for user in self.users[node] for u in (self.users[user] if self._passes(user, node) else [user]) if u in self.at]
            if len(uses) > 1:                                  # of several uses: a part and the sum beside what there is
                self._add("gradients", site, self._scaled(held, 2), begins, 2 * self.n - 1 - min(self.at[u] for u in uses))
            self._add("optimizer states", site, self._scaled(held, figures["kept"]), 0, always)
            self._add("step temporaries", site, self._scaled(held, figures["temporary"] if self.kind == "cuda" else 0), always, always)

    def _scaled(self, array: np.ndarray, factor: float) -> np.ndarray:
        key = ("scaled", id(array), factor)
        if key not in self._shared:
            self._shared[key] = array, array * factor
        found: np.ndarray = self._shared[key][1]
        return found

    def _values(self, op: fx.Node) -> None:
        from autopar.tracer.graph import info, type_of

        site, now, back = self.index[op], self.at[op], self._back(op)
        for value in self._outputs(op):
            port = value.args[1] if info(value).kind == "part" else 0
            if not self.is_view[value]:
                end = self.end[value]
                self._add("saved activations" if end >= self.n else "transients", site, self._local(site, port, type_of(value), values), now, end)      # type: ignore[arg-type]
                if type_of(value).requires_grad:
                    self._add("gradients of activations", site, self._local(site, port, type_of(value), gradients), 2 * self.n - 1 - self._last_use(value), back)     # type: ignore[arg-type]
        if self.besides[op]:                                   # as its first operand is cut
            type_ = next(type_of(n) for n in op.target.operands(op.kwargs) if hasattr(n, "meta"))   # type: ignore[union-attr]
            part = self._local(site, 0, type_, values, Choice.operand)
            self._add("saved activations", site, self._scaled(part, self.besides[op] / max(1, type_.nbytes)), now, back)

    def _conversion(self, e: int, value: fx.Node, target: fx.Node) -> None:
        """What a change of sharding makes, as long as it is needed; and how much longer a value stays for the views on it."""
        from autopar.tracer.graph import type_of

        edge, type_ = self.edges[e], type_of(value)
        made, kept, unreduced = self._tables(edge, type_)
        if target not in self.at:                              # an output
            self._add("transients", e, made, self.n - 1, 2 * self.n - 1, True)
            return
        now, back = self.at[target], self._back(target)
        is_parameter = value in self.handed_on
        views = [w for w in self._outputs(target) if self.is_view[w]] if self._passes(target, value) else []
        end = max([self.end[w] for w in views], default=back if value in self.keeps[target] else now)
        kind = "gathered parameters" if is_parameter else "saved activations" if end >= self.n else "transients"
        again = self.sites[edge.source].regathered
        begins = self.cut.gathered(now) if is_parameter else now     # ahead of its use
        if is_parameter and any(again):
            key = ("again", id(made), again)
            if key not in self._shared:
                flows = marked(edge, again)[:, None]
                self._shared[key] = made, np.where(flows, made, 0.0), np.where(flows, 0.0, made)
            _, dropped, stays = self._shared[key]
            self._add(kind, e, stays, *((0, 2 * self.n - 1) if self.accumulates else (begins, end)), True)      # through all micro-batches
            self._add(kind, e, dropped, begins, now, True)
            self._add(kind, e, dropped, max(now + 1, self.cut.gathered_again(now)), back, True)
        else:
            self._add(kind, e, made, *((0, 2 * self.n - 1) if is_parameter and self.accumulates else (begins, end)), True)
        if views and not is_parameter and end > self.end[value]:
            self._add("saved activations" if end >= self.n else "transients", e, kept, max(self.end[value] + 1, now), end, True)
            self.end[value] = end                              # the next view prolongs it from there
        if type_.requires_grad:
            kind, until = ("gradients", self.cut.reduced(now)) if is_parameter else ("gradients of activations", back)
            if is_parameter and self.accumulates:              # unreduced through all micro-batches, but for what is reduced in each
                key = ("scattered", id(unreduced), self.sites[edge.source].scattered)
                if key not in self._shared:
                    flows = marked(edge, self.sites[edge.source].scattered)[:, None]
                    self._shared[key] = unreduced, np.where(flows, unreduced, 0.0), np.where(flows, 0.0, unreduced)
                _, unreduced, waits = self._shared[key]
                self._add(kind, e, waits, 0, 2 * self.n - 1, True)
            self._add(kind, e, unreduced, back, until, True)

    def _tables(self, edge: Edge, type_: TensorType) -> tuple[np.ndarray, ...]:
        """Bytes by what leaves and arrives: of what a conversion makes, of what stays where it makes nothing, and of the gradient that a conversion takes."""
        key = (id(edge.given), id(edge.taken), type_)
        if key not in self._shared:
            given, taken = ([values(f) for f in side] for side in (edge.given, edge.taken))
            moved = _differ(given, taken)
            arrives, lies = np.array([self._bytes(type_, s) for s in taken], float), np.array([self._bytes(type_, s) for s in given], float)
            given_back, taken_back = ([gradients(f) for f in side] for side in (edge.given, edge.taken))
            back_moved = _differ(given_back, taken_back)
            returns = np.array([self._bytes(type_, s) for s in taken_back], float)
            self._shared[key] = (edge.given, edge.taken), (np.where(moved, arrives[None, :], 0.0), np.where(moved, 0.0, lies[:, None]), np.where(back_moved, returns[None, :], 0.0))
        found: tuple[np.ndarray, ...] = self._shared[key][1]
        return found


def _differ(rows: Sequence[Sharding], columns: Sequence[Sharding]) -> np.ndarray:
    """Where two shardings are not one: each is compared once, as a number."""
    numbers: dict[Sharding, int] = {}
    return np.not_equal.outer(*([numbers.setdefault(s, len(numbers)) for s in side] for side in (rows, columns)))
