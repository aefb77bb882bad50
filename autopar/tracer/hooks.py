"""Classify the hooks of modules while a model is captured.

    computes         it returns something, writes to a tensor, or sets something on a module: part of the graph
    keeps, prints    a tensor of the capture has no values: a letter
    anything else    it counts, looks at shapes, or does nothing today: it runs in every call, on tensors without values

The last are `idle` (`graph/idle.py`): the graph is the same without them. If such a hook asks for values in a later
call, a letter is raised.
"""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.graph.idle import HELD_BY, IdleHook, name_of_hook
from autopar.graph.tensor_form import TensorForm
from autopar.letters import NotCaptured

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

_PLAIN = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device)


class Unseen:
    """Stands for an argument that is neither tensor nor number nor text."""


class Hooks:
    """Effects of the hooks that run during one capture."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.running: list[str] = []  # names of those that run now
        self.effects = 0  # counts what changed of a tensor or a module
        self.idle: list[IdleHook] = []
        self.met: list[tuple[weakref.ref[Tensor], str]] = []  # tensors that a hook was given or has made, and its name

    def watch(self, root: nn.Module) -> None:
        """Wrap the hooks of all modules; restoring the modules removes the wrappers."""
        for path, module in root.named_modules():
            for held_by in HELD_BY:
                held = vars(module).get(held_by) or {}
                for key, hook in held.items():
                    held[key] = self._watched(path, held_by, key, hook)

    def _watched(self, path: str, held_by: str, key: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *given: Any) -> Any:
            name = f"{name_of_hook(hook)}, of {path or 'the model'}"
            form = pytree.tree_map(_form, given)
            held = self._held_by_modules()
            effects = self.effects
            first_made = len(self.recorder.values.alive)
            with self._runs(name):
                result = hook(module, *given)
            tensors = [leaf for leaf in pytree.tree_leaves((given, result)) if isinstance(leaf, Tensor)]
            self.met += [(weakref.ref(t), name) for t in (*tensors, *self.recorder.values.alive[first_made:])]
            if result is None and self.effects == effects and self._held_by_modules() == held:
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

    def _held_by_modules(self) -> list[Any]:
        """Ids of the objects that modules hold, also in their lists and dicts."""
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
        """Raise a letter where a tensor that a hook has seen is still alive after the capture.

        One that was written in place may be alive for torch's autograd alone, which nobody can read.
        """
        for ref, name in self.met:
            if (tensor := ref()) is not None and any(map(_is_no_frame, gc.get_referrers(tensor))):
                raise NotCaptured(
                    f"a hook ({name}) keeps a tensor, which has no values while a model is captured, and modules "
                    "do not run one by one in the calls after it",
                    advice=(
                        'what it keeps as an output of the model: (loss, hidden), and outputs="full" to have it whole'
                    ),
                )


def _is_no_frame(holder: Any) -> bool:
    # Before Python 3.11 the garbage collector reports the frame of the function that asks.
    return not isinstance(holder, types.FrameType)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TensorForm.of(leaf)
    return leaf if isinstance(leaf, _PLAIN) else Unseen()
