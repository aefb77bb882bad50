"""`Plan`: a strategy for every site, what it costs, and how far from the best it can be.

A value: its text is in `summary.py` and `text.py`, its JSON in `archive.py`. Nothing here builds a plan or searches for
one, and nothing imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from html import escape as escape_html
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from autopar.letters import BadBudget, BadPlan
from autopar.sharding.certainty import spread
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, values
from autopar.solver import archive, summary, text
from autopar.solver.decision import Conversion, Decision
from autopar.solver.lanes import Event
from autopar.solver.profiled import StepTimeline

if TYPE_CHECKING:
    import torch

    from autopar.solver.curve import Curve


class Beside(NamedTuple):
    """A preset's plan on the same mesh."""

    name: str
    step_time_s: float
    peak_bytes: int
    fits: bool = True  # in the budget, which is the device's memory less a reserve where none was asked for
    why: str = ""  # why there is none


class SearchedSpace(Protocol):
    """The space and the prices that a plan was chosen at: only the process that planned has them."""

    @property
    def is_priced(self) -> bool:
        """Does a byte cost seconds, because of a budget?"""

    @property
    def is_over(self) -> bool:
        """Has it been let go?"""

    def line(self) -> tuple[list[str], dict[str, list[int]]]:
        """The times of a step by name, and the bytes that the plan holds at each, by kind."""

    def events(self) -> list[Event]:
        """The predicted step, event by event."""

    def told(self, name: str) -> list[str]:
        """A line for each kernel of an op: its seconds, and how they came to be."""

    def rivals(self, name: str, most: int = 3) -> list[tuple[Choice, float, float]]:
        """The best other choices of a site: of each the seconds that the plan, and that the op, takes more."""

    def curve(self, budgets: int | Sequence[int]) -> Curve:
        """Budgets against step time."""

    @property
    def known_beside(self) -> tuple[Beside, ...] | None:
        """Experts' plans, if they were asked for."""

    def beside(self) -> tuple[Beside, ...]:
        """Experts' plans on the same mesh."""

    def let_go(self) -> None:
        """Give up the space. `autoparallelize` does, so that no training holds it."""


