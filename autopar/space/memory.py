"""What a step holds in memory on the fullest device.

Pieces, each with the bytes of every choice and the time during which it is there.

    time 0 .. n-1       the forward of op 0 .. n-1
    time n .. 2n-1      the backward of op n-1 .. 0
    time 2n ..          the optimizer's step, which on a CPU goes from one parameter to the next

A piece belongs to a site (bytes by its choice) or to an edge (bytes by what leaves and what arrives: a conversion makes
something). The memory at a time is a sum over choices, so it is a row of the solver; the peak of a plan is the largest
of them. Values that lie on one memory (views) are one piece, as long as nothing converts between them. States of the
optimizer are there from the second step on: that step counts, and `first` is the other. What is counted is what the
emitted program holds with its outputs in the user's hands until backward has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.ops.entry import facts_of
from autopar.sharding.costs import optimizer_figures
from autopar.sharding.placement import Sharding, largest_local_shape
from autopar.sharding.strategies import Choice, gradients, values
from autopar.space.overlap import closes, marked, reduces
from autopar.space.saved import kept_by, layouts, owners, work_of

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.graph.graph import Graph, TensorType
    from autopar.sharding.cluster import Cluster
    from autopar.sharding.mesh import DeviceMesh
    from autopar.space.overlap import Cut
    from autopar.space.space import Edge, Site

KINDS = (
    "parameters",
    "gradients",
    "optimizer states",
    "step temporaries",
    "inputs and buffers",
    "saved activations",
    "gathered parameters",
    "gradients of activations",
    "transients",
)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Something that is in memory from `first` to `last`."""

    kind: str
    place: int  # index of a site, or of an edge
    is_edge: bool
    bytes: np.ndarray  # by choice; of an edge by [given, taken]
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """All pieces of a step."""

    pieces: tuple[Piece, ...]
    ops: tuple[str, ...]  # names in the order of the forward
    updates: int = 1  # times of the optimizer's step

    @property
    def times(self) -> int:
        return 2 * len(self.ops) + self.updates

    def when(self, time: int) -> str:
        n = len(self.ops)
        return (
            f"forward of {self.ops[time]}"
            if time < n
            else f"backward of {self.ops[2 * n - 1 - time]}"
            if time < 2 * n
            else "optimizer step"
        )

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

    def first(self, picked: Sequence[int], edges: Sequence[Edge]) -> float:
        """The peak of the first step: the optimizer makes its states when it is called."""
        held = self.held(picked, edges)
        held["optimizer states"][: 2 * len(self.ops)] = 0
        return float(np.sum(list(held.values()), axis=0).max())

    def row(self, time: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Bytes at one time, by choice of each site and by flows of each edge."""
        sites: dict[int, np.ndarray] = {}
        edges: dict[int, np.ndarray] = {}
        for piece in self.pieces:
            if piece.first <= time <= piece.last:
                into = edges if piece.is_edge else sites
                into[piece.place] = into[piece.place] + piece.bytes if piece.place in into else piece.bytes
        return sites, edges


def memory_of(
    graph: Graph,
    mesh: DeviceMesh,
    cluster: Cluster,
    optimizer: str | float,
    sites: Sequence[Site],
    edges: Sequence[Edge],
    ends: Sequence[tuple[fx.Node, fx.Node]],
    index: Mapping[Any, int],
    made: Cut,
    handed_on: Mapping[fx.Node, fx.Node],
    accumulation: int = 1,
) -> Memory:
    """The pieces of a graph's step.

    `ends` say of each edge which value it carries and who takes it; `made` how the forward is cut into windows;
    `handed_on` are the values that move beside them, and whose they are.
    """
    return _Pieces(graph, mesh, cluster, optimizer, sites, edges, ends, index, made, handed_on, accumulation).build()


class _Pieces:
    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMesh,
        cluster: Cluster,
        optimizer: str | float,
        sites: Sequence[Site],
        edges: Sequence[Edge],
        ends: Sequence[Any],
        index: Mapping[Any, int],
        made: Cut,
        handed_on: Mapping[fx.Node, fx.Node],
        accumulation: int,
    ) -> None:
        from autopar.graph.graph import info

        self.graph, self.mesh, self.kind, self.optimizer = graph, mesh, cluster.device.kernels, optimizer
        self.sites, self.edges, self.ends, self.index, self.cut, self.handed_on, self.accumulates = (
            sites,
            edges,
            ends,
            index,
            made,
            handed_on,
            accumulation > 1,
        )
        self.ops = [n for n in graph.nodes if info(n).kind == "op"]
        self.at = {n: i for i, n in enumerate(self.ops)}
        self.n = len(self.ops)
        self.pieces: list[Piece] = []
        self._shared: dict[Any, Any] = {}

    def build(self) -> Memory:
        from autopar.graph.graph import info

        self._read_graph()
        for node in self.graph.nodes:
            if info(node).kind in ("parameter", "input", "buffer"):
                self._standing(node)
            elif info(node).kind == "op":
                self._values(node)
        for e, (value, target) in enumerate(self.ends):
            self._conversion(e, value, target)
        for name, type_ in self.graph.unread if self.sites else ():  # whole on every device, whatever is chosen
            self._add(
                "parameters" if name.startswith("parameter ") else "inputs and buffers",
                0,
                np.full(len(self.sites[0].choices), float(type_.nbytes)),
                0,
                self.last,
            )
        return Memory(tuple(self.pieces), tuple(info(n).key for n in self.ops), self.updates)

    def _read_graph(self) -> None:
        """Who keeps which value, who lies on whose memory, and until when each value is needed through itself."""
        from autopar.graph.graph import info, type_of

        memory, self.turned = layouts(self.graph)
        owner = owners(self.graph, memory)
        self.keeps: dict[fx.Node, set[fx.Node]] = {}
        self.besides: dict[fx.Node, int] = {}
        for op in self.ops:
            kept, self.besides[op] = kept_by(op, self.kind, emitted=True)
            self.keeps[op] = set(kept)
        self.is_view = {n: owner[memory[n]] is not n for n in self.graph.nodes}
        self.producer = {
            n: (n.args[0] if info(n).kind == "part" else n) for n in self.graph.nodes if info(n).kind in ("op", "part")
        }
        self.users = {n: [u for u in n.users if info(u).kind in ("op", "output")] for n in self.graph.nodes}
        self.memory, self.whole = memory, {m: type_of(n).nbytes for m, n in owner.items() if info(n).outputs}
        self.end: dict[
            fx.Node, int
            # of each value, the last time at which it is needed as it is: by an op of the forward, or by its own op's
            # backward
        ] = {}
        for node, op in self.producer.items():
            self.end[node] = (
                self._back(op)
                if node in self.keeps[op]
                else max([self.at[op], *(self.at.get(u, self.n - 1) for u in self.users[node])])
            )
        trained = [
            n for n in self.graph.nodes if info(n).kind == "parameter" and type_of(n).requires_grad and self.users[n]
        ]
        self.order = {n: k for k, n in enumerate(trained)}
        self.updates = (
            max(1, len(trained)) if self.kind == "cpu" and optimizer_figures(self.optimizer, 4)["temporary"] else 1
        )
        self.last, self.settled = 2 * self.n + self.updates - 1, 2 * self.n - 1
        self.until: dict[
            int, int
        ] = {}  # of each memory, the last time until which all of it is counted, if nothing converts it
        for m, node in owner.items():
            self.until[m] = self.end[node] if node in self.producer else self.last
        self.closes = dict(
            zip(
                trained,
                closes([(self._back(self.ops[self._first_use(n)]), type_of(n).nbytes) for n in trained]),
                strict=True,
            )
        )  # of each gradient, when its bucket is reduced

    def _back(self, op: fx.Node) -> int:
        return 2 * self.n - 1 - self.at[op]

    def _needed(self, value: fx.Node) -> int:
        """The last time at which anything that lies on this value is needed."""
        if ("needed", value) not in self._shared:
            self._shared["needed", value] = max(
                [self.end.get(value, 0), *(self._needs(value, u) for u in self.users[value])]
            )
        return int(self._shared["needed", value])

    def _needs(self, value: fx.Node, op: fx.Node) -> int:
        """Until when an op needs a value as it arrives there: itself, for its backward, and through its views."""
        if op not in self.at:
            return 2 * self.n - 1
        return max(
            [
                self._back(op) if value in self.keeps[op] else self.at[op],
                *(self._needed(w) for w in self._outputs(op) if self._passes(op, value)),
            ]
        )

    def _last_use(self, value: fx.Node) -> int:
        """The last op of the forward that reads a value, through views too: where its gradient begins."""
        if ("last", value) not in self._shared:
            places = [
                self.n - 1
                if u not in self.at
                else max((self._last_use(w) for w in self._outputs(u)), default=self.at[u])
                if self._passes(u, value)
                else self.at[u]
                for u in self.users[value]
            ]
            self._shared["last", value] = max(places, default=self.at.get(self.producer.get(value), 0))
        return int(self._shared["last", value])

    def _first_use(self, value: fx.Node) -> int:
        """The first op of the forward that reads a value, through what only hands it on to one.

        Where its gradient is whole. That of several uses is so where they part.
        """
        places = [
            self.n - 1
            if u not in self.at
            else min((self._first_use(w) for w in self._outputs(u)), default=self.at[u])
            if u in self.handed_on and len(self.users[u]) == 1
            else self.at[u]
            for u in self.users[value]
        ]
        return min(places, default=self.at.get(self.producer.get(value), 0))

    def _outputs(self, op: fx.Node) -> list[fx.Node]:
        from autopar.graph.graph import info

        parts = [u for u in op.users if info(u).kind == "part"]
        return parts or [op]

    def _passes(self, op: fx.Node, value: fx.Node) -> bool:
        """Do the op's outputs lie on this value's memory?"""
        return all(self.is_view[w] for w in self._outputs(op)) and len([v for v in op._input_nodes if v is value]) > 0

    # -- pieces

    def _add(self, kind: str, place: int, bytes_: np.ndarray, first: int, last: int, is_edge: bool = False) -> None:
        if first <= last and bytes_.any():
            self.pieces.append(Piece(kind, place, is_edge, bytes_, first, last))

    def _local(
        self,
        site: int,
        port: int,
        type_: TensorType,
        of: Callable[..., Sharding],
        end: Callable[..., Any] = Choice.output,
    ) -> np.ndarray:
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
        from autopar.graph.graph import info, type_of

        site, type_, always = self.index[node], type_of(node), self.last
        held = self._local(site, 0, type_, values)
        if info(node).kind != "parameter":
            self._add("inputs and buffers", site, held, 0, always)
            return
        self._add("parameters", site, held, 0, always)
        if node in self.closes:
            figures = optimizer_figures(self.optimizer, type_.itemsize)
            self._add(
                "gradients",
                site,
                held,
                0
                if self.accumulates and self._always_in_each(node)
                else self.settled
                if self.accumulates
                else self.closes[node],
                always,
            )  # until then edges count it, as it comes
            self._add("optimizer states", site, self._scaled(held, figures["kept"]), 0, always)
            if (
                self.updates > 1
                # one parameter after the other: two tensors for the while, of which one stays until the next has made
                # its
                # own
            ):
                own = 2 * self.n + self.order[node]
                self._add("step temporaries", site, self._scaled(held, 2 * figures["temporary"]), own, own)
                self._add(
                    "step temporaries", site, self._scaled(held, figures["temporary"]), own + 1, min(own + 1, always)
                )
            elif self.kind == "cuda":
                self._add("step temporaries", site, self._scaled(held, figures["temporary"]), always, always)

    def _scaled(self, array: np.ndarray, factor: float) -> np.ndarray:
        key = ("scaled", id(array), factor)
        if key not in self._shared:
            self._shared[key] = array, array * factor
        found: np.ndarray = self._shared[key][1]
        return found

    def _values(self, op: fx.Node) -> None:
        from autopar.graph.graph import info, op_name, type_of

        site, now, back = self.index[op], self.at[op], self._back(op)
        for value in self._outputs(op):
            port = value.args[1] if info(value).kind == "part" else 0
            if not self.is_view[value]:
                end = self.end[value]
                self._add(
                    "saved activations" if end >= self.n else "transients",
                    site,
                    self._local(site, port, type_of(value), values),
                    now,
                    end,
                )
                if type_of(value).requires_grad:
                    self._add(
                        "gradients of activations",
                        site,
                        self._local(site, port, type_of(value), gradients),
                        2 * self.n - 1 - self._last_use(value),
                        back,
                    )
            uses = sorted({self.at[u] for u in self.users[value] if u in self.at})
            if (
                op_name(op) == "identity" and len(uses) > 1 and type_of(value).requires_grad
            ):  # gradients of several uses are added: one comes, and a sum is made
                lies, is_parameter = self._local(site, port, type_of(value), gradients), op in self.handed_on
                if is_parameter:
                    self._add("gradients", site, lies, 2 * self.n - 1 - uses[-1], back)
                for use in uses[:-1]:
                    self._add(
                        "gradients" if is_parameter else "gradients of activations",
                        site,
                        self._scaled(lies, 2 if is_parameter else 1),
                        2 * self.n - 1 - use,
                        2 * self.n - 1 - use,
                    )
        if self.besides[op]:  # as its first operand is cut
            type_ = next(type_of(n) for n in op.target.operands(op.kwargs) if hasattr(n, "meta"))
            part = self._local(site, 0, type_, values, Choice.operand)
            self._add("saved activations", site, self._scaled(part, self.besides[op] / max(1, type_.nbytes)), now, back)
        self._work(op, site, now, back)

    def _work(self, op: fx.Node, site: int, now: int, back: int) -> None:
        """What an op makes for the while, as its first operand is cut."""
        from autopar.graph.graph import info, op_name, type_of

        for time, made in zip((now, back), work_of(op), strict=True):
            if made and (time < self.n or any(t.requires_grad for t in info(op).outputs)):
                type_ = next(type_of(n) for n in op.target.operands(op.kwargs) if hasattr(n, "meta"))
                self._add(
                    "transients",
                    site,
                    self._scaled(self._local(site, 0, type_, values, Choice.operand), made / max(1, type_.nbytes)),
                    time,
                    time,
                )
        if facts_of(op_name(op)).part_work:
            for time, by_choice in zip((now, back), self._part_work(op, site), strict=True):
                if time < self.n or any(t.requires_grad for t in info(op).outputs):
                    self._add("transients", site, by_choice, time, time)

    def _part_work(self, op: fx.Node, site: int) -> tuple[np.ndarray, np.ndarray]:
        """What the local form of an op makes for the while in forward and in backward, by choice."""
        from autopar.graph.graph import call_of, op_name, type_of

        choices, types = (
            self.sites[site].choices,
            tuple(type_of(n) for n in op.target.operands(op.kwargs) if hasattr(n, "meta")),
        )
        key = ("part", id(choices), op_name(op), types, op.kwargs.get("is_causal"), op.kwargs.get("dropout_p"))
        if key not in self._shared:
            held = (
                [largest_local_shape(t.shape, values(c.operand(i)), self.mesh) for i, t in enumerate(types)]
                for c in choices
            )
            call, part_work = call_of(op), facts_of(op_name(op)).part_work
            assert part_work is not None
            made = [part_work(call, shapes, self.kind) for shapes in held]
            self._shared[key] = choices, tuple(np.array(column, float) for column in zip(*made, strict=True))
        found: tuple[np.ndarray, np.ndarray] = self._shared[key][1]
        return found

    def _conversion(self, e: int, value: fx.Node, target: fx.Node) -> None:
        """What a change of sharding makes, as long as it is needed.

        And how much longer a value stays for the views on it.
        """
        from autopar.graph.graph import type_of

        edge, type_ = self.edges[e], type_of(value)
        made, kept, comes, unreduced, stored, message = self._tables(edge, type_)
        if (
            value in self.turned and type_.requires_grad
        ):  # a conversion of the gradient alone puts the value in memory order: a copy

            def turned() -> tuple[np.ndarray, np.ndarray]:
                copied = np.where((made == 0) & (unreduced > 0), kept, 0.0)
                return made + copied, kept - copied

            made, kept = self._once("turned", (made, kept, unreduced), turned)
        now = self.at.get(target, self.n - 1)
        back = 2 * self.n - 1 - (now if target in self.at else 0)
        is_parameter = value in self.handed_on
        reach = self.until[self.memory[value]]
        itself = max(
            [
                back if target not in self.at or value in self.keeps[target] else now,
                *(self.end[w] for w in (self._outputs(target) if self._passes(target, value) else ())),
            ]
        )
        needed = max(
            itself, min(self._needs(value, target), reach)
        )  # what is made here: what is on it beyond `reach` counts itself
        kind = "gathered parameters" if is_parameter else "saved activations" if needed >= self.n else "transients"
        parameter: Any = self.handed_on.get(value)
        again = () if parameter in self.cut.stays else self.sites[edge.source].regathered
        begins = self.cut.gathered(parameter, now) if is_parameter else now  # ahead of its use
        if is_parameter and any(again):
            key = ("again", id(made), again)
            if key not in self._shared:
                flows = marked(edge, again)[:, None]
                self._shared[key] = made, np.where(flows, made, 0.0), np.where(flows, 0.0, made)
            _, dropped, stays = self._shared[key]
            self._add(kind, e, stays, begins, needed, True)
            self._add(kind, e, dropped, begins, now, True)
            again_begins = max(now + 1, self.cut.gathered_again(parameter, now))
            if self._needs(value, target) >= self.n:  # an embedding's backward does not read it
                self._add(kind, e, dropped, again_begins, min(back, self._needs(value, target)), True)
                sent = self._once("sent", (dropped, message), lambda: np.where(dropped > 0, message, 0.0))
                self._message(
                    e,
                    sent,
                    dropped,
                    again_begins,
                    self.cut.taken_again(parameter, now),
                    self.cut.together(parameter, now, again=True),
                )
        else:
            self._add(kind, e, made, begins, needed, True)
        if is_parameter:
            self._message(
                e, message, made, begins, self.cut.taken(parameter, now), self.cut.together(parameter, now, again=False)
            )
        if itself > reach:  # where it arrives as it is, its memory stays so long
            self._add("saved activations" if itself >= self.n else "transients", e, kept, reach + 1, itself, True)
            if type_.nbytes == self.whole.get(self.memory[value]):
                self.until[self.memory[value]] = itself
        if target not in self.at:  # an output
            return
        if type_.requires_grad and is_parameter:
            self._gradient(e, value, target, back, self.cut.reduced(now), comes, unreduced, stored)
        elif type_.requires_grad:
            begins = (
                max((self._last_use(w) for w in self._outputs(target)), default=now)
                if self._passes(target, value)
                else now
            )  # through views it comes as it leaves their readers
            self._add("gradients of activations", e, unreduced, 2 * self.n - 1 - begins, back, True)

    def _once(self, what: str, tables: tuple[np.ndarray, ...], make: Callable[[], Any]) -> Any:
        """What is made of these tables, made once: edges that are alike share it."""
        key = (what, *map(id, tables))
        if key not in self._shared:
            self._shared[key] = tables, make()  # the tables are held, so that their ids stay theirs
        return self._shared[key][1]

    def _message(self, e: int, sent: np.ndarray, made: np.ndarray, begins: int, taken: int, several: bool) -> None:
        """What a gather of several parameters holds besides.

        What it sends while it is under way, and when it ends what has arrived beside the parameters cut out of it.
        """
        if several:
            self._add("transients", e, sent, begins, taken - 1, True)
            self._add("transients", e, made, taken, taken, True)

    def _gradient(
        self,
        e: int,
        value: fx.Node,
        target: fx.Node,
        back: int,
        reduced: int,
        comes: np.ndarray,
        unreduced: np.ndarray,
        stored: np.ndarray,
    ) -> None:
        """The gradient of a parameter before it lies as the parameter does.

        As it comes until its bucket is full, then the bucket, until it has been scattered.
        """
        owner = self.handed_on[value]
        if owner not in self.closes:
            return
        close = self.closes[owner]
        scattered = self._once("scattered", (unreduced, stored), lambda: np.where(unreduced > stored, unreduced, 0.0))
        packed = self._once(
            "packed", (unreduced, stored), lambda: np.where(unreduced > stored, unreduced - stored, unreduced)
        )  # beside the bucket while it is packed; what is scattered of it is made after these have ended
        whole = (
            comes if self._comes_here(value, target) else self._once("nothing", (comes,), lambda: np.zeros_like(comes))
        )
        if not self.accumulates or self._always_in_each(owner):
            self._add("gradients", e, whole, back, close - 1, True)
            self._add("gradients", e, packed, max(back, close), max(back, close), True)
            self._add("gradients", e, scattered, close, max(close, reduced), True)
            return
        in_each = marked(self.edges[e], self.sites[self.edges[e].source].scattered)[
            :, None
        ]  # reduced in each micro-batch; else it waits as it comes
        waits = np.where(in_each & (unreduced > 0), np.minimum(whole, stored), whole)
        self._add("gradients", e, waits, 0, self.settled, True)
        self._add(
            "gradients", e, np.where(in_each, whole, 0.0), back, close - 1, True
        )  # and what this micro-batch gives
        self._add("gradients", e, np.where(in_each, packed, 0.0), max(back, close), max(back, close), True)
        self._add("gradients", e, np.where(in_each, scattered, 0.0), close, max(close, reduced), True)
        self._add("gradients", e, np.where(in_each, waits, 0.0), close, self.settled - 1, True)
        self._add("gradients", e, np.where(in_each, 0.0, waits), back, self.settled - 1, True)

    def _always_in_each(self, parameter: fx.Node) -> bool:
        """Is its gradient reduced in each micro-batch, whatever is chosen of what is left?"""
        site = self.sites[self.index[parameter]]
        cut = (
            [
                m
                for m, c in zip(site.scattered, site.choices, strict=True)
                if any(p.is_shard for p in values(c.output()).placements)
            ]
            if site.scattered
            else []
        )
        return bool(cut) and all(cut)

    def _comes_here(self, value: fx.Node, target: fx.Node) -> bool:
        """Is this where the gradient of a parameter enters what hands the parameter on.

        Where it is read, or where several uses meet?
        """

        def several(node: fx.Node) -> bool:
            return len(self.users[node]) > 1

        while value in self.handed_on and value is not self.handed_on[value]:
            if several(value):
                return False
            value = next(a for a in value._input_nodes if a in self.handed_on)
        return target not in self.handed_on or several(target)

    def _tables(self, edge: Edge, type_: TensorType) -> tuple[np.ndarray, ...]:
        """Bytes by what leaves and arrives.

        Of what a conversion makes, of what stays where it makes nothing, of the gradient as it comes, of that which a
        conversion takes, of the gradient as it goes on, and of what a conversion starts from.
        """
        key = (id(edge.given), id(edge.taken), type_, edge.reduced_in)
        if key not in self._shared:
            given, taken = ([values(f) for f in side] for side in (edge.given, edge.taken))
            moved = _differ(given, taken)
            arrives, lies = (
                np.array([self._bytes(type_, s) for s in taken], float),
                np.array([self._bytes(type_, s) for s in given], float),
            )
            given_back, taken_back = ([gradients(f) for f in side] for side in (edge.given, edge.taken))
            back_moved = _differ(given_back, taken_back)
            returns, goes_on = (
                np.array([self._bytes(type_, s) for s in taken_back], float),
                np.array([self._bytes(type_, s) for s in given_back], float),
            )
            wide = (
                np.where(reduces(edge.taken, edge.given).T, edge.reduced_in / type_.itemsize, 1.0)
                if edge.reduced_in
                else np.ones(moved.shape)
            )  # cast as it comes, where it is reduced
            self._shared[key] = (
                (edge.given, edge.taken),
                (
                    np.where(moved, arrives[None, :], 0.0),
                    np.where(moved, 0.0, lies[:, None]),
                    returns[None, :] * wide,
                    np.where(back_moved, returns[None, :] * wide, 0.0),
                    goes_on[:, None] * wide,
                    np.where(moved, lies[:, None], 0.0),
                ),
            )
        found: tuple[np.ndarray, ...] = self._shared[key][1]
        return found


def _differ(rows: Sequence[Sharding], columns: Sequence[Sharding]) -> np.ndarray:
    """Where two shardings are not one: each is compared once, as a number."""
    numbers: dict[Sharding, int] = {}
    return np.not_equal.outer(*([numbers.setdefault(s, len(numbers)) for s in side] for side in (rows, columns)))
