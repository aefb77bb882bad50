"""An emitted program under the type checker of another project, `spmd_types`.

The checker types values by mesh axis: whole, a part of a sum, or cut along a dim. What an op makes of its operands it
knows from torch's own rules for DTensors, of which nothing is autopar's. This adapter runs the forward and the backward
of one rank under it, in a world where nobody answers, and calls the checker's collectives where the program calls
autopar's. It is told how parameters are stored, how inputs enter, and how gradients have to lie; nothing else of the
plan.

What cannot be said there is a value that nobody has typed, and so is what comes of it: uneven parts, blocks, two axes
on one dim, forms of autopar that go by their place, and ops without a rule. `Witnessed` counts them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from autopar.runtime import collectives
from autopar.testing import fake_world

aten = torch.ops.aten


class Refusal(Exception):
    """The checker does not take a program: the node, and what it says."""


@dataclass
class Witnessed:
    """How much of a program was typed."""

    values: int = 0
    typed: int = 0
    ends: int = 0  # outputs and gradients that have to lie in a certain way
    ends_typed: int = 0
    unsaid: Counter = field(default_factory=Counter)  # why a value has no type


@dataclass(frozen=True)
class Untyped:
    """A tensor of which the checker says nothing."""

    tensor: Any
    why: str


@dataclass(frozen=True)
class Repeated:
    """A whole value that is repeated along dims: along them any part is as good as the whole.

    The checker would take the size of a rank's part for that of the whole, so that it is given one row of each.
    """

    tensor: Any


class Unsaid(Exception):
    """Something that cannot be said to the checker."""


def witness(lowered) -> Witnessed:
    """Run a program under the checker; a refusal where it does not follow."""
    with fake_world(lowered.plan.mesh.size):
        mesh = lowered.plan.mesh.to_torch("cpu")
        with spmd.set_current_mesh(mesh):
            return _Run(lowered, mesh).both()


class _Run:
    def __init__(self, lowered, mesh) -> None:
        self.lowered, self.mesh, self.found = lowered, mesh, Witnessed()
        self.groups = {axis: mesh.get_group(axis) for axis in lowered.plan.mesh.axes}

    def both(self) -> Witnessed:
        """Forward and backward; of a program that runs in turns one turn, and between the two what runs once."""
        joint, program = self.lowered.joint, self.lowered.program
        stored = [self.lowered.plan.parameters[name] for name in program.parameters]
        inputs = len(self.lowered.graph.inputs)
        with torch.no_grad():
            primals = []
            first = joint.beginning or joint.forward
            for i, node in enumerate(n for n in first.nodes if n.op == "placeholder"):
                sharding = stored[i - inputs] if inputs <= i < inputs + len(stored) else None
                primals.append(self.value(node.meta["val"], sharding))
            begun = [] if joint.beginning is None else list(self.run(joint.beginning, primals))
            outputs = self.run(joint.forward, primals + begun)
            saved = list(outputs[joint.outputs :])
            for place, sharding in enumerate(program.outputs):
                self.ends(f"output {place}", outputs[place], sharding)
            if self.lowered.ending is None:
                tangents = self.tangents(joint, len(saved))
            else:
                tangents = self.ending(outputs[len(program.outputs) : joint.outputs])
            self.gradients(joint, saved + tangents, dict(enumerate(stored, inputs)))
        return self.found

    def gradients(self, joint, given, stored) -> None:
        """Backward, and the two parts that stand for it where gradients are added up before they are reduced."""

        def end(i: int, gradient) -> None:
            place = joint.gradients[i]
            self.ends(f"gradient of primal {place}", gradient, stored.get(place))

        for i, gradient in enumerate(self.run(joint.backward, given)):
            end(i, gradient)
        if not joint.waits:
            return
        held = self.run(joint.hold, given)
        for i in set(range(len(held))) - set(joint.waits):
            end(i, held[i])
        waited = {place: held[i] for i, place in zip(joint.waits, joint.settled_from, strict=True)}
        settled = self.run(joint.settle, [waited[place] for place in range(len(waited))])
        for i, gradient in zip(joint.waits, settled, strict=True):
            end(i, gradient)

    def ending(self, crossing) -> list[Any]:
        """What runs once, on what turns have added up: its gradients, by which a turn is multiplied, are whole."""
        joint, program = self.lowered.ending.joint, self.lowered.ending.program
        outputs = self.run(joint.forward, crossing)
        for place, sharding in enumerate(program.outputs):
            self.ends(f"output {place} of the ending", outputs[place], sharding)
        saved = list(outputs[joint.outputs :])
        scales = list(self.run(joint.backward, saved + self.tangents(joint, len(saved))))
        for place, scale in enumerate(scales):
            self.ends(f"scale {place}", scale, None)
        return scales

    def tangents(self, joint, saved: int) -> list[Any]:
        places = [n for n in joint.backward.nodes if n.op == "placeholder"][saved:]
        return [self.value(n.meta["val"], None) for n in places]

    # -- values

    def value(self, like, sharding):
        """A tensor of the shape of one rank's part, typed."""
        made = torch.zeros(like.shape, dtype=like.dtype)
        try:
            types = self.types(sharding)
        except Unsaid as e:
            return Untyped(made, str(e))
        with spmd.checker.typecheck(local=False):
            spmd.assert_type(made, types)
        return made

    def types(self, sharding) -> dict[Any, Any]:
        if sharding is None:
            return dict.fromkeys(self.groups.values(), spmd.R)
        if any(placement.is_shard and placement.blocks for placement in sharding.placements):
            raise Unsaid("blocks")
        if any(len(axes) > 1 for axes in sharding.cuts.values()):
            raise Unsaid("two axes on one dim")
        return {
            self.groups[axis]: spmd.S(p.dim) if p.is_shard else spmd.P if p.is_partial else spmd.R
            for axis, p in zip(self.lowered.plan.mesh.axes, sharding.placements, strict=True)
        }

    def ends(self, what: str, value, sharding) -> None:
        """Hold the type of what leaves against how it has to lie."""
        if not isinstance(value, (torch.Tensor, Untyped)):
            return
        self.found.ends += 1
        if isinstance(value, Untyped):
            return
        try:
            types = self.types(sharding)
        except Unsaid:
            return
        self.found.ends_typed += 1
        try:
            with spmd.checker.typecheck(local=False):
                spmd.assert_type(value, types)
        except spmd.SpmdTypeError as e:
            raise Refusal(f"{what}: {e}") from e

    # -- programs

    def run(self, graph: fx.Graph, given) -> tuple[Any, ...]:
        env, given = {}, iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            else:
                env[node] = self.op(node, env)
        raise AssertionError("a graph without an output")

    def op(self, node: fx.Node, env) -> Any:
        args, kwargs = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), env.__getitem__)
        if node.target in PASSING:
            return PASSING[node.target](*args)
        self.found.values += 1
        untyped = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Untyped)]
        name = getattr(node.target, "__name__", str(node.target))
        if untyped and node.target not in BUCKETS:
            return self.untyped(node, "what comes of a value without a type")
        try:
            with spmd.checker.typecheck(local=False):
                made = self.of_repeated(node, args, kwargs) or self.called(node, args, kwargs)
        except Unsaid as e:
            return self.untyped(node, str(e))
        except spmd.SpmdTypeError as e:
            raise Refusal(f"{node.name} = {name}: {e}") from e
        except (NotImplementedError, RuntimeError, ValueError, TypeError, AssertionError) as e:  # no rule: counted
            return self.untyped(node, f"{name}: {type(e).__name__}")
        self.found.typed += 1
        return made

    def untyped(self, node: fx.Node, why: str) -> Any:
        self.found.unsaid[why] += 1
        return pytree.tree_map_only(
            torch.Tensor, lambda t: Untyped(torch.zeros(t.shape, dtype=t.dtype), why), node.meta.get("val")
        )

    def called(self, node: fx.Node, args, kwargs) -> Any:
        if (step := STEPS.get(node.target)) is not None:
            is_of_time = len(args) > 1 and args[1] == collectives.TIME
            return self.of_time(args[0], node.meta["val"]) if is_of_time else step(self, *args)
        if node.target is collectives.part_start and args[1] == collectives.TIME:
            return self.value(node.meta["val"], None)  # every device is in the same turn
        if node.target is aten.cat.default:
            return _cat(*args)
        args, kwargs = _unwrapped((args, kwargs))
        if node.target in OPS:
            return OPS[node.target](*args, **kwargs)
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            raise Unsaid(f"a form of autopar: {getattr(node.target, '__name__', node.target)}")
        if node.target is aten._to_copy.default:
            return self.cast(args[0], node.meta["val"].dtype)
        if node.target in VIEWS:
            return self.view(args[0], node.meta["val"].shape)
        made = _as_users_write_it(node.target)(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):  # the same on all
            spmd.assert_type(made, dict.fromkeys(self.groups.values(), spmd.R))
        return made

    def of_repeated(self, node: fx.Node, args, kwargs) -> Repeated | None:
        """What is repeated, or comes of repeated values alone."""
        if node.target is aten.expand.default:
            return Repeated(_one_row(args[0], args[1]))
        if node.target in FILLED:
            sizes, value = FILLED[node.target](*args)
            made = torch.full([1] * len(sizes), value, dtype=node.meta["val"].dtype)
            spmd.assert_type(made, dict.fromkeys(self.groups.values(), spmd.R))
            return Repeated(made)
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, Repeated) for leaf in leaves):
            return None
        dim = {aten.index_select.default: 1, collectives.slice: 2}.get(node.target)
        if dim is not None and isinstance(args[0], Repeated) and args[0].tensor.shape[args[dim]] == 1:
            return args[0]  # some of the same rows
        is_looked_up = node.target is aten.embedding.default and isinstance(args[1], Repeated)
        if is_looked_up:
            return Repeated(self.called(node, *_unwrapped((args, kwargs))))
        if node.target is aten.cat.default:
            return None
        if not _is_pointwise(node.target):
            raise Unsaid(f"{node.target} of a value that is repeated")
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        return Repeated(self.called(node, *_unwrapped((args, kwargs))))

    def cast(self, x, dtype):
        """Another dtype. Told by the adapter where it is a wider one: each part of a sum keeps its value.

        To a narrower one the checker does not cast a part of a sum, which is rounded before it is added. Programs of
        mixed precision do so where an activation's gradient is summed over a tensor axis, as Megatron's do.
        """
        if torch.promote_types(x.dtype, dtype) != dtype:
            is_part = any(lies is spmd.P for lies in spmd.get_local_type(x).values())
            if is_part and self.lowered.plan.precision is not None:
                raise Unsaid("a part of a sum that is rounded")
            return x.to(dtype)
        with spmd.checker.no_typecheck():
            made = x.clone().to(dtype)
        spmd.assert_type(made, self.types_of(x))
        return made

    def of_time(self, x, like):
        """A turn's part, or what turns leave: of one rank, so that it lies as it did."""
        made = torch.zeros(like.shape, dtype=like.dtype)
        spmd.assert_type(made, self.types_of(x))
        return made

    def types_of(self, x) -> dict[Any, Any]:
        """How a value lies, dims included."""
        types, spec = spmd.get_local_type(x), spmd.get_partition_spec(x)
        if any(isinstance(cut, tuple) for cut in spec or ()):
            raise Unsaid("two axes on one dim")
        cuts = {cut: spmd.S(d) for d, cut in enumerate(spec or ()) if cut is not None}
        return {axis: cuts.get(axis, type_) for axis, type_ in types.items()}

    def view(self, x, shape):
        """Other dims over the same rows: a dim that is cut is the first of those that its rows become.

        Told by the adapter: torch's rule refuses to divide a dim that is cut.
        """
        told = {
            axis: spmd.S(_first_of(x.shape, shape, lies.dim)) if isinstance(lies, spmd.Shard) else lies
            for axis, lies in self.types_of(x).items()
        }
        with spmd.checker.no_typecheck():
            made = x.reshape(shape).clone()
        spmd.assert_type(made, told)
        return made

    def group(self, axis: str):
        return self.groups[axis]


