"""Products of groups of rows, each with a matrix of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BY_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups of rows, each with a matrix of its own.

    The kernels take matrices whose rows are whole numbers of 16 bytes. On a device a row may be a part of such a row:
    it is filled up with zeros.
    """
    unit = 16 // mat_a.element_size()
    inner, width = (-n % unit for n in mat_b.shape[-2:])
    if (inner or width) and mat_a.dim() == 2 and mat_b.dim() == 3:
        filled = F.pad(mat_a, (0, inner)), F.pad(mat_b, (0, width, 0, inner))
        whole = F.grouped_mm(*filled, offs=offs, bias=bias, out_dtype=out_dtype)
        return whole[:, : mat_b.shape[-1]].contiguous()
    return F.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)


def product_by_groups(rows: Tensor, matrices: Tensor, ends: Tensor, is_turned: bool) -> Tensor:
    """Each row times the matrix of its group, or its transpose; rows behind the last end are arbitrary."""
    matrices = matrices.transpose(1, 2) if is_turned else matrices
    if _has_kernel(rows, matrices):
        return grouped_mm(rows, matrices, offs=ends.to(torch.int32))
    made = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, (first, last) in enumerate(_groups(ends)):
        if last > first:
            torch.mm(rows[first:last], matrices[group], out=made[first:last])
    return made


def gradient_by_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each group the product of its rows of `left`, turned, and those of `right`."""
    if _has_kernel(left, right):
        unit = 16 // left.element_size()
        filled = (F.pad(x, (0, -x.shape[1] % unit)) for x in (left, right))
        whole = F.grouped_mm(next(filled).t(), next(filled), offs=ends.to(torch.int32))
        return whole[:, : left.shape[1], : right.shape[1]]
    made = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for group, (first, last) in enumerate(_groups(ends)):
        if last > first:
            torch.mm(left[first:last].t(), right[first:last], out=made[group])
    return made


def _has_kernel(rows: Tensor, others: Tensor) -> bool:
    """Whether torch has one kernel for all groups; it fails on no rows at all (pytorch/pytorch#192497)."""
    is_served = rows.is_cuda and rows.dtype in _BY_KERNEL and others.dtype == rows.dtype
    return is_served and rows.shape[0] > 0


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    bounds = ends.tolist()
    return list(zip([0, *bounds], bounds, strict=False))
