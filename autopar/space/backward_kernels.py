"""`Backward`: what the backward of an op reads, makes and holds, kernel by kernel, as autograd runs it.

Each kind of call runs once on meta tensors, of the strides that reach it: the emitted program traces the same kernels.
A tensor ends behind the last kernel that reads it, as in the emitted program, and a kernel that writes to memory makes
a new tensor, since emitted code is functional. An op's entry has the last word where kernels differ by device.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.graph import walks
from autopar.graph.blocks import calls
from autopar.graph.graph import Graph, info, op_name, run, type_of
from autopar.graph.nodes import tensor_operands
from autopar.ops.entry import facts_of
from autopar.runtime.private import OpOverload, TorchDispatchMode

log = logging.getLogger("autopar")


class End(NamedTuple):
    """A tensor of a call: an operand or an output, by its place, or that one's gradient."""

    is_operand: bool
    place: int
    is_gradient: bool = True


class Held(NamedTuple):
    """Bytes in memory that are as large a part on a device as another tensor of the call."""

    nbytes: int
    like: End


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a call on tensors of whole sizes."""

    reads: frozenset[int]  # places of operands
    reads_out: frozenset[int]  # places of outputs
    besides: tuple[Held, ...]  # other tensors made in forward that the backward reads
    made: tuple[tuple[Held, ...], ...]  # memory in use while each forward kernel runs, without the operands
    held: tuple[tuple[Held, ...], ...]  # memory in use while each backward kernel runs
    gradients: tuple[int, ...]  # places of operands that get one
    shows: Mapping[int, int]  # operand -> the output whose gradient shares its memory with the operand's
    # whether it takes a run on a device's parts: it makes a tensor that is like none of the call, or backward reads a
    # copy of an operand, which on parts may be a view
    is_apart: bool
    relief: float  # how much less it holds where the gradient that comes is counted elsewhere: a share of that

    def freed(self, able: Collection[int]) -> frozenset[int]:
        """Places of the operands, of those able to, that are best counted as freed before the fullest kernel.

        They are those that a kernel does not find in memory, for the kernel where that leaves the least to count.
        """
        steps = [_Step.of(step) for step in self.held]
        sizes = {place: n for step in steps for place, n in step.reads.items()}
        able = self.reads.intersection(able, sizes)
        most = {frozenset[int](): self.most(())}
        best, found = most[frozenset()], frozenset[int]()
        for step in steps:
            freed = able.difference(step.reads)
            if freed not in most:
                most[freed] = max(other.bytes_without(freed) for other in steps)
            size = sum(sizes[k] for k in freed)
            # a part of them may stay for others: then what is won by the order of kernels is lost
            if most[freed] - size < best - size / 2 and most[freed] - size < best:
                best, found = most[freed] - size, freed
        return found

    def most(self, freed: Collection[int]) -> int:
        """Bytes while the fullest kernel runs, beside operands that are not freed."""
        return max(_Step.of(step).bytes_without(freed) for step in self.held)


class _Step(NamedTuple):
    """What is in memory while a kernel runs: operands by place, and the bytes of everything else."""

    reads: Mapping[int, int]
    others: int

    @staticmethod
    def of(held: Sequence[Held]) -> _Step:
        reads = {like.place: n for n, like in held if is_read(like)}
        return _Step(reads, sum(n for n, like in held if not is_read(like)))

    def bytes_without(self, freed: Collection[int]) -> int:
        """Bytes beside operands that are not freed."""
        return self.others + sum(self.reads[k] for k in freed if k in self.reads)


def is_read(end: End) -> bool:
    """Whether a tensor is an operand of the call."""
    return end.is_operand and not end.is_gradient


class _Kernels(TorchDispatchMode):
    """Records the kernels that run: the memory that each reads, and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self.bytes: dict[Any, int] = {}
        self.version: dict[int, int] = {}
        self.copies: set[Any] = set()  # memories that are copies
        self.alive: list[torch.Tensor] = []  # an address is not used twice

    def memory(self, tensor: torch.Tensor) -> Any:
        """The memory of a tensor as it is now, since it was last written."""
        storage = tensor.untyped_storage()
        self.alive.append(tensor)
        key = storage._cdata, self.version.get(storage._cdata, 0)
        self.bytes[key] = storage.nbytes()
        return key

    def total(self, memories: Iterable[Any]) -> int:
        """Bytes of several memories."""
        return sum(self.bytes[memory] for memory in memories)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        reads = tuple(map(self.memory, given))
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            written = zip(func._schema.arguments, args, strict=False)
            for tensor in [a for about, a in written if about.alias_info and isinstance(a, torch.Tensor)]:
                at = tensor.untyped_storage()._cdata
                self.version[at] = self.version.get(at, 0) + 1
        made = [self.memory(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if func is torch.ops.aten.clone.default:
            self.copies.update(made)
        self.ran.append((reads, tuple(m for m in dict.fromkeys(made) if m not in reads)))
        return result


def backwards(graph: Graph, lies: Mapping[fx.Node, torch.Tensor], kind: str) -> dict[fx.Node, Backward]:
    """The backward of each op that has one and whose kernels do not depend on the device.

    The tensors in `lies` have the strides of the values. A CPU has fused attention for some layouts only; for others
    torch runs it opened, as kernels of its own.
    """
    kinds, known = calls(graph), dict[Any, tuple[Backward, tuple[Any, ...]] | None]()
    arriving: dict[fx.Node, tuple[int, ...]] = {}  # strides of gradients, where they are known
    found: dict[fx.Node, Backward] = {}
    for node in reversed(list(graph.nodes)):
        if info(node).kind != "op" or not any(t.requires_grad for t in info(node).outputs):
            continue
        if not _is_plain(node) and not (kind == "cpu" and is_opened(node, lies)):
            continue
        operands, outputs = list(dict.fromkeys(tensor_operands(node))), walks.results(node)
        strides = tuple(arriving.get(v) for v in outputs)
        key = kinds[node], tuple(lies[n].stride() for n in operands), strides
        if key not in known:
            known[key] = _recorded(node, operands, lies, strides)
        if (made := known[key]) is not None:
            found[node] = made[0]
            for operand, gradient in zip(operands, made[1], strict=True):
                arriving.setdefault(operand, gradient)
    return found


def port_of(value: fx.Node) -> int:
    """The place of a value among the outputs of its op."""
    return value.args[1] if info(value).kind == "part" else 0


def _is_plain(node: fx.Node) -> bool:
    """Whether the same kernels run an op on every device."""
    facts = facts_of(op_name(node))
    return not facts.draws and facts.scores is None and info(node).random < 0 and op_name(node) != "identity"


def is_opened(node: fx.Node, lies: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether torch runs an attention without dropout unfused on a CPU, for its layouts or its mask."""
    if facts_of(op_name(node)).scores is None or info(node).random >= 0:
        return False
    given, mask = [lies[node.kwargs[name]] for name in ("query", "key", "value")], node.kwargs.get("attn_mask")
    is_plain = all(t.dim() == 4 and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in given)
    fits = len({t.shape[-1] for t in given}) == 1 and not any(0 in t.shape for t in given)
    mask_fits = mask is None or (lies[mask].dim() in (2, 4) and not type_of(mask).requires_grad)
    return not (is_plain and fits and mask_fits)


def _recorded(
    node: fx.Node, operands: Sequence[fx.Node], lies: Mapping[fx.Node, torch.Tensor], strides: Sequence[Any]
) -> tuple[Backward, tuple[Any, ...]] | None:
    """The backward of a call and the strides of its operands' gradients; None if meta tensors fail."""
    kernels = _Kernels()
    try:
        with torch.enable_grad(), torch.device("meta"):
            given = {n: _like(lies[n]).requires_grad_(type_of(n).requires_grad) for n in operands}
            forward = _Kernels()
            with forward:
                result = run(node, given)
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            ports = [port_of(v) for v in walks.results(node)]
            ends = [(k, s) for k, s in zip(ports, strides, strict=True) if outputs[k].requires_grad]
            wanted = [n for n in operands if type_of(n).requires_grad]
            comes = [_gradient(outputs[k], stride) for k, stride in ends]
            if not ends or not wanted:
                return None
            with kernels:
                gradients = torch.autograd.grad(
                    [outputs[k] for k, _ in ends], [given[n] for n in wanted], comes, allow_unused=True
                )
    except (RuntimeError, ValueError):  # no kernel for meta tensors, a result that depends on data, or too small a part
        return None
    except Exception as e:  # the backward of a user's op may raise anything
        log.warning("the backward of %s fails on meta tensors: what it keeps is a guess (%r)", op_name(node), e)
        return None
    by_operand = dict(zip(wanted, gradients, strict=True))
    places = {n: k for k, n in reversed(list(enumerate(tensor_operands(node))))}
    made = _read_off(
        (forward, kernels),
        {places[n]: t for n, t in given.items()},
        dict(enumerate(outputs)),
        {k: t for (k, _), t in zip(ends, comes, strict=True)},
        {places[n]: g for n, g in by_operand.items() if g is not None},
    )
    return made, tuple(None if (g := by_operand.get(n)) is None else g.stride() for n in operands)


def backward_on(
    node: fx.Node, lies: Mapping[fx.Node, torch.Tensor], shapes: Sequence[Sequence[int]]
) -> Backward | None:
    """The backward of a call on parts of its operands, of these shapes; None where it cannot run on them."""
    operands = tensor_operands(node)
    parts = {}
    for value, shape in zip(operands, shapes, strict=True):
        order = sorted(range(len(shape)), key=lambda d: -lies[value].stride()[d])
        parts[value] = torch.empty_permuted(tuple(shape), order, dtype=lies[value].dtype, device="meta")
    made = _recorded(node, list(dict.fromkeys(operands)), parts, [None] * len(walks.results(node)))
    return None if made is None else made[0]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _gradient(output: torch.Tensor, stride: Any) -> torch.Tensor:
    plain = torch.empty_like(output.detach())
    return plain if stride is None else torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device="meta")


def _read_off(
    both: tuple[_Kernels, _Kernels],
    operands: Mapping[int, torch.Tensor],
    outputs: Mapping[int, torch.Tensor],
    comes: Mapping[int, torch.Tensor],
    gradients: Mapping[int, torch.Tensor],
) -> Backward:
    """The tensors that recorded kernels of a call read, and the memory that they held."""
    forward_kernels, kernels = both
    ends: dict[Any, End] = {}
    for is_operand, is_gradient, tensors in (
        (False, True, comes),
        (True, True, gradients),
        (True, False, operands),
        (False, False, outputs),
    ):
        for place, tensor in tensors.items():
            ends.setdefault(kernels.memory(tensor), End(is_operand, place, is_gradient))
    leaves = {kernels.memory(g) for g in gradients.values()}
    ran = _needed(kernels.ran, leaves)
    made = {m for _, makes in ran for m in makes}
    last = {m: i for i, (reads, _) in enumerate(ran) for m in reads} | dict.fromkeys(leaves, len(ran))
    first = {m: i for i, (_, makes) in enumerate(ran) for m in makes}
    by_end = {**{End(False, k): t for k, t in comes.items()}, **{End(True, k): t for k, t in gradients.items()}}
    sizes = {t.numel() * t.itemsize for t in by_end.values()}

    def held(memory: Any) -> Held:
        nbytes = kernels.bytes[memory]
        alike = [end for end, t in by_end.items() if t.numel() * t.itemsize == nbytes]
        return Held(nbytes, ends.get(memory) or next(iter(alike), End(False, next(iter(comes)))))

    read = dict.fromkeys(m for reads, _ in ran for m in reads)
    forward = [m for m in read if m not in made]
    kept = {ends[m].place: m for m in forward if m in ends and is_read(ends[m])}
    kept_out = {ends[m].place for m in forward if m in ends and ends[m] == End(False, ends[m].place, False)}
    besides = [m for m in forward if m not in ends]
    coming = {kernels.memory(t): t.numel() * t.itemsize for t in comes.values()}
    kernels.bytes |= coming  # a gradient that shows a part of a larger memory counts as that part
    steps: list[set[Any]] = []
    for i in range(max(1, len(ran))):
        stays = {m for m in (*coming, *kept.values(), *besides, *made) if first.get(m, -1) <= i <= last.get(m, -1)}
        steps.append(stays | {m for m, at in first.items() if at == i})
    leaving = {kernels.memory(t) for t in outputs.values()}.union(besides)
    forward_steps = _alive(forward_kernels.ran, leaving, {kernels.memory(t) for t in operands.values()})
    kernels.bytes |= {m: n for m, n in forward_kernels.bytes.items() if m not in kernels.bytes}
    most = [kernels.total(step.difference(kept.values())) for step in steps]
    left = [n - sum(coming.get(m, 0) for m in step) for n, step in zip(most, steps, strict=True)]
    shows = {k: ends[m].place for k, g in gradients.items() if (m := kernels.memory(g)) in coming}
    return Backward(
        frozenset(kept),
        frozenset(kept_out),
        tuple(map(held, besides)),
        tuple(tuple(map(held, step)) for step in forward_steps),
        tuple(tuple(map(held, step)) for step in steps),
        tuple(gradients),
        shows,
        any(kernels.bytes[m] not in sizes for m in {*besides, *made}.union(*forward_steps))
        or not forward_kernels.copies.isdisjoint(besides),
        (max(most) - max(left)) / max(1, sum(coming.values())),
    )


def _alive(ran: Sequence[tuple[Any, Any]], leaving: set[Any], given: set[Any]) -> list[set[Any]]:
    """The memory that kernels have made, as it is in use while each of them runs."""
    ran = _needed(ran, leaving)
    last = {m: i for i, (reads, _) in enumerate(ran) for m in reads} | dict.fromkeys(leaving, len(ran))
    first = {m: i for i, (_, makes) in enumerate(ran) for m in makes if m not in given}

    def during(i: int) -> set[Any]:
        return {m for m, at in first.items() if at <= i <= max(at, last.get(m, -1))}

    return list(map(during, range(len(ran))))


def _needed(ran: Sequence[tuple[Any, Any]], leaves: set[Any]) -> list[tuple[Any, Any]]:
    """The kernels that make these memories, in order; views are not kernels."""
    needed, found = set(leaves), []
    for reads, makes in reversed(ran):
        if not needed.isdisjoint(makes):
            needed.update(reads)
            found.append((reads, makes))
    return found[::-1]
