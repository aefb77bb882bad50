"""Results and gradients that calls of kernels give for parts of an attention, put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.dealing import empty_rows
from autopar.runtime.sees import Tile
from autopar.runtime.segments import Rows


class Parts:
    """What calls on tiles give, put together in the dtype of accumulation; one call on all stays as it is."""

    def __init__(self, shape: Sequence[int], wide: torch.dtype, like: Tensor) -> None:
        self.shape = tuple(shape)
        self.wide = wide
        self.like = like
        self.whole: Tensor | None = None

    def takes(self, x: Tensor) -> bool:
        """Whether this is the first part, and all of it."""
        if self.whole is None and x.shape == self.shape:
            self.whole = x
            return True
        return False

    def total(self) -> Tensor:
        """The tensor to which parts are added."""
        if self.whole is None:
            self.whole = empty_rows(self.like, self.shape[2], self.shape[3], self.wide).zero_()
        self.whole = self.whole.to(self.wide)
        return self.whole

    def found(self) -> Tensor:
        """All parts together; zeros where there are none."""
        return self.total() if self.whole is None else self.whole

    def add(self, where: tuple[slice, ...], x: Tensor) -> None:
        if not self.takes(x):
            self.total()[where] += x

    def takes_rows(self, rows: Rows, x: Tensor) -> bool:
        """Whether packed rows [rows, heads, width] are the first part, and all of it."""
        return rows.is_all and self.takes(x.unflatten(0, (self.shape[0], self.shape[2])).transpose(1, 2))

    def add_rows(self, rows: Rows, x: Tensor) -> None:
        """Add packed rows, of which some may be the same."""
        if not self.takes_rows(rows, x):
            by_row = self.total().transpose(1, 2)
            by_row.index_put_((rows.batch, rows.places), x.to(self.wide), accumulate=True)


class MergedRows(Parts):
    """Results of calls on ranges of keys, merged by the log-sum-exps of their rows."""

    def __init__(self, shape: Sequence[int], wide: torch.dtype, like: Tensor) -> None:
        super().__init__(shape, wide, like)
        self.log_sum = torch.full(self.shape[:-1], -torch.inf, dtype=wide, device=like.device)

    def merge(self, tile: Tile, out: Tensor, log_sum: Tensor) -> None:
        """Add what a call gives for some of the rows."""
        if self.takes(out):
            self.log_sum = log_sum
            return
        rows = self.total()[tile.of_queries]
        before = self.log_sum[tile.of_queries]
        after = torch.logaddexp(before, log_sum)
        rows.mul_((before - after).exp_().unsqueeze(-1))
        rows.addcmul_(out.to(self.wide), (log_sum - after).exp_().unsqueeze(-1))
        self.log_sum[tile.of_queries] = after

    def merge_rows(self, rows: Rows, out: Tensor, log_sum: Tensor) -> None:
        """Add what a call gives for packed rows, and log-sum-exps [heads, rows]."""
        if self.takes_rows(rows, out):
            self.log_sum = log_sum.unflatten(1, (self.shape[0], self.shape[2])).transpose(0, 1)
            return
        total, sums = (x.transpose(1, 2) for x in (self.total(), self.log_sum))
        at = rows.batch, rows.places
        before = sums[at]
        after = torch.logaddexp(before, log_sum.t())
        merged = total[at].mul_((before - after).exp_().unsqueeze(-1))
        total[at] = merged.addcmul_(out.to(self.wide), (log_sum.t() - after).exp_().unsqueeze(-1))
        sums[at] = after

    def add_sinks(self, sinks: Tensor) -> None:
        after = torch.logaddexp(self.log_sum, sinks.to(self.log_sum.dtype)[:, None])
        self.total().mul_((self.log_sum - after).exp_().unsqueeze(-1))
        self.log_sum = after
