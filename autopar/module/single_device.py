"""Compare the gradient of one parameter with that of a single device, on a few rows of a batch.

    rows        the first that rank 0 passes, at most so many, which divide the rows of every rank
    parallel    the program of the call, on a batch of these rows repeated: no other program is made
    alone       the plain model, gathered on rank 0, on these rows

A program takes a whole batch. Repeated rows have the mean loss of the few, or a multiple of their sum: the plain model
on the rows twice tells which. Where it is neither, because rows count by their places, nothing can be compared, nor
where the model draws random numbers. The plain model in a wider dtype tells how far rounding moves the gradient, so
that rounding is not taken for an error.

Two repeats are not a whole batch: a loss over its worst rows, or half precision that loses small gradients, shows only
in more rows. So a difference is checked once more, with the plain model on as many rows as the program has.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.graph.calls import Call, learn_dataclasses, output_names, without_caches
from autopar.graph.graph import Graph, info, op_name
from autopar.graph.idle import IdleHook
from autopar.letters import BadInput, Letter, NotServed
from autopar.module.gathered import gather
from autopar.module.limits import LIMITS
from autopar.module.padding import ROUNDING, coarsest
from autopar.module.parallel import ParallelModule, called, left_by
from autopar.module.state import ModelState
from autopar.runtime.private import unwatched
from autopar.runtime.random import RandomState
from autopar.runtime.world import exchanged, from_rank_0
from autopar.solver.figures import size
from autopar.tracer.precision import Precision, reference

_UNIT = 10**15  # units in a share of one: ranks exchange shares as whole numbers


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of comparing one parameter's gradient on a few rows, or why it was not compared."""

    parameter: str
    rows: int
    why_not: str = ""
    allowed: float = 0.0  # the share of its norm by which it may differ
    off: tuple[float, ...] = ()  # the share by which the part of each rank does

    @property
    def wrong(self) -> list[int]:
        """Ranks whose part of the gradient differs from that of a single device."""
        return [rank for rank, share in enumerate(self.off) if not share <= self.allowed]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A few rows of a call, and the call that they replace the rows of."""

    leaves: list[Any]
    structure: Any
    has_rows: list[bool]
    here: int  # rows that this rank passes
    of_all: int  # rows in the batch of all ranks
    few: int
    given: list[Tensor]

    def again(self, times: int, dtype: torch.dtype | None = None) -> tuple[list[Any], Any]:
        """Leaves of a call with these rows repeated, in `dtype` where one is given."""
        rows = iter(self.given)
        made = []
        for leaf, has in zip(self.leaves, self.has_rows, strict=True):
            if has:
                few = next(rows)
                wants = leaf.requires_grad
                leaf = few.repeat(times, *[1] * (few.dim() - 1)).to(leaf.device)
                leaf.requires_grad_(wants)
            if dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf = leaf.detach().to(dtype)
            made.append(leaf)
        return made, self.structure


def compared(model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any], most: int, number: int) -> Compared:
    """Compare one gradient on at most `most` rows of a call, on all ranks; `number` chooses the parameter."""
    state = model._own
    name = _sampled(model, number)
    if name is None:
        return Compared("", 0, "no parameter trains whose gradient no hook may change")
    try:
        rows = _few_rows(model, args, kwargs, most)
    except BadInput as e:  # a hook that comes later may bring it in order
        return Compared(name, 0, e.what)
    if rows is None:
        return Compared(name, 0, "no input has rows")
    with torch.inference_mode(False), torch.enable_grad(), unwatched(), state.waiting.set_aside():
        call = state.caller.call(*rows.again(rows.here // rows.few))
        program, inputs, bucket = called(model, call.args, call.kwargs)
        graph = program.runner.graph
        why_not = _drawn(graph) or _may_index(rows) or from_rank_0(lambda: _lacks_memory(model))
        if why_not:
            return Compared(name, rows.few, why_not)
        outputs, _ = program.run(model, inputs, RandomState(0))  # buffers stay as they are
        left = dict(zip(graph.output_names, left_by(model, program, outputs, bucket), strict=True))
        asked = [graph.output_names[i] for i in program.runner.differentiable]
        mine = _gradient([left[output] for output in asked], rows.few, model.get_parameter(name))
        del outputs, left
        alone = _Alone(model, name, asked, rows, program.sight.idle)
        right, said = alone.judged(lambda plain: _judged(plain, coarsest(graph)))
        if said.why_not:
            return Compared(name, rows.few, said.why_not)
        off = _apart_on_all(state, name, mine / said.factor, right)
        found = Compared(name, rows.few, "", said.allowed, off)
        if found.wrong and rows.of_all > rows.few:
            right, of_whole = alone.judged(_on_whole_batch)
            if of_whole.why_not:
                what = f"it differs by {max(off):.2g} of its norm, and the whole batch says whether that is an error: "
                return Compared(name, rows.few, what + of_whole.why_not)
            found = Compared(name, rows.few, "", said.allowed, _apart_on_all(state, name, mine, right))
    return found


def _sampled(model: nn.Module, number: int) -> str | None:
    """Name of a parameter that trains, chosen by `number`; None where there is none.

    Parameters with hooks are left out: a hook may change the gradient, and the plain model has no hooks.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad and not p._backward_hooks]
    return random.Random(number).choice(names) if names else None


