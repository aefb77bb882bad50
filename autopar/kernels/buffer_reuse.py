"""In-place twins of custom ops: they write the result over the first operand instead of new memory.

The twin of `autopar::name` is `autopar::name_`, of the same arguments. Its caller must know that nothing reads the
operand afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.runtime.private import OpOverload, function_of


def written_over(op: Any, run: Callable[..., Tensor]) -> None:
    """Define the twin of a custom op by `run`, whose kernel writes over the first operand and returns it.

    The kernel takes contiguous operands alone: over others the op's own result is copied.
    """

    def over(x: Tensor, *others: Any) -> Tensor:
        return run(x, *others) if backend.runs(x) and x.is_contiguous() else x.copy_(op(x, *others))

    name = f"{op._qualname}_"
    function = function_of(op._qualname)
    first = next(iter(inspect.signature(function).parameters))
    schema = torch.library.infer_schema(function, mutates_args=(first,))
    torch.library.define(name, schema.replace("-> Tensor", "-> Tensor(a0!)"))
    torch.library.impl(name, "CompositeExplicitAutograd", over)
    torch.library.register_fake(name, lambda x, *_: x)


def twin_of(target: Any) -> OpOverload | None:
    """The twin of a custom op, by its overload; None where it has none."""
    return _named(f"{_name_of(target)}_") if _name_of(target) else None


def pure(target: Any) -> Any:
    """The op that a twin belongs to; any other op as it is."""
    name = _name_of(target)
    return _named(name[:-1]) if name.endswith("_") else target


def _name_of(target: Any) -> str:
    """The name of an overload of autopar's custom ops; "" for anything else."""
    is_ours = isinstance(target, OpOverload) and target.namespace == "autopar"
    return str(target._schema.name).partition("::")[2] if is_ours else ""


def _named(name: str) -> OpOverload | None:
    packet = getattr(torch.ops.autopar, name, None)
    return None if packet is None else packet.default
