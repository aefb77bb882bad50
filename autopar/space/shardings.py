"""Graph -> Space: every legal choice of every node, every conversion of every edge, each with its seconds."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.graph.graph import typed
from autopar.letters import BadConstraint, BadRule, NoRule
from autopar.ops.entry import facts_of, rule_of, timed_name
from autopar.sharding.cluster import Cluster, Timed
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.costs import measured_seconds, optimizer_figures, seconds, step_seconds
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import Binding
from autopar.sharding.placement import R, Sharding, flow, largest_local_shape, part
from autopar.sharding.strategies import (
    Choice,
    Strategy,
    cross,
    gradients,
    replicated,
    storage_strategies,
    strategies_on_one_axis,
    values,
)
from autopar.space.constraints import HABITS, Constraints, Pin, Pins
from autopar.space.discovery import suspected
from autopar.space.memory import memory_of
from autopar.space.overlap import BUCKET, Cut, casts_of_parameters, floating, reduced_in, reduces, windows_of
from autopar.space.overlap import cut as cut_windows
from autopar.space.saved import memories
from autopar.space.space import Edge, Flows, Outdone, Site, Space

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.graph.graph import Graph, TensorType


def shardings(
    graph: Graph,
    mesh: DeviceMesh,
    cluster: Cluster,
    constraints: Mapping[str, Any] | None = None,
    optimizer: str | float = "adamw",
    strict: bool = False,
    regather: bool = False,
    preset: Mapping[str, str] | None = None,
    habits: Sequence[tuple[int, str]] = (),
    accumulation: int = 1,
    reduce: str = "",
    window_bytes: int = BUCKET,
    known: float = math.inf,
) -> Space:
    """Every legal way to run `graph` on `mesh`, priced on `cluster`, less what `constraints` forbid.

    With `regather`, gathered parameters may be dropped and gathered again in backward.

    `preset` are an expert's constraints by exact names: the caller's come first; `habits` are its ways along axes. A
    step is so many micro-batches (`accumulation`) of the graph, and the optimizer. Gradients of parameters are reduced
    in the dtype `reduce` alone, where it is said; windows read at least `window_bytes` of parameters. Raises `Outdone`
    where the ops alone take as long as a plan that is `known`.
    """
    return _Builder(
        graph,
        mesh,
        cluster,
        Constraints(constraints, mesh, preset, habits),
        optimizer,
        strict,
        regather,
        accumulation,
        reduce,
        window_bytes,
    ).build(known)


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A value that one site gives and another takes: an edge before anything is said of how it travels."""

    source: str  # the names of both sites,
    port: int  # as which output it leaves,
    target: str
    operand: int  # and as which operand it arrives
    type: TensorType
    may_reduce: bool  # may its gradient be reduced on this way? That of a parameter is in one dtype alone


def sites_and_links(
    graph: Graph, mesh: DeviceMesh, accumulation: int = 1, reduce: str = ""
) -> tuple[tuple[Site, ...], tuple[Link, ...]]:
    """The space of `graph` on `mesh` without what conversions cost.

    Every site with its legal choices, and every value between two sites. What a plan says is legal is checked against
    it.
    """
    builder = _Builder(
        graph, mesh, Cluster.of(None), Constraints(None, mesh), 0.0, False, True, accumulation, reduce, BUCKET
    )
    return builder.sites_and_links()


# Factors along which the local form of an op counts positions from where its part begins: their parts are one range.


@dataclass(eq=False)
class _Draft:
    """A site while it is being pinned, and the edges that enter it."""

    site: Site
    sources: tuple[fx.Node, ...] = ()  # of its tensor operands, in order
    operands: tuple[TensorType, ...] = ()
    keep: np.ndarray | None = None  # which choices the pins leave


