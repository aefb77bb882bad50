"""Swap fake tensors for a module's tensors while it is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.private import FakeTensor, FakeTensorMode, without_modes
from autopar.tracer.changes import states_of
from autopar.tracer.recorder import Recorder


class Fakes:
    """Makes one fake tensor for each tensor, by identity, so that ties stay ties."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # id(tensor) -> its fake, and the tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            with without_modes(), torch.no_grad():
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            fake = FakeTensor(self.mode, meta, torch.device("cpu"))
            if tensor.requires_grad:
                fake.requires_grad_()
            if isinstance(tensor, torch.nn.Parameter):
                fake._is_param = True
            self._made[id(tensor)] = fake, tensor
        return self._made[id(tensor)][0]

    def _faked(self, value: Any) -> Any:
        """The value with fakes for its tensors, also in lists and dicts; the value itself without tensors."""
        if isinstance(value, Tensor):
            return self(value)
        if type(value) in (list, tuple) and any(isinstance(v, Tensor) for v in value):
            return type(value)(self._faked(v) for v in value)
        if type(value) is dict and any(isinstance(v, Tensor) for v in value.values()):
            return {k: self._faked(v) for k, v in value.items()}
        return value

    @contextlib.contextmanager
    def swapped_into(self, root: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
        """Inside the block the module's tensors are fakes; afterwards all that the modules held is restored."""
        before = states_of(root)
        swapped: list[tuple[Any, str, Any]] = []
        try:
            for state in before:
                self._swap(state.module, swapped)
            recorder.learn_names([fake for fake, _ in self._made.values()])
            recorder.names.fake_of = {id(real): fake for fake, real in self._made.values()}
            recorder.names.sharing |= sharing([real for _, real in self._made.values()], recorder.names.fakes)
            recorder.changes.before = states_of(root)
            yield
        finally:
            for held, name, value in swapped:  # a ScriptModule keeps its tensors where vars() does not see them
                held[name] = value
            for state in before:
                state.restore()

    def _swap(self, module: torch.nn.Module, swapped: list[tuple[Any, str, Any]]) -> None:
        """Replace the tensors that one module holds, and note where."""
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                faked = self._faked(value) if name not in ("_parameters", "_buffers", "_modules") else value
                if faked is not value:
                    held[name] = faked
                    swapped.append((held, name, value))


def sharing(tensors: list[Tensor], fakes: list[Tensor]) -> set[int]:
    """Ids of the fakes whose tensors share memory with another one."""
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(i)
    return {id(fakes[i]) for group in by_storage.values() if len(group) > 1 for i in group}
