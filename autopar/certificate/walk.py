"""Forward and backward of an emitted program, typed from how parameters are stored to how gradients have to lie."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx
from torch import Tensor

from autopar.certificate import steps
from autopar.certificate.calls import Call, types_in
from autopar.certificate.rules import typed
from autopar.certificate.types import Dim, Refused, Type, axes_of, free, is_free, joined, plain, size, without
from autopar.letters import NotCertified
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish, part_start

_STEPS = {f: name for name, f in STEPS.items()}
_PACKED = {f: name for name, f in PACK.items()}
_BEGUN = frozenset(BEGIN.values())
_BUCKET = "_bucket"  # ends the name of a step of several values
_UNFORESEEN = (IndexError, AttributeError, TypeError, ValueError, KeyError)


@dataclass(frozen=True, slots=True)
class Interface:
    """How values enter a program and have to leave it: a sharding for each, None of what is whole."""

    axes: tuple[str, ...]
    primals: tuple[Any, ...]  # inputs, parameters, buffers
    outputs: tuple[Any, ...]
    gradients: Mapping[int, Any]  # of primals that get one, by place: how it has to lie


@dataclass(slots=True)
class Certificate:
    """What was typed: values, and those of them of which something is unknown along an axis."""

    values: int = 0
    open: int = 0
    ends: int = 0  # outputs and gradients,
    open_ends: int = 0  # and those of them of which something is unknown
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        share = f"{self.values - self.open} of {self.values} values"
        return f"{share} are typed on every axis, {self.ends - self.open_ends} of {self.ends} ends"


def certify(joint: Any, interface: Interface) -> Certificate:
    """Type the halves of a program, or raise a letter about the node that does not follow."""
    found, axes = Certificate(), frozenset(interface.axes)
    forward = _Walk(joint.forward, axes, found)
    places = joint.forward.find_nodes(op="placeholder")
    given = [_type_of(n, s, interface.axes) for n, s in zip(places, interface.primals)]
    given += [_plain(n) for n in places[len(given) :]]
    results = forward.run(given)
    for i, sharding in enumerate(interface.outputs[: joint.outputs]):
        forward.end(results[i], sharding, interface.axes, i, f"output {i}")
    saved = results[joint.outputs :]
    tangents = [_as_it_lies(results[i], interface.outputs[i], interface.axes) for i in joint.differentiable]
    backward = _Walk(joint.backward, axes, found)
    gradients = backward.run([*saved, *tangents])
    for i, (primal, gradient) in enumerate(zip(joint.gradients, gradients)):
        if gradient is not None and primal in interface.gradients:
            what = f"the gradient of {places[primal].name}"
            backward.end(gradient, interface.gradients[primal], interface.axes, i, what)
    return found


class _Walk:
    """One half, node by node."""

    def __init__(self, graph: fx.Graph, axes: frozenset[str], found: Certificate) -> None:
        self.graph, self.axes, self.found = graph, axes, found
        self.types: dict[fx.Node, Any] = {}

    def run(self, given: Sequence[Any]) -> list[Any]:
        """The types of the results, from those of what is given."""
        pending = list(given)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.types[node] = pending.pop(0)
            elif node.op == "call_function":
                try:
                    made = self._made(node)
                except Refused as e:
                    raise self._letter(node, e) from e
                except _UNFORESEEN:  # a call that no rule foresees
                    made = [Type(plain(shape)).opened(self.axes) for shape in _shapes(node)]
                    made = made if len(made) != 1 else made[0]
                self.types[node] = made
                self.found.values += 1
                self.found.open += any(t.open for t in types_in(made))
        return [self._value(a) for a in self.graph.output_node().args[0]]

    def end(self, found: Any, sharding: Any, axes: Sequence[str], place: int, what: str) -> None:
        """Refuse a result that does not lie as it has to."""
        node = self.graph.output_node().args[0][place]
        if not isinstance(found, Type) or not isinstance(node, fx.Node):
            return
        self.found.ends += 1
        self.found.open_ends += bool(found.open)
        wanted = _as_it_lies(found, sharding, axes)
        claims = [d for d, dim in enumerate(found.dims) if size(dim) != 1 and not is_free(dim)]  # others are as good
        cut = [tuple(axes_of([without(wanted.dims[d], found.open)])) for d in claims]
        lies = [tuple(axes_of([found.dims[d]])) for d in claims]
        if found.sums or found.most or lies != cut:
            raise self._letter(node, Refused(f"{what} lies as {found}", f"it has to lie as {wanted}"))

    def _value(self, value: Any) -> Any:
        return self.types[value] if isinstance(value, fx.Node) else None

    def _made(self, node: fx.Node) -> Any:
        target, args = node.target, fx.map_arg(node.args, self.types.__getitem__)
        if target is operator.getitem:
            return args[0][args[1]] if isinstance(args[0], (list, tuple)) else args[0]
        if target in _STEPS:
            return self._step(node, _STEPS[target], args)
        if target in _PACKED:
            return self._grouped(node, _PACKED[target], args)
        if target is finish:
            return [_of_shape(x, shape) for x, shape in zip(args[0], _shapes(node))]
        if target in _BEGUN:
            return args[0]
        if target is part_start:
            return Type((), open=frozenset({args[1]}) & self.axes, is_start=True)
        call = Call(args, fx.map_arg(node.kwargs, self.types.__getitem__), _shapes(node), self.axes)
        if "kept_at" in str(target):  # a draw by position: a part of it is that of the whole
            return Type(free(call.shapes[0]))
        return self._typed(target, call)

    def _typed(self, target: Any, call: Call) -> Any:
        """The result of a rule; calls that are alike are typed once."""
        key = _key((target, call.args, call.kwargs, call.shapes))
        if key not in self.found._known:
            self.found._known[key] = typed(target, call)
        return self.found._known[key]

    def _step(self, node: fx.Node, name: str, args: Any) -> Any:
        if name.endswith(_BUCKET):
            return self._grouped(node, name.removesuffix(_BUCKET), args)
        return self._one(name, args[0], args[1], args[2:], _shapes(node)[0])

    def _grouped(self, node: fx.Node, name: str, args: Any) -> list[Any]:
        """A step of several values in one message."""
        shapes = _shapes(node)
        numbers = list(zip(*args[2:])) or [()] * len(args[0])
        return [
            self._one(name, x, args[1], more, shapes[i] if i < len(shapes) else x.shape)
            for i, (x, more) in enumerate(zip(args[0], numbers))
        ]

    def _one(self, name: str, x: Type, axis: str, numbers: Sequence[Any], shape: Sequence[int]) -> Type:
        if axis not in self.axes:
            return x  # of time: turns of one device
        if name in ("slice", "reduce_scatter"):
            here = shape[numbers[0]] if len(shape) > numbers[0] else -1
            made = getattr(steps, name)(x, axis, *numbers, here=here)
        elif name == "all_to_all":
            made = steps.all_to_all(x, axis, tuple(numbers), here=shape[numbers[3]])
        else:
            made = getattr(steps, name)(x, axis, *numbers)
        return made

    def _letter(self, node: fx.Node, refused: Refused) -> NotCertified:
        operands = ", ".join(f"{n.name}: {self.types.get(n)}" for n in node.all_input_nodes)
        return NotCertified(
            f"the emitted program does not follow from its types at {node.name}: {refused.seen}",
            at=str(node.format_node() or node.name)[:200],
            seen=f"{operands}; {refused.expected}",
            advice="this is an error of autopar, not of your model: please report it with the plan",
        )


def _shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a node makes on this device."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in values)


def _of_shape(x: Type, shape: Sequence[int]) -> Type:
    """The same, now that the rows that are left of a dim are seen: before a message arrives they are not."""
    dims = ((((n, dim[0][1]),) if len(dim) == 1 else dim) for dim, n in zip(x.dims, shape))
    return replace(x, dims=tuple(dims))


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return value if isinstance(value, Type) or value.__hash__ is not None else str(value)


def _plain(node: fx.Node) -> Type:
    return Type(plain(_shapes(node)[0]))


def _type_of(node: fx.Node, sharding: Any, axes: Sequence[str]) -> Type:
    return _as_it_lies(_plain(node), sharding, axes)


def _as_it_lies(like: Type, sharding: Any, axes: Sequence[str]) -> Type:
    """A value of this local shape that lies as a sharding says."""
    if sharding is None:
        return Type(plain(like.shape))
    dims: list[Dim] = list(plain(like.shape))
    lost: set[str] = set()
    for place in sharding.order:
        placement = sharding.placements[place]
        if not placement.is_shard:
            continue
        d, n = placement.dim, like.shape[placement.dim]
        before = axes_of([dims[d]])
        if placement.blocks:
            if len(set(placement.blocks)) > 1 or before or n % len(placement.blocks):
                lost |= {axes[place], *before}
            else:
                dims[d] = joined([(len(placement.blocks), ()), (n // len(placement.blocks), (axes[place],))])
        elif before and len(dims[d]) > 1:
            lost |= {axes[place], *before}
        else:
            dims[d] = ((n, (*before, axes[place])),)
    sums = frozenset(axes[i] for i, p in enumerate(sharding.placements) if p.is_partial)
    return Type(tuple(dims), sums=sums).opened(lost)