class _Builder:
    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMesh,
        cluster: Cluster,
        constraints: Constraints,
        optimizer: str | float,
        strict: bool,
        regather: bool,
        accumulation: int,
        reduce: str,
        window_bytes: int,
    ) -> None:
        self.graph, self.mesh, self.cluster, self.constraints, self.optimizer, self.strict = (
            graph,
            mesh,
            cluster,
            constraints,
            optimizer,
            strict,
        )
        self.accumulation, self.reduce, self.window_bytes, self.handed_on = (
            accumulation,
            reduce,
            window_bytes,
            floating(graph),
        )
        self.differentiable = graph.differentiable
        self.regather = regather or constraints.speak_of_gathering
        self.conversions = self.reductions = ShapeConsistencyManager(mesh, cluster)
        if cluster.timed:  # gradients travel in buckets
            from autopar.graph.graph import type_of

            trained = sum(t.nbytes for n in graph.parameters.values() if (t := type_of(n)).requires_grad)
            self.reductions = ShapeConsistencyManager(mesh, cluster, bucket=min(BUCKET, trained))
        from autopar.graph.blocks import calls

        self.casts = casts_of_parameters(graph)
        self.reduced_in = reduced_in(self.casts, reduce)
        self.kinds = calls(graph)  # of each op's node; what is said of one call is said of all of its kind
        self.copied = _copies(graph) if cluster.timed else frozenset()  # views of what lies in another order
        self._crossed: dict[Any, tuple[Choice, ...]] = {}
        # ops and edges that are alike share their tables: what is repeated in the model is computed once
        self._sites: dict[Any, Site] = {}
        self._stored: dict[Any, Site] = {}
        self._policies: dict[Any, tuple[Site, Site]] = {}
        self._kept: dict[Any, Site] = {}
        self._ends: dict[Any, tuple[Any, tuple[Flows, ...], np.ndarray]] = {}
        self._tables: dict[Any, np.ndarray] = {}
        self._both_ways: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._edges: dict[Any, Edge] = {}

    def build(self, known: float) -> Space:
        drafts = self._drafts()
        self._pin(drafts)
        for draft in drafts.values():
            if draft.keep is not None:
                draft.site = self._narrowed(draft.site, draft.keep)
        least = {id(d.site.seconds): float(d.site.seconds.min()) for d in drafts.values()}
        if (floor := sum(least[id(d.site.seconds)] for d in drafts.values())) >= known:
            raise Outdone(floor)
        index = {key: i for i, key in enumerate(drafts)}
        ops = [n for n in self.graph.nodes if n in self.bindings]
        made = cut_windows(ops, self.window_bytes)
        edges, ends = self._edges_of(drafts, index, made)
        if self.constraints.habits:  # they leave many choices that go with none
            for draft, keep in zip(
                drafts.values(), self._supported([d.site for d in drafts.values()], edges), strict=True
            ):
                if not keep.all():
                    draft.site = self._narrowed(draft.site, keep)
            edges, ends = self._edges_of(drafts, index, made)
        sites = tuple(d.site for d in drafts.values())
        memory = memory_of(
            self.graph,
            self.mesh,
            self.cluster,
            self.optimizer,
            sites,
            edges,
            ends,
            index,
            made,
            self.handed_on,
            self.accumulation,
        )
        at = {n: i for i, n in enumerate(ops)}
        floats = {
            k: (at[target], *self._ways(edges[k]))
            for k, (value, target) in enumerate(ends)
            if value in self.handed_on and target in at
        }
        windows = windows_of(
            made,
            [sites[index[n]].name for n in ops],
            [index[n] for n in ops],
            sites,
            edges,
            floats,
            self.accumulation,
            self.cluster.hidden,
        )
        return Space(
            self.mesh,
            self.cluster,
            sites,
            tuple(edges),
            self.conversions,
            self.graph.digest,
            self.optimizer,
            memory,
            windows,
            self.accumulation,
            self.window_bytes,
        )

    def sites_and_links(self) -> tuple[tuple[Site, ...], tuple[Link, ...]]:
        drafts, links = self._drafts(), []
        for draft in drafts.values():
            for i, value in enumerate(draft.sources):
                source, port = source_of(value)
                type_ = draft.operands[i]
                may_reduce = value not in self.handed_on or value in self.reduced_in or self.reduce in ("", type_.dtype)
                links.append(Link(drafts[source].site.name, port, draft.site.name, i, type_, may_reduce))
        return tuple(d.site for d in drafts.values()), tuple(links)

    def _drafts(self) -> dict[Any, _Draft]:
        """Every site with its legal choices, before anything is pinned."""
        self._bind_all()
        self._spread_blocks()
        return {key: draft for node in self.graph.nodes for key, draft in self._draft(node)}

    def _edges_of(
        self, drafts: Mapping[Any, _Draft], index: Mapping[Any, int], made: Cut
    ) -> tuple[list[Edge], list[tuple[fx.Node, fx.Node]]]:
        """Of every operand its edge; and which value it carries, and who takes it."""
        edges, ends = [], []
        for key, draft in drafts.items():
            for i, value in enumerate(draft.sources):
                source, port = source_of(value)
                edges.append(
                    self._edge(
                        index[source],
                        port,
                        index[key],
                        i,
                        drafts[source].site,
                        draft.site,
                        draft.operands[i],
                        value in self.handed_on,
                        self.handed_on.get(value) in made.stays,
                        self.reduced_in.get(value, 0),
                        value in self.handed_on and value not in self.casts and value is not self.handed_on[value],
                    )
                )
                ends.append((value, key[0] if isinstance(key, tuple) else key))
        return edges, ends

    def _supported(self, sites: Sequence[Site], edges: Sequence[Edge]) -> list[np.ndarray]:
        """Of each site the choices for which every neighbour has one that goes with it, among those that have such
        neighbours themselves.
        """
        alive = [np.isfinite(s.seconds) for s in sites]
        possible = {id(e.seconds): np.isfinite(e.seconds) for e in edges}
        waiting = True
        while waiting:
            waiting = False
            for order in (edges, edges[::-1]):
                for e in order:
                    table, source, target = possible[id(e.seconds)], alive[e.source], alive[e.target]
                    leaves, arrives = np.zeros(table.shape[0], bool), np.zeros(table.shape[1], bool)
                    leaves[e.given_by[source]], arrives[e.taken_by[target]] = True, True
                    table = table & leaves[:, None] & arrives[None, :]
                    for at, kept in (
                        (e.source, source & table.any(1)[e.given_by]),
                        (e.target, target & table.any(0)[e.taken_by]),
                    ):
                        if not kept.any():
                            raise BadConstraint("no choices go together", at=sites[at].name, advice="pin fewer things")
                        if kept.sum() < alive[at].sum():
                            alive[at], waiting = kept, True
        return alive

    def _narrowed(self, site: Site, keep: np.ndarray) -> Site:
        """The site with these choices alone; the same objects for sites that are alike and pinned alike."""
        key = (id(site.choices), id(site.seconds), keep.tobytes())
        if key not in self._kept:
            kept = np.flatnonzero(keep)
            self._kept[key] = replace(
                site,
                choices=tuple(site.choices[i] for i in kept),
                seconds=site.seconds[kept],
                regathered=tuple(site.regathered[i] for i in kept) if site.regathered else (),
                scattered=tuple(site.scattered[i] for i in kept) if site.scattered else (),
                compute=tuple(part[kept] for part in site.compute),
            )
        like = self._kept[key]
        return replace(
            site,
            choices=like.choices,
            seconds=like.seconds,
            regathered=like.regathered,
            scattered=like.scattered,
            compute=like.compute,
        )

    # -- rules fitted to calls, and the blocks that values may be cut by

    def _bind_all(self) -> None:
        from autopar.graph.graph import info

        self.bindings: dict[fx.Node, Binding | None] = {}
        self.tensors: dict[
            fx.Node, tuple[fx.Node, ...]
        ] = {}  # the tensor operands of each op, in order: those that its rule gives dims to
        known: dict[int, tuple[Binding | None, tuple[int, ...]]] = {}
        for node in self.graph.nodes:
            if info(node).kind == "op":
                given = node.target.operands(node.kwargs)
                kind = self.kinds[node]
                if kind not in known:
                    known[kind] = self._bind(node, given), tuple(i for i, n in enumerate(given) if hasattr(n, "meta"))
                self.bindings[node], places = known[kind]
                self.tensors[node] = tuple([given[i] for i in places])

    def _bind(self, node: fx.Node, given: Sequence[Any]) -> Binding | None:
        from autopar.graph.graph import info, op_name, type_of

        about = info(node)
        rule = rule_of(op_name(node), {**typed(node.kwargs), "outputs": about.outputs})
        present = [n for n in given if hasattr(n, "meta")]
        if rule is None:
            if self.strict and present:
                raise NoRule(
                    f"autopar has no sharding rule for {op_name(node)}",
                    at=about.source,
                    seen=", ".join(f"{n.name}: {type_of(n)}" for n in present),
                    advice=(
                        f'autopar.rule("{op_name(node)}", LINE), whose LINE says which dims may be cut: docs/rules.md'
                    ),
                )
            return None
        shapes = tuple(None if n is None else type_of(n).shape if hasattr(n, "meta") else () for n in given)
        try:
            binding = _without_numbers(rule.bind(shapes, [t.shape for t in about.outputs]), given)
        except BadRule as e:
            raise BadRule(f"{op_name(node)}: {e.what}", at=about.source, seen=e.seen) from e
        # a sum of truth values is an or, and whole numbers wrap: no parts of sums
        return binding if all("float" in t.dtype for t in about.outputs) else replace(binding, groups=())

    def _spread_blocks(self) -> None:
        """Where several values stand end to end in one dim, that dim may be cut by blocks.

        So may every dim that is the same factor
        of some op, up and down the graph: a fused weight learns from the split behind it that it may be cut by heads.
        """
        self.blocks: dict[tuple[fx.Node, int], set[tuple[int, ...]]] = {}
        self.joints: dict[int, tuple[_Joint, ...]] = {}  # by kind of call
        for node, binding in self.bindings.items():
            if binding is not None and self.kinds[node] not in self.joints:
                self.joints[self.kinds[node]] = _joints(node, binding)
        if not any(joint.blocks for joints in self.joints.values() for joint in joints):
            return
        meets: dict[tuple[fx.Node, int], list[list[tuple[fx.Node, int]]]] = {}
        for node, binding in self.bindings.items():
            if binding is None:
                continue
            held = (*self.tensors[node], *outputs_of(node))
            for joint in self.joints[self.kinds[node]]:
                places = [(value, dim) for at, dim in joint.places if (value := held[at]) is not None]
                if joint.blocks:
                    for place in places:
                        self.blocks.setdefault(place, set()).update(joint.blocks)
                elif joint.passes_on:
                    for place in places:
                        meets.setdefault(place, []).append(places)
        waiting = [place for place, blocks in self.blocks.items() if blocks]
        while waiting:
            place = waiting.pop()
            for held_ in meets.get(place, ()):
                for other in held_:
                    if not self.blocks[place] <= self.blocks.setdefault(other, set()):
                        self.blocks[other] |= self.blocks[place]
                        waiting.append(other)

    def _blocks_of_factors(
        self, node: fx.Node, binding: Binding
    ) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
        if not self.blocks:
            return ()
        held = (*self.tensors[node], *outputs_of(node))
        found: dict[str, set[tuple[int, ...]]] = {}
        for joint in self.joints[self.kinds[node]]:
            if joint.factor:
                for at, dim in joint.places:
                    if held[at] is not None and (blocks := self.blocks.get((held[at], dim))):
                        found.setdefault(joint.factor, set()).update(blocks)
        return tuple((f, tuple(sorted(b))) for f, b in sorted(found.items()))

    # -- choices

    def _draft(self, node: fx.Node) -> list[tuple[Any, _Draft]]:
        from autopar.graph.graph import info

        about = info(node)
        if about.kind == "parameter":
            return [(node, _Draft(self._parameter(node)))]
        if about.kind in ("input", "buffer"):
            whole = self._cross((Strategy((), (flow(R),)),), {})
            return [(node, _Draft(Site(about.key, about.kind, about.kind, whole, np.zeros(1))))]
        if about.kind == "output":
            leaves = enumerate(zip(node.args[0], about.outputs, self.graph.result_names, strict=True))
            return [
                ((node, i), _Draft(self._output(i, name, t), (source,), (self._arriving(i, t),)))
                for i, (source, t, name) in leaves
            ]
        return [(node, self._op(node))] if about.kind == "op" else []

    def _cross(self, per_axis: tuple[Strategy, ...], sizes: dict[str, int]) -> tuple[Choice, ...]:
        key = (per_axis, tuple(s.cut for s in per_axis), tuple(sizes.items()))
        if key not in self._crossed:
            self._crossed[key] = cross(per_axis, sizes, self.mesh)
        return self._crossed[key]

    def _parameter(self, node: fx.Node) -> Site:
        from autopar.graph.graph import info, type_of

        name, type_ = info(node).key, type_of(node)
        even = {
            d: {b for b in self.blocks.get((node, d), ()) if len(set(b)) == 1} for d in range(len(type_.shape))
        }  # what torch's placements can state
        key = (type_, tuple(tuple(sorted(b)) for b in even.values()))
        if key not in self._stored:
            choices = self._cross(
                storage_strategies(type_.shape, even), {f"dim{d}": n for d, n in enumerate(type_.shape)}
            )
            choices = tuple(c for c in choices if _torch_can_state(values(c.output())))
            moved = optimizer_figures(self.optimizer, type_.itemsize)["moved"] if type_.requires_grad else 0
            local = (
                np.array([math.prod(largest_local_shape(type_.shape, values(c.output()), self.mesh)) for c in choices])
                * type_.itemsize
            )
            timed = self.cluster.times_of(f"optimizer {self.optimizer}", type_.dtype)
            step = (
                measured_seconds(timed.forward, local / type_.itemsize)
                if timed and moved
                else local * moved / self.cluster.device.memory_bytes_per_s
            )
            self._stored[key] = Site(name, "parameter", "parameter", choices, step, bytes=type_.nbytes)
        site = replace(self._stored[key], name=name)
        return site if node in self.casts.values() else self._with_policies(site, type_)

    def _with_policies(self, site: Site, type_: TensorType) -> Site:
        """A parameter, or its one cast: what is cut stands once for each policy.

        Its gathered copy is kept, or made again; its gradient is reduced at the end of several micro-batches, or in
        each.
        """
        key = id(site.choices), id(site.seconds), type_.requires_grad
        if key not in self._policies:
            cut = [i for i, c in enumerate(site.choices) if any(p.is_shard for p in values(c.output()).placements)]
            policies = [
                (again, each)
                for again in ((False, True) if self.regather else (False,))
                for each in ((False, True) if self.accumulation > 1 and type_.requires_grad else (False,))
            ]
            places = [*range(len(site.choices)), *(i for _ in policies[1:] for i in cut)]
            marks = [*[policies[0]] * len(site.choices), *(policy for policy in policies[1:] for _ in cut)]
            again, each = zip(*marks, strict=True)
            self._policies[key] = (
                site,
                replace(
                    site,
                    choices=tuple(site.choices[i] for i in places),
                    seconds=site.seconds[places],
                    compute=tuple(part[places] for part in site.compute),
                    regathered=again if any(again) else (),
                    scattered=each if any(each) else (),
                ),
            )
        like = self._policies[key][1]
        return replace(
            site,
            choices=like.choices,
            seconds=like.seconds,
            compute=like.compute,
            regathered=like.regathered,
            scattered=like.scattered,
        )

    def _arriving(self, i: int, type_: TensorType) -> TensorType:
        """An output beside a loss leaves without a gradient."""
        return replace(type_, requires_grad=i in self.differentiable)

    def _output(self, i: int, name: str, type_: TensorType) -> Site:
        """What gradients arrive at leaves whole, and everything where there is no loss.

        Other outputs leave as they lie.
        """
        changes = i >= len(self.graph.output_names)  # the new value of a buffer, which is whole everywhere
        free = self.graph.loss is not None and i not in (self.graph.loss, *self.differentiable) and not changes
        stored = storage_strategies(type_.shape) if free else storage_strategies(())
        per_axis = tuple(Strategy(s.outputs, (), s.cut) for s in stored)
        choices = self._cross(per_axis, {f"dim{d}": n for d, n in enumerate(type_.shape)})
        return Site(f"out.{name}", "output", "update" if changes else "output", choices, np.zeros(len(choices)))

    def _op(self, node: fx.Node) -> _Draft:
        from autopar.graph.graph import info, op_name, type_of

        about, binding, operands = info(node), self.bindings[node], self.tensors[node]
        blocks = self._blocks_of_factors(node, binding) if binding else ()
        key = (
            self.kinds[node],
            blocks,
            node in self.copied,
            len(node.users) if self.cluster.timed and op_name(node) == "identity" else 0,
        )
        if key not in self._sites:
            self._sites[key] = self._new_site(node, dict(blocks))
        like = self._sites[key]
        site = Site(
            about.key,
            like.op,
            "op",
            like.choices,
            like.seconds,
            about.source,
            like.has_rule,
            suspected=like.suspected,
            compute=like.compute,
        )
        return _Draft(
            self._with_policies(site, type_of(node)) if node in self.casts else site,
            operands,
            tuple([type_of(n) for n in operands]),
        )

    def _new_site(self, node: fx.Node, blocks: Mapping[str, Collection[tuple[int, ...]]]) -> Site:
        from autopar.graph.graph import info, op_name, type_of

        about, binding = info(node), self.bindings[node]
        given = node.target.operands(node.kwargs)
        types = tuple(type_of(n) for n in self.tensors[node])
        wants, gives = (
            [hasattr(n, "meta") and type_of(n).requires_grad for n in given],
            [t.requires_grad for t in about.outputs],
        )
        if binding:
            per_axis, sizes = strategies_on_one_axis(binding, wants, gives, blocks), binding.sizes
        else:  # nobody has proven anything of it: every device computes the whole
            per_axis, sizes = replicated(len(types), [t.requires_grad for t in types], gives), {}
        choices = self._cross(per_axis, sizes)
        compute = self._compute_seconds(op_name(node), binding, sizes, choices, types, about.outputs, node)
        whole = (
            (compute[0] + compute[1] + self._inside_seconds(binding, choices, about.outputs)) * self.accumulation
            if compute
            else np.zeros(len(choices))
        )
        has_rule = binding is not None or not types
        is_opaque = (
            not has_rule and about.random < 0 and op_name(node).startswith(("ops.", "function "))
        )  # nobody's but the user's
        line = suspected(node.target, typed(node.kwargs), types, about.outputs) if is_opaque else ""
        return Site(
            about.key, op_name(node), "op", choices, whole, about.source, has_rule, suspected=line, compute=compute
        )

    def _compute_seconds(
        self,
        op: str,
        binding: Binding | None,
        sizes: Mapping[str, int],
        choices: Sequence[Choice],
        operands: Sequence[TensorType],
        outputs: Sequence[TensorType],
        node: fx.Node,
    ) -> tuple[np.ndarray, ...]:
        """Forward and backward on the fullest device; nothing of what is free.

        Without a rule, every device does everything. Where ops were measured, that is what they take.
        """
        is_timed = (
            self.cluster.times_of("add", outputs[0].dtype if "float" in outputs[0].dtype else "float32") is not None
        )
        facts = facts_of(op)
        if facts.free and not is_timed:
            return ()
        device = self.cluster.device
        per_point, unlooped = facts.flops or (1.0, "")
        loops = [f for f in sizes if not re.fullmatch(unlooped, f)] if facts.flops and binding else None
        points, moved = np.empty(len(choices)), np.empty(len(choices))
        for i, choice in enumerate(choices):
            ends = [(t, choice.operand(k)) for k, t in enumerate(operands)] + [
                (t, choice.output(k)) for k, t in enumerate(outputs)
            ]
            held = [
                (math.prod(largest_local_shape(t.shape, values(flows), self.mesh)), t.itemsize) for t, flows in ends
            ]
            moved[i] = sum(n * itemsize for n, itemsize in held)
            points[i] = (
                max((n for n, _ in held), default=0)
                if loops is None
                else math.prod(self._local_sizes(choice, sizes)[f] for f in loops)
            )
        if is_timed:
            return self._timed_seconds(op, node, choices, per_point * points, moved, operands, outputs)
        trained = sum(t.requires_grad for t in operands)
        backward = trained if facts.flops else min(trained, 1)
        rate = device.rate(outputs[0].dtype)
        run = seconds(
            "compute",
            flops=per_point * points,
            bytes=moved,
            rate=rate,
            bandwidth=device.memory_bytes_per_s,
            launch=device.launch_s,
        )
        return run, run * backward

    def _timed_seconds(
        self,
        op: str,
        node: fx.Node,
        choices: Sequence[Choice],
        amounts: np.ndarray,
        moved: np.ndarray,
        operands: Sequence[TensorType],
        outputs: Sequence[TensorType],
    ) -> tuple[np.ndarray, ...]:
        """Forward and backward as they were measured, by the amounts that choices leave to a device.

        FLOPs of products, elements of the largest tensor of other ops.
        """

        def times(name: str) -> Timed | None:
            return self.cluster.times_of(name, "float32")

        def curve(name: str, given: np.ndarray, back: bool = False) -> np.ndarray:
            found = times(name) or times("add")
            assert found is not None  # or ops would not be priced by tables
            return measured_seconds(found.backward if back else found.forward, given)

        made = np.array(
            [math.prod(largest_local_shape(outputs[0].shape, values(c.output()), self.mesh)) for c in choices], float
        )
        trained, nothing = [t for t in operands if t.requires_grad], np.zeros(len(choices))
        if op == "identity":  # the gradients of its uses are added
            return nothing, (len(node.users) - 1) * curve("add", made) if trained else nothing
        facts, name = facts_of(op), timed_name(op, node.kwargs)
        found = times(name) or times(op)
        if facts.free and found is None:  # a view, but where it cannot be one
            return (curve("copy turned", made), nothing) if node in self.copied else ()
        if found is None:  # nobody measured it: it reads and writes as a sum of two does
            run = curve("add", moved / 12)
            return run, run if trained else nothing
        forward, back = measured_seconds(found.forward, amounts), measured_seconds(found.backward, amounts)
        as_cut = (
            op if name == f"{op} causal" else f"{op} cut"
        )  # the last part of causal attention sees nearly all keys: it takes as long as without a mask
        if facts.counts and times(as_cut):
            is_cut = np.array(
                [
                    any(s.cut and any(re.fullmatch(facts.counts, f) for f in s.cut.factors) for s in c.strategies)
                    for c in choices
                ]
            )
            forward, back = (
                np.where(is_cut, curve(as_cut, amounts), forward),
                np.where(is_cut, curve(as_cut, amounts, True), back),
            )
        if facts.flops and not facts.joint:
            matrices = [t for t in trained if len(t.shape) > 1]
            return forward, len(matrices) * back + (len(trained) - len(matrices)) * curve(
                "sum over rows", made
            )  # of a bias: a sum
        if facts.spreads and not name.endswith("number"):
            broadcast = sum(math.prod(t.shape) < math.prod(outputs[0].shape) for t in trained)
            return forward, len(trained) * back + broadcast * curve("sum over rows", made)
        return forward, back if trained else nothing

    def _local_sizes(self, choice: Choice, sizes: Mapping[str, int]) -> dict[str, int]:
        """The factors' sizes on the fullest device."""
        local = dict(sizes)
        for strategy, n in zip(choice.strategies, self.mesh.shape, strict=True):
            for factor in strategy.cut.factors if strategy.cut else ():
                local[factor] = part(local[factor], n, 0)[1]
        return local

    def _inside_seconds(
        self, binding: Binding | None, choices: Sequence[Choice], outputs: Sequence[TensorType]
    ) -> np.ndarray | float:
        """What local forms exchange themselves: two sums of each factor that is left, forward and again backward."""
        if binding is None or not binding.inside:
            return 0.0
        left = math.prod(n for f, n in binding.sizes.items() if f not in binding.inside)
        exchanges = 2 * (1 + any(t.requires_grad for t in outputs))
        price = [
            step_seconds(
                "all_reduce",
                self.cluster.levels(self.mesh, a, "all_reduce"),
                left * outputs[0].itemsize,
                self.cluster.device,
            )
            for a in range(len(self.mesh.shape))
        ]
        return np.array(
            [
                sum(exchanges * price[a] for a, s in enumerate(c.strategies) if s.cut and binding.is_inside(s.cut))
                for c in choices
            ]
        )

    # -- conversions

    def _edge(
        self,
        source_index: int,
        port: int,
        target_index: int,
        operand: int,
        source: Site,
        target: Site,
        type_: TensorType,
        floats: bool,
        stays: bool,
        reduced_in: int,
        handed_on: bool,
    ) -> Edge:
        key = (
            id(source.choices),
            port,
            id(target.choices),
            operand,
            type_,
            source.regathered,
            source.scattered,
            floats,
            stays,
            reduced_in,
            handed_on,
        )
        like = self._edges.get(key)
        if like is None:
            like = self._edges[key] = self._new_edge(
                port, operand, source, target, type_, floats, stays, reduced_in, handed_on
            )
        return Edge(
            source_index,
            target_index,
            operand,
            like.given,
            like.taken,
            like.given_by,
            like.taken_by,
            like.seconds,
            like.shape,
            like.itemsize,
            like.has_gradient,
            like.back,
            like.reduced_in,
        )

    def _new_edge(
        self,
        port: int,
        operand: int,
        source: Site,
        target: Site,
        type_: TensorType,
        floats: bool,
        stays: bool,
        reduced_in: int,
        handed_on: bool,
    ) -> Edge:
        given, given_by = self._end(source.choices, port, Choice.output, bool(source.regathered or source.scattered))
        taken, taken_by = self._end(target.choices, operand, Choice.operand)
        key = (id(given), id(taken), type_, source.regathered, source.scattered, floats, stays, reduced_in, handed_on)
        if key not in self._tables:
            forward = self.conversions.table(
                type_.shape, type_.itemsize, [values(f) for f in given], [values(f) for f in taken]
            )
            if not floats:
                forward = np.where(self._against_habit(given, taken), np.inf, forward)
            backward, cast = np.zeros(forward.shape), np.zeros(forward.shape)
            if type_.requires_grad:
                back = functools.partial(
                    (self.reductions if floats else self.conversions).table,
                    type_.shape,
                    sources=[gradients(f) for f in taken],
                    targets=[gradients(f) for f in given],
                )
                backward = back(type_.itemsize).T
                if reduced_in:
                    is_sum = reduces(taken, given).T
                    backward = np.where(is_sum, back(reduced_in).T, backward)
                    cast = np.where(is_sum, self._cast_seconds(type_, taken, reduced_in), 0.0)
                elif floats and self.reduce not in ("", type_.dtype):
                    backward = np.where(reduces(taken, given).T, np.inf, backward)
            batches, gathers, reductions = self.accumulation, np.ones(len(given)), np.ones(len(given))
            if source.regathered:  # forward and backward of each micro-batch
                gathers[np.array(source.regathered)] = batches if stays else 2 * batches
            if source.scattered:
                reductions[np.array(source.scattered)] = batches
            elif (
                handed_on
            ):  # whether it waits is not known here: what is reduced behind the parameter's own edge may be so in each
                reductions[:] = batches
            both = (
                forward * gathers[:, None] + backward * reductions[:, None] + cast * batches
                if floats
                else (forward + backward) * batches
            )
            self._tables[key] = both
            self._both_ways[id(both)] = (
                np.where(np.isfinite(both), forward, 0.0),
                np.where(np.isfinite(both), backward, 0.0),
            )
        return Edge(
            0,
            0,
            operand,
            given,
            taken,
            given_by,
            taken_by,
            self._tables[key],
            type_.shape,
            type_.itemsize,
            type_.requires_grad,
            self.reductions if floats else None,
            reduced_in,
        )

    def _cast_seconds(self, type_: TensorType, taken: Sequence[Flows], itemsize: int) -> np.ndarray:
        """Seconds of casting a gradient as it comes to the dtype in which it is reduced.

        In line, as it is no communication.
        """
        elements = np.array(
            [math.prod(largest_local_shape(type_.shape, gradients(f), self.mesh)) for f in taken], float
        )
        return elements * (type_.itemsize + itemsize) / self.cluster.device.memory_bytes_per_s

    def _against_habit(self, given: Sequence[Flows], taken: Sequence[Flows]) -> np.ndarray:
        """Where a value would move as no expert of the preset moves it, though it could move as they do."""
        found: np.ndarray = np.zeros((len(given), len(taken)), dtype=bool)
        for axis, habit in self.constraints.habits:
            leaves, arrives = (
                np.array([is_so(values(f).placements[axis]) for f in side])
                for is_so, side in zip(HABITS[habit], (given, taken), strict=True)
            )
            if arrives.any():
                found |= leaves[:, None] & ~arrives[None, :]
        return found

    def _ways(self, edge: Edge) -> tuple[np.ndarray, np.ndarray]:
        """The seconds of an edge's conversion forward and backward, each once; none where it leads nowhere."""
        return self._both_ways[id(edge.seconds)]

    def _end(
        self, choices: tuple[Choice, ...], i: int, flows_of: Callable[[Choice, int], Flows], apart: bool = False
    ) -> tuple[tuple[Flows, ...], np.ndarray]:
        """What may leave or arrive at one end, once each; the same objects for the same choices.

        `apart`: each choice by itself.
        """
        key = (id(choices), i, flows_of)
        if key not in self._ends:
            flows = [flows_of(c, i) for c in choices]
            self._ends[key] = (
                choices,
                *((tuple(flows), np.arange(len(flows))) if apart else _distinct(flows)),
            )  # the choices are held, so that their id stays theirs
        return self._ends[key][1:]

    # -- pins

    def _pin(self, drafts: dict[Any, _Draft]) -> None:
        from autopar.graph.graph import info

        if not self.constraints.pins:
            return
        last: dict[str, fx.Node] = {}  # what a module gives is what was computed last in it, its children included
        for n in self.graph.nodes:
            if info(n).kind == "op" and self.bindings[n] is not None and n.target.name != "identity":
                path = info(n).module
                while path:
                    last[path], path = n, path.rpartition(".")[0]
        paths: dict[fx.Node, list[str]] = {}
        for path, n in last.items():
            paths.setdefault(n, []).append(path)
        takers: dict[Any, list[tuple[_Draft, int]]] = {}
        for draft in drafts.values():
            for i, value in enumerate(draft.sources):
                takers.setdefault(source_of(value)[0], []).append((draft, i))
        for key, draft in drafts.items():
            site = draft.site
            if site.kind == "update":
                continue
            if site.kind == "output":
                if pins := self.constraints.of("out", site.name):
                    self._admit(draft, 0, pins.use)
                continue
            about = info(key)
            names = about.names or (site.name,) if site.kind != "op" else tuple(paths.get(key, ()))
            pins = (
                self.constraints.of(*names, is_parameter=site.kind == "parameter", is_module=site.kind == "op")
                if names
                else None
            )
            if not pins:
                continue
            uses = takers.get(key, [])
            if site.kind == "parameter":
                self._admit(draft, None, pins.storage)
                self._follow(draft, pins)
                for taker, i in uses:
                    self._follow(taker, pins)
                    if (
                        pins.gather == "regathered" or pins.reduce == "each"
                    ) and taker.site.op == "to":  # policies are of what is cut: what moves is the cast
                        self._admit(taker, i, pins.storage)
                uses = self._uses(drafts, takers, uses)
            for taker, i in uses:
                if taker.site.kind not in ("output", "update"):  # outputs have a word of their own
                    self._admit(taker, i, pins.use)
        modules = sorted(last)
        self.constraints.check_all_used([*self.graph.parameters, *self.graph.inputs, *modules, "out"])

    @staticmethod
    def _follow(draft: _Draft, pins: Pins) -> None:
        """Leave the choices of the pinned policy; what is not cut has none."""
        if not pins.gather and not pins.reduce:
            return
        keep = draft.keep if draft.keep is not None else np.ones(len(draft.site.choices), bool)
        whole = np.array([not any(p.is_shard for p in values(c.output()).placements) for c in draft.site.choices])
        for said, marks in (
            (pins.gather and pins.gather == "regathered", draft.site.regathered),
            (pins.reduce and pins.reduce == "each", draft.site.scattered),
        ):
            if said != "" and marks:
                keep = keep & (whole | (np.array(marks) == said))
        draft.keep = keep

    def _uses(
        self, drafts: dict[Any, _Draft], takers: Mapping[Any, list[tuple[_Draft, int]]], uses: list[tuple[_Draft, int]]
    ) -> list[tuple[_Draft, int]]:
        """The uses of a parameter: through fan-outs, and through a cast, which is no use itself."""
        found = []
        for d, i in uses:
            found += [] if d.site.op == "to" else [(d, i)]
            if d.site.op in ("identity", "to"):
                found += self._uses(drafts, takers, takers.get(_key_of(drafts, d), []))
        return found

    def _admit(self, draft: _Draft, operand: int | None, pin: Pin) -> None:
        """Leave the choices whose flow at this end is as pinned."""
        if pin.value is None and pin.gradient is None:  # any
            return
        site, before = draft.site, draft.keep if draft.keep is not None else np.ones(len(draft.site.choices), bool)
        flows: list[Flows] = [c.output() if operand is None else c.operand(operand) for c in site.choices]
        draft.keep = before & np.array([pin.admits(f) for f in flows])
        if not draft.keep.any():
            end = "as it is stored" if operand is None else f"as operand {operand} of {site.op}"
            legal = sorted(
                {values(f).text(self.mesh.axes) for f, possible in zip(flows, before, strict=True) if possible}
            )
            raise BadConstraint(
                f"nothing satisfies {pin.text!r} at {site.name}, {end}",
                at=site.source,
                seen="what is pinned elsewhere leaves " + "; ".join(legal[:12]),
                advice="one of these, or pin fewer of its neighbours",
            )


