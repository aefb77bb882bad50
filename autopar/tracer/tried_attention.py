"""Whether an attention function is one that the op `attention` computes: both are tried on a small example.

Models bring attention functions of their own, which differ in how they find the scale, cap scores, add sinks, or treat
a query that sees nothing. What counts is what they compute, so that no list of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ops.attention import attend
from autopar.runtime.sees import Sees, all_pairs


class NotTried(Exception):
    """Raised where an attention function reads something that the example does not have."""


@dataclass(frozen=True, slots=True)
class Example:
    """The properties of a call that its small example shares."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    mask_dtype: torch.dtype | None  # None: the function gets no mask
    is_padded: bool
    softcap: float | None
    scale: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an example."""

    is_same: bool
    has_weights: bool = False  # whether the function returns its weights too
    sinks: str = ""  # the attribute of the module that holds sinks which it was not given


class _StandIn:
    """A module whose only tensor is one of sinks; everything else is that of the model's own module."""

    def __init__(self, module: nn.Module, sinks: Tensor) -> None:
        self.module = module
        self.sinks_of_example = sinks
        self.sinks_read = ""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if isinstance(value, Tensor) and value.shape == self.sinks_of_example.shape:
            self.sinks_read = name
            return self.sinks_of_example
        if isinstance(value, (Tensor, nn.Module)):
            raise NotTried(f"it reads {name}")
        return value


def tried(function: Callable[..., Any], module: nn.Module, example: Example, how: Mapping[str, Any]) -> Outcome:
    """Call `function` on a small example, with the settings of the call, and compare with the op."""
    places = 7  # more than the window below
    close = 1e-5  # relative: many of the functions take their softmax in single precision
    query = _numbers(2, example.heads, places, example.width)
    key = _numbers(2, example.kv_heads, places, example.width, turn=1.3)
    value = _numbers(2, example.kv_heads, places, example.value_width, turn=2.1)
    sinks = _numbers(example.heads, turn=0.7)
    counts = torch.ones(2, places, dtype=torch.bool)
    counts[0, : 3 if example.is_padded else 0] = False
    is_masked = example.mask_dtype is not None
    sees = Sees(left=4 if is_masked else None, right=0 if is_masked else None)
    mask = all_pairs(sees, places, places, counts=counts).expand(2, 1, places, places)
    given = mask
    if example.mask_dtype is not None and example.mask_dtype.is_floating_point:
        given = torch.zeros((), dtype=query.dtype).where(mask, torch.finfo(query.dtype).min)
    stand_in = _StandIn(module, sinks)
    how = {**how, **({"s_aux": sinks} if example.has_sinks else {})}
    try:
        found, weights = function(stand_in, query, key, value, given if is_masked else None, **how)
    except Exception:  # Whatever a function does not take here, it is not one that the op computes.
        return Outcome(False)
    has_sinks = example.has_sinks or bool(stand_in.sinks_read)
    text = Sees(sees.left, sees.right, softcap=example.softcap, scale=example.scale).text()
    expected = attend(query, key, value, None, counts, sinks if has_sinks else None, text).transpose(1, 2)
    is_same = found.shape == expected.shape and torch.allclose(found.double(), expected, close, close)
    return Outcome(is_same, weights is not None, "" if example.has_sinks else stand_in.sinks_read)


def _numbers(*shape: int, turn: float = 1.0) -> Tensor:
    """Numbers without a pattern that a shape could hide, and no draw: those would be the model's."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (2 * torch.sin(turn * places * places + places)).view(shape)
