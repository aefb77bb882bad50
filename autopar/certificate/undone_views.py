"""`UndoneViews`: the views of each op, among them those that are taken to undo an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch.fx as fx

from autopar.certificate.types import Type, lie_alike


@dataclass(slots=True)
class UndoneViews:
    """The views that were typed so far, and the assumptions that were made about them."""

    typed: dict[str, list[tuple[Type, Type]]] = field(default_factory=dict)  # op -> types before and after its views
    assumed: set[fx.Node] = field(default_factory=set)  # views that are taken to undo an earlier one
    suspects: set[fx.Node] = field(default_factory=set)  # views taken so that may cause a refusal

    def add(self, op: str, before: Type, after: Type) -> None:
        """Note a view of an op; "" stands for no op."""
        if op:
            self.typed.setdefault(op, []).append((before, after))

    def undone(self, node: fx.Node, op: str, x: Type, shape: tuple[int, ...]) -> Type | None:
        """The type of a view of `x` with this shape if it undoes an earlier view of its op; None if none does."""
        for before, after in self.typed.get(op, ()):
            if before.shape == shape and lie_alike(x, after):
                self.assumed.add(node)
                return replace(x, dims=before.settled(x.open).dims)
        return None

    def suspect(self, node: fx.Node, comes_of: Callable[[fx.Node], str]) -> None:
        """Suspect the undone views on the way, inside of one op, to what a node reads."""
        seen: set[fx.Node] = set()
        left = list(node.all_input_nodes)
        while left:
            value = left.pop()
            if value not in seen:
                seen.add(value)
                op = comes_of(value)
                left += [n for n in value.all_input_nodes if op and comes_of(n) == op]
        self.suspects |= seen & self.assumed
