"""`Pinning`: removes choices that constraints forbid; `supported` then those that go with no choice of a neighbour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch.fx as fx

from autopar.graph.carried import brought_by
from autopar.graph.graph import Graph, info
from autopar.letters import BadConstraint, BadPreset
from autopar.once import Once
from autopar.sharding.attention_ways import ATTENTIONS, GATHER, RING, ULYSSES, way_of
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.strategies import values
from autopar.space.bindings import Bindings
from autopar.space.constraints import Constraints, Pin, Pins
from autopar.space.sites import Draft
from autopar.space.space import Edge, Flows, Site
from autopar.space.wiring import SiteKey, source_of


class _Taker(NamedTuple):
    """A site that takes a value, and the index of the operand there."""

    key: SiteKey
    draft: Draft
    operand: int


class Pinning:
    """Narrows the drafts of sites to what is pinned."""

    def __init__(self, graph: Graph, mesh: DeviceMesh, bindings: Bindings, constraints: Constraints) -> None:
        self.graph = graph
        self.axes = mesh.axes
        self.mesh = mesh
        self.brought = brought_by(graph)
        self.constraints = constraints
        self.last = _last_of_modules(graph, bindings)  # the value that each module gives, by path
        self.paths: dict[fx.Node, list[str]] = {}  # the modules that give each value
        for path, node in self.last.items():
            self.paths.setdefault(node, []).append(path)

    def pin(self, drafts: Mapping[SiteKey, Draft]) -> None:
        """Mark in every draft the choices that the pins admit."""
        uses: dict[SiteKey, list[_Taker]] = {}
        for key, draft in drafts.items():
            for i, value in enumerate(draft.sources):
                uses.setdefault(source_of(value)[0], []).append(_Taker(key, draft, i))
        for key, draft in drafts.items():
            pins = self._pins_of(key, draft.site)
            if pins is None:
                continue
            if draft.site.kind == "output":
                self._admit(draft, 0, pins.use)
                continue
            used = uses.get(key, [])
            if draft.site.name in self.brought:
                if pins.is_about_storage:
                    self._admit(draft, None, pins.storage)
            elif draft.site.kind == "parameter":
                self._pin_parameter(draft, used, pins)
                used = _uses_of_parameter(used, uses)
                if self.constraints.ways:  # Sinks are cut as the heads of their attention, which has a way to keep to.
                    used = [use for use in used if use.draft.site.op not in ATTENTIONS]
            for use in used:
                if use.draft.site.kind not in ("output", "update"):  # outputs have a word of their own
                    self._admit(use.draft, use.operand, _granted(use, pins))
        for key, draft in drafts.items():
            if draft.site.op in ATTENTIONS:
                for axis, way in self.constraints.ways:
                    self._keep_to_way(key, draft, axis, way)
        self.constraints.check_all_used([*self.graph.parameters, *self.graph.inputs, *sorted(self.last), "out"])

    def _pins_of(self, key: SiteKey, site: Site) -> Pins | None:
        if site.kind == "update":
            return None
        if site.kind == "output":
            return self.constraints.of("out", site.name)
        if site.kind == "op":
            paths = self.paths.get(key, ())
            return self.constraints.of(*paths, is_module=True) if paths else None
        names = info(key).names or (site.name,)
        return self.constraints.of(*names, is_parameter=site.kind == "parameter" or site.name in self.brought)

    def _pin_parameter(self, draft: Draft, uses: Sequence[_Taker], pins: Pins) -> None:
        """Pin the storage of a parameter, and its policies.

        Policies are of what is gathered, which is the cast where that moves.
        """
        self._admit(draft, None, pins.storage)
        _follow(draft, pins)
        is_cut = pins.gather == "regathered" or pins.reduce == "each"
        for use in uses:
            _follow(use.draft, pins)
            if is_cut and use.draft.site.op == "to":
                self._admit(use.draft, use.operand, pins.storage)

    def _admit(self, draft: Draft, operand: int | None, pin: Pin) -> None:
        """Keep the choices whose flow at an operand is as pinned; `operand` None means the site's own output."""
        if pin.value is None and pin.gradient is None:  # any
            return
        site = draft.site
        before = draft.left
        flows: list[Flows] = [c.output() if operand is None else c.operand(operand) for c in site.choices]
        draft.keep = before & np.array([pin.admits(f) for f in flows])
        if not draft.keep.any():
            end = "as it is stored" if operand is None else f"as operand {operand} of {site.op}"
            possible = [flow for flow, is_left in zip(flows, before, strict=True) if is_left]
            legal = sorted({values(flow).text(self.axes) for flow in possible})
            raise BadConstraint(
                f"nothing satisfies {pin.text!r} at {site.name}, {end}",
                at=site.source,
                seen="what is pinned elsewhere leaves " + "; ".join(legal[:12]),
                advice="one of these, or pin fewer of its neighbours",
            )

    def _keep_to_way(self, key: SiteKey, draft: Draft, axis: int, way: str) -> None:
        """Keep the choices in which an axis divides an attention in this way; "" is any way that it has."""
        dims = len(draft.operands[0].shape)
        ways = [way_of(choice.strategies[axis], dims) for choice in draft.site.choices]
        keep = draft.left & np.array([found == way if way else bool(found) for found in ways])
        if keep.any():
            draft.keep = keep
        elif way:
            has = sorted({found for found, is_left in zip(ways, draft.left, strict=True) if found and is_left})
            axes = f"{self.axes[axis]}={self.mesh.shape[axis]}"
            raise BadPreset(
                f"{draft.site.name} cannot be divided by {way!r} along {axes}: {_why_not(way, key, draft)}",
                at=draft.site.source,
                seen=", ".join(f"{n} {list(t.shape)}" for n, t in zip(_OPERANDS, draft.operands, strict=False)),
                advice=", ".join([*(f"how={found!r}" for found in has), _ELSE[way]]),
            )


