"""One step of AdamW on a shard, in one kernel: parameter and states are read and written once, in single precision.

It replaces no ops of a program: `autopar.optim.AdamW` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from autopar.kernels import backend
from autopar.kernels.backend import jit, tl

BLOCK, WARPS = 1024, 4
_PIECE = 2**16  # elements that the ops go over at a time: what they make for the while stays small


@dataclass(frozen=True, slots=True)
class Rates:
    """Hyperparameters and number of a step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    step: int  # the first step is 1

    @property
    def kept(self) -> float:
        """Factor by which weight decay scales a parameter."""
        return 1 - self.lr * self.decay

    @property
    def length(self) -> float:
        """Learning rate, with the bias correction of the average of gradients."""
        return self.lr / (1 - self.betas[0] ** self.step)

    @property
    def root(self) -> float:
        """Square root of the bias correction of the average of squares."""
        return math.sqrt(1 - self.betas[1] ** self.step)


@jit
def kernel(P, G, M, V, W, SCALE, count, kept, length, root, beta1, beta2, eps,
           IS_SCALED: tl.constexpr, HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Updates a block of elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    if IS_SCALED:
        g *= tl.load(SCALE)
    if HAS_MASTER:
        p = tl.load(W + at, mask=inside, other=0.0)
    else:
        p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(M + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    m += (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    p = p * kept - length * m / (tl.sqrt(v) / root + eps)
    tl.store(M + at, m, mask=inside)
    tl.store(V + at, v, mask=inside)
    if HAS_MASTER:
        tl.store(W + at, p, mask=inside)
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)


def step(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    squares: Tensor,
    master: Tensor | None,
    scale: Tensor | None,
    rates: Rates,
) -> None:
    """Update a shard, its states and its master copy in place, by the gradient times `scale`."""
    tensors = [t for t in (parameter, average, squares, master) if t is not None]
    if backend.runs(parameter) and all(t.is_contiguous() for t in tensors) and parameter.numel():
        count = parameter.numel()
        numbers = (rates.kept, rates.length, rates.root, *rates.betas, rates.eps)
        given = parameter, gradient.contiguous(), average, squares
        beside = parameter if master is None else master, average if scale is None else scale
        how = {"IS_SCALED": scale is not None, "HAS_MASTER": master is not None, "BLOCK": BLOCK, "num_warps": WARPS}
        kernel[(-(-count // BLOCK),)](*given, *beside, count, *numbers, **how)
        return
    exact = parameter if master is None else master
    for p, w, g, m, v in _pieces(parameter, exact, gradient, average, squares):
        wide = g.to(m.dtype)
        by_ops(w, wide if scale is None else wide * scale, m, v, rates)
        if master is not None:
            p.copy_(w)


def fused(
    parameter: Tensor, gradient: Tensor, average: Tensor, squares: Tensor, scale: Tensor | None, rates: Rates
) -> None:
    """The step of tensors of a CPU by torch's own kernel, on all of its cores, in one pass over memory."""
    wide = gradient.to(average.dtype)
    adamw(
        [parameter],
        [wide if scale is None else wide * scale],
        [average],
        [squares],
        [],
        [torch.tensor(float(rates.step - 1))],
        fused=True,
        amsgrad=False,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        lr=rates.lr,
        weight_decay=rates.decay,
        eps=rates.eps,
        maximize=False,
    )


def _pieces(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The same elements of all tensors, a piece at a time.

    Where tensors are small, or one is not contiguous, they come whole.
    """
    if tensors[0].numel() <= _PIECE or not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    flat = [t.view(-1) for t in tensors]
    for start in range(0, tensors[0].numel(), _PIECE):
        yield [t[start : start + _PIECE] for t in flat]


def by_ops(parameter: Tensor, gradient: Tensor, average: Tensor, squares: Tensor, rates: Rates) -> None:
    """The step by the ops of torch.optim.AdamW, in their order."""
    parameter.mul_(rates.kept)
    average.lerp_(gradient, 1 - rates.betas[0])
    squares.mul_(rates.betas[1]).addcmul_(gradient, gradient, value=1 - rates.betas[1])
    parameter.addcdiv_(average, (squares.sqrt() / rates.root).add_(rates.eps), value=-rates.length)
