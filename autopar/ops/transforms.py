"""Fourier transforms: they are linear, and every dim that is not transformed may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ops.entry import each, op
from autopar.ops.rows import along, resized, rule_from, whole_dims
from autopar.runtime import private
from autopar.sharding.notation import Rule


def of_many_dims(arguments: Mapping[str, Any]) -> Rule:
    """All dims are transformed where a call names none; the last ones, where it gives sizes."""
    sizes = arguments.get("s")
    return resized(None if sizes is None else range(-len(sizes), 0), linear="x")(arguments)


def of_windows(arguments: Mapping[str, Any]) -> Rule:
    """A transform of each window of a signal, or back: batches may be cut.

    Windows are linear in forward alone.
    """
    signal = len(arguments["input"].shape)
    out = len(arguments["outputs"][0].shape)
    rest = 1 if arguments["op"] == "stft" else 3 if not arguments["input"].torch_dtype.is_complex else 2
    batch = ["b"] if signal > rest else []
    before, after = (batch + whole_dims(name, rank - len(batch)) for name, rank in (("t", signal), ("f", out)))
    return rule_from([before, ["w!"]], [after], linear="x, y" if arguments["op"] == "stft" else "x")


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


FFT: dict[str, Any] = dict(homes=[torch.fft], keeps="")
each("fft ifft rfft irfft hfft ihfft", "input:T, n=None, dim=-1, norm=None", rule=resized(-1, linear="x"), **FFT)
each(
    "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2",
    "input:T, s=None, dim=(-2, -1), norm=None",
    rule=resized((-2, -1), linear="x"),
    **FFT,
)
each("fftn ifftn rfftn irfftn hfftn ihfftn", "input:T, s=None, dim=None, norm=None", rule=of_many_dims, **FFT)
each("fftshift ifftshift", "input:T, dim=None", rule=along(linear="x"), **FFT)

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
