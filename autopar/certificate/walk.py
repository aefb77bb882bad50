"""Type forward and backward of an emitted program, from how parameters are stored to how gradients have to lie."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.certificate import steps
from autopar.certificate.bodies import body_of, is_body_known
from autopar.certificate.calls import TypedCall, lost_in, types_in, unknown
from autopar.certificate.elementwise import as_parts
from autopar.certificate.handed_over import HANDING_ON, NOTHING_THERE, OnHost, check_order
from autopar.certificate.readings import Wholes
from autopar.certificate.rules import typed
from autopar.certificate.types import Dim, Refused, Type, axes_of, free, joined, lies_as, plain
from autopar.certificate.undone_views import UndoneViews
from autopar.certificate.views import VIEWS
from autopar.letters import NotCertified, NotServed
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish, part_start
from autopar.runtime.private import OpOverload
from autopar.runtime.wires import op_run_by

VARIABLE = "AUTOPAR_CERTIFICATE"  # "off": programs are run without one
_STEPS = {f: name for name, f in STEPS.items()}
_PACKED = {f: name for name, f in PACK.items()}
_BEGUN = HANDING_ON.union(BEGIN.values())
_BUCKET = "_bucket"  # ends the name of a step of several values
_SUMS = frozenset(f for f, name in (_STEPS | _PACKED).items() if "reduce" in name and "max" not in name)
_ON_THE_WAY = frozenset((*_STEPS, *_PACKED, *_BEGUN, finish, operator.getitem))
# ops that give one value in another form
_FORMS = frozenset(f"aten.{name}" for name in ("_to_copy.default", "clone.default", "view.default", "t.default",
                   "transpose.int", "permute.default", "detach.default", "alias.default"))  # fmt: skip
# Ops whose backward is linear in the gradient although its single steps are not, so that no type follows there.
_LINEAR_AS_A_WHOLE = re.compile(r"(matrix_exp|logcumsumexp)(_\d+)?$")
_Shapes = tuple[tuple[int, ...], ...]
_SHOWN_OPS = 4
_READINGS = ((True, False), (False, True), (True, True))  # tried in turn: whether constants are cut, ops looked inside
_UNFORESEEN = (IndexError, AttributeError, TypeError, ValueError, KeyError)


@dataclass(frozen=True, slots=True)
class Interface:
    """Shardings in which values enter a program and have to leave it; None where they are whole."""

    axes: Mapping[str, int]  # axis -> its size
    primals: tuple[Any, ...]  # inputs, parameters, buffers
    outputs: tuple[Any, ...]
    gradients: Mapping[int, Any]  # index of a primal -> the sharding that its gradient has to have
    reduced_in: Mapping[int, torch.dtype]  # index of a primal -> the dtype in which its gradient is summed
    comes_of: Callable[[fx.Node], str]  # the name of the model's op that a node is emitted for, "" for none
    wholes: Mapping[str, Sequence[tuple[int, ...]]]  # the whole shapes of what an op reads and gives
    inside: Callable[[str], tuple[tuple[int, ...], ...]] = lambda _: ()  # op -> shapes that it makes inside
    cuts_constants: bool = False  # whether slicing a constant shards it; otherwise it matches any sharding
    looks_inside: bool = False  # whether a view is read by the shapes that its op makes inside
    users_rule: Callable[[str], str] = lambda _: ""  # model's op -> the line of its user's rule
    adds_gradients: Callable[[fx.Node], bool] = lambda _: False  # whether a node adds up two gradients of one value
    doubted: frozenset[fx.Node] = frozenset()  # views that are not taken to undo an earlier one of their op
    # index of an output -> the sharding of the gradient that arrives, where it is not the output's own
    tangents: Mapping[int, Any] = field(default_factory=dict)
    on_host: OnHost = NOTHING_THERE


@dataclass(slots=True)
class Certificate:
    """Counts of typed values and ends, and of those of which something is unknown along an axis."""

    values: int = 0
    open: int = 0
    ends: int = 0  # outputs and gradients
    open_ends: int = 0  # ends of which something is unknown
    opened_by: Counter[str] = field(default_factory=Counter, repr=False)  # ops from which on something is unknown
    unforeseen: list[str] = field(default_factory=list, repr=False)  # calls that their op's rule could not read
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)
    views: UndoneViews = field(default_factory=UndoneViews, repr=False)

    def __str__(self) -> str:
        share = f"{self.values - self.open} of {self.values} values"
        return f"{share} are typed on every axis, {self.ends - self.open_ends} of {self.ends} ends"

    @property
    def left_open(self) -> str:
        """Text that says how much is not typed, and from which ops on; "" where all is."""
        if not self.open:
            return ""
        ops = ", ".join(name for name, _ in self.opened_by.most_common(_SHOWN_OPS))
        more = ", ..." if len(self.opened_by) > _SHOWN_OPS else ""
        ends = f"the certificate types {self.ends - self.open_ends} of {self.ends} outputs and gradients"
        return f"{ends}; {self.open} of {self.values} values are unknown along an axis, from {ops}{more} on"


def is_wanted() -> bool:
    """Whether certificates are on; raises where the environment variable is neither "on" nor "off"."""
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "on", "off"):
        raise NotServed(f"{VARIABLE}={said} is neither on nor off", advice=f"{VARIABLE}=off, or no such variable")
    return said != "off"


def certify(joint: Any, interface: Interface, ending: tuple[Any, Sequence[Any]] | None = None) -> Certificate:
    """Type the halves of a program, or raise a letter about the node that does not follow.

    `ending` belongs to a program that runs in turns: the halves of the part that runs once, on the sums of the turns,
    and the shardings of its outputs. What does not follow under one reading of constants and views may under another.
    """
    check_order(joint, interface.on_host)
    try:
        return _under_one_reading(joint, interface, ending)
    except NotCertified as e:
        for cuts_constants, looks_inside in _READINGS:
            other = replace(interface, cuts_constants=cuts_constants, looks_inside=looks_inside)
            with contextlib.suppress(NotCertified):
                return _under_one_reading(joint, other, ending)
        raise e from None


def _under_one_reading(joint: Any, interface: Interface, ending: tuple[Any, Sequence[Any]] | None) -> Certificate:
    """Type the halves; after a refusal again, without the assumption that a view undoes an earlier one."""
    while True:
        found = Certificate()
        try:
            return _certified(joint, interface, ending, found)
        except NotCertified:
            if not found.views.suspects:
                raise
            interface = replace(interface, doubted=interface.doubted | found.views.suspects)


def _certified(
    joint: Any, interface: Interface, ending: tuple[Any, Sequence[Any]] | None, found: Certificate
) -> Certificate:
    axes = tuple(interface.axes)
    first = joint.forward if joint.beginning is None else joint.beginning
    places = first.find_nodes(op="placeholder")
    given = [_type_of(n, s, axes) for n, s in zip(places, interface.primals)]
    given += [_plain(n) for n in places[len(given) :]]
    if joint.beginning is not None:  # every turn takes the results of a beginning
        given += _Walk(joint.beginning, interface, found).run(given)
    forward = _Walk(joint.forward, interface, found)
    results = forward.run(given)
    for i, sharding in enumerate(interface.outputs):
        forward.end(i, sharding, f"output {i}")
    saved = results[joint.outputs :]
    if ending is None:
        arrives = {**dict(enumerate(interface.outputs)), **interface.tangents}
        tangents = [_as_it_lies(results[i], arrives[i], axes) for i in joint.differentiable]
    else:
        tangents = _scales(*ending, results[len(interface.outputs) : joint.outputs], interface, found)
    _gradients(joint, interface, [*saved, *tangents], found)
    return found


def _scales(
    joint: Any, outputs: Sequence[Any], crossing: Sequence[Type], interface: Interface, found: Certificate
) -> list[Type]:
    """The gradients that the ending of turns gives to its inputs, which have to be whole.

    A turn runs before they are known, for a gradient of one, and its sums are multiplied by them afterwards.
    """
    forward = _Walk(joint.forward, interface, found)
    results = forward.run(crossing)
    for i, sharding in enumerate(outputs):
        forward.end(i, sharding, f"output {i} of the ending")
    tangents = [_as_it_lies(results[i], outputs[i], tuple(interface.axes)) for i in joint.differentiable]
    backward = _Walk(joint.backward, interface, found)
    scales = backward.run([*results[joint.outputs :], *tangents])
    for i in range(len(scales)):
        backward.end(i, None, "the gradient of what micro-batches add up")
    return scales


def _gradients(joint: Any, interface: Interface, given: Sequence[Any], found: Certificate) -> None:
    """Type the backward, and the two graphs that replace it where micro-batches accumulate gradients."""
    names = [f"the gradient of {n.name}" for n in joint.forward.find_nodes(op="placeholder")]
    ends = [(interface.gradients.get(primal), names[primal]) for primal in joint.gradients]
    backward = _Walk(joint.backward, interface, found)
    backward.run(given)
    for i, (sharding, what) in enumerate(ends):
        if joint.gradients[i] in interface.gradients:
            backward.end(i, sharding, what)
            backward.reduced_in(i, interface.reduced_in.get(joint.gradients[i]), what)
    if not joint.waits:
        return
    hold = _Walk(joint.hold, interface, found)
    held = hold.run(given)
    of_inputs = [i for i in range(len(ends)) if i not in joint.waits]
    wanted = [(place, i) for place, i in enumerate(of_inputs) if joint.gradients[i] in interface.gradients]
    for _, i in wanted:
        hold.end(i, *ends[i])
    _settled(joint, interface, [held[i] for i in joint.waits], ends, found)
    if joint.parts is None:
        return
    inward = _Walk(joint.parts.inward, interface, found)
    context = inward.run(given)[len(of_inputs) :]
    for place, i in wanted:
        inward.end(place, *ends[i])
    _settled(joint, interface, _Walk(joint.parts.weights, interface, found).run(context), ends, found)


def _settled(joint: Any, interface: Interface, held: Sequence[Any], ends: Sequence[Any], found: Certificate) -> None:
    """Type the reduction of gradients that have accumulated."""
    settle = _Walk(joint.settle, interface, found)
    operands = dict(zip(joint.settled_from, held))
    settle.run([operands[place] for place in range(len(operands))])
    for place, i in enumerate(joint.waits):
        settle.end(place, *ends[i])
        settle.reduced_in(place, interface.reduced_in.get(joint.gradients[i]), ends[i][1])


class _Walk:
    """Types one half, node by node."""

    def __init__(self, graph: fx.Graph, interface: Interface, found: Certificate) -> None:
        self.graph = graph
        self.interface = interface
        self.found = found
        self.order = tuple(interface.axes)
        self.axes = frozenset(interface.axes)
        self.types: dict[fx.Node, Any] = {}

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Types of the results, from the types of the inputs."""
        places = self.graph.find_nodes(op="placeholder")
        if len(places) != len(given):
            raise self._letter(places[-1], Refused(f"{len(given)} values are given", f"it takes {len(places)}"))
        self.types.update(zip(places, given, strict=True))
        for node in self.graph.nodes:
            if node.op == "call_function":
                try:
                    made = self._made(node)
                    _needs_no_deal(made, self.axes)
                except Refused as e:
                    if not _LINEAR_AS_A_WHOLE.search(self.interface.comes_of(node)):
                        raise self._letter(node, e) from e
                    made = self._unknown(node)
                except _UNFORESEEN as e:  # a call that no rule foresees
                    self.found.unforeseen.append(f"{node.target}: {type(e).__name__}: {e}")
                    made = self._unknown(node)
                self.types[node] = made
                self._count(node, made)
        return [self._value(a) for a in self.graph.output_node().args[0]]

    def _count(self, node: fx.Node, made: Any) -> None:
        """Count a value, and the op from which on something is unknown of it."""
        lost = lost_in(made)
        self.found.values += 1
        self.found.open += bool(lost)
        if lost.difference(*(lost_in(self.types[operand]) for operand in node.all_input_nodes)):
            self.found.opened_by[_name_of(node.target)] += 1

    def end(self, place: int, sharding: Any, what: str) -> None:
        """Raise where a result does not lie as it has to; `sharding` None means whole."""
        node = self._result(place)
        found = self._value(node)
        if not isinstance(found, Type):
            return
        self.found.ends += 1
        self.found.open_ends += bool(found.open)
        wanted = _as_it_lies(found, sharding, self.order)
        if not lies_as(found, wanted):
            raise self._letter(node, Refused(f"{what} lies as {found}", f"it has to lie as {wanted}"))

    def reduced_in(self, place: int, dtype: torch.dtype | None, what: str) -> None:
        """Raise where the last steps to a result sum it over devices in a narrower dtype."""
        node = self._result(place)
        part = 0
        while dtype is not None and isinstance(node, fx.Node) and node.op == "call_function":
            before = node.args[0]
            if node.target is operator.getitem:
                part = node.args[1]
            if isinstance(before, (list, tuple)):  # several in one message
                before = before[part]
            if node.target in _SUMS:
                used = before.meta["val"].dtype
                if torch.promote_types(used, dtype) != used:
                    raise self._letter(node, Refused(f"{what} is summed in {used}", f"it has to be summed in {dtype}"))
            is_on_the_way = node.target in _ON_THE_WAY or str(node.target) in _FORMS
            node = before if is_on_the_way else None

    def _unknown(self, node: fx.Node) -> Any:
        """The type of a value of which nothing is known."""
        made = [Type(plain(shape)).opened(self.axes) for shape in _shapes(node)]
        return made if len(made) != 1 else made[0]

    def _result(self, place: int) -> Any:
        return self.graph.output_node().args[0][place]

    def _value(self, value: Any) -> Any:
        return self.types[value] if isinstance(value, fx.Node) else None

    def _made(self, node: fx.Node) -> Any:
        target = node.target
        args = fx.map_arg(node.args, self.types.__getitem__)
        if self.interface.adds_gradients(node):
            args = as_parts(args)
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
            axes = frozenset({args[1]}) & self.axes
            return Type((), open=axes, places=axes, is_start=True)
        kwargs = fx.map_arg(node.kwargs, self.types.__getitem__)
        call = TypedCall(args, kwargs, _shapes(node), self.axes, cuts_constants=self.interface.cuts_constants)
        if "kept_at" in str(target):  # a draw by position: a part of it is that of the whole
            return Type(free(call.shapes[0]))
        if str(target) == "aten.sub.Tensor" and node.args[0] is node.args[1]:
            return replace(args[0], is_zero=True)
        if op := op_run_by(target):  # The second argument are axes, which the setup names as well.
            return self._typed(op, replace(call, args=(call.args[0], *call.args[2:])))
        if is_body_known(target):
            return self._as_its_body(node, call)
        if str(target) in VIEWS:
            return self._view(node, call)
        return self._typed(target, call)

    def _as_its_body(self, node: fx.Node, call: TypedCall) -> Any:
        """Results of a custom op, typed as those of the ops that it stands for; once for calls that are alike."""
        given = [n.meta["val"] for n in node.all_input_nodes]
        lie = tuple((v.shape, v.stride(), v.dtype) for v in given)
        key = _key((node.target, call.args, call.kwargs, lie))
        if key not in self.found._known:
            try:
                graph = body_of(node)
            except (RuntimeError, *_UNFORESEEN):  # torch cannot trace it: nothing is known then
                return unknown(call)
            said = self.interface.users_rule(self.interface.comes_of(node))
            inside = replace(self.interface, comes_of=lambda _: "", users_rule=lambda _: said)
            body = _Walk(graph, inside, Certificate())
            made = body.run([self.types[n] for n in node.all_input_nodes])
            self.found._known[key] = made if len(made) != 1 else made[0]
        return self.found._known[key]

    def _view(self, node: fx.Node, call: TypedCall) -> Type:
        """Type of a view; a doubtful one that undoes an earlier view of its op gets that view's operand type.

        Ops that take the same view of a value share it, so that its shape may be one that any of them makes inside.
        """
        x = call.args[0]
        op = self.interface.comes_of(node)
        leaves_doubt = any(axes for dim in x.dims for _, axes in dim)  # A dim is cut or repeated.
        wholes = tuple(self.interface.wholes.get(op, ())) if leaves_doubt else ()
        looks = wholes and self.interface.looks_inside
        ops = dict.fromkeys((op, *map(self.interface.comes_of, node.users))) if looks else ()
        inside = tuple(shape for one in ops for shape in self.interface.inside(one))
        made: Type = self._typed(node.target, call, wholes, inside)
        if made.open == x.open:
            self.found.views.add(op, x, made)
            return made
        if node in self.interface.doubted:
            return made
        undone = self.found.views.undone(node, op, x, call.shapes[0])
        return made if undone is None else undone

    def _typed(self, target: Any, call: TypedCall, wholes: _Shapes = (), inside: _Shapes = ()) -> Any:
        """Result of a rule; calls that are alike are typed once."""
        key = _key((target, call.args, call.kwargs, call.shapes, wholes, inside))
        if key not in self.found._known:
            if wholes:
                call = replace(call, wholes=Wholes(wholes, call.args[0].open, self.interface.axes, inside))
            self.found._known[key] = _placed(_consistent(typed(target, call)), call)
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
            return x  # The axis of time runs turns on one device.
        return steps.after(name, x, axis, numbers, shape, self.interface.cuts_constants)

    def _letter(self, node: fx.Node, refused: Refused) -> NotCertified:
        self.found.views.suspect(node, self.interface.comes_of)
        operands = ", ".join(f"{n.name}: {self.types.get(n)}" for n in node.all_input_nodes)
        if said := self.interface.users_rule(self.interface.comes_of(node)):
            return NotCertified(
                f"a rule does not hold: {refused.seen}",
                at=said,
                seen=f"{operands}; {refused.expected}",
                advice=f"another rule, or none; {VARIABLE}=off runs the program as it is",
            )
        return NotCertified(
            f"the emitted program does not follow from its types at {node.name}: {refused.seen}",
            at=str(node.format_node() or node.name)[:200],
            seen=f"{operands}; {refused.expected}",
            advice=f"this is an error of autopar, not of your model: please report it with the plan; "
            f"{VARIABLE}=off runs the program as it is",
        )


