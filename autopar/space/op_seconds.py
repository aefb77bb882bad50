"""`OpSeconds`: the kernels that an op runs under each of its choices, and their seconds on the fullest device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, call_of, info, op_name, type_of
from autopar.graph.nodes import TensorType, typed
from autopar.once import Once
from autopar.ops.entry import Line, facts_of, goes_beyond, timed_name
from autopar.ops.local import OpOnDevice
from autopar.sharding.cost_model import BROADCAST, SUM, SUM_OVER_ROWS, TURNED, UNALIGNED, CostModel, Kernel, Matrices
from autopar.sharding.placement import largest_local_shape, local_elements
from autopar.sharding.strategies import Choice, values
from autopar.space.attention_scores import AttentionScores
from autopar.space.chosen import Chosen
from autopar.space.kernel_sites import KernelSites
from autopar.space.op_amounts import amounts_of
from autopar.space.product_roles import multiplied
from autopar.space.saved import memories
from autopar.space.setting import Setting
from autopar.space.traffic import Chains, Traffic, alone, groups_of, is_fused, relieved_of

Ways = tuple[np.ndarray, ...]  # seconds in forward and in backward, by choice; none of what is free


class Kernels(NamedTuple):
    """The kernels of an op's call, on any machine; `backward` and `beside` have (how often, kernel)."""

    forward: Sequence[Kernel] = ()
    backward: Sequence[tuple[int, Kernel]] = ()  # how often, and of which kernel the one that gives a gradient
    beside: Sequence[tuple[int, Kernel]] = ()  # other kernels of the backward, and how often they run


