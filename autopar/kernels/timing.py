"""Times of kernels: of each family, on shapes of models, forward and backward together.

The floor is what has to move: operands are read and the result written, then its gradient and the operands are read and
their gradients written, each once, at the bandwidth that a copy reaches on the device.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from autopar.kernels import families
from autopar.kernels.family import Family

_SHAPES: dict[str, Sequence[tuple[tuple[int, ...], ...]]] = {  # of the operands
    "rms_norm": [((rows, d), (d,)) for rows, d in ((2048, 4096), (8192, 4096), (32768, 2048))],
    "add_rms_norm": [((rows, d), (rows, d), (d,)) for rows, d in ((2048, 4096), (8192, 4096), (4096, 8192))],
    "add_layer_norm": [((rows, d), (rows, d), (d,), (d,)) for rows, d in ((2048, 4096), (8192, 4096), (32768, 768))],
    "layer_norm": [((rows, d), (d,), (d,)) for rows, d in ((2048, 4096), (8192, 4096), (32768, 768))],
    "gated": [((rows, f), (rows, f)) for rows, f in ((2048, 14336), (8192, 14336), (8192, 1792))],
    "gelu_tanh": [((rows, f),) for rows, f in ((8192, 3072), (8192, 16384))],
    "rotary_pair": [((4, 32, 2048, 128), (4, 8, 2048, 128), (1, 1, 2048, 128), (1, 1, 2048, 128))],
    "rotary": [((b, h, s, w), (1, 1, s, w), (1, 1, s, w)) for b, h, s, w in ((4, 32, 2048, 128), (1, 8, 8192, 128))],
    "cross_entropy": [((rows, words),) for rows, words in ((8192, 32000), (4096, 128256))],
    "cross_entropy_part": [((8192, words),) for words in (16032, 32064)],  # eighths and fourths of a vocabulary
}
_SMALL: dict[str, Sequence[tuple[tuple[int, ...], ...]]] = {
    "rms_norm": [((4, 64), (64,))],
    "layer_norm": [((4, 64), (64,), (64,))],
    "add_rms_norm": [((4, 64), (4, 64), (64,))],
    "add_layer_norm": [((4, 64), (4, 64), (64,), (64,))],
    "gated": [((4, 64), (4, 64))],
    "gelu_tanh": [((4, 64),)],
    "rotary_pair": [((2, 4, 4, 16), (2, 2, 4, 16), (1, 1, 4, 16), (1, 1, 4, 16))],
    "rotary": [((2, 2, 4, 16), (1, 1, 4, 16), (1, 1, 4, 16))],
    "cross_entropy": [((4, 64),)],
    "cross_entropy_part": [((4, 64),)],
}
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (1e-6, True),
    "layer_norm": (1e-5,),
    "add_rms_norm": (1e-6, True),
    "add_layer_norm": (1e-5,),
    "gated": (0,),
    "cross_entropy": (-100, 0.0),
    "cross_entropy_part": (-100, 0.0, (), 128256),  # what is exchanged is not timed
}
_STILL = {"rotary": 2, "rotary_pair": 2}  # so many of the last operands get no gradient
log = logging.getLogger("autopar")
_LEAST_S = 0.2  # of measuring one call


@dataclass(frozen=True, slots=True)
class Row:
    """A family on one shape: seconds of forward and backward, in the median, with the spread of the kernel's."""

    family: str
    dtype: str
    shape: tuple[int, ...]
    kernel_s: float
    spread: float  # between the quartiles, as a share of the median
    ops_s: float
    compiled_s: float
    floor_bytes: int
    copied_bytes_per_s: float  # by a copy on this device
    peak_bytes: int
    is_right: bool  # does it give what the ops give?
    liger_s: float = math.inf  # by Liger-Kernel, where it is installed and has such a kernel

    @property
    def gain(self) -> float:
        """Times as fast as the fastest of the others: the ops one by one, what torch.compile makes of them, Liger.

        None where it is not right.
        """
        return min(self.ops_s, self.compiled_s, self.liger_s) / self.kernel_s if self.is_right else 0.0

    @property
    def share(self) -> float:
        """Bytes of the floor a second, as a share of what a copy reaches."""
        return self.floor_bytes / self.kernel_s / self.copied_bytes_per_s


def measure(names: Sequence[str], device: str, small: bool = False, quick: bool = False) -> Iterator[Row]:
    """A row for each family, dtype and shape; `quick`: the first shape alone, and without torch.compile."""
    copied = _copied_bytes_per_s(device, small)
    for family in families(names):
        for dtype in ("bfloat16", "float32"):
            shapes = (_SMALL if small else _SHAPES)[family.name]
            for one in shapes[:1] if quick else shapes:
                yield _row(family, dtype, one, device, copied, quick)