def _needs_no_deal(made: Any, axes: frozenset[str]) -> None:
    """Refuse a value that lost the order of rows that were dealt, which is named beside the axes."""
    for t in types_in(made):
        if deals := t.open - axes:
            raise Refused(f"rows of a {', '.join(sorted(deals))} are mixed", "they are dealt back before")


def _consistent(made: Any) -> Any:
    if isinstance(made, (list, tuple)):
        return [_consistent(one) for one in made]
    return made.consistent() if isinstance(made, Type) else made


def _placed(made: Any, call: TypedCall) -> Any:
    """The type, with the axes along which only the device's place is unknown, as for its operands."""
    if isinstance(made, (list, tuple)):
        return [_placed(one, call) for one in made]
    if not isinstance(made, Type) or not made.open:
        return made
    places = frozenset(a for t in call.types for a in t.places) & made.open
    return replace(made, places=places.difference(*(t.open - t.places for t in call.types)))


def _name_of(target: Any) -> str:
    name = str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
    return name.removeprefix("aten.").removesuffix(".default")


def _shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Shapes of a node's results on this device."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in values)


def _of_shape(x: Type, shape: Sequence[int]) -> Type:
    """The type, with the local rows that are known now that a message has arrived."""
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
    """Type of a value of this local shape under a sharding."""
    if sharding is None:
        return Type(plain(like.shape))
    dims: list[Dim] = list(plain(like.shape))
    lost: set[str] = set()
    for place in sharding.order:
        placement = sharding.placements[place]
        if not placement.is_shard:
            continue
        d = placement.dim
        n = like.shape[placement.dim]
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