def _unwrapped(tree):
    return pytree.tree_map_only(Repeated, lambda r: r.tensor, tree)


def _one_row(x, sizes):
    """As many dims as sizes, those that are repeated of one row."""
    tensor = x.tensor if isinstance(x, Repeated) else x
    lead = [1] * (len(sizes) - tensor.dim())
    if any(n not in (-1, here) and here != 1 for n, here in zip(sizes[len(lead) :], tensor.shape, strict=True)):
        raise Unsaid("expand of more than one row")
    for _ in lead:
        tensor = tensor.unsqueeze(0)
    return tensor


def _first_of(before, after, dim: int) -> int:
    """The dim of a view that begins where a dim of the viewed begins."""
    rows = math.prod(before[:dim])
    found = [d for d in range(len(after)) if math.prod(after[:d]) == rows]
    if before[dim] > 1 and len(found) > 1 and len(after) <= len(before):  # dims of one row before it are as they were
        found = [d for d in found if after[d] > 1][:1]
    if len(found) != 1:
        raise Unsaid("a view in which a dim that is cut may begin at several, or at none")
    return found[0]


def _as_users_write_it(op):
    """The function of torch of that name, by which the checker knows what is linear; else the op itself."""
    name = op._overloadpacket.__name__
    return getattr(torch, name, None) or getattr(torch.Tensor, name, None) or op