def _few_rows(model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> _Rows | None:
    """The first rows of rank 0's call, of a number that divides every rank's rows; None without any."""
    state = model._own
    leaves, structure = state.caller.arguments(args, kwargs)
    has_rows = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves]
    if state.parts is not None:
        names = state.caller.names(structure)
        has_rows = [may and name in state.parts.names for may, name in zip(has_rows, names, strict=True)]
    counts = Counter(len(leaf) for leaf, may in zip(leaves, has_rows, strict=True) if may)
    here = counts.most_common(1)[0][0] if counts else 0
    has_rows = [may and len(leaf) == here for leaf, may in zip(leaves, has_rows, strict=True)]
    everyone = [found for (found,) in exchanged([here], state.setup.device)]
    common = math.gcd(*everyone)
    few = next((n for n in range(min(most, *everyone), 0, -1) if common % n == 0), 0)
    if not few:
        return None
    parts = state.parts
    of_all = here if parts is None else sum({parts.index(rank): n for rank, n in enumerate(everyone)}.values())
    mine = [leaf for leaf, has in zip(leaves, has_rows, strict=True) if has]
    given = from_rank_0(lambda: [leaf[:few].detach().cpu().clone() for leaf in mine])  # not all that lies behind them
    return _Rows(leaves, structure, has_rows, here, of_all, few, given)


def _drawn(graph: Graph) -> str:
    """Text about the first op that draws random numbers, which differ for repeated rows; or empty."""
    drawing = next((node for node in graph.nodes if info(node).random >= 0), None)
    return "" if drawing is None else f"{op_name(drawing)} draws random numbers, at {info(drawing).source}"


def _may_index(rows: _Rows) -> str:
    """Text about an input on a GPU that may hold row indices, or empty.

    An index out of range would end the process.
    """
    for leaf, has in zip(rows.leaves, rows.has_rows, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.dim() and not has and not leaf.is_floating_point():
            return f"an input of {list(leaf.shape)} whole numbers may hold places of rows"
    return ""


def _lacks_memory(model: nn.Module) -> str:
    """The reason why this rank cannot hold the whole model beside its part, or empty where it can.

    A copy of the whole model in a wider dtype must fit too.
    """
    device = next(model.parameters()).device
    held = [t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())]
    if device.type == "cuda":
        there = float(torch.cuda.mem_get_info(device)[0])
        there += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        there = _memory_of_host()
    needs = 2 * (sum(held) + max(held))
    return f"the whole model takes {size(needs)}, and rank 0 has {size(there)}" if needs > there else ""


