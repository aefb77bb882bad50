"""`Constraints`: shardings that a caller pins, each under a pattern of names.

    "x": "S(0)@dp"                           an input, as it is used
    "blocks.*.up.weight": "S(0)@tp"          a parameter: its storage and every use
    "*": "S(0)@dp; R; regathered; each"      its storage; its use; whether the gathered copy is kept for backward; and,
                                             of several micro-batches, whether its gradient is reduced at their end or
                                             in each (parameters only); "device", "host" or "wholly" may follow: whether
                                             nothing of it, its optimizer states, or all of it lies on the host
    "head.weight": "S(0)@dp; *"              its storage alone
    "blocks.*.up": "S(1)@tp"                 a module: what the consumers of its output receive
    "out": "R"                               every output

A pin fixes values; a gradient is pinned only where it is written, as in `R/P(sum)`. The first pattern that matches
wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, NamedTuple

from autopar.letters import BadConstraint, Letter
from autopar.ops.entry import facts_of
from autopar.sharding.attention_ways import ATTENTIONS
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Flow, Placement, R, Sharding, outside_brackets
from autopar.sharding.strategies import gradients, values

_ANY = "*"  # admits any sharding


@dataclass(frozen=True, slots=True)
class Pin:
    """The sharding that a stored parameter, or a value at an end of an edge, must have."""

    text: str
    value: Sharding | None  # None, written *: any
    gradient: Sharding | None = None

    def admits(self, flows: tuple[Flow, ...]) -> bool:
        return self.value in (None, values(flows)) and self.gradient in (None, gradients(flows))


@dataclass(frozen=True, slots=True)
class Pins:
    """The pins and policies that one pattern states."""

    pattern: str
    storage: Pin
    use: Pin
    gather: str = ""  # "kept" or "regathered", where it is said
    reduce: str = ""  # "end" or "each": where a step has several micro-batches
    states: str = ""  # "device" or "host", where optimizer states lie, or "wholly", where the parameter does too
    is_about_storage: bool = False
    wished: Pin | None = None  # replaces `use` for uses that have such a choice


@dataclass(frozen=True, slots=True)
class Preset:
    """An expert's plan, as pins and habits."""

    pins: Mapping[str, str]  # pins keyed by exact names
    habits: tuple[tuple[int, str], ...] = ()  # an axis, and how values move along it (`HABITS`)
    wishes: Mapping[str, str] = field(default_factory=dict)  # pins of inputs, for uses that have such a choice
    ways: tuple[tuple[int, str], ...] = ()  # an axis, and how it divides attentions (`attention_ways`); "": any way

    @property
    def key(self) -> tuple[object, ...]:
        """All that it says, as a value that can be hashed."""
        return tuple(self.pins.items()), self.habits, tuple(self.wishes.items()), self.ways


def _is_partial(placement: Placement) -> bool:
    return placement.is_partial


def _is_shard(placement: Placement) -> bool:
    return placement.is_shard


def _is_no_shard(placement: Placement) -> bool:
    return not placement.is_shard


def _is_cut_along_the_sequence(placement: Placement) -> bool:
    return placement.is_shard and placement.dim == 1


def _is_any(reader: str) -> bool:
    return True


def _is_no_product(reader: str) -> bool:
    return facts_of(reader).flops is None


def _is_no_attention(reader: str) -> bool:
    return reader not in ATTENTIONS


class Habit(NamedTuple):
    """How experts move values other than parameters along an axis.

    A value that leaves with the first kind of placement arrives with the second, if its reader has such a choice at
    all.
    """

    leaves: Callable[[Placement], bool]
    arrives: Callable[[Placement], bool]
    binds: Callable[[str], bool] = _is_any  # whether it is a habit of a reader, which is named by its op


HABITS = {
    "rows": Habit(_is_shard, _is_shard),  # cut values stay cut
    "whole": Habit(_is_partial, _is_no_shard),  # sums are not scattered
    "sequence": Habit(_is_partial, _is_cut_along_the_sequence),  # sums are scattered along dim 1
    # A value that is cut along dim 1 stays so until a product gathers it, each by itself.
    "apart": Habit(_is_cut_along_the_sequence, _is_cut_along_the_sequence, _is_no_product),
    "context": Habit(_is_shard, _is_shard, _is_no_attention),  # cut values stay cut; an attention may gather keys
}


