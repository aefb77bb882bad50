"""Gradients of logits in a memory of their own, and written over the logits."""

from __future__ import annotations

import torch

from autopar.kernels import cross_entropy, cross_entropy_part


def calls(dtype: torch.dtype, device: str):
    """Backward calls of both ops, by name: of logits in memory order, and of those that are turned."""
    dice = torch.Generator().manual_seed(0)
    dy = torch.tensor(0.7, device=device)
    target = torch.tensor([3, -100, 2999, 0, 17, 1500], device=device)
    for columns in (3000, 61):
        for is_turned in (False, True):
            x = torch.randn(6, columns, generator=dice).to(dtype).to(device)
            x = x.t().contiguous().t() if is_turned else x
            lse = torch.stack([x.float().amax(-1), (x.float() - x.float().amax(-1)[:, None]).exp().sum(-1).log()], -1)
            place = target.where(target < columns, -100)
            yield cross_entropy.entropies_backward, "cross_entropy_backward_", (x, dy, place, lse, -100, 0.1)
            start = torch.tensor(10, device=device)
            yield (
                cross_entropy_part.less_here_backward,
                "cross_entropy_part_backward_",
                (x, dy, target, start, lse, -100, 0.1, 4000),
            )


def check(dtype: torch.dtype, device: str) -> None:
    """What is written over logits is, bit for bit, what has a memory of its own."""
    for op, twin, (x, *rest) in calls(dtype, device):
        expected, given = op(x, *rest), x.clone(memory_format=torch.preserve_format)
        made = getattr(torch.ops.autopar, twin)(given, *rest)
        assert made.data_ptr() == given.data_ptr() and made.stride() == x.stride()
        assert torch.equal(made, expected) and not torch.equal(made, x)