@dataclass(frozen=True, slots=True)
class _Joint:
    """Dims of a call's values that blocks concern together: those of one factor, or one that has blocks of its own."""

    places: tuple[tuple[int, int], ...]  # which of the operands with dims, then outputs; and which dim
    factor: str = ""  # that may be cut by blocks
    passes_on: bool = False
    blocks: tuple[tuple[int, ...], ...] = ()


def _joints(node: fx.Node, binding: Binding) -> tuple[_Joint, ...]:
    own, single, passed = list[_Joint](), dict[str, list[tuple[int, int]]](), dict[str, list[tuple[int, int]]]()
    for at, row in enumerate(binding.rows):
        for i, dim in enumerate(row):
            if dim.joined == "|":
                own.append(_Joint(((at, i),), blocks=(tuple(binding.sizes[f] for f in dim.factors),)))
            elif dim.joined == "*":
                if blocks := tuple(b for f in dim.factors if f in binding.minor and (b := binding.blocks_of(dim, f))):
                    own.append(_Joint(((at, i),), blocks=blocks))
            elif dim.factors:
                passed.setdefault(dim.factor, []).append((at, i))
            if len(dim.factors) == 1 and not _counts(node, dim.factor):
                single.setdefault(dim.factor, []).append((at, i))
    joined = {f for row in binding.rows for dim in row if dim.joined for f in dim.factors}
    spread = [
        _Joint(tuple(places), passes_on=True)
        for f, places in passed.items()
        if f not in joined and f not in binding.whole and not _counts(node, f)
    ]
    return (*own, *(_Joint(tuple(places), f) for f, places in single.items()), *spread)


