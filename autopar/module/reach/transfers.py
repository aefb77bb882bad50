"""The table of functions that carry reach through an op: by the `reach` of the op's entry, or by its sharding rule."""

from __future__ import annotations

from collections.abc import Callable

from autopar.module.reach.by_rule import by_rule
from autopar.module.reach.lookups import looked_up
from autopar.module.reach.numbers import from_nothing, triangle, where
from autopar.module.reach.pairs import OpPair
from autopar.module.reach.places import (
    end_to_end,
    expanded,
    more_at_the_ends,
    narrow,
    overwritten,
    permuted,
    select,
    split,
    view,
)
from autopar.module.reach.rows import attention, loss_of_classes, reduced, running, softmax
from autopar.module.reach.values import Reach
from autopar.ops.entry import facts_of

# Transfer functions by the `reach` of an op's entry.
TRANSFERS: dict[str, Callable[[OpPair], Reach | list[Reach]]] = {
    "": by_rule,
    "choice": where,
    "triangle": triangle,
    "permuted": permuted,
    "view": view,
    "expanded": expanded,
    "narrow": narrow,
    "select": select,
    "split": split,
    "end to end": end_to_end,
    "pad": more_at_the_ends,
    "overwritten": overwritten,
    "looked up": looked_up,
    "softmax": softmax,
    "running": running,
    "classes": loss_of_classes,
    "attention": attention,
    "from nothing": from_nothing,
}


def transfer_of(op: str) -> Callable[[OpPair], Reach | list[Reach]]:
    """The function that carries reach through an op."""
    facts = facts_of(op)
    return TRANSFERS[facts.reach] if facts.neutral is None else reduced
