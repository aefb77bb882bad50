"""Choose what runs a kernel: Triton on a GPU, its interpreter where asked for, else the ops that it stands for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_IS_THERE = importlib.util.find_spec("triton") is not None  # Triton runs on Linux only.
triton: Any = importlib.import_module("triton") if _IS_THERE else None
tl: Any = importlib.import_module("triton.language") if _IS_THERE else None

__all__ = ["VARIABLE", "as_ops", "as_rows", "is_traced", "jit", "runs", "shared_bytes", "tl", "units"]

# Tests on a CPU set it: "interpret" runs the kernels in Triton's interpreter, "ops" the references of the custom ops.
VARIABLE = "AUTOPAR_KERNELS"
_LEAST_SHARED = 96 * 2**10  # bytes that a block may have on any GPU that kernels were compiled for
_TRACED = threading.local()
jit: Callable[[Any], Any] = triton.jit if triton is not None else lambda function: function


def runs(x: Tensor) -> bool:
    """Whether the kernel runs on this tensor, and not its reference."""
    if triton is None or getattr(_TRACED, "as_ops", False):
        return False
    return x.is_cuda or os.environ.get(VARIABLE) == "interpret"


@contextlib.contextmanager
def as_ops() -> Iterator[None]:
    """Let custom ops run their references in this thread, whatever the device, so that they can be traced."""
    before = getattr(_TRACED, "as_ops", False)
    _TRACED.as_ops = True
    try:
        yield
    finally:
        _TRACED.as_ops = before


def is_traced(device: str) -> bool:
    """Whether a program of this device holds custom ops, and not the ops of their references.

    On a CPU these are what a program without kernels runs, in the same order.
    """
    return device != "cpu" or bool(os.environ.get(VARIABLE))


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """The tensor as contiguous rows of its last dim, and their stride; half rows are not copied."""
    columns = x.shape[-1]
    if x.stride(-1) == 1 and x.numel():
        with contextlib.suppress(RuntimeError):  # Rows that are not evenly spaced have no such view.
            rows = x.view(-1, columns)
            return rows, rows.stride(0)
    return x.contiguous().view(-1, columns), columns


def units(x: Tensor) -> int:
    """Number of multiprocessors of the tensor's device; 4 in the interpreter."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def shared_bytes(x: Tensor) -> int:
    """Bytes of shared memory that a block may use on the tensor's device."""
    if not x.is_cuda:
        return _LEAST_SHARED
    about = torch.cuda.get_device_properties(x.device)
    return int(getattr(about, "shared_memory_per_block_optin", _LEAST_SHARED))
