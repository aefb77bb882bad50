"""Write the casts of autocast into the graph, without a table of ops: those after which the op needs no autocast.

Under autocast an op is run once, and the ATen ops that it runs are noted with the dtypes of their operands. Then its
floating-point operands are cast to each candidate dtype and the op runs with autocast off; the casts that give the same
notes are written into the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import TensorType
from autopar.ops.entry import OPS
from autopar.runtime.private import TO_COPY, UNSAFE_VIEW
from autopar.tracer.call import name_of, tensors_in

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

# ATen ops as good as views, and autocast's own.
_HIDDEN = frozenset({TO_COPY, UNSAFE_VIEW, torch.ops.aten.detach.default, torch.ops.aten.clone.default})


class Casts:
    """Casts of one capture under autocast."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.noted: list[tuple[Any, ...]] | None = None
        self.cached: dict[tuple[int, torch.dtype], Tensor] = {}  # parameters are cast once a region, as autocast does

    def on(self) -> bool:
        """Whether autocast is on for the CPU; that of CUDA is refused by a letter."""
        if torch.is_autocast_enabled("cuda"):
            raise self.recorder.letter(
                "autocast for cuda is switched on inside the model, and its casts cannot be seen on a CPU",
                (),
                'torch.autocast("cpu", ...) while tracing, or casts written out',
            )
        return torch.is_autocast_enabled("cpu")

    def note(self, function: Any, args: Any) -> None:
        """Note an ATen op with the types of its operands, while a function is being tried."""
        if self.noted is not None and function not in _HIDDEN:
            self.noted.append((function, *((tuple(t.shape), t.dtype) for t in tensors_in(args, {}))))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute and record one torch function under autocast, with its casts."""
        recorder = self.recorder
        result, noted = self._noted(function, args, kwargs)
        if not tensors_in((result,), {}):
            return result
        for dtype in (None, torch.get_autocast_dtype("cpu"), torch.float32):
            cast_args, cast_kwargs, casts = self._cast(args, kwargs, dtype)
            if dtype is not None and not casts:
                continue
            with torch.autocast("cpu", enabled=False):
                try:
                    other, others = self._noted(function, cast_args, cast_kwargs)
                except Exception:  # without the casts, dtypes may not go together
                    continue
            if others == noted and _dtypes(other) == _dtypes(result):
                break
        else:
            raise recorder.letter(
                f"autocast does something to {name_of(function)} that casts of its operands do not explain",
                args,
                "casts written out",
            )
        for tensor, cast in casts:
            if not recorder.knows(cast):
                made = OPS["to"]
                arguments = {"input": tensor, "dtype": cast.dtype}
                recorder.values.bind_all(
                    cast, recorder.emit(made, arguments, (TensorType.of(cast),)), (made, arguments)
                )
        recorder.record(function, cast_args, cast_kwargs, result)
        return result

    def _noted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[tuple[Any, ...]]]:
        """The result of a function, and the ATen ops that it ran."""
        noted = self.noted = []
        try:
            return self.recorder.execute(function, args, kwargs), noted
        finally:
            self.noted = None

    def _cast(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Tensor]]]:
        """The arguments with floating-point tensors cast, and the pairs of tensors before and after."""
        casts: list[tuple[Tensor, Tensor]] = []
        call = self.recorder.call

        def cast(value: Any) -> Any:
            if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value.dtype in (dtype, torch.float64):
                return value
            if (id(value), dtype) not in self.cached:
                running = call.function
                call.function = "autocast"
                made = value.to(dtype)
                call.function = running
                if not (value.is_leaf and value.requires_grad and torch.is_grad_enabled()):
                    casts.append((value, made))
                    return made
                self.cached[id(value), dtype] = made
            casts.append((value, self.cached[id(value), dtype]))
            return casts[-1][1]

        cast_args, cast_kwargs = pytree.tree_map(cast, (args, kwargs))
        return cast_args, cast_kwargs, casts


def _dtypes(result: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors_in((result,), {})]