def _is_pointwise(op) -> bool:
    return op in OPS_POINTWISE or (isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags)


# -- collectives: what the program calls, as the checker calls it


@dataclass(frozen=True)
class Message:
    """Tensors on their way: what is done to each, once the program waits for them."""

    step: Any
    each: tuple[tuple[Any, ...], ...]  # arguments of the step, tensor by tensor


def _even(run, axis: str, sizes, blocks) -> None:
    n = run.lowered.plan.mesh.shape[run.lowered.plan.mesh.axis(axis)]
    if any(size % n for size in sizes):
        raise Unsaid("uneven parts")
    if any(blocks):
        raise Unsaid("blocks")


def _needs(run, x, axis: str, expected) -> Any:
    """The group of an axis, if a value lies along it as a collective wants it."""
    group = run.group(axis)
    found = spmd.get_axis_local_type(x, group)
    if found is not expected:
        raise spmd.SpmdTypeError(f"a collective over {axis} wants {expected}, and is given {found}")
    return group


def _all_reduce(run, x, axis):
    return spmd.all_reduce(x, _needs(run, x, axis, spmd.P), src=spmd.P, dst=spmd.R)


def _all_gather(run, x, axis, dim, size, blocks=()):
    _even(run, axis, [size], [blocks])
    return spmd.all_gather(x, _needs(run, x, axis, spmd.V), src=spmd.S(dim), dst=spmd.R)


