"""Find what forward changes in its modules and inputs: buffers and inputs that change become outputs of the graph.

Other attributes that forward sets are not kept, and the graph says so; parameters and submodules must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Attributes, parameters and buffers of a module at one moment."""

    module: torch.nn.Module
    path: str
    attributes: dict[str, Any]
    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    contents: dict[str, Any]  # copies of the lists, dicts and sets among the attributes

    @staticmethod
    def of(module: torch.nn.Module, path: str) -> ModuleState:
        containers = {k: v.copy() for k, v in vars(module).items() if isinstance(v, (list, dict, set))}
        return ModuleState(
            module,
            path,
            dict(vars(module)),
            dict(module._parameters.items()),  # of a ScriptModule, these two only have items()
            dict(module._buffers.items()),
            containers,
        )

    def restore(self) -> None:
        """Put back what the module held, and the content of its lists, dicts and sets."""
        for name, content in self.contents.items():  # hooks, submodules, lists
            held = self.attributes[name]
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(content)
        vars(self.module).clear()
        vars(self.module).update(self.attributes)

    def full(self, name: str) -> str:
        """An attribute's name from the model's root."""
        return f"{self.path}.{name}" if self.path else name


class Number(NamedTuple):
    """A number among a module's attributes that forward has changed."""

    module: torch.nn.Module
    name: str
    full: str  # its name from the model's root
    value: bool | int | float


class Changes:
    """Differences of the modules before and after one run of forward."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.before: list[ModuleState] = []
        self.reassigned: list[tuple[str, Tensor]] = []  # buffers that forward has set to another tensor
        self.numbers: list[Number] = []  # attributes that forward has set to another number

    def notice(self) -> None:
        """Note what forward has set on its modules."""
        for state in self.before:
            self._notice_buffers(state)
            self._refuse_other_parameters(state)
            self._notice_submodules(state)
            self._notice_attributes(state)

    def updates(self, inputs: list[Any]) -> list[tuple[str, str, Tensor]]:
        """Buffers and inputs with new values, as (kind, name, tensor)."""
        names, found = self.recorder.names, []
        for fake in names.fakes:
            if names.of.get(id(fake)) and names.kinds[id(fake)] == "buffer" and self._has_changed(fake):
                found.append(("buffer", names.of[id(fake)][0], fake))
        given = [n.meta["info"].key for n in self.recorder.program.inputs()]
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        found += [("input", n, t) for n, t in zip(given, tensors, strict=True) if self._has_changed(t)]
        return [*found, *(("buffer", name, t) for name, t in self.reassigned)]

    def close(self) -> None:
        """Release all tensors."""
        self.before.clear()
        self.reassigned.clear()

    def _has_changed(self, tensor: Tensor) -> bool:
        node = self.recorder.values.node(tensor)
        return node is not None and node is not self.recorder.program.origins.get(id(tensor))

    def _notice_buffers(self, state: ModuleState) -> None:
        for name, new in state.module._buffers.items():
            old = state.buffers.get(name)
            if new is old or not isinstance(new, Tensor):
                continue
            is_other = old is not None and (old.shape != new.shape or old.dtype != new.dtype)
            if is_other and self.recorder.values.node(old) is not None:
                raise self.recorder.letter(
                    f"forward reads the buffer {state.full(name)} and then gives it another shape or dtype",
                    (new,),
                    "a buffer of fixed shape, written in place",
                )
            self.reassigned.append((state.full(name), new))
        kept = dict(state.module._buffers.items())
        for name, old in state.buffers.items():
            if old is not None and kept.get(name) is None:
                raise self.recorder.letter(
                    f"forward takes the buffer {state.full(name)} away", (), "a buffer that stays"
                )

    def _refuse_other_parameters(self, state: ModuleState) -> None:
        parameters = dict(state.module._parameters.items())
        for name, old in state.parameters.items():
            if parameters.get(name) is not old:
                raise self.recorder.letter(
                    f"forward replaces the parameter {state.full(name)}", (), "parameters that stay"
                )

    def _notice_submodules(self, state: ModuleState) -> None:
        submodules = state.module._modules
        if dict(submodules.items()) != dict(state.contents.get("_modules", submodules).items()):
            self._is_not_kept("the submodules that forward sets on", state, "are")

    def _notice_attributes(self, state: ModuleState) -> None:
        for name, value in vars(state.module).items():
            old = state.attributes.get(name, state)  # the state: nothing that a module holds
            is_plain = isinstance(value, (bool, int, float, str))
            is_same = value is old or (is_plain and type(value) is type(old) and value == old)
            is_public_container = name in state.contents and not name.startswith("_")
            if is_plain and type(value) is type(old) and not is_same and not isinstance(value, str):
                self.numbers.append(Number(state.module, name, state.full(name), value))
            if not is_same or (is_public_container and len(value) != len(state.contents[name])):
                self._is_not_kept(f"the attribute {name} that forward sets on", state, "is")

    def _is_not_kept(self, what: str, state: ModuleState, is_or_are: str) -> None:
        self.recorder.assumptions.lines.append(f"{what} {state.path or 'the model'} {is_or_are} not kept")
