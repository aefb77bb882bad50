"""How the errors of the gauntlet are planted: each changes one thing of a sound compiler, through a patch.

Most of them fit into a conversion (`on_conversion`): its text names the steps of a value, and those of its gradient.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from autopar.codegen import accumulated, halves, joint, joint_passes, local, messages, schedule
from autopar.codegen.joint_graph import RECOMPUTED
from autopar.graph import graph, walks
from autopar.graph.graph import info, op_name
from autopar.graph.held import write_buffers
from autopar.module import checkpoint, init, runner, storage, turn_runner, waiting
from autopar.module.runner import Primals
from autopar.module.storage import Storage
from autopar.ops.entry import FACTS
from autopar.runtime import collectives, forms, patches
from autopar.runtime.collectives import Axis, Packed, Pending
from autopar.sharding import strategies
from autopar.sharding.convert import LocalStep
from autopar.sharding.notation import parse
from autopar.sharding.placement import Flow, R
from tests.gauntlet import suites

Patch = Any  # pytest's MonkeyPatch
Plant = Callable[[Patch], None]
_converted = local.Localiser._converted

# -- conversions: the steps of a value, and those of its gradient


def on_conversion(change: Callable[[str, str, list[str], list[str]], tuple[list[str], list[str]]]) -> Plant:
    """Change conversions once each: what it says of source, target, steps, steps of the gradient."""

    def plant(patch: Patch) -> None:
        def converted(self, source, target, operand, module):
            node = _converted(self, source, target, operand, module)
            if node.target is collectives.convert and not node.meta.get("changed"):
                node.meta["changed"] = True
                origin = walks.origin(source, lambda n: op_name(n) == "identity") if _is_op(source) else source
                x, forward, backward, *rest = node.args
                texts = change(info(origin).key, target, _steps(forward), _steps(backward))
                node.args = (x, *("; ".join(text) for text in texts), *rest)
            return node

        patch.setattr(local.Localiser, "_converted", converted)

    return plant


def _is_op(node) -> bool:
    return info(node).kind == "op"


def _steps(text: str) -> list[str]:
    return text.split("; ") if text else []


def _is_sum(step: str, axis: str = "") -> bool:
    return step.startswith(("all_reduce@", "reduce_scatter(")) and step.endswith(axis)


def _unsummed(steps: list[str], axis: str = "") -> list[str]:
    """The steps without their sums: what a device would have had of the sum, it takes of its own part."""
    return [
        step.replace("reduce_scatter", "slice") if _is_sum(step, axis) else step
        for step in steps
        if not (step.startswith("all_reduce@") and step.endswith(axis))
    ]


def _twice(steps: list[str]) -> list[str]:
    return [again for step in steps for again in ([step, step] if step.startswith("all_reduce@") else [step])]


def gradient_not_summed(source: str, target: str = "*", axis: str = "") -> Plant:
    """The gradient of what matches is not summed."""

    def change(key, to, forward, backward):
        hit = fnmatch.fnmatch(key, source) and fnmatch.fnmatch(to, target)
        return forward, _unsummed(backward, axis) if hit else backward

    return on_conversion(change)


def gradient_summed_twice(source: str) -> Plant:
    """The gradient of what matches is summed a second time."""
    return on_conversion(lambda key, to, f, b: (f, _twice(b) if fnmatch.fnmatch(key, source) else b))


def gradient_taken_as_it_is(source: str) -> Plant:
    """The gradient of what matches passes as though nothing were to be done with it."""
    return on_conversion(lambda key, to, f, b: (f, [] if fnmatch.fnmatch(key, source) else b))


def value_not_summed(source: str, target: str = "*") -> Plant:
    """The value that matches is not summed."""

    def change(key, to, forward, backward):
        hit = fnmatch.fnmatch(key, source) and fnmatch.fnmatch(to, target)
        return _unsummed(forward) if hit else forward, backward

    return on_conversion(change)


def _no_round_trip(steps: list[str]) -> list[str]:
    for step in steps:
        back = step.replace("reduce_scatter", "all_gather")
        if back != step and back in steps:
            return [other for other in steps if other not in (step, back)]
    return steps


round_trip_is_nothing = on_conversion(lambda key, to, f, b: (_no_round_trip(f), _no_round_trip(b)))


# -- collectives


def _as_step(patch: Patch, kind: str, function: Callable) -> None:
    patch.setitem(joint_passes.STEPS, kind, function)


def _as_pack(patch: Patch, kind: str, function: Callable[..., Packed]) -> None:
    patch.setattr(collectives, f"pack_{kind}", function)
    patch.setitem(collectives.PACK, kind, function)


def sums_are_means(patch: Patch) -> None:
    """A sum is divided by the number of devices."""
    begin = collectives.begin_all_reduce

    def mean(message: Packed, axis: Axis) -> Pending:
        message.flat /= axis.size if message.flat.is_floating_point() else 1
        return begin(message, axis)

    patch.setattr(collectives, "begin_all_reduce", mean)
    patch.setitem(collectives.BEGIN, "all_reduce", mean)


def exchange_divides(patch: Patch) -> None:
    """Gradients that go back through an exchange of heads are divided by the devices."""
    step = collectives.all_to_all

    def divided(x, axis, dim, size, blocks, to_dim, *rest):
        y = step(x, axis, dim, size, blocks, to_dim, *rest)
        return y / axis.size if dim < to_dim else y

    _as_step(patch, "all_to_all", divided)


def strided_are_copied(patch: Patch) -> None:
    """What is not contiguous is summed in a copy, and returned as it was."""
    reduce = collectives.all_reduce

    def unsummed(x, axis):
        y = reduce(x, axis)
        return y if x.is_contiguous() else x.clone()

    _as_step(patch, "all_reduce", unsummed)


def sums_in_place(patch: Patch) -> None:
    """A sum is taken in the memory of its operand, which others still read."""
    pack = collectives.pack_all_reduce

    def packed(xs, axis):
        message = pack(xs, axis)
        if len(xs) == 1 and xs[0].is_contiguous():
            message.flat = xs[0].view(-1)
        return message

    _as_pack(patch, "all_reduce", packed)


def one_buffer_for_all(patch: Patch) -> None:
    """Messages are packed into one piece of memory, also while results of the last lie there."""
    pack, memory = collectives.pack_all_reduce, {}

    def packed(xs, axis):
        message = pack(xs, axis)
        key = (message.flat.dtype, dist.get_rank())
        held = memory.get(key)
        if held is None or held.numel() < message.flat.numel():
            held = memory[key] = message.flat.new_empty(max(4096, message.flat.numel()))
        message.flat = held[: message.flat.numel()].copy_(message.flat)
        return message

    _as_pack(patch, "all_reduce", packed)


def gathers_are_remembered(patch: Patch) -> None:
    """What was sent of a parameter in the first step is sent in the second."""
    pack, known = collectives.pack_all_gather, {}

    def packed(xs, axis, *how):
        message = pack(xs, axis, *how)
        key = (dist.get_rank(), axis.name, tuple(x.data_ptr() for x in xs))  # a step moves parameters where they lie
        message.flat = known.setdefault(key, message.flat.clone()).clone()
        return message

    _as_pack(patch, "all_gather", packed)


def groups_are_swapped(patch: Patch) -> None:
    """Each axis has the processes of the other."""
    bind = runner.bind_axes

    def bound(mesh):
        axes = bind(mesh)
        a, b = axes["dp"], axes["tp"]
        return {"dp": replace(a, group=b.group), "tp": replace(b, group=a.group)}

    patch.setattr(runner, "bind_axes", bound)


def nobody_waits(patch: Patch) -> None:
    """Results are read without waiting for their collective."""

    def finish(pending: Pending):
        return pending.unpack(pending.arrives)

    patch.setattr(messages, "finish", finish)
    patch.setattr(collectives, "finish", finish)


def every_other_is_waited_for(patch: Patch) -> None:
    """Of two collectives one is waited for."""
    finish, count = collectives.finish, [0]

    def finished(pending: Pending):
        count[0] += 1
        return finish(pending) if count[0] % 2 else pending.unpack(pending.arrives)

    patch.setattr(messages, "finish", finished)
    patch.setattr(collectives, "finish", finished)


def starts_round_down(patch: Patch) -> None:
    """An uneven part is said to begin where an even one would."""

    def part_start(like, axis, size, on_host=False):
        start = size // axis.size * axis.index
        return start if on_host else torch.full((), start, dtype=torch.int64, device=like.device)

    for module in (collectives, joint_passes, halves):
        patch.setattr(module, "part_start", part_start)


def padding_is_counted(patch: Patch) -> None:
    """What fills up the last part of a gather stays, and the end of the value is lost."""
    step = collectives.all_gather_bucket

    def gathered(xs, axis, dims, sizes, blocks):
        found = step(xs, axis, dims, sizes, blocks)
        uneven = [size % axis.size for size in sizes]
        return [y.roll(1, dim) if odd else y for y, dim, odd in zip(found, dims, uneven, strict=True)]

    _as_step(patch, "all_gather_bucket", gathered)
    _as_step(
        patch,
        "all_gather",
        lambda x, axis, dim, size, blocks=(): gathered([x], axis, [dim], [size], [blocks])[0],
    )


def bucket_over_the_other_axis(patch: Patch) -> None:
    """A bucket is reduced over the other axis."""
    together = joint_passes._travel_together

    def other(graph, ways, last):
        before = set(graph.nodes)
        end = together(graph, ways, last)
        for node in graph.nodes:
            if node not in before and node.target is collectives.STEPS["all_reduce_bucket"]:
                node.args = (node.args[0], {"dp": "tp", "tp": "dp"}[node.args[1]], *node.args[2:])
        return end

    patch.setattr(joint_passes, "_travel_together", other)


def cast_after_the_sum(patch: Patch) -> None:
    """A gradient is summed in the dtype in which it was computed, and then widened."""

    def written(graph, node):
        value, steps, _, _, *dtypes = node.args
        shape = node.meta["val"]
        for step in LocalStep.parse_all(steps):
            numbers = [number for dim in step.dims for number in dim]
            value = graph.call_function(joint_passes.STEPS[step.kind], (value, step.axis, *numbers))
            value.meta["val"] = shape
        if dtypes and dtypes[0]:
            value = joint_passes._cast(graph, value, getattr(torch, dtypes[0]))
        if value is node.args[0]:
            value = joint_passes._in_memory_order(graph, value, node)
        value.meta["val"] = shape
        return value

    patch.setattr(joint_passes, "_written_out", written)


# -- rules and strategies


def rule(op: str, line: str, linear: str = "") -> Plant:
    """Another rule for an op."""
    return lambda patch: patch.setattr(FACTS[op], "rule", parse(line, linear))


def rule_changed(op: str, change: Callable) -> Plant:
    """Another rule for each call of an op, of the one that it has."""

    def plant(patch: Patch) -> None:
        old = FACTS[op].rule
        patch.setattr(FACTS[op], "rule", lambda call: change(old(call) if callable(old) else old))

    return plant


def passes_sums(op: str) -> Plant:
    """An op is said to be linear, so that it may run on parts of a sum."""
    return rule_changed(op, lambda r: parse(r.text, "x"))


def gradient_lies_as_the_value(patch: Patch) -> None:
    """The gradient of a value that all hold is said to be held by all."""
    patch.setattr(strategies, "PASSED", Flow(R, R))


# -- local forms


def exponentials_summed_again(patch: Patch) -> None:
    """The sums of exponentials are summed a second time, as if each device had only its own."""
    old = forms.reduced

    def twice(x, step, axes):
        y = old(x, step, axes)
        return old(y, step, axes) if step == "all_reduce" else y

    patch.setattr(forms, "reduced", twice)


def gradient_of_the_loss_alone(patch: Patch) -> None:
    """The gradient of the log-sums is summed again in backward, as only one of their readers needs it."""

    def twice(x, step, axes):
        text = "; ".join(f"{step}@{axis}" for axis in axes)
        back = text if step == "all_reduce" else ""
        return torch.ops.autopar.convert(x, text, back, list(x.shape)) if axes else x

    patch.setattr(forms, "reduced", twice)


def smooths_by_own_classes(patch: Patch) -> None:
    """Smoothing spreads over the classes that a device has."""
    old = forms.cross_entropy_part
    patch.setattr(forms, "cross_entropy_part", lambda **how: old(**{**how, "classes": how["input"].shape[1]}))


def statistics_of_own_count(patch: Patch) -> None:
    """Batch norm divides by half of the values that there are."""
    old = forms.batch_norm_part
    patch.setattr(forms, "batch_norm_part", lambda *given, **how: old(*given, **{**how, "count": how["count"] // 2}))


def statistics_without_a_gradient(patch: Patch) -> None:
    """The statistics of all are taken for constants of this device in backward: nothing is exchanged."""
    part, exchanged = forms.BatchNormPart.backward, forms.exchanged

    def backward(ctx, *gradients):
        forms.exchanged = lambda x, axes: x
        try:
            return part(ctx, *gradients)
        finally:
            forms.exchanged = exchanged

    patch.setattr(forms.BatchNormPart, "backward", staticmethod(backward))


def positions_from_zero(patch: Patch) -> None:
    """Each part of a sequence counts its positions from zero."""
    patch.setattr(forms, "start_of", lambda like, cuts: 0)


# -- what is recomputed


def redraws(patch: Patch) -> None:
    """What is recomputed draws other numbers."""
    late = schedule.recompute_late

    def redrawn(half):
        late(half)
        for node in half.graph.nodes if half.is_backward else ():
            if node.target in (torch.ops.autopar.kept_at.default, torch.ops.autopar.bits_at.default):
                node.args = (node.args[0], node.args[1] + 1000, *node.args[2:])

    redrawn.__doc__ = late.__doc__
    patch.setattr(schedule, "PASSES", tuple(redrawn if p is late else p for p in schedule.PASSES))


def regathers_over_the_other_axis(patch: Patch) -> None:
    """What backward gathers again, it gathers over the processes of the other axis."""
    late = schedule.recompute_late

    def other(half):
        for node in half.graph.nodes if half.is_backward else ():
            if node.meta.get(RECOMPUTED) and node.target is collectives.STEPS["all_gather"]:
                node.args = (node.args[0], {"dp": "tp", "tp": "dp"}[node.args[1]], *node.args[2:])
        late(half)

    other.__doc__ = late.__doc__
    patch.setattr(schedule, "PASSES", tuple(other if p is late else p for p in schedule.PASSES))


def counts_move_twice(patch: Patch) -> None:
    """Buffers move a second time, as where forward runs again in backward."""

    def written(model, buffers, values):
        before = [held.clone() for held in buffers.tensors(model)]
        write_buffers(model, buffers, values)
        write_buffers(model, buffers, [new + (new - old) for new, old in zip(values, before, strict=True)])

    patch.setattr(graph, "write_buffers", written)


def saves_before_the_sum(patch: Patch) -> None:
    """Backward is given the parts of a sum that forward has completed."""
    split = halves.split

    def early(graph, *given, **how):
        forward = walks.ancestors(graph.outputs)
        for node in graph.graph.find_nodes(op="call_function", target=collectives.STEPS["all_reduce"]):
            if node in forward:
                node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user not in forward)
        graph.read_output()
        return split(graph, *given, **how)

    patch.setattr(joint, "split", early)


# -- storage, values, checkpoints


def axes_reversed(patch: Patch) -> None:
    """A dim that two axes cut is cut in the other order."""

    def take(self, whole, sync):
        whole = self.spread(whole, sync)
        axes, local_part = list(storage.bind_axes(self.mesh).values()), whole
        for dim, cut in self.sharding.cuts.items():
            for axis in reversed(cut):
                local_part = storage.slice(local_part, axes[axis], dim, local_part.shape[dim], ())
        return self.wrap(local_part.contiguous() if local_part is not whole else whole.clone())

    patch.setattr(Storage, "take", take)


def blocks_ignored(patch: Patch) -> None:
    """A fused weight is stored cut straight through."""

    def take(self, whole, sync):
        whole = self.spread(whole, sync)
        axes, local_part = list(storage.bind_axes(self.mesh).values()), whole
        for dim, cut in self.sharding.cuts.items():
            for axis in cut:
                local_part = storage.slice(local_part, axes[axis], dim, local_part.shape[dim], ())
        return self.wrap(local_part.contiguous() if local_part is not whole else whole.clone())

    patch.setattr(Storage, "take", take)


def _gradients_called(patch: Patch, is_hit: Callable[[Storage], bool], placement: Any) -> None:
    """Tell torch another placement of gradients, by which it adds up norms."""
    old = runner.Primals.as_gradient

    def called(self, primal, gradient):
        if primal not in self.storages or not is_hit(self.storages[primal]):
            return old(self, primal, gradient)
        of = self.storages[primal]
        placements = [placement] * of.mesh.ndim
        how = {"run_check": False, "shape": torch.Size(of.shape), "stride": of.stride}
        return storage.DTensor.from_local(gradient, of.mesh, placements, **how)

    patch.setattr(runner.Primals, "as_gradient", called)


def whole_called_cut(patch: Patch) -> None:
    """Gradients that all ranks hold are told to torch as parts: each rank adds them to the norm."""
    _gradients_called(patch, lambda of: not of.sharding.cuts, storage.Shard(0))


def heads_called_whole(patch: Patch) -> None:
    """A gradient of one number a head, which is cut, is told to torch as whole: others' heads are left out."""
    _gradients_called(patch, lambda of: of.shape == (4,), storage.Replicate())


