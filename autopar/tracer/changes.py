"""Find what forward changes in its modules and inputs: buffers and inputs that change become outputs of the graph.

What else it leaves is listed; whether the next call reads it, `left.py` finds out. Parameters and submodules must stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autopar.graph.nodes import TensorType
from autopar.tracer.contents import MOST_ENTRIES, MOST_LEVELS, OF_TORCH, PLAIN, entries_of, has_tensors, holder_of
from autopar.tracer.watched import unwatched

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder

# What is put back by other means, or is not of the model itself.
_NOT_PUT_BACK = OF_TORCH - {"_buffers", "_parameters", "_autopar"}
_NOTHING = object()


class Left(NamedTuple):
    """A value that forward leaves on a module: an attribute, or an entry of a list, a dict or an object there."""

    module: torch.nn.Module
    path: tuple[Any, ...]
    name: str  # dotted path from the model's root
    value: Any  # the type of a tensor; `UNKNOWN` of what holds tensors, or is gone; anything else itself

    @property
    def is_plain(self) -> bool:
        """Whether it is a number, flag or word."""
        return isinstance(self.value, PLAIN)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, TensorType)


UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class _Held:
    """The content of a list, dict, set or object that is an attribute, or stands in one, at one moment."""

    path: tuple[Any, ...]
    holder: Any  # the list, dict or set itself; of an object its `__dict__`
    content: Any

    def has_changed(self) -> bool:
        now, before = entries_of(self.holder), entries_of(self.content)
        return now.keys() != before.keys() or any(now[key] is not before[key] for key in now)

    def restore(self) -> None:
        """Put the content back, unless it is the same: an object may be watched by its owner."""
        if self.has_changed():
            self.holder.clear()
            (self.holder.extend if isinstance(self.holder, list) else self.holder.update)(self.content)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Attributes, parameters and buffers of a module at one moment."""

    module: torch.nn.Module
    path: str
    attributes: dict[str, Any]
    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    held: tuple[_Held, ...]  # lists, dicts, sets and objects that attributes hold

    @staticmethod
    def of(module: torch.nn.Module, path: str, seen: set[int]) -> ModuleState:
        """The state of a module now; what is in `seen` another module has shown already."""
        held = [one for name, value in vars(module).items() for one in _held_in(value, (name,), seen)]
        return ModuleState(
            module,
            path,
            dict(vars(module)),
            dict(module._parameters.items()),  # a ScriptModule's containers have items() only
            dict(module._buffers.items()),
            tuple(held),
        )

    def restore(self) -> None:
        """Put back what the module held, and the content of its lists, dicts, sets and objects."""
        for one in self.held:
            one.restore()
        vars(self.module).clear()
        vars(self.module).update(self.attributes)

    def full(self, *path: Any) -> str:
        """An attribute's name from the model's root."""
        return ".".join(map(str, filter(None, (self.path, *map(str, path)))))


def states_of(root: torch.nn.Module) -> list[ModuleState]:
    """The states of all modules of a model now."""
    seen: set[int] = set()
    return [ModuleState.of(module, path, seen) for path, module in root.named_modules()]


class Changes:
    """Differences of the modules before and after one run of forward."""

    def __init__(self, recorder: Recorder, keeps: frozenset[str]) -> None:
        self.recorder = recorder
        self.keeps = keeps  # names of attributes whose new tensors are updates, too
        self.before: list[ModuleState] = []
        self.reassigned: list[tuple[str, str, Tensor]] = []  # (kind, name, tensor) where forward has set another one
        self.left: list[Left] = []

    def notice(self) -> None:
        """Note what forward has set on its modules."""
        for state in self.before:
            self._notice_buffers(state)
            self._refuse_other_parameters(state)
            self._notice_submodules(state)
            for path, value in _set_on(state):
                self._notice(state, path, value)
        if any(one.has_changed() for state in self.before for one in state.held if one.path[0] in _NOT_PUT_BACK):
            self.left.clear()  # hooks and submodules are not kept, nor what goes with them

    def updates(self, inputs: list[Any]) -> list[tuple[str, str, Tensor]]:
        """Buffers and inputs with new values, as (kind, name, tensor)."""
        names = self.recorder.names
        found = []
        for fake in names.fakes:
            if names.of.get(id(fake)) and names.kinds[id(fake)] == "buffer" and self._has_changed(fake):
                found.append(("buffer", names.of[id(fake)][0], fake))
        given = [n.meta["info"].key for n in self.recorder.program.inputs()]
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        found += [("input", n, t) for n, t in zip(given, tensors, strict=True) if self._has_changed(t)]
        return [*found, *self.reassigned]

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
            self.reassigned.append(("buffer", state.full(name), new))
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
        submodules = dict(state.module._modules.items())
        before = next((one.content for one in state.held if one.path == ("_modules",)), submodules)
        if submodules != before:
            said = f"the submodules that forward sets on {state.path or 'the model'} are not kept"
            self.recorder.assumptions.lines.append(said)

    def _notice(self, state: ModuleState, path: tuple[Any, ...], value: Any) -> None:
        """Note what forward has set under a path, which is an update where it is to be kept."""
        name = state.full(*path)
        is_tensor = isinstance(value, Tensor) and self.recorder.values.node(value) is not None
        said = TensorType.of(value) if is_tensor else UNKNOWN if has_tensors(value) else value
        self.left.append(Left(state.module, path, name, said))
        if name not in self.keeps:
            attribute = ".".join(map(str, path))
            line = f"the attribute {attribute} that forward sets on {state.path or 'the model'} is not kept"
            self.recorder.assumptions.lines.append(line)
        elif is_tensor:
            self.reassigned.append(("attribute", name, value))


def _set_on(state: ModuleState) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Values that differ from an earlier state of a module, with their paths."""
    now = {key: value for key, value in vars(state.module).items() if key not in OF_TORCH}
    for key, value in _differences(now, state.attributes):
        yield (key,), value
    for one in state.held:
        if one.path[0] in OF_TORCH:
            continue
        before = entries_of(one.content)
        entries = entries_of(one.holder)
        if not isinstance(one.holder, set):
            for key, value in _differences(entries, before):
                yield (*one.path, key), value
        if not before.keys() <= entries.keys() or (isinstance(one.holder, set) and entries != before):
            yield one.path, UNKNOWN


def _differences(now: dict[Any, Any], before: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, new in now.items():
        value = unwatched(new)
        old = unwatched(before.get(key, _NOTHING))
        if value is not old and not (type(value) is type(old) and isinstance(value, PLAIN) and value == old):
            yield key, value


def _held_in(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[_Held]:
    """The lists, dicts, sets and plain objects in an attribute, each once."""
    holder = holder_of(value)
    if holder is None or id(holder) in seen:
        return
    if len(path) > 1 and (len(path) > MOST_LEVELS or len(holder) > MOST_ENTRIES):
        return
    seen.add(id(holder))
    yield _Held(path, holder, holder.copy())
    if path[0] in OF_TORCH or isinstance(holder, set) or len(holder) > MOST_ENTRIES:
        return
    for key, entry in entries_of(holder).items():
        yield from _held_in(entry, (*path, key), seen)
