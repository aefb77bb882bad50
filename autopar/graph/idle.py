"""Hooks of modules that do nothing to the graph: run again in every call, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autopar.graph.tensor_form import TensorForm
from autopar.letters import Letter, NotServed

HELD_BY = ("_forward_pre_hooks", "_forward_hooks")  # the attributes of a module that hold its forward hooks


@dataclass(frozen=True, slots=True)
class IdleHook:
    """One call of a module's hook that does nothing to the graph."""

    path: str  # path of the hook's module
    held_by: str
    key: int  # among the hooks of its module
    given: Any  # further arguments of the hook, with forms in the places of tensors

    def run(self, model: nn.Module, own: tuple[Any, Any]) -> None:
        """Call the hook as its module would, on meta tensors; `own` are the model's pre-hooks and hooks."""
        module = model.get_submodule(self.path)
        held = getattr(module, self.held_by) if self.path else own[HELD_BY.index(self.held_by)]
        given = pytree.tree_map(lambda leaf: leaf.empty("meta") if isinstance(leaf, TensorForm) else leaf, self.given)
        try:
            held[self.key](module, *given)
        except Letter:
            raise
        except Exception as e:
            raise NotServed(
                f"a hook of {self.path or 'the model'} ({name_of_hook(held[self.key])}) needs more than shapes and "
                f"dtypes: {e}",
                advice="what it looks at as an output of the model: a parallel model's modules do not run one by one",
            ) from e


def name_of_hook(hook: Callable[..., Any]) -> str:
    """The name of a hook as letters give it."""
    return getattr(hook, "__qualname__", type(hook).__name__)