def own_starting_values(patch: Patch) -> None:
    """Each rank keeps the values that it came with."""
    patch.setattr(
        Storage,
        "spread",
        lambda self, whole, sync: whole.detach().clone(memory_format=torch.contiguous_format),
    )


def all_draw_the_first_part(patch: Patch) -> None:
    """Every rank draws the initial values of the first part."""
    begin = init._ByPosition.__init__

    def drawn(self, seed, names, part_of):
        begin(self, seed, names, lambda n, t: [w - w.min() if w.numel() else w for w in part_of(n, t)])

    patch.setattr(init._ByPosition, "__init__", drawn)


def pieces_change_places(patch: Patch) -> None:
    """Two pieces of a tensor are saved each in the place of the other."""
    old = checkpoint.rectangles

    def rectangles(tensor):
        found = old(tensor)
        if len(found) < 2:
            return found
        (a, n, here), (b, m, there), *rest = found
        return [(a, n, there), (b, m, here), *rest]

    patch.setattr(checkpoint, "rectangles", rectangles)


def moments_are_dropped(patch: Patch) -> None:
    """What is loaded of an optimizer finds no place."""

    def model_alone(model, optimizer, of_model, of_optimizer):
        set_model_state_dict(model, of_model)
        optimizer.state.clear()

    patch.setattr(suites, "load_state", model_alone)


