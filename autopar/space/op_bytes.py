"""`OpBytes`: bytes of what an op makes beside its results and gradients, by choice, on the fullest device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch.fx as fx

from autopar.graph.graph import TensorType, call_of, info, op_name, type_of
from autopar.graph.nodes import tensor_operands
from autopar.ops.entry import facts_of
from autopar.ops.local import OpOnDevice
from autopar.sharding.placement import largest_local_shape
from autopar.sharding.strategies import Choice, gradients, values
from autopar.space.backward_kernels import Backward, End, Held, backward_on, is_read, port_of
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import LocalBytes, Tensors
from autopar.space.saved import work_of
from autopar.space.wiring import Wiring

# bytes, of the shapes of a device's parts by operand, and of the device
BytesOf = Callable[[Sequence[tuple[int, ...]], OpOnDevice], Sequence[float]]


class OpBytes:
    """Tables of one space's ops."""

    def __init__(self, wiring: Wiring, lifetimes: Lifetimes, bytes_: LocalBytes, kind: str) -> None:
        self.wiring = wiring
        self.lifetimes = lifetimes
        self.bytes = bytes_
        self.kind = kind
        self.first_copied = _first_copied(lifetimes)

    def besides(self, op: fx.Node) -> np.ndarray | None:
        """Bytes that an op makes in forward and keeps for its backward; None where there are none."""
        held, back = self.lifetimes.kept[op].besides, self.lifetimes.backward.get(op)
        is_kept = facts_of(op_name(op)).part_keeps is not None and type_of(op).requires_grad
        kept = self._part_keeps(op) if is_kept else None
        if not held:
            return kept
        is_apart = back is not None and back.is_apart and held is back.besides
        own = self._on_parts(op)[0] if is_apart else self._sum(op, held)
        return own if kept is None else own + kept

    def work(self, op: fx.Node) -> tuple[np.ndarray, ...]:
        """Bytes of an op's workspace in forward, and in backward: there beyond what pieces count at its time."""
        facts, first = facts_of(op_name(op)), End(True, 0, False)
        forward, backward = (self._sum(op, [Held(n, first)] if n else []) for n in work_of(op))
        if facts.part_work is not None:
            more, more_back = self._part_work(op)
            forward, backward = forward + more, backward + more_back
        if op in self.lifetimes.backward and (
            facts.scores is not None or (facts.work is None and facts.part_work is None)
        ):
            forward, backward = self._beyond(op)
        return forward, backward

    def _beyond(self, op: fx.Node) -> tuple[np.ndarray, np.ndarray]:
        """Bytes beyond the pieces while the fullest kernel runs: in forward, and in backward.

        In backward pieces count the gradients of all operands and outputs. Those of views are one with that of what
        they show.
        """
        back = self.lifetimes.backward[op]
        if back.is_apart:
            return self._on_parts(op)[1:]
        freed, counted = self._freed(op), self._counted(op, back)

        def is_counted(held: Held) -> bool:
            return not is_read(held.like) or held.like.place in freed

        def beyond() -> tuple[np.ndarray, np.ndarray]:
            steps = (filter(is_counted, step) for step in back.held)
            fullest = np.max([self._sum(op, step) for step in steps], axis=0)
            besides = self._sum(op, back.besides)
            found: np.ndarray = fullest - sum(self._of(op, end) for end in counted) - besides
            made = [self._sum(op, step) for step in back.made] or [besides]
            results = sum(self._of(op, end) for end in self._results(op))
            return np.maximum(np.max(made, axis=0) - results - besides, 0.0), found

        return self.bytes.once(("beyond", freed, *counted), (back, self.wiring.site(op).choices), beyond)

    def _freed(self, op: fx.Node) -> frozenset[int]:
        first = self.lifetimes.kept[op].freed_first
        return frozenset(k for k, value in enumerate(tensor_operands(op)) if value in first)

    def _counted(self, op: fx.Node, back: Backward) -> list[End]:
        """The gradients of a call that pieces count."""
        operands = tensor_operands(op)
        added = {k for k in back.shows if self.lifetimes.added.is_added(operands[k], op)}  # sums in new tensors
        counted = [End(True, place) for place in back.gradients if place not in added]
        for value in self.lifetimes.outputs[op]:
            if type_of(value).requires_grad and self.lifetimes.has_own_gradient(value):
                counted.append(End(False, port_of(value)))
        return counted

    def _results(self, op: fx.Node) -> list[End]:
        """The results of a call that have memory of their own."""
        values = self.lifetimes.outputs[op]
        return [End(False, port_of(value), False) for value in values if not self.lifetimes.memories.is_view[value]]

    def _on_parts(self, op: fx.Node) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The results of `besides` and `_beyond`, found by running the call on the parts of each choice."""
        whole, choices = self.lifetimes.backward[op], self.wiring.site(op).choices
        freed, counted, types = self._freed(op), self._counted(op, whole), list(map(type_of, tensor_operands(op)))
        known: dict[tuple[tuple[int, ...], ...], tuple[float, ...]] = {}

        def on(shapes: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
            back = backward_on(op, self.lifetimes.memories.lies, shapes) or whole
            besides = _bytes(back.besides) + self._shown(op, back.reads - whole.reads, shapes)
            made = max(map(_bytes, back.made), default=besides)
            return float(besides), float(made - besides), float(back.most(freed) - besides)

        def found() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            rows = []
            for choice in choices:
                shapes = tuple(map(tuple, self._parts(choice, types)))
                rows.append(known[shapes] if shapes in known else known.setdefault(shapes, on(shapes)))
            besides, made, most = np.array(rows, float).reshape(-1, 3).T
            made = np.maximum(made - sum(self._of(op, end) for end in self._results(op)), 0.0)
            return besides, made, most - sum(self._of(op, end) for end in counted)

        return self.bytes.once(("on parts", freed, *counted), (whole, choices), found)

    def _shown(self, op: fx.Node, places: Iterable[int], shapes: Sequence[tuple[int, ...]]) -> float:
        """Bytes of memory that backward reads for these operands on parts of these shapes only.

        A part of one row may be a view where the whole is copied. The memory stays for the op that reads it first in
        forward; what others read of it counts again, as where those copy it.
        """
        whole: dict[int, float] = {}
        parts = 0.0
        for place in places:
            value, memory = tensor_operands(op)[place], self.lifetimes.memories.memory[tensor_operands(op)[place]]
            share = math.prod(shapes[place]) / max(1, math.prod(type_of(value).shape))
            if self.first_copied[memory] is op:
                whole[memory] = max(whole.get(memory, 0.0), share * self.lifetimes.memories.bytes_of(memory))
            else:
                parts += share * type_of(value).nbytes
        return sum(whole.values()) + parts

    def _parts(self, choice: Choice, types: Sequence[TensorType]) -> list[tuple[int, ...]]:
        """The shapes of the parts of operands on the fullest device, under one choice."""
        return [largest_local_shape(t.shape, values(choice.operand(i)), self.bytes.mesh) for i, t in enumerate(types)]

    def _sum(self, op: fx.Node, helds: Iterable[Held]) -> np.ndarray:
        """Bytes by choice of tensors, each divided as the tensor of the call that it is like."""
        total = np.zeros(len(self.wiring.site(op).choices))
        for nbytes, like in helds:
            total = total + self._of(op, like) * (nbytes / max(1, self._type(op, like).nbytes))
        return self.bytes.once(("sum", tuple(total.tolist())), (), lambda: total)

    def _of(self, op: fx.Node, end: End) -> np.ndarray:
        side, of = (Choice.operand if end.is_operand else Choice.output), (gradients if end.is_gradient else values)
        return self.bytes.by_choice(self.wiring.site(op).choices, self._type(op, end), Tensors(end.place, side, of))

    def _type(self, op: fx.Node, end: End) -> TensorType:
        return type_of(tensor_operands(op)[end.place]) if end.is_operand else info(op).outputs[end.place]

    def _part_work(self, op: fx.Node) -> tuple[np.ndarray, ...]:
        """Bytes of the workspace of an op's local form in forward and in backward, by choice."""
        call, part_work = call_of(op), facts_of(op_name(op)).part_work
        assert part_work is not None
        like = (op_name(op), op.kwargs.get("is_causal"), op.kwargs.get("dropout_p"), op.kwargs.get("sees"))
        return self._by_parts(op, like, lambda held, here: part_work(call, held, self.kind, here))

    def _part_keeps(self, op: fx.Node) -> np.ndarray:
        """Bytes that an op's local form keeps for its backward, by choice."""
        call, part_keeps = call_of(op), facts_of(op_name(op)).part_keeps
        assert part_keeps is not None
        like = (
            "keeps",
            op_name(op),
            op.kwargs.get("padding_idx") is None,
            op.kwargs.get("is_causal"),
            op.kwargs.get("sees"),
        )
        return self._by_parts(op, like, lambda held, here: (part_keeps(call, held, here),))[0]

    def _by_parts(self, op: fx.Node, like: object, bytes_of: BytesOf) -> tuple[np.ndarray, ...]:
        """Columns of bytes by choice, from the shapes of the parts of each operand on the fullest device."""
        choices, types = self.wiring.site(op).choices, tuple(map(type_of, tensor_operands(op)))

        def made() -> tuple[np.ndarray, ...]:
            rows = [
                bytes_of(self._parts(choice, types), OpOnDevice.fullest(self.bytes.mesh, choice)) for choice in choices
            ]
            return tuple(np.array(column, float) for column in zip(*rows, strict=True))

        return self.bytes.once((like, types), (choices,), made)


def _bytes(helds: Iterable[Held]) -> int:
    return sum(held.nbytes for held in helds)


def _first_copied(lifetimes: Lifetimes) -> dict[int, fx.Node]:
    """For each memory the first op whose backward may read a copy of a value on it."""
    found: dict[int, fx.Node] = {}
    for op in lifetimes.clock.ops:
        back = lifetimes.backward.get(op)
        if back is not None and back.is_apart:
            for place, value in enumerate(tensor_operands(op)):
                if place not in back.reads:
                    found.setdefault(lifetimes.memories.memory[value], op)
    return found
