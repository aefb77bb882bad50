"""In-place twins of custom ops: they write the result over the first operand instead of new memory.

The twin of `autopar::name` is `autopar::name_`, of the same arguments. Its caller must know that nothing reads the
operand afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.private import OpOverload


def written_over(name: str, run: Callable[..., Tensor]) -> None:
    """Define the twin of a custom op by `run`, which writes to its first operand and returns it."""
    first = next(iter(run.__annotations__))
    schema = torch.library.infer_schema(run, mutates_args=(first,))
    torch.library.define(f"{name}_", schema.replace("-> Tensor", "-> Tensor(a0!)"))
    torch.library.impl(f"{name}_", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"{name}_", lambda x, *_: x)


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