class OpSeconds:
    """Prices the ops of a graph on a machine; `of_graph` has what others have read of the graph alone."""

    def __init__(self, graph: Graph, setting: Setting, sites: KernelSites, of_graph: Once | None = None) -> None:
        kind = setting.cluster.device.kernels
        once = of_graph or Once()
        self.mesh = setting.mesh
        self.cluster = setting.cluster
        self.costs = CostModel(setting.cluster, setting.mesh.size)
        self.attention = AttentionScores(self.mesh, self.cluster.device.kernels)
        self.copied = once(("copies", kind), (graph,), lambda: _copies(graph, kind))
        self.chains = once(("chains", kind), (graph,), lambda: Chains.of(graph, kind)) if setting.compiled else None
        self.groups = groups_of(sites, kind)
        self.relieved = relieved_of(sites)

    def compute(self, chosen: Chosen, kernels: Kernels) -> Ways:
        """Seconds of computing an op in its kernels, forward and backward, by choice; () where it runs none."""
        if not any(kernels):
            return ()
        forward, backward = np.zeros(len(chosen.choices)), np.zeros(len(chosen.choices))
        for kernel in kernels.forward:
            forward += self.costs.forward(kernel)
        for count, kernel in kernels.backward:
            backward += count * self.costs.backward(kernel)
        for count, kernel in kernels.beside:
            backward += count * self.costs.forward(kernel)
        return forward, backward

    def unaligned(self, chosen: Chosen) -> float:
        """Seconds that a product loses, under its first choice, to rows that are not multiples of 16 bytes."""
        kernels, lost = self.kernels(chosen), 0.0
        ran = [(1, k, self.costs.forward) for k in kernels.forward]
        ran += [(count, k, self.costs.backward) for count, k in kernels.backward]
        for count, kernel, seconds in ran:
            if kernel.as_cut is not None and kernel.as_cut[0].endswith(UNALIGNED):
                lost += count * float(seconds(kernel)[0] - seconds(replace(kernel, as_cut=None))[0])
        return lost * info(chosen.node).chunks

    def source(self, kernels: Kernels) -> str:
        """The source of an op's seconds: its own kernel's, or else the first beside it; "" without kernels."""
        ran = [*kernels.forward, *(kernel for _, kernel in kernels.beside)]
        return self.costs.source(ran[0]) if ran else ""

    def kernels(self, chosen: Chosen) -> Kernels:
        """The kernels of an op in forward and backward, with their work on the fullest device."""
        facts, trained = facts_of(chosen.op), len(chosen.trained)
        if chosen.node in self.groups:
            kernel = replace(self._own(chosen), names=(), hands_on=False)
            return Kernels([kernel], [(min(trained, 1), kernel)])
        if chosen.op == "identity":  # the gradients of its uses are added
            added = (len(chosen.node.users) - 1) if trained else 0
            return Kernels(beside=[(added, self._beside(chosen, SUM, 3))]) if added else Kernels()
        if chosen.node in self.copied:
            return Kernels([self._beside(chosen, TURNED, 2)])
        if facts.products is not None and chosen.binding is not None:
            return self._products(chosen)
        kernel = self._own(chosen)
        if facts.free and not self.costs.is_measured(kernel):
            return Kernels()
        if facts.joint or not (facts.flops or facts.spreads):
            return Kernels([kernel], [(min(trained, 1), kernel)], self._weights_of(chosen))
        if facts.flops:  # a product gives the gradient of each matrix, a sum that of a bias
            biases = sum(len(t.shape) <= 1 for t in chosen.trained)
            given = self._gradients(chosen, kernel, trained - biases)
            summed = 0 if chosen.node in self.relieved else biases
        else:  # the gradient of an operand that was broadcast is a sum of its own
            summed = sum(map(chosen.is_broadcast, chosen.trained))
            given = self._factors(chosen, kernel)
        sums = [(summed, self._beside(chosen, SUM_OVER_ROWS, 1))] if summed else []
        return Kernels([kernel], given, sums)

    def _products(self, chosen: Chosen) -> Kernels:
        """The matrix products of an op that has several, each a kernel of its own."""
        products = facts_of(chosen.op).products
        assert products is not None
        call = call_of(chosen.node)
        itemsize = chosen.outputs[0].itemsize
        kind = self.cluster.device.kernels
        by_choice = [products(call, OpOnDevice.fullest(self.mesh, choice), kind) for choice in chosen.choices]

        def kernels(way: int) -> Iterator[Kernel]:
            for sizes in zip(*(of[way] for of in by_choice), strict=True):
                batch, m, n, k = np.array(sizes, float).T
                moved = itemsize * batch * (m * n + n * k + m * k)
                matrices = Matrices(batch, m, n, k)
                yield Kernel(("grouped_mm",), chosen.outputs[0].dtype, 2 * batch * m * n * k, moved, moved,
                             is_product=True, matrices=matrices)  # fmt: skip

        result = chosen.outputs[0]
        forward = _passes(result, [of.passed for of in by_choice])
        back = [*((1, kernel) for kernel in kernels(1)), (2, _passes(result, [of.passed_back / 2 for of in by_choice]))]
        return Kernels([*kernels(0), forward], beside=back if chosen.trained else ())

    def _weights_of(self, chosen: Chosen) -> Sequence[tuple[int, Kernel]]:
        """The pass in which a norm's backward sums the gradients of its weights; none for other ops.

        It reads the incoming gradient and the norm's input. Where the norm itself was measured, its time holds that
        pass.
        """
        rank = len(chosen.outputs[0].shape)
        weights = sum(len(t.shape) < rank for t in chosen.trained)
        is_norm = isinstance(facts_of(chosen.op).keeps, Line) and weights and len(chosen.trained) > weights
        if not is_norm or facts_of(chosen.op).flops or self.costs.is_known(self._own(chosen)):
            return []
        return [(1, self._beside(chosen, SUM_OVER_ROWS, 2))]

    def _gradients(self, chosen: Chosen, kernel: Kernel, count: int) -> Sequence[tuple[int, Kernel]]:
        """The products of a product's backward, one for each matrix that needs a gradient."""
        if kernel.matrices is None:
            return [(count, kernel)]
        assert chosen.binding is not None
        ways = zip(multiplied(chosen.binding, chosen.loops), kernel.matrices.gradients, strict=True)
        return [(1, replace(kernel, matrices=way)) for k, way in ways if chosen.operands[k].requires_grad]

    def _factors(self, chosen: Chosen, kernel: Kernel) -> Sequence[tuple[int, Kernel]]:
        """The kernels of an elementwise op's backward, one for each operand that needs a gradient.

        Such a gradient is made of the other operands: the kernel broadcasts where one of these is smaller.
        """
        plain = replace(kernel, names=tuple(name for name in kernel.names if not name.endswith(BROADCAST)))
        smaller = [k for k, t in enumerate(chosen.operands) if chosen.is_broadcast(t)]
        trained = [k for k, t in enumerate(chosen.operands) if t.requires_grad]
        broadcasting = sum(smaller != [] and smaller != [k] for k in trained)
        return [(n, own) for n, own in ((broadcasting, kernel), (len(trained) - broadcasting, plain)) if n]

    def _own(self, chosen: Chosen) -> Kernel:
        """The kernel that computes the op itself."""
        op, facts = chosen.op, facts_of(chosen.op)
        name = timed_name(op, typed(chosen.node.kwargs))
        keeps_nothing = isinstance(facts.keeps, Line) and not facts.keeps.values
        as_cut = self._where_cut(chosen, name)
        amounts = amounts_of(chosen, self.traffic(chosen.node, chosen.given), self.mesh)
        size = self._second_size(chosen, amounts.work)
        if as_cut is None and amounts.matrices is not None and not facts.windows:
            as_cut = op + UNALIGNED, amounts.matrices.unaligned(chosen.outputs[0].itemsize)
        names: tuple[str, ...] = (name, op)
        if facts.spreads and any(map(chosen.is_broadcast, chosen.operands)):
            names = (name + BROADCAST, *names)
        work = amounts.work
        if facts.scores is not None:
            work = work * self.attention.computed(chosen) * self.attention.seen(chosen, as_cut)
        # A fused op goes without its timed name: that time was measured for the op alone.
        is_in_chain = self.chains is not None and is_fused(chosen.node)
        return Kernel(
            () if is_in_chain else names,
            chosen.outputs[0].dtype,
            work,
            amounts.moved,
            amounts.moved_back,
            starts=amounts.starts,
            is_product=facts.flops is not None,
            matrices=amounts.matrices,
            heads=self.attention.heads(chosen, as_cut, size) if facts.scores is not None and size is not None else None,
            hands_on=facts.spreads and keeps_nothing,
            as_cut=as_cut,
            size=size,
            pads=chosen.outputs[0].itemsize if self.chains is not None and amounts.matrices is not None else 0,
        )

    def _second_size(self, chosen: Chosen, work: np.ndarray) -> np.ndarray | None:
        """The second size on which an op's time depends, by choice; None if there is none."""
        facts = facts_of(chosen.op)
        asked = facts.second_size
        if isinstance(asked, str):
            read = local_elements(chosen.operands[0].shape, (values(c.operand(0)) for c in chosen.choices), self.mesh)
            return work / np.maximum(read + chosen.elements(self.mesh), 1.0)
        if asked is None:
            return None
        return self.attention.lengths(chosen, *asked) if facts.scores is not None else chosen.lengths(*asked, self.mesh)

    def _beside(self, chosen: Chosen, name: str, tensors: int) -> Kernel:
        """A kernel, timed under `name`, that reads and writes `tensors` tensors of the result's size."""
        made = chosen.elements(self.mesh)
        result = chosen.outputs[0]
        moved: np.ndarray = tensors * made * result.itemsize
        shape = (largest_local_shape(result.shape, values(c.output()), self.mesh) for c in chosen.choices)
        width = np.array([local[-1] if local else 1 for local in shape], float)
        return Kernel((name,), result.dtype, made, moved, moved, size=width)

    def _where_cut(self, chosen: Chosen, name: str) -> tuple[str, np.ndarray] | None:
        """The name by which an op's local form is timed, and a mask of choices that run it; None without one."""
        op, binding = chosen.op, chosen.binding
        if binding is None or not (facts_of(op).counts or binding.inside):
            return None
        # the last part of causal attention sees most keys: a pair of a query and a key takes as long as without a mask
        as_cut = op if name == f"{op} causal" else f"{op} cut"

        def is_cut(choice: Choice) -> bool:
            return any(goes_beyond(op, binding, strategy.cut) for strategy in choice.strategies)

        return as_cut, np.array(list(map(is_cut, chosen.choices)))

    def traffic(self, node: fx.Node, given: Sequence[fx.Node]) -> Traffic:
        """The tensors that an op's kernels read and write: in a group, in a compiled chain, or alone."""
        if node in self.groups:
            return self.groups[node].traffic(given)
        if self.chains is not None:
            return self.chains.traffic(node, given)
        return alone(node, given, self.cluster.device.kernels)


