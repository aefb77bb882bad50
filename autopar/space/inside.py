"""What an op does inside when it runs: the dtypes in which it computes, and whether it gives the same results twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.runtime.private import TorchDispatchMode, function_of
from autopar.sharding.placement import R
from autopar.space.limits import LIMITS
from autopar.space.trial import TOLERANCE, difference, tupled

_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


class _Inside(TorchDispatchMode):
    """Notes the dtypes of all that runs, and fills memory that nobody has written with a number."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.fill = fill

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = function._schema.name.partition("::")
        behind = function_of(function._schema.name) if space != "aten" else None
        if behind is None:
            result = function(*args, **(kwargs or {}))
        else:
            with self:
                result = behind(*args, **(kwargs or {}))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.dtypes.update(t.dtype for t in made)
        if name in _EMPTY:
            for t in made:
                t.fill_(self.fill)
        return result


def looked_inside(run: Callable[[], Any], is_python: bool) -> tuple[float, str]:
    """The tolerance of a call by the coarsest dtype inside it, and why the call cannot be tried, if so."""
    state = torch.get_rng_state()
    with torch.enable_grad():
        results = [t.detach() for t in tupled(run())]
    if not torch.equal(torch.get_rng_state(), state):
        return 0.0, "it draws random numbers"
    if any(t.is_complex() for t in results):
        return 0.0, "its results are complex"
    again = []
    dtypes_inside: set[torch.dtype] = set()
    for fill in (0, 1):  # an op that reads unwritten memory gives a different result for each fill
        with _Inside(fill) as inside:
            again.append([t.detach() for t in tupled(run())])
        dtypes_inside |= inside.dtypes
    dtypes = dtypes_inside.union(r.dtype for r in results)
    tolerance = max((TOLERANCE.get(dtype, LIMITS.coarse) for dtype in dtypes if dtype.is_floating_point), default=0.0)
    if not is_python:  # dtypes inside compiled code are unknown
        tolerance = max(tolerance, TOLERANCE[torch.float32])
    for one, other in itertools.chain(zip(results, again[0], strict=True), zip(*again, strict=True)):
        largest, scale = difference([other], R, one)
        if largest > max(tolerance, TOLERANCE.get(one.dtype, 0.0)) * scale:
            return tolerance, "it gives something else each time"
    return tolerance, ""
