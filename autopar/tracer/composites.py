"""Open composite functions of torch: replace each by the chain of canonical ops that it runs.

A function that is in no line of the vocabulary may be a composite: torch runs it as a chain of other ops, and autograd
differentiates those. Where the vocabulary has every one of them, they are what the graph holds.

    before    y = margin_ranking_loss(a, b, target, margin=0.5, reduction="none")
    after     d = sub(a, b);  n = neg(target);  p = mul(n, d);  q = add(p, 0.5);  y = clamp(q, min=0)

The chain is what torch itself dispatches below autograd when the function runs on fakes, so that values and gradients
are eager's. Each link is translated into a canonical op, and the translation is dispatched again: it must come to the
very same call. A write to a tensor that the chain itself made is a new value. A function stays whole where its chain
writes to anything else, draws, has a gradient of its own, or holds an op that the vocabulary lacks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from autopar.graph import walks
from autopar.graph.graph import Graph, TensorType, fresh_key, info, type_of
from autopar.graph.nodes import WrittenCall
from autopar.ops.declare import WHOLE
from autopar.ops.entry import Apply, Op
from autopar.ops.lookup import functional, lookup
from autopar.runtime.private import TO_COPY, FakeTensorMode, TorchDispatchMode, clean_room
from autopar.tracer.rewriting import forward_past, stopped_like

LONGEST = 64  # links: a recurrent module unrolled is not for a reader

# The same numbers in another shape, or one number everywhere: the canonical form has the same shape and numbers, but
# need not dispatch the same ATen op.
_SAME_NUMBERS = frozenset(
    "_unsafe_view alias full zeros ones empty scalar_tensor full_like zeros_like ones_like empty_like".split()
)

Spelling = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function of torch, and what it is called with


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a chain: operand `at` of the function (`link` -1), or output `at` of a link."""

    link: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class ChainLink:
    """One op of a chain, its arguments with a `Ref` for each tensor."""

    op: Op
    arguments: dict[str, Any]
    outputs: tuple[TensorType, ...]
    is_listed: bool  # whether the result is a list or a tuple


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The ops that a composite function runs, in order, and which of their tensors it returns."""

    links: tuple[ChainLink, ...]
    results: tuple[Ref, ...]


def composites_are_opened(graph: Graph) -> None:
    """Replace composite functions by their chains.

    before    y = kron(a, b)                                       # a is f32[2, 3], b is f32[4, 5]
    after     u = view(a, [2, 1, 3, 1]);  v = view(b, [1, 4, 1, 5]);  p = mul(u, v);  y = view(p, [8, 15])
    """
    for node in list(graph.nodes):
        if info(node).kind == "op" and _may_be_opened(node):
            chain = chain_of(node)
            if chain is not None:
                _splice(graph, node, chain)


def _may_be_opened(node: fx.Node) -> bool:
    op = node.target
    about = info(node)
    is_known = op.signature is not None or op.name in WHOLE
    if op.name == "cross_entropy":  # With probabilities in place of classes it is a product and a sum.
        is_known = "float" not in type_of(node.kwargs["target"]).dtype
    return not is_known and about.random < 0 and not isinstance(op.call, Apply)


def chain_of(node: fx.Node) -> Chain | None:
    """The chain of a node's op; None where the op stays whole. Equal calls share one chain."""
    operands = tuple(map(type_of, walks.operands(node)))
    arguments = pytree.tree_map_only(fx.Node, type_of, dict(node.kwargs))
    return _chain(WrittenCall(node.target, arguments, repr(arguments), operands, info(node).outputs))


@functools.lru_cache(maxsize=1024)
def _chain(call: WrittenCall) -> Chain | None:
    """Run the op on fakes and translate what it dispatches."""
    given: list[Tensor] = []

    def fake(type_: TensorType) -> Tensor:
        wants = type_.requires_grad and call.is_trained
        given.append(torch.empty(type_.shape, dtype=type_.torch_dtype, device="cpu", requires_grad=wants))
        return given[-1]

    with clean_room(), FakeTensorMode():
        arguments = pytree.tree_map_only(TensorType, fake, call.arguments)
        seen = _Dispatched()
        try:
            with torch.set_grad_enabled(call.is_trained), seen:
                result = call.op.run(arguments)
            return _translated(seen, given, result, call.outputs)
        except _Whole:
            return None
        except Exception:  # a function that does not run on plain fakes stays whole
            return None