def _reduce_scatter(run, x, axis, dim, size, blocks=()):
    _even(run, axis, [size], [blocks])
    return spmd.reduce_scatter(x, _needs(run, x, axis, spmd.P), src=spmd.P, dst=spmd.S(dim))


def _all_to_all(run, x, axis, dim, size, blocks, to_dim, to_size, to_blocks):
    _even(run, axis, [size, to_size], [blocks, to_blocks])
    return spmd.all_to_all(x, _needs(run, x, axis, spmd.V), src=spmd.S(dim), dst=spmd.S(to_dim))


def _slice(run, x, axis, dim, size, blocks=()):
    _even(run, axis, [size], [blocks])
    return spmd.convert(x, _needs(run, x, axis, spmd.R), src=spmd.R, dst=spmd.S(dim))


def _lodge(run, x, axis):
    return spmd.convert(x, _needs(run, x, axis, spmd.R), src=spmd.R, dst=spmd.P)


def _each(run, step, each) -> list[Any]:
    found = []
    for x, *rest in each:
        if isinstance(x, Untyped):
            found.append(x)
            continue
        try:
            found.append(step(run, x, *rest))
        except Unsaid as e:
            found.append(Untyped(x, str(e)))
    return found


def _finish(run, message):
    if not isinstance(message, Message):
        raise Unsaid("a message of values that are none")
    return _each(run, message.step, message.each)