_MOST_BUDGETS = 1000  # of a curve
GraphCheck = Callable[..., None]  # (plan, model, meta_inputs, loss, assume, outputs): a letter unless they agree


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A strategy per site. A plan changes only speed and memory: what the program computes is not in it."""

    mesh: DeviceMesh
    cluster: str
    decisions: Mapping[str, Decision] = field(repr=False)
    conversions: tuple[Conversion, ...] = field(repr=False)
    regathered: frozenset[str]
    step_time_s: float
    lower_bound_s: float
    parameter_bytes: Mapping[str, int] = field(repr=False)
    digest: str  # of the graph it was made for
    window_bytes: int  # of parameters that a window of gathers and reductions reads at least
    optimizer: str | float = "adamw"
    without_rule: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()  # what an argument left at its default meant
    memory: Mapping[str, int] = field(default_factory=dict, repr=False)  # bytes a device at the peak, by kind
    peak_at: str = ""  # where in the step the peak stands
    budget: float = math.inf  # bytes a device; infinite where none was asked for
    # what the search over meshes met: mesh, seconds, bound, peak bytes, why it was refused
    meshes: tuple[tuple[str, float, float, int, str], ...] = ()
    beside_s: float = 0.0  # communication that may move beside compute: of parameters and their gradients
    hidden_s: float = 0.0  # and the part of it that compute hides
    accumulation: int = 1  # calls in a step, each of a micro-batch of it
    chunks: int = 1  # in which the loss head runs
    kernels: tuple[str, ...] = ()  # families of kernels that may take the place of ops
    microbatches: int = 1  # turns in which the batch of a call passes
    sources: Mapping[str, float] = field(default_factory=dict)  # seconds of the step by where they are from
    compiled: bool = False  # are the seconds those of code that torch.compile makes?
    precision: tuple[str, str] | None = None  # dtypes of compute and of the reduction of gradients
    # parameters whose gradients are reduced in each micro-batch, not once at the end
    scattered: frozenset[str] = frozenset()
    # values that are not saved for backward, which recomputes them: those of ops, and of conversions by their names
    recomputed: frozenset[str] = frozenset()
    recompute_s: float = 0.0  # and the part of the step that this takes
    # values of `recomputed` that are made more than once, each with an op: for the backward of what is behind that it
    # is made in passing, and dropped again (see `space/timeline.py`)
    passing: Mapping[str, str] = field(default_factory=dict, repr=False)
    # of a plan that recomputes: what backward needs, by the names of `recomputed`, with its bytes on a device and the
    # seconds of making it
    needed: Mapping[str, tuple[int, float]] = field(default_factory=dict, repr=False)
    first_peak_bytes: int = 0  # of the first step, before the optimizer has states
    # seconds that products take more because their rows are no whole number of 16 bytes, where that was measured
    unaligned: Mapping[str, float] = field(default_factory=dict, repr=False)
    # ops without a rule, and the line under which each ran right when it was tried
    suspected: tuple[tuple[str, str], ...] = ()
    # searches that were stopped before their end, after work that was counted: the gap says what they left open
    stopped: tuple[str, ...] = ()
    search: SearchedSpace | None = field(default=None, repr=False, compare=False)

    check_graph: ClassVar[GraphCheck | None] = None  # given by autopar.api, which can trace a model
    write_report: ClassVar[Callable[..., Path] | None] = None  # given by autopar.report

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", MappingProxyType(dict(self.decisions)))
        object.__setattr__(self, "parameter_bytes", MappingProxyType(dict(self.parameter_bytes)))
        object.__setattr__(self, "memory", MappingProxyType(dict(self.memory)))
        object.__setattr__(self, "needed", MappingProxyType(dict(self.needed)))

    def __reduce__(self) -> Any:  # a plan travels between ranks as data
        return Plan.from_dict, (self.to_dict(),)

    def __hash__(self) -> int:
        return hash((self.mesh, self.digest, self.step_time_s))

    @property
    def gap(self) -> float:
        """The share of the step time by which a better plan may be faster."""
        return (self.step_time_s - self.lower_bound_s) / self.step_time_s if self.step_time_s else 0.0

    @property
    def step_interval_s(self) -> tuple[float, float]:
        """Seconds between which nine measured steps of ten lie, by where the predicted ones are from."""
        low, high = spread(self.sources)
        return self.step_time_s * low, self.step_time_s * high

    @property
    def parameters(self) -> dict[str, Sharding]:
        """The storage sharding of each parameter."""
        return {name: values(d.flows()) for name, d in self.decisions.items() if d.kind == "parameter"}

    @property
    def peak_bytes(self) -> int:
        """The most that the fullest device holds during a step."""
        return sum(self.memory.values())

    # -- text

    def __str__(self) -> str:
        """The plan at one look, in 15 lines of 100 columns."""
        return summary.summary_of(self)

    def __repr__(self) -> str:
        fits = f", peak_bytes={self.peak_bytes:,}" if self.memory else ""
        return f"Plan(mesh={self.mesh}, step_time_s={self.step_time_s:.6g}, gap={self.gap:.2%}{fits})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape_html(str(self))}</pre>"

    def table(self) -> str:
        """All that the plan decides: parameters, ops, conversions and what backward needs, equal layers in one row."""
        return text.table_of(self)

    def beside(self) -> tuple[Beside, ...]:
        """The same model on the same mesh under dp, zero3 and megatron, whatever memory they take.

        As `explain`, it needs the space: it is for the process that planned. `print(plan)` names them from then on.
        """
        return self._searched("beside").beside()

    def explain(self, pattern: str) -> str:
        """The choices of the sites whose name begins with a pattern, their conversions, and their best rivals.

        A rival is named with the seconds of the best plan that has it. The space that tells them is there in the
        process that planned, until `autoparallelize` takes the plan.
        """
        return text.explained(self, pattern)

    def line(self) -> tuple[list[str], dict[str, list[int]]]:
        """The times of a step by name, and the bytes that a device holds at each, by kind.

        As `explain`, it needs the space.
        """
        return self._searched("line").line()

    def timeline(self) -> StepTimeline:
        """The predicted step, event by event: `.save(path)` writes a trace for Perfetto.

        Beside a torch.profiler.profile of a step of its program, `.save(path, profile)` has both, and
        `.compare(profile)` the errors by kind of op. As `explain`, it needs the space.
        """
        kinds = {name: decision.op for name, decision in self.decisions.items() if decision.kind == "op"}
        return StepTimeline(tuple(self._searched("timeline").events()), kinds)

    def report(self, path: str | Path, budgets: int = 0) -> Path:
        """Write a page about the plan, one file that needs no network: open it in a browser.

        Where the space is there it shows memory over the step, prices and rivals, and with `budgets` as many of them
        against the step time.
        """
        if Plan.write_report is None:
            raise BadPlan("a report is written by autopar.report", advice="import autopar.api")
        return Plan.write_report(self, path, budgets)

    def curve(self, budgets: int | Sequence[int] = 20) -> Curve:
        """The fastest step under one memory budget after the other, all from one search.

        Printed, it is a table.

        `budgets` are bytes a device, or how many between the lowest peak that was found and that of the fastest plan.
        A plan for one of them is looked at more closely, and may take turns that this plan does not. As `explain`, it
        needs the space.
        """
        return self._searched("curve").curve(_budgets_of(budgets))

    def _searched(self, call: str) -> SearchedSpace:
        """The space that the plan was chosen from, for a call of this name; a letter where it is gone."""
        if self.search is None or self.search.is_over:
            raise BadPlan("the space that this plan was chosen from is gone", advice=f"autopar.plan(...).{call}()")
        return self.search

    def diff(self, other: Plan) -> str:
        """The sites that differ, this plan first."""
        if not isinstance(other, Plan):
            raise BadPlan(f"{other!r} is no plan to compare with")
        return text.difference(self, other)

    # -- another plan from this one

    def constraints(self, *patterns: str) -> dict[str, str]:
        """The decisions for parameters and inputs that a pattern names, as `constraints=` of another plan.

        Pin some, search the rest.
        """
        found = {}
        for name, d in self.decisions.items():
            is_named = any(fnmatchcase(name, pattern) for pattern in patterns or ("*",))
            if d.kind == "parameter" and is_named:
                policy = "regathered" if name in self.regathered else "kept"
                reduced = "each" if name in self.scattered else "end"
                stored = values(d.flows()).text(self.mesh.axes)
                found[escape(name)] = f"{stored}; {self._use_of(name, stored)}; {policy}; {reduced}"
            elif d.kind == "input" and is_named:
                found[escape(name)] = self._use_of(name, values(d.flows()).text(self.mesh.axes))
        return found

    def _use_of(self, name: str, stored: str) -> str:
        """The one sharding in which all uses want a value, or `*`."""
        arrives = {c.value[1].text(self.mesh.axes) for c in self.conversions if c.source == name}
        is_shared = any(c.source == f"{name}:shared" for c in self.conversions)
        # several uses may want several things; and a cast hands a parameter on under another name
        if self.decisions[name].kind == "parameter" and (self.precision or is_shared):
            arrives |= {"*", stored}
        if not arrives:
            return stored
        return arrives.pop() if len(arrives) == 1 else "*"

    # -- files

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return archive.written(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote, or a letter where it is none.

        Whether it is a plan of some model is for `validate` to say.
        """
        plan = Plan(**archive.fields_of(data))
        archive.refuse_contradictions(plan)
        return plan

    def save(self, path: str | Path) -> None:
        """Write JSON: data only."""
        archive.write(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that `save` wrote."""
        return Plan.from_dict(archive.read(path))

    def validate(
        self,
        model: torch.nn.Module,
        meta_inputs: Any = None,
        loss: Callable[..., Any] | None = None,
        assume: Any = None,
        outputs: str | Sequence[str] = "auto",
    ) -> None:
        """Raise a letter unless the plan's parameters are the model's.

        And, given the inputs it was made for, unless all of it is one of the plans of the model: what autoparallelize
        checks of a plan it is given.
        """
        if not hasattr(model, "named_parameters"):
            raise BadPlan(f"{model!r} is no model")
        archive.refuse_contradictions(self)
        _check_parameters(self, dict(model.named_parameters(remove_duplicate=False)))
        if meta_inputs is not None:
            if Plan.check_graph is None:
                raise BadPlan("a plan is held against inputs by the compiler", advice="import autopar.api")
            Plan.check_graph(self, model, meta_inputs, loss, assume, outputs)


def _check_parameters(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raise a letter unless these parameters have the plan's sizes, and can lie as it says."""
    sizes = {name: p.numel() * p.element_size() for name, p in given.items()}
    stored = plan.parameters
    for name, nbytes in plan.parameter_bytes.items():
        if sizes.get(name) != nbytes:
            raise BadPlan(
                f"the plan was made for another model: parameter {name}",
                seen=f"{nbytes} bytes in the plan, {sizes.get(name, 'none')} in the model",
                advice="plan again",
            )
        if Layout.of(tuple(given[name].shape), stored[name], plan.mesh) is None:
            raise BadPlan(
                f"the plan stores {name} as {stored[name].text(plan.mesh.axes)}, and it cannot lie so on mesh "
                f"{plan.mesh}",
                seen=f"a parameter of shape {list(given[name].shape)}",
                advice="plan again",
            )


def _budgets_of(given: Any) -> int | list[int]:
    """The budgets of a curve, or how many; a letter where they are neither."""
    each = list(given) if isinstance(given, Sequence) else [given]
    is_bytes = not isinstance(given, Sequence) and isinstance(given, int) and given > _MOST_BUDGETS
    if is_bytes or not each or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in each):
        advice = f"budgets=[{given}]" if is_bytes else "budgets=20, or budgets=[16 * 2**30, 8 * 2**30]"
        raise BadBudget(f"budgets={given!r} are no budgets of a curve", advice=advice)
    return each if isinstance(given, Sequence) else int(given)
