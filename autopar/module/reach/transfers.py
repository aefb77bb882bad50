"""The function that carries reach through each op; ops that are not listed go by their sharding rule."""

from __future__ import annotations

from collections.abc import Callable

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
from autopar.module.reach.rows import NEUTRAL, attention, loss_of_classes, reduced, running, softmax
from autopar.module.reach.values import Reach

SIZED = frozenset(
    {
        "view",
        "expand",
        "narrow",
        "select",
        "split",
        "arange",
        "full",
        "zeros",
        "ones",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "tensor",
        "slice_scatter",
    }
)  # whose arguments may follow a length
TRANSFERS: dict[str, Callable[[OpPair], Reach | list[Reach]]] = {
    "where": where,
    "masked_fill": where,
    "tril": triangle,
    "triu": triangle,
    "transpose": permuted,
    "permute": permuted,
    "t": permuted,
    "view": view,
    "expand": expanded,
    "narrow": narrow,
    "select": select,
    "split": split,
    "cat": end_to_end,
    "stack": end_to_end,
    "pad": more_at_the_ends,
    "slice_scatter": overwritten,
    "select_scatter": overwritten,
    "index": looked_up,
    "softmax": softmax,
    "log_softmax": softmax,
    "cumsum": running,
    "cross_entropy": loss_of_classes,
    "nll_loss": loss_of_classes,
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(NEUTRAL, reduced),
    **dict.fromkeys(
        (
            "arange",
            "full",
            "full_like",
            "zeros",
            "ones",
            "zeros_like",
            "ones_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "tensor",
        ),
        from_nothing,
    ),
}
