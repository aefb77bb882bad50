"""Triton's interpreter, repaired: it runs the real kernels on a CPU.

Of releases 3.6 and 3.8 three things are wrong that kernels of this project meet: numbers of single precision are cut
off where they become bfloat16, a number that is known at run time is no bound of a `range` with numpy 2.4, and sums
along a dim before the last add one number after the other, where a device adds in pairs.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

RELEASES = ("3.6.", "3.8.")


def repair(monkeypatch):
    """Repair it for one test."""
    assert triton.__version__.startswith(RELEASES), (
        f"look again at what is repaired: this is Triton {triton.__version__}"
    )
    cast = interpreter.InterpreterBuilder.cast_impl
    patched = interpreter._patch_lang_tensor

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar is tl.float32 and dst_type.scalar is tl.bfloat16:
            data = np.ascontiguousarray(src.data, dtype=np.float32)
            bits = torch.from_numpy(data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits.reshape(data.shape), tl.bfloat16)
        return cast(self, src, dst_type)

    def patch(tensor, scope):
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    def sum_in_pairs(self, input):
        axis = 0 if self.axis is None else self.axis
        data = input.handle.data.reshape(-1) if self.axis is None else input.handle.data
        last = np.ascontiguousarray(np.moveaxis(data, axis, -1))
        total = last.sum(-1)
        return self.to_tensor(np.expand_dims(total, axis) if self.keep_dims else total, input.dtype)

    run, alone = interpreter.InterpretedFunction.run, threading.RLock()

    def launch(self, *args, **kwargs):  # ranks that are threads read and launch a kernel one at a time
        with alone:
            return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(
        builder, "create_fp_to_fp", lambda self, src, dst_type, rounding: cast_impl(self, src, dst_type)
    )
    monkeypatch.setattr(interpreter.ReduceOps, "sum", sum_in_pairs)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