def _passes(of: TensorType, passed: Sequence[float]) -> Kernel:
    """A kernel that reads and writes so many bytes, by choice, of such numbers."""
    moved = np.array(passed, float)
    return Kernel((), of.dtype, moved / of.itemsize, moved, moved)


def _copies(graph: Graph, kind: str) -> frozenset[fx.Node]:
    """The ops that are usually free views, and have to copy here, on a kind of device."""
    memory = memories(graph, kind)

    def is_copied(node: fx.Node) -> bool:
        if info(node).kind != "op" or not facts_of(op_name(node)).free:
            return False
        shares = any(memory[node] == memory[a] for a in node.all_input_nodes)
        return not shares and not any(info(u).kind == "part" for u in node.users)

    return frozenset(filter(is_copied, graph.nodes))


def seconds_in_chunks(prices: OpSeconds, chosen: Chosen, once: Ways) -> Ways:
    """Seconds of an op that runs once for each chunk; `once` has those of a single run.

    Gradients of parameters are added up over chunks: each chunk but the first reads and writes the sum.
    """
    count, added = info(chosen.node).chunks, np.zeros(len(chosen.choices))
    for place, operand in enumerate(chosen.given):
        type_ = type_of(operand)
        if type_.requires_grad and info(operand).chunks == 1 and chosen.op != "chunk":
            held = local_elements(type_.shape, (values(c.operand(place)) for c in chosen.choices), prices.mesh)
            moved: np.ndarray = held * (type_.itemsize + 2 * max(4, type_.itemsize))
            added += (count - 1) * prices.costs.moving(moved)
    forward, backward = once if once else (np.zeros(len(chosen.choices)),) * 2
    return forward * count, backward * count + added
