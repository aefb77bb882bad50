"""Local forms: functions that compute an op on one device's part, where the op itself would compute something else.

A form is a function of where the device stands (`Here`), the call in the whole (`OpCall`), and the arguments on the
device. It gives the function and its arguments there, or None where the op itself will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.ops.entry import SHAPE, SIZES, Op, facts_of
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import R, Sharding, local_shape, part
from autopar.sharding.strategies import KEPT, Choice, Strategy, values

Form = tuple[Callable[..., Any], dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call on whole tensors: arguments by name, with types in the places of tensors."""

    op: str
    arguments: Mapping[str, Any]
    outputs: tuple[Any, ...]
    random: int = -1  # number of the random op in the graph; -1 for other ops
    source: str = ""  # the user's line


class Here(Protocol):
    """One device, with the shardings of a call's operands and outputs."""

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def coordinate(self) -> tuple[int, ...]: ...

    @property
    def random_key(self) -> Any:
        """The value that holds the random key of the step."""
        ...

    def lies(self, operand: int) -> Sharding:
        """Sharding in which the op takes an operand."""
        ...

    def leaves(self, output: int = 0) -> Sharding:
        """Sharding in which the op gives an output."""
        ...


@dataclass(frozen=True, slots=True)
class OpOnDevice:
    """The device on which an op runs, and the choice by which it is cut there."""

    mesh: DeviceMesh
    coordinate: tuple[int, ...]
    random_key: Any
    choice: Choice

    @staticmethod
    def fullest(mesh: DeviceMesh, choice: Choice) -> OpOnDevice:
        """The device that holds the largest parts."""
        return OpOnDevice(mesh, (0,) * len(mesh.shape), None, choice)

    @staticmethod
    def alone(operands: int, outputs: int) -> OpOnDevice:
        """One device that holds the whole."""
        whole = Strategy((KEPT,) * operands, (KEPT,) * outputs)
        return OpOnDevice.fullest(DeviceMesh((1,)), Choice((whole,)))

    def lies(self, operand: int) -> Sharding:
        """Sharding in which the op takes an operand."""
        return values(self.choice.operand(operand))

    def leaves(self, output: int = 0) -> Sharding:
        """Sharding in which the op gives an output."""
        return values(self.choice.output(output))


def on_device(op: Op, here: Here, call: OpCall, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that computes an op on a device, and its arguments there, local shapes for whole ones."""
    for marker, local in ((SHAPE, local_output), (SIZES, local_sizes)):
        if (name := op.local(marker)) is not None:
            kwargs = {**kwargs, name: local(here, call)}
    form = facts_of(op.name).form
    return (form(here, call, kwargs) if form else None) or (op, kwargs)


def local_output(here: Here, call: OpCall, output: int = 0) -> tuple[int, ...]:
    """Shape of an output on the device."""
    return local_shape(call.outputs[output].shape, here.leaves(output), here.mesh, here.coordinate)


def local_sizes(here: Here, call: OpCall) -> tuple[int, ...]:
    """Sizes of the outputs on the device, along the dim that the call names."""
    dim = call.arguments.get("dim", 0)
    return tuple(local_output(here, call, i)[dim] for i in range(len(call.outputs)))


def cuts(here: Here, shape: tuple[int, ...], sharding: Sharding, dim: int) -> tuple[tuple[str, int], ...]:
    """The axes that cut a dim, major first, each with the size that the dim has on this device before it."""
    found = []
    order = sharding.cuts.get(dim, [])
    for i, axis in enumerate(order):
        before = tuple(p if a in order[:i] else R for a, p in enumerate(sharding.placements))
        outer = Sharding(before, sharding.order)
        found.append((here.mesh.axes[axis], local_shape(shape, outer, here.mesh, here.coordinate)[dim]))
    return tuple(found)


def start_here(here: Here, shape: tuple[int, ...], sharding: Sharding, dim: int) -> int:
    """Index in the whole dim at which this device's part begins."""
    start = 0
    size = shape[dim]
    for axis in sharding.cuts.get(dim, []):
        before, size = part(size, here.mesh.shape[axis], here.coordinate[axis])
        start += before
    return start


def places(here: Here, call: OpCall, sharding: Sharding, shape: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of draws by position: the step's key, the op's number, and where this device's part lies."""
    return {
        "key": here.random_key,
        "op": call.random,
        "shape": shape,
        "cuts": tuple(cuts(here, shape, sharding, d) for d in range(len(shape))),
    }


def places_of_output(here: Here, call: OpCall) -> dict[str, Any]:
    """Arguments of draws by position, for the first output."""
    return places(here, call, here.leaves(), call.outputs[0].shape)