_ELSE = {
    RING: "or a mask that a call describes: is_causal, or Assume(no_padding=True) where no token is padding",
    GATHER: "or fewer devices for context",
    ULYSSES: "or fewer devices for context",
}
_OPERANDS = ("queries", "keys", "values", "mask")


def _why_not(way: str, key: SiteKey, draft: Draft) -> str:
    """Say why an attention has no choice that divides it in a way."""
    if way == ULYSSES:
        heads = [t.shape[-3] for t in draft.operands[:2]]
        return f"its {heads[0]} heads, of which {heads[1]} have keys of their own, do not give every device as many"
    asked = key.kwargs if isinstance(key, fx.Node) else {}
    if way == RING and asked.get("attn_mask") is not None:
        return "it has a mask tensor of queries by keys, which does not go round with keys"
    if way == RING and asked.get("dropout_p"):
        return "it drops weights of queries by keys, which do not go round with keys"
    return "its sequence does not give every device a part"


def _granted(use: _Taker, pins: Pins) -> Pin:
    """The pin of a use: its wish, where it has such a choice."""
    wished = pins.wished
    if wished is None:
        return pins.use
    flows = [choice.operand(use.operand) for choice in use.draft.site.choices]
    is_granted = use.draft.left & np.array([wished.admits(f) for f in flows])
    return wished if is_granted.any() else pins.use


def _last_of_modules(graph: Graph, bindings: Bindings) -> dict[str, fx.Node]:
    """The value that each module gives, by path: the last that it or its children compute."""
    last: dict[str, fx.Node] = {}
    for n in graph.nodes:
        if info(n).kind == "op" and bindings.rules[n] is not None and n.target.name != "identity":
            path = info(n).module
            while path:
                last[path] = n
                path = path.rpartition(".")[0]
    return last


def _uses_of_parameter(uses: Sequence[_Taker], of_all: Mapping[SiteKey, Sequence[_Taker]]) -> list[_Taker]:
    """The uses of a parameter, looked up through fan-outs and casts; a cast itself does not count."""
    found: list[_Taker] = []
    for use in uses:
        if use.draft.site.op != "to":
            found.append(use)
        if use.draft.site.op in ("identity", "to"):
            found += _uses_of_parameter(of_all.get(use.key, []), of_all)
    return found


def _follow(draft: Draft, pins: Pins) -> None:
    """Keep the choices of the pinned policies; what is not cut has none of how it moves."""
    site = draft.site
    keep = draft.left
    is_on_host = np.array([bool(policy.on_host) for policy in site.policies], bool)
    with_part = np.array([policy.with_part for policy in site.policies], bool)
    may_lie = {"host": is_on_host & ~with_part, "wholly": with_part}
    if pins.states in may_lie and site.kind == "parameter" and not may_lie[pins.states].any():
        what = "states" if pins.states == "host" else "parameters"
        raise BadConstraint(
            f"the constraint {pins.pattern!r} has {what} on the host, where those of {site.name} may not lie",
            advice='a host_budget= that has room for them, and optimizer=autopar.optim.AdamW; or "device"',
        )
    if not site.policies:
        return  # an output that a parameter leaves by has none
    if pins.states and site.kind == "parameter":
        keep = keep & may_lie.get(pins.states, ~is_on_host)
    whole = ~np.array(site.is_cut())
    if pins.gather and site.regathered:
        keep = keep & (whole | (np.array(site.regathered) == (pins.gather == "regathered")))
    if pins.reduce and site.scattered:
        keep = keep & (whole | (np.array(site.scattered) == (pins.reduce == "each")))
    draft.keep = keep


class Narrowing:
    """Sites with fewer choices; sites that are alike, and narrowed alike, share the same tables."""

    def __init__(self) -> None:
        self.once = Once()

    def narrow(self, draft: Draft, keep: np.ndarray | None) -> None:
        if keep is not None:
            draft.site = self._narrowed(draft.site, keep)

    def _narrowed(self, site: Site, keep: np.ndarray) -> Site:
        what = ("narrowed", keep.tobytes())
        objects = (site.choices, site.seconds)
        return site.sharing(self.once(what, objects, lambda: site.at(np.flatnonzero(keep).tolist())))


def supported(sites: Sequence[Site], edges: Sequence[Edge]) -> list[np.ndarray]:
    """A mask of each site's choices for which every neighbour has a supported choice that goes with it."""
    alive = [np.isfinite(s.seconds) for s in sites]
    possible = {id(e.seconds): np.isfinite(e.seconds) for e in edges}

    def narrow(site: int, kept: np.ndarray) -> bool:
        if not kept.any():
            raise BadConstraint("no choices go together", at=sites[site].name, advice="pin fewer things")
        is_narrower = bool(kept.sum() < alive[site].sum())
        if is_narrower:
            alive[site] = kept
        return is_narrower

    waiting = True
    while waiting:
        waiting = False
        for e in (*edges, *reversed(edges)):
            table = possible[id(e.seconds)]
            source = alive[e.source]
            target = alive[e.target]
            leaves = np.zeros(table.shape[0], bool)
            arrives = np.zeros(table.shape[1], bool)
            leaves[e.given_by[source]] = True
            arrives[e.taken_by[target]] = True
            table = table & leaves[:, None] & arrives[None, :]
            waiting |= narrow(e.source, source & table.any(1)[e.given_by])
            waiting |= narrow(e.target, target & table.any(0)[e.taken_by])
    return alive