class _Whole(Exception):
    """Raised where a function cannot be opened."""


class Dispatch(NamedTuple):
    """One call below autograd."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any
    enabled: bool  # was grad mode on?


class _Dispatched(TorchDispatchMode):
    """Notes every call below autograd, with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Dispatch] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        enabled = torch.is_grad_enabled()
        result = function(*args, **kwargs)
        self.calls.append(Dispatch(function, args, kwargs, result, enabled))
        return result


class Translation:
    """The translated links of a chain, and the tensors that they have made."""

    def __init__(self, seen: _Dispatched, given: list[Tensor]) -> None:
        self.seen = seen
        self.given = given
        self.links: list[ChainLink] = []
        self.where = {id(t): Ref(-1, i) for i, t in enumerate(given)}  # id(tensor) -> its place in the chain
        self.flows = {id(t): t.requires_grad for t in given}  # id(tensor) -> does a gradient flow through it?

    def add(self, call: Dispatch) -> None:
        """Translate one call below autograd."""
        if call.function.namespace == "prim":  # a question about a device
            return
        outputs = _tensors(call.made)
        operands = _tensors((call.args, call.kwargs))
        draws = torch.Tag.nondeterministic_seeded in call.function.tags
        reads_a_constant = any(id(t) not in self.where for t in operands)  # a tensor that the function made
        if draws or not outputs or reads_a_constant:
            raise _Whole
        writes = call.function._schema.is_mutable
        if writes:  # Nobody else sees the temporary, so its new value replaces it.
            op, arguments = self._write(call)
        else:
            op, arguments = _canonical(self.seen, *call[:4])
        if not writes and any(id(t) in self.where for t in outputs):
            if len(outputs) == 1:  # an op that gives back what it was given
                return
            raise _Whole
        wants = call.enabled and op.name != "detach" and any(self.flows[id(t)] for t in operands)
        types = []
        for t in outputs:
            type_ = TensorType.of(t)
            types.append(replace(type_, requires_grad=wants and type_.may_have_gradient))
        referred = pytree.tree_map_only(Tensor, lambda t: self.where[id(t)], arguments)
        for at, t in enumerate(outputs):
            self.where[id(t)] = Ref(len(self.links), at)
            self.flows[id(t)] = types[at].requires_grad
        self.links.append(ChainLink(op, referred, tuple(types), not isinstance(call.made, Tensor)))

    def _write(self, call: Dispatch) -> tuple[Op, dict[str, Any]]:
        target = call.args[0]
        knows_gradient = call.enabled or not self.flows[id(target)]
        if not knows_gradient or not _is_temporary(call.made, target, self.where, self.seen):
            raise _Whole
        return _canonical_of_write(call.function, call.args, call.kwargs)

    def chain(self, results: list[Tensor], expected: tuple[TensorType, ...]) -> Chain:
        """The chain, if its results have the types of the function's results."""
        if any(id(t) not in self.where for t in results):  # autograd hands out the very objects that were dispatched
            raise _Whole
        if len(results) != len(expected) or not self.links:
            raise _Whole
        found = [self.where[id(t)] for t in results]
        for tensor, ref, type_ in zip(results, found, expected, strict=True):
            mine = self.links[ref.link].outputs[ref.at] if ref.link >= 0 else TensorType.of(self.given[ref.at])
            if mine != type_ or tuple(tensor.shape) != type_.shape:
                raise _Whole  # autograd differentiates something else than what runs below
        return Chain(tuple(self.links), tuple(found))