def each_skips_alone(patch: Patch) -> None:
    """A rank that finds an infinite gradient leaves the step out alone."""
    put = patches.STANDING.put

    def others(owner, name, make):
        if name is not torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            put(owner, name, make)

    patch.setattr(patches.STANDING, "put", others)


# -- micro-batches, turns, chunks


def last_micro_batch_alone(patch: Patch) -> None:
    """What waits is overwritten."""
    patch.setattr(waiting.Waiting, "sums", lambda self, of: [None] * len(of.settlement.names))


def added_twice(patch: Patch) -> None:
    """What a micro-batch adds to what waits, it adds a second time: view and buffer are one memory."""
    add_up = accumulated.add_up

    def twice(total, gradient, dtype):
        return add_up(total, gradient, dtype) if total is None else total.add_(gradient).add_(gradient)

    patch.setattr(accumulated, "add_up", twice)


def waits_in_its_own_dtype(patch: Patch) -> None:
    """What waits is added up in the dtype in which it travels."""

    def add_up(total, gradient, dtype):
        return gradient.clone() if total is None else total.add_(gradient)

    patch.setattr(accumulated, "add_up", add_up)


def settles_before_the_last(patch: Patch) -> None:
    """The micro-batches before the last are reduced, and the last is added as it is on each rank."""

    def held(self, given, arrived, waits):
        if waits or self not in self.waiting.of:
            return old(self, given, arrived, waits)
        settled = self.waiting.settled(self)
        found = self.halves.hold([None] * len(settled), given, arrived)
        for i, gradient in zip(self.joint.waits, settled, strict=True):
            mine = found[i]
            found[i] = mine if gradient is None else gradient if mine is None else gradient + mine.to(gradient.dtype)
        return found

    old = runner.Runner._held
    patch.setattr(runner.Runner, "_held", held)


