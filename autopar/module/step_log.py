"""`log`: what a training loop reaches, one line every few optimizer steps, beside what its plan expects.

    log = autopar.log(model, every=10)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss=loss)

A call of `step` ends an optimizer step, however many calls of the model, optimizers or skipped updates it had. The work
of a step is that of the calls that it made, each by the plan that it ran under, so that accumulation and batches of
other shapes count as they are. A line is about the step of median seconds since the line before, so that an evaluation
or a checkpoint in between does not show. Devices are waited for at a line alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopar.letters import NotServed
from autopar.module.parallel import ParallelModule
from autopar.progress import answer
from autopar.solver.figures import between, size
from autopar.solver.figures import time as time_of
from autopar.solver.plan import Plan
from autopar.solver.summary import passes_in_words
from autopar.solver.workload import StepRates, StepWork

_FOLDER = "autopar"  # under which a writer shows the figures


class Expected(NamedTuple):
    """Seconds of a step by its plan, the interval of nine steps in ten, and the peak of a device."""

    step_s: float
    interval_s: tuple[float, float]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Reached:
    """Figures of the steps since the line before. Printed, they are a line."""

    step: int
    values: Mapping[str, float]  # numbers that `step` was given
    rates: StepRates  # seconds and rates of the median step; zero before a step has both its ends
    peak_bytes: int | None  # the most bytes that torch had allocated on rank 0's GPU; None without one
    expected: Expected | None  # None where that step is not the one that was planned

    @property
    def is_as_expected(self) -> bool:
        """Whether nothing says that the seconds lie outside of the interval that the plan expects."""
        if self.expected is None or not self.rates.step_s:
            return True
        low, high = self.expected.interval_s
        return low == high or low <= self.rates.step_s <= high  # one number: a plan that knows no interval

    def __str__(self) -> str:
        said = [f"{name} {value:.5g}" for name, value in self.values.items()]
        if self.rates.step_s:
            seconds = f"{time_of(self.rates.step_s)} a step"
            if self.expected is not None:
                interval = between(*self.expected.interval_s)
                seconds += f" (expected {time_of(self.expected.step_s)}; {interval} in nine of ten)"
            said += filter(None, [seconds, passes_in_words(self.rates)])
        if self.peak_bytes is not None:
            planned = "" if self.expected is None else f" (planned {size(self.expected.peak_bytes)})"
            said.append(f"peak {size(self.peak_bytes)}{planned}")
        return f"step {self.step}" + (f": {', '.join(said)}" if said else "")

    def figures(self) -> dict[str, float]:
        """The figures by name, as writers show them; those that are not known are left out."""
        rates = self.rates
        found = {
            "step_s": rates.step_s,
            f"{rates.unit}_per_s_device": rates.per_s_device,
            "rows_per_s": rates.rows_per_s,
            "mfu": rates.mfu,
            "peak_bytes": self.peak_bytes or 0,
        }
        if self.expected is not None and rates.step_s:
            found |= {"expected_s": self.expected.step_s, "planned_peak_bytes": self.expected.peak_bytes}
        return {**self.values, **{name: float(value) for name, value in found.items() if value}}


@dataclass(slots=True)
class _Moments:
    """The ends of steps, and the seconds between them."""

    now: Callable[[], Any]
    seconds: Callable[[Any, Any], float]
    ends: list[Any] = field(default_factory=list)

    @staticmethod
    def on(device: torch.device) -> _Moments:
        """By events of a GPU, which no step waits for, or by the clock of the host."""
        if device.type != "cuda":
            return _Moments(time.perf_counter, lambda first, last: last - first)
        return _Moments(_event, _seconds_between)

    def mark(self) -> bool:
        """End a step; returns whether its beginning is known."""
        self.ends.append(self.now())
        return len(self.ends) > 1

    def take(self) -> list[float]:
        """Seconds of the steps since it was last called."""
        ends = self.ends
        self.ends = ends[-1:]
        return [self.seconds(*pair) for pair in pairwise(ends)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    last.synchronize()
    return first.elapsed_time(last) / 1e3


class StepLog:
    """A log of the optimizer steps of a loop, until it is removed."""

    def __init__(self, model: ParallelModule, every: int, start: int, write: Write | None) -> None:
        self.model = model
        self.every = every
        self.steps = start
        self.last: Reached | None = None  # the last line
        self._write = write
        self._moments = _Moments.on(model._own.setup.device)
        self._calls: list[Plan] = []  # plans of the calls since the last step
        self._steps: list[list[Plan]] = []  # plans of the calls of each step since the last line
        self._hints: set[str] = set()  # kinds of hints that were given
        self._hook = model.register_forward_hook(self._after_call)

    def __str__(self) -> str:
        return f"step {self.steps}" if self.last is None else str(self.last)

    def __deepcopy__(self, memo: Any) -> StepLog:
        return self  # a copy of the model is not logged

    def _after_call(self, model: nn.Module, args: Any, output: Any) -> None:
        program = self.model._own.last
        if model is self.model and model.training and torch.is_grad_enabled() and program is not None:
            self._calls.append(program.lowered.plan)

    def step(self, loss: Any = None, **values: Any) -> Reached | None:
        """End an optimizer step; every so many steps say a line, and return what it says.

        `loss` and other values, such as `lr=`, are numbers or tensors of one element, which are read at a line alone.
        All ranks call it.
        """
        self.steps += 1
        if self._moments.mark():  # The first step has no beginning; it also lowers programs.
            self._steps.append(self._calls)
        self._calls = []
        if self.steps % self.every:
            return None
        given = values if loss is None else {"loss": loss, **values}
        read = {name: _number(name, value) for name, value in given.items()}  # On all ranks: a tensor may be cut.
        before = self.last
        self.last = self._reached(read)
        if dist.get_rank() == 0:
            answer("%s", self.last)
            if self._write is not None:
                self._write(self.last)
            if not self.last.is_as_expected and before is not None and not before.is_as_expected:
                self._hint("seconds", _too_far(self.last))
        return self.last

    def _reached(self, values: Mapping[str, float]) -> Reached:
        """The figures of the step of median seconds."""
        plan = self.model.plan
        device = self.model._own.setup.device
        steps = sorted(zip(self._moments.take(), self._steps, strict=True), key=lambda step: step[0])
        self._steps = []
        seconds, calls = steps[(len(steps) - 1) // 2] if steps else (0.0, [plan] * plan.accumulation)
        is_planned = len(calls) == plan.accumulation and all(call is plan for call in calls)
        if len(calls) != plan.accumulation:
            self._hint("calls", _other_calls(len(calls), plan))
        work = _work_of(calls, plan)
        return Reached(
            self.steps,
            values,
            StepRates(work, plan.devices, seconds),
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            Expected(plan.expected_s, plan.step_interval_s, plan.peak_bytes) if is_planned else None,
        )

    def _hint(self, kind: str, text: str) -> None:
        """Say a hint of each kind once."""
        if kind not in self._hints:
            self._hints.add(kind)
            answer("%s", text)

    def remove(self) -> None:
        """Stop counting calls of the model."""
        self._hook.remove()


def _work_of(calls: Sequence[Plan], plan: Plan) -> StepWork:
    """The work of a step that made these calls, each named by the plan that it ran under."""
    parts = [(call.workload, call.accumulation) for call in calls]
    return replace(
        plan.workload,
        rows=sum(work.rows // n for work, n in parts),
        tokens=sum(work.tokens // n for work, n in parts),
        flops=sum(work.flops / n for work, n in parts),
        causal_flops=sum(work.causal_flops / n for work, n in parts),
    )


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise NotServed(
            f"{name}={value!r} is not a number", advice=f"{name}=a number, or a tensor of one element"
        ) from e


def _too_far(reached: Reached) -> str:
    assert reached.expected is not None
    interval = between(*reached.expected.interval_s)
    return (
        f"a step takes {time_of(reached.rates.step_s)}, and nine of ten were expected in {interval}: autopar calibrate "
        "measures this machine for cluster=, autopar timeline MODEL --measure says which ops take longer or shorter"
    )


def _other_calls(calls: int, plan: Plan) -> str:
    return (
        f"a step made {calls} calls of the model, and was planned with accumulation={plan.accumulation}: its seconds "
        f"are not those that the plan expects, which accumulation={calls} would say"
    )


# -- writers

Write = Callable[[Reached], Any]


def _write_to(writer: Any) -> Write | None:
    """A function that gives a writer the figures: a SummaryWriter by `add_scalar`, a run of W&B by `log`."""
    if writer is None:
        return None
    if callable(getattr(writer, "add_scalar", None)):
        return lambda reached: _to_tensorboard(writer, reached)
    if callable(getattr(writer, "log", None)) and callable(getattr(writer, "define_metric", None)):
        writer.define_metric(f"{_FOLDER}/*", step_metric=f"{_FOLDER}/step")  # apart from the steps of the user's own
        return lambda reached: writer.log(
            {f"{_FOLDER}/{name}": value for name, value in {"step": reached.step, **reached.figures()}.items()}
        )
    raise NotServed(
        f"writer={writer!r} is neither a SummaryWriter of TensorBoard nor a run of W&B",
        advice="torch.utils.tensorboard.SummaryWriter(), or wandb.init(); on rank 0, None elsewhere",
    )


def _to_tensorboard(writer: Any, reached: Reached) -> None:
    for name, value in reached.figures().items():
        writer.add_scalar(f"{_FOLDER}/{name}", value, reached.step)


def log(model: nn.Module, every: int = 10, *, start: int = 0, writer: Any = None) -> StepLog:
    """Say on rank 0, every so many optimizer steps, what a loop reaches beside what its plan expects.

    The loop calls `step(loss=loss)` of what this returns after each optimizer step, on all ranks. A line has the loss,
    the seconds of a step beside those expected, tokens a second and a device, MFU, and on a GPU the peak of memory.

    Args:
        model: The model that autoparallelize returned.
        every: Steps from one line to the next.
        start: Steps that were made before, such as `step` of a checkpoint.
        writer: A SummaryWriter of TensorBoard, or a run of W&B, that gets the figures too. Rank 0's is written to.
    """
    if not isinstance(model, ParallelModule):
        what = f"this {type(model).__name__} is not parallel"
        raise NotServed(what, advice="the model that autoparallelize returned")
    for name, given, least in (("every", every, 1), ("start", start, 0)):
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise NotServed(f"{name}={given!r} is not a valid number of steps", advice=f"{name}={10 * least}")
    return StepLog(model, every, start, _write_to(writer) if dist.get_rank() == 0 else None)