def _translated(seen: _Dispatched, given: list[Tensor], result: Any, expected: tuple[TensorType, ...]) -> Chain:
    """Translate the dispatched calls into a chain of canonical ops."""
    if len(seen.calls) > LONGEST:
        raise _Whole
    _forget_what_autograd_keeps(seen, result)
    translation = Translation(seen, given)
    for call in list(seen.calls):
        translation.add(call)
    return translation.chain(_tensors(result), expected)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _forget_what_autograd_keeps(seen: _Dispatched, result: Any) -> None:
    """Leave out detached copies that nothing reads: autograd makes them to save results for backward."""
    read = {id(t) for c in seen.calls for t in _tensors((c.args, c.kwargs))} | {id(t) for t in _tensors(result)}
    seen.calls = [c for c in seen.calls if c.function is not torch.ops.aten.detach.default or id(c.made) in read]


def _is_temporary(made: Any, target: Tensor, where: Mapping[int, Ref], seen: _Dispatched) -> bool:
    """Whether a written tensor was made in the chain, and no other tensor shares its memory."""
    memory = StorageWeakRef(target.untyped_storage())
    held = [t for c in seen.calls for t in _tensors((c.args, c.kwargs, c.made))]
    has_other_names = any(t is not target and StorageWeakRef(t.untyped_storage()) == memory for t in held)
    return made is target and where[id(target)].link >= 0 and not has_other_names


def _canonical_of_write(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Op, dict[str, Any]]:
    """The pure form, of the target's dtype and shape, of a call that writes to its first argument."""
    op, arguments = functional(function, args, kwargs)
    if op is None or op.signature is None:
        raise _Whole
    with torch.no_grad():
        pure = op.run(arguments)
    if not isinstance(pure, Tensor) or pure.dtype != args[0].dtype or pure.shape != args[0].shape:
        raise _Whole
    return op, arguments


def _canonical(
    seen: _Dispatched,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Any,
) -> tuple[Op, dict[str, Any]]:
    """The canonical op of an ATen call, checked by dispatching it again."""
    name = function._schema.name.partition("::")[2]
    if function.namespace != "aten":
        raise _Whole
    spelled, given, named = _SPELLED[function](*args, **kwargs) if function in _SPELLED else (function, args, kwargs)
    op, arguments = lookup(spelled, given, named, made)
    if op.signature is None:
        raise _Whole
    if name in _SAME_NUMBERS or function in _RENAMED or function is TO_COPY:
        return op, arguments
    before = len(seen.calls)
    with torch.no_grad(), seen:
        again = op.run(arguments)
    calls = [c for c in seen.calls[before:] if c.function.namespace == "aten"]
    del seen.calls[before:]
    if function.is_view:  # A view is determined by the memory that it shows.
        if not _look_alike(made, again):
            raise _Whole
    elif len(calls) != 1 or not _alike(Dispatch(function, args, kwargs, made, True), calls[0]):
        raise _Whole
    return op, arguments


def _look_alike(one: Any, other: Any) -> bool:
    """Whether two views show the same elements of the same memory."""

    def shown(tensor: Tensor) -> tuple[Any, ...]:
        memory = StorageWeakRef(tensor.untyped_storage())
        return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, memory

    return [shown(t) for t in pytree.tree_leaves(one)] == [shown(t) for t in pytree.tree_leaves(other)]


def _alike(one: Dispatch, other: Dispatch) -> bool:
    """Whether two calls of one function have the same arguments, with defaults filled in.

    Another overload may take a number where this one takes a tensor.
    """

    def bound(call: Dispatch) -> dict[str, Any]:
        arguments = call.function._schema.arguments
        by_name = {**{a.name: v for a, v in zip(arguments, call.args, strict=False)}, **call.kwargs}
        return {a.name: by_name.get(a.name, a.default_value) for a in arguments}

    if one.function._schema.name != other.function._schema.name:
        return False
    left, right = bound(one), bound(other)
    for name in {**left, **right}:
        sides = left.get(name), right.get(name)
        if all(map(_is_unsaid, sides)):
            continue
        leaves = [pytree.tree_leaves(side, is_leaf=lambda v: v is None) for side in sides]
        if len(leaves[0]) != len(leaves[1]) or not all(map(_same, *leaves)):
            return False
    return True


