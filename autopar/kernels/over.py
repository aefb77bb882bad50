"""Custom ops that write their result over their first operand: twins of such as give it a memory of its own.

The twin of `autopar::name` is `autopar::name_`, of the same arguments. Who calls it knows that nothing reads the
operand afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.private import OpOverload


def written_over(name: str, run: Callable[..., Tensor]) -> None:
    """Define the twin of a custom op. `run` gives its first operand, which it has written to."""
    first = next(iter(run.__annotations__))
    schema = torch.library.infer_schema(run, mutates_args=(first,))
    torch.library.define(f"{name}_", schema.replace("-> Tensor", "-> Tensor(a0!)"))
    torch.library.impl(f"{name}_", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"{name}_", lambda x, *_: x)


def twin_of(target: Any) -> OpOverload | None:
    """The twin of a custom op, by its overload; None of an op that has none."""
    return _named(f"{_name_of(target)}_") if _name_of(target) else None


def pure(target: Any) -> Any:
    """The op that a twin is the twin of; any other as it is."""
    name = _name_of(target)
    return _named(name[:-1]) if name.endswith("_") else target


def _name_of(target: Any) -> str:
    """The name of a custom op of autopar's, by its overload; "" of anything else."""
    is_ours = isinstance(target, OpOverload) and target.namespace == "autopar"
    return str(target._schema.name).partition("::")[2] if is_ours else ""


def _named(name: str) -> OpOverload | None:
    packet = getattr(torch.ops.autopar, name, None)
    return None if packet is None else packet.default
