"""`SiteBuilder`: the sites of a space, each with its legal choices and their seconds.

Sites that are alike share their tables: what is repeated in the model is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.fx as fx

from autopar.graph.carried import brought_by
from autopar.graph.graph import Graph, TensorType, info, op_name, type_of, typed
from autopar.graph.nodes import WrittenCall, wants_gradient
from autopar.once import Once
from autopar.ops.entry import facts_of
from autopar.sharding.certainty import MEASURED
from autopar.sharding.placement import R, Sharding, flow, local_elements
from autopar.sharding.strategies import (
    Choice,
    Strategy,
    cross,
    replicated,
    storage_strategies,
    strategies_on_one_axis,
    values,
)
from autopar.space.bindings import Bindings
from autopar.space.carried_values import choices_of_carried
from autopar.space.chosen import Chosen
from autopar.space.dim_blocks import DimBlocks, Sizes
from autopar.space.discovery import suspected
from autopar.space.op_exchanges import exchange_seconds
from autopar.space.op_seconds import OpSeconds, seconds_in_chunks
from autopar.space.parameter_values import ParameterValues
from autopar.space.setting import Setting
from autopar.space.shared import Shared
from autopar.space.space import Site, StoragePolicy
from autopar.space.states_on_host import StatesOnHost
from autopar.space.user_rules import takes_sums
from autopar.space.wiring import SiteKey


@dataclass(slots=True, eq=False)
class Draft:
    """A site while choices are being removed from it, and the values of the edges that enter it."""

    site: Site
    sources: tuple[fx.Node, ...] = ()  # the tensor operands, in order
    operands: tuple[TensorType, ...] = ()
    keep: np.ndarray | None = None  # the choices that pins leave

    @property
    def left(self) -> np.ndarray:
        """A mask of the choices that are left so far."""
        return np.ones(len(self.site.choices), bool) if self.keep is None else self.keep


class SiteBuilder:
    """Builds the sites of a graph, node by node."""

    def __init__(
        self, graph: Graph, setting: Setting, bindings: Bindings, parameters: ParameterValues, shared: Shared
    ) -> None:
        self.graph = graph
        self.differentiable = graph.differentiable
        self.setting = setting
        self.bindings = bindings
        self.parameters = parameters
        self.runs_once = parameters.runs_once(setting)
        self.blocks = shared.of_graph("blocks", (bindings,), lambda: DimBlocks(bindings))
        self.seconds = OpSeconds(graph, setting, shared.kernels, shared.of_graph)
        self._crossed, self._known = shared.choices, shared.sites
        self.once = Once()  # shared tables of parameters with storage policies
        self.on_host = StatesOnHost.of(graph, setting)
        self.brought = brought_by(graph)
        self.before = {name: graph.inputs[given] for given, name in self.brought.items()}

    def drafts(self) -> dict[SiteKey, Draft]:
        """All sites with their legal choices, before anything is pinned."""
        return {key: draft for node in self.graph.nodes for key, draft in self._of(node)}

    def _of(self, node: fx.Node) -> Iterator[tuple[SiteKey, Draft]]:
        about = info(node)
        if about.kind == "parameter":
            yield node, Draft(self._parameter(node))
        elif about.key in self.brought:
            yield node, Draft(self._carried(about.key, "input", type_of(node), 0))
        elif about.kind in ("input", "buffer"):
            whole = self._cross((Strategy((), (flow(R),)),), {})
            yield node, Draft(Site(about.key, about.kind, about.kind, whole, np.zeros(1), outputs=_told(about.outputs)))
        elif about.kind == "op":
            yield node, self._op(node)
        elif about.kind == "output":
            for i, source in enumerate(node.args[0]):
                name, type_ = self.graph.result_names[i], about.outputs[i]
                # an output beside a loss leaves without a gradient
                arrives = replace(type_, requires_grad=i in self.differentiable)
                before = self.before.get(name)  # the value that it replaces, which lies as it does
                old = () if before is None else (before,)
                site = self._output(i, name, type_)
                yield (node, i), Draft(site, (source, *old), (arrives, *map(type_of, old)))

    def _cross(self, per_axis: tuple[Strategy, ...], sizes: dict[str, int]) -> tuple[Choice, ...]:
        key = (per_axis, tuple(s.cut for s in per_axis), tuple(sizes.items()))
        if key not in self._crossed:
            self._crossed[key] = cross(per_axis, sizes, self.setting.mesh)
        return self._crossed[key]

    # -- parameters

    def _parameter(self, node: fx.Node) -> Site:
        name, type_ = info(node).key, type_of(node)
        even = self.blocks.even(node, len(type_.shape))
        key = ("parameter", type_, tuple(tuple(sorted(blocks)) for blocks in even.values()))
        if key not in self._known:
            self._known[key] = self._new_parameter(name, type_, even)
        site = replace(self._known[key], name=name)
        if node not in self.parameters.cast_parameters:
            site = self._with_policies(site, type_)
        return site if self.on_host is None else self.on_host.with_policy(site, type_)

    def _new_parameter(self, name: str, type_: TensorType, even: dict[int, set[Sizes]]) -> Site:
        choices = self._cross(storage_strategies(type_.shape, even), _sizes(type_))
        choices = tuple(c for c in choices if torch_can_state(values(c.output())))
        shardings = [values(c.output()) for c in choices]
        local: np.ndarray = local_elements(type_.shape, shardings, self.setting.mesh) * type_.itemsize
        step = np.zeros(len(choices))
        if type_.requires_grad:
            step = self.seconds.costs.optimizer(self.setting.optimizer, type_.dtype, type_.itemsize, local)
        source = self.seconds.costs.source_of_optimizer(self.setting.optimizer, type_.dtype)
        outputs = _told((type_,))
        return Site(
            name, "parameter", "parameter", choices, step, bytes=type_.nbytes, priced_by=source, outputs=outputs
        )

    def _with_policies(self, site: Site, type_: TensorType) -> Site:
        """A parameter, or its only cast, with its cut choices repeated for each policy."""
        what, objects = ("policies", type_.requires_grad), (site.choices, site.seconds)
        return site.sharing(self.once(what, objects, lambda: self._new_policies(site, type_)))

    def _new_policies(self, site: Site, type_: TensorType) -> Site:
        gathers = (False, True) if self.setting.regather else (False,)
        reductions = (False, True) if self.setting.passes > 1 and type_.requires_grad else (False,)
        first, *others = [StoragePolicy(again, each) for again in gathers for each in reductions]
        cut = [i for i, is_cut in enumerate(site.is_cut()) if is_cut]
        places = [*range(len(site.choices)), *(cut * len(others))]
        marks = [first] * len(site.choices) + [policy for policy in others for _ in cut]
        site = site.at(places, policies=tuple(marks))
        return self._run_once(site, [not policy.regathered for policy in marks])

    def _run_once(self, site: Site, marks: Sequence[bool]) -> Site:
        """The site of an op whose forward, under marked choices, runs before the first micro-batch."""
        if self.setting.turns == 1 or not site.compute:
            return site
        fewer: np.ndarray = site.compute[0] * (self.setting.passes - self.setting.accumulation)
        return replace(site, seconds=site.seconds - np.where(marks, fewer, 0.0))

    # -- outputs and ops

    def _output(self, i: int, name: str, type_: TensorType) -> Site:
        """The site of an output of the graph.

        Outputs at which gradients arrive leave whole, and without a loss all do. Others may leave as they lie.
        """
        changes = i >= len(self.graph.output_names)  # the new value of a buffer, which is whole everywhere
        if not changes and name in dict(self.graph.carried):
            return self._carried(f"out.{name}", "output", type_, 1 + (name in self.before))
        free = self.graph.loss is not None and i not in (self.graph.loss, *self.differentiable) and not changes
        stored = storage_strategies(type_.shape) if free else storage_strategies(())
        choices = self._cross(tuple(Strategy(s.outputs, (), s.cut) for s in stored), _sizes(type_))
        # Seconds of the step that belong to no op are counted once, at the loss or else the first output.
        taken = self.setting.cluster.step_s if i == (self.graph.loss or 0) and not changes else 0.0
        return Site(
            f"out.{name}",
            "output",
            "update" if changes else "output",
            choices,
            np.full(len(choices), taken),
            priced_by=MEASURED if taken else "",
            outputs=_told((type_,)),
        )

    def _carried(self, name: str, kind: str, type_: TensorType, operands: int) -> Site:
        """The site of a value that one call leaves for the next, as it comes or leaves."""
        key = ("carried", kind, type_, operands)
        if key not in self._known:
            choices = choices_of_carried(type_.shape, self.setting.mesh, operands)
            self._known[key] = Site(name, kind, kind, choices, np.zeros(len(choices)), outputs=_told((type_,)))
        return replace(self._known[key], name=name)

    def _op(self, node: fx.Node) -> Draft:
        about, operands = info(node), self.bindings.tensors[node]
        blocks = self.blocks.of_factors(node)
        uses = len(node.users) if op_name(node) == "identity" else 0
        group = self.seconds.groups.get(node)
        is_own = self.setting.compiled or group is not None  # else equal calls move the same
        traffic = self.seconds.traffic(node, operands) if is_own else None
        beside = node in self.seconds.copied, uses, traffic, group is not None
        is_once = node in self.runs_once and node not in self.parameters.casts
        key = ("op", self.bindings.kinds[node], about.chunks, blocks, beside, is_once)
        if key not in self._known:
            made = self._new_op(node, dict(blocks))
            self._known[key] = self._run_once(made, [True] * len(made.choices)) if is_once else made
        site = self._known[key].of_node(about.key, about.source)
        if node in self.parameters.casts:
            site = self._with_policies(site, type_of(node))
        return Draft(site, operands, tuple([type_of(n) for n in operands]))

    def _new_op(self, node: fx.Node, blocks: Mapping[str, Sequence[Sizes]]) -> Site:
        about, name, binding = info(node), op_name(node), self.bindings.rules[node]
        types = tuple(type_of(n) for n in self.bindings.tensors[node])
        gives = [t.requires_grad for t in about.outputs]
        is_users = name.startswith(("ops.", "function "))  # nobody's but the user's
        if binding:
            wants = list(map(wants_gradient, node.target.operands(node.kwargs)))
            legal = strategies_on_one_axis(binding, wants, gives, blocks)
            if facts_of(name).one_gradient:
                legal = tuple(s for s in legal if all(f.gradient == R for f in s.outputs))
            choices = self._cross(legal, binding.sizes)
        else:  # nobody has proven anything of it: every device computes the whole
            legal = replicated(len(types), [t.requires_grad for t in types], gives)
            if is_users and not name.startswith("ops.aten."):  # torch's own derivatives are linear
                arguments = typed(node.kwargs)
                call = WrittenCall(node.target, arguments, repr(arguments), types, about.outputs)
                legal = tuple(s for s in legal if s.is_unused or takes_sums(call, s))
            choices = self._cross(legal, {})
        chosen = Chosen(node, binding, choices, self.bindings.tensors[node])
        kernels = self.seconds.kernels(chosen)
        compute = self.seconds.compute(chosen, kernels)
        if about.chunks > 1:
            compute = seconds_in_chunks(self.seconds, chosen, compute)
        sent = exchange_seconds(self.seconds, chosen, compute)
        seconds: np.ndarray = sum((*compute, *sent[:1]), np.zeros(len(choices))) * self.setting.passes
        has_rule = binding is not None or not types
        line = ""
        if not has_rule and about.random < 0 and is_users:
            line = suspected(node.target, typed(node.kwargs), types, about.outputs)
        source = self.seconds.source(kernels) if compute else ""
        return Site(
            about.key,
            name,
            "op",
            choices,
            seconds,
            about.source,
            has_rule,
            suspected=line,
            compute=compute,
            exchange=sent[1:],
            priced_by=source,
            outputs=_told(about.outputs),
        )


def torch_can_state(sharding: Sharding) -> bool:
    """Whether a DTensor can have this sharding.

    Blocks of one size are torch's strided shard; where two axes cut a dim in this way, full_tensor() would permute it.
    """
    for axes in sharding.cuts.values():
        if len(axes) > 1 and any(sharding.placements[a].blocks for a in axes):
            return False
    return True


def _told(types: Sequence[TensorType]) -> tuple[str, ...]:
    """Dtypes and shapes as a plan writes them: `float32[8, 16]`."""
    return tuple(f"{type_.dtype}{list(type_.shape)}" for type_ in types)


def _sizes(type_: TensorType) -> dict[str, int]:
    """The sizes of a stored tensor's factors, one for each dim."""
    return {f"dim{d}": n for d, n in enumerate(type_.shape)}