def _counts(node: fx.Node, factor: str) -> bool:
    """Does the op's local form count positions along this factor? What draws counts along all."""
    from autopar.graph.graph import info

    return info(node).random >= 0 or re.fullmatch(facts_of(node.target.name).counts or "$.", factor) is not None


def _torch_can_state(sharding: Sharding) -> bool:
    """Can a DTensor hold it? Blocks of one size are torch's strided shard.

    Where two axes cut a dim so, its full_tensor() would be permuted.
    """
    return all(
        len(axes) == 1 or not any(sharding.placements[a].blocks for a in axes) for axes in sharding.cuts.values()
    )


def source_of(value: fx.Node) -> tuple[fx.Node, int]:
    """The op that gives a value, and as which of its outputs."""
    from autopar.graph.graph import info

    return (value.args[0], value.args[1]) if info(value).kind == "part" else (value, 0)


def outputs_of(node: fx.Node) -> list[fx.Node | None]:
    """The values that an op gives, in order; None where nobody uses one."""
    from autopar.graph.graph import info

    if len(info(node).outputs) == 1 and not any(info(u).kind == "part" for u in node.users):
        return [node]
    parts = {u.args[1]: u for u in node.users if info(u).kind == "part"}
    return [parts.get(i) for i in range(len(info(node).outputs))]


