"""`AddedGradients`: the times at which gradients of several uses of a value are added."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.fx as fx

from autopar.graph.graph import info
from autopar.graph.layers import innermost_block

if TYPE_CHECKING:
    from autopar.space.lifetimes import Clock


class AddedGradients:
    """The gradients of a graph's values that several ops give."""

    def __init__(
        self, clock: Clock, users: Mapping[fx.Node, Sequence[fx.Node]], is_view: Mapping[fx.Node, bool]
    ) -> None:
        self.clock = clock
        self.users = users
        self.is_view = is_view
        # op -> the first op of its block: gradients from other blocks are added there
        self.begins: dict[int, int] = {}
        for _, several in itertools.groupby(clock.ops, lambda op: innermost_block(info(op).module)):
            alike = [clock.at[op] for op in several]
            self.begins.update(dict.fromkeys(alike, alike[0]))

    def sums(self, value: fx.Node) -> Iterator[tuple[int, int]]:
        """First and last times of gradients that lie beside the one that the last of several uses gives.

        A gradient is added where it comes. Those that ops of another block give are added up apart, and added to the
        others where the backward of that block ends.
        """
        mirrored, uses = self.clock.mirrored, self.uses(value)
        for use, later in zip(uses[-2::-1], uses[:0:-1], strict=True):
            begins = self._enters(value, use)
            yield mirrored(use), mirrored(use if begins is None or begins == self.begins[later] else begins)

    def apart(self, value: fx.Node, op: fx.Node) -> int | None:
        """The time until which the gradient of one of several uses stays apart; None if it is added at once.

        It is added where another use of its block gives one, or where the backward of the block ends.
        """
        uses, at, begins = self.uses(value), self.clock.at[op], self.begins
        enters = self._enters(value, at)
        if not self.is_view[value] or enters is None or any(at < use and begins[use] == enters for use in uses):
            return None
        before = [use for use in uses if use < at and begins[use] == enters]
        return self.clock.mirrored(before[-1] if before else enters)

    def _enters(self, value: fx.Node, use: int) -> int | None:
        """The index of the first op of a reader's block; None where the value is made in that block too."""
        begins = self.begins[use]
        return begins if begins > self.clock.made_at(value) else None

    def is_added(self, value: fx.Node, op: fx.Node) -> bool:
        """Whether the gradient that an op gives a value is added at once to what later uses gave."""
        return len(self.uses(value)) > 1 and self.apart(value, op) is None

    def uses(self, value: fx.Node) -> list[int]:
        """The indices of the ops that read a value and give it a gradient."""
        return sorted({self.clock.at[u] for u in self.users[value] if u in self.clock.at and _gives_gradient(u)})


def _gives_gradient(op: fx.Node) -> bool:
    return any(t.requires_grad for t in info(op).outputs)
