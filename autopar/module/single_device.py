"""The gradient of one parameter beside that of a single device, on a few rows of a batch.

    rows        the first that rank 0 passes, at most so many, which divide the rows of every rank
    parallel    the program of the call, on a batch of these rows again and again: no other program is made
    alone       the plain model, gathered on rank 0, on these rows

A program takes a whole batch. These rows again and again have the mean loss of the few, and a sum that is a multiple of
theirs: the plain model on the rows twice says which of them. Where it is neither, as in a contrastive loss, nothing can
be compared, and where the model draws random numbers neither. How far rounding moves the gradient the plain model says
too, in a wider dtype: what rounding alone can do is no error.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.graph.calls import Call, learn_dataclasses, output_names, without_caches
from autopar.graph.graph import Graph, info, op_name
from autopar.letters import NotServed
from autopar.module.gathered import gather
from autopar.module.padding import ROUNDING, coarsest
from autopar.module.parallel import ParallelModule, called, left_by
from autopar.module.storage import Storage
from autopar.runtime.private import unwatched
from autopar.runtime.random import RandomState
from autopar.runtime.world import exchanged, from_rank_0
from autopar.solver.figures import size
from autopar.tracer.precision import Precision, reference

_OF_ROUNDING = 8.0  # a program adds in other orders: so many times what rounding moves the plain model by
_MOST = 0.5  # of a gradient: where it may differ by more, it is rounding itself
_UNIT = 10**15  # of a share, which ranks exchange as whole numbers


@dataclass(frozen=True, slots=True)
class Compared:
    """The gradient of one parameter on a few rows, or why it was not compared."""

    parameter: str
    rows: int
    why_not: str = ""
    allowed: float = 0.0  # the share of its norm by which it may differ
    off: tuple[float, ...] = ()  # the share by which the part of each rank does

    @property
    def wrong(self) -> list[int]:
        """The ranks whose part of the gradient is not that of a single device."""
        return [rank for rank, share in enumerate(self.off) if not share <= self.allowed]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A few rows of a call, and how to put them in the place of its own."""

    leaves: list[Any]
    structure: Any
    has_rows: list[bool]
    here: int  # that this rank passes
    of_all: int  # in the batch of all ranks
    few: int
    given: list[Tensor]

    def again(self, times: int, dtype: torch.dtype | None = None) -> tuple[list[Any], Any]:
        """The leaves of a call with these rows so many times; numbers of another dtype, where one is named."""
        rows, made = iter(self.given), []
        for leaf, has in zip(self.leaves, self.has_rows, strict=True):
            if has:
                few = next(rows)
                wants, leaf = leaf.requires_grad, few.repeat(times, *[1] * (few.dim() - 1)).to(leaf.device)
                leaf.requires_grad_(wants)
            if dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf = leaf.detach().to(dtype)
            made.append(leaf)
        return made, self.structure