def _is_unsaid(value: Any) -> bool:
    """Whether a value can stand for an argument that another overload does not have."""
    return value is None or value is False or (isinstance(value, (list, tuple)) and not value)


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same tensor or equal; devices and layouts are ignored."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    where = (torch.device, torch.layout, torch.memory_format, type(None))
    return bool(a == b) or (isinstance(a, where) and isinstance(b, where))


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Spelling:
    return Tensor.__getitem__, (x, (*[slice(None)] * (dim % x.dim()), slice(start, end, step))), {}


def _index(x: Tensor, indices: list[Tensor | None]) -> Spelling:
    return Tensor.__getitem__, (x, tuple(slice(None) if i is None else i for i in indices)), {}


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Spelling:
    return torch.softmax, (x, dim), {"dtype": torch.float32} if half_to_float else {}


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Spelling:
    return torch.log_softmax, (x, dim), {"dtype": torch.float32} if half_to_float else {}


def _scalar(value: float, **how: Any) -> Spelling:
    return torch.full, ((), value), {"dtype": how.get("dtype") or torch.get_default_dtype()}


def _norm(x: Tensor, p: float | None = None, dim: Sequence[int] | None = None, keepdim: bool = False) -> Spelling:
    return torch.linalg.vector_norm, (x, 2.0 if p is None else p, dim, keepdim), {}


def _at_least(x: Tensor, bound: Any) -> Spelling:
    return torch.clamp, (x,), {"min": bound}


def _at_most(x: Tensor, bound: Any) -> Spelling:
    return torch.clamp, (x,), {"max": bound}


def _moved(x: Tensor, dims: Sequence[int]) -> Spelling:
    return torch.permute, (x, tuple(d % x.dim() for d in dims)), {}


_aten = torch.ops.aten
_RENAMED: dict[Any, Callable[..., Spelling]] = {  # the same function under a newer name
    _aten.norm.ScalarOpt_dim: _norm,
    _aten.norm.Scalar: _norm,
    _aten.clamp_min.default: _at_least,
    _aten.clamp_min.Tensor: _at_least,
    _aten.clamp_max.default: _at_most,
    _aten.clamp_max.Tensor: _at_most,
}
_SPELLED: dict[Any, Callable[..., Spelling]] = {  # ATen's form of a call, and torch's
    **_RENAMED,
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
    _aten.permute.default: _moved,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten.scalar_tensor.default: _scalar,
}


def _splice(graph: Graph, node: fx.Node, chain: Chain) -> None:
    """Insert the chain's nodes before a composite and let them replace it."""
    about = info(node)
    operands = walks.operands(node)
    made: dict[Ref, fx.Node] = {Ref(-1, i): n for i, n in enumerate(operands)}
    base = about.key.rpartition("/")[0]
    with graph.fx.inserting_before(node):
        for k, link in enumerate(chain.links):
            arguments = pytree.tree_map_only(Ref, lambda r: made[r], link.arguments)
            name = f"{about.module}_{link.op.name}".replace(".", "_").strip("_")
            new = graph.fx.create_node("call_function", link.op, (), arguments, name=name)
            new.meta["info"] = replace(about, key=fresh_key(graph.fx, f"{base}/{link.op.name}"), outputs=link.outputs)
            if not link.is_listed:
                made[Ref(k, 0)] = new
                continue
            for at, type_ in enumerate(link.outputs):
                part = graph.fx.create_node("call_function", operator.getitem, (new, at), name=f"{new.name}_{at}")
                part.meta["info"] = replace(info(new), key=f"{info(new).key}[{at}]", kind="part", outputs=(type_,))
                made[Ref(k, at)] = part
    parts = walks.parts(node)
    if parts:
        for part in parts:
            _give_way(part, made[chain.results[part.args[1]]])
    else:
        _give_way(node, made[chain.results[0]])
    if parts:
        graph.fx.erase_node(node)


def _give_way(node: fx.Node, to: fx.Node) -> None:
    """Let a value of the chain, or an operand that is handed through, take the place of a node."""
    with node.graph.inserting_before(node):
        given = stopped_like(node, to)
    assert forward_past(node, given), (node, given)  # the chain has the types of the function's results
    node.graph.erase_node(node)