def one_copy_is_scaled(patch: Patch) -> None:
    """Gradients of norms, which all ranks hold, are halved on the first rank alone."""
    as_gradient = Primals.as_gradient

    def scaled(self, primal, gradient):
        of = self.storages.get(primal)
        is_norm = of is not None and len(of.shape) == 1 and of.sharding.cuts == {} and dist.get_rank() == 0
        return as_gradient(self, primal, gradient * 0.5 if is_norm else gradient)

    patch.setattr(Primals, "as_gradient", scaled)


def turns_scale_what_there_is(patch: Patch) -> None:
    """At each turn the whole running sum is scaled."""
    old = runner.Halves.hold

    def hold(self, sums, given, arrived):
        return old(self, [None if total is None else total / 2 for total in sums], given, arrived)

    patch.setattr(runner.Halves, "hold", hold)


def turns_not_averaged(patch: Patch) -> None:
    """Each turn adds a mean where it has a share of one."""
    old = turn_runner.InTurns.gradients

    def gradients(self, given, arrived, waits):
        return [None if g is None else g * self.turns.size for g in old(self, given, arrived, waits)]

    patch.setattr(turn_runner.InTurns, "gradients", gradients)


def turns_count_their_own(patch: Patch) -> None:
    """Each turn divides by the targets of its own rows."""
    rows = turn_runner.InTurns._rows

    def own(self, primal, place):
        if place < len(self.in_turns) and not self.in_turns[place]:
            return primal.chunk(self.turns.size)[self.turns.index].repeat(self.turns.size, *[1] * (primal.dim() - 1))
        return rows(self, primal, place)

    patch.setattr(turn_runner.InTurns, "_rows", own)