def compared(model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any], most: int, number: int) -> Compared:
    """Compare one gradient on at most `most` rows of a call, on all ranks; `number` says which parameter."""
    state = model._own
    name = _sampled(model, number)
    if name is None:
        return Compared("", 0, "no parameter trains whose gradient no hook may change")
    rows = _few_rows(model, args, kwargs, most)
    if rows is None:
        return Compared(name, 0, "no input has rows")
    with torch.inference_mode(False), torch.enable_grad(), unwatched(), state.waiting.set_aside():
        call = state.caller.call(*rows.again(rows.here // rows.few))
        program, inputs, bucket = called(model, call.args, call.kwargs)
        graph = program.runner.graph
        why_not = _drawn(graph) or from_rank_0(lambda: _lacks_memory(model))
        if why_not:
            return Compared(name, rows.few, why_not)
        outputs, _ = program.run(model, inputs, RandomState(0))  # buffers stay as they are
        left = dict(zip(graph.output_names, left_by(model, program, outputs, bucket), strict=True))
        asked = [graph.output_names[i] for i in program.runner.differentiable]
        mine = _gradient([left[output] for output in asked], rows.few, model.get_parameter(name))
        del outputs, left
        right, said = _of_plain(model, name, rows, asked, coarsest(graph))
    if said.why_not:
        return Compared(name, rows.few, said.why_not)
    share = _apart(state.setup.storage[name], mine, right, said.factor)
    everyone = exchanged([share], state.setup.device)
    return Compared(name, rows.few, "", said.allowed, tuple(n / _UNIT for (n,) in everyone))


def _sampled(model: nn.Module, number: int) -> str | None:
    """A parameter that trains, another one for every number.

    A hook may change its gradient, and the plain model has none.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad and not p._backward_hooks]
    return random.Random(number).choice(names) if names else None


def _few_rows(model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> _Rows | None:
    """The first rows of a call on rank 0, so many as divide those of every rank; None where no input has rows."""
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
    few = next((n for n in range(min(most, *everyone), 0, -1) if all(r % n == 0 for r in everyone)), 0)
    if not few:
        return None
    parts = state.parts
    of_all = here if parts is None else sum({parts.index(rank): n for rank, n in enumerate(everyone)}.values())
    mine = [leaf for leaf, has in zip(leaves, has_rows, strict=True) if has]
    given = from_rank_0(lambda: [leaf[:few].detach().cpu() for leaf in mine])
    return _Rows(leaves, structure, has_rows, here, of_all, few, given)


def _drawn(graph: Graph) -> str:
    """The op that draws random numbers, in words: rows again and again would each have others."""
    drawing = next((node for node in graph.nodes if info(node).random >= 0), None)
    return "" if drawing is None else f"{op_name(drawing)} draws random numbers, at {info(drawing).source}"


def _lacks_memory(model: nn.Module) -> str:
    """The reason for which this rank cannot hold the whole model, in a wider dtype too, beside its part of it."""
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
    """Bytes that this machine can give, where it says so."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
    return math.inf


def _gradient(outputs: Sequence[Any], few: int, parameter: Tensor) -> Tensor:
    """The gradient of the mean over rows of a sum in which each number of a row has a weight of its own."""
    total: Any = 0.0
    for output in outputs:
        full = output.full_tensor() if isinstance(output, DTensor) else output
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
class _Said:
    """What rank 0 says of the gradient of the plain model on the rows."""

    why_not: str = ""
    factor: float = 1.0  # that of the whole batch over that of the rows
    allowed: float = 0.0


def _of_plain(
    model: ParallelModule, name: str, rows: _Rows, asked: Sequence[str], bytes_of_dtype: int
) -> tuple[Tensor, _Said]:
    """The gradient of the plain model on the rows, on rank 0, and what it says of it to all."""
    parameter = model.get_parameter(name)
    right = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    why_not = ""
    try:
        plain = gather(model, 0)
    except NotServed as e:
        plain, why_not = None, e.what

    def judged() -> _Said:
        if plain is None:
            return _Said(why_not)
        run = _Plain(model, plain, name, asked, rows)
        on_gpu = [parameter.device] if parameter.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(on_gpu):
                right.copy_(run.gradient(1))
                twice = run.gradient(2) if rows.of_all > rows.few else None
                other = run.gradient(1, torch.float64 if bytes_of_dtype == 4 else torch.float32)
        except Exception as e:
            first = str(e).splitlines()[0] if str(e) else ""
            return _Said(f"the plain model raises {type(e).__name__} on {rows.few} rows: {first}")
        return _judged(right, twice, other, rows.of_all / rows.few, bytes_of_dtype)

    return right, from_rank_0(judged)


class _Plain:
    """The plain model as a user would run it on one device, under the precision and with the loss of the parallel."""

    def __init__(self, model: ParallelModule, plain: nn.Module, name: str, asked: Sequence[str], rows: _Rows) -> None:
        self.plain, self.name, self.asked, self.rows = plain, name, asked, rows
        self.caller, self.loss = model._own.caller, model._own.setup.how.loss
        self.precision = Precision(*model.plan.precision) if model.plan.precision else None

    def gradient(self, times: int, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient on the rows so many times; in another dtype, from which the model does not come back."""
        call = self.caller.call(*self.rows.again(times, dtype))
        if dtype is None:
            outputs = self._outputs(call, self.precision)
        else:
            self.plain.to(dtype)
            kind = next(self.plain.parameters()).device.type
            with torch.autocast(kind, enabled=False):
                outputs = self._outputs(call, None)
        return _gradient([outputs[n] for n in self.asked], self.rows.few, self.plain.get_parameter(self.name))

    def _outputs(self, call: Call, precision: Precision | None) -> dict[str, Tensor]:
        """The outputs by their names in a graph, the loss first where there is one."""
        args, kwargs = call.args, call.kwargs
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


def _judged(right: Tensor, twice: Tensor | None, other: Tensor, times: float, bytes_of_dtype: int) -> _Said:
    """Is it a mean or a sum over rows, and how much of it is rounding?"""
    norm = _norm(right)
    if not 0 < norm < math.inf:
        return _Said("its gradient is zero on these rows, or not finite")
    rounding, factor = _norm(right - other) / norm, 1.0
    if bytes_of_dtype == 8:  # the other is of 4
        rounding *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    allowed = max(ROUNDING[bytes_of_dtype], _OF_ROUNDING * rounding)
    if not allowed <= _MOST:
        return _Said("its gradient is rounding for the most part")
    if twice is not None:
        of_mean, of_sum = _norm(twice - right) / norm, _norm(twice - 2 * right) / norm
        if min(of_mean, of_sum) > allowed:
            said = f"differs by {of_mean:.2g} from that on the rows once, and by {of_sum:.2g} from twice that"
            return _Said(f"the model does not treat rows alike: its gradient on the same rows twice {said}")
        factor = 1.0 if of_mean < of_sum else times
    return _Said("", factor, allowed)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _apart(storage: Storage, mine: Tensor, right: Tensor, factor: float) -> int:
    """The share of its norm, in units, by which this rank's part of a gradient differs from that of rank 0's.

    A part that is nearly nothing is held against its share of the whole.
    """
    due = storage.take(right, sync=True)
    part = due.to_local().to(torch.float64)
    here = (mine.to_local() if isinstance(mine, DTensor) else mine).to(torch.float64) / factor
    whole = storage.spread(torch.tensor(_norm(right), device=part.device, dtype=torch.float64), sync=True)
    least = float(whole) * math.sqrt(part.numel() / max(1, right.numel()))
    share = _norm(here - part) / max(_norm(part), least, torch.finfo(torch.float64).tiny)
    return round(_UNIT * min(share, 1e3)) if math.isfinite(share) else 1000 * _UNIT
