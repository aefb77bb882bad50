"""`OpSeconds`: seconds of an op's choices on the fullest device, as FLOPs and bytes say or as they were measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, TensorType, info, op_name
from autopar.ops.entry import facts_of, timed_name
from autopar.sharding.cluster import Timed
from autopar.sharding.costs import measured_seconds, seconds, step_seconds
from autopar.sharding.notation import Binding
from autopar.sharding.placement import largest_local_shape, part
from autopar.sharding.strategies import Choice, values
from autopar.space.saved import memories
from autopar.space.setting import Setting

Ways = tuple[np.ndarray, ...]  # seconds in forward and in backward, by choice; none of what is free


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """An op's call, and the choices that it has."""

    node: fx.Node
    binding: Binding | None
    choices: Sequence[Choice]
    operands: Sequence[TensorType]

    @property
    def op(self) -> str:
        return op_name(self.node)

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return info(self.node).outputs

    @property
    def trained(self) -> list[TensorType]:
        return [t for t in self.operands if t.requires_grad]


class OpSeconds:
    """Prices of ops on a machine."""

    def __init__(self, graph: Graph, setting: Setting) -> None:
        self.mesh = setting.mesh
        self.cluster = setting.cluster
        self.copied = _copies(graph) if setting.cluster.timed else frozenset()

    def compute(self, chosen: Chosen) -> Ways:
        """Seconds of computing."""
        dtype = chosen.outputs[0].dtype
        is_timed = self.cluster.times_of("add", dtype if "float" in dtype else "float32") is not None
        facts = facts_of(chosen.op)
        if facts.free and not is_timed:
            return ()
        per_point, points, moved = self._amounts(chosen)
        if is_timed:
            return self._measured(chosen, per_point * points, moved)
        device, trained = self.cluster.device, len(chosen.trained)
        run = seconds(
            "compute",
            flops=per_point * points,
            bytes=moved,
            rate=device.rate(dtype),
            bandwidth=device.memory_bytes_per_s,
            launch=device.launch_s,
        )
        return run, run * (trained if facts.flops else min(trained, 1))

    def _amounts(self, chosen: Chosen) -> tuple[float, np.ndarray, np.ndarray]:
        """FLOPs for each point of the loops; points and bytes by choice."""
        sizes = chosen.binding.sizes if chosen.binding else {}
        product = facts_of(chosen.op).flops
        per_point, unlooped = product or (1.0, "")
        loops = [f for f in sizes if not re.fullmatch(unlooped, f)]
        is_product = product is not None and chosen.binding is not None
        points, moved = np.empty(len(chosen.choices)), np.empty(len(chosen.choices))
        for i, choice in enumerate(chosen.choices):
            ends = [(t, choice.operand(k)) for k, t in enumerate(chosen.operands)]
            ends += [(t, choice.output(k)) for k, t in enumerate(chosen.outputs)]
            held = [math.prod(largest_local_shape(t.shape, values(flows), self.mesh)) for t, flows in ends]
            moved[i] = sum(n * t.itemsize for n, (t, _) in zip(held, ends, strict=True))
            if is_product:
                local = self._local_sizes(choice, sizes)
                points[i] = math.prod(local[f] for f in loops)
            else:
                points[i] = max(held, default=0)
        return per_point, points, moved

    def _local_sizes(self, choice: Choice, sizes: Mapping[str, int]) -> dict[str, int]:
        """The factors' sizes on the fullest device."""
        local = dict(sizes)
        for strategy, n in zip(choice.strategies, self.mesh.shape, strict=True):
            for factor in strategy.cut.factors if strategy.cut else ():
                local[factor] = part(local[factor], n, 0)[1]
        return local

    def _times(self, name: str) -> Timed | None:
        return self.cluster.times_of(name, "float32")

    def _curve(self, name: str, amounts: np.ndarray) -> np.ndarray:
        """Measured seconds of the forward of an op, or of a sum of two where nobody measured it."""
        return measured_seconds(self._timed(name).forward, amounts)

    def _timed(self, name: str) -> Timed:
        found = self._times(name) or self._times("add")
        assert found is not None  # or ops would not be priced by tables
        return found

    def _measured(self, chosen: Chosen, amounts: np.ndarray, moved: np.ndarray) -> Ways:
        """Seconds as they were measured, by the amounts that choices leave to a device.

        FLOPs of products, elements of the largest tensor of other ops.
        """
        op, trained, nothing = chosen.op, chosen.trained, np.zeros(len(chosen.choices))
        if op == "identity":  # the gradients of its uses are added
            back = (len(chosen.node.users) - 1) * self._curve("add", self._made(chosen)) if trained else nothing
            return nothing, back
        facts, name = facts_of(op), timed_name(op, chosen.node.kwargs)
        found = self._times(name) or self._times(op)
        if facts.free and found is None:  # a view, but where it cannot be one
            is_copied = chosen.node in self.copied
            return (self._curve("copy turned", self._made(chosen)), nothing) if is_copied else ()
        if found is None:  # nobody measured it: it reads and writes as a sum of two does
            run = self._curve("add", moved / 12)
            return run, run if trained else nothing
        forward, back = self._whole_or_cut(chosen, found, name, amounts)
        if facts.flops and not facts.joint:
            matrices: int = sum(len(t.shape) > 1 for t in trained)
            biases: np.ndarray = (len(trained) - matrices) * self._curve("sum over rows", self._made(chosen))
            return forward, matrices * back + biases
        if facts.spreads and not name.endswith("number"):
            broadcast = sum(math.prod(t.shape) < math.prod(chosen.outputs[0].shape) for t in trained)
            sums: np.ndarray = broadcast * self._curve("sum over rows", self._made(chosen))
            return forward, len(trained) * back + sums
        return forward, back if trained else nothing

    def _whole_or_cut(
        self, chosen: Chosen, whole: Timed, name: str, amounts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each way; an op that counts positions was measured where it is cut, too."""
        op = chosen.op
        forward, back = measured_seconds(whole.forward, amounts), measured_seconds(whole.backward, amounts)
        # the last part of causal attention sees nearly all keys: it takes as long as without a mask
        as_cut = op if name == f"{op} causal" else f"{op} cut"
        if not facts_of(op).counts or not self._times(as_cut):
            return forward, back
        cut, is_cut = self._timed(as_cut), np.array([_is_counted(op, c) for c in chosen.choices])
        return (
            np.where(is_cut, measured_seconds(cut.forward, amounts), forward),
            np.where(is_cut, measured_seconds(cut.backward, amounts), back),
        )

    def _made(self, chosen: Chosen) -> np.ndarray:
        """Elements of the first output."""
        shape = chosen.outputs[0].shape
        held = [largest_local_shape(shape, values(c.output()), self.mesh) for c in chosen.choices]
        return np.array([math.prod(local) for local in held], float)

    def exchange(self, chosen: Chosen) -> np.ndarray | float:
        """Seconds of what local forms exchange themselves.

        Two sums of each factor that is left, forward and again backward.
        """
        binding, outputs = chosen.binding, chosen.outputs
        if binding is None or not binding.inside:
            return 0.0
        left = math.prod(n for f, n in binding.sizes.items() if f not in binding.inside) * outputs[0].itemsize
        exchanges = 2 * (1 + any(t.requires_grad for t in outputs))
        levels = [self.cluster.levels(self.mesh, a, "all_reduce") for a in range(len(self.mesh.shape))]
        price = [exchanges * step_seconds("all_reduce", of_axis, left, self.cluster.device) for of_axis in levels]
        found = []
        for choice in chosen.choices:
            inside = [s.cut is not None and binding.is_inside(s.cut) for s in choice.strategies]
            found.append(sum(p for p, is_inside in zip(price, inside, strict=True) if is_inside))
        return np.array(found)


def _is_counted(op: str, choice: Choice) -> bool:
    """Does an axis cut a factor along which the op counts positions?"""
    factors = [f for s in choice.strategies if s.cut for f in s.cut.factors]
    return any(re.fullmatch(facts_of(op).counts, f) for f in factors)


def _copies(graph: Graph) -> frozenset[fx.Node]:
    """The ops that show their operand's memory elsewhere, and cannot here."""
    memory = memories(graph)

    def is_copied(node: fx.Node) -> bool:
        if info(node).kind != "op" or not facts_of(op_name(node)).free:
            return False
        shares = any(memory[node] == memory[a] for a in node._input_nodes)
        return not shares and not any(info(u).kind == "part" for u in node.users)

    return frozenset(filter(is_copied, graph.nodes))