def _memory_of_host() -> float:
    """Bytes of memory available on this machine; infinite where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
    return math.inf


def _gradient(outputs: Sequence[Any], few: int, parameter: Tensor) -> Tensor:
    """Gradient of the mean over rows of a weighted sum of outputs, with a weight per element of a row."""
    total: Any = 0.0
    for output in outputs:
        full = output.full_tensor() if isinstance(output, DTensor) else output
        full = torch.view_as_real(full) if full.is_complex() else full
        is_by_row = full.dim() > 0 and len(full) % few == 0
        once = full[:few] if is_by_row else full
        weights = torch.cos(torch.arange(once.numel(), device=full.device, dtype=torch.float32)).view(once.shape)
        if is_by_row:
            weights = weights.repeat(len(full) // few, *[1] * (full.dim() - 1)) / len(full)
        total = total + (full * weights.to(full.dtype)).sum()
    if not isinstance(total, Tensor) or not total.requires_grad:
        return torch.zeros_like(parameter)
    (found,) = torch.autograd.grad(total, [parameter], allow_unused=True)
    return torch.zeros_like(parameter) if found is None else found


@dataclass(frozen=True, slots=True)
class _Findings:
    """Rank 0's findings about the gradient of the plain model on the rows."""

    why_not: str = ""
    factor: float = 1.0  # the gradient of the whole batch over that of the rows
    allowed: float = 0.0


class _Alone:
    """The plain model on rank 0, whose findings all ranks get."""

    def __init__(
        self, model: ParallelModule, name: str, asked: Sequence[str], rows: _Rows, idle: Sequence[IdleHook]
    ) -> None:
        self.model = model
        self.name = name
        self.asked = asked
        self.rows = rows
        self.idle = idle

    def judged(self, judge: Callable[[_Plain], tuple[Tensor, _Findings]]) -> tuple[Tensor, _Findings]:
        """Gradient and findings of `judge`, which runs on rank 0.

        The findings are on every rank; the gradient is right on rank 0 only, and only where `why_not` is empty.
        """
        parameter = self.model.get_parameter(self.name)
        right = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        plain = None
        why_not = ""
        try:
            plain = gather(self.model, 0)
        except NotServed as e:
            why_not = e.what
        except Exception as e:  # the copy is made on rank 0 alone; what all ranks raise is a letter
            if dist.get_rank() or isinstance(e, Letter):
                raise
            why_not = _raised(e)

        def said() -> _Findings:
            if plain is None:
                return _Findings(why_not)
            for hook in self.idle:  # a hook may count calls, and the calls below are not the user's
                getattr(plain.get_submodule(hook.path), hook.held_by).pop(hook.key, None)
            on_gpu = [parameter.device] if parameter.device.type == "cuda" else []
            try:
                with torch.random.fork_rng(on_gpu):
                    found, words = judge(_Plain(self.model, plain, self.name, self.asked, self.rows))
            except Exception as e:  # the user's model may not be made for such rows: nothing to compare
                return _Findings(f"the plain model {_raised(e)}")
            right.copy_(found)
            return words

        return right, from_rank_0(said)