def _pack(step):
    def pack(xs, axis, *lists):
        return Message(step, tuple(zip(xs, [axis] * len(xs), *lists, strict=True)))

    return pack


def _bucket(step):
    return lambda run, *args: _each(run, step, _pack(step)(*args).each)


STEPS = {
    collectives.all_reduce: _all_reduce,
    collectives.all_gather: _all_gather,
    collectives.reduce_scatter: _reduce_scatter,
    collectives.all_to_all: _all_to_all,
    collectives.slice: _slice,
    collectives.lodge: _lodge,
    collectives.all_reduce_bucket: _bucket(_all_reduce),
    collectives.all_gather_bucket: _bucket(_all_gather),
    collectives.reduce_scatter_bucket: _bucket(_reduce_scatter),
    collectives.finish: _finish,
}
BUCKETS = (
    collectives.finish,
    collectives.all_reduce_bucket,
    collectives.all_gather_bucket,
    collectives.reduce_scatter_bucket,
)
PASSING = {
    operator.getitem: operator.getitem,
    collectives.pack_all_reduce: _pack(_all_reduce),
    collectives.pack_all_gather: _pack(_all_gather),
    collectives.pack_reduce_scatter: _pack(_reduce_scatter),
    **dict.fromkeys(
        (collectives.begin_all_reduce, collectives.begin_all_gather, collectives.begin_reduce_scatter),
        lambda message, axis: message,
    ),
}


# -- ops that are told in other ops, because torch has no rule for DTensors, or one that asks for more than it needs


def _addmm(bias, one, other, beta=1, alpha=1):
    """A bias that is a part of a sum goes to a product that is one."""
    return torch.mm(one, other) + bias


def _mse_loss_backward(gradient, x, y, reduction):
    return (x - y) * gradient * 2


VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def _attention(query, key, value, *args, **kwargs):
    """The output and the log-sum-exps of rows, of kinds of attention for which torch has no rule."""
    scores = torch.einsum("bhtd,bhsd->bhts", query, _heads_of(query, key))
    output = torch.einsum("bhts,bhsd->bhtd", torch.softmax(scores, -1), _heads_of(query, value))
    return output, torch.logsumexp(scores, -1)


def _attention_backward(gradient, query, key, value, output, sums, *args, **kwargs):
    weights = torch.softmax(torch.einsum("bhtd,bhsd->bhts", query, _heads_of(query, key)), -1)
    of_weights = torch.einsum("bhtd,bhsd->bhts", gradient, _heads_of(query, value))
    of_scores = weights * of_weights * (output * gradient).sum(-1, keepdim=True) * sums.unsqueeze(-1)
    of_query = torch.einsum("bhts,bhsd->bhtd", of_scores, _heads_of(query, key))
    of_key = torch.einsum("bhts,bhtd->bhsd", of_scores, query)
    of_value = torch.einsum("bhts,bhtd->bhsd", weights, gradient)
    return of_query, of_key, of_value


def _nll_loss_backward(gradient, x, target, weight, reduction, ignore_index, total):
    """Of a sum: the total, by which a mean is divided, is not read."""
    if reduction != 2 or weight is not None:
        raise Unsaid("a loss that is a mean, or has weights")
    return x * gradient * target.unsqueeze(-1)


def _embedding_dense_backward(gradient, index, words, padding, by_frequency):
    """A product with the rows that were looked up, each marked by a one: linear in the gradient."""
    if by_frequency:
        raise Unsaid("gradients by frequency")
    places = torch.arange(words)
    spmd.assert_type(places, dict.fromkeys(spmd.get_local_type(index), spmd.R))
    ones = (index.unsqueeze(-1) == places).to(gradient.dtype)
    dims = "abc"[: index.dim()]
    return torch.einsum(f"{dims}v,{dims}w->vw", ones, gradient)


