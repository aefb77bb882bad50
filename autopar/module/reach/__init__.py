"""Reach of padding: which numbers of a program depend on what stands behind the ends of its sequences.

    two graphs    of one call, as it is and as it is longer; they go op by op together
    a value       of the longer one, number by number: is it padding, or does it depend on padding; and is it known
                  before anything is run, as masks are
    an op         carries both on: by its rule, and a few ops by what they are: a sum leaves out known zeros, a softmax
                  known -inf, a cross entropy the index that it ignores, attention what its mask or the causal order
                  hides

Numbers that the call as it is has too must not depend on padding: `check_reach` raises an error that names the first op
at which they do. Nothing is run but what is known, so the finding holds for every batch. Two things are taken as they
are in practice: a number of -1e9 or less added to a score hides it, and a row of a softmax or of attention has
something that is not hidden.
"""

from __future__ import annotations

from autopar.module.reach.check import check_reach

__all__ = ["check_reach"]
