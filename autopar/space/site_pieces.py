"""Memory of sites: parameters, gradients and optimizer states, inputs and buffers, values and workspace of ops."""

from __future__ import annotations

import numpy as np
import torch.fx as fx

from autopar.graph.graph import Graph, TensorType, info, op_name, type_of
from autopar.graph.nodes import tensor_operands
from autopar.sharding.costs import optimizer_figures
from autopar.sharding.strategies import Choice, gradients
from autopar.space.gradient_buckets import GradientBuckets
from autopar.space.lifetimes import Clock, Lifetimes
from autopar.space.local_bytes import VALUE, LocalBytes, Tensors
from autopar.space.memory import Piece
from autopar.space.op_bytes import OpBytes
from autopar.space.setting import Setting
from autopar.space.wiring import Wiring


class SitePieces:
    """The memory pieces of a space's sites, in the order in which nodes are added."""

    def __init__(
        self,
        graph: Graph,
        setting: Setting,
        wiring: Wiring,
        lifetimes: Lifetimes,
        buckets: GradientBuckets,
        bytes_: LocalBytes,
        op_bytes: OpBytes,
    ) -> None:
        self.graph = graph
        self.optimizer = setting.optimizer
        self.kind = setting.cluster.device.kernels
        self.wiring = wiring
        self.clock: Clock = lifetimes.clock
        self.lifetimes = lifetimes
        self.buckets = buckets
        self.bytes = bytes_
        self.op_bytes = op_bytes
        self.updates = {n: k for k, n in enumerate(buckets.closes)}  # parameter -> index of its update
        self.found: list[Piece] = []

    def add(self, node: fx.Node) -> None:
        """Add the pieces of a node."""
        kind = info(node).kind
        if kind == "parameter":
            self._parameter(node)
        elif kind in ("input", "buffer"):
            held = self.bytes.scaled(self._local(node, type_of(node)), self.graph.copies_of_input(node))
            self._put("inputs and buffers", node, held, 0, self.clock.last)
        elif kind == "op":
            self._op(node)

    def _put(self, kind: str, node: fx.Node, bytes_: np.ndarray, first: int, last: int) -> None:
        if first <= last and self.bytes.is_any(bytes_):
            self.found.append(Piece(kind, self.wiring.index[node], False, bytes_, first, last))

    def _local(self, node: fx.Node, type_: TensorType, tensors: Tensors = VALUE) -> np.ndarray:
        return self.bytes.by_choice(self.wiring.site(node).choices, type_, tensors)

    def _parameter(self, node: fx.Node) -> None:
        """Add a parameter, its gradient, its optimizer states, and the temporaries of the optimizer's step."""
        type_, always = type_of(node), self.clock.last
        whole = self._local(node, type_)
        site = self.wiring.site(node)
        away = site.parts_on_host
        # Edges count a part that lies on the host, while it is on the device.
        held = self.bytes.where(whole, tuple(not is_away for is_away in away)) if away else whole
        self._put("parameters", node, held, 0, always)
        if node not in self.buckets.closes:
            return
        figures = optimizer_figures(self.optimizer, type_.itemsize)
        begins = self.buckets.lies_from(node)
        self._put("gradients", node, held, begins, always)
        if away:
            ends = self.clock.settled if self.buckets.accumulates else self.buckets.leaves[node]
            self._put("gradients", node, self.bytes.where(whole, away), begins, ends)
        if self.buckets.adds_twice and node not in self.buckets.wait:
            self._put("gradients", node, held, 0, self.clock.settled)
        states = self.bytes.scaled(whole, figures["kept"])
        if policies := site.policies:
            states = self.bytes.where(states, tuple(not policy.on_host for policy in policies))
        self._put("optimizer states", node, states, 0, always)
        temporary = self.bytes.scaled(held, figures["temporary"])
        if self.clock.updates > 1:
            # one parameter after the other: two tensors for the while, of which one stays until the next has made its
            # own
            own = 2 * self.clock.n + self.updates[node]
            self._put("step temporaries", node, self.bytes.scaled(held, 2 * figures["temporary"]), own, own)
            self._put("step temporaries", node, temporary, own + 1, min(own + 1, always))
        elif self.kind == "cuda":
            self._put("step temporaries", node, temporary, always, always)

    def _op(self, op: fx.Node) -> None:
        """Add the values of an op, what it keeps for its backward, and its workspace."""
        if op in self.lifetimes.inner:
            return
        now, back = self.clock.at[op], self.clock.back(op)
        for port, value in self._ports(op):
            if not self.lifetimes.memories.is_view[value]:
                self._value(op, port, value)
            if self.lifetimes.has_own_gradient(value) and type_of(value).requires_grad:
                self._gradient(op, port, value)
            if op_name(op) == "identity" and type_of(value).requires_grad:
                self._sums(op, port, value)
        if (besides := self.op_bytes.besides(op)) is not None:
            self._put("saved activations", op, besides, now, back)
        if info(op).chunks > 1:
            self._sums_of_chunks(op, now, back)
        if op in self.lifetimes.runs_with:
            return
        gives_gradient = any(t.requires_grad for t in info(op).outputs)
        times = (now, back) if gives_gradient else (now,)
        for time, made in zip(times, self.op_bytes.work(op)):
            self._put("transients", op, made, time, time)

    def _ports(self, op: fx.Node) -> list[tuple[int, fx.Node]]:
        outputs = self.lifetimes.outputs[op]
        return [(value.args[1] if info(value).kind == "part" else 0, value) for value in outputs]

    def _value(self, op: fx.Node, port: int, value: fx.Node) -> None:
        """Add a value that an op makes."""
        end = self.lifetimes.stays(value)
        kind = "saved activations" if end >= self.clock.n else "transients"
        self._put(kind, op, self._local(op, type_of(value), Tensors(port)), self.clock.at[op], end)

    def _gradient(self, op: fx.Node, port: int, value: fx.Node) -> None:
        """Add the gradient of a value that an op makes."""
        begins = self.clock.mirrored(self.lifetimes.last_use(value))
        if self.lifetimes.memories.memory[value] in self.lifetimes.taken_over:
            begins += 1  # The gradient overwrites memory that is still counted at this time.
        lies = self._local(op, type_of(value), Tensors(port, of=gradients))
        self._put("gradients of activations", op, lies, begins, self.clock.back(op))

    def _sums(self, op: fx.Node, port: int, value: fx.Node) -> None:
        """Add the memory of summing the gradients of several uses: the one that comes, and the new sum."""
        sums = list(self.lifetimes.added.sums(value))
        if not sums:
            return
        lies = self._local(op, type_of(value), Tensors(port, of=gradients))
        is_parameter = op in self.lifetimes.parameters.owners
        kind = "gradients" if is_parameter else "gradients of activations"
        comes = self.bytes.scaled(lies, 2 if is_parameter else 1)
        if is_parameter:
            self._put(kind, op, lies, self.clock.mirrored(self.lifetimes.last_use(value)), self.clock.back(op))
        for first, last in sums:
            self._put(kind, op, comes, first, last)

    def _sums_of_chunks(self, op: fx.Node, now: int, back: int) -> None:
        """Add the gradients of whole values that chunks add up, beside which each chunk makes its own.

        Sums of 16-bit gradients are kept in single precision; gradients of rows lie side by side and need no sum.
        """
        for place, operand in enumerate(tensor_operands(op)):
            type_ = type_of(operand)
            if not type_.requires_grad or info(operand).chunks > 1:
                continue
            lies = self._local(op, type_, Tensors(place, Choice.operand, gradients))
            is_rows = op_name(op) == "chunk"
            width = 1.0 if is_rows else max(4, type_.itemsize) / type_.itemsize
            kind = "gradients of activations" if is_rows else "gradients"
            self._put(kind, op, self.bytes.scaled(lies, width), now, back)