def _select_backward(gradient, sizes, dim, index):
    """A product with a one at the place that was selected: linear in the gradient."""
    places = torch.arange(sizes[dim])
    spmd.assert_type(places, dict.fromkeys(spmd.get_local_type(gradient), spmd.R))
    at_place = (places == index % sizes[dim]).to(gradient.dtype)
    at_place = at_place.view([-1 if d == dim % len(sizes) else 1 for d in range(len(sizes))])
    return gradient.unsqueeze(dim) * at_place


def _slice(x, dim=0, start=0, end=None, step=1):
    """A run of places, as torch's narrow takes it: linear."""
    if step != 1:
        raise Unsaid("a slice with steps")
    length = x.shape[dim]
    first, last = (
        min(max(p + length if p < 0 else p, 0), length) for p in (start or 0, length if end is None else end)
    )
    return torch.narrow(x, dim, first, max(0, last - first))


def _convolution_backward(gradient, x, weight, bias, stride, padding, dilation, turned, output_padding, groups, mask):
    """Of windows that lie apart and an input without a gradient: a product with the windows, linear in the gradient."""
    is_apart = list(stride) == list(weight.shape[2:]) and not any(padding) and groups == 1 and not turned
    if mask[0] or not is_apart or weight.dim() != 4:
        rest = (stride, padding, dilation, turned, output_padding, groups, mask)
        return aten.convolution_backward.default(gradient, x, weight, bias, *rest)
    (high, wide), (n, c, *_), (h, w) = weight.shape[2:], x.shape, gradient.shape[2:]
    windows = x.view(n, c, h, high, w, wide)
    of_weight = torch.einsum("nohw,nchiwj->ocij", gradient, windows) if mask[1] else None
    return None, of_weight, torch.sum(gradient, [0, 2, 3]) if mask[2] else None


def _layer_norm_backward(gradient, x, shape, mean, scale, weight, bias, mask):
    dims, outer = list(range(x.dim() - len(shape), x.dim())), list(range(x.dim() - len(shape)))
    normed = (x - mean) * scale
    inner = gradient if weight is None else gradient * weight
    of_x = (inner - inner.mean(dims, True) - normed * (inner * normed).mean(dims, True)) * scale
    of_weight = torch.sum(gradient * normed, outer) if mask[1] else None
    return of_x if mask[0] else None, of_weight, torch.sum(gradient, outer) if mask[2] else None


def _cat(tensors, dim=0):
    """What is repeated joins others as one that lies as they do."""
    like = next((t for t in tensors if isinstance(t, torch.Tensor)), None)
    if like is None:
        raise Unsaid("a cat of repeated values alone")
    return torch.cat([_as_long_as(t, like, dim) if isinstance(t, Repeated) else t for t in tensors], dim)


def _as_long_as(repeated, like, dim):
    rows = repeated.tensor.shape[dim]
    return torch.narrow(like, dim, 0, rows) * 0 + repeated.tensor


def _heads_of(query, key):
    """Keys or values, if each head of queries has its own."""
    if query.shape[1] != key.shape[1]:
        raise Unsaid("heads of keys that several of queries share")
    return key


# of ops that fill a tensor with one value: its sizes, and the value
FILLED = {
    aten.full.default: lambda sizes, value: (sizes, value),
    aten.zeros.default: lambda sizes: (sizes, 0),
    aten.ones.default: lambda sizes: (sizes, 1),
    aten.new_zeros.default: lambda x, sizes: (sizes, 0),
    aten.new_ones.default: lambda x, sizes: (sizes, 1),
    aten.new_full.default: lambda x, sizes, value: (sizes, value),
}
OPS_POINTWISE = (aten.mse_loss_backward.default,)
OPS = {
    aten.addmm.default: _addmm,
    aten.mse_loss_backward.default: _mse_loss_backward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.embedding_dense_backward.default: _embedding_dense_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.select_backward.default: _select_backward,
    aten.slice.Tensor: _slice,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