class Constraints:
    """The pins of a caller, then those of a preset; the patterns that have matched so far; and a preset's habits."""

    def __init__(self, given: Mapping[str, Any] | None, mesh: DeviceMesh, preset: Preset | None = None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise BadConstraint(
                f"constraints is a {type(given).__name__}", advice='a dictionary: {"blocks.*.up.weight": "S(0)@tp"}'
            )
        if wrong := [pattern for pattern in given or {} if not isinstance(pattern, str)]:
            raise BadConstraint(f"the pattern {wrong[0]!r} is not text", advice='{"blocks.*.up.weight": "S(0)@tp"}')
        preset = preset or Preset({})
        self.callers = [_read(pattern, what, mesh) for pattern, what in (given or {}).items()]
        self.pins = self.callers + list(_of_preset(preset, mesh))
        self.habits = preset.habits
        self.ways = preset.ways
        self._used: set[str] = set()

    def of(self, *names: str, is_parameter: bool = False, is_module: bool = False) -> Pins | None:
        """The first pins whose pattern matches one of the names of a thing; None where none does.

        Pins of both storage and use match parameters only. A preset's pins match no module, as an input may have the
        name of one.
        """
        first = None
        for pin in self.callers if is_module else self.pins:
            if first is not None and pin.pattern in self._used:
                continue
            may_mean = is_parameter or not pin.is_about_storage
            if may_mean and any(fnmatchcase(name, pin.pattern) for name in names if name):
                self._used.add(pin.pattern)  # a pattern counts as used even if an earlier pin decides
                first = first or pin
        return first

    @property
    def speak_of_gathering(self) -> bool:
        return any(pin.gather == "regathered" for pin in self.pins)

    @property
    def speak_of_parts_on_host(self) -> bool:
        return any(pin.states == "wholly" for pin in self.pins)

    def check_all_used(self, known: list[str]) -> None:
        """Raise `BadConstraint` if a pattern of the caller's has matched nothing; `known` names are listed."""
        for pin in self.callers:
            if pin.pattern not in self._used:
                raise BadConstraint(
                    f"the constraint {pin.pattern!r} matches nothing",
                    seen=", ".join(known[:12]) + (", ..." if len(known) > 12 else ""),
                    advice="a parameter, a module path, an input, or out",
                )


def _of_preset(preset: Preset, mesh: DeviceMesh) -> Iterator[Pins]:
    """The pins of a preset, each with what is wished beside it."""
    for name in dict.fromkeys((*preset.pins, *preset.wishes)):
        wish = preset.wishes.get(name)
        pins = _read(escape(name), preset.pins.get(name, _ANY), mesh)
        yield pins if wish is None else replace(pins, wished=_pin(wish, mesh))


def _read(pattern: str, what: Any, mesh: DeviceMesh) -> Pins:
    try:
        if isinstance(what, Placement):
            what = (what,)
        if isinstance(what, tuple) and len(what) == len(mesh.shape) and all(isinstance(p, Placement) for p in what):
            what = Sharding(what)
        if isinstance(what, Sharding):
            pin = Pin(what.text(mesh.axes), _on_real_axes(what, mesh))
            return Pins(pattern, pin, pin)
        if not isinstance(what, str):
            raise BadConstraint(f"{what!r} is not a sharding")
        return _parse(pattern, what, mesh)
    except Letter as e:
        raise BadConstraint(
            f"the constraint {pattern!r}: {what!r} cannot be read",
            seen=e.what,
            advice=e.advice or f'"S(0)@{mesh.axes[0]}", or "R"',
        ) from e


def _parse(pattern: str, text: str, mesh: DeviceMesh) -> Pins:
    """Read `storage; use; kept or regathered; end or each; device, host or wholly`; one is needed."""
    storage, *others = [field.strip() for field in text.split(";")]
    use = others[:1]
    gather = others[1:2]
    reduce = others[2:3]
    states = others[3:]
    words = (gather, "kept regathered *"), (reduce, "end each *"), (states, "device host wholly *")
    if len(states) > 1 or any(given and given[0] not in known.split() for given, known in words):
        raise BadConstraint(f"{text!r} is not storage; use; kept or regathered; end or each; device, host or wholly")
    stored = _pin(storage, mesh)
    used = _pin(use[0], mesh) if use else stored
    gathered, reduced, lies = ("".join(given).replace(_ANY, "") for given in (gather, reduce, states))
    return Pins(pattern, stored, used, gathered, reduced, lies, is_about_storage=bool(use))


def _pin(text: str, mesh: DeviceMesh) -> Pin:
    """Read `S(0)@dp`, or with gradients `R/P(sum)@dp`; `*` admits any sharding."""
    if text == _ANY:
        return Pin(text, None)
    if "/" not in text:
        return Pin(text, _on_real_axes(Sharding.parse(text, mesh), mesh))
    pieces = [piece.partition("@") for piece in outside_brackets(text) if piece.strip()]
    flows = [(Flow.parse(flow.strip()), at + axis) for flow, at, axis in pieces]
    value = ", ".join(f"{flow.value!r}{at}" for flow, at in flows)
    gradient = ", ".join(f"{flow.gradient!r}{at}" for flow, at in flows)
    return Pin(text, *(_on_real_axes(Sharding.parse(one, mesh), mesh) for one in (value, gradient)))


def _on_real_axes(sharding: Sharding, mesh: DeviceMesh) -> Sharding:
    """The sharding with R on axes of size 1, whatever is written there."""
    return Sharding(
        tuple(p if n > 1 else R for p, n in zip(sharding.placements, mesh.shape, strict=True)), sharding.order
    )
