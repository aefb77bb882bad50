"""Fourier transforms: they are linear, and every dim that is not transformed may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ops.entry import op
from autopar.ops.spelling import dims_of, letters_of, parse, whole_dims
from autopar.runtime import private
from autopar.sharding.notation import Rule


def transformed(arguments: Mapping[str, Any]) -> Rule:
    """Dims that a transform reads along stay whole, and may get another size."""
    letters = letters_of(arguments["input"])
    rank = len(arguments["input"].shape)
    if arguments.get("dim") is None and arguments.get("s") is not None:  # The sizes are those of the last dims.
        dims = set(range(rank - len(arguments["s"]), rank))
    else:
        dims = dims_of(arguments, _DIM[arguments["op"]])
    before = " ".join(f"t{d}!" if d in dims else a for d, a in enumerate(letters))
    after = " ".join(f"f{d}!" if d in dims else a for d, a in enumerate(letters))
    return parse(f"{before} -> {after}", linear="x")


def moved(arguments: Mapping[str, Any]) -> Rule:
    """Dims along which entries move stay whole."""
    dims = dims_of(arguments)
    row = " ".join(f"{a}!" if d in dims else a for d, a in enumerate(letters_of(arguments["input"])))
    return parse(f"{row} -> {row}", linear="x")


def of_windows(arguments: Mapping[str, Any]) -> Rule:
    """A transform of each window of a signal, or back: batches may be cut.

    Windows are linear in forward alone.
    """
    signal = len(arguments["input"].shape)
    out = len(arguments["outputs"][0].shape)
    rest = 1 if arguments["op"] == "stft" else 3 if not arguments["input"].torch_dtype.is_complex else 2
    batch = ["b"] if signal > rest else []
    rows = " ".join([*batch, *whole_dims("t", signal - len(batch))])
    results = " ".join([*batch, *whole_dims("f", out - len(batch))])
    return parse(f"{rows}, w! -> {results}", linear="x, y" if arguments["op"] == "stft" else "x")


def stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """The transform of a signal that is padded already.

    Arguments go by position: by name, torch reads them as those of the overload that pads.
    """
    return private.stft(
        input, n_fft, hop_length, win_length, window, normalized, onesided, return_complex, align_to_window
    )


_DIM: dict[str, Any] = {}  # the dims that a transform reads along where a call names none; None: all

for name in "fft ifft rfft irfft hfft ihfft".split():
    _DIM[name] = -1
    op(name, getattr(torch.fft, name), "input:T, n=None, dim=-1, norm=None", rule=transformed, keeps="")
for name in "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2".split():
    _DIM[name] = (-2, -1)
    op(name, getattr(torch.fft, name), "input:T, s=None, dim=(-2, -1), norm=None", rule=transformed, keeps="")
for name in "fftn ifftn rfftn irfftn hfftn ihfftn".split():
    _DIM[name] = None
    op(name, getattr(torch.fft, name), "input:T, s=None, dim=None, norm=None", rule=transformed, keeps="")
for name in ("fftshift", "ifftshift"):
    op(name, getattr(torch.fft, name), "input:T, dim=None", rule=moved, keeps="")

_WINDOWS = (
    "input:T, n_fft, hop_length=None, win_length=None, window:T=None, normalized=False, onesided=None, "
    "return_complex=None, align_to_window=None"
)
op("stft", stft, _WINDOWS, (private.stft, _WINDOWS), rule=of_windows)
op(
    "istft",
    torch.istft,
    "input:T, n_fft, hop_length=None, win_length=None, window:T=None, center=True, normalized=False, onesided=None, "
    "length=None, return_complex=False",
    Tensor.istft,
    rule=of_windows,
)
