"""`OpSeconds`: the kernels that an op runs under each of its choices, and their seconds on the fullest device."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, TensorType, info, op_name, type_of
from autopar.graph.nodes import typed
from autopar.ops.entry import Line, facts_of, goes_beyond, timed_name
from autopar.sharding.cost_model import (
    BROADCAST,
    SUM,
    SUM_OVER_ROWS,
    TURNED,
    UNALIGNED,
    CostModel,
    Heads,
    Kernel,
    Matrices,
)
from autopar.sharding.notation import Binding
from autopar.sharding.placement import largest_local_shape, local_elements, part
from autopar.sharding.strategies import Choice, values
from autopar.space.kernel_sites import KernelSites
from autopar.space.product_roles import groups_of_rows, loops_of, multiplied, roles_of
from autopar.space.saved import memories
from autopar.space.setting import Setting
from autopar.space.traffic import Chains, Traffic, alone, groups_of, is_fused, relieved_of

_TILE = 64  # queries and keys of the squares of which a GPU computes whole ones in an attention
Ways = tuple[np.ndarray, ...]  # seconds in forward and in backward, by choice; none of what is free


@dataclass(frozen=True, eq=False)
class Chosen:
    """A call of an op, with its binding and its choices."""

    node: fx.Node
    binding: Binding | None
    choices: Sequence[Choice]
    given: Sequence[fx.Node]  # the operands

    @property
    def op(self) -> str:
        return op_name(self.node)

    @functools.cached_property
    def operands(self) -> tuple[TensorType, ...]:
        return tuple(type_of(n) for n in self.given)

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return info(self.node).outputs

    @property
    def trained(self) -> list[TensorType]:
        return [t for t in self.operands if t.requires_grad]

    @property
    def loops(self) -> list[str]:
        """The factors over which a product loops, a point of FLOPs each; all factors of other ops."""
        return loops_of(self.op, self.binding) if self.binding else []

    def is_broadcast(self, operand: TensorType) -> bool:
        """Whether an operand has fewer elements than the result of its op."""
        return math.prod(operand.shape) < math.prod(self.outputs[0].shape)


class Kernels(NamedTuple):
    """The kernels of an op's call, on any machine; `backward` and `beside` have (how often, kernel)."""

    forward: Sequence[Kernel] = ()
    backward: Sequence[tuple[int, Kernel]] = ()  # how often, and of which kernel the one that gives a gradient
    beside: Sequence[tuple[int, Kernel]] = ()  # other kernels of the backward, and how often they run


class Amounts(NamedTuple):
    """The work and traffic of a kernel, as arrays by choice."""

    work: np.ndarray  # FLOPs of a product, elements of the largest tensor of any other
    moved: np.ndarray  # bytes, in forward
    moved_back: np.ndarray  # bytes moved by one kernel of the backward
    starts: tuple[bool, bool]  # does a kernel start, in forward and in backward?
    matrices: Matrices | None  # sizes of a product of two matrices, None for any other op


