"""Graph -> Space: every legal choice of every node, every conversion of every edge, each with its seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.letters import BadConstraint, BadRule, NoRule
from autopar.sharding.cluster import Cluster
from autopar.sharding.constraints import Constraints, Pin
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.costs import CONTRACTIONS, FLOPS_PER_POINT, OPTIMIZERS, seconds
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import Binding
from autopar.sharding.placement import R, flow, largest_local_shape, part
from autopar.sharding.rules import rule_of
from autopar.sharding.space import Edge, Flows, Site, Space
from autopar.sharding.strategies import Choice, Strategy, cross, gradients, replicated, storage_strategies, strategies_on_one_axis, values

if TYPE_CHECKING:
    import torch.fx as fx

    from autopar.tracer.graph import Graph, TensorType


def shardings(graph: Graph, mesh: DeviceMesh, cluster: Cluster, constraints: Mapping[str, Any] | None = None, optimizer: str = "adamw", strict: bool = False) -> Space:
    """Every legal way to run `graph` on `mesh`, priced on `cluster`, less what `constraints` forbid."""
    return _Builder(graph, mesh, cluster, Constraints(constraints, mesh), optimizer, strict).build()


@dataclass(eq=False)
class _Draft:
    """A site while it is being pinned, and the edges that enter it."""

    site: Site
    sources: tuple[fx.Node, ...] = ()                          # of its tensor operands, in order
    operands: tuple[TensorType, ...] = ()
    keep: np.ndarray | None = None                             # which choices the pins leave


class _Builder:
    def __init__(self, graph: Graph, mesh: DeviceMesh, cluster: Cluster, constraints: Constraints, optimizer: str, strict: bool) -> None:
        self.graph, self.mesh, self.cluster, self.constraints, self.optimizer, self.strict = graph, mesh, cluster, constraints, optimizer, strict
        self.conversions = ShapeConsistencyManager(mesh, cluster)
        self._crossed: dict[Any, tuple[Choice, ...]] = {}

    def build(self) -> Space:
        drafts: dict[Any, _Draft] = {}
        for node in self.graph.nodes:
            for key, draft in self._draft(node):
                drafts[key] = draft
        self._pin(drafts)
        for draft in drafts.values():
            if draft.keep is not None:
                kept = np.flatnonzero(draft.keep)
                draft.site = replace(draft.site, choices=tuple(draft.site.choices[i] for i in kept), seconds=draft.site.seconds[kept])
        index = {key: i for i, key in enumerate(drafts)}
        edges = [
            self._edge(index[source], index[key], i, drafts[source].site, draft.site, draft.operands[i])
            for key, draft in drafts.items() for i, source in enumerate(draft.sources)
        ]
        return Space(self.mesh, self.cluster, tuple(d.site for d in drafts.values()), tuple(edges), self.conversions, self.graph.digest, self.optimizer)

    # -- choices

    def _draft(self, node: fx.Node) -> list[tuple[Any, _Draft]]:
        from autopar.tracer.graph import info

        about = info(node)
        if about.kind == "parameter":
            return [(node, _Draft(self._parameter(about.key, about.outputs[0])))]
        if about.kind in ("input", "buffer"):
            whole = self._cross((Strategy((), (flow(R),)),), {})
            return [(node, _Draft(Site(about.key, about.kind, about.kind, whole, np.zeros(1))))]
        if about.kind == "output":
            leaves = enumerate(zip(node.args[0], about.outputs, self.graph.output_names, strict=True))   # type: ignore[arg-type]
            return [((node, i), _Draft(self._output(i, name, t), (source,), (self._arriving(i, t),))) for i, (source, t, name) in leaves]
        return [(node, self._op(node))]

    def _cross(self, per_axis: tuple[Strategy, ...], sizes: dict[str, int]) -> tuple[Choice, ...]:
        key = (per_axis, tuple(s.factor for s in per_axis), tuple(sizes.items()))
        if key not in self._crossed:
            self._crossed[key] = cross(per_axis, sizes, self.mesh)
        return self._crossed[key]

    def _parameter(self, name: str, type_: TensorType) -> Site:
        choices = self._cross(storage_strategies(type_.shape), {f"dim{d}": n for d, n in enumerate(type_.shape)})
        device = self.cluster.device
        moved = OPTIMIZERS[self.optimizer]["moved"] if type_.requires_grad else 0
        local = np.array([math.prod(largest_local_shape(type_.shape, values(c.output()), self.mesh)) for c in choices]) * type_.itemsize
        step = local * moved / device.memory_bytes_per_s
        return Site(name, "parameter", "parameter", choices, step, bytes=type_.nbytes)

    def _arriving(self, i: int, type_: TensorType) -> TensorType:
        """An output beside a loss leaves without a gradient."""
        return replace(type_, requires_grad=type_.requires_grad and self.graph.loss in (None, i))

    def _output(self, i: int, name: str, type_: TensorType) -> Site:
        """The loss, and everything where there is none, leaves whole; other outputs leave as they lie."""
        free = self.graph.loss is not None and self.graph.loss != i
        stored = storage_strategies(type_.shape) if free else storage_strategies(())
        per_axis = tuple(Strategy(s.outputs, (), s.factor) for s in stored)
        choices = self._cross(per_axis, {f"dim{d}": n for d, n in enumerate(type_.shape)})
        return Site(f"out.{name}", "output", "output", choices, np.zeros(len(choices)))

    def _op(self, node: fx.Node) -> _Draft:
        from autopar.tracer.graph import info, op_name, type_of

        about, op = info(node), node.target
        typed = {k: type_of(v) if hasattr(v, "meta") else v for k, v in node.kwargs.items()}
        given = op.operands(node.kwargs)                       # type: ignore[union-attr]
        rule = rule_of(op_name(node), typed)
        present = [n for n in given if hasattr(n, "meta")]
        wants, gives = [type_of(n).requires_grad if hasattr(n, "meta") else False for n in given], [t.requires_grad for t in about.outputs]
        if rule is None:
            if self.strict:
                raise NoRule(f"autopar has no sharding rule for {op_name(node)}", at=about.source, seen=", ".join(f"{n.name}: {type_of(n)}" for n in present),
                             advice=f'autopar.rule("{op_name(node)}", "... -> ...")')
            binding, per_axis = None, replicated(len(present), [type_of(n).requires_grad for n in present], gives)
        else:
            shapes = [None if n is None else type_of(n).shape if hasattr(n, "meta") else () for n in given]
            try:
                binding = rule.bind(shapes, [t.shape for t in about.outputs])
            except BadRule as e:
                raise BadRule(f"{op_name(node)}: {e.what}", at=about.source, seen=e.seen) from e
            binding = _without_numbers(binding, given)
            per_axis = strategies_on_one_axis(binding, wants, gives)
        choices = self._cross(per_axis, binding.sizes if binding else {})
        cost = self._op_seconds(op_name(node), binding, choices, [type_of(n) for n in present], about.outputs)
        site = Site(about.key, op_name(node), "op", choices, cost, about.source, rule is not None)
        return _Draft(site, tuple(present), tuple(type_of(n) for n in present))

    def _op_seconds(self, op: str, binding: Binding | None, choices: Sequence[Choice], operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> np.ndarray:
        """Forward and backward on the fullest device. Without a rule, every device does everything."""
        if op == "identity":
            return np.zeros(len(choices))
        device, sizes = self.cluster.device, binding.sizes if binding else {}
        points = np.empty(len(choices))
        moved = np.empty(len(choices))
        for i, choice in enumerate(choices):
            local = dict(sizes)
            for strategy, n in zip(choice.strategies, self.mesh.shape, strict=True):
                if strategy.factor:
                    local[strategy.factor] = part(local[strategy.factor], n, 0)[1]
            points[i] = math.prod(local.values()) if binding else max((math.prod(t.shape) for t in (*operands, *outputs)), default=0)
            ends = [(t, choice.operand(k)) for k, t in enumerate(operands)] + [(t, choice.output(k)) for k, t in enumerate(outputs)]
            moved[i] = sum(math.prod(largest_local_shape(t.shape, values(flows), self.mesh)) * t.itemsize for t, flows in ends)
        trained = sum(t.requires_grad for t in operands)
        backward = trained if op in CONTRACTIONS else min(trained, 1)
        per_point = FLOPS_PER_POINT.get(op, 1)
        rate = device.rate(outputs[0].dtype)
        run = seconds("compute", flops=per_point * points, bytes=moved, rate=rate, bandwidth=device.memory_bytes_per_s, launch=device.launch_s)
        return run * (1 + backward)

    # -- conversions

    def _edge(self, source_index: int, target_index: int, operand: int, source: Site, target: Site, type_: TensorType) -> Edge:
        given, given_by = _distinct([c.output() for c in source.choices])
        taken, taken_by = _distinct([c.operand(operand) for c in target.choices])
        forward = self.conversions.table(type_.shape, type_.itemsize, [values(f) for f in given], [values(f) for f in taken])
        if source.regathered:
            forward = 2 * forward
        backward: Any = 0.0
        if type_.requires_grad:
            backward = self.conversions.table(type_.shape, type_.itemsize, [gradients(f) for f in taken], [gradients(f) for f in given]).T
        return Edge(source_index, target_index, operand, given, taken, given_by, taken_by, forward + backward, type_.shape, type_.itemsize, type_.requires_grad)

    # -- pins

    def _pin(self, drafts: dict[Any, _Draft]) -> None:
        from autopar.tracer.graph import info

        last = {info(n).module: n for n in self.graph.nodes if info(n).kind == "op" and info(n).module and ":" not in info(n).key}
        takers: dict[Any, list[tuple[_Draft, int]]] = {}
        for draft in drafts.values():
            for i, source in enumerate(draft.sources):
                takers.setdefault(source, []).append((draft, i))
        for key, draft in drafts.items():
            site = draft.site
            if site.kind == "output":
                if pins := self.constraints.of("out", site.name):
                    self._admit(draft, 0, pins.use)
                continue
            about = info(key)
            module = about.module if last.get(about.module) is key else ""
            pins = self.constraints.of(*(about.names or (site.name,)), is_parameter=site.kind == "parameter") if site.kind != "op" else self.constraints.of(module) if module else None
            if not pins:
                continue
            uses = takers.get(key, [])
            if site.kind == "parameter":
                self._admit(draft, None, pins.storage)
                draft.site = replace(draft.site, regathered=pins.regathered)
                uses = uses + [further for d, _ in uses if d.site.op == "identity" for further in takers.get(_key_of(drafts, d), [])]
            for taker, i in uses:
                if taker.site.kind != "output":                # outputs have a word of their own
                    self._admit(taker, i, pins.use)
        modules = sorted(last)
        self.constraints.check_all_used([*self.graph.parameters, *self.graph.inputs, *modules, "out"])

    def _admit(self, draft: _Draft, operand: int | None, pin: Pin) -> None:
        """Leave the choices whose flow at this end is as pinned."""
        site, before = draft.site, draft.keep if draft.keep is not None else np.ones(len(draft.site.choices), bool)
        flows: list[Flows] = [c.output() if operand is None else c.operand(operand) for c in site.choices]
        draft.keep = before & np.array([pin.admits(f) for f in flows])
        if not draft.keep.any():
            end = "as it is stored" if operand is None else f"as operand {operand} of {site.op}"
            legal = sorted({values(f).text(self.mesh.axes) for f, possible in zip(flows, before, strict=True) if possible})
            raise BadConstraint(f"nothing satisfies {pin.text!r} at {site.name}, {end}", at=site.source, seen="what is pinned elsewhere leaves " + "; ".join(legal[:12]),
                                advice="one of these, or pin fewer of its neighbours")


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

