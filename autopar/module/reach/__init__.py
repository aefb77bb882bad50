"""Reach of padding: which elements of a program depend on what stands behind the ends of its sequences.

    two graphs    of one call, unpadded and longer; they are walked op by op together
    a value       of the longer one, element by element: whether it is padding or depends on padding, and whether it is
                  known before anything runs, as masks are
    an op         carries both on: by its rule; an op that moves elements, or makes them of sizes, by running it in both
                  programs on labels; and a few ops by what they are: a sum leaves out known zeros, a softmax known
                  -inf, a cross entropy the index that it ignores, attention what its mask or the causal order hides

Elements that the unpadded call has too must not depend on padding: `check_reach` raises an error that names the first
op at which they do. Only what is known is computed, so the finding holds for every batch. Two things are assumed, as
they hold in practice: a number of -1e9 or less added to a score hides it, and every row of a softmax or of attention
has something that is not hidden.
"""

from __future__ import annotations

from autopar.module.reach.check import check_reach

__all__ = ["check_reach"]