class OpSeconds:
    """Prices the ops of a graph on a machine."""

    def __init__(self, graph: Graph, setting: Setting, sites: KernelSites) -> None:
        self.mesh = setting.mesh
        self.cluster = setting.cluster
        self.costs = CostModel(setting.cluster, setting.mesh.size)
        self.copied = _copies(graph, self.cluster.device.kernels)
        self.chains = Chains.of(graph, self.cluster.device.kernels) if setting.compiled else None
        self.groups = groups_of(sites, self.cluster.device.kernels)
        self.relieved = relieved_of(sites)

    def compute(self, chosen: Chosen) -> Ways:
        """Seconds of computing an op, forward and backward, by choice; () where it runs no kernel."""
        kernels = self.kernels(chosen)
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

    def source(self, chosen: Chosen) -> str:
        """The source of an op's seconds: its own kernel's, or else the first beside it; "" without kernels."""
        kernels = self.kernels(chosen)
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
        amounts = self._amounts(chosen)
        size = self._second_size(chosen, amounts.work)
        if as_cut is None and amounts.matrices is not None and not facts.windows:
            as_cut = op + UNALIGNED, amounts.matrices.unaligned(chosen.outputs[0].itemsize)
        names: tuple[str, ...] = (name, op)
        if facts.spreads and any(map(chosen.is_broadcast, chosen.operands)):
            names = (name + BROADCAST, *names)
        # A fused op goes without its timed name: that time was measured for the op alone.
        is_in_chain = self.chains is not None and is_fused(chosen.node)
        return Kernel(
            () if is_in_chain else names,
            chosen.outputs[0].dtype,
            amounts.work * self._computed(chosen) * self._seen(chosen, name, as_cut) if facts.heads else amounts.work,
            amounts.moved,
            amounts.moved_back,
            starts=amounts.starts,
            is_product=facts.flops is not None,
            matrices=amounts.matrices,
            heads=self._heads(chosen, name, as_cut, size) if facts.heads and size is not None else None,
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
            return work / np.maximum(read + self._made(chosen), 1.0)
        if asked is None:
            return None
        return self._in_tiles(chosen, *asked) if facts.heads else self._lengths(chosen, *asked)

    def _lengths(self, chosen: Chosen, operand: int, dim: int) -> np.ndarray:
        """The local size of a dim of an operand on the fullest device, by choice."""
        shape = chosen.operands[operand].shape
        held = [largest_local_shape(shape, values(c.operand(operand)), self.mesh) for c in chosen.choices]
        return np.array([local[dim] for local in held], float)

    def _in_tiles(self, chosen: Chosen, operand: int, dim: int) -> np.ndarray:
        """The local size of a dim as an attention computes it, which on a GPU is in whole tiles, by choice."""
        length = self._lengths(chosen, operand, dim)
        return np.ceil(length / _TILE) * _TILE if self.cluster.device.kernels == "cuda" else length

    def _computed(self, chosen: Chosen) -> np.ndarray:
        """The ratio of computed to useful scores of an attention, by choice."""
        more: np.ndarray = np.ones(len(chosen.choices))
        for operand in (0, 1):
            more *= self._in_tiles(chosen, operand, -2) / np.maximum(self._lengths(chosen, operand, -2), 1.0)
        return more

    def _heads(self, chosen: Chosen, name: str, as_cut: tuple[str, np.ndarray] | None, length: np.ndarray) -> Heads:
        """The heads of an attention, and the share of scores that is computed."""
        is_causal = name.endswith(" causal")
        cut = as_cut[1] if as_cut is not None else np.zeros(len(chosen.choices), bool)
        # Where queries are cut, the work already counts only the scores that are computed.
        share = np.where(cut | (not is_causal), 1.0, 0.5)
        return Heads(chosen.operands[0].shape[-1], length, share, is_causal)

    def _seen(self, chosen: Chosen, name: str, as_cut: tuple[str, np.ndarray] | None) -> np.ndarray | float:
        """The share of keys that the last part of a causal attention's cut queries sees, by choice."""
        if as_cut is None or not name.endswith(" causal"):
            return 1.0
        queries, keys = (chosen.operands[k].shape[-2] for k in (0, 1))
        held = self._lengths(chosen, 0, -2)

        def pairs(rows: np.ndarray | int) -> np.ndarray:
            """Pairs of queries and keys in the first rows, each of which sees the keys up to its own place."""
            inside: np.ndarray = np.minimum(rows, keys)
            return inside**2 / 2 + (rows - inside) * keys

        return np.where(as_cut[1], (pairs(queries) - pairs(queries - held)) / (held * keys), 1.0)

    def _beside(self, chosen: Chosen, name: str, tensors: int) -> Kernel:
        """A kernel, timed under `name`, that reads and writes `tensors` tensors of the result's size."""
        made = self._made(chosen)
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
        return as_cut, np.array([any(goes_beyond(op, binding, s.cut) for s in c.strategies) for c in chosen.choices])

    def _amounts(self, chosen: Chosen) -> Amounts:
        """The work and traffic of the op's kernel, by choice."""
        sizes = chosen.binding.sizes if chosen.binding else {}
        product, loops = facts_of(chosen.op).flops, chosen.loops
        per_point = product[0] if product else 1.0
        is_product = product is not None and chosen.binding is not None
        roles, groups = None, list[str]()
        if is_product and chosen.binding is not None and not facts_of(chosen.op).heads:
            roles = roles_of(chosen.binding, loops)
            groups = groups_of_rows(chosen.binding, loops) if roles is not None else groups
        traffic = self.traffic(chosen.node, chosen.given)
        count = len(chosen.choices)
        points, moved, back, matrices = np.empty(count), np.empty(count), np.empty(count), np.empty((4, count))
        for i, choice in enumerate(chosen.choices):
            ends = [(t, choice.operand(k)) for k, t in enumerate(chosen.operands)]
            ends += [(t, choice.output(k)) for k, t in enumerate(chosen.outputs)]
            held = [math.prod(largest_local_shape(t.shape, values(flows), self.mesh)) for t, flows in ends]
            nbytes = [n * t.itemsize for n, (t, _) in zip(held, ends, strict=True)]
            moved[i] = sum(share * nbytes[k] for k, share in traffic.forward)
            back[i] = sum(share * nbytes[k] for k, share in traffic.backward) / traffic.gradients
            if is_product:
                local = self.local_sizes(choice, sizes)
                points[i] = math.prod(local[f] for f in loops)
                back[i] = moved[i]
                if roles is not None:
                    matrices[:, i] = [_product(local, factors) for factors in roles]
                    count_of = _product(local, groups)  # Each group is a product of its own with its share of rows.
                    matrices[:2, i] *= count_of, 1 / count_of
            else:
                points[i] = max(held, default=0)
        starts = traffic.starts, traffic.starts_back
        return Amounts(per_point * points, moved, back, starts, None if roles is None else Matrices(*matrices))

    def traffic(self, node: fx.Node, given: Sequence[fx.Node]) -> Traffic:
        """The tensors that an op's kernels read and write: in a group, in a compiled chain, or alone."""
        if node in self.groups:
            return self.groups[node].traffic(given)
        if self.chains is not None:
            return self.chains.traffic(node, given)
        return alone(node, given, self.cluster.device.kernels)

    def local_sizes(self, choice: Choice, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the factors on the fullest device, under one choice."""
        local = dict(sizes)
        for strategy, n in zip(choice.strategies, self.mesh.shape, strict=True):
            for factor in strategy.cut.factors if strategy.cut else ():
                local[factor] = part(local[factor], n, 0)[1]
        return local

    def _made(self, chosen: Chosen) -> np.ndarray:
        """Elements of the first output on the fullest device, by choice."""
        return local_elements(chosen.outputs[0].shape, (values(c.output()) for c in chosen.choices), self.mesh)


def _product(sizes: Mapping[str, int], factors: Sequence[str]) -> int:
    return math.prod(sizes[f] for f in factors)


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