def _copies(graph: Graph) -> frozenset[fx.Node]:
    """The ops that show their operand's memory elsewhere, and cannot here."""
    from autopar.graph.graph import info, op_name

    memory = memories(graph)
    return frozenset(
        n
        for n in graph.nodes
        if info(n).kind == "op"
        and facts_of(op_name(n)).free
        and not any(memory[n] == memory[a] for a in n._input_nodes)
        and not any(info(u).kind == "part" for u in n.users)
    )


def _key_of(drafts: dict[Any, _Draft], draft: _Draft) -> Any:
    return next(key for key, d in drafts.items() if d is draft)


def _without_numbers(binding: Binding, given: Sequence[Any]) -> Binding:
    """A number is R on every device: it takes part in no joint linearity, and needs no flow."""
    numbers = {i for i, n in enumerate(given) if n is not None and not hasattr(n, "meta")}
    rows = tuple(None if i in numbers else row for i, row in enumerate(binding.operands))
    return replace(binding, operands=rows, groups=tuple(g for g in binding.groups if not g & numbers))


def _distinct(flows: Sequence[Flows]) -> tuple[tuple[Flows, ...], np.ndarray]:
    """Each of the flows once, and where each stands."""
    seen: dict[Flows, int] = {}
    where = np.array([seen.setdefault(f, len(seen)) for f in flows])
    return tuple(seen), where