def _raised(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else ""
    return f"raises {type(error).__name__}: {first}"


class _Plain:
    """The plain model as it would run on one device, in the precision and with the loss of the parallel model."""

    def __init__(self, model: ParallelModule, plain: nn.Module, name: str, asked: Sequence[str], rows: _Rows) -> None:
        self.plain = plain
        self.name = name
        self.asked = asked
        self.rows = rows
        self.caller = model._own.caller
        self.loss = model._own.setup.how.loss
        self.precision = Precision(*model.plan.precision) if model.plan.precision else None
        self.buffers = {n: buffer.clone() for n, buffer in plain.named_buffers()}

    def gradient(self, times: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gradient on the rows, repeated so many times; a `dtype` converts the model for good."""
        call = self.caller.call(*self.rows.again(times, dtype))
        if dtype is not None:
            self.plain.to(dtype)
        with torch.no_grad():
            for name, buffer in self.plain.named_buffers():  # the run before may have written them
                buffer.copy_(self.buffers[name])
        if dtype is None:
            outputs = self._outputs(call, self.precision)
        else:
            with torch.autocast(next(self.plain.parameters()).device.type, enabled=False):
                outputs = self._outputs(call, None)
        return _gradient([outputs[n] for n in self.asked], self.rows.few, self.plain.get_parameter(self.name))

    def _outputs(self, call: Call, precision: Precision | None) -> dict[str, Tensor]:
        """Outputs by their names in a graph, the loss first where there is one."""
        args = call.args
        kwargs = call.kwargs
        run = self.plain if precision is None else reference(self.plain, precision)
        outputs, _ = without_caches(run(*args, **kwargs))
        if self.loss is not None:
            if precision is not None:
                args, kwargs = pytree.tree_map_only(Tensor, precision.cast, (args, kwargs))
            outputs = self.loss(outputs, kwargs or args), outputs
        learn_dataclasses(outputs)
        names = output_names(outputs, self.loss is not None)
        found = zip(names, pytree.tree_leaves(outputs), strict=True)
        return {f"out.{name}" if name not in self.asked else name: leaf for name, leaf in found}


def _judged(plain: _Plain, bytes_of_dtype: int) -> tuple[Tensor, _Findings]:
    """The gradient on the rows, whether it is of a mean or a sum over rows, and its share of rounding."""
    rows = plain.rows
    right = plain.gradient(1)
    factor = 1.0
    twice = plain.gradient(2) if rows.of_all > rows.few else None
    other = plain.gradient(1, torch.float64 if bytes_of_dtype == 4 else torch.float32)
    norm = _norm(right)
    if not 0 < norm < math.inf:
        return right, _Findings("its gradient is zero on these rows, or not finite")
    rounding = _norm(right - other) / norm
    if bytes_of_dtype == 8:  # the other is of 4
        rounding *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    allowed = max(ROUNDING[bytes_of_dtype], LIMITS.watch.rounding * rounding)
    if not allowed <= LIMITS.watch.most:
        return right, _Findings("its gradient is rounding for the most part")
    if twice is not None:
        of_mean, of_sum = _norm(twice - right) / norm, _norm(twice - 2 * right) / norm
        if min(of_mean, of_sum) > allowed:
            said = f"differs by {of_mean:.2g} from that on the rows once, and by {of_sum:.2g} from twice that"
            return right, _Findings(f"the model does not treat rows alike: its gradient on the same rows twice {said}")
        factor = 1.0 if of_mean < of_sum else rows.of_all / rows.few
    return right, _Findings("", factor, allowed)


def _on_whole_batch(plain: _Plain) -> tuple[Tensor, _Findings]:
    """Gradient on as many rows as the program has."""
    return plain.gradient(plain.rows.of_all // plain.rows.few), _Findings()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _apart_on_all(state: ModelState, name: str, mine: Tensor, right: Tensor) -> tuple[float, ...]:
    """For each rank, the norm of its part's difference from rank 0's gradient over the part's own norm.

    A part that is nearly zero is compared with its share of the whole gradient's norm.
    """
    storage = state.setup.storage[name]
    part = storage.take(right, sync=True).to_local().to(torch.float64)
    here = (mine.to_local() if isinstance(mine, DTensor) else mine).to(torch.float64)
    whole = storage.spread(torch.tensor(_norm(right), device=part.device, dtype=torch.float64), sync=True)
    least = float(whole) * min(1.0, LIMITS.watch.share * math.sqrt(part.numel() / max(1, right.numel())))
    share = _norm(here - part) / max(_norm(part), least, torch.finfo(torch.float64).tiny)
    mine_in_units = round(_UNIT * min(share, 1e3)) if math.isfinite(share) else 1000 * _UNIT
    return tuple(n / _UNIT for (n,) in exchanged([mine_in_units], state.setup.device))
