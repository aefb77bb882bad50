"""Hooks of modules while a model is captured, and in the calls after it.

    what computes        a hook that returns something, writes to a tensor, or sets something on a module, is part of
    the graph what keeps, prints   a tensor of the capture has no values: a letter what else there is   it counts, looks
    at shapes, or does nothing today: it runs in every call, on tensors without values

The last are `idle`: the graph is the same without them. One that asks in a call for values, as it did not while it was
captured, is a letter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.letters import Letter, NotCaptured, NotServed

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

_HELD_BY = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor's form, without the tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)


class Unknown:
    """In the place of an argument that is neither tensor nor number nor text."""


@dataclass(frozen=True, slots=True)
class IdleHook:
    """One call of a hook that does nothing to the graph."""

    path: str  # of its module
    held_by: str
    key: int  # among the hooks of its module
    given: Any  # its arguments beside the module: forms in the place of tensors

    def run(self, model: nn.Module, own: tuple[Any, Any]) -> None:
        """Call it as its module would be, on tensors without values; `own` are those that the whole model had."""
        module = model.get_submodule(self.path)
        held = getattr(module, self.held_by) if self.path else own[_HELD_BY.index(self.held_by)]
        given = pytree.tree_map(lambda leaf: leaf.made() if isinstance(leaf, Like) else leaf, self.given)
        try:
            held[self.key](module, *given)
        except Letter:
            raise
        except Exception as e:
            raise NotServed(
                f"a hook of {self.path or 'the model'} ({_name(held[self.key])}) needs more than shapes and "
                f"dtypes: {e}",
                advice="what it looks at as an output of the model: a parallel model's modules do not run one by one",
            ) from e


class Hooks:
    """What hooks did during one capture."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.running: list[str] = []  # names of those that run now
        self.effects = 0  # counts what changed of a tensor or a module
        self.idle: list[IdleHook] = []
        self.met: list[tuple[weakref.ref[Tensor], str]] = []  # tensors that a hook was given or has made, and its name

    def watch(self, root: nn.Module) -> None:
        """Wrap the hooks of all modules; whoever puts the modules back as they were takes the wrappers away."""
        for path, module in root.named_modules():
            for held_by in _HELD_BY:
                held = vars(module).get(held_by) or {}
                for key, hook in held.items():
                    held[key] = self._watched(path, held_by, key, hook)

    def _watched(self, path: str, held_by: str, key: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *given: Any) -> Any:
            name, form = f"{_name(hook)}, of {path or 'the model'}", pytree.tree_map(_form, given)
            before, effects, made = self._said(), self.effects, len(self.recorder.values.alive)
            with self._runs(name):
                result = hook(module, *given)
            tensors = [leaf for leaf in pytree.tree_leaves((given, result)) if isinstance(leaf, Tensor)]
            self.met += [(weakref.ref(t), name) for t in (*tensors, *self.recorder.values.alive[made:])]
            if result is None and self.effects == effects and self._said() == before:
                self.idle.append(IdleHook(path, held_by, key, form))
            return result

        return run

    @contextlib.contextmanager
    def _runs(self, name: str) -> Iterator[None]:
        self.running.append(name)
        try:
            yield
        finally:
            self.running.pop()

    def _said(self) -> list[Any]:
        """Which things the modules hold, and what stands in their lists and dicts."""
        found: list[Any] = []
        for module in self.recorder.root.modules():
            for value in vars(module).values():
                found.append(id(value))
                if isinstance(value, dict):
                    found += [(k, id(v)) for k, v in value.items()]
                elif isinstance(value, (list, set)):
                    found += map(id, value)
        return found

    def refuse_kept(self) -> None:
        """A letter where a tensor that a hook had is still there when nothing of the capture is."""
        for ref, name in self.met:
            if ref() is not None:
                raise NotCaptured(
                    f"a hook ({name}) keeps a tensor, which has no values while a model is captured, and modules "
                    "do not run one by one in the calls after it",
                    advice=(
                        'what it keeps as an output of the model: (loss, hidden), and outputs="full" to have it whole'
                    ),
                )


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Like(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, _PLAIN) else Unknown()


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
