"""`TensorForm`: everything that a trace depends on of a tensor, without its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor's shape, strides and dtype, and whether it wants a gradient."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(tensor: Tensor) -> TensorForm:
        return TensorForm(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def of_gradient(self) -> TensorForm:
        """The form of a gradient that torch makes for such a tensor, as by `torch.empty_like`."""
        return TensorForm.of(torch.empty_like(self.empty("meta").detach()))

    def empty(self, device: str) -> Tensor:
        """A tensor of this form on a device."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)

    def lies_like(self, tensor: Tensor) -> bool:
        """Does a tensor of this shape lie in memory so? Strides of dims of one element are free."""
        dims = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(mine == theirs for size, mine, theirs in dims if size > 1)
