"""A layer norm with weight and bias."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, Written, are_alike, through
from autopar.kernels.patterns import Match, Pattern
from autopar.kernels.rows import gradients_of_rows, normalised_rows


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The op that the kernel stands for."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@custom_op("autopar::layer_norm")
def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The layer norm over the last dim."""
    if not backend.runs(x):
        return reference(x, weight, bias, eps).contiguous()
    return normalised_rows(x, None, weight, bias, eps, rounds=False)[1]


@backward_of(normalised, "x weight bias")
def normalised_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, of the weight and of the bias."""
    if not backend.runs(x):
        return through(lambda x, w, b: reference(x, w, b, eps), dy, x, weight, bias)
    return gradients_of_rows(dy, None, x, weight, eps, means=True)


layer_norm = call_of(normalised, reference)


def is_served(found: Match) -> bool:
    """Whether it normalises the last dim alone."""
    nodes = [found["x"], found["weight"], found["bias"]]
    return tuple(found["SHAPE"]) == (type_of(found["x"]).shape[-1],) and are_alike(nodes)


_CALL = "y = layer_norm(input=x, normalized_shape=SHAPE, weight=weight, bias=bias"
WRITTEN: tuple[Written, ...] = ((f"{_CALL}, eps=EPS)", {}), (f"{_CALL})", {"eps": 1e-5}))  # calls on rows x
PATTERNS = tuple(Pattern.of(text, **variant) for text, variant in WRITTEN)
FAMILY = Family("layer_norm", PATTERNS, layer_norm, reference, is_served)