def least_gains(rows: Iterable[Row]) -> dict[str, float]:
    """The gain of each family where it is least."""
    gains: dict[str, float] = {}
    for row in rows:
        gains[row.family] = min(row.gain, gains.get(row.family, row.gain))
    return gains


def _row(
    family: Family, dtype: str, shapes: tuple[tuple[int, ...], ...], device: str, copied: float, quick: bool
) -> Row:
    operands = _operands(family.name, getattr(torch, dtype), shapes, device)
    numbers = _NUMBERS.get(family.name, ())
    wanted = [x for x in operands if x.requires_grad]
    made = _several(family.reference(*operands, *numbers))
    gradients = [torch.ones_like(y) for y in made]

    def step(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(_several(function(*operands, *numbers)), wanted, gradients)

    is_right = all(
        _is_near(one, other) for one, other in zip(step(family.call)(), step(family.reference)(), strict=True)
    )
    is_right &= all(map(_is_near, _several(family.call(*operands, *numbers)), made))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    kernel = _times(step(family.call), device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0  # before the others run
    moved = [*operands, *made, *gradients, *operands, *wanted]
    theirs = None if quick or device != "cuda" else _of_liger(family.name)
    return Row(
        family.name,
        dtype,
        shapes[0],
        statistics.median(kernel),
        _spread(kernel),
        statistics.median(_times(step(family.reference), device)),
        math.inf if quick or device != "cuda" else _compiled_s(step(torch.compile(family.reference)), device),
        sum(x.numel() * x.element_size() for x in moved),
        copied,
        peak,
        is_right,
        math.inf if theirs is None else _seconds_of_others(step(theirs), device),
    )


def _several(made: Any) -> tuple[Tensor, ...]:
    """The results of a call, of which there may be one."""
    return made if isinstance(made, tuple) else (made,)


def _is_near(found: Tensor, right: Tensor) -> bool:
    """Is it what the ops give, but for rounding?"""
    near = 1e-4 if right.dtype == torch.float32 else 2e-2
    return bool((found - right).abs().max() <= near * right.abs().max())


def _compiled_s(step: Callable[[], Any], device: str) -> float:
    return statistics.median(_times(step, device))


# calls of Liger-Kernel that do what a family does, from its functions and the arguments of the family
_LIGER: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda liger, x, w, eps, rounds: liger.liger_rms_norm(x, w, eps, in_place=False),
    "add_rms_norm": lambda liger, x, r, w, eps, rounds: liger.liger_fused_add_rms_norm(x, r, w, eps, in_place=False),
    "layer_norm": lambda liger, x, w, b, eps: liger.liger_layer_norm(x, w, b, eps),
    "gated": lambda liger, gate, up, kind: liger.liger_swiglu(gate, up),
    "rotary_pair": lambda liger, q, k, cos, sin: liger.liger_rope(q, k, cos[:, 0], sin[:, 0]),
    "cross_entropy": lambda liger, x, target, ignored, smoothing: liger.liger_cross_entropy(
        x, target, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
    ),
}


def _of_liger(name: str) -> Callable[..., Any] | None:
    """Liger-Kernel's function for a family; None where it is not installed or has none."""
    try:
        liger = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return functools.partial(_LIGER[name], liger) if name in _LIGER else None


def _seconds_of_others(step: Callable[[], Any], device: str) -> float:
    """The time of a call of another project; infinite where it cannot be called so."""
    try:
        return statistics.median(_times(step, device))
    except (RuntimeError, TypeError, ValueError, AttributeError) as e:
        log.info("Liger-Kernel was not timed: %s", e)
        return math.inf


def _operands(name: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], device: str) -> list[Tensor]:
    made = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    for x in made[: len(made) - _STILL.get(name, 0)]:
        x.requires_grad_()
    if name.startswith("cross_entropy"):
        made.append(torch.randint(0, shapes[0][1], shapes[0][:1], device=device))
    return made


def _times(step: Callable[[], Any], device: str) -> list[float]:
    """Seconds of one call, several times."""
    step()
    timer = Timer("step()", globals={"step": step})
    least = _LEAST_S if device == "cuda" else _LEAST_S / 20
    return [float(t) for t in timer.blocked_autorange(min_run_time=least).times]


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(times, n=4)
    return (third - first) / middle


def _copied_bytes_per_s(device: str, small: bool) -> float:
    x = torch.empty(2**16 if small else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / statistics.median(_times(lambda: y.copy_(x), device))
